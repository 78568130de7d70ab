"""When a schedule's times are, also where the clock is set."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from streaming.batches.cron import Cron

BERLIN = "Europe/Berlin"


def times(expression: str, start: str, count: int = 3, zone: str = "UTC") -> list[str]:
    """The next times, as the zone's clock shows them, with the offset where it is not UTC."""
    cron, at, found = Cron(expression, zone), int(1000 * datetime.fromisoformat(start).timestamp()), list[str]()
    for _ in range(count):
        at = cron.after(at)
        found.append(
            datetime.fromtimestamp(at / 1000, ZoneInfo(zone)).isoformat(timespec="minutes").removesuffix("+00:00")
        )
    return found


@pytest.mark.parametrize(("expression", "start", "expected"), [
    ("0 8 * * *", "2026-12-01T08:00:00Z", ["2026-12-02T08:00", "2026-12-03T08:00", "2026-12-04T08:00"]),
    ("0 8 * * *", "2026-12-01T07:59:59Z", ["2026-12-01T08:00", "2026-12-02T08:00", "2026-12-03T08:00"]),
    ("*/20 * * * *", "2026-12-31T23:30:00Z", ["2026-12-31T23:40", "2027-01-01T00:00", "2027-01-01T00:20"]),
    ("5,10-12/2 3 * * *", "2026-12-01T00:00:00Z", ["2026-12-01T03:05", "2026-12-01T03:10", "2026-12-01T03:12"]),
    ("0 0 29 2 *", "2026-12-01T00:00:00Z", ["2028-02-29T00:00", "2032-02-29T00:00", "2036-02-29T00:00"]),
    ("0 0 * * 1-5", "2026-12-03T12:00:00Z", ["2026-12-04T00:00", "2026-12-07T00:00", "2026-12-08T00:00"]),
    ("0 0 * * 7", "2026-12-01T00:00:00Z", ["2026-12-06T00:00", "2026-12-13T00:00", "2026-12-20T00:00"]),
    ("0 0 1 * 0", "2026-12-01T00:00:00Z", ["2026-12-06T00:00", "2026-12-13T00:00", "2026-12-20T00:00"]),
    ("0 0 8 * 0", "2026-12-01T00:00:00Z", ["2026-12-06T00:00", "2026-12-08T00:00", "2026-12-13T00:00"]),
    ("0 0 31 */2 *", "2026-02-01T00:00:00Z", ["2026-03-31T00:00", "2026-05-31T00:00", "2026-07-31T00:00"]),
    ("0 0 15/10 * *", "2026-12-01T00:00:00Z", ["2026-12-15T00:00", "2026-12-25T00:00", "2027-01-15T00:00"]),
])  # fmt: skip
def test_times_of_an_expression(expression: str, start: str, expected: list[str]) -> None:
    assert times(expression, start) == expected


def test_a_time_that_the_clock_skips_is_as_much_later() -> None:
    """On 2026-03-29 at 02:00 the clock of Berlin shows 03:00."""
    daily = ["2026-03-28T02:30+01:00", "2026-03-29T03:30+02:00", "2026-03-30T02:30+02:00"]
    assert times("30 2 * * *", "2026-03-28T00:00:00Z", zone=BERLIN) == daily
    quarters = ["2026-03-29T01:30+01:00", "2026-03-29T03:00+02:00", "2026-03-29T03:30+02:00", "2026-03-29T04:00+02:00"]
    assert times("*/30 * * * *", "2026-03-29T00:15:00Z", 4, BERLIN) == quarters


def test_a_time_that_comes_twice_counts_once() -> None:
    """On 2026-10-25 at 03:00 the clock of Berlin shows 02:00 again."""
    daily = ["2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"]
    assert times("30 2 * * *", "2026-10-24T12:00:00Z", 2, BERLIN) == daily
    assert times("30 2 * * *", "2026-10-25T01:15:00Z", 1, BERLIN) == daily[1:]


@pytest.mark.parametrize(
    "expression",
    [
        *(
            "",
            "* * * *",
            "* * * * * *",
            "60 * * * *",
            "* 24 * * *",
            "* * 0 * *",
            "* * * 13 *",
            "* * * * 8",
            "*/0 * * * *",
        ),
        *("5-1 * * * *", "a * * * *", "1, * * * *", "-1 * * * *", "@daily", "* * * * mon", "0 0 30 2 *", "1/ * * * *"),
    ],
)
def test_what_is_no_schedule_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"^(must|names)"):
        Cron(expression, "UTC").after(0)


NO_ZONES = ["", "Mars/Olympus", "../../etc/passwd", "/etc/localtime", "x" * 5000, "\0", "localtime", "right/UTC"]


@pytest.mark.parametrize("zone", NO_ZONES)
def test_what_is_no_time_zone_is_refused(zone: str) -> None:
    with pytest.raises(ValueError, match="has no time zone"):
        Cron("* * * * *", zone)
