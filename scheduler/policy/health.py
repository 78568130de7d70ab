"""Which workers are slower than they should be, or fail: a straggler holds up every job it is given.

After MegaScale: the time of a worker's steps against its peers', by the median and the median absolute deviation. Steps
of a fuller batch take longer, so each is first held against what the model's steps of that batch size usually take.
A model with a single worker is never judged: there is nobody to compare it with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import median

from scheduler.policy.snapshot import WorkerLoad

WINDOW_S = 8.0
"""Of one measurement."""
LEAST_STEPS = 3
"""In a window, else it goes on."""
Z = 3.5
"""Deviations from the peers' median beyond which a window is a strike."""
LEAST_RATIO = 2.0
"""And so many times slower than the peers: small spreads make large deviations."""
LEAST_SPREAD = 0.05
"""Deviation that is always granted."""
STRIKES = 5
"""In a row, for a cordon: under a minute."""
HISTORY = 32
"""Windows of all workers from which the usual step is known."""
STALE_S = 3 * WINDOW_S
"""A peer's window is older: it says nothing of now."""
FAILED_JOBS = 5
FAILED_SHARE = 0.5
"""So many jobs of a window, and such a share of them, must have failed for a strike."""


@dataclass(frozen=True, slots=True)
class CordonDecision:
    """A worker that is to take no more jobs, finish what it has, and be replaced."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Window:
    """What one worker did in its last full window."""

    at: float
    batch: float
    """Tokens of a step."""
    step_s: float
    failed: float = 0.0
    """Share of the jobs ended."""


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One worker under watch: its counters at the beginning of the window under way, and what came before."""

    began: float
    steps: int
    step_s: float
    tokens: int
    jobs: int
    failed: int
    window: Window | None = None
    strikes: int = 0


@dataclass(frozen=True, slots=True)
class PoolHealth:
    """What is known of all workers of a model."""

    records: Mapping[str, WorkerRecord] = field(default_factory=dict)
    history: tuple[tuple[float, float], ...] = ()
    """(batch, seconds) of steps of workers that were not struck."""
    usual: tuple[float, float] = (1.0, 0.0)
    """See `usual_step`."""
    fitted: float | None = None
    """When `usual` was worked out."""
    cordons: tuple[CordonDecision, ...] = ()


def judge(known: PoolHealth, workers: Iterable[WorkerLoad], now: float) -> PoolHealth:
    """Close the windows that are full and strike the slow; after enough strikes in a row a worker is cordoned.

    At most a quarter of the workers, and at least one, may be under cordon at once: when all are slow, the cause is
    elsewhere. A cordon ends with its worker.
    """
    workers = [worker for worker in workers if worker.state != "starting"]
    records = {worker.id: _followed(known.records.get(worker.id), worker, now) for worker in workers}
    closed = [name for name, record in records.items() if record.window is not None and record.window.at == now]
    history, usual, fitted = known.history, known.usual, known.fitted
    if history and (fitted is None or now - fitted >= WINDOW_S):
        usual, fitted = usual_step(history), now
    for name in closed:
        struck = _why(name, records, usual, now)
        if struck:
            records[name] = replace(records[name], strikes=records[name].strikes + 1)
        else:
            window = records[name].window
            assert window is not None
            records[name] = replace(records[name], strikes=0)
            history = (*history, (window.batch, window.step_s))[-HISTORY:] if window.batch else history
    cordons = tuple(cordon for cordon in known.cordons if cordon.worker in records)
    room = max(1, len(workers) // 4) - len(cordons)
    cordoned = {cordon.worker for cordon in cordons}
    for name in closed:
        if room > 0 and name not in cordoned and records[name].strikes >= STRIKES:
            cordons = (*cordons, CordonDecision(name, f"{_why(name, records, usual, now)}, {STRIKES} times in a row"))
            room -= 1
    return PoolHealth(records, history, usual, fitted, cordons)


def _followed(record: WorkerRecord | None, worker: WorkerLoad, now: float) -> WorkerRecord:
    jobs = sum(served.jobs for served in worker.served.values())
    failed = sum(served.failed for served in worker.served.values())
    if record is None or worker.steps < record.steps:
        return WorkerRecord(now, worker.steps, worker.step_s, worker.step_tokens, jobs, failed)
    steps, ended = worker.steps - record.steps, jobs - record.jobs
    if now - record.began < WINDOW_S or (steps < LEAST_STEPS and ended < FAILED_JOBS):
        return record
    took = (worker.step_s - record.step_s) / steps if steps else 0.0
    batch = (worker.step_tokens - record.tokens) / steps if steps else 0.0
    share = (failed - record.failed) / ended if ended >= FAILED_JOBS else 0.0
    window = Window(now, batch, took, share)
    return WorkerRecord(now, worker.steps, worker.step_s, worker.step_tokens, jobs, failed, window, record.strikes)


def _why(name: str, records: Mapping[str, WorkerRecord], usual: tuple[float, float], now: float) -> str:
    """What is wrong with a worker's last window, held against its peers'; "" if nothing is."""
    mine = records[name].window
    peers = [
        record.window
        for other, record in records.items()
        if other != name and record.window is not None and now - record.window.at <= STALE_S
    ]
    if mine is None or not peers:
        return ""
    if mine.failed >= FAILED_SHARE and median(peer.failed for peer in peers) < FAILED_SHARE:
        return f"{mine.failed:.0%} of its jobs fail"
    ratios = [_ratio(peer, usual) for peer in peers if peer.step_s > 0]
    if not mine.step_s or not ratios:
        return ""
    middle = median(ratios)
    spread = max(median(abs(ratio - middle) for ratio in ratios), LEAST_SPREAD * middle)
    ratio = _ratio(mine, usual)
    if (ratio - middle) / spread > Z and ratio >= LEAST_RATIO * middle:
        return f"its steps take {ratio / middle:.1f} times its peers' ({mine.step_s * 1000:.0f} ms)"
    return ""


def _ratio(window: Window, usual: tuple[float, float]) -> float:
    expected = usual[0] + usual[1] * window.batch
    return window.step_s / expected if expected > 0 else 1.0


def usual_step(history: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of step seconds = a + b * batch, by the median of all slopes (Theil and Sen): a few outliers, even a
    quarter of all, do not move it. b is never negative."""
    if not history:
        return 1.0, 0.0
    slopes = [(t2 - t1) / (b2 - b1) for (b1, t1), (b2, t2) in combinations(history, 2) if abs(b2 - b1) >= 1]
    slope = max(0.0, median(slopes)) if slopes else 0.0
    return median(step - slope * batch for batch, step in history), slope
