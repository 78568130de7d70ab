"""Parallelism plan: how a model is spread over GPUs, what each of them holds, and what a step of a replica takes.

After APEX: `dp` replicas of `pp` stages of `tp` GPUs. A stage has its share of the layers, a GPU its share of each of
them. With attention-dp the GPUs of a stage share the experts (or the feed-forward network), but each attends to its own
requests with all heads. Of the `tp` GPUs of a stage, `ep` have different experts, and `tp / ep` share each expert.

A step is the roofline of each GPU and its communication: two all-reduces of a layer, after attention and after the
feed-forward network; with experts in several places two all-to-alls instead of the second; and a send between stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from planner.facts.catalogue import PlanError
from planner.facts.device import Accelerator
from planner.facts.model import ModelShape
from planner.load import Precision
from planner.moe import distinct_experts
from planner.network import all_reduce_s, all_to_all_s, send_s

WORKSPACE_BYTES = float(1 << 30)
"""APEX: memory that a GPU needs besides weights and cache."""


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """One way to use dp * pp * tp GPUs."""

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
    for dp in _divisors(gpus):
        for pp in _divisors(gpus // dp):
            tp = gpus // dp // pp
            for ep in _divisors(tp) if model.experts > 1 else [1]:
                for attention_dp in (False, True):
                    plan = ParallelPlan(dp, pp, tp, ep, attention_dp)
                    if is_valid(plan, model):
                        yield plan


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


@dataclass(frozen=True, slots=True)
class ReplicaStep:
    """One step of one replica: its time, and the shares of it in which a GPU's arithmetic and memory are busy."""

    seconds: float
    flops: float
    """Of one GPU."""
    bytes: float
    """Of one GPU."""


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """The step time of one replica of a plan. It is the `StepTime` of the simulator.

    `typical_prompt` tokens: what a token of a prompt attends to is half of it. `efficiency`: share of the roofline that
    the engine reaches. `overhead_s`: fixed time of a step, for its launch.
    """

    model: ModelShape
    device: Accelerator
    plan: ParallelPlan
    precision: Precision
    typical_prompt: int = 512
    efficiency: float = 1.0
    overhead_s: float = 0.0

    @property
    def weight_bytes(self) -> float:
        """Of one GPU."""
        model, plan = self.model, self.plan
        layer = model.attention_weights / plan.heads_shared_by + model.router_weights
        layer += model.experts * model.expert_weights / plan.tp
        tables = (model.weights - model.layers * self._layer_weights) / plan.tp
        if plan.pp > 1 and not model.tied:
            tables /= 2  # the first stage has the one of the input, the last that of the output
        return (model.layers / plan.pp * layer + tables) * self.precision.w / 8

    @property
    def _layer_weights(self) -> int:
        model = self.model
        return model.attention_weights + model.experts * model.expert_weights + model.router_weights

    @property
    def kv_tokens(self) -> int:
        """Tokens that the cache of the whole replica holds. Raises PlanError if the weights do not fit."""
        room = self.device.memory_bytes - WORKSPACE_BYTES - self.weight_bytes
        if room <= 0:
            raise PlanError(
                f"{self.plan.name} does not fit: each {self.device.name} would hold {self.weight_bytes / 1e9:.1f} GB "
                f"of weights in {(self.device.memory_bytes - WORKSPACE_BYTES) / 1e9:.1f}; more --tp or --pp, "
                "fewer --w-bits or another --gpu would do"
            )
        token = self.model.kv_token_bytes(self.precision.kv, self.plan.heads_shared_by) / self.plan.pp
        return int(room / token) * (self.plan.tp if self.plan.attention_dp else 1)

    def step_s(self, texts: int, held: int, prefilled: int) -> float:
        return self.step(texts, held, prefilled).seconds

    def step(self, texts: int, held: float, prefilled: int) -> ReplicaStep:
        """A step that decodes `texts` texts, which hold `held` tokens, and computes `prefilled` tokens of prompts.

        Its requests pass the stages in as many groups, so that all stages are busy; a single one passes them alone.
        """
        pp = self.plan.pp
        tokens, held = texts + prefilled, max(0, held - prefilled)  # what a prompt holds is not read back in its step
        groups = max(1, min(pp, tokens))
        stage = self._stage(tokens / groups, held / groups, prefilled / groups)
        send = send_s(tokens / groups * self.model.hidden * self.precision.a / 8, self.device.link_bytes_s,
                      self.device.hop_s) if pp > 1 else 0.0  # fmt: skip
        head = self._part(2 * self.model.head_weights * texts, self.model.head_weights * self.precision.w / 8)
        seconds = pp * (stage.seconds + send) + head.seconds + self.overhead_s
        return ReplicaStep(seconds, groups * stage.flops + head.flops / pp, groups * stage.bytes + head.bytes / pp)

    def _part(self, flops: float, size: float) -> ReplicaStep:
        """Work that all GPUs of a stage share."""
        tp = self.plan.tp
        peak = self.device.peak_for(self.precision.w, self.precision.a) * self.efficiency
        return ReplicaStep(
            max(flops / tp / peak, size / tp / (self.device.bytes_s * self.efficiency)), flops / tp, size / tp
        )

    def _stage(self, tokens: float, held: float, prefilled: float) -> ReplicaStep:
        """One group of tokens in one stage."""
        model, bits, layers = self.model, self.precision, self.model.layers / self.plan.pp
        whole = self.plan.tp if self.plan.attention_dp else 1
        attention_weights = model.attention_weights * bits.w / 8
        moved = tokens * bits.a / 8
        experts = distinct_experts(model.experts, model.experts_per_token, max(1.0, tokens)) * model.expert_weights
        parts = (
            self._part(2 * model.attention_weights * tokens, whole * attention_weights + 4 * model.hidden * moved),
            self._attention(held, prefilled),
            self._part(
                2 * model.experts_per_token * model.expert_weights * tokens,
                experts * bits.w / 8 + model.experts_per_token * (2 * model.hidden + model.ffn) * moved,
            ),
        )
        seconds = layers * (sum(part.seconds for part in parts) + self._communication_s(moved * model.hidden))
        return ReplicaStep(seconds, layers * sum(p.flops for p in parts), layers * sum(p.bytes for p in parts))

    def _attention(self, held: float, prefilled: float) -> ReplicaStep:
        """Of one layer: decodes read the cache; prompts attend to themselves."""
        model = self.model
        seen = held + prefilled * self.typical_prompt / 2
        flops = 4 * seen * model.heads * model.head_dim
        heads = -(-model.kv_heads // self.plan.heads_shared_by) * self.plan.heads_shared_by
        size = 2 * held * heads * model.head_dim * self.precision.kv / 8
        found = self._part(flops, size)
        seconds = max(found.flops / self.device.peak[16], found.bytes / self.device.bytes_s) / self.efficiency
        return ReplicaStep(seconds, found.flops, found.bytes)

    def _communication_s(self, size: float) -> float:
        """Of one layer, with so many bytes of hidden states."""
        plan, link, hop = self.plan, self.device.link_bytes_s, self.device.hop_s
        attention = 0.0 if plan.attention_dp else all_reduce_s(size, plan.tp, link, hop)
        if plan.ep == 1:
            return attention + all_reduce_s(size, plan.tp, link, hop)
        routed = size * self.model.experts_per_token / plan.ep
        exchange = 2 * all_to_all_s(routed, plan.ep, link, hop)
        return attention + exchange + all_reduce_s(routed, plan.tp // plan.ep, link, hop)

    def watts(self, step: ReplicaStep) -> float:
        """Power of all GPUs of the replica in a step: between idle and the limit, by the busier of arithmetic and
        memory."""
        device = self.device
        peak = device.peak_for(self.precision.w, self.precision.a)
        busy = max(step.flops / peak, step.bytes / device.bytes_s) / step.seconds
        return self.plan.pp * self.plan.tp * (device.idle_watts + (device.watts - device.idle_watts) * min(1.0, busy))


def largest_batch(replica: ReplicaModel, tokens: float, cap: int) -> int:
    """Requests of so many tokens that one replica holds, at most `cap`."""
    return min(cap, math.floor(replica.kv_tokens / tokens))
