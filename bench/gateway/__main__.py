"""`python -m bench.gateway`: Penstock and other gateways in front of the same simulated engine.

With --base REF: this tree against the tree of another commit. Both are deployed at once, from copies outside the
checkout, and loaded in turn (ABBA, then BAAB, and so on) at c = 1, 16 and 256, in at least nine rounds. In each round
the CPU microseconds per token of all processes of this tree are divided by those of the other.
Shown are the median of these ratios and an interval that contains the true median with probability 95 % or more. The
exit code is 1 if a whole interval lies above --bound, or if a request to this tree failed.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from bench import program
from bench.gateway import base, sweep
from bench.gateway.sweep import GatewayOptions
from bench.gateway.systems import systems
from bench.load.plan import LoadFailed
from bench.processes import Died
from bench.program import OUT, PLOTS, BenchProgram, Option, ProgramRun, WrongArguments, count, counts
from bench.report import bound

LEVELS = (1, 4, 16, 64, 128, 256)
QUICK_LEVELS = (1, 64, 256)
QUICK_SYSTEMS = ("floor", "penstock", "litellm", "router", "dynamo")
RIVALS = ("floor", "penstock", "router", "dynamo")
KNOWN = ", ".join(system.name for system in systems())
IN_FRONT = ("floor", "penstock", "penstock-upstream", "router", "dynamo", "litellm")


def _run(run: ProgramRun) -> int:
    if run.args.base is not None:
        return _compare(run)
    args, options = run.args, _options(run.args)
    names = args.systems.split(",") if args.systems else QUICK_SYSTEMS if args.quick else ()
    program.check_names("system", names, [system.name for system in systems()])
    # The highest level alone, in so many rounds that a neighbour of the machine's cannot decide.
    rivals = _options(args, rounds=9, requests=4)
    rivals = replace(rivals, levels=rivals.levels[-1:])
    ends = replace(rivals, levels=tuple(sorted({options.levels[0], options.levels[-1]})))
    modes = (
        (sweep.NAME, args.all or not (args.rivals or args.upstream), None, options),
        (sweep.RIVALS, args.all or args.rivals, RIVALS, rivals),
        (sweep.IN_FRONT, args.all or args.upstream, IN_FRONT, ends),
    )
    for name, is_wanted, few, those in modes:
        if is_wanted:
            wanted = names if args.systems else few or names
            sweep.compare(run, name, [each for each in systems() if not wanted or each.name in wanted], those)
    return 0


def _compare(run: ProgramRun) -> int:
    """1 if a bound is missed."""
    args = run.args
    if args.systems or args.all or args.rivals or args.upstream:
        raise WrongArguments(
            "--base compares two trees and nothing else: leave out --systems, --rivals, --upstream and --all"
        )
    if args.rounds and args.rounds < base.MIN_ROUNDS and not args.quick:
        raise WrongArguments(
            f"--base is judged by {base.MIN_ROUNDS} rounds or more; with --quick fewer are shown, not judged"
        )
    # Short answers in many rounds: what varies is the machine, from one moment to the next.
    options = _options(args, rounds=base.MIN_ROUNDS, requests=1)
    levels = tuple(args.levels or base.LEVELS)
    return base.compare(run, args.bound or bound("gateway.base"), replace(options, levels=levels))


def _options(
    args: argparse.Namespace, *, levels: tuple[int, ...] = LEVELS, rounds: int = 2, requests: int = 20
) -> GatewayOptions:
    """As they are given; else these, or the quick ones."""
    return GatewayOptions(
        levels=tuple(args.levels or (QUICK_LEVELS if args.quick else levels)),
        rounds=args.rounds or (1 if args.quick else rounds),
        requests_per_stream=args.requests_per_stream or (min(2, requests) if args.quick else requests),
        tokens=args.tokens,
        step_ms=args.step_ms,
        prefill_ms=args.prefill_ms,
        limit_s=args.limit or (15.0 if args.quick else 60.0),
    )


main = BenchProgram("penstock bench gateway", __doc__, _run, Died, LoadFailed, OSError).taking(
    Option("--systems", help=f"only these, separated by commas: {KNOWN}"),
    Option("--quick", action="store_true", help="c = 1, 64, 256, two requests a stream, one round"),
    Option("--levels", type=counts, help="concurrent streams, e.g. 1,64,256"),
    Option("--rounds", type=count, help="rounds through all systems (default 2); medians are shown"),
    Option("--requests-per-stream", type=count, help="in a closed loop (default 20)"),
    Option("--tokens", type=count, default=128, help="of each answer (default 128)"),
    Option("--step-ms", type=float, default=15.0, help="of the simulated engine (default 15)"),
    Option("--prefill-ms", type=float, default=25.0, help="of the simulated engine (default 25)"),
    Option("--limit", type=float, help="seconds in which a measurement may begin requests (default 60)"),
    Option("--rivals", action="store_true", help="floor, Penstock, router and Dynamo at the highest c, in nine rounds"),
    Option("--upstream", action="store_true", help="the same at the lowest and highest c, also in front of a server"),
    Option("--all", action="store_true", help="the sweep, the rivals and upstream"),
    Option("--base", metavar="REF", help="this tree against that of a git commit, in nine rounds: CPU per token"),
    Option("--bound", type=float, help="of --base: the most this/base may be (the goal gateway.base)"),
    OUT,
    PLOTS,
)

if __name__ == "__main__":
    main.exit()
