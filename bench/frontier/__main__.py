"""`python -m bench.frontier`: throughput over concurrency of a small real model, its knee, and the simulator's errors.

Two servers in turn: a Penstock with the embedded engine, and a llama-server. Closed loops of 1 to 32 clients; the
simulator is fitted to every second of them and predicts the others. `penstock tune frontier` measures the Penstock,
too. Then all loads come once more, as a control: what two measurements of the same load differ by is the machine's.
About 25 minutes on a quiet machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct, to_builtins
from msgspec.json import decode, encode

from bench import plots
from bench.frontier.loads import (
    LEVELS,
    ClosedLoad,
    PredictedLoad,
    Unanswered,
    as_compared,
    as_rows,
    between,
    differences,
    frontier,
    length_mix,
    of_rows,
    predictions,
    run_loads,
)
from bench.frontier.tuned import tuned_frontier
from bench.penstock import MODEL, Penstock
from bench.processes import Died, Processes
from bench.program import CACHE, OUT, PLOTS, BenchProgram, Option, ProgramRun, Testbed
from bench.report import Ratio, Report, columns, load
from bench.table1.client import NotAServer, TargetServer
from planner.facts.catalogue import PlanError
from planner.fit import FIGURES, EngineFit, FittedTimes, ServedLimits, constant_errors_of, errors_of, worst_errors_of
from planner.tuning import MeasuredFrontier
from workers.engines.llamacpp.weights import WeightsError, fetch

SLOTS, CONTEXT, THREADS = 32, 512, 1
STEP_TOKENS = {"penstock": 128, "llama-server": 2048}
"""Prompt tokens of one step: `batch` of the embedded engine, n_batch of llama-server."""
TUNE = ("--requests", "32", "--max", str(SLOTS), "--repeats", "1", "--budget", "4m")
FIRST_NOTE = (
    "The first request of each client counts for throughput alone: all of them come at once, which is no state of a "
    "closed loop."
)
NO_GOAL = "tpot_p50_s"
"""The figure whose error has none."""

COLUMNS = columns("""
    server: server; clients: at once; requests: requests; role: role;
    tokens_s: tok/s .1; predicted_tokens_s: predicted .1;
    ttft_p50_s: TTFT p50, s .2; predicted_ttft_p50_s: predicted .2; ttft_p90_s: TTFT p90, s .2;
    predicted_ttft_p90_s: predicted .2; tpot_p50_s: s a token .3; predicted_tpot_p50_s: predicted .3; note: note
""")


def _run(run: ProgramRun) -> int:
    kept = load(run.args.again) if run.args.again else None
    measurement = _measured(run) if kept is None else decode(encode(kept.settings), type=Measurement)
    rows, ratios, notes = [], [], [FIRST_NOTE]
    fits: dict[str, Any] = {}
    for name, requests in measurement.requests.items():
        loads = of_rows(requests)
        fit, found = predictions(loads, limits_of(name))
        knee = frontier(loads)
        rows += [_row(name, each, knee) for each in found]
        ratios += _ratios(name, found, knee)
        if name in measurement.again:
            ratios += _scatter(name, loads, of_rows(measurement.again[name]))
        notes.append(_note(name, fit, knee))
        fits[name] = _coefficients(fit)
    what = "knee by `penstock tune frontier` of the Penstock, at once"
    ratios.append(Ratio(what=what, value=float(measurement.tuned_knee), digits=0))
    title = f"Frontier of {measurement.model}, {SLOTS} slots, {THREADS} thread, and what the simulator predicts"
    found_ = run.result("frontier", title, COLUMNS, rows, ratios, notes, slots=SLOTS, context=CONTEXT, threads=THREADS,
                        step_tokens=STEP_TOKENS, fits=fits, **to_builtins(measurement))  # fmt: skip
    return int(run.keep(found_, draw, again=kept).missed)


def limits_of(name: str) -> ServedLimits:
    """Of a server; both are llama.cpp."""
    return ServedLimits(SLOTS, SLOTS * CONTEXT, STEP_TOKENS[name], by_slot=True)


class Measurement(Struct, frozen=True, kw_only=True):
    """What was measured: all that a run predicts from."""

    model: str
    """Its file."""
    tuned_knee: int
    """By `penstock tune frontier`, of the Penstock."""
    requests: dict[str, list[list[float]]]
    """Of each server, as `as_rows` has them."""
    again: dict[str, list[list[float]]] = {}
    """The same loads, measured once more."""


def _measured(run: ProgramRun) -> Measurement:
    """Measure both servers. Raises Died, NotAServer, Unanswered."""
    levels, tuned = [each for each in LEVELS if each <= run.args.max], 0
    requests: dict[str, list[list[float]]] = {}
    again: dict[str, list[list[float]]] = {}
    with Testbed(run.console, "the model", 2 * len(STEP_TOKENS) * len(levels) + 1) as stage:
        path = run.args.path or fetch(run.args.cache, lambda _what, _done, _of: None)
        for name in STEP_TOKENS:
            with _started(name, path, stage) as server:

                def begin(clients: int, name: str = name) -> None:
                    stage.say(f"{name}: {clients} at once")
                    stage.done()

                requests[name] = as_rows(run_loads(server, levels, begin, 1))
                again[name] = as_rows(run_loads(server, levels, begin, 2))
                if name == "penstock":
                    stage.say("penstock tune frontier")
                    tuned = int(tuned_frontier(server, length_mix(), stage.folder, TUNE)["knee"]["concurrency"])
                    stage.done()
    return Measurement(model=path.name, tuned_knee=tuned, requests=requests, again=again)


@contextmanager
def _started(name: str, path: Path, stage: Testbed) -> Iterator[TargetServer]:
    """One of the servers. Raises Died, NotAServer."""
    folder = stage.room(name)
    if name == "penstock":
        engine = {"path": path, "slots": SLOTS, "context": CONTEXT, "threads": THREADS}
        settings = {f"llamacpp.{key}": value for key, value in engine.items()}
        with Penstock(folder, engine="llamacpp", settings=settings) as penstock:
            yield TargetServer.at(f"{penstock.url}/v1", MODEL, name=name)
        return
    with Processes(folder) as processes:
        port = processes.serve(name, "bench.frontier.llama_server", str(path), f"{SLOTS}", f"{CONTEXT}", f"{THREADS}")
        processes.wait_page(port, "/health", b"ok")
        yield TargetServer.at(f"http://127.0.0.1:{port}/v1", MODEL, name=name)


def _row(name: str, each: PredictedLoad, found: MeasuredFrontier) -> dict[str, Any]:
    seen, said, clients = each.load.figures, each.predicted, each.load.clients
    return {
        "server": name,
        "clients": clients,
        "requests": len(each.load.texts),
        "role": "held out" if each.held_out else "fitted",
        **{key: getattr(seen, key) for key in ("tokens_s", "ttft_p50_s", "ttft_p90_s", "tpot_p50_s")},
        **{f"predicted_{key}": getattr(said, key) for key in ("tokens_s", "ttft_p50_s", "ttft_p90_s", "tpot_p50_s")},
        "note": "knee" if clients == found.knee.batch else "",
    }


def _ratios(name: str, found: Sequence[PredictedLoad], knee: MeasuredFrontier) -> list[Ratio]:
    """The simulator's errors, each with that of its worst load, of a predictor that knows nothing of load, and of one
    that knows nothing of engines."""
    loads, ratios = as_compared(found), []
    median, worst, constant = errors_of(loads), worst_errors_of(loads), constant_errors_of(loads)
    line = errors_of(as_compared(between(found)))
    for key, figure in FIGURES.items():
        what = f"{name}: {figure} of the held-out loads"
        goal = None if key == NO_GOAL else "frontier.error"
        ratios += [
            Ratio.held(goal, f"{what}, median error, %", 100 * getattr(median, key), digits=1),
            Ratio(what=f"{what}, always the fitted median, %", value=100 * getattr(constant, key), digits=1),
            Ratio(what=f"{what}, a line between the fitted ones, %", value=100 * getattr(line, key), digits=1),
            Ratio(what=f"{what}, error of the worst, %", value=100 * getattr(worst, key), digits=1),
        ]
    return [*ratios, Ratio(what=f"{name}: knee, at once", value=float(knee.knee.batch), digits=0)]


def _scatter(name: str, loads: Sequence[ClosedLoad], others: Sequence[ClosedLoad]) -> list[Ratio]:
    """How far a second measurement of the held-out loads is from the first. Both are off: of a perfect prediction the
    error is about 0.7 of it."""
    return [
        Ratio(
            what=f"{name}: {figure} of the held-out loads, measured once more, median difference, %",
            value=100 * getattr(differences(loads[1::2], others[1::2]), key),
            digits=1,
        )
        for key, figure in FIGURES.items()
    ]


def _note(name: str, fit: EngineFit, found: MeasuredFrontier) -> str:
    times: FittedTimes = fit.times
    small, (fixed_s, token_s, square_s) = times.small, times.prefill
    lone = (
        ""
        if times.lone_s is None
        else f"; one that gives a token alone takes {1e3 * times.lone_s:.1f} ms and the same for the cache"
    )
    return (
        f"{name}: {found.knee.reason}. A step takes {1e3 * small.fixed_s:.1f} ms, {1e3 * small.text_s:.2f} ms more for "
        f"each text and {1e3 * small.held_s:.4f} ms for each token in the cache; n tokens of prompts add "
        f"{1e3 * fixed_s:.1f} + {1e3 * token_s:.2f} n + {1e3 * square_s:.4f} n^2 ms{lone}; a first token comes "
        f"{1e3 * fit.delay_s:.0f} ms after its step."
    )


def _coefficients(fit: EngineFit) -> dict[str, Any]:
    small = fit.times.small
    return {"fixed_s": small.fixed_s, "held_s": small.held_s, "text_s": small.text_s, "lone_s": fit.times.lone_s,
            "prefill": fit.times.prefill,
            "delay_s": fit.delay_s, "path_s": fit.path_s, "requests": fit.requests}  # fmt: skip


def draw(found: Report, folder: Path) -> list[Path]:
    """Measured and predicted throughput, and TTFT, over concurrency."""
    written = []
    for key, title, unit in (
        ("tokens_s", "Throughput", "tokens/s"),
        ("ttft_p50_s", "Time to the first token, p50", "s"),
    ):
        series = {}
        for name in STEP_TOKENS:
            rows = [row for row in found.rows if row["server"] == name]
            series[name] = [(row["clients"], row[key]) for row in rows]
            series[f"{name}, predicted"] = [(row["clients"], row[f"predicted_{key}"]) for row in rows]
        written += plots.lines(
            folder / f"frontier-{key.partition('_')[0]}", f"{title} over concurrency", series,
            x=plots.Axis(title="requests at once", log=True), y=plots.Axis(title=unit),
        )  # fmt: skip
    return written


main = BenchProgram(
    "penstock bench frontier", __doc__, _run, Unanswered, Died, NotAServer, PlanError, WeightsError, OSError
).taking(
    Option("--max", type=int, default=SLOTS, help="highest concurrency (default 32)"),
    Option("--again", type=Path, help="measure nothing, and predict what this file of an earlier run has measured"),
    Option("--path", type=Path, help="a GGUF file (default: the default model)"),
    CACHE,
    OUT,
    PLOTS,
)

if __name__ == "__main__":
    main.exit()
