"""Part `colocation`: chats alone and beside a backlog of lane batch, in turn, on real processes.

The backlog runs once alone, undisturbed, and every text of it beside chats is compared with that run. With the embedded
engine, greedy texts may differ where a batch has another shape.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from bench.batch.client import InputLine
from bench.penstock import MODEL, Penstock
from bench.program import ProgramRun, Testbed
from bench.report import Ratio, Report, columns
from bench.stats import quantile
from bench.table1.client import ConcurrencyLevel, TargetServer, closed_loop
from penstock.client import AsyncPenstockClient
from penstock.client_protocol import Json
from workers.engines.llamacpp.weights import fetch

COLUMNS = columns("""
    engine: engine; round: round; ttft_alone: TTFT p99 alone, ms; ttft_beside: beside a backlog, ms;
    itl_alone: ITL p99 alone, ms; itl_beside: beside, ms; chats: tokens/s of chats; offline: of the backlog;
    filled: of what was idle, %; preempted: preempted texts; differ: texts that differ
""")
NOTES = (
    "Idle: the tokens a second of the backlog alone, without targets and without the gate, less those of the chats. "
    "The first round, in which the worker learns what its engine takes, is not counted.",
    "Simulated engine: 32 slots, 12,000 tokens of cache, a step takes 15 ms and 0.05 ms a text, 1,000 prompt tokens 20 "
    "ms; targets for chats: TTFT 60 ms, ITL 18 ms. Four streams ask for 24 tokens again and again; lines of the "
    "backlog have about 200 tokens of prompt and 300 of answer. One worker, one API process, one scheduler; all of "
    "them and the clients share the machine.",
    "Embedded engine: SmolLM2-135M on the CPU, four slots, two streams, TTFT 1,000 ms, ITL 100 ms. No goal: there a "
    "chat and a line compete for the same cores.",
)
STEP_MS = 15.0
PROMPT = "Tell the story of the river and its mill, of all who lived there and of what the water did. " * 9
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """An engine as it is served, and the load on it."""

    name: str
    settings: Mapping[str, object]
    ttft_ms: float
    itl_ms: float
    streams: int
    chat_tokens: int
    requests: int
    """Chats in each half of a round."""
    lines: int
    """Of the backlog of a round: more than are done beside the chats."""
    line_tokens: int
    rounds: int

    @property
    def targets(self) -> str:
        return f"targets.interactive.ttft_ms = {self.ttft_ms}\ntargets.interactive.itl_ms = {self.itl_ms}\n"


SIM = MeasuredEngine(
    name="sim",
    settings={
        "sim.slots": 32, "sim.kv_tokens": 12_000, "sim.kv_policy": "MAX_UTILIZATION", "sim.step_ms": STEP_MS,
        "sim.step_ms_per_text": 0.05, "sim.prefill_ms": 0, "sim.prefill_ms_per_1k_tokens": 20,
    },
    ttft_ms=60.0, itl_ms=18.0, streams=4, chat_tokens=24, requests=250, lines=180, line_tokens=300, rounds=3,
)  # fmt: skip
EMBEDDED = MeasuredEngine(
    name="llamacpp",
    settings={"llamacpp.slots": 4},
    ttft_ms=1000.0, itl_ms=100.0, streams=2, chat_tokens=32, requests=10, lines=6, line_tokens=64, rounds=1,
)  # fmt: skip
QUICK = {"rounds": 1, "requests": 12, "lines": 40, "line_tokens": 60}


def measured(run: ProgramRun) -> Report:
    """Serve each engine, load it, show and keep."""
    sim = MeasuredEngine(**asdict(SIM) | (QUICK if run.args.quick else {}))
    rows: list[dict[str, Any]] = []
    with Testbed(run.console, "starting", 1 if run.args.quick else 2) as testbed:
        testbed.say(sim.name)
        rows += asyncio.run(_rounds(sim, testbed.room("sim"), {}))
        testbed.done()
        if not run.args.quick:
            testbed.say(EMBEDDED.name)
            path = fetch(run.args.cache, lambda *_: None)
            rows += asyncio.run(_rounds(EMBEDDED, testbed.room("llamacpp"), {"llamacpp.path": path}))
            testbed.done()
    ratios = () if run.args.quick else goals([row for row in rows if row["engine"] == SIM.name])
    title = "Chats beside a backlog of lane batch"
    return run.keep(run.result("order-colocation", title, COLUMNS, rows, ratios, NOTES, sim=asdict(sim)))


async def _rounds(engine: MeasuredEngine, folder: Path, more: Mapping[str, object]) -> list[dict[str, Any]]:
    settings = {**engine.settings, **more}
    config = "min_workers = 1\nmax_workers = 1\n"
    for name in ("free", "kept"):
        (folder / name).mkdir()
    kind = engine.name
    free = settings | {"worker.gate": "false"}
    with Penstock(folder / "free", engine=kind, schedulers=1, settings=free, config=config) as penstock:
        undisturbed, rate = await _alone(engine, penstock)
    config += engine.targets
    with Penstock(folder / "kept", engine=kind, schedulers=1, settings=settings, config=config) as penstock:
        return [await _round(engine, penstock, number, undisturbed, rate) for number in range(engine.rounds + 1)][1:]


async def _alone(engine: MeasuredEngine, penstock: Penstock) -> tuple[list[str], float]:
    """The backlog alone: its texts, and its tokens a second while the engine is full."""
    async with AsyncPenstockClient(penstock.url) as client:
        backlog = BatchBacklog(client, engine)
        await backlog.put()
        ended = await backlog.wait()
    began = min(job["started_at"] for job in ended)
    whole_s = max(ended_s(job) for job in ended) - began
    return [text_of(job) for job in ended], tokens_within(ended, began + 0.2 * whole_s, began + 0.7 * whole_s)


async def _round(
    engine: MeasuredEngine, penstock: Penstock, number: int, undisturbed: Sequence[str], rate: float
) -> dict[str, Any]:
    alone = await _chats(engine, penstock)
    async with AsyncPenstockClient(penstock.url) as client:
        backlog = BatchBacklog(client, engine)
        await backlog.put()
        await asyncio.sleep(1.0)
        began = time.time()
        beside = await _chats(engine, penstock)
        until = time.time()
        ended = await backlog.wait()
    chats = sum(answer.tokens for answer in beside.finished) / beside.seconds
    offline = tokens_within(ended, began, until)
    return {
        "engine": engine.name,
        "round": number,
        "ttft_alone": ttft_p99_ms(alone),
        "ttft_beside": ttft_p99_ms(beside),
        "itl_alone": itl_p99_ms(alone),
        "itl_beside": itl_p99_ms(beside),
        "chats": chats,
        "offline": offline,
        "filled": 100 * offline / (rate - chats) if rate > chats else None,
        "preempted": sum(is_preempted(job) for job in ended),
        "differ": sum(text_of(job) != text for job, text in zip(ended, undisturbed, strict=True)),
        "backlog_alone": rate,
        "left": sum(ended_s(job) > until for job in ended),
    }


class BatchBacklog:
    """Jobs of lane batch, the same in every round."""

    def __init__(self, client: AsyncPenstockClient, engine: MeasuredEngine) -> None:
        self._client, self._engine = client, engine
        self._ids: list[str] = []

    async def put(self) -> None:
        """All at once."""
        for number in range(self._engine.lines):
            line = InputLine(number, f"{number}: {PROMPT}", self._engine.line_tokens, MODEL)
            body = line.request(queue={"priority": "batch"}, temperature=0)["body"]
            self._ids.append((await self._client.submit(body))["id"])

    async def wait(self) -> list[Json]:
        """The jobs when all have ended, in their order."""
        return [await self._client.wait(job_id, TIMEOUT_S) for job_id in self._ids]


async def _chats(engine: MeasuredEngine, penstock: Penstock) -> ConcurrencyLevel:
    server = TargetServer.at(f"{penstock.url}/v1", MODEL)
    questions = [[{"role": "user", "content": f"Question {n}: what is water?"}] for n in range(engine.requests)]
    asked = [server.chat(each, engine.chat_tokens, temperature=0) for each in questions]
    found = await closed_loop(server, engine.streams, asked, TIMEOUT_S, lambda: None)
    if faults := {answer.fault for answer in found.answers if answer.fault}:
        raise RuntimeError(f"chats failed: {faults}")
    return found


def text_of(job: Json) -> str:
    """The answer of an ended job."""
    return str(job["result"]["choices"][0]["message"]["content"])


def ended_s(job: Json) -> float:
    """When its last attempt ended."""
    return float(job["attempt_log"][-1]["ended_at"])


def is_preempted(job: Json) -> bool:
    """Whether it gave way at least once."""
    return any(attempt["outcome"] == "preempted" for attempt in job["attempt_log"])


def tokens_within(jobs: Sequence[Json], began: float, until: float) -> float:
    """Tokens a second of a span of time, if each attempt generated its tokens evenly."""
    tokens = 0.0
    for attempt in (each for job in jobs for each in job["attempt_log"]):
        first, last = attempt["started_at"], attempt["ended_at"]
        shared = max(0.0, min(until, last) - max(began, first))
        tokens += (attempt["tokens"] or 0) * shared / max(1e-3, last - first)
    return tokens / (until - began)


def ttft_p99_ms(level: ConcurrencyLevel) -> float:
    """Of all answers."""
    return 1000 * quantile(sorted(answer.ttft for answer in level.finished), 0.99)


def itl_p99_ms(level: ConcurrencyLevel) -> float:
    """Of all gaps between two pieces."""
    return 1000 * quantile(sorted(b - a for each in level.finished for a, b in pairwise(each.times)), 0.99)


def goals(rows: Sequence[Mapping[str, Any]]) -> Iterator[Ratio]:
    """Medians of the rounds; nothing may differ in any. Chats alone count as in the round that was disturbed least:
    other programs of the machine make them slower, and must not make the ratio smaller."""
    for name, words in (("ttft", "TTFT"), ("itl", "ITL")):
        alone = min(row[f"{name}_alone"] for row in rows)
        rounds = [(row[f"{name}_beside"] - STEP_MS) / alone for row in rows]
        what = f"{words} p99 of chats beside a backlog, less a step of {STEP_MS:.0f} ms, over the least alone"
        yield Ratio.held("order.colocated", what, median(rounds), rounds=rounds)
    filled = [row["filled"] for row in rows]
    yield Ratio.held("order.filled", "what the backlog fills of the idle engine, %", median(filled), rounds=filled)
    yield Ratio.none("texts of the backlog that differ from an undisturbed run", sum(row["differ"] for row in rows))
    preempted = float(sum(row["preempted"] for row in rows))
    yield Ratio(what="preempted texts among them", value=preempted, at_least=1.0, digits=0)
