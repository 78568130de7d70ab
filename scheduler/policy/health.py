"""Straggler detector: cordons workers that are slower than their peers, or whose jobs fail.

After MegaScale: it compares a worker's step time with its peers', by the median and the median absolute deviation.
Larger batches take longer, so each step time is first divided by the model's usual step time for that batch size. The
only worker of a model is never judged, because it has no peers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import median

from streaming.fleet.process import Cordoned, Process

WINDOW_S = 8.0
"""Length of one measurement window."""
MIN_STEPS = 3
"""Steps in a window; with fewer it is extended."""
MAX_DEVIATIONS = 3.5
"""A window that is more deviations than this from its peers' median is a strike."""
MIN_SLOWDOWN = 2.0
"""A strike also needs this factor over the peers, because a small spread makes large deviations."""
MIN_SPREAD = 0.05
"""Lower bound of the deviation, as a share of the median."""
STRIKES = 5
"""Consecutive strikes for a cordon: under a minute."""
HISTORY = 32
"""Windows of all workers from which the usual step time is computed."""
STALE_S = 3 * WINDOW_S
"""Age beyond which a peer's window is ignored."""
FAILED_JOBS = 5
FAILED_SHARE = 0.5
"""A window with at least this many ended jobs is a strike if this share of them failed."""


@dataclass(frozen=True, slots=True)
class Window:
    """Measurements of one worker in its last full window."""

    at: float
    batch: float
    """Mean tokens of a step."""
    step_s: float
    failed: float = 0.0
    """Share of the ended jobs that failed."""


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One observed worker: its report at the start of the current window, its last window and its strikes."""

    began: float
    worker: Process
    window: Window | None = None
    strikes: int = 0


@dataclass(frozen=True, slots=True)
class PoolHealth:
    """Health state of all workers of a model."""

    records: Mapping[str, WorkerRecord] = field(default_factory=dict)
    history: tuple[tuple[float, float], ...] = ()
    """(batch, seconds) of the steps in windows without a strike."""
    usual: tuple[float, float] = (1.0, 0.0)
    """See `usual_step`."""
    fitted: float | None = None
    """When `usual` was computed."""
    cordons: tuple[Cordoned, ...] = ()


def judge(known: PoolHealth, workers: Iterable[Process], now: float) -> PoolHealth:
    """Close full windows, give strikes, and cordon a worker after STRIKES consecutive ones.

    At most a quarter of the workers, but at least one, may be cordoned at a time: when all are slow, the cause is
    elsewhere. A cordon ends with its worker.
    """
    workers = [worker for worker in workers if worker.state != "starting"]
    records = {worker.worker_id: _followed(known.records.get(worker.worker_id), worker, now) for worker in workers}
    windows = {name: record.window for name, record in records.items() if record.window is not None}
    closed = {name: window for name, window in windows.items() if window.at == now}
    history, usual, fitted = known.history, known.usual, known.fitted
    if history and (fitted is None or now - fitted >= WINDOW_S):
        usual, fitted = usual_step(history), now
    cordons = tuple(cordon for cordon in known.cordons if cordon.worker in records)
    room = max(1, len(workers) // 4) - len(cordons)
    cordoned = {cordon.worker for cordon in cordons}
    for name, window in closed.items():
        why = _why(name, records, usual, now)
        strikes = records[name].strikes + 1 if why else 0
        records[name] = replace(records[name], strikes=strikes)
        if not why and window.batch:
            history = (*history, (window.batch, window.step_s))[-HISTORY:]
        if room > 0 and name not in cordoned and strikes >= STRIKES:
            cordons = (*cordons, Cordoned(name, f"{why}, {STRIKES} times in a row"))
            room -= 1
    return PoolHealth(records, history, usual, fitted, cordons)


def _followed(record: WorkerRecord | None, worker: Process, now: float) -> WorkerRecord:
    before = record.worker if record is not None else worker
    if record is None or worker.steps < before.steps:
        return WorkerRecord(now, worker)
    steps, (jobs, failed), (jobs_before, failed_before) = worker.steps - before.steps, _ended(worker), _ended(before)
    ended = jobs - jobs_before
    if now - record.began < WINDOW_S or (steps < MIN_STEPS and ended < FAILED_JOBS):
        return record
    took = (worker.step_s - before.step_s) / steps if steps else 0.0
    batch = (worker.step_tokens - before.step_tokens) / steps if steps else 0.0
    share = (failed - failed_before) / ended if ended >= FAILED_JOBS else 0.0
    return WorkerRecord(now, worker, Window(now, batch, took, share), record.strikes)


def _ended(worker: Process) -> tuple[int, int]:
    """Jobs that the worker has ended, and those of them that failed."""
    served = worker.served.values()
    return sum(each.jobs for each in served), sum(each.failed for each in served)


def _why(name: str, records: Mapping[str, WorkerRecord], usual: tuple[float, float], now: float) -> str:
    """Why a worker's last window is a strike, compared with its peers'; "" if it is not."""
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
    spread = max(median(abs(ratio - middle) for ratio in ratios), MIN_SPREAD * middle)
    ratio = _ratio(mine, usual)
    if (ratio - middle) / spread > MAX_DEVIATIONS and ratio >= MIN_SLOWDOWN * middle:
        return f"its steps take {ratio / middle:.1f} times its peers' ({mine.step_s * 1000:.0f} ms)"
    return ""


def _ratio(window: Window, usual: tuple[float, float]) -> float:
    expected = usual[0] + usual[1] * window.batch
    return window.step_s / expected if expected > 0 else 1.0


def usual_step(history: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of step seconds = a + b * batch, by the median of all slopes (Theil and Sen), which tolerates a quarter of
    outliers. b is never negative."""
    if not history:
        return 1.0, 0.0
    slopes = [(t2 - t1) / (b2 - b1) for (b1, t1), (b2, t2) in combinations(history, 2) if abs(b2 - b1) >= 1]
    slope = max(0.0, median(slopes)) if slopes else 0.0
    return median(step - slope * batch for batch, step in history), slope
