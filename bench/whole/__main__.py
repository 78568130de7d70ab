"""`python -m bench.whole`: answers in one piece, and how long after the engine's last token the client has them.

Two sizes: one long text, and many choices at once. Each is asked for several times, of a Penstock with the simulated
engine and of a control, the same engine behind a bare socket server. Penstock's time runs from the engine's last token,
as the job's timing stamps it, to the last byte at the client. The exit code is 1 if an answer came too late or not at
all.
"""

from __future__ import annotations

import argparse
import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.console import Console

from bench.http import fetch
from bench.load.streams import misplaced
from bench.penstock import MODEL, Penstock
from bench.processes import Died, Processes
from bench.program import OUT, BenchProgram, Option, ProgramRun, Testbed, count
from bench.report import Ratio, columns
from bench.table1.client import NotAServer, TargetServer
from workers.engines.sim.settings import SimSettings

TIMING_TIMEOUT_S = 10.0
"""How long the server may take to write down when an answer was sent."""
MAX_N = 8
"""Choices of one prompt that a request may ask for; more are asked for by a list of prompts."""


@dataclass(frozen=True, slots=True)
class AnswerSize:
    """Of one answer."""

    choices: int
    tokens: int
    """Of each choice."""

    def body(self, model: str, number: int) -> dict[str, Any]:
        """A completion request; `number` makes its prompts unlike those of other requests."""
        n = next(n for n in range(min(MAX_N, self.choices), 0, -1) if self.choices % n == 0)
        prompts = [f"Tell me about water, please: question {number}.{at}." for at in range(self.choices // n)]
        return {
            "model": model,
            "prompt": prompts if len(prompts) > 1 else prompts[0],
            "n": n,
            "max_tokens": self.tokens,
        }


@dataclass(frozen=True, slots=True)
class Came:
    """An answer, or why there is none."""

    at: float
    """When its last byte was here, as Unix time."""
    spent_ms: float
    """From sending the request."""
    behind_ms: float | None
    """From the engine's last token, by the server's stamp; None: the server does not say."""
    clock_error_ms: float = 0.0
    wrong: str = ""


def ask(target: TargetServer, size: AnswerSize, number: int, limit_s: float) -> Came:
    """Ask and wait, at most `limit_s` seconds."""
    began = time.time()
    try:
        asked = json.dumps(size.body(target.model, number)).encode()
        known = {"Content-Type": "application/json", **target.headers}
        status, headers, body = fetch(
            target.port, "POST", "/v1/completions", asked, known, host=target.host, timeout_s=limit_s
        )
    except (OSError, http.client.HTTPException) as error:
        at = time.time()
        return Came(at, 1e3 * (at - began), None, wrong=f"{type(error).__name__} after {at - began:.0f} s: {error}")
    at = time.time()
    wrong = fault_of(json.loads(body), size) if status == 200 else body.decode(errors="replace")[:200]
    ended, clock_error_ms = _ended(target, headers) if not wrong else (None, 0.0)
    return Came(at, 1e3 * (at - began), None if ended is None else 1e3 * (at - ended), clock_error_ms, wrong)


def _ended(target: TargetServer, headers: Mapping[str, str]) -> tuple[float | None, float]:
    """When the engine was done, as Unix time, and how exactly that is known, in ms: the control says it in a header,
    Penstock in the job's timing."""
    if "x-ended" in headers:
        return float(headers["x-ended"]), 0.0
    path, deadline = f"/v1/jobs/{headers['x-job-id']}/timing", time.monotonic() + TIMING_TIMEOUT_S
    while True:
        timing = next(target.get([path]))
        ended = timing["stamps"]["last_token"]
        if ended is not None or time.monotonic() > deadline:
            return ended, timing["clock_error_ms"]["worker"]
        time.sleep(0.05)


def fault_of(answer: Mapping[str, Any], size: AnswerSize) -> str:
    """What is wrong with an answer; "" if it has all choices, each with all its tokens in order."""
    choices = answer["choices"]
    if [choice["index"] for choice in choices] != list(range(size.choices)):
        return f"{len(choices)} choices instead of {size.choices}, or out of order"
    faults = (misplaced(choice["text"].split(), size.tokens) for choice in choices)
    return next((fault for fault in faults if fault), "")


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
    title = f"Answers in one piece: simulated engine, {args.step_ms:g} ms steps"
    settings = {"answers": args.answers, "limit_s": args.limit, "engine": msgspec.to_builtins(engine)}
    return int(run.keep(run.result(NAME, title, COLUMNS, rows, ratios_of(rows), wrong, **settings)).missed)


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


def _asked(target: TargetServer, size: AnswerSize, answers: int, limit_s: float) -> list[Came]:
    """One after the other; an answer that does not come is the last one asked for."""
    came: list[Came] = []
    while len(came) < answers and not (came and came[-1].wrong):
        came.append(ask(target, size, len(came), limit_s))
    return came


@contextmanager
def _control(folder: Path, engine: SimSettings) -> Iterator[TargetServer]:
    with Processes(folder) as processes:
        port = processes.serve(CONTROL, "bench.whole.control", msgspec.json.encode(engine).decode())
        yield TargetServer.at(f"http://127.0.0.1:{port}/v1", MODEL)


@contextmanager
def _penstock(folder: Path, engine: SimSettings) -> Iterator[TargetServer]:
    settings = {f"sim.{key}": value for key, value in msgspec.to_builtins(engine).items()}
    settings["api.max_choices_per_request"] = engine.slots // 2
    with Penstock(folder, settings=settings) as penstock:
        yield TargetServer.at(f"{penstock.url}/v1", MODEL)


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
            ratios.append(Ratio.held("whole.late", what, late))
        missing = float(row["asked"] - row["came"])
        what = f"{row['system']}: answers of {row['choices']:,} choices that did not come whole"
        ratios.append(Ratio.none(what, missing))
    return ratios


main = BenchProgram("penstock bench whole", __doc__, _run, Died, NotAServer, OSError).taking(
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
