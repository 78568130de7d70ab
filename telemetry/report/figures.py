"""Figures of a report: counts, percentiles and parts of all requests of a window and of each group of them.

Every figure can be computed from the raw records by its definition here; docs/records.md repeats them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from telemetry.latency import EGRESS_FIRST
from telemetry.records.reader import GROUP_OF, PART_NAMES, Evidence, ReportedRequest
from telemetry.records.schema import SampleRecord
from telemetry.report.energy import EnergyFigures


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
    mean = math.fsum(ordered) / len(ordered)
    return Distribution(
        len(ordered),
        mean,
        percentile(ordered, 0.5),
        percentile(ordered, 0.9),
        percentile(ordered, 0.99),
        ordered[-1],
    )


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
