"""JSON in and out: timestamps that every reader of ISO-8601 takes."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from queen_trio.http.codec import parse_timestamp, timestamp


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (datetime(2026, 2, 3, 4, 5, 6, 7, tzinfo=UTC), "2026-02-03T04:05:06.000007Z"),
        (datetime(2026, 2, 3, tzinfo=UTC), "2026-02-03T00:00:00.000000Z"),
        (datetime(57, 1, 2, tzinfo=UTC), "0057-01-02T00:00:00.000000Z"),
        (datetime.max.replace(tzinfo=UTC), "9999-12-31T23:59:59.999999Z"),
    ],
)
def test_a_timestamp_has_four_two_two_and_six_digits(moment: datetime, text: str) -> None:
    assert timestamp(moment) == text
    assert parse_timestamp(text, "from") == moment


def test_no_moment_has_no_timestamp() -> None:
    assert timestamp(None) is None
