"""The rates in the log: per second since the last line, silent when nothing happened."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from queen_trio.broker.traffic import Traffic
from queen_trio.jobs.rates import Rates

if TYPE_CHECKING:
    from queen_trio.broker import Broker


def test_rates_are_per_second_since_the_last_line() -> None:
    traffic = Traffic()
    parked = SimpleNamespace(statistics=lambda: SimpleNamespace(parked=3))
    broker: Any = SimpleNamespace(traffic=traffic, wakeups=parked)

    async def main() -> list[Any]:
        rates = Rates(cast_broker(broker))
        with capture_logs() as lines:
            await rates.run()
            traffic.count_pushed(["q"], [50])
            await trio.sleep(10)
            await rates.run()
            traffic.take()  # the flush of the metrics must not count twice, nor hide anything
            traffic.count_verdicts(["ccd"])
            await trio.sleep(2)
            await rates.run()
            await trio.sleep(2)
            await rates.run()
        return lines

    lines = trio.run(main, clock=MockClock(autojump_threshold=0))
    assert [line["event"] for line in lines] == ["rates", "rates"]
    assert (lines[0]["pushed"], lines[0]["completed"], lines[0]["parked"]) == (5.0, 0.0, 3)
    assert (lines[1]["pushed"], lines[1]["completed"], lines[1]["dead_lettered"]) == (0.0, 1.0, 0.5)


def cast_broker(broker: Any) -> Broker:
    return broker  # type: ignore[no-any-return]
