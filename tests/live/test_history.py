"""The checker of histories sees what it is there to see."""

from __future__ import annotations

import pytest

from tests.live.history import GROUPS, LEASE_SECONDS, Delivery, History

NEVER = float("inf")


def history(*deliveries: Delivery, queued: int = 3) -> History:
    """One partition of 0, 1, 2; the first group lived to see this, the others all of it."""
    seen = History("http://nobody", "q")
    seen.queued["p"] = list(range(queued))
    for group in GROUPS:
        seen.deliveries[group, "p"] = [Delivery(n, f"l{n}", n, n + 0.5) for n in range(queued)]
    seen.deliveries[GROUPS[0], "p"] = list(deliveries)
    return seen


def test_once_each_in_order_is_fine() -> None:
    history(
        Delivery(0, "a", 1, 2), Delivery(1, "a", 1, 2), Delivery(2, "b", 2.5, 3)
    ).check(redeliveries=False)  # fmt: skip


def test_again_after_the_lease_is_fine_where_it_may_happen() -> None:
    later = 1 + LEASE_SECONDS
    again = history(
        Delivery(0, "a", 1, NEVER),
        *(Delivery(n, "b", later, later) for n in range(3)),
    )
    again.check(redeliveries=True)
    with pytest.raises(AssertionError, match="after"):
        again.check(redeliveries=False)


@pytest.mark.parametrize(
    "deliveries",
    [
        [Delivery(0, "a", 1, 2), Delivery(1, "a", 1, 2)],
        [Delivery(0, "a", 1, 2), Delivery(2, "b", 3, 4), Delivery(1, "c", 5, 6)],
        [*(Delivery(n, "a", 1, 2) for n in range(4))],
        [*(Delivery(n, "a", 1, 2) for n in range(3)), Delivery(0, "b", 30, 31)],
        [Delivery(0, "a", 1, NEVER), *(Delivery(n, "b", 1.5, 2) for n in range(3))],
        [Delivery(0, "a", 1, 2), *(Delivery(n, "b", 1.5, 3) for n in (1, 2))],
    ],
    ids=["lost", "disordered", "invented", "again after its ack", "stolen lease", "two leases"],
)
def test_what_must_not_happen_is_noticed(deliveries: list[Delivery]) -> None:
    with pytest.raises(AssertionError):
        history(*deliveries).check(redeliveries=True)
