"""Part `replay`: goodput of a bursty trace of three tenants beside a batch, by four orders, in the simulator.

Requests have Gamma gaps and lengths by Zipf's law. Gaps are Gamma with shape 1/cv^2 and scale cv^2/rate: mean 1/rate,
coefficient of variation cv. One order is that of vLLM's priority scheduler.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from bench import plots
from bench.order.rule import PenstockQueue
from bench.program import ProgramRun, in_processes
from bench.report import Ratio, Report, columns
from bench.stats import quantile
from planner.simulator.engine import AdmissionRule, EngineShape, Greedy, ModelEngine, ModelText
from planner.simulator.queues import (
    ModelWorker,
    PenstockWorker,
    Simulation,
    TextQueue,
    by_arrival,
    by_lane,
)
from planner.trace import TraceRow, cut
from scheduler.policy.snapshot import TARGETS
from streaming.fleet.settings import LatencyTargets
from streaming.order import Priority
from telemetry.latency import time_per_output_token

MAX_RANK = 256
PROMPT_UNIT, ANSWER_UNIT = 16, 6
"""Tokens of a generated request: so many times a rank up to MAX_RANK, drawn with a probability of 1 / rank (Zipf)."""
API_SHARE = 0.3
"""Of generated calls, those by programs, on the standard lane; the others are conversations, on lane interactive."""


def arrivals(rate: float, cv: float, chance: Random, seconds: float) -> Iterator[float]:
    """Times at which `rate` requests a second come, in the mean."""
    at = 0.0
    while (at := at + chance.gammavariate(1 / cv**2, cv**2) / rate) < seconds:
        yield at


def requests(rate: float, cv: float, seed: int, seconds: float) -> Iterator[TraceRow]:
    """The requests of so many seconds, by time; the same for the same seed."""
    chance = Random(seed)  # noqa: S311 - a workload, not a secret
    prompts, answers = _ranks(chance), _ranks(chance)
    for at in arrivals(rate, cv, chance, seconds):
        prompt, answer = PROMPT_UNIT * next(prompts), ANSWER_UNIT * next(answers)
        yield TraceRow(at, prompt, answer, "standard" if chance.random() < API_SHARE else "interactive")


def _ranks(chance: Random) -> Iterator[int]:
    """For ever."""
    ranks = range(1, MAX_RANK + 1)
    weights = list(accumulate(1 / rank for rank in ranks))
    while True:
        yield from chance.choices(ranks, cum_weights=weights, k=1024)


class RankedEngine(ModelEngine):
    """Orders its queue by lane, then by arrival, and evicts the last text in that order."""

    def submit(self, text: ModelText) -> None:
        insort(self.waiting, text, key=by_lane)

    def _take(self) -> None:
        super()._take()
        self.running.sort(key=by_lane)

    def _put_back(self, text: ModelText) -> None:
        self.submit(text)


class Everything(AdmissionRule):
    """Lets everything through at once."""

    def admits(self, text: ModelText, engine: ModelEngine) -> bool:
        return True


OURS, FIFO, LANES, VLLM = "penstock", "FIFO", "lanes only", "vLLM's priority"

CONTENDERS = (OURS, FIFO, LANES, VLLM)


def contender(name: str, shape: EngineShape, seed: int, targets: LatencyTargets) -> tuple[TextQueue, ModelWorker]:
    """Its queue, and the worker with its engine."""
    if name == OURS:
        return PenstockQueue(), PenstockWorker(ModelEngine(shape), Random(seed), targets)  # noqa: S311 - a simulation
    if name == VLLM:
        return TextQueue(by_arrival), ModelWorker(RankedEngine(shape), Everything())
    return TextQueue(by_lane if name == LANES else by_arrival), ModelWorker(ModelEngine(shape), Greedy())


NOTES = {
    OURS: "Penstock: the order, the gate, preemption, and, with targets for chats, co-location; the product's code.",
    FIFO: "FIFO: by arrival. An engine gets the next text while the texts fit as they are now, with 5 % of the cache "
    "free; it evicts the youngest if they grow beyond it.",
    LANES: "lanes only: strict priority between lanes, by arrival in a lane; otherwise as FIFO.",
    VLLM: "vLLM's priority: the engine has everything at once. It takes the lowest priority number first, then the "
    "earliest arrival; if the running texts grow beyond the cache, it evicts the last of them in that order, and "
    "computes it again later.",
}


def ran(
    name: str,
    texts: Sequence[ModelText],
    shape: EngineShape,
    seed: int,
    targets: LatencyTargets = LatencyTargets(),  # noqa: B008 - frozen
    until_s: float = float("inf"),
) -> tuple[float, ModelWorker]:
    """Run the texts, which keep what came of them. Returns the time and the worker."""
    queue, worker = contender(name, shape, seed, targets)
    return Simulation(queue, [worker]).run(texts, until_s), worker


COLUMNS = columns("""
    cache: tokens of cache; rate: requests/s .0; rule: order; goodput: in time, requests/s .2; within: in time, % ;
    least: of the worst tenant, %; ttft_p99_s: TTFT p99 of interactive, s .2; batch_tokens: batch, tokens/s .0
""")
CASES = ((60_000, 1), (60_000, 2), (60_000, 4), (60_000, 6), (60_000, 8), (20_000, 1), (20_000, 2), (20_000, 4))
"""Tokens of the KV cache, and requests a second without the batch. A hundred texts fit into the larger cache; the
smaller one is full of the texts of four requests a second alone."""
CONTEXT = 4096
TTFT_S = {Priority.INTERACTIVE: 1.0, Priority.STANDARD: TARGETS[Priority.STANDARD]}
TPOT_S = 0.05
SLO = LatencyTargets(ttft_ms=1000 * TTFT_S[Priority.INTERACTIVE], itl_ms=1000 * TPOT_S)
TENANTS = {"large": 0.7, "middle": 0.2, "small": 0.1}
BATCH_LINES = 6000
DRAIN_S = 60.0
DETAILS = (
    "in time: first token within 1 s (interactive) or 30 s (standard), and at most 50 ms per later token in the mean "
    "of the answer. Mean of the seeds. What has not ended a minute after the last arrival counts as late.",
    "Gaps are Gamma with cv 1.5, lengths Zipf; 70 % conversations (interactive), 30 % API calls (standard); the "
    "tenants send 70, 20 and 10 %. The batch has work all the time: prompts of 64 to 512 "
    "tokens, answers lognormal with a median of 200. max_tokens of every text is the next power of two. Engine as in "
    "the part `gate`, with a cache of another size.",
)


@dataclass(frozen=True, slots=True)
class ReplaySize:
    """How much is simulated."""

    seeds: tuple[int, ...] = (41, 42, 43)
    cases: tuple[tuple[int, int], ...] = CASES
    seconds: float = 200.0


QUICK = ReplaySize(seeds=(21,), cases=((20_000, 4),), seconds=20.0)


def measured(run: ProgramRun) -> int:
    """Simulate, show, draw and keep."""
    size = QUICK if run.args.quick else ReplaySize()
    tasks = [(*case, rule, seed, size.seconds) for case in size.cases for rule in CONTENDERS for seed in size.seeds]
    single = in_processes(outcome_of, tasks, run.args.jobs)
    rows = [merged([row for row in single if case_of(row) == case]) for case in dict.fromkeys(map(case_of, single))]
    ratios = () if run.args.quick else goals(single)
    title = f"A bursty trace of three tenants beside a batch, {size.seconds:.0f} s"
    notes = (*DETAILS, *NOTES.values())
    return run.keep(run.result("order-replay", title, COLUMNS, rows, ratios, notes, **asdict(size)), draw)


def made(rate: float, seed: int, seconds: float) -> tuple[list[ModelText], list[ModelText]]:
    """The texts of the trace, and those of the batch, which are there from the start."""
    random = Random(seed)  # noqa: S311 - a simulation
    trace = cut(requests(rate, 1.5, seed, seconds), longest=CONTEXT)
    texts = [_text(row, random.choices(list(TENANTS), list(TENANTS.values()))[0]) for row in trace]
    lines = []
    for number in range(BATCH_LINES):
        answer = min(1024, 1 + int(random.lognormvariate(5.3, 0.8)))
        lines.append(_text(TraceRow(1e-6 * number, random.randint(64, 512), answer, Priority.BATCH), "batch"))
    return texts, lines


def _text(row: TraceRow, tenant: str) -> ModelText:
    limit = 1 << (row.answer - 1).bit_length()
    return ModelText(row.prompt, row.answer, limit, arrived_s=row.at, lane=row.lane, tenant=tenant)


def case_of(row: Mapping[str, Any]) -> tuple[int, int, str]:
    """Cache, rate and rule of a row."""
    return row["cache"], row["rate"], row["rule"]


def outcome_of(cache: int, rate: int, rule: str, seed: int, seconds: float) -> dict[str, Any]:
    """One simulation."""
    texts, lines = made(rate, seed, seconds)
    ran(rule, [*lines, *texts], EngineShape(cache), seed, SLO, until_s=seconds + DRAIN_S)
    chats = sorted(t.first_s - t.arrived_s for t in texts if t.lane == Priority.INTERACTIVE and t.first_s is not None)
    good = [is_in_time(text) for text in texts]
    shares = [fmean([is_in_time(text) for text in texts if text.tenant == tenant] or [1]) for tenant in TENANTS]
    return {
        "cache": cache,
        "rate": rate,
        "rule": rule,
        "seed": seed,
        "goodput": sum(good) / seconds,
        "within": 100 * fmean(good),
        "least": 100 * min(shares),
        "ttft_p99_s": quantile(chats, 0.99) if chats else seconds,
        "batch_tokens": sum(line.generated for line in lines) / (seconds + DRAIN_S),
    }


def is_in_time(text: ModelText) -> bool:
    """Whether it has ended and kept both limits."""
    if text.ended_s is None or text.first_s is None:
        return False
    tpot_s = time_per_output_token(text.first_s, text.ended_s, text.generated) or 0.0
    return text.first_s - text.arrived_s <= TTFT_S[Priority(text.lane)] and tpot_s <= TPOT_S


def merged(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row of the table from those of its seeds."""
    means = {key: fmean([row[key] for row in rows]) for key, value in rows[0].items() if isinstance(value, float)}
    return {key: rows[0][key] for key in ("cache", "rate", "rule")} | means


def goals(rows: Sequence[Mapping[str, Any]]) -> Iterator[Ratio]:
    """Of each cache and rate: goodput over that of the other orders."""
    for cache, rate in dict.fromkeys((row["cache"], row["rate"]) for row in rows):
        of = {rule: [r["goodput"] for r in rows if case_of(r) == (cache, rate, rule)] for rule in CONTENDERS}
        for rule in CONTENDERS:
            if rule != OURS and all(of[rule]):
                rounds = [mine / other for mine, other in zip(of[OURS], of[rule], strict=True)]
                words = f"cache of {cache:,}, {rate} requests/s: goodput over that of {rule}"
                yield Ratio.held("order.goodput", words, fmean(rounds), digits=3, rounds=rounds)


def draw(found: Report, folder: Path) -> list[Path]:
    """Goodput over the rate, with the larger cache."""
    rows = [row for row in found.rows if row["cache"] == CASES[0][0]]
    series = {rule: [(row["rate"], row["goodput"]) for row in rows if row["rule"] == rule] for rule in CONTENDERS}
    title = "Goodput beside a batch: TTFT and TPOT within their limits"
    x, y = plots.Axis(title="requests a second"), plots.Axis(title="requests a second in time")
    return plots.lines(folder / "order-replay", title, series, x=x, y=y)
