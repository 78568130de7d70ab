"""`python -m bench.table1`: TTFT and TBT of any OpenAI-compatible server, by concurrency, as in the paper's Table 1.

With --rate or --trace, an open loop instead: requests leave at their times, and each class is held against its target.
Without --base-url it is a Penstock started for it, with a simulated engine. PENSTOCK_API_KEY is sent as a bearer token.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import uvloop

from bench.processes import Died
from bench.program import OUT, BenchProgram, Option, ProgramRun, Testbed, counts
from bench.report import columns
from bench.stats import quantile
from bench.table1 import open_loop
from bench.table1.client import ConcurrencyLevel, NotAServer, Protocol, level, made_up, servers
from planner.simulator.trace import Malformed, Trace, TraceRow, cut, requests

TIMEOUT = "Timeout"

COLUMNS = columns("""
    server: server; streams: concurrency; ttft_ms: TTFT ms; ttft_p99_ms: p99 .1; tbt_ms: TBT ms .2;
    tbt_p99_ms: p99 .2; tokens_per_s: tok/s .0; finished: finished; asked: of
""")


def row(server: str, level: ConcurrencyLevel) -> dict[str, Any]:
    """TTFT and TBT as the mean over the requests that finished, as in the paper; TBT is one request's mean time between
    tokens, (t6 - t5) / (Ng - 1)."""
    ttft = sorted(1e3 * answer.ttft for answer in level.finished)
    tbt = sorted(1e3 * value for answer in level.finished if (value := answer.tpot) is not None)
    found: dict[str, Any] = {
        "server": server,
        "streams": level.streams,
        "finished": len(level.finished),
        "asked": level.asked,
        "timeout": level.timed_out,
        "faults": sorted({answer.fault for answer in level.answers if answer.fault})[:3],
        "own_cpu": level.own_cpu,
    }
    if level.timed_out:
        return found | dict.fromkeys(("ttft_ms", "tbt_ms"), TIMEOUT)
    return found | {
        "ttft_ms": fmean(ttft),
        "ttft_p99_ms": quantile(ttft, 0.99),
        "tbt_ms": fmean(tbt) if tbt else None,
        "tbt_p99_ms": quantile(tbt, 0.99) if tbt else None,
        "tokens_per_s": sum(answer.tokens for answer in level.finished) / level.seconds,
    }


STEP_MS, PREFILL_MS = 15.0, 25.0
OWN = {"sim.step_ms": STEP_MS, "sim.prefill_ms": PREFILL_MS}
QUICK = Protocol(levels=(1, 8, 64), requests_per_stream=2, tokens=64)


def _run(run: ProgramRun) -> int:
    return _open(run) if run.args.rate or run.args.trace else _closed(run)


def _closed(run: ProgramRun) -> int:
    args = run.args
    protocol = _protocol(args)
    total = sum(protocol.levels) * protocol.requests_per_stream * max(1, len(args.base_url))
    rows = []
    with (
        Testbed(run.console, "starting", total) as stage,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        servers(args.base_url, args.model, stage.folder, OWN) as found,
    ):
        for streams in protocol.levels:
            for server in found:
                stage.say(f"{server.name}, c={streams}")
                rows.append(row(server.name, runner.run(level(server, streams, protocol, made_up(), stage.done))))
    run.keep(
        run.result(
            "table1",
            f"Table 1: {protocol.requests_per_stream}c requests, up to {protocol.tokens} tokens each",
            COLUMNS,
            sorted(rows, key=lambda each: str(each["server"])),
            notes=_notes(rows, protocol),
            **asdict(protocol),
            prompts="made up, of OpenOrca's shape",
            engine=None if args.base_url else f"sim, {STEP_MS:g} ms steps, {PREFILL_MS:g} ms prefill",
        )
    )
    return 0


def _protocol(args: argparse.Namespace) -> Protocol:
    usual = QUICK if args.quick else Protocol()
    return Protocol(
        levels=tuple(args.c or usual.levels),
        requests_per_stream=args.requests_per_stream or usual.requests_per_stream,
        tokens=args.tokens or usual.tokens,
        timeout_s=args.timeout,
    )


def _notes(rows: Sequence[dict[str, object]], protocol: Protocol) -> tuple[str, ...]:
    said = [
        f"TTFT and TBT are means over requests that finished within {protocol.timeout_s:g} s; where at least 90 % did "
        "not, it says Timeout."
    ]
    said += [f"{each['server']} at c={each['streams']}: {each['faults']}" for each in rows if each["faults"]]
    most = max(float(str(each["own_cpu"])) for each in rows)
    return (*said, f"The load generator used at most {100 * most:.0f} % of one core.")


# --- open loop --------------------------------------------------------------------------------------------------------

CV, LONGEST = 1.5, 4096
"""Coefficient of variation of the gaps of made-up requests; tokens of prompt and answer, at most."""


def _open(run: ProgramRun) -> int:
    args = run.args
    trace = Trace(args.trace) if args.trace else None
    load = workload(trace, args.rate, args.speed, args.seconds)
    if not load:
        raise Malformed(f"{args.trace or 'the workload'}: no request in that time")
    with (
        Testbed(run.console, "starting", len(load)) as stage,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        servers(args.base_url, args.model, stage.folder, OWN) as (server, *_),
    ):
        stage.say(f"asking {server.name}")
        bounds = open_loop.ReplayLimits(limit_s=args.seconds, timeout_s=args.timeout)
        asked = runner.run(open_loop.replay(server, load, bounds, stage.done, lanes=not args.plain))
        found = open_loop.rows(asked, open_loop.queue_times(server, asked))
    title = f"{len(asked)} requests in {load[-1].at:.0f} s, an open loop"
    settings = {name: getattr(args, name) for name in ("rate", "speed", "seconds")}
    late = [open_loop.lateness(asked)]
    run.keep(run.result("replay", title, open_loop.COLUMNS, found, late, _open_notes(found, trace), **settings))
    return 0 if any(each["asked"] > each["failed"] for each in found) else 1


def workload(trace: Trace | None, rate: float, speed: float, seconds: float) -> list[TraceRow]:
    """What leaves within the time there is, at its times."""
    end = seconds * speed
    source = trace if trace else requests(rate, CV, 1, end)
    return sorted(cut(source, begin=0.0, end=end, scale=speed, longest=LONGEST), key=lambda request: request.at)


def _open_notes(found: Sequence[dict[str, object]], trace: Trace | None) -> Iterator[str]:
    by_queue = any(each["queue_p50_ms"] is not None for each in found)
    yield f"In time: {'begun' if by_queue else 'first token'} within the class's target; what failed was not."
    if trace and trace.failed:
        yield f"{trace.failed} rows of the trace had failed when it was recorded: they are not sent."
    yield from (f"{each['lane']}: {each['faults']}" for each in found if each["faults"])


def _positive(word: str) -> float:
    value = float(word)
    if value <= 0:
        raise argparse.ArgumentTypeError("must be more than 0")
    return value


main = BenchProgram("penstock bench table1", __doc__, _run, NotAServer, Malformed, Died, OSError, ValueError).taking(
    Option("--base-url", action="append", default=[], help="e.g. http://127.0.0.1:8000/v1; may be repeated"),
    Option("--model", help="name of the model (default: the first one the server names)"),
    Option("--c", type=counts, help="concurrencies (default 1,2,4,8,16,32,64)"),
    Option("--timeout", type=_positive, default=60.0, help="seconds for one request (default 60)"),
    Option("--requests-per-stream", type=int, help="in a closed loop (default 20)"),
    Option("--tokens", type=int, help="most tokens of an answer (default 512)"),
    Option("--quick", action="store_true", help="c = 1, 8, 64, two requests a stream, 64 tokens"),
    Option("--rate", type=_positive, help="open loop: made-up requests a second"),
    Option("--trace", type=Path, help="open loop: CSV with the columns of BurstGPT"),
    Option("--speed", type=_positive, default=1.0, help="of the open loop: times as fast as the trace (default 1)"),
    Option("--seconds", type=_positive, default=60.0, help="of the open loop: no request leaves later (default 60)"),
    Option("--plain", action="store_true", help="of the open loop: no classes, for servers that refuse `queue`"),
    OUT,
)

if __name__ == "__main__":
    main.exit()
