"""`python -m bench.gpu`: small models on a GPU, by a step loop in PyTorch with random weights.

Part `loop`: throughput and energy by batch size with the knee, decode steps beside their roofline bound, copies of a
small model. Part `served`: the loop behind OpenAI's API, direct and through Penstock in front of it.

Needs a CUDA GPU, PyTorch and Triton; about five minutes for each part. `--part served --quick` needs PyTorch and Triton
alone: it serves a tiny model on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bench import plots
from bench.gpu.judged import by_card, card_of, knee_notes, knees
from bench.program import OUT, PLOTS, BenchProgram, Option, ProgramRun, Testbed, WrongArguments
from bench.report import Ratio, Report, columns, load, write
from planner.facts import catalogue

if TYPE_CHECKING:
    from bench.gpu.device import Device
    from bench.gpu.served import ServedMeasurement

BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
STEPS = [(1, 512), (8, 512), (32, 512), (128, 512), (1, 1920), (8, 1920), (32, 1920), (128, 1920)]
"""Batch and context of the decode steps."""
COPIES = [1, 2, 3]
MODELS = ("opt-125m", "opt-1.3b")
SMALL = MODELS[0]
RAW = "gpu-served-raw.json"
WRONG = 0.05
"""Beyond this the step loop does not compute what it should, and its times say nothing."""

FRONTIER = columns("""
    shape: shape; batch: batch; requests: requests; tokens_per_s: tok/s .0; requests_per_s: req/s .2;
    latency_s: latency s .3; prefill_share: prefill share .2;
    watts: W .0; joules_per_token: J/token .4; above_idle: J/token above idle .4
""")
REPLICAS = columns("""
    shape: shape; step: step; batch: batch each; copies: copies; tokens_per_s: tok/s .0; requests_per_s: req/s .1;
    latency_s: latency s .3
""")
BOUNDS = columns("""
    shape: shape; batch: batch; context: context; step_ms: step ms .3; bound_ms: bound ms .3; share: bound / step .3;
    card_ms: bound by the card, ms .3; card_share: bound by the card / step .3
""")


class WrongResult(Exception):
    """The step loop does not compute what one pass in float32 does."""


def _run(run: ProgramRun) -> int:
    if run.args.quick and run.args.part != "served":
        raise WrongArguments("--quick is for --part served")
    parts, missed = PARTS if run.args.part is None else {run.args.part: PARTS[run.args.part]}, 0
    for measure, again in parts.values():
        missed |= measure(run) if run.args.again is None else again(run, run.args.again)
    return missed


def _loop(run: ProgramRun) -> int:
    from bench.gpu.decoder import wrong_by  # noqa: PLC0415 - torch is not a dependency: --help needs none
    from bench.gpu.device import Device  # noqa: PLC0415

    device = Device()
    error = wrong_by(catalogue.model(SMALL))
    run.console.print(f"{device.name}: logits are off by {error:.4f} from float32")
    if not error < WRONG:
        raise WrongResult(f"logits are off by {error:.4f} of their norm, more than {WRONG}")
    missed = 0
    for part in (_frontier, _bounds, _replicas):
        begin = time.monotonic()
        found = part(run, device, {"device": device.name, "logits_off_by": round(error, 5)})
        run.console.print(f"took {time.monotonic() - begin:.0f} s")
        missed |= int(found.missed)
    return missed


def _loop_again(run: ProgramRun, folder: Path) -> int:
    """Judge anew what the files of an earlier run hold: when and on what it ran stays."""
    old = load(folder / "gpu-frontier.json"), load(folder / "gpu-bound.json")
    known = [{name: each.settings[name] for name in ("device", "logits_off_by")} for each in old]
    told = (
        _told_frontier(run, old[0].rows, old[0].settings["idle_watts"], known[0]),
        _told_bounds(run, old[1].rows, old[1].settings["flops"], old[1].settings["bandwidth"], known[1]),
    )
    missed = 0
    for each, was, drawn in zip(told, old, (draw, None), strict=True):
        missed |= int(run.keep(each, drawn, again=was).missed)
    return missed


def _frontier(run: ProgramRun, device: Device, settings: dict[str, Any]) -> Report:
    from bench.gpu.frontier import frontier  # noqa: PLC0415

    idle = device.idle_watts()
    each = [frontier(device, catalogue.model(name), BATCHES, run.args.seconds, idle) for name in MODELS]
    return run.keep(_told_frontier(run, [row for found in each for row in found], idle, settings), draw)


def _told_frontier(run: ProgramRun, rows: list[dict[str, Any]], idle: float | None, settings: dict[str, Any]) -> Report:
    found = knees(rows)
    ratios = []
    for name in found:
        joules = {row["batch"]: row["joules_per_token"] for row in rows if row["shape"] == name}
        if None not in joules.values():
            what = f"{name}: J/token at the knee, or the largest batch / at batch 1"
            ratios.append(Ratio.held("gpu.energy", what, joules[found[name].batch] / joules[1], digits=3))
    notes = knee_notes(rows)
    notes.append(f"Idle, with memory taken: {idle:.0f} W." if idle is not None else "The driver tells no energy.")
    return run.result(
        "gpu-frontier", "Throughput and energy by batch size: 512 tokens in, 256 out", FRONTIER, rows, ratios, notes,
        **settings, knees={name: each.batch for name, each in found.items()}, idle_watts=idle,
    )  # fmt: skip


def draw(found: Report, folder: Path) -> list[Path]:
    names = dict.fromkeys(row["shape"] for row in found.rows)
    batch = plots.Axis(title="batch size", log=True)
    written = []
    for key, stem, title in (
        ("tokens_per_s", "gpu-throughput", "Tokens per second"),
        ("joules_per_token", "gpu-energy", "Joules per token"),
    ):
        series = {name: [(row["batch"], row[key]) for row in found.rows if row["shape"] == name] for name in names}
        unit = plots.Axis(title=title.lower(), log=True)
        written += plots.lines(folder / stem, f"{title} by batch size", series, x=batch, y=unit)
    return written


def _bounds(run: ProgramRun, device: Device, settings: dict[str, Any]) -> Report:
    from bench.gpu.frontier import decode_bounds  # noqa: PLC0415

    accelerator = device.measured()
    rows = [row for name in MODELS for row in decode_bounds(device, catalogue.model(name), STEPS, accelerator)]
    return run.keep(_told_bounds(run, rows, accelerator.peak[16], accelerator.bytes_s, settings))


def _told_bounds(
    run: ProgramRun, measured: list[dict[str, Any]], flops: float, bandwidth: float, settings: dict[str, Any]
) -> Report:
    card = card_of(settings["device"])
    rows, ratios = by_card(measured, card), []
    for name in dict.fromkeys(row["shape"] for row in rows):
        shares = [row["share"] for row in rows if row["shape"] == name]
        ratios.append(Ratio.held("gpu.bound", f"{name}: bound / step, the worst", min(shares)))
    notes = [
        f"The bound is that of `penstock plan roofline`, with what was measured in this run: {flops / 1e12:.0f} "
        f"TFLOP/s of a bfloat16 product, {bandwidth / 1e12:.2f} TB/s of a copy, read and written. The bound by the "
        + (f"card is with what `--gpu {card.name}` has: {card.peak[16] / 1e12:.0f} TFLOP/s, {card.bytes_s / 1e12:.2f} "
           "TB/s." if card else "card is missing: the planner has no such device.")
    ]  # fmt: skip
    return run.result(
        "gpu-bound", "A decode step and its roofline bound", BOUNDS, rows, ratios, notes,
        **settings, flops=flops, bandwidth=bandwidth,
    )  # fmt: skip


def _replicas(run: ProgramRun, device: Device, settings: dict[str, Any]) -> Report:
    from bench.gpu.replicas import side_by_side  # noqa: PLC0415

    rows = [
        side_by_side(SMALL, batch, copies, run.args.seconds, kind)
        for kind, batch in (("eager", run.args.batch), ("graphs", run.args.batch))
        for copies in COPIES
    ]
    ratios = []
    for kind in ("eager", "graphs"):
        each = [row["tokens_per_s"] for row in rows if row["step"] == kind]
        ratios.append(Ratio.held("gpu.replicas", f"{kind}: tokens per second of 3 copies / of 1", each[-1] / each[0]))
    notes = [
        "Each copy is a process; the GPU runs them in time slices. `eager` starts every kernel from Python, as the "
        "engine of the paper did; `graphs` starts a step as one captured graph."
    ]
    found = run.result("gpu-replicas", "Copies of OPT-125M on one GPU", REPLICAS, rows, ratios, notes, **settings)
    return run.keep(found)


def _served(run: ProgramRun) -> int:
    from bench.gpu.served import QUICK, ServedOptions, measured, measurements  # noqa: PLC0415 - as above
    from bench.gpu.server import shape_of  # noqa: PLC0415
    from bench.gpu.slotted import wrong_by  # noqa: PLC0415

    options = QUICK if run.args.quick else ServedOptions()
    name = "CPU" if run.args.quick else _device_name()
    error = wrong_by(shape_of("tiny" if run.args.quick else SMALL), options.device)
    run.console.print(f"{name}: logits of slots are off by {error:.4f} from float32")
    if not error < WRONG:
        raise WrongResult(f"logits are off by {error:.4f} of their norm, more than {WRONG}")
    with Testbed(run.console, "Penstock in front of the engine", measurements(options)) as stage:
        found = measured(options, name, error, stage, run.args.out / RAW)
    return told_served(run, found)


def _device_name() -> str:
    from bench.gpu.device import Device  # noqa: PLC0415

    return str(Device().name)


def _served_again(run: ProgramRun, folder: Path) -> int:
    """As `_loop_again`; nothing, if that run had no such part."""
    from bench.gpu.served import ServedMeasurement  # noqa: PLC0415

    path = folder / "gpu-served.json"
    if not path.exists():
        return 0
    old = load(path)
    return told_served(run, msgspec.convert(old.settings, ServedMeasurement), old)


def told_served(run: ProgramRun, measurement: ServedMeasurement, old: Report | None = None) -> int:
    """Judge a measurement; `old`: the run that made it, if this one judges it anew."""
    from bench.gpu.served_figures import COLUMNS, ServedFigures, draw  # noqa: PLC0415

    raw = write(run.args.out / RAW, measurement)  # a figure that cannot be made must not cost the run
    figures, options = ServedFigures(measurement), measurement.options
    lengths = "{} to {} tokens in, {} to {} out".format(*options.prompts, *options.answers)
    title = f"Penstock in front of {options.model} on a GPU: {lengths}"
    found = run.result("gpu-served", title, COLUMNS, figures.rows(), figures.ratios(), figures.notes(),
                       **msgspec.to_builtins(measurement))  # fmt: skip
    missed = int(run.keep(found, draw, again=old).missed)
    raw.unlink()
    return missed


PARTS: dict[str, tuple[Callable[[ProgramRun], int], Callable[[ProgramRun, Path], int]]] = {
    "loop": (_loop, _loop_again),
    "served": (_served, _served_again),
}
"""Of each part: how to measure it, and how to judge an earlier run again."""

main = BenchProgram(
    "penstock bench gpu", __doc__, _run, WrongResult, ImportError, RuntimeError, OSError, ValueError
).taking(
    Option("--part", choices=("loop", "served"), help="one part alone"),
    Option("--quick", action="store_true", help="of part served: a tiny model on the CPU, c = 1 to 8"),
    Option("--seconds", type=float, default=3.0, help="of each measurement, or 500 requests (default 3)"),
    Option("--batch", type=int, default=64, help="of each copy of the small model (default 64)"),
    Option("--again", type=Path, help="measure nothing, and judge what the files in this folder hold"),
    OUT,
    PLOTS,
)

if __name__ == "__main__":
    main.exit()
