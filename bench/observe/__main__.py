"""`python -m bench.observe`: what records, logs, metrics, traces and an open console cost in CPU per token.

Each round starts Penstock three times, with all of them off, with all of them on, and with all on and every request
traced, and loads one after the other; the one with all on twice, without and with an open console. An open console is
what its page does: it reads the overview every two seconds. CPU is that of all processes, the store included, until
the last record and span have gone; the collector, which takes the spans, and the reader of the console are not counted.
After the loads of a round, a browser opens every page of the console; without Debian's chromium, that is left out.

The exit code is 1 for a missed goal, or if an answer was wrong.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any

from bench.browser import PageError, missing
from bench.gateway.engine import MODEL
from bench.gateway.sweep import SETTLE_S
from bench.gateway.systems import PenstockGateway, ServingGateway
from bench.http import fetch
from bench.load.plan import LoadFailed, LoadPlan, StreamReading, measure
from bench.observe.paint import PaintRound, measured, paint_ratios
from bench.processes import Died, Processes, spent
from bench.program import OUT, BenchProgram, Option, ProgramRun, Testbed, count
from bench.report import Column, Ratio
from bench.stats import median_interval

NAME = "observe"
OFF, ON, TRACED, CONSOLE = "off", "on", "every trace", "open console"
ADMIN_TOKEN = "token-of-this-run"  # noqa: S105 - of processes that live for one round
CONSOLE_INTERVAL_S, SCRAPE_INTERVAL_S = 2.0, 15.0
"""How often the console's overview asks, and how often Prometheus does by default."""
SPAN_DELAY_MS = 500
PAINTS = 2
"""How often a browser opens every page in each round."""
LAST_S = 1.5
"""After a load, until every record is written and every span is sent."""
STEP_MS, TOKENS = 15.0, 128
COLUMNS = (
    Column("what", "seen"),
    Column("cpu_us_per_token", "CPU us/token"),
    Column("parts", "of these"),
    Column("ttft_p50_ms", "TTFT p50 ms"),
    Column("tokens_per_s", "tokens/s", 0),
    Column("errors", "wrong answers", 0),
)


@dataclass(slots=True)
class ObservedLoad:
    """One load of one deployment: what it cost, and what its clients saw."""

    reading: StreamReading
    cpu_s: Mapping[str, float]
    """By process."""
    tokens: int
    """Those of the warm-up too: their cost is in `cpu_s`."""

    @property
    def us_per_token(self) -> float:
        """Of all processes."""
        return 1e6 * sum(self.cpu_s.values()) / self.tokens


def settings_of(what: str, folder: Path, collector: int) -> dict[str, object]:
    """Of a deployment that shows nothing, or everything."""
    if what == OFF:
        return {
            "records.enabled": "false",
            "api.access_log": "false",
            "telemetry.log_level": "error",
            "telemetry.metrics_dir": "",
        }
    return {
        "records.dir": folder / "records",
        "api.access_log": "true",
        "telemetry.log_level": "info",
        "telemetry.otlp_endpoint": f"http://127.0.0.1:{collector}",
        "telemetry.trace_ratio": 1.0 if what == TRACED else 0.01,
    }


@contextmanager
def asked(port: int, path: str, every_s: float) -> Iterator[None]:
    """Ask for a page again and again, as an admin. Raises LoadFailed, at the end, if it was refused."""
    done, refused = Event(), list[int]()

    def ask() -> None:
        while True:
            status, *_ = fetch(port, "GET", path, b"", {"Authorization": f"Bearer {ADMIN_TOKEN}"})
            refused.extend([status] if status != 200 else [])
            if done.wait(every_s):
                return

    thread = Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if refused:
        raise LoadFailed(f"{path} was answered with {refused[0]}")


def load(serving: ServingGateway, plan: LoadPlan, what: str) -> ObservedLoad:
    """Load one deployment. Raises LoadFailed."""
    with ExitStack() as pages:
        if what != OFF:
            pages.enter_context(asked(serving.port, "/metrics", SCRAPE_INTERVAL_S))
        if what == CONSOLE:
            pages.enter_context(asked(serving.port, "/admin/overview", CONSOLE_INTERVAL_S))
        time.sleep(SETTLE_S)
        before = _cpu_s(serving)
        reading = measure(plan)
        time.sleep(LAST_S)
        after = _cpu_s(serving)
    each = {name: spent(before, after, [name]) for name in after}
    return ObservedLoad(reading, each, reading.tokens + plan.streams * plan.warmup_tokens)


def _cpu_s(serving: ServingGateway) -> dict[str, float]:
    return {name: cpu_s for group in serving.groups for name, cpu_s in group.cpu_s().items()}


def order(number: int) -> list[str]:
    """Who is loaded when in round `number` (from 0): forwards and backwards in turn, so that a steady drift cancels
    out, and each begins as often as the others."""
    names = [OFF, ON, CONSOLE, TRACED]
    at = number // 2 % len(names)
    turned = names[at:] + names[:at]
    return turned if number % 2 == 0 else turned[::-1]


def play(
    number: int, folder: Path, run: ProgramRun, stage: Testbed
) -> tuple[dict[str, ObservedLoad], list[PaintRound]]:
    """One round: a turn for each, and then the first paints. Raises Died, LoadFailed, PageError."""
    args, found = run.args, {}
    with ExitStack() as running:
        collector = running.enter_context(Processes(folder)).serve("collector", "bench.bare_server")
        serving = {}
        for what in (OFF, ON, TRACED):
            own = folder / what.replace(" ", "-")
            own.mkdir()
            settings = {
                **settings_of(what, own, collector),
                "api.admin_token_sha256": hashlib.sha256(ADMIN_TOKEN.encode()).hexdigest(),
            }
            engine = {"sim.step_ms": STEP_MS, "sim.slots": max(256, args.c)}
            deployed = PenstockGateway(what).deployed(own, "sim", engine | settings)
            serving[what] = running.enter_context(deployed)
        for what in order(number):
            stage.say(f"{what}, round {number + 1}")
            of = serving[ON if what == CONSOLE else what]
            found[what] = load(of, of.plan(args.c, args.each, TOKENS, limit_s=120.0), what)
            of.check()
            stage.done()
        if missing():
            return found, []
        (profile := folder / "browser").mkdir()
        return found, measured(serving[ON].port, ADMIN_TOKEN, profile, PAINTS)


def rows(turns: Mapping[str, Sequence[ObservedLoad]]) -> list[dict[str, Any]]:
    """One row for each that was loaded: medians over the rounds."""
    found = []
    for what in (OFF, ON, CONSOLE, TRACED):
        each = turns[what]
        parts: defaultdict[str, list[float]] = defaultdict(list)
        for turn in each:
            for name, cpu_s in turn.cpu_s.items():
                parts[name.rpartition("-")[0] or name].append(1e6 * cpu_s / turn.tokens)
        wrong: defaultdict[str, int] = defaultdict(int)
        for turn in each:
            for fault, times in turn.reading.wrong.items():
                wrong[fault] += times
        found.append(
            {
                "what": what,
                "cpu_us_per_token": median(turn.us_per_token for turn in each),
                "parts": ", ".join(f"{name} {median(costs):.1f}" for name, costs in parts.items()),
                "ttft_p50_ms": median(turn.reading.ttft.p50 for turn in each),
                "tokens_per_s": median(turn.reading.tokens_per_s for turn in each),
                "errors": sum(wrong.values()),
                "wrong": dict(wrong),
                "rounds": [turn.us_per_token for turn in each],
            }
        )
    return found


RATIOS = (
    ("observe.on", "CPU per token, everything on over off, 1 % of the requests traced", ON, OFF),
    ("observe.traced", "CPU per token, everything on over off, every request traced", TRACED, OFF),
    ("observe.console", "CPU per token, an open console over a closed one", CONSOLE, ON),
)


def ratios(turns: Mapping[str, Sequence[ObservedLoad]]) -> list[Ratio]:
    """Each as the median over the rounds, with its interval."""
    found = []
    for goal, what, one, other in RATIOS:
        pairs = zip(turns[one], turns[other], strict=True)
        each = [mine.us_per_token / theirs.us_per_token for mine, theirs in pairs]
        middle = median_interval(each)
        found.append(Ratio.held(goal, what, middle.median, digits=3, rounds=each, interval=(middle.low, middle.high)))
    return found


def _run(run: ProgramRun) -> int:
    args = run.args
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = str(SPAN_DELAY_MS)  # of the exporters in Penstock's processes
    turns: defaultdict[str, list[ObservedLoad]] = defaultdict(list)
    paints: list[PaintRound] = []
    with Testbed(run.console, "starting", 4 * args.rounds) as stage:
        for number in range(args.rounds):
            loads, painted = play(number, stage.room(number), run, stage)
            paints += painted
            for what, turn in loads.items():
                turns[what].append(turn)
    found = rows(turns)
    notes = [f"{row['what']}: {times} x {fault}" for row in found for fault, times in row["wrong"].items()]
    judged = [*ratios(turns), *(paint_ratios(paints) if paints else [])]
    notes += [f"no first paint: {missing()}"] if missing() else []
    title = f"What it costs to see inside: {args.c} streams, {TOKENS} tokens a request, {STEP_MS:g} ms steps"
    kept = run.keep(run.result(NAME, title, COLUMNS, found, judged, notes, streams=args.c, model=MODEL))
    return int(kept.missed or any(row["wrong"] for row in found))


main = BenchProgram("penstock bench observe", __doc__, _run, Died, LoadFailed, PageError, OSError).taking(
    Option("--c", type=count, default=256, help="streams [256]"),
    Option("--each", type=count, default=3, help="requests of a stream in each turn [3]"),
    Option("--rounds", type=count, default=9, help="rounds, each with processes of its own [9]"),
    OUT,
)

if __name__ == "__main__":
    main.exit()
