"""`python -m bench.engine`: tokens per second through Penstock over those of the bare llama.cpp engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import uvloop

from bench import report
from bench.engine.bare import EnginePlan, EngineSpeed
from bench.penstock import MODEL, Penstock
from bench.processes import Died, answer_of
from bench.program import CACHE, OUT, BenchProgram, Option, ProgramRun, Testbed
from bench.report import Ratio, columns
from bench.table1.client import TargetServer, closed_loop
from workers.engines.llamacpp.weights import WeightsError, fetch

NAME = "engine"
RUN_TIMEOUT_S = 600.0

COLUMNS = columns("""
    round: round; bare: bare tok/s; penstock: through Penstock tok/s; share: share .3;
    bare_cpu_ms: CPU ms/token: bare .2; worker_cpu_ms: worker .2; around_cpu_ms: around it .2
""")


class Failed(RuntimeError):
    """One side gave no figure."""


def _run(run: ProgramRun) -> int:
    args = run.args
    rows: list[dict[str, Any]] = []
    with Testbed(run.console, "the model", 2 * args.rounds) as stage:
        path = args.path or fetch(args.cache, lambda _what, _done, _of: None)
        threads = args.threads or max(1, (report.cores()) - 1)
        plan = EnginePlan(
            path=str(path),
            threads=threads,
            streams=args.c,
            requests_per_stream=args.requests_per_stream,
            tokens=args.tokens,
        )
        for number in range(1, args.rounds + 1):
            stage.say(f"round {number}/{args.rounds}: bare")
            without = bare(plan)
            stage.done()
            stage.say(f"round {number}/{args.rounds}: through Penstock")
            folder = stage.room(number)
            through, around_s = penstock(plan, folder)
            stage.done()
            rows.append(
                {
                    "round": number,
                    "bare": without.tokens_per_s,
                    "penstock": through.tokens_per_s,
                    "share": through.tokens_per_s / without.tokens_per_s,
                    "bare_cpu_ms": without.cpu_ms_per_token,
                    "worker_cpu_ms": through.cpu_ms_per_token,
                    "around_cpu_ms": 1e3 * around_s / through.tokens,
                    "bare_tokens": without.tokens,
                    "penstock_tokens": through.tokens,
                }
            )
    what = f"tokens/s through Penstock / bare engine, c={plan.streams}, {threads} thread(s), median of rounds"
    notes = (
        "Around it: API process, Redis and the load generator. The ratio of CPU times holds on a busy machine too, "
        "where tokens/s tell who else was there.",
    )
    title = f"A real engine through Penstock: {path.name}, {plan.tokens} tokens, greedy"
    settings = {**msgspec.to_builtins(plan), "path": path.name}
    run.keep(run.result(NAME, title, COLUMNS, rows, ratios_of(rows, what), notes, **settings))
    return 0


def ratios_of(rows: Sequence[Mapping[str, Any]], what: str) -> tuple[Ratio, Ratio]:
    """Medians of the rounds, with the least and the most."""
    shares = tuple(float(row["share"]) for row in rows)
    per_cpu = tuple(float(row["bare_cpu_ms"]) / float(row["worker_cpu_ms"]) for row in rows)
    cpu = "CPU per token, bare engine / worker process, median of rounds"
    return (
        Ratio.held("engine.share", what, median(shares), digits=3, rounds=shares),
        Ratio(what=cpu, value=median(per_cpu), digits=3, rounds=per_cpu),
    )


def bare(plan: EnginePlan) -> EngineSpeed:
    """In a process of its own, as a worker's engine is. Raises Failed."""
    return answer_of("bench.engine.bare", plan, EngineSpeed, RUN_TIMEOUT_S, Failed)


def penstock(plan: EnginePlan, folder: Path) -> tuple[EngineSpeed, float]:
    """The same requests through the HTTP door, and CPU seconds around the engine. Raises Failed, Died."""
    engine = {"path": plan.path, "slots": plan.streams, "context": plan.context, "threads": plan.threads}
    settings = {f"llamacpp.{key}": value for key, value in engine.items()}
    with (
        Penstock(folder, engine="llamacpp", settings=settings) as system,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        server = TargetServer.at(f"{system.url}/v1", MODEL)
        runner.run(
            closed_loop(server, plan.streams, _requests(server, plan, 4)[: plan.streams], RUN_TIMEOUT_S, _nothing)
        )
        before = system.processes.cpu_s()
        found = runner.run(
            closed_loop(server, plan.streams, _requests(server, plan, plan.tokens), RUN_TIMEOUT_S, _nothing)
        )
        after = system.processes.cpu_s()
    if faults := {answer.fault for answer in found.answers if answer.fault}:
        raise Failed(f"through Penstock: {faults}")
    cpu_s = {name: after[name] - before[name] for name in after}
    worker = cpu_s.pop("worker-1")
    tokens = sum(answer.tokens for answer in found.answers)
    around = sum(cpu_s.values()) + found.own_cpu * found.seconds
    return EngineSpeed(tokens=tokens, seconds=found.seconds, cpu_s=worker), around


def _requests(server: TargetServer, plan: EnginePlan, tokens: int) -> list[bytes]:
    return [server.chat([{"role": "user", "content": prompt}], tokens, temperature=0.0) for prompt in plan.prompts]


def _nothing() -> None:
    """Rounds are counted, not answers."""


main = BenchProgram("penstock bench engine", __doc__, _run, Failed, Died, WeightsError, OSError).taking(
    Option("--c", type=int, default=8, help="concurrent streams, and slots of the engine (default 8)"),
    Option("--rounds", type=int, default=3, help="both sides in turn, so often (default 3)"),
    Option("--requests-per-stream", type=int, default=4, help="in a closed loop (default 4)"),
    Option("--tokens", type=int, default=96, help="of each answer (default 96)"),
    Option("--threads", type=int, help="of the engine (default: all cores but one)"),
    Option("--path", type=Path, help="a GGUF file (default: the default model)"),
    CACHE,
    OUT,
)

if __name__ == "__main__":
    main.exit()
