"""`python -m bench.batch`: batches under kills, at full speed, beside people. Exits 1 if a goal is missed."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import program, report
from bench.batch.kills import delays, kills
from bench.batch.pace import alone, interference, memory
from bench.processes import Died
from bench.program import BenchProgram, Option, ProgramRun, Testbed
from bench.report import Column, Ratio

Found = tuple[list[dict[str, Any]], list[Ratio]]
COLUMNS = (Column("part", "part"), Column("what", "what"), Column("figure", "figure", 2))


def _run(run: ProgramRun) -> int:
    args, parts = run.args, run.args.parts.split(",")
    program.check_names("part", parts, PARTS)
    rows, ratios = _kept(args.out, parts)
    with Testbed(run.console, "starting", len(parts)) as stage:
        for name in parts:
            stage.say(name)
            more, judged = PARTS[name](stage.room(name), args)
            stage.done()
            rows, ratios = rows + more, ratios + judged
    return run.tell(run.result("batch", "Batches", COLUMNS, rows, ratios, lines=args.lines, seed=args.seed), args.out)


def _kept(path: Path, parts: Sequence[str]) -> Found:
    """What an earlier run found of the parts that are not run now."""
    if set(parts) == set(PARTS) or not path.exists():
        return [], []
    before = report.load(path)
    rows = [row for row in before.rows if row["part"] not in parts]
    return rows, [ratio for ratio in before.ratios if ratio.what.partition(":")[0] not in parts]


def _rows(part: str, figures: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"part": part, "what": what, "figure": figure} for what, figure in figures.items()]


def _kills(folder: Path, args: argparse.Namespace) -> Found:
    def told(times: int, completed: int) -> None:
        if times % 20 == 0:
            sys.stderr.write(f"{times} kills, {completed} lines\n")

    found = asyncio.run(kills(folder, args.lines, args.kills, args.seed, told))
    verdict, times = found.verdict, sum(found.kills.values())
    rows = _rows("kills", {
        "lines": found.lines, "kills of Celery workers": found.kills.get("offline", 0),
        "kills of engine workers": found.kills.get("workers", 0), "answered": verdict.answered,
        "failed": verdict.failed, "wrong answers": verdict.wrong, "seconds": found.seconds, "turns": found.turns,
        "tokens counted": found.tokens, "tokens asked for": found.tokens_asked,
    })  # fmt: skip
    return rows, [
        Ratio(what="kills: how many", value=float(times), at_least=float(args.kills), digits=0),
        Ratio.none("kills: lines lost", verdict.lost),
        Ratio.none("kills: lines doubled", verdict.doubled),
        Ratio.none("kills: lines out of order or misnamed", verdict.disordered),
        Ratio.none("kills: lines wrong or failed", verdict.wrong + verdict.failed),
    ]


def _delays(folder: Path, _args: argparse.Namespace) -> Found:
    found = asyncio.run(delays(folder, 3))
    rows = _rows("delays", {
        "message lost, s": ", ".join(f"{each:.1f}" for each in found.message_lost),
        "worker killed in a turn, s": ", ".join(f"{each:.1f}" for each in found.worker_killed),
    })  # fmt: skip
    longest = max(*found.message_lost, *found.worker_killed)
    return rows, [Ratio.held("batch.delay", "delays: longest after a loss of Celery's, s", longest, digits=1)]


def _pace(folder: Path, args: argparse.Namespace) -> Found:
    found = alone(folder, args.lines, args.seed)
    cpu = {f"CPU seconds of {name}": spent for name, spent in found.cpu_s.items()}
    rows = _rows("pace", {
        "lines": found.lines, "lines a second": found.per_second, "engine's capacity, lines a second": found.capacity,
        "seconds in all": found.whole_s, **cpu,
    })  # fmt: skip
    return rows, [Ratio.held("batch.pace", "pace: share of the engine's capacity", found.share, digits=3)]


def _interference(folder: Path, _args: argparse.Namespace) -> Found:
    found = interference(folder, 300, 5)
    rows = _rows("interference", {
        "TTFT p50 alone, ms": found.alone.p50, "TTFT p99 alone, ms": found.alone.p99,
        "TTFT p50 beside a batch, ms": found.beside.p50, "TTFT p99 beside a batch, ms": found.beside.p99,
        "TTFT p99 of a bare engine alone, ms": found.bare_alone.p99,
        "TTFT p99 of a bare engine on a machine with the batch, ms": found.bare_beside.p99,
        "rounds": len(found.rounds), "wrong answers": sum(each["wrong"] for each in found.rounds),
        "the batch had work all the time": all(each["batch_was_running"] for each in found.rounds),
    })  # fmt: skip
    what = "interference: TTFT p99 beside a batch to alone"
    return rows, [
        Ratio.held("batch.interference_bare", f"{what}, over the same of a bare engine", found.ratio),
        Ratio.held("batch.interference", what, found.beside.p99 / found.alone.p99),
    ]


def _memory(folder: Path, _args: argparse.Namespace) -> Found:
    found = memory(folder, 50_000)
    rows = _rows("memory", {
        "lines": found.lines, "input, MB": found.input_mb, "output, MB": found.output_mb,
        "lines lost or doubled": found.doubled_or_lost,
    })  # fmt: skip
    return rows, [
        Ratio.held("batch.memory", "memory: growth of the API process, MiB", found.api_mib, digits=1),
        Ratio.held("batch.memory", "memory: growth of the offline process, MiB", found.offline_mib, digits=1),
    ]


PARTS: dict[str, Callable[[Path, argparse.Namespace], Found]] = {
    "kills": _kills,
    "delays": _delays,
    "pace": _pace,
    "interference": _interference,
    "memory": _memory,
}


main = BenchProgram("python -m bench.batch", __doc__, _run, Died, OSError).taking(
    Option("--parts", default=",".join(PARTS), help="only these (default: all)"),
    Option("--lines", type=int, default=5000, help="lines of the batch under kills and of the one alone"),
    Option("--kills", type=int, default=200, help="kills (default: 200)"),
    Option("--seed", type=int, default=1, help="another one is another run"),
    Option("--out", type=Path, default=report.RESULTS / "batch.json", help="where the figures go"),
)

if __name__ == "__main__":
    main.exit()
