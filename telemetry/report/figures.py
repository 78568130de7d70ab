"""Figures of a report: counts, percentiles, parts, energy and run times of all requests of a window and of each group.

Every figure can be computed from the raw records by its definition here; docs/records.md repeats them.

Run times are idealized and denoised, after HELM: how long requests would take alone, and what sharing cost them. The
run time of a request alone is `overhead + per_prompt_token * p + per_token * (o - 1)` for p prompt tokens that were not
cached and o output tokens. The coefficients are fitted, by least squares, to requests that ran with no other beside
them, or with as few as there are.

- Denoised: alone on the worker that ran it, from that worker's own coefficients.
- Idealized: alone on the fastest worker of its model, so that workers, and models, can be compared.
- Contention: observed minus denoised. Waiting for a worker or inside the engine is one part of it, the other is
  generating more slowly beside others.

Energy: every worker samples all GPUs of its machine, so each GPU's readings are merged and counted once. A time between
two readings is idle if no worker of that machine made a step or ran a text in it. What was not idle belongs to the
tenants, in proportion to the tokens that were generated for them; the idle rest belongs to nobody. The parts sum to the
whole.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from statistics import fmean

import msgspec

from telemetry.latency import EGRESS_FIRST, PART_NAMES
from telemetry.records.reader import GROUP_OF, Evidence, ReportedRequest
from telemetry.records.schema import REFUSED, SampleRecord


class GpuFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU."""

    gpu: str
    """Its UUID."""
    seconds: float
    """From its first reading to its last."""
    joules: float
    idle_joules: float
    """Of these, while no worker of its machine worked."""
    watts: float
    busy: float | None
    """Share of 1: the mean of the driver's readings; None: it tells none."""


class EnergyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All GPUs."""

    joules: float
    idle_joules: float
    joules_per_request: float | None
    """Of every request that became a job; all energy, the idle part included, as in the next."""
    joules_per_token: float | None
    """Of every generated token."""
    tenants: Mapping[str, float]
    """Joules by tenant, without the idle part."""
    gpus: Sequence[GpuFigures]


class Distribution(msgspec.Struct, frozen=True):
    """Values in milliseconds; percentiles are values that occurred (nearest rank)."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class GroupFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a group of requests. Times are milliseconds."""

    name: str
    requests: int
    states: Mapping[str, int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    wait: Distribution | None
    """Of every request that was accepted."""
    ttft: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    """Of completed requests."""
    parts: Mapping[str, float]
    """The sum of each part over the completed requests."""
    egress_first: Distribution | None = None
    """From the engine's first token to the client: beside decode, so it is no part of the sum. Of streamed answers."""
    preempted: int = 0
    lost: int = 0


class ProcessFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the samples of one process say of the window."""

    process: str
    role: str
    model: str
    seconds: float
    """Between its first and last sample."""
    cpu_s: float
    max_rss_bytes: int
    max_lag_ms: float
    mean_running: float | None
    slots: int
    dropped: int


class WindowUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What the requests cost. None: not known."""

    seconds: float
    """From the beginning of the first request to the end of the last."""
    tokens: int
    """Generated."""
    tokens_per_s: float | None
    cpu_s: float | None
    """Of Penstock's processes, without the store."""
    tokens_per_core_s: float | None
    gateway_cpu_s_per_1000: float | None
    """CPU time of the API processes for a thousand requests."""
    joules: float | None
    tokens_per_joule: float | None
    energy: EnergyFigures | None = None
    """None without a GPU that tells its energy."""
    slots_in_use: float | None = None
    """Share of 1 of the workers' places that ran a text, over their samples."""
    cost: float | None
    """Hours of workers times cost_per_hour of their model, in its unit."""
    tokens_per_cost: float | None
    shared: bool = False
    """These requests are some of those that the processes served: CPU, energy and cost are of all of them, so what some
    of them took, and every ratio of it, is not known."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of a window."""

    whole: GroupFigures
    models: Sequence[GroupFigures]
    lanes: Sequence[GroupFigures]
    tenants: Sequence[GroupFigures]
    hours: Sequence[GroupFigures]
    processes: Sequence[ProcessFigures]
    usage: WindowUsage


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank: the smallest value that at least `share` of all values do not exceed. `ordered` is not empty."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """None if there are no values."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    ranks = (percentile(ordered, share) for share in (0.5, 0.9, 0.99, 1.0))
    return Distribution(len(ordered), math.fsum(ordered) / len(ordered), *ranks)


def group_of(name: str, requests: Sequence[ReportedRequest]) -> GroupFigures:
    """Figures of these requests."""
    done = [each for each in requests if each.completed]
    parts: dict[str, int] = dict.fromkeys(PART_NAMES, 0)
    first_ways: list[float | None] = []
    for each in done:
        spent_us = each.split.parts
        for part in PART_NAMES:
            parts[part] += max(0, spent_us[part] or 0)
        way = spent_us[EGRESS_FIRST.name]
        first_ways.append(None if way is None else max(0, way) / 1000)
    records = [each.record for each in requests]
    return GroupFigures(
        name=name,
        requests=len(requests),
        states=dict(Counter(record.state for record in records).most_common()),
        prompt_tokens=sum(record.prompt_tokens for record in records),
        cached_tokens=sum(record.cached_tokens for record in records),
        completion_tokens=sum(record.completion_tokens for record in records),
        wait=distribution(each.wait_ms for each in requests),
        ttft=distribution(each.ttft_ms for each in done),
        itl=distribution(each.itl_ms for each in done),
        e2e=distribution(each.e2e_ms for each in done),
        parts={part: spent / 1000 for part, spent in parts.items()},
        egress_first=distribution(first_ways),
        preempted=sum(record.preempted for record in records),
        lost=sum(record.lost for record in records),
    )


def grouped(
    requests: Iterable[ReportedRequest], key: Callable[[ReportedRequest], str]
) -> dict[str, list[ReportedRequest]]:
    """The requests by a key."""
    found: defaultdict[str, list[ReportedRequest]] = defaultdict(list)
    for each in requests:
        found[key(each)].append(each)
    return found


def groups_of(
    requests: Iterable[ReportedRequest], key: Callable[[ReportedRequest], str], *, by_name: bool = False
) -> list[GroupFigures]:
    """The groups of a key, the largest first, or by name; requests without one (refused ones) are in none."""
    groups = [group_of(name, each) for name, each in grouped(requests, key).items() if name]
    return sorted(groups, key=lambda group: group.name if by_name else (-group.requests, group.name))


def hour_of(request: ReportedRequest) -> str:
    """The hour (UTC) in which a request ended."""
    return f"{datetime.fromtimestamp(request.record.ended_us / 1e6, UTC):%Y-%m-%d %H:00}"


def group_shares(figures: GroupFigures) -> dict[str, float]:
    """The share of each group of parts (GROUPS) in the time of the completed requests; empty if there was none."""
    total = sum(figures.parts.values())
    shares: Counter[str] = Counter()
    for part, spent in figures.parts.items():
        shares[GROUP_OF[part]] += spent  # type: ignore[assignment]
    return {name: spent / total for name, spent in shares.items()} if total else {}


def process_of(samples: Sequence[SampleRecord]) -> ProcessFigures:
    """Figures of one process."""
    first, last = samples[0], samples[-1]
    return ProcessFigures(
        process=last.process,
        role=last.role,
        model=last.model,
        seconds=(last.at_us - first.at_us) / 1e6,
        cpu_s=last.cpu_s - first.cpu_s,
        max_rss_bytes=max(sample.rss_bytes for sample in samples),
        max_lag_ms=max(sample.lag_ms for sample in samples),
        mean_running=sum(sample.running for sample in samples) / len(samples) if last.slots else None,
        slots=last.slots,
        dropped=last.dropped - first.dropped,
    )


def span_s(requests: Iterable[ReportedRequest]) -> float:
    """Seconds from the beginning of the first request to the end of the last; 0 without any."""
    records = [each.record for each in requests]
    began = [record.received_us or record.accepted_us or record.ended_us for record in records]
    return (max(record.ended_us for record in records) - min(began)) / 1e6 if records else 0.0


def usage_of(
    evidence: Evidence,
    processes: Sequence[ProcessFigures],
    prices: Mapping[str, float],
    energy: EnergyFigures | None,
    *,
    shared: bool = False,
) -> WindowUsage:
    """What the requests cost. `prices`: cost of one worker in an hour, by model. `shared`: others were served too."""
    records = [each.record for each in evidence.requests]
    tokens = sum(record.completion_tokens for record in records)
    seconds = span_s(evidence.requests)
    cpu_s = sum(each.cpu_s for each in processes) if processes else None
    gateway = [each.cpu_s for each in processes if each.role == "api"]
    joules = energy.joules if energy is not None else None
    workers = [each for each in processes if each.role == "worker"]
    cost = sum(each.seconds / 3600 * prices.get(each.model, 0.0) for each in workers) or None

    def per(amount: float | None, *, own: bool = not shared) -> float | None:
        return tokens / amount if amount and tokens and own else None

    return WindowUsage(
        seconds=seconds,
        tokens=tokens,
        tokens_per_s=per(seconds, own=True),
        cpu_s=cpu_s,
        tokens_per_core_s=per(cpu_s),
        gateway_cpu_s_per_1000=1000 * sum(gateway) / len(records) if gateway and records and not shared else None,
        joules=joules,
        tokens_per_joule=per(joules),
        energy=energy,
        slots_in_use=_slots_in_use(workers),
        cost=cost,
        tokens_per_cost=per(cost),
        shared=shared,
    )


def _slots_in_use(workers: Sequence[ProcessFigures]) -> float | None:
    slots = sum(each.slots * each.seconds for each in workers)
    used = sum((each.mean_running or 0.0) * each.seconds for each in workers)
    return used / slots if slots else None


def figures_of(
    evidence: Evidence, prices: Mapping[str, float], energy: EnergyFigures | None = None, *, shared: bool = False
) -> Figures:
    """All figures of a window. `energy`: of all its requests, also where `evidence` has only some of them; `shared`:
    it has only some."""
    requests = evidence.requests
    processes = sorted(map(process_of, evidence.samples.values()), key=lambda each: (each.role, each.process))
    return Figures(
        whole=group_of("all", requests),
        models=groups_of(requests, lambda each: each.record.model),
        lanes=groups_of(requests, lambda each: each.record.lane),
        tenants=groups_of(requests, lambda each: each.record.tenant),
        hours=groups_of(requests, hour_of, by_name=True),
        processes=processes,
        usage=usage_of(evidence, processes, prices, energy, shared=shared),
    )


def energy_of(evidence: Evidence) -> EnergyFigures | None:
    """The energy of a window; None if no GPU has two readings."""
    readings: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    busy: defaultdict[str, list[float]] = defaultdict(list)
    work: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for samples in evidence.samples.values():
        for sample in samples:
            for gpu, joules in sample.gpus.items():
                readings[gpu].append((sample.at_us, joules))
            for gpu, share in sample.gpu_busy.items():
                busy[gpu].append(share)
        for gpu in {gpu for sample in samples for gpu in sample.gpus}:
            work[gpu] += _working(samples)
    gpus = [
        _of_gpu(gpu, sorted(each), busy[gpu], _merged(work[gpu]))
        for gpu, each in sorted(readings.items())
        if len(each) > 1
    ]
    if not gpus:
        return None
    joules, idle = sum(each.joules for each in gpus), sum(each.idle_joules for each in gpus)
    tokens: defaultdict[str, int] = defaultdict(int)
    for request in evidence.requests:
        tokens[request.record.tenant] += request.record.completion_tokens
    total, jobs = sum(tokens.values()), sum(each.record.state != REFUSED for each in evidence.requests)
    return EnergyFigures(
        joules=joules,
        idle_joules=idle,
        joules_per_request=joules / jobs if jobs else None,
        joules_per_token=joules / total if total else None,
        tenants={name: (joules - idle) * count / total for name, count in sorted(tokens.items()) if count},
        gpus=gpus,
    )


def _working(samples: Sequence[SampleRecord]) -> list[tuple[int, int]]:
    """The times between samples in which a worker made a step or ran a text."""
    return [
        (before.at_us, after.at_us)
        for before, after in pairwise(samples)
        if after.steps > before.steps or before.running or after.running
    ]


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of these times, in order, without overlaps."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _of_gpu(
    gpu: str, readings: Sequence[tuple[int, float]], busy: Sequence[float], work: Sequence[tuple[int, int]]
) -> GpuFigures:
    begins, joules, idle = [begin for begin, _ in work], 0.0, 0.0
    for (since, before), (until, after) in pairwise(readings):
        spent = max(0.0, after - before)  # a restarted driver counts anew
        joules += spent
        last = bisect_right(begins, until - 1) - 1  # the last time of work that begins before this one ends
        if last < 0 or work[last][1] <= since:
            idle += spent
    seconds = (readings[-1][0] - readings[0][0]) / 1e6
    return GpuFigures(
        gpu=gpu,
        seconds=seconds,
        joules=joules,
        idle_joules=idle,
        watts=joules / seconds if seconds else 0.0,
        busy=sum(busy) / len(busy) if busy else None,
    )


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


def fit(points: Sequence[tuple[int, int, float]]) -> RunTime:
    """Least squares over (prompt tokens, output tokens, milliseconds). A length that never varies, or only together
    with the other one, has no coefficient of its own. Coefficients are not negative."""
    mean_p, mean_o, mean_t = (fmean(column) for column in zip(*points, strict=True))
    rows = [(p - mean_p, o - mean_o, t - mean_t) for p, o, t in points]
    pp, oo, po = sum(p * p for p, _, _ in rows), sum(o * o for _, o, _ in rows), sum(p * o for p, o, _ in rows)
    pt, ot = sum(p * t for p, _, t in rows), sum(o * t for _, o, t in rows)
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
    fits = {name: fit([(p.prompt, p.output, (p.end - p.begin) / 1000) for p in own]) for name, own in used.items()}

    def mean(run_time: RunTime) -> float:
        return fmean(run_time.of(point.prompt, point.output) for point in points)

    fastest = min(fits, key=lambda name: mean(fits[name]))
    alone = [
        fits.get(name, fits[fastest]).of(point.prompt, point.output) for name, own in workers.items() for point in own
    ]
    observed = fmean(point.end - point.accepted for point in points) / 1000
    waiting = fmean(point.begin - point.accepted for point in points) / 1000
    denoised = fmean(alone)
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
