"""`python -m bench.gpu`: what a GPU's reader loses by the queue: an engine by itself and behind Penstock, in turn.

The engine is a step loop in PyTorch with random weights behind OpenAI's API; `penstock up --upstream` stands before
it. Closed loops take turns direct and through Penstock.

Needs a CUDA GPU, PyTorch and Triton; about five minutes. `--quick` needs PyTorch and Triton alone: it serves a tiny
model on the CPU.
"""

from __future__ import annotations

import msgspec

from bench.gpu.served import COLUMNS, QUICK, TURNS, ServedOptions, measured, notes, ratios, rows
from bench.program import OUT, BenchProgram, Option, ProgramRun, Testbed

WRONG = 0.05
"""Beyond this the step loop does not compute what it should, and its times say nothing."""


class WrongResult(Exception):
    """The step loop does not compute what one pass in float32 does."""


def _run(run: ProgramRun) -> int:
    import torch  # noqa: PLC0415 - torch is not a dependency: --help needs none

    from bench.gpu.server import shape_of  # noqa: PLC0415
    from bench.gpu.slotted import wrong_by  # noqa: PLC0415

    options = QUICK if run.args.quick else ServedOptions()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise WrongResult("this needs a CUDA GPU and PyTorch with Triton")
    error = wrong_by(shape_of(options.checked), options.device)
    if not error < WRONG:
        raise WrongResult(f"logits are off by {error:.4f} of their norm, more than {WRONG}")
    with Testbed(run.console, "Penstock in front of the engine", len(TURNS) * len(options.levels)) as stage:
        turns = measured(options, stage)
    lengths = "{} to {} tokens in, {} to {} out".format(*options.prompts, *options.answers)
    found = run.result(
        "gpu-served",
        f"Penstock in front of {options.model}: {lengths}",
        COLUMNS,
        rows(turns),
        ratios(turns),
        notes(options, turns),
        device=torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        logits_off_by=round(error, 5),
        **msgspec.to_builtins(options),
    )
    return run.keep(found)


main = BenchProgram(
    "penstock bench gpu", __doc__, _run, WrongResult, ImportError, RuntimeError, OSError, ValueError
).taking(Option("--quick", action="store_true", help="a tiny model on the CPU, 1 to 8 at once"), OUT)

if __name__ == "__main__":
    main.exit()
