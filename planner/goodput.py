"""Goodput: the highest rate at which enough requests keep both latency objectives, with prefill beside decode or apart.

After DistServe, corrected: its search accepts a rate where each objective is kept by 90 % of the requests separately;
the requests that keep both may be fewer. A rate holds here if 90 % keep both.

Apart, some replicas compute prompts alone, in order of arrival. The cache of a prompt goes over the link to a replica
that decodes alone. (As CloudMatrix-Infer counts them: the replicas of both kinds are in the ratio of their work.)

Workloads, by name or from a file of lengths, are here too.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path

from planner.facts.catalogue import PlanError, UnknownName, nearest
from planner.load import LatencySlo, PlanInput, RequestLengths
from planner.search import (
    MAX_STEP_TOKENS,
    ParallelPlan,
    ReplicaModel,
    SearchWatch,
    attainment,
    fits,
    plans,
    requests,
    serve,
    unfitting,
)
from planner.simulator.engine import ModelText
from planner.simulator.trace import Malformed, Trace

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
    prefill_s = _prefill_s(ReplicaModel(given, prefill)) / prefill.dp
    decode_s = _decode_s(ReplicaModel(given, decode)) / decode.dp
    return 1 / max(prefill_s, decode_s) if deployment.prefill else 1 / (prefill_s + decode_s)


def _prefill_s(replica: ReplicaModel) -> float:
    """Of one prompt alone."""
    prompt = replica.given.lengths.prompt
    return replica.step_s(1, prompt, prompt)


def _decode_s(replica: ReplicaModel) -> float:
    """What the answer of one request takes of a replica that decodes full batches."""
    lengths = replica.given.lengths
    batch = max(1, min(replica.given.max_batch, replica.kv_tokens // lengths.whole))
    return lengths.answer * replica.step_s(batch, round(batch * lengths.mean), 0) / batch


def served(given: PlanInput, deployment: ServingSetup, rate: float, count: int = 0) -> Sequence[ModelText]:
    """Requests at a rate, with what became of them; 0: as many as fill the batches a few times."""
    texts = requests(given.lengths, count or first_count(given, deployment), rate)
    if deployment.prefill is None:
        return serve(ReplicaModel(given, deployment.decode), texts).texts
    return _apart(given, deployment.prefill, deployment.decode, texts)


def first_count(given: PlanInput, deployment: ServingSetup) -> int:
    """Requests of the shortest run that a rate is judged by."""
    batch = min(given.max_batch, ReplicaModel(given, deployment.decode).kv_tokens // given.lengths.whole)
    return max(REQUESTS, FULL_BATCHES * deployment.decode.dp * batch)


def _apart(
    given: PlanInput, prefill: ParallelPlan, decode: ParallelPlan, texts: Sequence[ModelText]
) -> Sequence[ModelText]:
    """The first token from a replica that prefills; the others from one that decodes, once it has the cache."""
    # One prompt after the other: a longer queue in a step would give all of them the latest one's first token.
    firsts = [ModelText(text.prompt, 1, 1, text.arrived_s) for text in texts]
    one = ReplicaModel(replace(given, max_batch=1), prefill)
    serve(one, firsts, max(MAX_STEP_TOKENS, given.lengths.longest_prompt))
    moved_s = transfer_s(one, given.lengths.prompt)
    later = [
        ModelText(
            text.prompt + 1, text.output - 1, text.output - 1, (first.first_s or 0.0) + moved_s, is_prefilled=True
        )
        for text, first in zip(texts, firsts, strict=True)
        if text.output > 1
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
        found += [
            ServingSetup(decode, prefill)
            for prefill in _replicas(given, share)
            for decode in _replicas(given, given.gpus - share)
        ]
    return found


def _replicas(given: PlanInput, gpus: int) -> list[ParallelPlan]:
    """Equal replicas on so many GPUs, which fit."""
    return [
        plan
        for plan in plans(given.model, gpus)
        if plan.tp in (1, 2, 4, 8, 16) and plan.pp in (1, 2, 4) and plan.ep == 1 and not plan.attention_dp
        if fits(given, plan)
    ]


def promising(given: PlanInput, found: Sequence[ServingSetup]) -> list[ServingSetup]:
    """Those whose lone request keeps both objectives: with others it can only be slower."""
    return [each for each in found if attainment(served(given, each, 1e-3, 1), given.slo).both == 1.0]


def best_goodput(given: PlanInput, watch: SearchWatch | None = None) -> list[GoodputRow]:
    """Deployments by goodput; after Ctrl-C, of those tried. Raises PlanError if none keeps the objectives."""
    given.lengths.check(given.model)
    found = deployments(given)
    if not found:
        raise unfitting(given)
    able = promising(given, found)
    if not able:
        raise PlanError(_unkept(given, [served(given, each, 1e-3, 1)[0] for each in found]))
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
    together = [each for each in found if each.prefill is None]
    apart = [each for each in found if each.prefill is not None]
    ranked = [sorted(each, key=lambda one: -full_rate(given, one))[:MAX_SIMULATED] for each in (together, apart)]
    return [*ranked[0], *ranked[1]]


def prefill_share(prefill: ReplicaModel, decode: ReplicaModel) -> float:
    """Replicas that prefill for each that decodes: N_p / N_d = (L_in / thr_p) / (L_out / thr_d)."""
    return _prefill_s(prefill) / _decode_s(decode)


def work_note(given: PlanInput, top: ServingSetup) -> str:
    """How many replicas prefill and decode would take, by their work."""
    prefill, decode = (ReplicaModel(given, replace(plan, dp=1)) for plan in (top.prefill or top.decode, top.decode))
    share = prefill_share(prefill, decode)
    return f"By their work, prefill takes {share:.2f} replicas for each that decodes full batches."


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


def slo_of(ttft_ms: float, tpot_ms: float, share: float) -> LatencySlo:
    """Raises PlanError for objectives that are none."""
    if ttft_ms <= 0 or tpot_ms <= 0 or not 0 < share <= 1:
        raise PlanError(
            f"objectives of {ttft_ms:g} and {tpot_ms:g} ms for a share of {share:g}: --ttft-ms and --tpot-ms are above "
            "0, --share is at most 1"
        )
    return replace(LatencySlo(), ttft_s=ttft_ms / 1e3, tpot_s=tpot_ms / 1e3, share=share)


MAX_ROWS = 100_000
"""Rows that are read of a file."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths, and where they come from."""

    name: str
    source: str
    lengths: RequestLengths
    requests: int = 0
    """That its protocol asks at each batch size or rate; 0: it says none."""


@cache
def workloads() -> dict[str, Workload]:
    """The named ones."""
    text = (Path(__file__).parent / "facts" / "workloads.toml").read_text(encoding="utf-8")
    return {
        name: Workload(name, row["source"], RequestLengths(row["prompt"], row["answer"]), row.get("requests", 0))
        for name, row in tomllib.loads(text).items()
    }


def workload(name: str) -> Workload:
    """A named workload, or the lengths in a file. Raises PlanError.

    A file is a CSV with the columns `prompt` and `answer`, a CSV in BurstGPT's columns, or a `.jsonl` in APEX's form;
    of the last two, failed requests are left out.
    """
    found = workloads().get(name.lower())
    if found is not None:
        return found
    path = Path(name)
    if path.is_file():
        try:
            rows = [(row.prompt, row.answer) for row in islice(Trace(path, plain=True), MAX_ROWS)]
        except Malformed as error:
            raise PlanError(f"--workload {error}") from None
        except OSError as error:
            raise PlanError(f"--workload {path}: {error.strerror or error}") from None
        return Workload(path.name, f"the file {path}", mix_of(rows, f"{path}"))
    if path.suffix or "/" in name:
        raise PlanError(f"--workload {name}: there is no such file")
    raise UnknownName(f"no workload {name!r} is known: {nearest(name, workloads())}, or give a file of lengths")


def mix_of(rows: Iterable[tuple[int, int]], what: str) -> RequestLengths:
    """The lengths whose means are those of the rows, at most MAX_ROWS of them. Raises PlanError."""
    mix = tuple(islice(rows, MAX_ROWS))
    if not mix:
        raise PlanError(f"{what} has no request with an answer")
    prompt, answer = (max(1, round(sum(each) / len(mix))) for each in zip(*mix, strict=True))
    return RequestLengths(prompt, answer, mix)
