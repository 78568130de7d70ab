"""`python -m bench.gpu`: small models on a GPU, by a step loop in PyTorch with random weights.

Throughput and energy by batch size with the knee, decode steps beside their roofline bound, copies of a small model.

Needs a CUDA GPU, PyTorch and Triton; about five minutes.
"""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from bench import plots
from bench.program import OUT, PLOTS, BenchProgram, Option, ProgramRun
from bench.report import Ratio, Report, columns
from planner.facts import catalogue
from planner.knee import knee

if TYPE_CHECKING:
    from bench.gpu.device import Device

BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
STEPS = [(1, 512), (8, 512), (32, 512), (128, 512), (1, 1920), (8, 1920), (32, 1920), (128, 1920)]
"""Batch and context of the decode steps."""
COPIES = [1, 2, 3]
MODELS = ("opt-125m", "opt-1.3b")
SMALL = MODELS[0]
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
    shape: shape; batch: batch; context: context; step_ms: step ms .3; bound_ms: bound ms .3; share: bound / step .3
""")


class WrongResult(Exception):
    """The step loop does not compute what one pass in float32 does."""


def _run(run: ProgramRun) -> int:
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


def _frontier(run: ProgramRun, device: Device, settings: dict[str, Any]) -> Report:
    from bench.gpu.frontier import frontier  # noqa: PLC0415

    idle = device.idle_watts()
    each = {name: frontier(device, catalogue.model(name), BATCHES, run.args.seconds, idle) for name in MODELS}
    rows = [row for found in each.values() for row in found]
    dice = Random(1)  # noqa: S311 - draws for the confidence
    knees = {name: knee({row["batch"]: [row["tokens_per_s"]] for row in each[name]}, dice) for name in MODELS}
    ratios = []
    for name, found in each.items():
        joules = {row["batch"]: row["joules_per_token"] for row in found}
        if None not in joules.values():
            what = f"{name}: J/token at the knee, or the largest batch / at batch 1"
            ratios.append(Ratio.held("gpu.energy", what, joules[knees[name].batch] / joules[1], digits=3))
    notes = [f"{name}: knee at batch {found.batch}: {found.reason}." for name, found in knees.items()]
    notes.append(f"Idle, with memory taken: {idle:.0f} W." if idle is not None else "The driver tells no energy.")
    result = run.result(
        "gpu-frontier",
        "Throughput and energy by batch size: 512 tokens in, 256 out",
        FRONTIER,
        rows,
        ratios,
        notes,
        **settings,
        knees={name: found.batch for name, found in knees.items()},
        idle_watts=idle,
    )
    return run.keep(result, draw)


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
    flops, bandwidth = accelerator.peak[16], accelerator.bytes_s
    rows = [row for name in MODELS for row in decode_bounds(device, catalogue.model(name), STEPS, accelerator)]
    ratios = []
    for name in MODELS:
        shares = [row["share"] for row in rows if row["shape"] == name]
        ratios.append(Ratio.held("gpu.bound", f"{name}: bound / step, the worst", min(shares)))
    notes = [
        f"The bound is that of `penstock plan roofline`, with what was measured in this run: {flops / 1e12:.0f} "
        f"TFLOP/s of a bfloat16 product, {bandwidth / 1e12:.2f} TB/s of a copy, read and written."
    ]
    found = run.result(
        "gpu-bound", "A decode step and its roofline bound", BOUNDS, rows, ratios, notes,
        **settings, flops=flops, bandwidth=bandwidth,
    )  # fmt: skip
    return run.keep(found)


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


main = BenchProgram("penstock bench gpu", __doc__, _run, WrongResult, ImportError, RuntimeError, OSError).taking(
    Option("--seconds", type=float, default=3.0, help="of each measurement, or 500 requests (default 3)"),
    Option("--batch", type=int, default=64, help="of each copy of the small model (default 64)"),
    OUT,
    PLOTS,
)

if __name__ == "__main__":
    main.exit()
