"""Times of a cron expression in a time zone."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

BOUNDS = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
"""Of minute, hour, day of the month, month, and day of the week, of which 0 and 7 are Sunday."""
MAX_DAYS = 8 * 366
"""No leap day is further away."""
_PART = re.compile(r"(?:\*|([0-9]{1,2})(?:-([0-9]{1,2}))?)(?:/([0-9]{1,2}))?")


class Cron:
    """Five fields of numbers, ranges, lists and steps. A day fits if either of its two fields does, where both are
    limited. A time that the clock skips is as much later; one that comes twice counts once, the first time. Raises
    ValueError, whose text begins with a verb."""

    def __init__(self, expression: str, timezone: str) -> None:
        words = expression.split()
        if len(words) != len(BOUNDS):
            raise ValueError("must have five fields: minute, hour, day of the month, month, day of the week")
        numbers = [_numbers(word, *bounds) for word, bounds in zip(words, BOUNDS, strict=True)]
        minutes, hours, self._days, self._months, weekdays = numbers
        self._times = [60 * hour + minute for hour in hours for minute in minutes]
        self._weekdays = {day % 7 for day in weekdays}
        self._either = not words[2].startswith("*") and not words[4].startswith("*")
        try:
            if timezone.partition("/")[0] in ("localtime", "posix", "posixrules", "right"):
                raise LookupError  # files of this machine
            self._zone = ZoneInfo(timezone)
        except (LookupError, OSError, ValueError):
            raise ValueError(f"has no time zone {timezone!r}; name one such as Europe/Berlin") from None

    def after(self, ms: int) -> int:
        """The first time after this one; both in Unix milliseconds. Raises ValueError if none comes."""
        day = datetime.fromtimestamp(ms / 1000, self._zone).replace(hour=0, minute=0, second=0, microsecond=0, fold=0)
        for _ in range(MAX_DAYS):
            if self._fits(day):
                times = [int(1000 * (day + timedelta(minutes=at)).timestamp()) for at in self._times]
                if later := [each for each in times if each > ms]:
                    return min(later)
            day += timedelta(days=1)
        raise ValueError("names a day that never comes")

    def _fits(self, day: datetime) -> bool:
        of_month, of_week = day.day in self._days, day.isoweekday() % 7 in self._weekdays
        return day.month in self._months and (of_month or of_week if self._either else of_month and of_week)


def _numbers(text: str, low: int, high: int) -> set[int]:
    """Raises ValueError."""
    found = set[int]()
    for part in text.split(","):
        match = _PART.fullmatch(part)
        first, last, step = match.groups() if match else ("", "", "")
        start = int(first) if first else low
        end = int(last or first) if last or (first and not step) else high
        if match is None or step in ("0", "00") or not low <= start <= end <= high:
            raise ValueError(f"must not have {part!r}: numbers from {low} to {high}, as in 5, 1-5, */15 or 1,3")
        found.update(range(start, end + 1, int(step or 1)))
    return found
