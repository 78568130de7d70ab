"""Findings of a report: where the time of requests went, and what to change first, in words.

Pure. Each finding has the figures that it follows from. Findings come in the order of what they could save, in
request-seconds: the summed time of the requests that they concern. docs/records.md has all conditions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from penstock.text import counted, duration
from telemetry.latency import GROUPS
from telemetry.records.reader import Evidence, ReportedRequest
from telemetry.report.figures import Figures, GroupFigures, ProcessFigures, group_shares, groups_of, percentile, span_s

MIN_REQUESTS = 5
"""Fewer say nothing of a worker or a lane."""
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
LIMITED = "See docs/api.md for the code; raise the limit that it names if the requests should be served."
LANES = ("interactive", "standard", "batch")
"""From the highest to the lowest."""
VERDICTS = {
    "engine": "generating",
    "queue": "waiting for a place in an engine",
    "gateway": "on the path around the engine",
    "recovery": "lost to retries",
}
WAITS = ("queue", "engine_wait")


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """One finding."""

    kind: str
    """The key of its words in WORDS."""
    title: str
    reason: str
    """The figures that it follows from."""
    change: str
    """What to change first."""
    model: str = ""
    """The model that it is about; "" where it is about all."""
    saves_s: float = 0.0
    """Request-seconds that it concerns."""


class Words(NamedTuple):
    """What a kind of finding says, with its figures in braces."""

    title: str
    reason: str
    change: str
    explains: Collection[str] = ()
    """The parts of a request's time of which it says why they take so long."""


WORDS: Mapping[str, Words] = {
    "slow_worker": Words(
        "{worker} is slow",
        "It takes {pace:.1f} ms per token where the other workers of {model} take {usual:.1f} ms (medians; {number} "
        "requests).",
        "Look at its machine (other programs, temperature, clock), or replace it: penstock logs --process {worker}. "
        "The scheduler avoids slow workers if it may start others.",
        ("prefill",),
    ),
    "starved_lane": Words(
        "Lane {lane} of {model} starves",
        "One in ten of its requests waits {tail_s:.1f} s or longer for a worker; in lane {best} that is {best_s:.2f} "
        "s{more}.",
        "Add workers for {model} (penstock scale set), move part of lane {best} to a lower lane, or give lane {lane} "
        "its own pool (shapes).",
        WAITS,
    ),
    "gateway_stall": Words(
        "{process} stood still",
        "Its event loop was late by up to {lag:.0f} ms{lives}, and all its streams with it; {share:.0f} % of the time "
        "of requests went to the path around the engine.",
        "Give it more CPU, start more API processes (api.processes), or find what holds it up: its log has a line for "
        "each stall above a second (penstock logs --process {process}).",
        GROUPS["gateway"],
    ),
    "slow_gateway": Words(
        "The gateway holds requests up",
        "{share:.0f} % of the time of requests, {mean:.0f} ms of each, went to the path around the engine, most of it "
        "{where} ({part}).",
        "Give the API processes and the store more CPU, or start more of them (api.processes).",
    ),
    "full_pool": Words(
        "The pool of {model} is full",
        "{share:.0f} % of the time of its requests was waiting{slots}.",
        "Raise models.{model}.max_workers or the slots of its engine, or refuse earlier (lane limits).",
        WAITS,
    ),
    "idle_pool": Words(
        "Requests of {model} wait beside free slots",
        "{share:.0f} % of the time of its requests was waiting, with only {used:.0f} % of its slots in use on average.",
        "Load came in bursts, or workers started late: raise min_workers, or look at penstock scale log.",
        WAITS,
    ),
    "long_prompts": Words(
        "Long prompts hold the engine up",
        "{share:.0f} % of the engine's time came before the first token; one prompt in ten has {tail:.0f} tokens or "
        "more, the median {middle:.0f}.",
        "Keep common beginnings of prompts equal, so that engines reuse their cache, or serve long prompts from a pool "
        "of their own (shapes).",
        ("prefill",),
    ),
    "refused": Words(
        "{share:.1f} % of the requests were refused",
        "{number} of {total}; most often with {code} ({times}).",
        "docs/api.md says what the code means. No limit is involved: mend the requests of that client.",
    ),
    "failed": Words(
        "{share:.1f} % of the requests failed",
        "{number} of {total}; most often with {code} ({times}).",
        "penstock jobs ls --status failed shows them; penstock dlq ls those whose workers died.",
    ),
    "expired": Words(
        "{share:.1f} % of the requests expired",
        "{number} of {total}; most often with {code} ({times}).",
        "Give them more time (queue.deadline_ms, queue.max_queue_ms), or add workers.",
    ),
    "lost_workers": Words(
        "Workers died under {requests}",
        "{attempts} lost, in all {lost_s:.1f} s.",
        "penstock logs --process WORKER shows why; penstock doctor names jobs that kill workers.",
        ("retries",),
    ),
    "lost_records": Words(
        "{dropped} records are missing",
        "Their processes could not write them: their disk was full, or slow.",
        "penstock doctor; until then the figures here are too low.",
    ),
    # Of a large part of the time that none of these explains.
    "waiting": Words(
        "Requests waited", "{share:.0f} % of the time of requests was waiting, {mean} of each{few}.", "{change}"
    ),
    "retries": Words(
        "Requests began again",
        "{share:.0f} % of the time of requests was waiting or lost to retries, {mean} of each, most of it to attempts "
        "that did not end their jobs: {ends}.",
        "{change}",
    ),
    "short_requests": Words(
        "Requests are so short that the path around the engine shows",
        "{share:.0f} % of their time, but only {mean} of each.",
        "Nothing, if that is fast enough: this time does not grow with the answer. For more requests per second, start "
        "more API processes (api.processes), or send several prompts in one request.",
    ),
    "prompts": Words(
        "The engine reads more than it writes",
        "{share:.0f} % of the engine's time came before the first token: a prompt has {prompt:.0f} tokens, an answer "
        "{answer:.0f} (medians); {cached:.0f} % of the prompt tokens were cached.",
        "Shorten the prompts, or keep their common beginnings equal, so that engines reuse their cache; if neither can "
        "be, the engine's prefill is what to speed up.",
    ),
}

PLACES = {"ingress": "before the job is queued", "gate": "between claim and engine"}
MORE_WORKERS = (
    "Raise min_workers if the first requests met no worker, else max_workers or the engine's slots; penstock scale log "
    "says which worker came when."
)
MORE_SLOTS = "Raise the slots of the engine: it took requests that it could not run yet."
RETRIES = {
    "lost": "penstock logs --process WORKER shows why a worker died; penstock doctor names jobs that kill workers.",
    "handed back": "Workers hand jobs back when they are stopped or their server is away: raise their drain time, or "
    "see penstock ps for the server.",
    "preempted": "Jobs of lane batch were put back for jobs of lane interactive. Add workers, or send less to lane "
    "interactive.",
}
"""What to change first, by how most attempts ended."""


def _found(name: str, saves_s: float = 0.0, model: str = "", kind: str = "", /, **figures: object) -> Advice:
    """A finding with the words of this name, which is also its kind, unless another is given."""
    title, reason, change = (text.format(model=model, **figures) for text in WORDS[name][:3])
    return Advice(kind=kind or name, title=title, reason=reason, change=change, model=model, saves_s=saves_s)


def advise(figures: Figures, evidence: Evidence, everyone: Sequence[ReportedRequest] | None = None) -> list[Advice]:
    """All findings, the weightiest first. `everyone`: all requests that held slots in the window, where `evidence` has
    only some of them."""
    requests = evidence.requests
    found = [
        *_slow_workers(requests),
        *_starved_lanes(requests),
        *_gateway(figures),
        *_pools(figures, requests, requests if everyone is None else everyone),
        *_long_prompts(figures, requests),
        *_unhealthy(figures, requests),
    ]
    if (dropped := sum(each.dropped for each in figures.processes)) > 0:
        found.append(_found("lost_records", dropped=dropped))
    starved = {each.model for each in found if each.kind == "starved_lane"}
    found = [  # in a model with a starved lane, the lane waits because of the order, not because all do
        each
        for each in found
        if each.kind != "full_pool" or each.model not in starved or _all_lanes_wait(each.model, requests)
    ]
    found += _unexplained(figures.models, requests, found)
    return sorted(found, key=lambda each: -each.saves_s)


def verdict(figures: Figures) -> str:
    """Where the time went, in one sentence."""
    shares = group_shares(figures.whole)
    if not shares:
        return "No request was completed in this window."
    ordered = sorted(shares.items(), key=lambda each: -each[1])
    parts = [f"{100 * share:.0f} % {VERDICTS[name]}" for name, share in ordered if share or name != "recovery"]
    parts[0] = parts[0].replace(" % ", " % of their time ", 1)
    return f"Requests spent {', '.join(parts[:-1])} and {parts[-1]}."


def _by(
    requests: Iterable[ReportedRequest], key: Callable[[ReportedRequest], str]
) -> dict[str, dict[str, list[ReportedRequest]]]:
    """The requests by model and then by this key."""
    found: defaultdict[str, dict[str, list[ReportedRequest]]] = defaultdict(dict)
    for each in requests:
        found[each.record.model].setdefault(key(each), []).append(each)
    return found


def _slow_workers(requests: Sequence[ReportedRequest]) -> Iterator[Advice]:
    """Workers whose engine takes longer than those of the other workers of their model."""
    answered = [each for each in requests if each.completed and each.itl_ms is not None]
    for model, workers in _by(answered, lambda each: each.record.by).items():
        paces = {
            name: median(each.itl_ms or 0.0 for each in own)
            for name, own in workers.items()
            if len(own) >= MIN_REQUESTS
        }
        for name, pace in paces.items():
            others = [other for worker, other in paces.items() if worker != name]
            usual = median(others) if others else 0.0
            if usual and pace >= SLOW_FACTOR * usual:
                own = workers[name]
                lost_s = sum(max(0.0, (each.itl_ms or 0.0) - usual) * each.own_tokens for each in own) / 1000
                yield _found("slow_worker", lost_s, model, worker=name, pace=pace, usual=usual, number=len(own))


def _starved_lanes(requests: Sequence[ReportedRequest]) -> Iterator[Advice]:
    """Lanes whose jobs wait much longer than those of a higher lane of their model. One that waits longer than a lower
    lane does not wait because of the order."""
    queued = [each for each in requests if each.wait_ms is not None and each.record.lane]
    for model, lanes in _by(queued, lambda each: each.record.lane).items():
        known = [lane for lane in LANES if len(lanes.get(lane, ())) >= MIN_REQUESTS]
        waits = {lane: sorted(each.wait_ms or 0.0 for each in lanes[lane]) for lane in known}
        tails = {lane: percentile(each, 0.9) for lane, each in waits.items()}
        for number, lane in enumerate(known[1:], 1):
            best = min(known[:number], key=lambda each: tails[each])
            if tails[lane] >= max(STARVED_WAIT_MS, STARVED_FACTOR * max(tails[best], 1.0)):
                expired = sum(each.record.state == "expired" for each in lanes[lane])
                more = f", and {expired} of its requests expired" if expired else ""
                times = {"tail_s": tails[lane] / 1000, "best_s": tails[best] / 1000}
                saves_s = sum(waits[lane]) / 1000
                yield _found("starved_lane", saves_s, model, lane=lane, best=best, more=more, **times)


def _all_lanes_wait(model: str, requests: Sequence[ReportedRequest]) -> bool:
    """Whether half of the requests of each lane of a model waited so long that one could call it starved."""
    lanes = groups_of([each for each in requests if each.record.model == model], lambda each: each.record.lane)
    return all(lane.wait is not None and lane.wait.p50 >= STARVED_WAIT_MS for lane in lanes)


def _gateway(figures: Figures) -> Iterator[Advice]:
    """API processes whose event loop stood still, or that take a large share of the time."""
    whole, share = figures.whole, group_shares(figures.whole).get("gateway", 0.0)
    spent = {part: whole.parts.get(part, 0.0) for part in GROUPS["gateway"]}
    saves_s, done = sum(spent.values()) / 1000, whole.states.get("completed", 0)
    lags: defaultdict[str, list[float]] = defaultdict(list)
    for each in figures.processes:
        if each.role == "api" and each.max_lag_ms >= STALL_MS:
            lags[each.process].append(each.max_lag_ms)
    total = sum(map(sum, lags.values()))
    for name, own in sorted(lags.items(), key=lambda each: -sum(each[1])):
        lives = f", in {len(own)} of its lives" if len(own) > 1 else ""
        about = {"process": name, "lag": max(own), "lives": lives, "share": 100 * share}
        yield _found("gateway_stall", saves_s * sum(own) / total, **about)
    mean = 1000 * saves_s / done if done else 0.0
    if not lags and share >= GATEWAY_SHARE and mean >= GATEWAY_MS:
        part = max(spent, key=lambda name: spent[name])
        where = PLACES.get(part, "after the last token")
        yield _found("slow_gateway", saves_s, "", "gateway_stall", share=100 * share, mean=mean, where=where, part=part)


def _pools(
    figures: Figures, requests: Sequence[ReportedRequest], everyone: Sequence[ReportedRequest]
) -> Iterator[Advice]:
    """Models whose requests wait: because all their slots are in use, by whomever, or although they are not."""
    for model in figures.models:
        total, waited = sum(model.parts.values()), sum(model.parts.get(part, 0.0) for part in WAITS)
        if not total or waited < WAITING_SHARE * total or model.requests < MIN_REQUESTS:
            continue
        workers = [each for each in figures.processes if each.role == "worker" and each.model == model.name]
        holders = [each for each in everyone if each.record.model == model.name]
        used = _slots_used(holders, workers, span_s(holders))
        waits_s = sum(each.wait_ms or 0.0 for each in requests if each.record.model == model.name) / 1000
        share = 100 * waited / total
        if used is None or used >= BUSY_SHARE:
            slots = sum(each.slots for each in workers)
            said = "" if used is None else f", with {100 * used:.0f} % of {slots} slots in use"
            yield _found("full_pool", waits_s, model.name, share=share, slots=said)
        else:
            yield _found("idle_pool", waits_s, model.name, share=share, used=100 * used)


def _slots_used(requests: Sequence[ReportedRequest], workers: Sequence[ProcessFigures], seconds: float) -> float | None:
    """The share of the workers' slots that requests had, over the time of the requests; None without samples."""
    had = sum(max(0, each.record.last_us - each.record.released_us) for each in requests if each.record.released_us)
    there = sum(each.slots * min(each.seconds, seconds) for each in workers)
    return min(1.0, had / 1e6 / there) if there else None


def _long_prompts(figures: Figures, requests: Sequence[ReportedRequest]) -> Iterator[Advice]:
    """Prefill that takes much of the engine's time, where some prompts are far longer than most."""
    parts = figures.whole.parts
    prefill, engine = parts.get("prefill", 0.0), sum(parts.get(part, 0.0) for part in GROUPS["engine"])
    prompts = sorted(each.record.prompt_tokens for each in requests if each.completed)
    if not engine or len(prompts) < MIN_REQUESTS or prefill < PREFILL_SHARE * engine:
        return
    middle, tail = percentile(prompts, 0.5), percentile(prompts, 0.9)
    if tail >= LONG_FACTOR * max(1, middle):
        yield _found("long_prompts", prefill / 1000, share=100 * prefill / engine, tail=tail, middle=middle)


def _unhealthy(figures: Figures, requests: Sequence[ReportedRequest]) -> Iterator[Advice]:
    """Requests that did not get an answer, and jobs that lost their worker."""
    whole = figures.whole
    least = max(UNHEALTHY_SHARE * whole.requests, 1)
    for state in ("refused", "failed", "expired"):
        own = [each for each in requests if each.record.state == state]
        if len(own) >= least:
            code, times = Counter(each.record.code or "no code" for each in own).most_common(1)[0]
            about = {"number": len(own), "total": whole.requests, "code": code, "times": counted(times, "time")}
            waited_s = sum(each.wait_ms or 0.0 for each in own) / 1000
            finding = _found(state, waited_s, share=100 * len(own) / whole.requests, **about)
            yield msgspec.structs.replace(finding, change=LIMITED) if code in LIMITS else finding
    if whole.lost >= least:
        own = [each for each in requests if each.record.lost]
        lost_s = sum(max(0, each.split.parts["retries"] or 0) for each in own) / 1e6
        about = {"requests": counted(len(own), "request"), "attempts": counted(whole.lost, "attempt")}
        yield _found("lost_workers", lost_s, lost_s=lost_s, **about)


def _unexplained(
    models: Sequence[GroupFigures], requests: Sequence[ReportedRequest], named: Sequence[Advice]
) -> Iterator[Advice]:
    """Words for large parts of the time that none of the findings `named` explains. A finding about one model explains
    nothing of the others."""
    done = [each for each in requests if each.completed]
    total = sum(sum(group.parts.values()) for group in models)
    if not done or not total:
        return
    left: dict[str, dict[str, float]] = {}
    for group in models:
        about = [each.kind for each in named if each.model in ("", group.name)]
        explained = {part for kind in about for part in WORDS[kind].explains}
        left[group.name] = {part: spent for part, spent in group.parts.items() if part not in explained}
    waited = {
        part: sum(parts.get(part, 0.0) for parts in left.values()) for part in (*GROUPS["queue"], *GROUPS["recovery"])
    }
    if sum(waited.values()) >= WAITING_SHARE * total:
        yield _waiting(waited, total, [each for each in done if any(map(left[each.record.model].get, waited))])
    path = sum(parts.get(part, 0.0) for parts in left.values() for part in GROUPS["gateway"])
    if path >= GATEWAY_SHARE * total:
        yield _found("short_requests", share=100 * path / total, mean=duration(path / len(done)))
    yield from _prompts([each for each in done if each.own_tokens > 1 and "prefill" in left[each.record.model]])


def _waiting(waited: Mapping[str, float], total: float, done: Sequence[ReportedRequest]) -> Advice:
    """Of the parts of waiting, in milliseconds, the largest."""
    part, spent = max(waited, key=lambda name: waited[name]), sum(waited.values())
    share, mean = 100 * spent / total, duration(spent / len(done))
    if part == "retries":
        records = [each.record for each in done]
        ends = {
            "lost": sum(record.lost for record in records),
            "handed back": sum(record.handed_back for record in records),
            "preempted": sum(record.preempted for record in records),
        }
        said = ", ".join(f"{number} {name}" for name, number in ends.items() if number) or "none is counted"
        change = RETRIES[max(ends, key=lambda name: ends[name])]
        return _found("retries", spent / 1000, share=share, mean=mean, ends=said, change=change)
    few = f"; only {counted(len(done), 'request')} completed" if len(done) < MIN_REQUESTS else ""
    change = MORE_SLOTS if part == "engine_wait" else MORE_WORKERS
    return _found("waiting", spent / 1000, share=share, mean=mean, few=few, change=change)


def _prompts(answered: Sequence[ReportedRequest]) -> Iterator[Advice]:
    """Prompts that are all alike, and still take much of the engine's time. `answered`: with more than one token."""
    splits = [each.split.parts for each in answered]
    prefill_us = sum(parts["prefill"] or 0 for parts in splits)
    engine_us = prefill_us + sum(parts["decode"] or 0 for parts in splits)
    if len(answered) < MIN_REQUESTS or not engine_us or prefill_us < PREFILL_SHARE * engine_us:
        return
    tokens = sum(each.record.prompt_tokens for each in answered)
    yield _found(
        "prompts",
        prefill_us / 1e6,
        share=100 * prefill_us / engine_us,
        prompt=percentile(sorted(each.record.prompt_tokens for each in answered), 0.5),
        answer=percentile(sorted(each.own_tokens for each in answered), 0.5),
        cached=100 * sum(each.record.cached_tokens for each in answered) / tokens if tokens else 0.0,
    )
