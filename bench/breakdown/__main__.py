"""`python -m bench.breakdown`: where the time of a request goes, by concurrency, and what the bottleneck is.

Against a Penstock of its own with the simulated engine, or any other by --base-url (its key: PENSTOCK_API_KEY).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import urlsplit

import uvloop

from bench import plots
from bench.http import JOB_ID, request
from bench.load.streams import Stream, StreamedAnswer
from bench.processes import Died
from bench.program import OUT, PLOTS, BenchProgram, Option, ProgramRun, Testbed, count, counts
from bench.report import Column, Ratio, Report
from bench.table1.client import NotAServer, TargetServer, servers
from telemetry.latency import EGRESS_FIRST, GROUPS, PARTS

TIMING_TIMEOUT_S = 10.0
"""How long the server may take to note when an answer was sent."""


@dataclass(frozen=True, slots=True)
class AskedWhole:
    """One answer that came whole."""

    job: str
    spent_ms: float
    """From sending the request to its last byte, by the client's clock."""


@dataclass(slots=True)
class BreakdownLevel:
    """What one concurrency gave."""

    streams: int
    asked: list[AskedWhole] = field(default_factory=list)
    wrong: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakdownLoad:
    """What each level asks for."""

    requests: int
    """Of each stream, after one that is not measured."""
    tokens: int
    whole: bool = False
    together: bool = False
    """All streams begin at once, and an engine whose answers take equally long keeps them in step: every request comes
    in a crowd. Otherwise they are spread over the time of one answer."""
    limit_s: float = 120.0
    """No request begins later."""


async def ask_all(target: TargetServer, streams: int, load: BreakdownLoad) -> BreakdownLevel:
    """One level. Raises TimeoutError when requests that began in time do not end in as long again."""
    connections = [Stream(target.port, target.host) for _ in range(streams)]
    asker = _Asker(target, load, BreakdownLevel(streams))
    try:
        async with asyncio.timeout(2 * load.limit_s):
            if load.together:
                await asyncio.gather(*(asker.warm_up(stream, load.tokens) for stream in connections))
                await asyncio.gather(*(asker.run(stream) for stream in connections))
            else:
                spread = [max(1, load.tokens * (number + 1) // streams) for number in range(streams)]
                await asyncio.gather(*(asker.run(*each) for each in zip(connections, spread, strict=True)))
    except TimeoutError:
        raise TimeoutError(f"c={streams}: there are requests without an end after {2 * load.limit_s:g} s") from None
    finally:
        for stream in connections:
            stream.close()
    return asker.level


class _Asker:
    """All streams of one level."""

    def __init__(self, target: TargetServer, load: BreakdownLoad, level: BreakdownLevel) -> None:
        self.level = level
        self._target, self._load = target, load
        self._numbers = itertools.count()
        self._until = time.monotonic() + load.limit_s
        self._began = 0.0

    async def warm_up(self, stream: Stream, tokens: int) -> None:
        """What fails here fails later too, and is counted there."""
        with contextlib.suppress(OSError):
            await stream.ask(self._request(tokens), tokens)

    async def run(self, stream: Stream, warm_up_tokens: int = 0) -> None:
        if warm_up_tokens:
            await self.warm_up(stream, warm_up_tokens)
        self._began = self._began or time.monotonic()
        for _ in range(self._load.requests):
            if time.monotonic() > self._until:
                break
            try:
                _note(await stream.ask(self._request(self._load.tokens), self._load.tokens), self.level)
            except OSError as error:
                self.level.wrong[f"no connection: {error}"] += 1
                await asyncio.sleep(0.1)
        self.level.seconds = time.monotonic() - self._began

    def _request(self, tokens: int) -> bytes:
        prompt = f"Tell me about water, please: question {next(self._numbers)}."
        return _request(self._target, prompt, tokens, whole=self._load.whole)


def _request(target: TargetServer, prompt: str, tokens: int, *, whole: bool) -> bytes:
    messages = [{"role": "user", "content": prompt}]
    body = {"model": target.model, "messages": messages, "max_tokens": tokens, "stream": not whole}
    return request("POST", "/v1/chat/completions", body, target.headers, f"{target.host}:{target.port}")


def _note(answer: StreamedAnswer, level: BreakdownLevel) -> None:
    """A streamed answer is whole with its [DONE], the other with its last byte."""
    data = b"".join(part for _, part in answer.arrivals)
    head, _, body = data.partition(b"\r\n\r\n")
    status, job = head.split(b" ", 2)[1:2], JOB_ID.search(head + b"\r\n")
    streamed = b"text/event-stream" in head
    if answer.fault or status != [b"200"] or (streamed and b"data: [DONE]" not in body):
        level.wrong[answer.fault or f"status {b''.join(status).decode()}: {body[:120].decode(errors='replace')}"] += 1
    elif job is None:
        level.wrong["no X-Job-Id: this is not Penstock"] += 1
    else:
        level.asked.append(AskedWhole(job[1].decode(), 1e3 * (answer.arrivals[-1][0] - answer.sent)))


def timings(target: TargetServer, asked: list[AskedWhole], most: int) -> list[tuple[AskedWhole, dict[str, Any]]]:
    """The server's view of at most so many of them, spread over the run. Raises NotAServer, OSError."""
    step = max(1, -(-len(asked) // most))
    chosen = asked[::step]
    deadline = time.monotonic() + TIMING_TIMEOUT_S
    while True:
        found = list(target.get(f"/v1/jobs/{each.job}/timing" for each in chosen[-1:]))
        if not found or found[0]["until"] == "last_sent" or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return list(zip(chosen, target.get(f"/v1/jobs/{each.job}/timing" for each in chosen), strict=True))


OUTSIDE = "outside"
"""Between the client's clock and the server's first and last stamp: sockets, and what waits in them to be read."""

GATEWAY = (*GROUPS["gateway"], OUTSIDE)
"""What the path costs; the time outside is counted against it too."""

STACK = {"engine": GROUPS["engine"], "gateway": GATEWAY, "queue": GROUPS["queue"]}

COLUMNS = (
    Column("streams", "c"),
    Column("per_second", "req/s"),
    Column("end_to_end", "whole"),
    *(Column(f"{name}_ms", name) for name in STACK),
    Column("share", "share %", 2),
    Column("bottleneck", "bottleneck"),
    Column("ingress", "ingress", 2),
    Column("queue", "lane", 2),
    Column("gate", "gate", 2),
    Column("engine_wait", "wait", 2),
    Column("prefill", "prefill"),
    Column("decode", "decode"),
    Column("egress_tail", "tail", 2),
    Column(OUTSIDE, OUTSIDE, 2),
    Column(EGRESS_FIRST.name, "first", 2),
)

Timed = Sequence[tuple[AskedWhole, Mapping[str, Any]]]
Row = dict[str, Any]


def row_of(level: BreakdownLevel, timed: Timed) -> Row:
    """One concurrency. Times in ms; a timing without its end is left out and counted."""
    known = [(asked, timing) for asked, timing in timed if timing["until"] == "last_sent"]
    row: Row = {"streams": level.streams, "requests": len(level.asked), "wrong": dict(level.wrong)}
    row |= {"asked": len(timed), "timed": len(known)}
    if not known:
        return row
    for name in (*(part.name for part in PARTS), EGRESS_FIRST.name):
        row[name] = _mean(timing["parts_ms"][name] for _, timing in known)
    row[OUTSIDE] = fmean(asked.spent_ms - timing["end_to_end_ms"] for asked, timing in known)
    row["end_to_end"] = fmean(asked.spent_ms for asked, _ in known)
    row |= {f"{name}_ms": sum(row[part] or 0.0 for part in parts) for name, parts in STACK.items()}
    row["share"] = share_of(row)
    row["bottleneck"] = max(STACK, key=lambda name: row[f"{name}_ms"])
    row["clock_error"] = max(sum(timing["clock_error_ms"].values()) for _, timing in known)
    row["per_second"] = len(level.asked) / level.seconds if level.seconds else None
    return row


def share_of(row: Row) -> float:
    """The gateway's per cent of the end-to-end time, the queue excluded."""
    rest = row["gateway_ms"] + row["engine_ms"]
    return 100 * row["gateway_ms"] / rest if rest > 0 else 0.0


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def ratios_of(rows: Sequence[Row]) -> tuple[Ratio, ...]:
    """The gateway's share from 64 streams on, and whether it stays."""
    shares = {row["streams"]: row["share"] for row in rows if "share" in row}
    found = [
        Ratio.held("breakdown.share", f"gateway share of end-to-end time without queue, c={streams}, %", share)
        for streams, share in shares.items()
        if streams >= 64
    ]
    if 64 in shares and 256 in shares:
        ratio, grown = shares[256] / shares[64] if shares[64] > 0 else None, shares[256] - shares[64]
        found.append(Ratio.held("breakdown.growth_ratio", "gateway share at c=256 over that at c=64", ratio))
        found.append(Ratio.held("breakdown.growth", "gateway share, growth from c=64 to 256, points", grown))
    return tuple(found)


def notes_of(rows: Sequence[Row], step_ms: float | None, tokens: int) -> list[str]:
    """What a reader has to know."""
    worst = max((row.get("clock_error", 0.0) for row in rows), default=0.0)
    said = [
        "Means over the timed requests, in ms. gateway = ingress + gate + tail + outside (between the client's clock "
        "and the server's first and last stamp); queue = lane + retries + wait (inside the engine); engine = prefill + "
        "decode; the gateway's share leaves the queue out. first (the first token's way out) runs beside decode.",
        f"Clocks of different processes are known to {worst:.2f} ms at worst, for single requests.",
    ]
    if step_ms:
        ideal = step_ms * (tokens - 1)
        late = [f"{row['decode'] - ideal:.1f} at c={row['streams']}" for row in rows if row.get("decode")]
        said.append(
            "The simulated engine steps in the worker's own process: what that process is late stands in decode, "
            f"{', '.join(late)} ms over its {step_ms:g} ms steps."
        )
    for row in rows:
        for what, times in row["wrong"].items():
            said.append(f"c={row['streams']}: {times} x {what}")
        if lost := row["asked"] - row["timed"]:
            said.append(f"c={row['streams']}: {lost} timings without their end were left out.")
    return said


def draw(report: Report, folder: Path) -> list[Path]:
    """The whole by groups, and what the gateway's part is made of; the files written."""
    rows = [row for row in report.rows if "share" in row]
    at = [row["streams"] for row in rows]
    x = plots.Axis(title="concurrent requests")
    whole = {name: [row[f"{name}_ms"] for row in rows] for name in STACK}
    path = {name.replace("_", " "): [max(0.0, row[name] or 0.0) for row in rows] for name in GATEWAY}
    return [
        *plots.bars(
            folder / report.name, "Where a request's time goes", at, whole, x=x, y=plots.Axis(title="ms, mean")
        ),
        *plots.bars(
            folder / f"{report.name}-gateway", "The gateway's part", at, path, x=x, y=plots.Axis(title="ms, mean")
        ),
    ]


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
