"""`python -m bench.replay`: a trace in BurstGPT's columns, or requests made to look like one, against a live endpoint.

An open loop: requests leave at their times. Conversations are of class interactive, API calls of class standard.
Without --base-url it is a Penstock started for it, with a simulated engine. PENSTOCK_API_KEY is sent as a bearer token.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvloop

from bench.processes import Died
from bench.program import BenchProgram, Option, ProgramRun, Testbed
from bench.replay.run import COLUMNS, ReplayLimits, lateness, queue_times, replay, rows
from bench.table1.client import NotAServer, servers
from bench.workload.trace import Malformed, Trace, TraceRow, WorkloadShape, cut, requests

NAME = "replay"


def _run(run: ProgramRun) -> int:
    args = run.args
    trace = Trace(args.trace) if args.trace else None
    load = workload(args, trace)
    if not load:
        raise Malformed(f"{args.trace or 'the workload'}: no request in that time")
    with (
        Testbed(run.console, "starting", len(load)) as stage,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        servers([args.base_url] if args.base_url else [], args.model, stage.folder, {"sim.step_ms": 20.0}) as (server,),
    ):
        stage.say(f"asking {server.name}")
        bounds = ReplayLimits(limit_s=args.seconds, timeout_s=args.timeout)
        asked = runner.run(replay(server, load, bounds, stage.done, lanes=not args.plain))
        stage.say("reading the queue times")
        found = rows(asked, queue_times(server, asked))
    title = f"{len(asked)} requests in {load[-1].at:.0f} s, an open loop"
    settings = {name: getattr(args, name) for name in ("speed", "seconds", "seed", "rate", "cv")}
    told = run.result(NAME, title, COLUMNS, found, [lateness(asked)], _notes(found, trace), **settings)
    run.tell(told, args.out and args.out / told.file)
    return 0 if any(row["asked"] > row["failed"] for row in found) else 1


def workload(args: argparse.Namespace, trace: Trace | None) -> list[TraceRow]:
    """What leaves within the time there is, at its times of the replay."""
    end = args.begin + args.seconds * args.speed
    source = trace if trace else requests(WorkloadShape(rate=args.rate, cv=args.cv), args.seed, end)
    kept = cut(source, begin=args.begin, end=end, scale=args.speed, longest=args.longest)
    return sorted(kept, key=lambda request: request.at)


def _notes(found: Sequence[dict[str, object]], trace: Trace | None) -> Iterator[str]:
    by_queue = any(row["queue_p50_ms"] is not None for row in found)
    yield f"In time: {'begun' if by_queue else 'first token'} within the class's target; what failed was not."
    if trace and trace.failed:
        yield f"{trace.failed} rows of the trace had failed when it was recorded: they are not sent."
    yield from (f"{row['lane']}: {row['faults']}" for row in found if row["faults"])


def _positive(word: str) -> float:
    value = float(word)
    if value <= 0:
        raise argparse.ArgumentTypeError("must be more than 0")
    return value


main = BenchProgram("penstock bench replay", __doc__, _run, NotAServer, Malformed, Died, OSError).taking(
    Option("--base-url", help="e.g. http://127.0.0.1:8000/v1"),
    Option("--model", help="name of the model (default: the first one the server names)"),
    Option("--trace", type=Path, help="CSV with the columns of BurstGPT (default: made-up requests)"),
    Option("--begin", type=float, default=0.0, help="second of the trace to begin at (default 0)"),
    Option("--rate", type=float, default=2.0, help="made-up requests a second (default 2)"),
    Option("--cv", type=float, default=1.5, help="coefficient of variation of their gaps (default 1.5)"),
    Option("--seed", type=int, default=1, help="of made-up requests (default 1)"),
    Option("--speed", type=_positive, default=1.0, help="times as fast as the trace (default 1)"),
    Option("--seconds", type=_positive, default=60.0, help="no request leaves later (default 60)"),
    Option("--timeout", type=_positive, default=60.0, help="seconds for one answer (default 60)"),
    Option("--longest", type=int, default=4096, help="tokens of prompt and answer, at most (default 4096)"),
    Option("--plain", action="store_true", help="do not name classes: for servers that refuse `queue`"),
    Option("--out", type=Path, help="folder of the JSON file (default: none is written)"),
)

if __name__ == "__main__":
    main.exit()
