"""Part `gate` of `penstock bench order`: evictions and throughput of four admission rules; the cost of a decision."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from msgspec import Struct, structs

from bench import plots, report
from bench.program import ProgramRun, in_processes
from bench.report import Ratio, columns
from planner.simulator.engine import (
    AdmissionRule,
    EngineShape,
    Greedy,
    ModelEngine,
    ModelStep,
    ModelText,
    PastFuture,
)
from planner.simulator.queues import ModelWorker, Simulation, TextQueue, by_arrival
from workers.gate import Gate, KvCapacity, LengthHistory

NEVER, ALWAYS, GREEDY, GATE = "GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "greedy gate", "Past-Future gate"
RULES = (NEVER, ALWAYS, GREEDY, GATE)
LOADS = ("stationary", "doubling")
CURVE_S = 5.0
RUNNING = 128
"""Texts in the engine while a decision is timed."""
COLUMNS = columns("""
    load: lengths; rule: admission; tokens_per_s: tokens/s .0; evictions: evictions .0;
    evicted: texts evicted, % .2; recomputed: tokens computed again .0; kv_use: KV cache in use, %;
    most_running: most texts at once
""")
FIGURES = tuple(column.key for column in COLUMNS[2:])
NOTES = (
    "Figures are medians of the seeds.",
    f"{NEVER} and {ALWAYS}: the engine takes what its own policy allows. The two gates stand before an engine of the "
    f"policy {ALWAYS}, which evicts the youngest text when the cache is full and computes it again later.",
    "greedy gate: admits while the texts fit as they are now, with 5 % of the cache free.",
    "Past-Future gate: the code of the workers, begun without any history.",
    "Prompts of 64 to 512 tokens; answers lognormal with a median of 200, all declared with max_tokens 2,048; 20,000 "
    "tokens of cache, 256 slots; a step takes 6 ms, 0.03 ms per text, 0.2 us per token held and 0.05 ms per prompt "
    "token. These constants are assumed: they rank the rules, and say nothing of any device.",
)


@dataclass(frozen=True, slots=True)
class GateSize:
    """How much is simulated."""

    seeds: tuple[int, ...] = (41, 42, 43, 61, 62, 63)
    """The first three were seen while the gate was tuned; the others were not."""
    texts: int = 3000
    limit: int = 2048
    decisions: int = 2000


QUICK = GateSize(seeds=(21,), texts=60, decisions=50)


class GateOutcome(Struct, frozen=True, kw_only=True):
    """What came of one simulation."""

    seconds: float
    tokens: int
    evictions: int
    evicted_texts: int
    recomputed: int
    kv_use: float
    """Mean share of the KV cache in use."""
    most_running: int
    steps: int
    curve: list[tuple[float, float, int]]
    """(second, share of the KV cache in use, evictions so far), about once in five seconds."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class NoEvictEngine(ModelEngine):
    """Takes a text if it fits with its whole limit (TensorRT-LLM's GUARANTEED_NO_EVICT)."""

    def _fits(self, text: ModelText) -> bool:
        return sum(each.prompt + each.limit for each in (*self.running, text)) <= self.shape.kv_tokens


def simulated(
    texts: Sequence[ModelText], rule: AdmissionRule, shape: EngineShape, kind: type[ModelEngine] = ModelEngine
) -> GateOutcome:
    """Run the texts through one engine, by arrival."""
    used, curve = 0.0, list[tuple[float, float, int]]()
    tokens = evictions = most = steps = 0

    class Watched(ModelWorker):
        def note(self, step: ModelStep, now_s: float) -> None:
            super().note(step, now_s)
            nonlocal used, tokens, evictions, most, steps
            engine = self.engine
            used += step.duration_s * engine.held / shape.kv_tokens
            steps, most = steps + 1, max(most, len(engine.running))
            tokens, evictions = tokens + len(step.tokens), evictions + len(step.evicted)
            if now_s >= CURVE_S * len(curve):
                curve.append((round(now_s, 1), round(engine.held / shape.kv_tokens, 3), evictions))

    now = Simulation(TextQueue(by_arrival), [Watched(kind(shape), rule)]).run(texts)
    return GateOutcome(
        seconds=now,
        tokens=tokens,
        evictions=evictions,
        evicted_texts=sum(text.evictions > 0 for text in texts),
        recomputed=sum(text.recomputed for text in texts),
        kv_use=used / now,
        most_running=most,
        steps=steps,
        curve=curve,
    )


def measured(run: ProgramRun) -> int:
    """Simulate, time, show and keep."""
    size = QUICK if run.args.quick else GateSize()
    tasks = [(load, seed, rule, size) for load in LOADS for seed in size.seeds for rule in RULES]
    rows = in_processes(row_of, tasks, run.args.jobs)
    decision_ms = timed(size.decisions)
    found = run.result(
        "order-gate",
        f"Admission to one engine: {size.texts:,} texts, all there from the start",
        COLUMNS,
        [merged(rows, load, rule) for load in LOADS for rule in RULES],
        () if run.args.quick else goals(rows, decision_ms),
        NOTES,
        **asdict(size),
        decision_ms=decision_ms,
    )
    return run.keep(found, draw)


def row_of(load: str, seed: int, rule: str, size: GateSize) -> dict[str, Any]:
    """One simulation."""
    admission = _rule(rule, seed)
    texts = made(load, seed, size)
    outcome = simulated(texts, admission, EngineShape(), NoEvictEngine if rule == NEVER else ModelEngine)
    return {
        "load": load,
        "seed": seed,
        "rule": rule,
        **structs.asdict(outcome),
        "tokens_per_s": outcome.tokens_per_s,
        "evicted": 100 * outcome.evicted_texts / size.texts,
        "kv_use": 100 * outcome.kv_use,
    }


def merged(rows: Sequence[Mapping[str, Any]], load: str, rule: str) -> dict[str, Any]:
    """One row of the table: medians of the seeds; the curve of the first one, for the plot."""
    of = [row for row in rows if (row["load"], row["rule"]) == (load, rule)]
    medians = {key: statistics.median(row[key] for row in of) for key in FIGURES}
    return {"load": load, "rule": rule, **medians, "curve": of[0]["curve"]}


def made(load: str, seed: int, size: GateSize) -> list[ModelText]:
    """The texts of one load, in their order."""
    random = Random(seed)  # noqa: S311 - a simulation
    texts = []
    for number in range(size.texts):
        longer = 2 if load == "doubling" and number >= size.texts // 2 else 1
        output = min(size.limit, 1 + int(longer * random.lognormvariate(5.3, 0.8)))
        texts.append(ModelText(random.randint(64, 512), output, size.limit))
    return texts


def _rule(name: str, seed: int) -> AdmissionRule:
    if name == GATE:
        return PastFuture(Random(seed))  # noqa: S311 - a simulation
    return Greedy() if name == GREEDY else AdmissionRule()


def timed(decisions: int) -> float:
    """Median duration of a decision in milliseconds, beside 128 running texts."""
    random = Random(1)  # noqa: S311 - a simulation
    history = LengthHistory()
    for _ in range(400):
        history.add("standard", "", 1 + int(random.lognormvariate(5.3, 0.8)))
    gate, capacity = Gate(history, random), KvCapacity(256, 10**6, 0, 0.05)
    for number in range(RUNNING):
        gate.held[str(number)] = gate.text("standard", "", random.randint(64, 512), 2048, random.randint(0, 400))
    spent = []
    for _ in range(decisions):
        text = gate.text("standard", "", 200, 2048)
        began = time.perf_counter()
        gate.wait_reason(text, capacity)
        spent.append(time.perf_counter() - began)
    return 1000 * statistics.median(spent)


def goals(rows: Sequence[Mapping[str, Any]], decision_ms: float) -> Iterator[Ratio]:
    """Of each load and seed: evictions and throughput of the gate; and the time of a decision."""
    for load, seed in dict.fromkeys((row["load"], row["seed"]) for row in rows):
        of = {row["rule"]: row for row in rows if (row["load"], row["seed"]) == (load, seed)}
        share = 100 * of[GATE]["evictions"] / of[ALWAYS]["evictions"] if of[ALWAYS]["evictions"] else None
        yield Ratio.held("order.evictions", f"{load}, seed {seed}: evictions, % of those of {ALWAYS}", share)
        best = max(row["tokens_per_s"] for row in of.values())
        words = f"{load}, seed {seed}: tokens/s over those of the best rule"
        yield Ratio.held("order.throughput", words, of[GATE]["tokens_per_s"] / best, digits=3)
    yield Ratio.held("order.decision", f"a decision beside {RUNNING} texts, ms", decision_ms, digits=3)


def draw(found: report.Report, folder: Path) -> list[Path]:
    """Evictions so far, over time, on the load whose lengths double."""
    rows = [row for row in found.rows if row["load"] == "doubling" and row["rule"] != NEVER]
    lost = {row["rule"]: [(at, evictions) for at, _, evictions in row["curve"]] for row in rows}
    title = f"Answers whose lengths double midway (seed {found.settings['seeds'][0]})"
    x, y = plots.Axis(title="seconds"), plots.Axis(title="evictions so far")
    return plots.lines(folder / "order-gate", title, lost, x=x, y=y, marked=False)
