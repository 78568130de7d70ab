"""Goodput: the highest rate at which enough requests keep both latency objectives, with prefill beside decode or apart.

After DistServe, corrected: its search accepts a rate where each objective is kept by 90 % of the requests separately;
the requests that keep both may be fewer. A rate holds here if 90 % keep both.

Apart, some replicas compute prompts alone, in order of arrival. The cache of a prompt goes over the link to a replica
that decodes alone. (As CloudMatrix-Infer counts them: the replicas of both kinds are in the ratio of their work.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from planner import search
from planner.answers import PlanAnswer, PlanTable, inputs_of, three
from planner.facts.catalogue import PlanError
from planner.load import PlanInput
from planner.options import SLO, plan_command, search_options
from planner.search import ParallelPlan, ReplicaModel, SearchWatch, attainment, requests, serve
from planner.simulator.engine import ModelText

REQUESTS = 300
"""DistServe's N, at least: with large batches, so few requests would have come before the batch is full."""
FULL_BATCHES = 3
"""Requests come for at least so many full batches."""
LONGER = (1, 4, 16)
"""Lengths, in shortest runs, of the runs in which a rate must hold, until the share stops falling: a queue that grows
slowly is short in a short run."""
FALL = 0.005
"""Fall of the share that counts as none."""
PRECISION = 0.04
"""Relative width at which the bisection ends."""
MAX_HALVINGS = 12
"""A rate so many times halved from what a full batch serves that still does not hold counts as none."""
MAX_SIMULATED = 4
"""Deployments of each kind whose goodput is searched for."""
MAX_DEPLOYMENTS = 8
"""Deployments that are shown."""


@dataclass(frozen=True, slots=True)
class ServingSetup:
    """Replicas that prefill and decode together; or, if `prefill` is there, those that decode, beside those of it."""

    decode: ParallelPlan
    prefill: ParallelPlan | None = None

    @property
    def gpus(self) -> int:
        return self.decode.gpus + (self.prefill.gpus if self.prefill else 0)

    @property
    def name(self) -> str:
        return f"{self.prefill.name} | {self.decode.name}" if self.prefill else self.decode.name


@dataclass(frozen=True, slots=True)
class GoodputRow:
    """One deployment: its goodput, and what the objectives would allow one by one."""

    deployment: ServingSetup
    rate: float
    """Requests a second that keep both; 0: not even slow ones do."""
    separate_rate: float | None
    """Where each objective alone is kept often enough, which DistServe's search accepts; of the first row alone."""

    @property
    def per_gpu(self) -> float:
        return self.rate / self.deployment.gpus


def highest_rate(holds: Callable[[float], bool], start: float, precision: float = PRECISION) -> float:
    """The highest rate that holds, by doubling or halving from `start` and then by bisection; 0 if none does.

    `holds` falls from true to false. A rate may hold forever only if nothing is asked of it: at most 2^12 * `start` is
    looked at.
    """
    before, rate, rises = start, start, holds(start)
    for _ in range(MAX_HALVINGS):
        before, rate = rate, 2 * rate if rises else rate / 2
        if holds(rate) != rises:
            break
    else:
        return rate if rises else 0.0
    low, high = sorted((before, rate))
    while high / low - 1 > precision:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def goodput(given: PlanInput, deployment: ServingSetup, *, jointly: bool = True) -> float:
    """Requests a second that a deployment serves within the objectives: `jointly`, or each objective by itself, as
    DistServe's search accepts. Raises PlanError if the model does not fit."""

    def share(rate: float, count: int) -> float:
        found = attainment(served(given, deployment, rate, count), given.slo)
        return found.both if jointly else min(found.ttft, found.tpot)

    def holds(rate: float) -> bool:
        return holds_for_long(lambda times: share(rate, times * first_count(given, deployment)), given.slo.share)

    return highest_rate(holds, full_rate(given, deployment) / 2)


def holds_for_long(share: Callable[[int], float], wanted: float) -> bool:
    """Whether the share of a run, by its length in short runs, is `wanted` or more once it no longer falls."""
    before = math.inf
    for times in LONGER:
        found = share(times)
        if found < wanted:
            return False
        if found >= before - FALL:
            return True
        before = found
    return True


def full_rate(given: PlanInput, deployment: ServingSetup) -> float:
    """Requests a second of full batches: what no rate of requests can exceed for long."""
    prefill, decode = deployment.prefill or deployment.decode, deployment.decode
    prefill_s, decode_s = _prefill_s(given, prefill) / prefill.dp, _decode_s(given, decode) / decode.dp
    return 1 / max(prefill_s, decode_s) if deployment.prefill else 1 / (prefill_s + decode_s)


def _prefill_s(given: PlanInput, plan: ParallelPlan) -> float:
    """What one prompt alone takes of a replica."""
    prompt = given.lengths.prompt
    return ReplicaModel(given, plan).step(1, prompt, prompt).seconds


def _decode_s(given: PlanInput, plan: ParallelPlan) -> float:
    """What the answer of one request takes of a replica that decodes full batches."""
    lengths, batch = given.lengths, max(1, full_batch(given, plan))
    return lengths.answer * ReplicaModel(given, plan).step(batch, round(batch * lengths.mean), 0).seconds / batch


def full_batch(given: PlanInput, plan: ParallelPlan) -> int:
    """Whole requests that a replica holds at once."""
    return min(given.max_batch, ReplicaModel(given, plan).kv_tokens // given.lengths.whole)


def served(given: PlanInput, deployment: ServingSetup, rate: float, count: int = 0) -> Sequence[ModelText]:
    """Requests at a rate, with what became of them; 0: as many as fill the batches a few times."""
    texts = requests(given.lengths, count or first_count(given, deployment), rate)
    if deployment.prefill is None:
        return serve(ReplicaModel(given, deployment.decode), texts).texts
    return _apart(given, deployment.prefill, deployment.decode, texts)


def first_count(given: PlanInput, deployment: ServingSetup) -> int:
    """Requests of the shortest run that a rate is judged by."""
    plan = deployment.decode
    return max(REQUESTS, FULL_BATCHES * plan.dp * full_batch(given, plan))


def _apart(
    given: PlanInput, prefill: ParallelPlan, decode: ParallelPlan, texts: Sequence[ModelText]
) -> Sequence[ModelText]:
    """The first token from a replica that prefills; the others from one that decodes, once it has the cache."""
    # One prompt after the other: a longer queue in a step would give all of them the latest one's first token.
    firsts = [ModelText(text.prompt, 1, 1, text.arrived_s) for text in texts]
    one = ReplicaModel(replace(given, max_batch=1), prefill)
    serve(one, firsts, max(search.MAX_STEP_TOKENS, given.lengths.longest_prompt))
    moved_s = transfer_s(one, given.lengths.prompt)
    later = [
        ModelText(text.prompt + 1, left, left, (first.first_s or 0.0) + moved_s, is_prefilled=True)
        for text, first in zip(texts, firsts, strict=True)
        if (left := text.output - 1)
    ]
    if later:
        serve(ReplicaModel(given, decode), later)
    for number, (text, first) in enumerate(zip(texts, firsts, strict=True)):
        text.begun_s, text.first_s, text.generated = first.begun_s, first.first_s, text.output
        text.ended_s = later[number].ended_s if later else first.ended_s
    return texts


def transfer_s(replica: ReplicaModel, prompt: int) -> float:
    """The cache of a prompt over the link of a GPU, each GPU sending its part: kv_token * L / BW."""
    return replica.kv_token_bytes * prompt / replica.given.device.link_bytes_s


def deployments(given: PlanInput) -> list[ServingSetup]:
    """Together: all (dp, pp, tp) of the GPUs. Apart: a pair of (pp, tp) for each share of the GPUs that prefill.

    Attention-dp and experts follow `plan search`; here all replicas of a kind are equal.
    """
    found = [ServingSetup(plan) for plan in _replicas(given, given.gpus)]
    for share in range(1, given.gpus):
        pairs = product(_replicas(given, share), _replicas(given, given.gpus - share))
        found += [ServingSetup(decode, prefill) for prefill, decode in pairs]
    return found


def _replicas(given: PlanInput, gpus: int) -> list[ParallelPlan]:
    """Equal replicas on so many GPUs, which fit."""
    return [
        plan
        for plan in search.plans(given.model, gpus)
        if plan.tp in (1, 2, 4, 8, 16) and plan.pp in (1, 2, 4) and plan.ep == 1 and not plan.attention_dp
        if search.fits(given, plan)
    ]


def best_goodput(given: PlanInput, watch: SearchWatch | None = None) -> list[GoodputRow]:
    """Deployments by goodput; after Ctrl-C, of those tried. Raises PlanError if none keeps the objectives."""
    given.lengths.check(given.model)
    found = deployments(given)
    if not found:
        raise search.unfitting(given)
    lone = {each: served(given, each, 1e-3, 1) for each in found}
    able = [each for each, texts in lone.items() if attainment(texts, given.slo).both]  # others only slow it down
    if not able:
        raise PlanError(_unkept(given, [texts[0] for texts in lone.values()]))
    watch, likeliest, apart = watch or SearchWatch(), _likeliest(given, able), None
    rates = dict(zip(likeliest, watch.tried(likeliest, lambda each: goodput(given, each)), strict=False))
    first = max(rates, key=lambda each: (rates[each], -each.gpus))
    if not watch.interrupted:
        try:
            apart = goodput(given, first, jointly=False)
        except KeyboardInterrupt:
            watch.interrupted = True
    rows = sorted(rates.items(), key=lambda each: (-each[1], each[0].gpus))[:MAX_DEPLOYMENTS]
    return [GoodputRow(each, rate, apart if number == 0 else None) for number, (each, rate) in enumerate(rows)]


def _unkept(given: PlanInput, lone: Sequence[ModelText]) -> str:
    """That lone requests of several deployments miss the objectives, with the least that any takes."""
    first, token = 1e3 * min(text.ttft_s for text in lone), 1e3 * min(text.tpot_s for text in lone)
    return (
        f"on {given.gpus} x {given.device.name} not even a lone request keeps {given.slo.words}: the least are "
        f"{first:.0f} ms and {token:.0f} ms (--ttft-ms, --tpot-ms)"
    )


def _likeliest(given: PlanInput, found: Sequence[ServingSetup]) -> list[ServingSetup]:
    """The deployments of both kinds whose full batches serve most: no objectives raise that."""
    ranked = sorted(found, key=lambda each: -full_rate(given, each))
    together = [each for each in ranked if each.prefill is None]
    return [*together[:MAX_SIMULATED], *[each for each in ranked if each.prefill is not None][:MAX_SIMULATED]]


def prefill_share(given: PlanInput, prefill: ParallelPlan, decode: ParallelPlan) -> float:
    """Replicas that prefill for each that decodes: N_p / N_d = (L_in / thr_p) / (L_out / thr_d)."""
    return _prefill_s(given, prefill) / _decode_s(given, decode)


def goodput_advice(given: PlanInput, rows: Sequence[GoodputRow]) -> str:
    """Which deployment to take, and whether prefill should be apart."""
    top, together = rows[0], next((row for row in rows if row.deployment.prefill is None), None)
    said = f"Take {top.deployment.name}: {top.rate:.3g} requests a second keep {given.slo.words}"
    if top.separate_rate is not None and top.separate_rate > 1.05 * top.rate:
        said += f"; judged one by one, {top.separate_rate:.3g} would seem to hold"
    if top.deployment.prefill is None:
        return f"{said}. Prefill apart " + ("needs two GPUs or more." if given.gpus == 1 else "yields no more.")
    if together is None or not together.rate:
        return f"{said}. Prefill beside decode keeps them at no rate that is among the best."
    return f"{said}, {top.rate / together.rate:.2f} x what prefill beside decode does."


# --- command ---------------------------------------------------------------------------------------------------------


@plan_command("goodput", *search_options(), SLO, shown="searching")
def goodput_command(given: PlanInput, watch: SearchWatch) -> PlanAnswer:
    """Find the highest rate of requests that keep both latency objectives, with prefill beside decode or apart.

    \b
    Examples:
      penstock plan goodput --model opt-13b --gpu a100-80gb --gpus 2
    """
    rows, slo = best_goodput(given, watch=watch), given.slo
    value = inputs_of(given, "gpus", "efficiency") | {
        "ttft_ms": 1e3 * slo.ttft_s,
        "tpot_ms": 1e3 * slo.tpot_s,
        "share": slo.share,
        "deployments": [
            {
                "prefill": row.deployment.prefill.name if row.deployment.prefill else None,
                "decode": row.deployment.decode.name,
                "gpus": row.deployment.gpus,
                "requests_s": row.rate,
                "requests_s_per_gpu": row.per_gpu,
                "requests_s_if_judged_apart": row.separate_rate,
            }
            for row in rows
        ],
    }
    top = rows[0].deployment
    share = prefill_share(given, top.prefill or top.decode, top.decode)
    note = f"By their work, prefill takes {share:.2f} replicas for each that decodes full batches."
    notes = [note] if given.gpus > 1 else []
    return PlanAnswer(value, [PlanTable.of(rows, COLUMNS)], goodput_advice(given, rows), notes=notes)


COLUMNS: Mapping[str, Callable[[GoodputRow], str]] = {
    "prefill": lambda row: row.deployment.prefill.name if row.deployment.prefill else "beside decode",
    "decode": lambda row: row.deployment.decode.name,
    "requests/s": lambda row: three(row.rate),
    "per GPU": lambda row: three(row.per_gpu),
}
