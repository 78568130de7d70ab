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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from telemetry.records.reader import ReportedRequest

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


@dataclass(slots=True)
class _Point:
    prompt: int
    output: int
    begin: int
    end: int
    accepted: int
    beside: int = 0
    """Others that the same worker ran at some time of this one."""

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
    models: defaultdict[str, defaultdict[str, list[_Point]]] = defaultdict(lambda: defaultdict(list))
    for each in requests:
        record = each.record
        begin = record.scheduled_us or record.released_us
        usable = each.completed and record.attempts == 1 and record.choices == 1 and record.completion_tokens > 0
        if usable and begin and record.last_us > begin:
            prompt, accepted = max(0, record.prompt_tokens - record.cached_tokens), record.accepted_us or begin
            point = _Point(prompt, record.completion_tokens, begin, record.last_us, accepted)
            models[record.model][record.by].append(point)
    enough = {name: own for name, own in models.items() if sum(map(len, own.values())) >= MIN_POINTS}
    return [_of_model(name, own) for name, own in enough.items()]


def _calibrating(points: Sequence[_Point]) -> list[_Point]:
    """Those that ran alone, or else those with the fewest others beside them."""
    alone = [point for point in points if not point.beside]
    if len(alone) >= MIN_POINTS:
        return alone
    ordered = sorted(points, key=lambda point: point.beside)
    return ordered[: max(MIN_POINTS, int(LEAST_SHARED * len(ordered)))]


def _of_model(model: str, workers: Mapping[str, Sequence[_Point]]) -> ModelRunTime:
    for own in workers.values():
        begins, ends = sorted(point.begin for point in own), sorted(point.end for point in own)
        for point in own:
            point.beside = bisect_left(begins, point.end) - bisect_right(ends, point.begin) - 1
    points = [point for own in workers.values() for point in own]
    used = {name: _calibrating(own) for name, own in workers.items() if len(own) >= MIN_POINTS}
    used = used or {"": _calibrating(points)}
    fits = {name: fit([(point.prompt, point.output, point.spent_ms) for point in own]) for name, own in used.items()}

    def mean(run_time: RunTime) -> float:
        return sum(run_time.of(point.prompt, point.output) for point in points) / len(points)

    fastest = min(fits, key=lambda name: mean(fits[name]))
    alone = [
        fits.get(name, fits[fastest]).of(point.prompt, point.output) for name, own in workers.items() for point in own
    ]
    observed = sum(point.end - point.accepted for point in points) / len(points) / 1000
    waiting = sum(point.begin - point.accepted for point in points) / len(points) / 1000
    denoised = sum(alone) / len(points)
    return ModelRunTime(
        model=model,
        requests=len(points),
        fitted=sum(map(len, used.values())),
        beside=max(point.beside for own in used.values() for point in own),
        run_time=fits[fastest],
        fastest=fastest,
        observed=observed,
        idealized=mean(fits[fastest]),
        denoised=denoised,
        waiting=waiting,
        sharing=observed - waiting - denoised,
    )
