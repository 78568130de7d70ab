"""`penstock bench order`: compares rules that order jobs and admit them to an engine, on a model of the engine.

Part `gate`: admission to one engine by the gate of the workers, beside the engine's own policies and a gate that looks
at now alone. All texts wait from the start; on one load their lengths stay, on the other they double.
The same seeds give the same figures on every machine, except the time of a decision.

Part `replay`: a bursty trace of three tenants beside a batch; requests in time under four orders.

Exits 1 if a goal is missed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bench import report
from bench.order import gate, replay
from bench.program import OUT, PLOTS, BenchProgram, Option, ProgramRun

PARTS: Mapping[str, Callable[[ProgramRun], int]] = {"gate": gate.measured, "replay": replay.measured}
"""Each shows its table and keeps its figures; 1 for a missed goal."""


def _run(run: ProgramRun) -> int:
    return max(PARTS[part](run) for part in ([run.args.part] if run.args.part else PARTS))


main = BenchProgram("penstock bench order", __doc__, _run).taking(
    Option("--part", choices=tuple(PARTS), metavar="PART", help=f"one part alone: {', '.join(PARTS)}"),
    Option("--quick", action="store_true", help="few texts; nothing is judged"),
    Option("--jobs", type=int, default=report.cores(), help="processes (default: one for each core)"),
    OUT,
    PLOTS,
)

if __name__ == "__main__":
    main.exit()
