"""Idealized and denoised run time, after HELM: how long requests would take alone, and what sharing cost them.

The run time of a request alone is `overhead + per_prompt_token * p + per_token * (o - 1)` for p prompt tokens that were
not cached and o output tokens. The coefficients are fitted, by least squares, to requests that ran with no other beside
them, or with as few as there are.

- Denoised: alone on the worker that ran it, from that worker's own coefficients.
- Idealized: alone on the fastest worker of its model, so that workers, and models, can be compared.
- Contention: observed minus denoised. Waiting for a worker or inside the engine is one part of it, the other is
  generating more slowly beside others.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from telemetry.report.requests import ReportedRequest

MIN_POINTS = 8
"""Requests to fit a worker's coefficients to; with fewer, those of all its model's workers serve."""
LEAST_SHARED = 0.1
"""Share of the requests that are fitted where fewer than MIN_POINTS ran alone: those with the fewest beside them."""


class RunTime(msgspec.Struct, frozen=True):
    """Coefficients of a run time, in milliseconds."""

    overhead: float
    per_prompt_token: float
    per_token: float

    def of(self, prompt: int, output: int) -> float:
        """The run time of a request alone."""
        return self.overhead + self.per_prompt_token * prompt + self.per_token * max(0, output - 1)


class ModelRunTime(msgspec.Struct, frozen=True, kw_only=True):
    """Run times of one model, means over its requests in milliseconds."""

    model: str
    requests: int
    fitted: int
    """Requests that the coefficients were fitted to."""
    beside: int
    """The most others that ran beside one of these; 0: all of them ran alone."""
    run_time: RunTime
    """Of the fastest worker."""
    fastest: str
    observed: float
    """From acceptance to the last token."""
    idealized: float
    denoised: float
    waiting: float
    """Part of the contention: from acceptance until the engine begins."""
    sharing: float
    """The rest of it."""

    @property
    def contention(self) -> float:
        """What waiting for others and sharing with them cost a request."""
        return self.observed - self.denoised


@dataclass(frozen=True, slots=True)
class _Point:
    worker: str
    prompt: int
    output: int
    begin: int
    end: int
    accepted: int
    beside: int = 0

    @property
    def spent_ms(self) -> float:
        return (self.end - self.begin) / 1000


def fit(points: Sequence[tuple[int, int, float]]) -> RunTime:
    """Least squares over (prompt tokens, output tokens, milliseconds). A length that never varies, or only together
    with the other one, has no coefficient of its own. Coefficients are not negative."""
    count = len(points)
    mean_p, mean_o = sum(p for p, _, _ in points) / count, sum(o for _, o, _ in points) / count
    mean_t = sum(t for _, _, t in points) / count
    pp = sum((p - mean_p) ** 2 for p, _, _ in points)
    oo = sum((o - mean_o) ** 2 for _, o, _ in points)
    po = sum((p - mean_p) * (o - mean_o) for p, o, _ in points)
    pt = sum((p - mean_p) * (t - mean_t) for p, _, t in points)
    ot = sum((o - mean_o) * (t - mean_t) for _, o, t in points)
    det = pp * oo - po * po
    if det > 1e-9 * max(pp * oo, 1.0):
        per_prompt, per_token = (pt * oo - ot * po) / det, (ot * pp - pt * po) / det
    else:
        per_prompt, per_token = (0.0, ot / oo) if oo else (pt / pp if pp else 0.0, 0.0)
    if per_prompt < 0:
        per_prompt, per_token = 0.0, ot / oo if oo else 0.0
    per_token = max(0.0, per_token)
    return RunTime(max(0.0, mean_t - per_prompt * mean_p - per_token * (mean_o - 1)), per_prompt, per_token)


def run_times(requests: Sequence[ReportedRequest]) -> list[ModelRunTime]:
    """Run times of every model that has enough requests: completed in one attempt, with one text."""
    by_model: defaultdict[str, list[_Point]] = defaultdict(list)
    for each in requests:
        record = each.record
        begin = record.scheduled_us or record.released_us
        usable = each.completed and record.attempts == 1 and record.choices == 1 and record.completion_tokens > 0
        if usable and begin and record.last_us > begin:
            prompt = max(0, record.prompt_tokens - record.cached_tokens)
            by_model[record.model].append(
                _Point(record.by, prompt, record.completion_tokens, begin, record.last_us, record.accepted_us)
            )
    return [_of_model(model, _with_beside(points)) for model, points in by_model.items() if len(points) >= MIN_POINTS]


def _with_beside(points: Sequence[_Point]) -> list[_Point]:
    """The points with the number of others that the same worker ran at some time of theirs."""
    by_worker: defaultdict[str, list[_Point]] = defaultdict(list)
    for point in points:
        by_worker[point.worker].append(point)
    found = []
    for each in by_worker.values():
        begins, ends = sorted(point.begin for point in each), sorted(point.end for point in each)
        for point in each:
            beside = bisect_left(begins, point.end) - bisect_right(ends, point.begin) - 1
            found.append(
                _Point(point.worker, point.prompt, point.output, point.begin, point.end, point.accepted, beside)
            )
    return found


def _calibrating(points: Sequence[_Point]) -> list[_Point]:
    """Those that ran alone, or else those with the fewest others beside them."""
    alone = [point for point in points if not point.beside]
    if len(alone) >= MIN_POINTS:
        return alone
    ordered = sorted(points, key=lambda point: point.beside)
    return ordered[: max(MIN_POINTS, int(LEAST_SHARED * len(ordered)))]


def _fitted(points: Sequence[_Point]) -> RunTime:
    return fit([(point.prompt, point.output, point.spent_ms) for point in points])


def _of_model(model: str, points: Sequence[_Point]) -> ModelRunTime:
    by_worker: defaultdict[str, list[_Point]] = defaultdict(list)
    for point in points:
        by_worker[point.worker].append(point)
    used = {name: _calibrating(each) for name, each in by_worker.items() if len(each) >= MIN_POINTS}
    if not used:
        used = {"": _calibrating(points)}
    fits = {name: _fitted(each) for name, each in used.items()}

    def mean_of(run_time: RunTime) -> float:
        return sum(run_time.of(point.prompt, point.output) for point in points) / len(points)

    fastest = min(fits, key=lambda name: mean_of(fits[name]))
    own = [fits.get(point.worker, fits[fastest]).of(point.prompt, point.output) for point in points]
    observed = sum(point.end - (point.accepted or point.begin) for point in points) / len(points) / 1000
    waiting = sum(point.begin - (point.accepted or point.begin) for point in points) / len(points) / 1000
    denoised = sum(own) / len(points)
    return ModelRunTime(
        model=model,
        requests=len(points),
        fitted=sum(map(len, used.values())),
        beside=max(point.beside for each in used.values() for point in each),
        run_time=fits[fastest],
        fastest=fastest,
        observed=observed,
        idealized=mean_of(fits[fastest]),
        denoised=denoised,
        waiting=waiting,
        sharing=observed - waiting - denoised,
    )
