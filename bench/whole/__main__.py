"""`python -m bench.whole`: answers in one piece, and how long after the engine's last token the client has them.

Two sizes: one long text, and many choices at once. Each is asked for several times, of a Penstock with the simulated
engine and of a control, the same engine behind a bare socket server. Penstock's time runs from the engine's last token,
as the job's timing stamps it, to the last byte at the client. The exit code is 1 if an answer came too late or not at
all.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.console import Console

from bench.breakdown.ask import BreakdownTarget, Unsuitable
from bench.penstock import MODEL, Penstock
from bench.processes import Died, Processes
from bench.program import OUT, BenchProgram, Option, ProgramRun, count
from bench.report import Ratio, Report, columns
from bench.testbed import Testbed
from bench.whole.ask import AnswerSize, Came, ask
from workers.engines.sim.settings import SimSettings

NAME = "whole"
CONTROL, PENSTOCK = "control", "penstock"

Row = dict[str, Any]

COLUMNS = columns("""
    system: system; choices: choices; tokens: tokens of each; asked: asked; came: came; timed: timed;
    behind_ms: behind the last token: median, ms .2; behind_max_ms: longest .2;
    spent_ms: whole request: median, ms .0; clock_error_ms: clock error, ms .2
""")


def _run(run: ProgramRun) -> int:
    args = run.args
    engine = SimSettings(step_ms=args.step_ms, prefill_ms=args.step_ms, slots=max(256, 2 * args.choices))
    rows, wrong = _measured(args, engine, run.console)
    found = Report(
        name=NAME,
        title=f"Answers in one piece: simulated engine, {args.step_ms:g} ms steps",
        command=run.command,
        settings={"answers": args.answers, "limit_s": args.limit, "engine": msgspec.to_builtins(engine)},
        columns=COLUMNS,
        rows=rows,
        ratios=tuple(ratios_of(rows)),
        notes=tuple(wrong),
    )
    return run.tell(found, args.out / found.file)


def _measured(args: argparse.Namespace, engine: SimSettings, console: Console) -> tuple[list[Row], list[str]]:
    """A row for each system and size, and what was wrong."""
    sizes = [AnswerSize(1, args.tokens), AnswerSize(args.choices, args.choice_tokens)]
    rows: list[Row] = []
    wrong: list[str] = []
    with Testbed(console, "starting", 2 * len(sizes)) as stage:
        for system, serve in ((CONTROL, _control), (PENSTOCK, _penstock)):
            folder = stage.room(system)
            with serve(folder, engine) as target:
                for size in sizes:
                    what = f"{system}, {size.choices} x {size.tokens} tokens"
                    stage.say(what)
                    came = _asked(target, size, args.answers, args.limit)
                    rows.append(row_of(system, size, came))
                    wrong += [f"{what}: {each.wrong}" for each in came if each.wrong]
                    stage.done()
    return rows, wrong


def _asked(target: BreakdownTarget, size: AnswerSize, answers: int, limit_s: float) -> list[Came]:
    """One after the other; an answer that does not come is the last one asked for."""
    came: list[Came] = []
    while len(came) < answers and not (came and came[-1].wrong):
        came.append(ask(target, size, len(came), limit_s))
    return came


@contextmanager
def _control(folder: Path, engine: SimSettings) -> Iterator[BreakdownTarget]:
    with Processes(folder) as processes:
        port = processes.serve(CONTROL, "bench.whole.control", msgspec.json.encode(engine).decode())
        yield BreakdownTarget("127.0.0.1", port, MODEL)


@contextmanager
def _penstock(folder: Path, engine: SimSettings) -> Iterator[BreakdownTarget]:
    settings = {f"sim.{key}": value for key, value in msgspec.to_builtins(engine).items()}
    settings["api.max_choices_per_request"] = engine.slots // 2
    with Penstock(folder, settings=settings) as penstock:
        yield BreakdownTarget("127.0.0.1", penstock.port, MODEL)


def row_of(system: str, size: AnswerSize, came: Sequence[Came]) -> Row:
    """All answers of one size. Those that are wrong, did not come or have no stamp are counted and not timed."""
    good = [each for each in came if not each.wrong]
    behind = [each.behind_ms for each in good if each.behind_ms is not None]
    return {
        "system": system,
        "choices": size.choices,
        "tokens": size.tokens,
        "asked": len(came),
        "came": len(good),
        "timed": len(behind),
        "behind_ms": median(behind) if behind else None,
        "behind_max_ms": max(behind, default=None),
        "behind_ms_of_answers": behind,
        "spent_ms": median(each.spent_ms for each in good) if good else None,
        "clock_error_ms": max((each.clock_error_ms for each in good), default=None),
    }


def ratios_of(rows: Sequence[Row]) -> list[Ratio]:
    """One long text in time, which every one of its answers must show, and every answer there."""
    ratios = []
    for row in rows:
        if row["system"] == PENSTOCK and row["choices"] == 1:
            what = f"{row['tokens']:,} tokens in one piece: longest time behind the engine's last token, ms"
            late = row["behind_max_ms"] if row["timed"] == row["asked"] else None
            ratios.append(Ratio.held("whole.late", what=what, value=late))
        missing = float(row["asked"] - row["came"])
        what = f"{row['system']}: answers of {row['choices']:,} choices that did not come whole"
        ratios.append(Ratio(what=what, value=missing, at_most=0, digits=0))
    return ratios


main = BenchProgram("penstock bench whole", __doc__, _run, Died, Unsuitable, OSError).taking(
    Option("--tokens", type=count, default=4000, help="of the long text (default 4000)"),
    Option("--choices", type=count, default=1024, help="of the other answer (default 1024)"),
    Option("--choice-tokens", type=count, default=64, help="of each of its choices (default 64)"),
    Option("--answers", type=count, default=5, help="of each size and system (default 5)"),
    Option("--step-ms", type=float, default=2.0, help="of the simulated engine (default 2)"),
    Option("--limit", type=float, default=60.0, help="seconds to wait for an answer (default 60)"),
    OUT,
)

if __name__ == "__main__":
    main.exit()
