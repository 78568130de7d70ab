"""`python -m bench.gateway`: Penstock and other gateways in front of the same simulated engine."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from bench import plots, report
from bench.gateway import burst, idle, sweep
from bench.gateway.catalogue import chosen, names_of, systems
from bench.gateway.options import Options
from bench.gateway.system import System
from bench.load.child import LoadFailed
from bench.processes import Died

LEVELS = (1, 4, 16, 64, 128, 256)
QUICK_LEVELS = (1, 64, 256)
QUICK_SYSTEMS = ("floor", "penstock", "plain", "litellm", "router", "dynamo")
BURST_SYSTEMS = ("floor", "penstock", "plain", "router", "dynamo")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 if everything asked for was measured, whatever the figures say."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(words)
    console = report.console()
    try:
        found = chosen(args.systems or (QUICK_SYSTEMS if args.quick else ()))
    except KeyError as error:
        console.print(f"error: no system {error}; there are {names_of(systems())}")
        return 2
    # Ended by SIGTERM as by Ctrl-C: no process that was started is left behind.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _run(args, found, " ".join(["penstock bench gateway", *words]), console)
    except (Died, LoadFailed, OSError) as error:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("stopped; every process has ended")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(args: argparse.Namespace, found: Sequence[System], command: str, console: Console) -> int:
    options = _options(args)
    if args.all or not (args.burst or args.idle):
        _tell(sweep.sweep(found, options, command, console), sweep.draw, args, console)
    if args.all or args.burst:
        few = [system for system in found if args.systems or system.name in BURST_SYSTEMS]
        _tell(burst.burst(few, options, command, console), None, args, console)
    if args.all or args.idle:
        _tell(idle.idle(options, command, console), None, args, console)
    return 0


def _tell(
    found: report.Report,
    draw: Callable[[report.Report, Path], list[Path]] | None,
    args: argparse.Namespace,
    console: Console,
) -> None:
    console.print(report.table(found))
    console.print(f"figures: {found.save(args.out / f'{found.name}.json')}")
    if draw is None or args.quick:
        return
    drawn = draw(found, args.plots)
    console.print(f"plots: {', '.join(map(str, drawn))}" if drawn else plots.missing())


def _options(args: argparse.Namespace) -> Options:
    return Options(
        quick=args.quick,
        levels=tuple(args.levels or (QUICK_LEVELS if args.quick else LEVELS)),
        rounds=args.rounds or (1 if args.quick else 2),
        requests_per_stream=args.requests_per_stream or (2 if args.quick else 20),
        tokens=args.tokens,
        step_ms=args.step_ms,
        prefill_ms=args.prefill_ms,
        limit_s=args.limit or (15.0 if args.quick else 60.0),
        bursts=5 if args.quick else 20,
        idle_streams=args.idle or (1000 if args.quick else 10_000),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock bench gateway", description=__doc__)
    parser.add_argument("--systems", type=_names, help=f"only these, separated by commas: {names_of(systems())}")
    parser.add_argument("--quick", action="store_true", help="c = 1, 64, 256, two requests a stream, one round")
    parser.add_argument("--levels", type=_counts, help="concurrent streams, e.g. 1,64,256")
    parser.add_argument("--rounds", type=_count, help="rounds through all systems (default 2); medians are shown")
    parser.add_argument("--requests-per-stream", type=_count, help="in a closed loop (default 20)")
    parser.add_argument("--tokens", type=_count, default=128, help="of each answer (default 128)")
    parser.add_argument("--step-ms", type=float, default=15.0, help="of the simulated engine (default 15)")
    parser.add_argument("--prefill-ms", type=float, default=25.0, help="of the simulated engine (default 25)")
    parser.add_argument("--limit", type=float, help="seconds in which a measurement may begin requests (default 60)")
    parser.add_argument("--burst", action="store_true", help="64 requests at once, 5 ms steps: only their TTFT")
    parser.add_argument("--idle", type=_count, metavar="N", help="N open streams that wait: only their memory and CPU")
    parser.add_argument("--all", action="store_true", help="the sweep, the burst and 10,000 idle streams")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the JSON files")
    parser.add_argument("--plots", type=Path, default=plots.PLOTS, help="folder of the plots")
    return parser


def _names(words: str) -> list[str]:
    return [name.strip() for name in words.split(",") if name.strip()]


def _count(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def _counts(words: str) -> list[int]:
    return sorted({_count(word) for word in words.split(",")})


if __name__ == "__main__":
    sys.exit(main())
