"""Serving model: runs requests through the replicas of a plan, iteration by iteration, and notes their latencies.

The loop is APEX's: running texts get a token each, the youngest are evicted when the cache overflows and return before
others, and texts are taken first come first served while cache, prefill tokens and batch allow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias

from planner.load import RequestLengths
from planner.parallel import ReplicaModel
from planner.simulator.admission import Greedy
from planner.simulator.engine import EngineShape, ModelEngine, ModelText
from planner.simulator.queues import SortedQueue, by_arrival
from planner.simulator.simulation import Simulation
from planner.simulator.workers import ModelWorker

MAX_BATCH = 256
"""Requests in one replica, unless a plan says otherwise (TensorRT-LLM's usual engines)."""
FAR = 1 << 20
"""Tokens in the cache at the second point of a line."""
MAX_STEP_TOKENS = 8192
"""Prompt tokens of one step: TensorRT-LLM's max_num_tokens."""


@dataclass(frozen=True, slots=True)
class LatencySlo:
    """What a request must keep: seconds to its first token, and seconds for each token after it."""

    ttft_s: float = 0.200
    tpot_s: float = 0.100
    share: float = 0.90
    """Of the requests that must keep both."""

    @property
    def words(self) -> str:
        """Both objectives, as advice names them."""
        return f"{1e3 * self.ttft_s:g} ms to the first token and {1e3 * self.tpot_s:g} ms for each further one"


DEFAULT_SLO = LatencySlo()
"""DistServe's defaults."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What one replica runs at once."""

    batch: int = MAX_BATCH
    step_tokens: int = MAX_STEP_TOKENS


DEFAULT_LIMITS = BatchLimits()


@dataclass(frozen=True, slots=True)
class Attainment:
    """Shares of requests that kept the objectives: both, which counts, and each alone."""

    both: float
    ttft: float
    tpot: float


ProbeStep: TypeAlias = tuple[float, float, float, float]
"""Seconds, joules, operations and bytes of a step."""


@dataclass(slots=True)
class StepMeter:
    """The step time of a replica, which also counts what its steps did.

    Most steps only decode. What such a step does grows in a straight line with the tokens that the cache holds, so two
    points of the line are computed for each number of texts, and the rest is interpolated.
    """

    replica: ReplicaModel
    busy_s: float = 0.0
    joules: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    """`flops` and `bytes` of one GPU."""
    _lines: dict[int, tuple[ProbeStep, ProbeStep]] = field(default_factory=dict)

    def step_s(self, texts: int, held: int, prefilled: int, squares: int | None = None) -> float:
        if prefilled:
            done = self._probe(texts, held, prefilled)
            seconds, joules, flops, size = done
        else:
            if (line := self._lines.get(texts)) is None:
                line = self._lines[texts] = self._probe(texts, 0, 0), self._probe(texts, FAR, 0)
            (s0, j0, f0, b0), (s1, j1, f1, b1) = line
            share = held / FAR
            seconds, joules = s0 + share * (s1 - s0), j0 + share * (j1 - j0)
            flops, size = f0 + share * (f1 - f0), b0 + share * (b1 - b0)
        self.busy_s += seconds
        self.joules += joules
        self.flops += flops
        self.bytes += size
        return seconds

    def _probe(self, texts: int, held: int, prefilled: int) -> ProbeStep:
        step = self.replica.step(texts, held, prefilled)
        return step.seconds, self.replica.watts(step) * step.seconds, step.flops, step.bytes


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
    def ttfts_s(self) -> list[float]:
        """Sorted."""
        return sorted((text.first_s or math.inf) - text.arrived_s for text in self.texts)

    @property
    def tpots_s(self) -> list[float]:
        """Sorted, of answers with two tokens or more."""
        return sorted(each for text in self.texts if (each := tpot_s(text)) is not None)

    @property
    def latencies_s(self) -> list[float]:
        """Sorted, of whole requests."""
        return sorted((text.ended_s or math.inf) - text.arrived_s for text in self.texts)


def tpot_s(text: ModelText) -> float | None:
    """Seconds for each token after the first; None for one token."""
    if text.first_s is None or text.ended_s is None or text.output < 2:
        return None
    return (text.ended_s - text.first_s) / (text.output - 1)


def attainment(texts: Sequence[ModelText], slo: LatencySlo) -> Attainment:
    """How many requests kept the objectives. A request of one token has no time between tokens to keep."""
    ttft = [text.first_s is not None and text.first_s - text.arrived_s <= slo.ttft_s for text in texts]
    tpot = [(tpot_s(text) or 0.0) <= slo.tpot_s and text.ended_s is not None for text in texts]
    both = [one and other for one, other in zip(ttft, tpot, strict=True)]
    return Attainment(*(sum(each) / len(texts) for each in (both, ttft, tpot)))


def requests(lengths: RequestLengths, count: int, rate: float, seed: int = 1) -> list[ModelText]:
    """`count` requests at a mean rate, with exponential gaps; an infinite rate: all at once."""
    random = Random(seed)  # noqa: S311 - a simulation
    texts, at = [], 0.0
    for prompt, answer in lengths.sample(count, Random(seed)):  # noqa: S311 - a simulation
        texts.append(ModelText(prompt, answer, answer, at))
        at += random.expovariate(rate) if rate < math.inf else 0.0
    return texts


def serve(replica: ReplicaModel, texts: Sequence[ModelText], limits: BatchLimits = DEFAULT_LIMITS) -> ServedLoad:
    """Serve the texts with the `dp` replicas of the plan, which take turns. Raises PlanError if the model does not
    fit."""
    dp, seconds, meters = replica.plan.dp, 0.0, []
    for number in range(dp):
        if mine := texts[number::dp]:
            meters.append(StepMeter(replica))
            seconds = max(seconds, _run(replica, meters[-1], mine, limits))
    busy = sum(meter.busy_s for meter in meters) or 1.0
    gpus = replica.plan.pp * replica.plan.tp
    idle = replica.device.idle_watts * gpus * (dp * seconds - busy)
    peak = replica.device.peak_for(replica.precision.w, replica.precision.a)
    return ServedLoad(
        texts,
        seconds,
        sum(meter.joules for meter in meters) + max(0.0, idle),
        sum(meter.flops for meter in meters) / busy / peak,
        sum(meter.bytes for meter in meters) / busy / replica.device.bytes_s,
    )


def _run(replica: ReplicaModel, meter: StepMeter, texts: Sequence[ModelText], limits: BatchLimits) -> float:
    """One replica; seconds until its last text has ended."""
    shape = EngineShape(replica.kv_tokens, limits.batch, limits.step_tokens, costs=meter)
    return Simulation(SortedQueue(by_arrival), [ModelWorker(ModelEngine(shape), Greedy())]).run(texts)


def quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values, by linear interpolation."""
    place = share * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low]) if low != high else values[low]
