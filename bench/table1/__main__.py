"""`python -m bench.table1`: TTFT and TBT by concurrency, of any OpenAI-compatible server, as in the paper's Table 1.

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

from bench import plots, report
from bench.processes import Died
from bench.program import OUT, PLOTS, BenchProgram, Option, ProgramRun, Testbed, counts
from bench.report import columns
from bench.stats import quantile
from bench.table1.client import (
    ConcurrencyLevel,
    DatasetEntry,
    NotAServer,
    Protocol,
    endless,
    level,
    made_up,
    read,
    servers,
)

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


NAME = "table1"
STEP_MS, PREFILL_MS = 15.0, 25.0
OWN = {"sim.step_ms": STEP_MS, "sim.prefill_ms": PREFILL_MS}
QUICK = Protocol(levels=(1, 8, 64), requests_per_stream=2, tokens=64)


def _run(run: ProgramRun) -> int:
    args = run.args
    protocol = _protocol(args)
    entries = read(args.dataset) if args.dataset else None
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
                seen = runner.run(level(server, streams, protocol, _prompts(entries), stage.done))
                rows.append(row(server.name, seen))
    told = run.result(
        NAME,
        f"Table 1: {protocol.requests_per_stream}c requests, up to {protocol.tokens} tokens each",
        COLUMNS,
        sorted(rows, key=lambda each: str(each["server"])),
        notes=_notes(rows, protocol),
        **asdict(protocol),
        prompts=str(args.dataset.name) if args.dataset else "made up, of OpenOrca's shape",
        engine=None if args.base_url else f"sim, {STEP_MS:g} ms steps, {PREFILL_MS:g} ms prefill",
    )
    run.keep(told, draw)
    return 0


def _prompts(entries: list[DatasetEntry] | None) -> Iterator[DatasetEntry]:
    """The same ones for every server and level."""
    return endless(entries) if entries else made_up()


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


def draw(found: report.Report, folder: Path) -> list[Path]:
    """TTFT and TBT over concurrency; the files written."""
    x = plots.Axis(title="concurrent requests", log=True)
    drawn = []
    for key, title in (("ttft_ms", "Time to first token"), ("tbt_ms", "Time between tokens")):
        names = dict.fromkeys(str(each["server"]) for each in found.rows)
        curves = {
            name: [(each["streams"], _figure(each[key])) for each in found.rows if each["server"] == name]
            for name in names
        }
        drawn += plots.lines(folder / f"table1-{key[:4]}", title, curves, x=x, y=plots.Axis(title="ms, mean"))
    return drawn


def _figure(value: object) -> float | None:
    return value if isinstance(value, float) else None


main = BenchProgram("penstock bench table1", __doc__, _run, NotAServer, Died, OSError, ValueError).taking(
    Option("--base-url", action="append", default=[], help="e.g. http://127.0.0.1:8000/v1; may be repeated"),
    Option("--model", help="name of the model (default: the first one the server names)"),
    Option("--c", type=counts, help="concurrencies (default 1,2,4,8,16,32,64)"),
    Option("--timeout", type=float, default=60.0, help="seconds for one request (default 60)"),
    Option("--requests-per-stream", type=int, help="in a closed loop (default 20)"),
    Option("--tokens", type=int, help="most tokens of an answer (default 512)"),
    Option("--dataset", type=Path, help="JSONL with system_prompt and question (default: made-up prompts)"),
    Option("--quick", action="store_true", help="c = 1, 8, 64, two requests a stream, 64 tokens"),
    OUT,
    PLOTS,
)

if __name__ == "__main__":
    main.exit()
