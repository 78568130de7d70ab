"""What readers saw of a kill, as rows and as figures that are held against their goals. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.recovery.readers import Reader
from bench.report import Column, Ratio

SPARE_S = 3.0
"""What a silence may last beyond the lease of the worker that was killed."""
STALL_MS = 50.0
RESUME_S = 5.0

COLUMNS = (Column("show", "what was killed"), Column("what", "figure"), Column("value", "value", 1))

Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Seen:
    """What one show found."""

    rows: list[Row]
    goals: list[Ratio]


@dataclass(frozen=True, slots=True)
class Stall:
    """The longest answers of the API process and of a bare server while readers recovered, and before that."""

    api_ms: float
    control_ms: float
    before_api_ms: float
    before_control_ms: float

    @property
    def own_ms(self) -> float:
        """What the machine does not explain."""
        return max(0.0, self.api_ms - self.control_ms)


def of_worker(readers: Sequence[Reader], killed: float, lease_s: float, stall: Stall) -> Seen:
    """A worker was killed at that time (monotonic) with all these running."""
    silences = [reader.silence_s(killed) for reader in readers]
    heard = [silence for silence in silences if silence is not None]
    show = f"worker with {len(readers)} running"
    rows = _rows(
        show,
        {
            "longest silence, s": max(heard, default=None),
            "shortest, s": min(heard, default=None),
            **_stalls(stall),
            **_wrong(readers),
        },
    )
    longest = max(heard) if len(heard) == len(readers) else None
    return Seen(
        rows,
        [
            Ratio(what=f"{show}: silence beyond the lease, s", value=_beyond(longest, lease_s), at_most=SPARE_S),
            Ratio(
                what=f"{show}: stall of the API process beside a bare one's, ms", value=stall.own_ms, at_most=STALL_MS
            ),
            _exact(show, readers),
        ],
    )


def of_api(readers: Sequence[Reader], killed: float, stall: Stall) -> Seen:
    """An API process was killed at that time with all these listening, and another one was asked at once."""
    resumed = [next((at - killed for at in reader.came if at > killed), None) for reader in readers]
    on = [each for each in resumed if each is not None]
    show = f"API process with {len(readers)} readers"
    rows = _rows(
        show,
        {
            "until the first has gone on, s": min(on, default=None),
            "until all have gone on, s": max(on, default=None),
            **_stalls(stall),
            **_wrong(readers),
        },
    )
    last = max(on) if len(on) == len(readers) else None
    goal = Ratio(what=f"{show}: until all have gone on, s", value=last, at_most=RESUME_S)
    return Seen(rows, [goal, _exact(show, readers)])


def _beyond(silence: float | None, lease_s: float) -> float | None:
    return None if silence is None else max(0.0, silence - lease_s)


def _exact(show: str, readers: Sequence[Reader]) -> Ratio:
    wrong = sum(not reader.is_exact for reader in readers)
    return Ratio(what=f"{show}: readers without every token once", value=wrong, at_most=0, digits=0)


def _stalls(stall: Stall) -> dict[str, float | None]:
    return {
        "longest answer of the API process, ms": stall.api_ms,
        "of a bare server beside it, ms": stall.control_ms,
        "of the API process before the kill, ms": stall.before_api_ms,
        "of the bare server before the kill, ms": stall.before_control_ms,
    }


def _wrong(readers: Sequence[Reader]) -> dict[str, float | None]:
    return {
        "readers told to begin anew": sum(reader.resets for reader in readers),
        "answers that did not complete": sum(reader.ended != "completed" for reader in readers),
    }


def _rows(show: str, figures: dict[str, float | None]) -> list[Row]:
    return [{"show": show, "what": what, "value": value} for what, value in figures.items()]
