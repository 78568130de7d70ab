"""Comparisons: what papers published, what the planner says of the same case, and why the two differ.

Published figures stand here with their source; those of the planner are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from msgspec import structs

from planner.cost import knee_of
from planner.facts import catalogue
from planner.frontier import modelled
from planner.grid import best_by_concurrency, grid
from planner.load import HALF, KvReads, RequestLengths
from planner.memory import memory_plan
from planner.offload import attention_offloaded
from planner.parallel import ParallelPlan
from planner.roofline import RooflineInput, decode
from planner.search import SearchInput, best, search
from planner.serving import BatchLimits, ServedLoad, quantile, requests, serve

EFFICIENCY = 0.7
"""Share of the roofline, as `penstock plan` has it unless it is told otherwise."""
SLM_LENGTHS = RequestLengths(512, 256)
SLM_TABLE_1 = {"opt-125m": 512, "opt-1.3b": 256, "opt-2.7b": 128, "opt-6.7b": 64, "opt-13b": 16}
"""Largest batch on an A100 of 40 GB."""
SLM_KNEE = 128
"""Batch from which the throughput of OPT-125M and OPT-1.3B no longer grows on an A100, about."""
SCALELLM_TBT_MS = {4: 10.4, 8: 12.2, 16: 13.4, 32: 14.6, 64: 16.5}
"""Table 1: time between tokens of Mixtral-8x7B by concurrency."""
SCALELLM_CONTEXT = 500 + 256
SCALELLM_FEW, SCALELLM_MANY = 1, 256
"""Concurrencies at both ends of the fourth experiment."""
APEX_LENGTHS, APEX_REQUESTS, APEX_BATCH = RequestLengths(1198, 209), 100, 15
"""Of the example in the README of microsoft/apex_plus: its means, by its tokens and requests a second and its run of
62.06 s, and about 14.4 requests in an iteration."""
APEX_EXAMPLE = {
    ParallelPlan(tp=2): (336.752, 44.064, 75.69),
    ParallelPlan(tp=2, attention_dp=True): (243.242, 50.885, 85.91),
    ParallelPlan(pp=2): (163.343, 62.767, 158.52),
}
"""The same example, Llama-3-70B on two H100: tokens a second, ms for each token, kJ of the run."""
H100_BYTES = 80 * (1 << 30)
"""What a device of "80 GB" has, if its GB are of 2^30 bytes: as APEX counts them."""
APEX_MIXES = (RequestLengths(512, 256), RequestLengths(2048, 128), RequestLengths(128, 2048))
APEX_SPEEDUP, APEX_ENERGY = 3.37, 0.45
"""Abstract: up to 3.37 x faster than heuristic plans, up to 45 % less energy than latency-optimal ones."""
LSERVE_SPEEDUP = (1.3, 2.1)
"""Abstract (v2): decoding, over vLLM."""
LSERVE_READS = KvReads(budget=4096, streaming=0.5)
"""Half of the heads stream; the others read a constant number of pages."""
LSERVE_CONTEXTS = (64 << 10, 96 << 10, 128 << 10)
LAMINA_GAIN = (1.161, 1.901)
"""Abstract (v2): throughput over existing solutions with similar costs."""
LAMINA_LENGTHS = (RequestLengths(1155, 211), RequestLengths(12000, 340))
LAMINA_LINK_BYTES_S = 50e9


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of a paper beside that of the planner. None: the planner has none."""

    paper: str
    case: str
    unit: str
    published: tuple[float, ...]
    """One figure, or the least and the most of a range."""
    planner: float | None

    @property
    def ratio(self) -> float | None:
        """Planner over published; 1 within a range, else over its nearer end. None if the planner has no figure."""
        if self.planner is None:
            return None
        low, high = self.published[0], self.published[-1]
        return self.planner / min(max(self.planner, low), high)


def slm_pareto() -> Iterator[Comparison]:
    """SLM-Pareto: its Table 1, and the knee of small models."""
    device = catalogue.device("a100-40gb")
    for name, published in SLM_TABLE_1.items():
        plan = memory_plan(catalogue.model(name), device, SLM_LENGTHS, HALF)
        yield Comparison("SLM-Pareto", f"Table 1, {name}", "requests at once", (published,), float(plan.power_of_two))
    for name in ("opt-125m", "opt-1.3b"):
        points = modelled(RooflineInput(catalogue.model(name), device), SLM_LENGTHS, EFFICIENCY)
        yield Comparison("SLM-Pareto", f"knee, {name}", "batch", (SLM_KNEE,), float(knee_of(points)[0].batch))


def scalellm() -> Iterator[Comparison]:
    """ScaleLLM: the steps of its Table 1, and the layouts that its fourth experiment finds best."""
    mixtral = catalogue.model("mixtral-8x7b")
    pair = RooflineInput(mixtral, catalogue.device("h100"), tp=2)
    for batch, published in SCALELLM_TBT_MS.items():
        step_ms = 1e3 * decode(pair, batch, SCALELLM_CONTEXT).seconds
        yield Comparison("ScaleLLM", f"Table 1, {batch} at once, 2 x H100", "ms a token", (published,), step_ms)
    given = SearchInput(mixtral, catalogue.device("h100"), 8, SLM_LENGTHS, HALF, EFFICIENCY, limits=BatchLimits(64))
    top = best_by_concurrency(grid(given, (SCALELLM_FEW, SCALELLM_MANY)))
    for concurrency, tp in ((SCALELLM_FEW, 8), (SCALELLM_MANY, 2)):
        case = f"best layout for {concurrency} at once, 8 x H100"
        yield Comparison("ScaleLLM", case, "GPUs in a replica", (tp,), float(top[concurrency].tp))


def apex_example() -> Iterator[Comparison]:
    """APEX: the three plans of its own example."""
    for plan, (tokens_s, tpot_ms, kilojoules) in APEX_EXAMPLE.items():
        found = _apex_served(plan)
        case = f"Llama-3-70B on 2 x H100, {plan.name}"
        figures = (None,) * 3 if found is None else (
            found.tokens_s, 1e3 * quantile(found.tpots_s, 0.5), found.joules / 1e3
        )  # fmt: skip
        published = (("tokens/s", tokens_s), ("ms a token", tpot_ms), ("kJ", kilojoules))
        for (unit, value), figure in zip(published, figures, strict=True):
            yield Comparison("APEX", case, unit, (value,), figure)


def _apex_served(plan: ParallelPlan) -> ServedLoad | None:
    device = structs.replace(catalogue.device("h100"), memory_bytes=H100_BYTES)
    limits = BatchLimits(APEX_BATCH)
    given = SearchInput(catalogue.model("llama-3.1-70b"), device, 2, APEX_LENGTHS, HALF, EFFICIENCY, limits=limits)
    replica = given.replica(plan)
    if replica.kv_tokens < APEX_LENGTHS.whole:
        return None
    return serve(replica, requests(APEX_LENGTHS, APEX_REQUESTS, math.inf), limits)


def apex_search() -> Iterator[Comparison]:
    """APEX: the most that a search gains over one tensor-parallel replica, and in energy over the plan with the least
    latency, among three mixes of lengths on two kinds of GPU."""
    gains, savings = [], []
    for name in ("h100", "h200"):
        for lengths in APEX_MIXES:
            given = SearchInput(catalogue.model("llama-3.1-70b"), catalogue.device(name), 8, lengths, HALF, EFFICIENCY)
            found = search(given)
            top = best(found)
            heuristic = next(each for each in found if each.plan == ParallelPlan(tp=8))
            gains.append(top.throughput.backlog.tokens_s / heuristic.backlog.tokens_s)
            savings.append(1 - top.energy.backlog.joules_token / top.latency.backlog.joules_token)
    case = "Llama-3.1-70B on 8 GPUs, the most of six searches"
    yield Comparison("APEX", f"{case}: throughput over tp8", "x, up to", (APEX_SPEEDUP,), max(gains))
    yield Comparison("APEX", f"{case}: energy saved", "share, up to", (APEX_ENERGY,), max(savings))


def lserve() -> Iterator[Comparison]:
    """LServe: a decode step with sparse reads of the cache beside one that reads all."""
    llama, device = catalogue.model("llama-3.1-8b"), catalogue.device("a100-80gb")
    for context in LSERVE_CONTEXTS:
        dense = decode(RooflineInput(llama, device), 1, context).seconds
        sparse = decode(RooflineInput(llama, device, reads=LSERVE_READS), 1, context).seconds
        case = f"Llama-3-8B, A100, context of {context >> 10}k"
        yield Comparison("LServe", case, "x faster decode", LSERVE_SPEEDUP, dense / sparse)


def lamina() -> Iterator[Comparison]:
    """Lamina: decoding on 2 x H100 with attention on 4 x H20, over 4 x H100; in one batch, and in two that take
    turns."""
    llama, compute, memory = catalogue.model("llama-3.1-70b"), catalogue.device("h100"), catalogue.device("h20")
    for lengths in LAMINA_LENGTHS:
        whole = RooflineInput(llama, compute, tp=4)
        batch = memory_plan(llama, compute, lengths, HALF, tp=4).max_batch
        alike = batch / decode(whole, batch, lengths.mean).seconds
        halved = replace(whole, tp=2)
        step = attention_offloaded(halved, memory, 4, lengths, LAMINA_LINK_BYTES_S)
        case = f"Llama-3-70B, {lengths.prompt} + {lengths.answer} tokens"
        yield Comparison("Lamina", f"{case}, one batch", "x throughput", LAMINA_GAIN, step.tokens_s / alike)
        less = structs.replace(memory, memory_bytes=memory.memory_bytes / 2)
        turn = attention_offloaded(halved, less, 4, lengths, LAMINA_LINK_BYTES_S)
        tokens_s = turn.batch / max(turn.compute_s, turn.attention_s + turn.link_s)
        yield Comparison("Lamina", f"{case}, two batches in turn", "x throughput", LAMINA_GAIN, tokens_s / alike)


COMPARISONS: tuple[Callable[[], Iterator[Comparison]], ...] = (
    slm_pareto, scalellm, apex_example, apex_search, lserve, lamina,
)  # fmt: skip
