"""Large parts of the time that no other finding explains: what they are, and what to change first.

The report's first sentence gives the share of waiting, of the path and of generating. If one of these is large,
`unnamed` says what its largest part is made of, unless a finding has said so. It is pure, and its advice holds the
reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from penstock.text import counted
from telemetry.latency import GROUPS
from telemetry.report.figures import GroupFigures, percentile
from telemetry.report.finding import Advice, Thresholds
from telemetry.report.requests import ReportedRequest
from telemetry.report.words import duration

EXPLAINED: Mapping[str, Collection[str]] = {
    "slow_worker": ("prefill",),
    "long_prompts": ("prefill",),
    "starved_lane": ("queue", "engine_wait"),
    "full_pool": ("queue", "engine_wait"),
    "idle_pool": ("queue", "engine_wait"),
    "lost_workers": ("retries",),
    "gateway_stall": GROUPS["gateway"],
}
"""The parts of which a kind of advice says why they take so long."""


def unnamed(
    models: Sequence[GroupFigures], requests: Sequence[ReportedRequest], named: Sequence[Advice], limits: Thresholds
) -> Iterator[Advice]:
    """Advice on large parts that none of the findings `named` explains. `models`: the figures of each model; a finding
    about one explains nothing of the others."""
    done = [each for each in requests if each.completed]
    left = {group.name: _left(group, named) for group in models}
    total = sum(sum(group.parts.values()) for group in models)
    if not done or not total:
        return
    waited = {
        part: sum(parts.get(part, 0.0) for parts in left.values()) for part in (*GROUPS["queue"], *GROUPS["recovery"])
    }
    if sum(waited.values()) >= limits.waiting_share * total:
        own = [each for each in done if any(left[each.record.model].get(part) for part in waited)]
        yield _waiting(waited, total, own, limits)
    path = sum(parts.get(part, 0.0) for parts in left.values() for part in GROUPS["gateway"])
    if path >= limits.gateway_share * total:
        yield Advice(
            kind="short_requests",
            title="Requests are so short that the path around the engine shows",
            reason=f"{100 * path / total:.0f} % of their time, but only {duration(path / len(done))} of each.",
            change="Nothing, if that is fast enough: this time does not grow with the answer. For more requests per "
            "second, start more API processes (api.processes), or send several prompts in one request.",
        )
    yield from _prompts([each for each in done if each.own_tokens > 1 and "prefill" in left[each.record.model]], limits)


def _left(group: GroupFigures, named: Sequence[Advice]) -> dict[str, float]:
    """The parts of a model's time that no finding about it, or about all models, explains."""
    kinds = {each.kind for each in named if each.model in ("", group.name)}
    explained = {part for kind in kinds for part in EXPLAINED.get(kind, ())}
    return {part: spent for part, spent in group.parts.items() if part not in explained}


def _waiting(waited: Mapping[str, float], total: float, done: Sequence[ReportedRequest], limits: Thresholds) -> Advice:
    """Of the parts of waiting, in milliseconds, the largest."""
    part = max(waited, key=lambda name: waited[name])
    share = f"{100 * sum(waited.values()) / total:.0f} % of the time of requests was waiting"
    mean = duration(sum(waited.values()) / len(done))
    saves_s = sum(waited.values()) / 1000
    if part == "retries":
        return Advice(
            kind="retries",
            title="Requests began again",
            reason=f"{share} or lost to retries, {mean} of each, most of it to attempts that did not end their jobs: "
            f"{_ends(done)}.",
            change=_RETRIES[_most_frequent_end(done)],
            saves_s=saves_s,
        )
    few = len(done) < limits.min_requests
    reason = f"{share}, {mean} of each" + (f"; only {counted(len(done), 'request')} completed" if few else "")
    where = (
        "Raise the slots of the engine: it took requests that it could not run yet."
        if part == "engine_wait"
        else "Raise min_workers if the first requests met no worker, else max_workers or the engine's slots; penstock "
        "scale log says which worker came when."
    )
    return Advice(kind="waiting", title="Requests waited", reason=f"{reason}.", change=where, saves_s=saves_s)


_RETRIES = {
    "lost": "penstock logs --process WORKER shows why a worker died; penstock doctor names jobs that kill workers.",
    "handed back": "Workers hand jobs back when they are stopped or their server is away: raise their drain time, or "
    "see penstock ps for the server.",
    "preempted": "Jobs of lane batch were put back for jobs of lane interactive. Add workers, or send less to lane "
    "interactive.",
}
"""What to change first, by how most attempts ended."""


def _attempt_ends(done: Sequence[ReportedRequest]) -> dict[str, int]:
    records = [each.record for each in done]
    return {
        "lost": sum(record.lost for record in records),
        "handed back": sum(record.handed_back for record in records),
        "preempted": sum(record.preempted for record in records),
    }


def _most_frequent_end(done: Sequence[ReportedRequest]) -> str:
    ends = _attempt_ends(done)
    return max(ends, key=lambda name: ends[name])


def _ends(done: Sequence[ReportedRequest]) -> str:
    return ", ".join(f"{number} {name}" for name, number in _attempt_ends(done).items() if number) or "none is counted"


def _prompts(answered: Sequence[ReportedRequest], limits: Thresholds) -> Iterator[Advice]:
    """Prompts that are all alike, and still take much of the engine's time. `answered`: with more than one token."""
    if len(answered) < limits.min_requests:
        return
    spent = [(each.split.parts["prefill"] or 0, each.split.parts["decode"] or 0) for each in answered]
    prefill_us, engine_us = sum(one for one, _ in spent), sum(map(sum, spent))
    if not engine_us or prefill_us < limits.prefill_share * engine_us:
        return
    tokens = sum(each.record.prompt_tokens for each in answered)
    cached = sum(each.record.cached_tokens for each in answered) / tokens if tokens else 0.0
    middle = percentile(sorted(each.record.prompt_tokens for each in answered), 0.5)
    answer = percentile(sorted(each.own_tokens for each in answered), 0.5)
    yield Advice(
        kind="prompts",
        title="The engine reads more than it writes",
        reason=(
            f"{100 * prefill_us / engine_us:.0f} % of the engine's time came before the first token: a prompt has "
            f"{middle:.0f} tokens, an answer {answer:.0f} (medians); {100 * cached:.0f} % of the prompt tokens were "
            "cached."
        ),
        change="Shorten the prompts, or keep their common beginnings equal, so that engines reuse their cache; if "
        "neither can be, the engine's prefill is what to speed up.",
        saves_s=prefill_us / 1e6,
    )
