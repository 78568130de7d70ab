"""What readers saw of a kill, as rows and as figures that are held against their goals. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.recovery.readers import Reader
from bench.report import Column, Ratio

COLUMNS = (Column("show", "what was killed"), Column("what", "figure"), Column("value", "value", 1))

Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class RecoverySample:
    """What one show found."""

    rows: list[Row]
    goals: list[Ratio]


@dataclass(frozen=True, slots=True)
class Stall:
    """The longest answers of the API process and of a bare server, and the longest of the API process less those of the
    bare server at that moment; while readers recovered, and before that. Infinity where one did not come."""

    api_ms: float
    control_ms: float
    own_ms: float
    before_api_ms: float
    before_control_ms: float
    before_own_ms: float


def of_worker(readers: Sequence[Reader], killed: float, lease_s: float, stall: Stall) -> RecoverySample:
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
    return RecoverySample(
        rows,
        [
            Ratio.held(
                "recovery.silence", what=f"{show}: silence beyond the lease, s", value=_beyond(longest, lease_s)
            ),
            _stood_still(show, stall, "recovery.stall"),
            *_whole(show, readers),
        ],
    )


def of_api(readers: Sequence[Reader], killed: float, stall: Stall) -> RecoverySample:
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
    goal = Ratio.held("recovery.resumed", what=f"{show}: until all have gone on, s", value=last)
    return RecoverySample(rows, [goal, _stood_still(show, stall, None), *_whole(show, readers)])


def _beyond(silence: float | None, lease_s: float) -> float | None:
    return None if silence is None else max(0.0, silence - lease_s)


def _stood_still(show: str, stall: Stall, goal: str | None) -> Ratio:
    what = f"{show}: stall of the API process beside a bare server, ms"
    return Ratio.held(goal, what=what, value=_finite(stall.own_ms))


def _whole(show: str, readers: Sequence[Reader]) -> list[Ratio]:
    """No reader may have lost anything."""
    counts = {**_wrong(readers), "readers without every token once": sum(not reader.is_exact for reader in readers)}
    return [Ratio(what=f"{show}: {what}", value=count, at_most=0, digits=0) for what, count in counts.items()]


def _finite(milliseconds: float) -> float | None:
    """None for an answer that did not come: JSON knows no infinity."""
    return milliseconds if math.isfinite(milliseconds) else None


def _stalls(stall: Stall) -> dict[str, float | None]:
    return {
        "longest answer of the API process, ms": _finite(stall.api_ms),
        "of a bare server beside it, ms": _finite(stall.control_ms),
        "of the API process less the bare server's at that moment, ms": _finite(stall.own_ms),
        "of the API process before the kill, ms": _finite(stall.before_api_ms),
        "of the bare server before the kill, ms": _finite(stall.before_control_ms),
    }


def _wrong(readers: Sequence[Reader]) -> dict[str, float | None]:
    return {
        "readers told to begin anew": sum(reader.resets for reader in readers),
        "answers that did not complete": sum(reader.ended != "completed" for reader in readers),
    }


def _rows(show: str, figures: dict[str, float | None]) -> list[Row]:
    return [{"show": show, "what": what, "value": value} for what, value in figures.items()]
