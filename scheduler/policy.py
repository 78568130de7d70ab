"""How many workers a model should have, and why. Pure: no clock, no wire, no memory but the state handed back.

Up at once, by the jobs that wait beyond what the workers can take; down one worker at a time, each after a quiet
while. What a worker can take is its slots, or less where jobs were seen to wait although slots were free (a full KV
cache does that); remembering this is what keeps a constant load from rocking the number of workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

PATIENCE_MS = 2_000
"""A job that has waited longer is not just about to be claimed: the slots that look free are not to be had."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the settings allow for one model."""

    min: int
    max: int
    backlog_per_worker: int
    """Waiting jobs that justify one more worker."""
    idle_s: float
    """How long a worker must have been one too many before it is given back."""

    def clamp(self, workers: int) -> int:
        return max(self.min, min(self.max, workers))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One model as seen at one moment."""

    model: str
    waiting: Mapping[str, int] = field(default_factory=dict)
    """Jobs by priority."""
    oldest_ms: Mapping[str, int] = field(default_factory=dict)
    """Age of the oldest waiting job by priority."""
    running: int = 0
    """Jobs that workers hold."""
    workers_ready: int = 0
    workers_starting: int = 0
    slots: int = 0
    """Of all ready workers together."""

    @property
    def backlog(self) -> int:
        return sum(self.waiting.values())

    @property
    def oldest(self) -> int:
        """Milliseconds."""
        return max(self.oldest_ms.values(), default=0)

    @property
    def stuck(self) -> bool:
        """Jobs wait although the workers had time to take them."""
        return self.backlog > 0 and self.oldest >= PATIENCE_MS


@dataclass(frozen=True, slots=True)
class State:
    """What the next decision must know of the last one."""

    want: int
    spare_since: float | None = None
    """Since when fewer workers would do, in the seconds of `now`."""
    capacity: int | None = None
    """Jobs one worker was seen to hold while others waited; None: not seen yet."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The number of workers a model should have, and the sentence that explains it."""

    model: str
    want: int
    reason: str
    state: State


def decide(snapshot: Snapshot, limits: Limits, state: State | None, now: float) -> Decision:
    """The number of workers this model should have at `now` (seconds of any clock that only goes forward).

    `state` is the last decision's; None at first, which takes over the workers there are.
    """
    if state is None:
        state = State(snapshot.workers_ready + snapshot.workers_starting)
    state = replace(state, capacity=_capacity(snapshot, state.capacity))
    have = limits.clamp(state.want)
    need = limits.clamp(_needed(snapshot, limits, state, have))
    if need < have == state.want:
        return _spare(snapshot, limits, state, need, now)
    if need > have:
        reason = _why_up(snapshot, limits, have)
    elif have != state.want:
        reason = f"the limits are {limits.min} to {limits.max}"
    else:
        reason = _why_stay(snapshot, limits, have)
    return _decision(snapshot, max(need, have), reason, replace(state, spare_since=None))


def _spare(snapshot: Snapshot, limits: Limits, state: State, need: int, now: float) -> Decision:
    """Fewer would do: keep all of them for the quiet time, then give one back and begin again."""
    since = now if state.spare_since is None else state.spare_since
    quiet = now - since
    if quiet < limits.idle_s:
        reason = f"{need} would do, for {quiet:.0f} s of {limits.idle_s:g} s"
        return _decision(snapshot, state.want, reason, replace(state, spare_since=since))
    reason = f"{need} would do for {limits.idle_s:g} s: one is given back"
    return _decision(snapshot, state.want - 1, reason, replace(state, spare_since=now))


def _decision(snapshot: Snapshot, want: int, reason: str, state: State) -> Decision:
    return Decision(snapshot.model, want, reason, replace(state, want=want))


def _needed(snapshot: Snapshot, limits: Limits, state: State, have: int) -> int:
    """Workers kept busy by what runs or is about to, plus those the rest of the backlog justifies; at least one for
    any work at all."""
    soon = _about_to_run(snapshot)
    busy = _busy(snapshot, state, have, snapshot.running + soon)
    need = busy + (snapshot.backlog - soon) // limits.backlog_per_worker
    return max(need, 1) if snapshot.backlog or snapshot.running else need


def _about_to_run(snapshot: Snapshot) -> int:
    """Waiting jobs that free slots will take in a moment; none once jobs have waited long in spite of such slots."""
    if snapshot.stuck:
        return 0
    return min(snapshot.backlog, max(0, snapshot.slots - snapshot.running))


def _busy(snapshot: Snapshot, state: State, have: int, jobs: int) -> int:
    """Workers that so many jobs would fill. Never more than `have`: prefetched jobs are no reason to grow."""
    if not jobs:
        return 0
    if not snapshot.workers_ready or not snapshot.slots:
        return have  # somebody runs them and cannot be seen: no time to shrink
    each = max(1, snapshot.slots // snapshot.workers_ready)
    if state.capacity is not None:
        each = min(each, state.capacity)
    return min(have, -(-jobs // each))


def _capacity(snapshot: Snapshot, known: int | None) -> int | None:
    """What one worker holds when it can hold no more; corrected upwards whenever one is seen to hold more."""
    if not snapshot.workers_ready or not snapshot.running:
        return known
    seen = max(1, snapshot.running // snapshot.workers_ready)
    if snapshot.stuck:
        return seen
    return None if known is None else max(known, seen)


def _why_up(snapshot: Snapshot, limits: Limits, have: int) -> str:
    waiting = f"{snapshot.backlog} waiting (oldest {snapshot.oldest / 1000:.1f} s)"
    if have == 0:
        return f"{waiting} and no worker" if snapshot.backlog else f"{snapshot.running} running and no worker wanted"
    return f"{waiting}: one more worker per {limits.backlog_per_worker}, at most {limits.max}"


def _why_stay(snapshot: Snapshot, limits: Limits, have: int) -> str:
    if not snapshot.backlog and not snapshot.running:
        return f"idle, {have} kept ready" if have else "idle, asleep until the first job"
    if snapshot.backlog and have == limits.max:
        return f"{snapshot.backlog} waiting, and {have} is the most allowed"
    return f"{snapshot.running} running and {snapshot.backlog} waiting are work for {have}"
