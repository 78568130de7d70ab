"""Report: everything that `penstock report` says of a time window: its figures, and what to change first, in words.

Pure but for the reading of the records. Each finding has the figures that it follows from. Findings come in the order
of what they could save, in request-seconds: the summed time of the requests that they concern. docs/records.md has all
conditions.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from penstock.text import counted, duration
from telemetry.latency import GROUPS
from telemetry.records.reader import Evidence, OnRead, ReportedRequest, Skipped, evidence_of, read_records
from telemetry.report import figures as of
from telemetry.report.figures import Figures, GroupFigures, ModelRunTime, ProcessFigures, grouped, percentile

MIN_REQUESTS = 5
"""Fewer say nothing of a worker, a lane or a pool."""
SLOW_FACTOR = 1.5
STARVED_WAIT_MS, STARVED_FACTOR = 500.0, 5.0
WAITING_SHARE, BUSY_SHARE = 0.3, 0.8
"""Of the time of all requests, in the queue and inside the engine; slots in use, from which on a pool is full."""
GATEWAY_SHARE, GATEWAY_MS, STALL_MS = 0.2, 20.0, 250.0
PREFILL_SHARE, LONG_FACTOR = 0.4, 4.0
"""Of the engine's time, before the first token; prompts are uneven if their 90th percentile is so many medians."""
UNHEALTHY_SHARE = 0.01
"""Requests that were refused, failed or expired, or that lost a worker."""

LIMITS = ("queue_full", "deadline_unreachable", "quota_exceeded", "payload_too_large", "no_capacity",
          "too_many_connections", "upstream_busy")  # fmt: skip
"""Codes of requests that would be served if a limit were higher, or with more workers."""
LANES = ("interactive", "standard", "batch")
"""From the highest to the lowest."""
VERDICTS = {
    "engine": "generating",
    "queue": "waiting for a place in an engine",
    "gateway": "on the path around the engine",
    "recovery": "lost to retries",
}
PLACES = {"ingress": "before the job is queued", "gate": "between claim and engine"}
DEATHS = "penstock logs --process WORKER shows why a worker died; penstock doctor names jobs that kill workers."
LIMITED = "See docs/api.md for the code; raise the limit that it names if the requests should be served."
FINDINGS = {
    "slow_worker": ("{name} is slow",
        "Look at its machine (other programs, temperature, clock), or replace it: penstock logs --process {name}. The "
        "scheduler avoids slow workers if it may start others."),
    "gateway_stall": ("{name} stood still",
        "Give it more CPU, start more API processes (api.processes), or find what holds it up: its log has a line for "
        "each stall above a second (penstock logs --process {name})."),
    "gateway_stall.all": ("The gateway holds requests up",
        "Give the API processes and the store more CPU, or start more of them (api.processes)."),
    "short_requests": ("Requests are so short that the path around the engine shows",
        "Nothing, if that is fast enough: this time does not grow with the answer. For more requests per second, start "
        "more API processes (api.processes), or send several prompts in one request."),
    "waiting.queue": ("Requests waited",
        "Raise min_workers if the first requests met no worker, else max_workers or the engine's slots; penstock scale "
        "log says which worker came when."),
    "waiting.engine": ("Requests waited", "Raise the slots of the engine: it took requests that it could not run yet."),
    "idle_pool": ("Requests of {model} wait beside free slots",
        "Load came in bursts, or workers started late: raise min_workers, or look at penstock scale log."),
    "full_pool": ("The pool of {model} is full",
        "Raise models.{model}.max_workers or the slots of its engine, or refuse earlier (lane limits)."),
    "starved_lane": ("Lane {lane} of {model} starves",
        "Add workers for {model} (penstock scale set), move part of lane {best} to a lower lane, or give lane {lane} "
        "its own pool (shapes)."),
    "retries.lost": ("Requests began again", DEATHS),
    "retries.handed back": ("Requests began again",
        "Workers hand jobs back when they are stopped or their server is away: raise their drain time, or see penstock "
        "ps for the server."),
    "retries.preempted": ("Requests began again",
        "Jobs of lane batch were put back for those of lane interactive. Add workers, or send less to that lane."),
    "lost_workers": ("Workers died under {requests}", DEATHS),
    "long_prompts": ("Long prompts hold the engine up",
        "Keep common beginnings of prompts equal, so that engines reuse their cache, or serve long prompts from a pool "
        "of their own (shapes)."),
    "prompts": ("The engine reads more than it writes",
        "Shorten the prompts, or keep their common beginnings equal, so that engines reuse their cache; if neither can "
        "be, the engine's prefill is what to speed up."),
    "refused": ("{share:.1f} % of the requests were refused",
        "docs/api.md says what the code means. No limit is involved: mend the requests of that client."),
    "refused.limit": ("{share:.1f} % of the requests were refused", LIMITED),
    "failed": ("{share:.1f} % of the requests failed",
        "penstock jobs ls --status failed shows them; penstock dlq ls those whose workers died."),
    "failed.limit": ("{share:.1f} % of the requests failed", LIMITED),
    "expired": ("{share:.1f} % of the requests expired",
        "Give them more time (queue.deadline_ms, queue.max_queue_ms), or add workers."),
    "expired.limit": ("{share:.1f} % of the requests expired", LIMITED),
    "lost_records": ("{dropped} records are missing", "penstock doctor; until then the figures here are too low."),
}  # fmt: skip
"""By kind of a finding, and its case behind a point: its title, and what to change first."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """One finding."""

    kind: str
    title: str
    reason: str
    """The figures that it follows from."""
    change: str
    """What to change first."""
    model: str = ""
    """The model that it is about; "" where it is about all."""
    saves_s: float = 0.0
    """Request-seconds that it concerns."""


def _found(case: str, reason: str, saves_s: float, model: str = "", **names: Any) -> Advice:
    """A finding of FINDINGS; `names`: what stands in its texts."""
    title, change = (text.format(model=model, **names) for text in FINDINGS[case])
    kind = case.partition(".")[0]
    return Advice(kind=kind, title=title, reason=reason, change=change, model=model, saves_s=saves_s)


def advise(figures: Figures, evidence: Evidence, everyone: Sequence[ReportedRequest] | None = None) -> list[Advice]:
    """All findings, the weightiest first. `everyone`: all requests that held slots in the window, where `evidence` has
    only some of them."""
    requests = evidence.requests
    everyone = requests if everyone is None else everyone
    slow = list(_slow_workers(requests))
    found = [*slow, *_gateway(figures), *_unhealthy(figures, requests), *_lost_records(figures)]
    for group in figures.models:
        workers = [each for each in figures.processes if each.role == "worker" and each.model == group.name]
        found += _waiting(group, _of_model(requests, group.name), _of_model(everyone, group.name), workers)
    found += _prompts(requests, {each.model for each in slow})
    if any(each.kind == "lost_workers" for each in found):  # that says why requests began again
        found = [each for each in found if each.kind != "retries"]
    return sorted(found, key=lambda each: -each.saves_s)


def verdict(figures: Figures) -> str:
    """Where the time went, in one sentence."""
    shares = of.group_shares(figures.whole)
    if not shares:
        return "No request was completed in this window."
    ordered = sorted(shares.items(), key=lambda each: -each[1])
    parts = [f"{100 * share:.0f} % {VERDICTS[name]}" for name, share in ordered if share or name != "recovery"]
    parts[0] = parts[0].replace(" % ", " % of their time ", 1)
    return f"Requests spent {', '.join(parts[:-1])} and {parts[-1]}."


def _of_model(requests: Iterable[ReportedRequest], model: str) -> list[ReportedRequest]:
    return [each for each in requests if each.record.model == model]


def _wait_s(requests: Iterable[ReportedRequest]) -> float:
    return sum(each.wait_ms or 0.0 for each in requests) / 1000


def _slow_workers(requests: Sequence[ReportedRequest]) -> Iterator[Advice]:
    """Workers whose engine takes longer than those of the other workers of their model."""
    answered = [each for each in requests if each.completed and each.itl_ms is not None]
    for model, own in grouped(answered, lambda each: each.record.model).items():
        workers = grouped(own, lambda each: each.record.by)
        paces = {
            name: median(each.itl_ms or 0.0 for each in theirs)
            for name, theirs in workers.items()
            if len(theirs) >= MIN_REQUESTS
        }
        for name, pace in paces.items():
            others = [other for worker, other in paces.items() if worker != name]
            usual = median(others) if others else 0.0
            if not usual or pace < SLOW_FACTOR * usual:
                continue
            lost_ms = sum(max(0.0, (each.itl_ms or 0.0) - usual) * each.own_tokens for each in workers[name])
            reason = (
                f"It takes {pace:.1f} ms per token where the other workers of {model} take {usual:.1f} ms (medians; "
                f"{len(workers[name])} requests)."
            )
            yield _found("slow_worker", reason, lost_ms / 1000, model, name=name)


def _gateway(figures: Figures) -> Iterator[Advice]:
    """API processes whose event loop stood still, or that take a large share of the time."""
    whole, share = figures.whole, of.group_shares(figures.whole).get("gateway", 0.0)
    spent = {part: whole.parts.get(part, 0.0) for part in GROUPS["gateway"]}
    saves_s, done = sum(spent.values()) / 1000, whole.states.get("completed", 0)
    lags: defaultdict[str, list[float]] = defaultdict(list)
    for each in figures.processes:
        if each.role == "api" and each.max_lag_ms >= STALL_MS:
            lags[each.process].append(each.max_lag_ms)
    total = sum(map(sum, lags.values()))
    for name, own in sorted(lags.items(), key=lambda each: -sum(each[1])):
        lives = f", in {len(own)} of its lives" if len(own) > 1 else ""
        reason = (
            f"Its event loop was late by up to {max(own):.0f} ms{lives}, and all its streams with it; "
            f"{100 * share:.0f} % of the time of requests went to the path around the engine."
        )
        yield _found("gateway_stall", reason, saves_s * sum(own) / total, name=name)
    if lags or share < GATEWAY_SHARE:
        return
    mean_ms, part = 1000 * saves_s / done, max(spent, key=lambda name: spent[name])
    if mean_ms >= GATEWAY_MS:
        reason = (
            f"{100 * share:.0f} % of the time of requests, {mean_ms:.0f} ms of each, went to the path around the "
            f"engine, most of it {PLACES.get(part, 'after the last token')} ({part})."
        )
        yield _found("gateway_stall.all", reason, saves_s)
    else:
        yield _found("short_requests", f"{100 * share:.0f} % of their time, but only {duration(mean_ms)} of each.", 0.0)


def _waiting(
    group: GroupFigures,
    requests: Sequence[ReportedRequest],
    everyone: Sequence[ReportedRequest],
    workers: Sequence[ProcessFigures],
) -> Iterator[Advice]:
    """Why the requests of a model wait: for higher lanes, because all its slots are in use (by `everyone`), although
    they are not, or because of what earlier attempts cost."""
    queued = [each for each in requests if each.wait_ms is not None and each.record.lane]
    lanes = grouped(queued, lambda each: each.record.lane)
    starved = list(_starved_lanes(group.name, lanes))
    yield from starved
    total, retries = sum(group.parts.values()), group.parts["retries"]
    waited, model = sum(group.parts[part] for part in GROUPS["queue"]), group.name
    if not total or waited + retries < WAITING_SHARE * total:
        return
    done = [each for each in requests if each.completed]
    share, mean = f"{100 * (waited + retries) / total:.0f} % of the time", duration((waited + retries) / len(done))
    if waited < WAITING_SHARE * total:
        yield _began_again(model, done, f"{share} of requests was waiting or lost to retries, {mean} of each")
        return
    if len(requests) < MIN_REQUESTS:
        reason = f"{share} of requests was waiting, {mean} of each; only {counted(len(done), 'request')} completed."
        case = "waiting.engine" if group.parts["engine_wait"] > group.parts["queue"] else "waiting.queue"
        yield _found(case, reason, waited / 1000, model)
        return
    used, saves_s = _slots_used(everyone, workers), _wait_s(requests)
    reason = f"{100 * waited / total:.0f} % of the time of its requests was waiting"
    if used is not None and used < BUSY_SHARE:
        reason += f", with only {100 * used:.0f} % of its slots in use on average."
        yield _found("idle_pool", reason, saves_s, model)
    # A lane that starves waits because of the order: the pool is full only if the others wait too.
    elif not starved or all(_median_wait_ms(own) >= STARVED_WAIT_MS for own in lanes.values()):
        slots = sum(each.slots for each in workers)
        reason += "." if used is None else f", with {100 * used:.0f} % of {slots} slots in use."
        yield _found("full_pool", reason, saves_s, model)


def _median_wait_ms(requests: Sequence[ReportedRequest]) -> float:
    return percentile(sorted(each.wait_ms or 0.0 for each in requests), 0.5)


def _starved_lanes(model: str, lanes: Mapping[str, Sequence[ReportedRequest]]) -> Iterator[Advice]:
    """Lanes whose jobs wait much longer than those of a higher lane of their model. One that waits longer than a lower
    lane does not wait because of the order."""
    known = [lane for lane in LANES if len(lanes.get(lane, ())) >= MIN_REQUESTS]
    tails = {lane: percentile(sorted(each.wait_ms or 0.0 for each in lanes[lane]), 0.9) for lane in known}
    for number, lane in enumerate(known[1:], 1):
        best = min(known[:number], key=lambda each: tails[each])
        if tails[lane] < max(STARVED_WAIT_MS, STARVED_FACTOR * max(tails[best], 1.0)):
            continue
        expired = sum(each.record.state == "expired" for each in lanes[lane])
        more = f", and {expired} of its requests expired" if expired else ""
        reason = (
            f"One in ten of its requests waits {tails[lane] / 1000:.1f} s or longer for a worker; in lane {best} that "
            f"is {tails[best] / 1000:.2f} s{more}."
        )
        yield _found("starved_lane", reason, _wait_s(lanes[lane]), model, lane=lane, best=best)


def _began_again(model: str, done: Sequence[ReportedRequest], begin: str) -> Advice:
    """Requests of which earlier attempts took much of the time; `begin` of the sentence that says how much."""
    records = [each.record for each in done]
    ends = {
        "lost": sum(record.lost for record in records),
        "handed back": sum(record.handed_back for record in records),
        "preempted": sum(record.preempted for record in records),
    }
    told = ", ".join(f"{number} {name}" for name, number in ends.items() if number) or "none is counted"
    reason = f"{begin}, most of it to attempts that did not end their jobs: {told}."
    lost_s = sum(max(0, each.split.parts["retries"] or 0) for each in done) / 1e6
    return _found(f"retries.{max(ends, key=ends.__getitem__)}", reason, lost_s, model)


def _slots_used(requests: Sequence[ReportedRequest], workers: Sequence[ProcessFigures]) -> float | None:
    """The share of the workers' slots that requests had, over the time of the requests; None without samples."""
    had = sum(max(0, each.record.last_us - each.record.released_us) for each in requests if each.record.released_us)
    there = sum(each.slots * min(each.seconds, of.span_s(requests)) for each in workers)
    return min(1.0, had / 1e6 / there) if there else None


def _prompts(requests: Sequence[ReportedRequest], slow: Collection[str]) -> Iterator[Advice]:
    """Prefill that takes much of the engine's time. In the models with a slow worker, that is the reason; a request
    without a second token, such as one for embeddings, has nothing but prefill."""
    answered = [each for each in requests if each.completed and each.own_tokens > 1 and each.record.model not in slow]
    splits = [each.split.parts for each in answered]
    prefill_us = sum(parts["prefill"] or 0 for parts in splits)
    engine_us = prefill_us + sum(parts["decode"] or 0 for parts in splits)
    if len(answered) < MIN_REQUESTS or not engine_us or prefill_us < PREFILL_SHARE * engine_us:
        return
    share = f"{100 * prefill_us / engine_us:.0f} % of the engine's time came before the first token"
    prompts = sorted(each.record.prompt_tokens for each in answered)
    middle, tail = percentile(prompts, 0.5), percentile(prompts, 0.9)
    if tail >= LONG_FACTOR * max(1, middle):
        reason = f"{share}; one prompt in ten has {tail:.0f} tokens or more, the median {middle:.0f}."
        yield _found("long_prompts", reason, prefill_us / 1e6)
        return
    answer = percentile(sorted(each.own_tokens for each in answered), 0.5)
    cached = 100 * sum(each.record.cached_tokens for each in answered) / (sum(prompts) or 1)
    reason = (
        f"{share}: a prompt has {middle:.0f} tokens, an answer {answer:.0f} (medians); {cached:.0f} % of the prompt "
        "tokens were cached."
    )
    yield _found("prompts", reason, prefill_us / 1e6)


def _unhealthy(figures: Figures, requests: Sequence[ReportedRequest]) -> Iterator[Advice]:
    """Requests that did not get an answer, and jobs that lost their worker."""
    whole = figures.whole
    least = max(UNHEALTHY_SHARE * whole.requests, 1)
    for state in ("refused", "failed", "expired"):
        own = [each for each in requests if each.record.state == state]
        if len(own) < least:
            continue
        code, times = Counter(each.record.code or "no code" for each in own).most_common(1)[0]
        reason = f"{len(own)} of {whole.requests}; most often with {code} ({counted(times, 'time')})."
        case = f"{state}.limit" if code in LIMITS else state
        yield _found(case, reason, _wait_s(own), share=100 * len(own) / whole.requests)
    if whole.lost >= least:
        own = [each for each in requests if each.record.lost]
        lost_s = sum(max(0, each.split.parts["retries"] or 0) for each in own) / 1e6
        reason = f"{counted(whole.lost, 'attempt')} lost, in all {lost_s:.1f} s."
        yield _found("lost_workers", reason, lost_s, requests=counted(len(own), "request"))


def _lost_records(figures: Figures) -> Iterator[Advice]:
    if (dropped := sum(each.dropped for each in figures.processes)) > 0:
        reason = "Their processes could not write them: their disk was full, or slow."
        yield _found("lost_records", reason, 0.0, dropped=dropped)


@dataclass(frozen=True, slots=True)
class Scope:
    """What a report is about. Times are Unix seconds; from 0 on: whatever there is. An empty name means all."""

    since: float
    until: float
    model: str = ""
    lane: str = ""
    tenant: str = ""

    def holds(self, request: ReportedRequest) -> bool:
        """Whether a request belongs to it."""
        record = request.record
        wanted = ((self.model, record.model), (self.lane, record.lane), (self.tenant, record.tenant))
        return all(not name or name == found for name, found in wanted)


class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a window of records says."""

    since: float
    until: float
    model: str = ""
    lane: str = ""
    tenant: str = ""
    verdict: str
    advice: Sequence[Advice]
    figures: Figures
    run_times: Sequence[ModelRunTime]
    torn_lines: int = 0
    newer_lines: int = 0
    unreadable_files: Sequence[str] = ()
    interrupted: bool = False
    """Whether Ctrl-C ended the reading, so that records are missing."""


def report_of(
    folder: Path, scope: Scope, prices: Mapping[str, float], on_read: OnRead = lambda _done, _total: None
) -> RequestReport:
    """Compute a report. `prices`: cost of one worker in an hour, by model. Raises OSError."""
    skipped = Skipped()
    found = evidence_of(read_records(folder, scope.since, scope.until, skipped, on_read), keep_partial=True)
    evidence = Evidence([each for each in found.requests if scope.holds(each)], found.samples)
    shared = len(evidence.requests) < len(found.requests)
    figures = of.figures_of(evidence, prices, of.energy_of(found), shared=shared)
    last = max((each.record.ended_us / 1e6 for each in evidence.requests), default=min(scope.until, time.time()))
    return RequestReport(
        since=scope.since or last - figures.usage.seconds,
        until=scope.until if scope.since else last,
        model=scope.model,
        lane=scope.lane,
        tenant=scope.tenant,
        verdict=verdict(figures),
        advice=advise(figures, evidence, everyone=found.requests),
        figures=figures,
        run_times=of.run_times(evidence.requests),
        torn_lines=skipped.torn,
        newer_lines=skipped.newer,
        unreadable_files=skipped.unreadable,
        interrupted=found.interrupted,
    )
