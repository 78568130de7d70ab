"""`python -m bench.breakdown`: where the time of a request goes, by concurrency, and what the bottleneck is.

Against a Penstock of its own with the simulated engine, or any other by --base-url (its key: PENSTOCK_API_KEY).
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from urllib.parse import urlsplit

import uvloop

from bench.breakdown.ask import (
    COLUMNS,
    BreakdownLoad,
    Row,
    ask_all,
    draw,
    notes_of,
    ratios_of,
    row_of,
    timings,
)
from bench.processes import Died
from bench.program import OUT, PLOTS, BenchProgram, Option, ProgramRun, Testbed, count, counts
from bench.table1.client import NotAServer, TargetServer, servers

NAME = "breakdown"
LEVELS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
QUICK_LEVELS = (1, 16, 64)


def _run(run: ProgramRun) -> int:
    args = run.args
    levels = args.levels or (QUICK_LEVELS if args.quick else LEVELS)
    own = {"sim.step_ms": args.step_ms, "sim.prefill_ms": args.prefill_ms, "sim.slots": _slots(args, levels)}
    urls = _urls(args.base_url)
    with (
        Testbed(run.console, "starting", len(levels)) as stage,
        servers(urls, args.model, stage.folder, own) as (target,),
    ):
        rows = [_level(args, target, streams, stage) for streams in levels]
    what = target.model if urls else f"simulated engine, {args.step_ms:g} ms steps"
    how = ("in one piece" if args.whole else "streamed") + (", all at once" if args.together else "")
    settings = {"levels": list(levels), "tokens": args.tokens, "whole": args.whole, "together": args.together}
    if not urls:
        settings |= {"step_ms": args.step_ms, "prefill_ms": args.prefill_ms, "slots": _slots(args, levels)}
    title = f"Where a request's time goes: {what}, {args.tokens} tokens, {how}"
    notes = notes_of(rows, None if urls else args.step_ms, args.tokens)
    run.keep(run.result(NAME, title, COLUMNS, rows, ratios_of(rows), notes, **settings), draw)
    return 0 if all("share" in row for row in rows) else 1


def _level(args: argparse.Namespace, target: TargetServer, streams: int, stage: Testbed) -> Row:
    stage.say(f"c={streams}")
    load = BreakdownLoad(
        requests=args.requests_per_stream or (3 if args.quick else 20),
        tokens=args.tokens,
        whole=args.whole,
        together=args.together,
        limit_s=args.limit,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        level = runner.run(ask_all(target, streams, load))
    stage.say(f"c={streams}, reading timings")
    row = row_of(level, timings(target, level.asked, args.sample))
    stage.done()
    return row


def _urls(base_url: str | None) -> list[str]:
    """The address of its API, if a server is named. Raises NotAServer."""
    if not base_url:
        return []
    parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
    if parts.scheme != "http":
        raise NotAServer(f"{base_url}: give a plain http:// address; what is in front of it is not Penstock's time")
    return [f"http://{parts.netloc}/v1"]


def _slots(args: argparse.Namespace, levels: Sequence[int]) -> int:
    """One for every request, unless they are to queue."""
    return args.slots or max(256, *levels)


main = BenchProgram("penstock bench breakdown", __doc__, _run, Died, NotAServer, OSError).taking(
    Option("--base-url", help="a Penstock that runs already, e.g. http://127.0.0.1:8000"),
    Option("--model", help="of that server (default: its first)"),
    Option("--quick", action="store_true", help="c = 1, 16, 64, three requests a stream, no plots"),
    Option("--levels", type=counts, help="concurrent requests (default 1 to 256 in powers of two)"),
    Option("--requests-per-stream", type=count, help="in a closed loop (default 20)"),
    Option("--tokens", type=count, default=128, help="of each answer (default 128)"),
    Option("--whole", action="store_true", help="ask for answers in one piece instead of streams"),
    Option("--together", action="store_true", help="all streams begin at once, and stay in step"),
    Option("--step-ms", type=float, default=15.0, help="of the simulated engine (default 15)"),
    Option("--prefill-ms", type=float, default=25.0, help="of the simulated engine (default 25)"),
    Option("--slots", type=count, help="of the simulated engine (default: one for every request)"),
    Option("--sample", type=count, default=400, help="timings read at each level (default 400)"),
    Option("--limit", type=float, default=120.0, help="seconds in which a level may begin requests"),
    OUT,
    PLOTS,
)

if __name__ == "__main__":
    main.exit()
