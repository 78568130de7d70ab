"""Advice of a report: where the time of requests went, and what to change first, in words.

`advise` is pure: it judges figures by Thresholds, and each piece of advice holds its reason. A large part of the time
that nothing else explains gets words of its own (`unnamed`). Advice comes in the order of what it could save, in
request-seconds: the summed time of the requests that it concerns.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

from penstock.text import counted
from telemetry.report.figures import Figures, ProcessFigures, group_shares, groups_of, percentile, span_s
from telemetry.report.finding import Advice, Thresholds
from telemetry.report.requests import Evidence, ReportedRequest
from telemetry.report.unnamed import unnamed

LIMITS = ("queue_full", "deadline_unreachable", "quota_exceeded", "payload_too_large", "no_capacity",
          "too_many_connections", "upstream_busy")  # fmt: skip
"""Codes of requests that would be served if a limit were higher, or with more workers."""
LANES = ("interactive", "standard", "batch")
"""From the highest to the lowest."""
LIMITED = "See docs/api.md for the code; raise the limit that it names if the requests should be served."


def advise(
    figures: Figures,
    evidence: Evidence,
    thresholds: Thresholds | None = None,
    everyone: Sequence[ReportedRequest] | None = None,
) -> list[Advice]:
    """All findings, the weightiest first. `everyone`: all requests that held slots in the window, where `evidence` has
    only some of them."""
    limits = thresholds or Thresholds()
    found = [
        *slow_workers(evidence.requests, limits),
        *starved_lanes(evidence.requests, limits),
        *gateway_stalls(figures, evidence.requests, limits),
        *pools(figures, evidence.requests, limits, evidence.requests if everyone is None else everyone),
        *long_prompts(figures, evidence.requests, limits),
        *unhealthy(figures, evidence.requests, limits),
        *lost_records(figures),
    ]
    starved = {each.model for each in found if each.kind == "starved_lane"}
    found = [  # in a model with a starved lane, the lane waits because of the order, not because all do
        each
        for each in found
        if each.kind != "full_pool" or each.model not in starved or _all_lanes_wait(each.model, evidence, limits)
    ]
    found += unnamed(figures.models, evidence.requests, found, limits)
    return sorted(found, key=lambda each: -each.saves_s)


def verdict(figures: Figures) -> str:
    """Where the time went, in one sentence."""
    shares = group_shares(figures.whole)
    if not shares:
        return "No request was completed in this window."
    words = {
        "engine": "generating",
        "queue": "waiting for a place in an engine",
        "gateway": "on the path around the engine",
        "recovery": "lost to retries",
    }
    shown = [each for each in shares.items() if each[1] or each[0] != "recovery"]
    ordered = sorted(shown, key=lambda each: -each[1])
    parts = [f"{100 * share:.0f} % {words[name]}" for name, share in ordered]
    parts[0] = parts[0].replace(" % ", " % of their time ", 1)
    return f"Requests spent {', '.join(parts[:-1])} and {parts[-1]}."


def _all_lanes_wait(model: str, evidence: Evidence, limits: Thresholds) -> bool:
    """Whether half of the requests of each lane of a model waited so long that one could call it starved."""
    own = [each for each in evidence.requests if each.record.model == model]
    lanes = groups_of(own, lambda each: each.record.lane)
    return all(lane.wait is not None and lane.wait.p50 >= limits.starved_wait_ms for lane in lanes)


def slow_workers(requests: Sequence[ReportedRequest], limits: Thresholds) -> Iterator[Advice]:
    """Workers whose engine takes longer than those of the other workers of their model."""
    paces: defaultdict[str, defaultdict[str, list[ReportedRequest]]] = defaultdict(lambda: defaultdict(list))
    for each in requests:
        if each.completed and each.itl_ms is not None:
            paces[each.record.model][each.record.by].append(each)
    for model, workers in paces.items():
        known = {name: each for name, each in workers.items() if len(each) >= limits.min_requests}
        medians = {name: median(each.itl_ms or 0.0 for each in own) for name, own in known.items()}
        for name, own in known.items():
            others = [pace for other, pace in medians.items() if other != name]
            if not others or medians[name] < limits.slow_factor * median(others) or not median(others):
                continue
            usual = median(others)
            lost = sum(max(0.0, (each.itl_ms or 0.0) - usual) * each.own_tokens for each in own) / 1000
            yield Advice(
                kind="slow_worker",
                model=model,
                title=f"{name} is slow",
                reason=(
                    f"It takes {medians[name]:.1f} ms per token where the other workers of {model} take {usual:.1f} ms "
                    f"(medians; {len(own)} requests)."
                ),
                change=(
                    f"Look at its machine (other programs, temperature, clock), or replace it: "
                    f"penstock logs --process {name}. The scheduler avoids slow workers if it may start others."
                ),
                saves_s=lost,
            )


def starved_lanes(requests: Sequence[ReportedRequest], limits: Thresholds) -> Iterator[Advice]:
    """Lanes whose jobs wait much longer than those of a higher lane of their model. One that waits longer than a lower
    lane does not wait because of the order."""
    waits: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in requests:
        if each.wait_ms is not None and each.record.lane:
            waits[each.record.model][each.record.lane].append(each.wait_ms)
    for model, lanes in waits.items():
        known = {lane: sorted(lanes[lane]) for lane in LANES if len(lanes[lane]) >= limits.min_requests}
        tails = {name: percentile(each, 0.9) for name, each in known.items()}
        for name, own in known.items():
            before = [lane for lane in known if LANES.index(lane) < LANES.index(name)]
            if not before or tails[name] < limits.starved_wait_ms:
                continue
            best = min(before, key=lambda lane: tails[lane])
            if tails[name] < limits.starved_factor * max(tails[best], 1.0):
                continue
            expired = sum(
                each.record.state == "expired" and (each.record.model, each.record.lane) == (model, name)
                for each in requests
            )
            more = f", and {expired} of its requests expired" if expired else ""
            yield Advice(
                kind="starved_lane",
                title=f"Lane {name} of {model} starves",
                reason=(
                    f"One in ten of its requests waits {tails[name] / 1000:.1f} s or longer for a worker; in lane "
                    f"{best} that is {tails[best] / 1000:.2f} s{more}."
                ),
                change=(
                    f"Add workers for {model} (penstock scale set), move part of lane {best} to a lower lane, or give "
                    f"lane {name} its own pool (shapes)."
                ),
                model=model,
                saves_s=sum(own) / 1000,
            )


def gateway_stalls(figures: Figures, requests: Sequence[ReportedRequest], limits: Thresholds) -> Iterator[Advice]:
    """API processes whose event loop stood still, or that take a large share of the time."""
    done = [each for each in requests if each.completed]
    whole = figures.whole
    share = group_shares(whole).get("gateway", 0.0)
    spent = {part: whole.parts.get(part, 0.0) for part in ("ingress", "gate", "egress_tail")}
    mean = sum(spent.values()) / len(done) if done else 0.0
    lags: defaultdict[str, list[float]] = defaultdict(list)
    for each in figures.processes:
        if each.role == "api" and each.max_lag_ms >= limits.stall_ms:
            lags[each.process].append(each.max_lag_ms)
    stalled = sorted(lags, key=lambda name: -sum(lags[name]))
    for name in stalled:
        lives = f", in {len(lags[name])} of its lives" if len(lags[name]) > 1 else ""
        yield Advice(
            kind="gateway_stall",
            title=f"{name} stood still",
            reason=(
                f"Its event loop was late by up to {max(lags[name]):.0f} ms{lives}, and all its streams with it; "
                f"{100 * share:.0f} % of the time of requests went to the path around the engine."
            ),
            change=(
                "Give it more CPU, start more API processes (api.processes), or find what holds it up: its log has a "
                f"line for each stall above a second (penstock logs --process {name})."
            ),
            saves_s=sum(spent.values()) / 1000 * sum(lags[name]) / sum(map(sum, lags.values())),
        )
    if not stalled and share >= limits.gateway_share and mean >= limits.gateway_ms:
        part = max(spent, key=lambda name: spent[name])
        where = {"ingress": "before the job is queued", "gate": "between claim and engine"}
        yield Advice(
            kind="gateway_stall",
            title="The gateway holds requests up",
            reason=(
                f"{100 * share:.0f} % of the time of requests, {mean:.0f} ms of each, went to the path around the "
                f"engine, most of it {where.get(part, 'after the last token')} ({part})."
            ),
            change="Give the API processes and the store more CPU, or start more of them (api.processes).",
            saves_s=sum(spent.values()) / 1000,
        )


def pools(
    figures: Figures,
    requests: Sequence[ReportedRequest],
    limits: Thresholds,
    everyone: Sequence[ReportedRequest],
) -> Iterator[Advice]:
    """Models whose requests wait: because all their slots are in use, by whomever, or although they are not."""
    for model in figures.models:
        own = [each for each in requests if each.record.model == model.name]
        total = sum(model.parts.values())
        waited = sum(model.parts.get(part, 0.0) for part in ("queue", "engine_wait"))
        waits = [each.wait_ms or 0.0 for each in own]
        if not total or waited < limits.waiting_share * total or model.requests < limits.min_requests:
            continue
        workers = [each for each in figures.processes if each.role == "worker" and each.model == model.name]
        holders = [each for each in everyone if each.record.model == model.name]
        used = slots_used(holders, workers, span_s(holders))
        reason = f"{100 * waited / total:.0f} % of the time of its requests was waiting"
        if used is None or used >= limits.busy_share:
            number = sum(each.slots for each in workers)
            slots = "" if used is None else f", with {100 * used:.0f} % of {number} slots in use"
            yield Advice(
                kind="full_pool",
                model=model.name,
                title=f"The pool of {model.name} is full",
                reason=f"{reason}{slots}.",
                change=f"Raise models.{model.name}.max_workers or the slots of its engine, or refuse earlier (lane "
                "limits).",
                saves_s=sum(waits) / 1000,
            )
        else:
            yield Advice(
                kind="idle_pool",
                model=model.name,
                title=f"Requests of {model.name} wait beside free slots",
                reason=f"{reason}, with only {100 * used:.0f} % of its slots in use on average.",
                change="Load came in bursts, or workers started late: raise min_workers, or look at penstock scale "
                "log.",
                saves_s=sum(waits) / 1000,
            )


def slots_used(requests: Sequence[ReportedRequest], workers: Sequence[ProcessFigures], seconds: float) -> float | None:
    """The share of the workers' slots that requests had, over the time of the requests; None without samples."""
    had = sum(max(0, each.record.last_us - each.record.released_us) for each in requests if each.record.released_us)
    there = sum(each.slots * min(each.seconds, seconds) for each in workers)
    return min(1.0, had / 1e6 / there) if there else None


def long_prompts(figures: Figures, requests: Sequence[ReportedRequest], limits: Thresholds) -> Iterator[Advice]:
    """Prefill that takes much of the engine's time, where some prompts are far longer than most."""
    parts = figures.whole.parts
    engine = parts.get("prefill", 0.0) + parts.get("decode", 0.0)
    prompts = sorted(each.record.prompt_tokens for each in requests if each.completed)
    if not engine or len(prompts) < limits.min_requests:
        return
    share = parts.get("prefill", 0.0) / engine
    middle, tail = percentile(prompts, 0.5), percentile(prompts, 0.9)
    if share >= limits.prefill_share and tail >= limits.long_factor * max(1, middle):
        yield Advice(
            kind="long_prompts",
            title="Long prompts hold the engine up",
            reason=(
                f"{100 * share:.0f} % of the engine's time came before the first token; one prompt in ten has "
                f"{tail:.0f} tokens or more, the median {middle:.0f}."
            ),
            change="Keep common beginnings of prompts equal, so that engines reuse their cache, or serve long prompts "
            "from a pool of their own (shapes).",
            saves_s=parts.get("prefill", 0.0) / 1000,
        )


def unhealthy(figures: Figures, requests: Sequence[ReportedRequest], limits: Thresholds) -> Iterator[Advice]:
    """Requests that did not get an answer, and jobs that lost their worker."""
    whole, total = figures.whole, max(1, figures.whole.requests)
    changes = {
        "refused": "docs/api.md says what the code means. No limit is involved: mend the requests of that client.",
        "failed": "penstock jobs ls --status failed shows them; penstock dlq ls those whose workers died.",
        "expired": "Give them more time (queue.deadline_ms, queue.max_queue_ms), or add workers.",
    }
    for state, change in changes.items():
        number = whole.states.get(state, 0)
        if number >= max(limits.unhealthy_share * total, 1):
            own = [each for each in requests if each.record.state == state]
            code, times = Counter(each.record.code or "no code" for each in own).most_common(1)[0]
            yield Advice(
                kind=state,
                title=f"{100 * number / total:.1f} % of the requests {'were ' if state == 'refused' else ''}{state}",
                reason=f"{number} of {whole.requests}; most often with {code} ({counted(times, 'time')}).",
                change=LIMITED if code in LIMITS else change,
                saves_s=sum(each.wait_ms or 0.0 for each in own) / 1000,
            )
    if whole.lost >= max(limits.unhealthy_share * total, 1):
        records = [each for each in requests if each.record.lost]
        lost_s = sum(max(0, each.split.parts["retries"] or 0) for each in records) / 1e6
        yield Advice(
            kind="lost_workers",
            title=f"Workers died under {counted(len(records), 'request')}",
            reason=f"{counted(whole.lost, 'attempt')} lost, in all {lost_s:.1f} s.",
            change="penstock logs --process WORKER shows why; penstock doctor names jobs that kill workers.",
            saves_s=lost_s,
        )


def lost_records(figures: Figures) -> Iterator[Advice]:
    """Records that are missing, so that this report is incomplete."""
    dropped = sum(each.dropped for each in figures.processes)
    if dropped > 0:
        yield Advice(
            kind="lost_records",
            title=f"{dropped} records are missing",
            reason="Their processes could not write them: their disk was full, or slow.",
            change="penstock doctor; until then the figures here are too low.",
        )
