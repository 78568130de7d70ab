"""Plan search: every parallelism of a model on n GPUs, and the best of them (the commands search and grid).

After APEX. Each plan serves one request alone (its latency), and a backlog of requests at once (its throughput, its
energy); with a rate, also requests at that rate (its latencies and the share that keeps the objectives).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from operator import add
from random import Random
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias, TypeVar

import click

from planner.answers import PlanAnswer, PlanTable, inputs_of, plot, seconds, three
from planner.cost import assumed_prices, pareto, per_million
from planner.facts.catalogue import ModelShape, PlanError
from planner.load import LatencySlo, PlanInput, RequestLengths
from planner.options import SLO, plan_command, search_options
from planner.roofline import SLACK_BYTES, all_reduce_s, all_to_all_s, distinct_experts, peak_of, send_s
from planner.simulator.engine import EngineShape, Greedy, ModelEngine, ModelText
from planner.simulator.queues import ModelWorker, Simulation, TextQueue, by_arrival


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """One way to use dp * pp * tp GPUs.

    After APEX: `dp` replicas of `pp` stages of `tp` GPUs. A stage has its share of the layers, a GPU its share of each
    of them. With attention-dp the GPUs of a stage share the experts (or the feed-forward network), but each attends to
    its own requests with all heads. Of the `tp` GPUs of a stage, `ep` have different experts, and `tp / ep` share each
    expert.

    A step is the roofline of each GPU and its communication: two all-reduces of a layer, after attention and after the
    feed-forward network; with experts in several places two all-to-alls instead of the second; and a send between
    stages.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    ep: int = 1
    """Groups of GPUs of a stage that have different experts."""
    attention_dp: bool = False

    @property
    def gpus(self) -> int:
        return self.dp * self.pp * self.tp

    @property
    def name(self) -> str:
        """Such as dp2 pp1 tp4 ep2 +attention-dp."""
        words = [f"dp{self.dp}", f"pp{self.pp}", f"tp{self.tp}"]
        words += [f"ep{self.ep}"] if self.ep > 1 else []
        return " ".join(words + ["attention-dp"] * self.attention_dp)

    @property
    def heads_shared_by(self) -> int:
        """GPUs that share the heads of a request."""
        return 1 if self.attention_dp else self.tp


def is_valid(plan: ParallelPlan, model: ModelShape) -> bool:
    """Whether every GPU gets an equal share: heads, heads of keys, experts and layers divide (as TensorRT-LLM asks)."""
    heads = plan.heads_shared_by
    return (
        model.heads % heads == 0
        and (model.kv_heads % heads == 0 or heads % model.kv_heads == 0)
        and model.layers % plan.pp == 0
        and plan.tp % plan.ep == 0
        and model.experts % plan.ep == 0
        and not (plan.attention_dp and plan.tp == 1)
    )


def plans(model: ModelShape, gpus: int) -> Iterator[ParallelPlan]:
    """All valid plans that use all GPUs."""

    def divisors(number: int) -> list[int]:
        return [each for each in range(1, number + 1) if number % each == 0]

    for dp in divisors(gpus):
        for pp in divisors(gpus // dp):
            tp = gpus // dp // pp
            for ep in divisors(tp) if model.experts > 1 else [1]:
                for attention_dp in (False, True):
                    plan = ParallelPlan(dp, pp, tp, ep, attention_dp)
                    if is_valid(plan, model):
                        yield plan


class ReplicaStep(NamedTuple):
    """One step of one replica, or several: the time, the operations and bytes of each of its GPUs, the joules of
    all."""

    seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    joules: float = 0.0


NO_STEP = ReplicaStep()


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """One replica of a plan, and what a step of it costs; StepMeter tells the simulator.

    What a token of a prompt attends to is half of a typical prompt.
    """

    given: PlanInput
    plan: ParallelPlan

    @property
    def weight_bytes(self) -> float:
        """Of one GPU."""
        model, plan, experts = self.given.model, self.plan, self.given.model.experts * self.given.model.expert_weights
        layer = model.attention_weights / plan.heads_shared_by + model.router_weights + experts / plan.tp
        whole = model.attention_weights + experts + model.router_weights
        tables = (model.weights - model.layers * whole) / plan.tp
        if plan.pp > 1 and not model.tied:
            tables /= 2  # the first stage has the one of the input, the last that of the output
        return (model.layers / plan.pp * layer + tables) * self.given.precision.w / 8

    @property
    def kv_tokens(self) -> int:
        """Tokens that the cache of the whole replica holds. Raises PlanError if the weights do not fit."""
        device, usable = self.given.device, self.given.device.memory_bytes - SLACK_BYTES
        room = usable - self.weight_bytes
        if room <= 0:
            raise PlanError(
                f"{self.plan.name} does not fit: each {device.name} would hold {self.weight_bytes / 1e9:.1f} GB of "
                f"weights in {usable / 1e9:.1f}; more --tp or --pp, fewer --w-bits or another --gpu would do"
            )
        return int(room / self.kv_token_bytes) * (self.plan.tp if self.plan.attention_dp else 1)

    @property
    def kv_token_bytes(self) -> float:
        """Of one GPU, for the tokens whose cache it holds."""
        return self.given.model.kv_token_bytes(self.given.precision.kv, self.plan.heads_shared_by) / self.plan.pp

    def step(self, texts: int, held: float, prefilled: int) -> ReplicaStep:
        """A step that decodes `texts` texts, which hold `held` tokens, and computes `prefilled` tokens of prompts.

        Its requests pass the stages in as many groups, so that all stages are busy; a single one passes them alone.
        """
        pp, model, bits, device = self.plan.pp, self.given.model, self.given.precision, self.given.device
        tokens, held = texts + prefilled, max(0, held - prefilled)  # what a prompt holds is not read back in its step
        groups = max(1, min(pp, tokens))
        stage = self._stage(tokens / groups, held / groups, prefilled / groups)
        hidden = tokens / groups * model.hidden * bits.a / 8
        send = send_s(hidden, device.link_bytes_s, device.hop_s) if pp > 1 else 0.0
        head = self._part(2 * model.head_weights * texts, model.head_weights * bits.w / 8)
        seconds = pp * (stage.seconds + send) + head.seconds
        step = ReplicaStep(seconds, groups * stage.flops + head.flops / pp, groups * stage.bytes + head.bytes / pp)
        return step._replace(joules=self.watts(step) * seconds)

    def _part(self, flops: float, size: float, peak: float = 0.0) -> ReplicaStep:
        """Work that all GPUs of a stage share, at a peak of arithmetic; 0: that of weights and activations."""
        flops, size = flops / self.plan.tp, size / self.plan.tp
        longest = max(flops / (peak or peak_of(self.given)), size / self.given.device.bytes_s)
        return ReplicaStep(longest / self.given.efficiency, flops, size)

    def _stage(self, tokens: float, held: float, prefilled: float) -> ReplicaStep:
        """One group of tokens in one stage."""
        model, bits, layers = self.given.model, self.given.precision, self.given.model.layers / self.plan.pp
        whole = self.plan.tp if self.plan.attention_dp else 1
        attention_weights = model.attention_weights * bits.w / 8
        moved = tokens * bits.a / 8
        experts = distinct_experts(model.experts, model.experts_per_token, max(1.0, tokens)) * model.expert_weights
        experts += model.router_weights
        parts = (
            self._part(2 * model.attention_weights * tokens, whole * attention_weights + 4 * model.hidden * moved),
            self._attention(held, prefilled),
            self._part(
                2 * (model.experts_per_token * model.expert_weights + model.router_weights) * tokens,
                experts * bits.w / 8 + model.experts_per_token * (2 * model.hidden + model.ffn) * moved,
            ),
        )
        seconds = layers * (sum(part.seconds for part in parts) + self._communication_s(moved * model.hidden))
        return ReplicaStep(seconds, layers * sum(p.flops for p in parts), layers * sum(p.bytes for p in parts))

    def _attention(self, held: float, prefilled: float) -> ReplicaStep:
        """Of one layer: decodes read the cache; prompts attend to themselves."""
        model, device = self.given.model, self.given.device
        seen = held + prefilled * self.given.lengths.prompt / 2
        flops = 4 * seen * model.heads * model.head_dim
        shared = self.plan.heads_shared_by
        size = held * model.cached_numbers(shared) * shared * self.given.precision.kv / 8
        return self._part(flops, size, device.peak[16])

    def _communication_s(self, size: float) -> float:
        """Of one layer, with so many bytes of hidden states."""
        plan, link, hop = self.plan, self.given.device.link_bytes_s, self.given.device.hop_s
        attention = 0.0 if plan.attention_dp else all_reduce_s(size, plan.tp, link, hop)
        if plan.ep == 1:
            return attention + all_reduce_s(size, plan.tp, link, hop)
        routed = size * self.given.model.experts_per_token / plan.ep
        exchange = 2 * all_to_all_s(routed, plan.ep, link, hop)
        return attention + exchange + all_reduce_s(routed, plan.tp // plan.ep, link, hop)

    def watts(self, step: ReplicaStep) -> float:
        """Power of all GPUs of the replica in a step: between idle and the limit, by the busier of arithmetic and
        memory."""
        device = self.given.device
        busy = max(step.flops / peak_of(self.given), step.bytes / device.bytes_s) / step.seconds
        return self.plan.pp * self.plan.tp * (device.idle_watts + (device.watts - device.idle_watts) * min(1.0, busy))


FAR = 1 << 20
"""Tokens in the cache at the second point of a line."""
MAX_STEP_TOKENS = 8192
"""Prompt tokens of one step: TensorRT-LLM's max_num_tokens."""


@dataclass(frozen=True, slots=True)
class Attainment:
    """Shares of requests that kept the objectives: both, which counts, and each alone."""

    both: float
    ttft: float
    tpot: float

    @classmethod
    def of(cls, answered: Sequence[tuple[float, float]], requests: int, slo: LatencySlo) -> Attainment:
        """Of so many requests, by the times to the first token and between tokens of those that were answered."""
        ttft = [first_s <= slo.ttft_s for first_s, _ in answered]
        tpot = [token_s <= slo.tpot_s for _, token_s in answered]
        both = [one and other for one, other in zip(ttft, tpot, strict=True)]
        return cls(sum(both) / requests, sum(ttft) / requests, sum(tpot) / requests)

    @property
    def value(self) -> dict[str, float]:
        """For JSON."""
        return {"kept_both": self.both, "kept_ttft": self.ttft, "kept_tpot": self.tpot}


@dataclass(slots=True)
class StepMeter:
    """The step time of a replica, which also counts what its steps did.

    Most steps only decode. What such a step does grows in a straight line with the tokens that the cache holds, so two
    points of the line are computed for each number of texts, and the rest is interpolated.
    """

    replica: ReplicaModel
    done: ReplicaStep = NO_STEP
    """All steps."""
    _lines: dict[int, tuple[ReplicaStep, ReplicaStep]] = field(default_factory=dict)

    def step_s(self, texts: int, held: int, prefilled: int, squares: int | None = None) -> float:
        if prefilled:
            step = self.replica.step(texts, held, prefilled)
        else:
            if (line := self._lines.get(texts)) is None:
                line = self._lines[texts] = self.replica.step(texts, 0, 0), self.replica.step(texts, FAR, 0)
            share = held / FAR
            step = ReplicaStep(*[least + share * (most - least) for least, most in zip(*line, strict=True)])
        self.done = ReplicaStep(*map(add, self.done, step))
        return step.seconds


@dataclass(frozen=True, slots=True)
class ServedLoad:
    """Requests that were served by all replicas of a plan."""

    texts: Sequence[ModelText]
    seconds: float
    joules: float
    mfu: float
    """Share of the peak of arithmetic, while busy: of 2 N + 4 L H Q T operations a token, not of training's 6 N."""
    mbu: float
    """Share of the bandwidth, while busy."""

    @property
    def tokens_s(self) -> float:
        return sum(text.generated for text in self.texts) / self.seconds

    @property
    def joules_token(self) -> float:
        return self.joules / sum(text.generated for text in self.texts)

    @property
    def value(self) -> dict[str, float]:
        """For JSON."""
        return {
            "tokens_s": self.tokens_s, "joules_per_token": self.joules_token, "mfu": self.mfu, "mbu": self.mbu
        }  # fmt: skip


def quantiles(texts: Sequence[ModelText], **shares: float) -> dict[str, float]:
    """Of both times, by name, for JSON; 0 between tokens if no answer had two."""
    times = {"ttft": sorted(text.ttft_s for text in texts), "tpot": tpots_s(texts) or [0.0]}
    return {
        f"{name}_{rank}_s": quantile(values, share) for name, values in times.items() for rank, share in shares.items()
    }


def tpots_s(texts: Sequence[ModelText]) -> list[float]:
    """Sorted, of answers with two tokens or more that have ended."""
    return sorted(text.tpot_s for text in texts if text.ended_s is not None and text.output > 1)


def attainment(texts: Sequence[ModelText], slo: LatencySlo) -> Attainment:
    """How many requests kept the objectives. A request of one token has no time between tokens to keep."""
    return Attainment.of([(text.ttft_s, text.tpot_s) for text in texts], len(texts), slo)


def requests(lengths: RequestLengths, count: int, rate: float, seed: int = 1) -> list[ModelText]:
    """`count` requests at a mean rate, with exponential gaps; an infinite rate: all at once."""
    random = Random(seed)  # noqa: S311 - a simulation
    texts, at = [], 0.0
    for prompt, answer in lengths.sample(count, Random(seed)):  # noqa: S311 - a simulation
        texts.append(ModelText(prompt, answer, answer, at))
        at += random.expovariate(rate) if rate < math.inf else 0.0
    return texts


def serve(replica: ReplicaModel, texts: Sequence[ModelText], step_tokens: int = MAX_STEP_TOKENS) -> ServedLoad:
    """Serve the texts with the `dp` replicas of the plan, which take turns. Raises PlanError if the model does not fit.

    The loop is APEX's: running texts get a token each, the youngest are evicted when the cache overflows and return
    before others, and texts are taken first come first served while cache, prefill tokens and batch allow."""
    device, dp, seconds, meters = replica.given.device, replica.plan.dp, 0.0, []
    for number in range(dp):
        if mine := texts[number::dp]:
            meters.append(StepMeter(replica))
            shape = EngineShape(replica.kv_tokens, replica.given.max_batch, step_tokens, costs=meters[-1])
            one = Simulation(TextQueue(by_arrival), [ModelWorker(ModelEngine(shape), Greedy())])
            seconds = max(seconds, one.run(mine))
    done = ReplicaStep(*map(sum, zip(*(meter.done for meter in meters), strict=True)))
    busy_s = done.seconds or 1.0
    idle = device.idle_watts * replica.plan.pp * replica.plan.tp * (dp * seconds - busy_s)
    mfu, mbu = done.flops / busy_s / peak_of(replica.given), done.bytes / busy_s / device.bytes_s
    return ServedLoad(texts, seconds, done.joules + max(0.0, idle), mfu, mbu)


def quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values, by linear interpolation."""
    place = share * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low]) if low != high else values[low]


BACKLOG = 2
"""Full batches of all replicas that wait at once when the throughput is looked for."""
MAX_BACKLOG = 1024
AT_RATE = 300
"""Requests at a rate (DistServe's N)."""


def fits(given: PlanInput, plan: ParallelPlan) -> bool:
    """Whether weights, workspace and the longest request fit."""
    try:
        return ReplicaModel(given, plan).kv_tokens > given.lengths.longest
    except PlanError:
        return False


def unfitting(given: PlanInput) -> PlanError:
    """No plan fits."""
    return PlanError(
        f"{given.model.name} does not fit on {given.gpus} x {given.device.name} with any parallelism; "
        "more --gpus, fewer --w-bits or another --gpu would do"
    )


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """What one plan does."""

    plan: ParallelPlan
    kv_tokens: int
    """Of one replica."""
    alone_s: float
    """A request alone, whole."""
    alone_ttft_s: float
    alone_tpot_s: float
    backlog: ServedLoad
    at_rate: ServedLoad | None
    kept: Attainment | None
    """At the rate."""


T = TypeVar("T")
R = TypeVar("R")


@dataclass(slots=True)
class SearchWatch:
    """Follows a search from outside."""

    told: Callable[[int, int], object] = lambda _done, _total: None
    """Is called with the candidates that were tried, and their number."""
    interrupted: bool = False
    """Whether Ctrl-C ended the search early; its result then is the best of what was tried."""

    def tried(self, candidates: Sequence[T], trial: Callable[[T], R]) -> list[R]:
        """What a trial of each candidate gives; after Ctrl-C, of those tried. Raises KeyboardInterrupt if none was."""
        found = list[R]()
        try:
            for number, each in enumerate(candidates):
                self.told(number, len(candidates))
                found.append(trial(each))
        except KeyboardInterrupt:
            if not found:
                raise
            self.interrupted = True
        return found


def search(given: PlanInput, watch: SearchWatch | None = None) -> list[PlanOutcome]:
    """Every plan that fits, by throughput; after Ctrl-C, of those tried. Raises PlanError if none does."""
    given.lengths.check(given.model)
    candidates = [plan for plan in plans(given.model, given.gpus) if fits(given, plan)]
    if not candidates:
        raise unfitting(given)
    found = (watch or SearchWatch()).tried(candidates, lambda plan: tried(given, plan))
    return sorted(found, key=lambda each: -each.backlog.tokens_s)


def tried(given: PlanInput, plan: ParallelPlan) -> PlanOutcome:
    """What a plan that fits does."""
    replica = ReplicaModel(given, plan)

    def load(count: int, rate: float) -> ServedLoad:
        return serve(replica, requests(given.lengths, count, rate))

    room, alone = replica.kv_tokens, load(1, math.inf).texts[0]
    first, ended = alone.first_s or 0.0, alone.ended_s or 0.0
    batch = min(given.max_batch, room // given.lengths.whole)
    backlog = load(min(MAX_BACKLOG, max(1, BACKLOG * plan.dp * batch)), math.inf)
    at_rate = None if given.rate is None else load(AT_RATE, given.rate)
    kept = None if at_rate is None else attainment(at_rate.texts, given.slo)
    tpot = (ended - first) / max(1, given.lengths.answer - 1)
    return PlanOutcome(plan, room, ended, first, tpot, backlog, at_rate, kept)


def best(found: Sequence[PlanOutcome]) -> dict[str, PlanOutcome]:
    """The best by each aim. Latency: alone, or the mean at the rate if there is one. Ties go to the plan with fewer
    GPUs in a replica."""

    def latency_s(outcome: PlanOutcome) -> float:
        if outcome.at_rate is None:
            return outcome.alone_s
        return fmean((text.ended_s or math.inf) - text.arrived_s for text in outcome.at_rate.texts)

    def least(aim: Callable[[PlanOutcome], float]) -> PlanOutcome:
        return min(found, key=lambda each: (aim(each), each.plan.pp * each.plan.tp))

    return {
        "latency": least(latency_s),
        "throughput": least(lambda each: -each.backlog.tokens_s),
        "energy": least(lambda each: each.backlog.joules_token),
    }


def search_advice(given: PlanInput, found: Sequence[PlanOutcome]) -> str:
    """Which plan to take, and why."""
    quick, wide, _ = best(found).values()
    if quick.plan == wide.plan:
        said = f"Take {quick.plan.name}: it has the least latency and the most throughput of {len(found)}"
    else:
        times, slower = wide.backlog.tokens_s / quick.backlog.tokens_s, wide.alone_s / quick.alone_s
        said = (
            f"Take {wide.plan.name} for throughput: {times:.2f} x the tokens of {quick.plan.name}, which answers a "
            f"lone request {slower:.2f} x as fast"
        )
    if given.rate is None:
        return said + "."
    keeping = sum(each.kept is not None and each.kept.both >= given.slo.share for each in found)
    return (
        f"{said}. At {given.rate:g} requests a second, {keeping} of {len(found)} plans keep both objectives for "
        f"{100 * given.slo.share:.0f} % of the requests."
    )


# --- one large replica or several small ones --------------------------------------------------------------------------

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ROUNDS = 4
"""Requests for each that runs at once."""


def layouts(gpus: int, experts: int) -> list[ParallelPlan]:
    """Those of ScaleLLM (for its 8 GPUs TP8 x 1, TP4 x 2 and TP2 x 4); with experts also EP4-TP2 and EP2-TP4 of one
    replica."""
    dense = [ParallelPlan(dp=gpus // tp, tp=tp) for tp in (gpus, gpus // 2, gpus // 4) if tp > 0 and gpus % tp == 0]
    mixed = [ParallelPlan(tp=gpus, ep=ep) for ep in (gpus // 2, gpus // 4) if ep > 1 and experts > 1]
    return list(dict.fromkeys([*dense, *mixed]))


Grid: TypeAlias = Mapping[ParallelPlan, Mapping[int, float]]
"""Tokens a second of each layout, by concurrency."""


def grid(given: PlanInput, concurrencies: Sequence[int] = CONCURRENCIES) -> Grid:
    """All layouts that fit. Raises PlanError if none does.

    Few GPUs in a replica read all weights in each replica; many GPUs read them once, and talk more. Which is better
    depends on how many requests run at once.
    """
    found = {
        plan: {each: closed_loop(given, plan, each) for each in concurrencies}
        for plan in layouts(given.gpus, given.model.experts)
        if is_valid(plan, given.model) and fits(given, plan)
    }
    if not found:
        raise unfitting(given)
    return found


def closed_loop(given: PlanInput, plan: ParallelPlan, clients: int) -> float:
    """Tokens a second with so many clients, which ask again as soon as they are answered.

    Each replica has its share of the clients, at most its largest batch; the others wait.
    """
    each = min(given.max_batch, math.ceil(clients / plan.dp))
    one = ReplicaModel(replace(given, max_batch=each), replace(plan, dp=1))
    return min(plan.dp, clients) * serve(one, requests(given.lengths, ROUNDS * each, math.inf)).tokens_s


def best_by_concurrency(found: Grid) -> dict[int, ParallelPlan]:
    """The layout with the most tokens a second at each concurrency."""
    concurrencies = next(iter(found.values()))
    return {each: max(found, key=lambda plan: found[plan][each]) for each in concurrencies}


def grid_advice(best: Mapping[int, ParallelPlan]) -> str:
    """Which layout is best where."""
    top = list(best.items())
    first, plan = top[0]
    said = [f"{plan.name} yields most from {first} concurrent request on"]
    said += [f"{plan.name} from {at} on" for (_, before), (at, plan) in pairwise(top) if plan != before]
    return ", ".join(said) + "."


# --- commands --------------------------------------------------------------------------------------------------------

SHOWN = 12
"""Rows of the table; --json has all."""


@plan_command("search", *search_options(), SLO, shown="searching")
@click.option("--rate", type=float, help="Requests a second of all GPUs; then latencies are those at this rate.")
@click.option("--price", type=float, help="Of an hour of one such GPU.")
def search_command(given: PlanInput, rate: float | None, price: float | None, watch: SearchWatch) -> PlanAnswer:
    """Try every parallelism (dp, pp, tp, experts, attention-dp) on several GPUs, and name the best.

    \b
    Examples:
      penstock plan search --model llama-3.1-70b --gpu h200 --gpus 8 --price 3.80
      penstock plan search --model llama-3.1-8b --gpu l4 --rate 1
    """
    if rate is not None and rate <= 0:
        raise PlanError(f"--rate {rate:g}: requests a second are above 0")
    if price is not None and not price > 0:
        raise PlanError(f"--price {price:g}: a price of an hour is above 0")
    given, notes = replace(given, rate=rate), assumed_prices([given.device] if price is None else [])
    price = given.device.price_per_hour if price is None else price
    found = search(given, watch)
    top, each_million = best(found), per_million(given.gpus, 1.0)
    hours = {each.plan: each_million / each.backlog.tokens_s for each in found}
    kept = pareto(found, lambda each: hours[each.plan], lambda each: each.alone_s)
    value = inputs_of(given, "gpus", "efficiency", "rate") | {
        **{f"{aim}_optimal": each.plan.name for aim, each in top.items()},
        "price_per_hour": price,
        "pareto": [each.plan.name for each in kept],
        "plans": [
            _outcome_json(each)
            | {
                "gpu_hours_per_million_tokens": hours[each.plan],
                "price_per_million_tokens": None if price is None else price * hours[each.plan],
            }
            for each in found
        ],
    }
    columns: dict[str, Callable[[PlanOutcome], str]] = {
        "plan": lambda each: each.plan.name,
        "best": lambda each: ", ".join(aim for aim, other in top.items() if other is each) or "-",
        **COLUMNS,
        **({} if rate is None else AT_RATE_COLUMNS),
    }
    drawn = ""
    if len(found) > 1:
        ordered = sorted(found, key=kept.__contains__)  # those that are kept are drawn last, over the others
        y = "GPU-hours of a million tokens" if price is None else "price of a million tokens"
        points = [(each.alone_s, (price or 1.0) * hours[each.plan]) for each in ordered]
        signs = "".join("P" if each in kept else "." for each in ordered)
        names = ", ".join(each.plan.name for each in kept)
        drawn = plot(points, "latency of a lone request, s", y, signs=signs)
        drawn += f"\nP: no other is as cheap at less latency: {names}"
    more = f" {len(found) - SHOWN} more plans are in --json." if len(found) > SHOWN else ""
    notes = [f"Simulated at {given.efficiency:g} of the roofline.{more}", *notes]
    return PlanAnswer(value, [PlanTable.of(found[:SHOWN], columns)], search_advice(given, found), drawn, notes)


def _outcome_json(each: PlanOutcome) -> dict[str, Any]:
    """One plan with its figures."""
    plan = each.plan
    found = {
        "plan": plan.name, **asdict(plan), "kv_tokens_per_replica": each.kv_tokens,
        "alone_s": each.alone_s, "alone_ttft_s": each.alone_ttft_s, "alone_tpot_s": each.alone_tpot_s,
        **each.backlog.value,
    }  # fmt: skip
    if each.at_rate is not None and each.kept is not None:
        found |= quantiles(each.at_rate.texts, p50=0.5, p95=0.95) | each.kept.value
    return found


COLUMNS: Mapping[str, Callable[[PlanOutcome], str]] = {
    "alone": lambda each: seconds(each.alone_s),
    "first token": lambda each: seconds(each.alone_ttft_s),
    "per token": lambda each: seconds(each.alone_tpot_s),
    "backlog tok/s": lambda each: three(each.backlog.tokens_s),
    "J/token": lambda each: three(each.backlog.joules_token),
    "mfu": lambda each: f"{each.backlog.mfu:.2f}",
    "mbu": lambda each: f"{each.backlog.mbu:.2f}",
}
AT_RATE_COLUMNS: Mapping[str, Callable[[PlanOutcome], str]] = {
    "p95 first": lambda each: seconds(quantiles(each.at_rate.texts, p95=0.95)["ttft_p95_s"]) if each.at_rate else "-",
    "p95 token": lambda each: seconds(quantiles(each.at_rate.texts, p95=0.95)["tpot_p95_s"]) if each.at_rate else "-",
    "kept": lambda each: f"{100 * each.kept.both:.0f} %" if each.kept else "-",
}
USUAL_BATCH = 64
"""ScaleLLM's router sends more concurrent requests than that to several replicas."""


@plan_command("grid", *search_options(USUAL_BATCH))
def grid_command(given: PlanInput) -> PlanAnswer:
    """Compare one large replica with several small ones on the same GPUs, by concurrent requests.

    \b
    Examples:
      penstock plan grid --model mixtral-8x7b --gpu h100 --gpus 8
    """
    found = grid(given)
    top = best_by_concurrency(found)
    value = inputs_of(given, "gpus", "efficiency", "max_batch") | {
        "layouts": [{"plan": plan.name, "tokens_s": rates} for plan, rates in found.items()],
        "best": {each: plan.name for each, plan in top.items()},
    }
    rows = [[f"{each}", *(three(rates[each]) for rates in found.values()), plan.name] for each, plan in top.items()]
    header = ["concurrent", *(f"{plan.name} tok/s" for plan in found), "best"]
    return PlanAnswer(value, [PlanTable(header, rows)], grid_advice(top))
