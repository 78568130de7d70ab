"""Streams that wait: what thousands of open ones cost one API process in memory, and at rest in CPU time.

Their jobs lie in the queue, for no worker runs; the API holds each connection and sends its keep-alive comments.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import uvloop
from rich.console import Console

from bench.gateway.engine import MODEL
from bench.gateway.sweep import GatewayOptions
from bench.load.streams import Stream, StreamedAnswer, chat
from bench.penstock import Penstock
from bench.program import Testbed
from bench.report import Ratio, Report, columns

NAME = "gateway-idle"
SPARE_FILES = 200
AT_ONCE = 64
"""Requests under way while the streams are being opened."""
OPEN_TIMEOUT_S = 300.0
OPEN_FOR_S, GONE_FOR_S = 1.0, 2.0
"""Of the first ones, before anything is measured."""
POLL_INTERVAL_S = 0.5
PARTS = ("api-1", "redis")

COLUMNS = columns("""
    streams: idle streams; process: process; before_mib: MiB before; after_mib: MiB with them;
    kib_per_stream: KiB each .2; cpu_pct: CPU at rest, % of a core .2
""")


@dataclass(frozen=True, slots=True)
class IdleSample:
    """Memory in MiB and CPU in seconds, by process; `open` streams had their headers and a keep-alive comment."""

    open: int
    before: dict[str, float]
    after: dict[str, float]
    cpu: dict[str, float]
    seconds: float
    faults: tuple[str, ...]


def idle(options: GatewayOptions, command: str, console: Console) -> Report:
    """Raises Died, or OSError if this machine does not allow so many open files."""
    wanted = options.idle_streams
    allow_files(wanted + SPARE_FILES)
    with Testbed(console, "starting", 3) as stage:
        folder = stage.room("penstock")
        settings = {
            "redis.lane_limit": wanted + SPARE_FILES,
            "api.keep_alive_s": options.idle_keep_alive_s,
            "telemetry.metrics_dir": stage.folder,
        }
        with (
            Penstock(folder, workers=0, settings=settings) as penstock,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            seen = runner.run(_hold(penstock, options, stage))
    each = 1024 / max(1, seen.open)
    rows: list[dict[str, Any]] = [
        {
            "streams": seen.open,
            "process": name,
            "before_mib": seen.before[name],
            "after_mib": seen.after[name],
            "kib_per_stream": each * (seen.after[name] - seen.before[name]),
            "cpu_pct": 100 * seen.cpu[name] / seen.seconds,
        }
        for name in PARTS
    ]
    return Report(
        name=options.name(NAME),
        title=f"{seen.open:,} idle open streams on one API process",
        command=command,
        settings=msgspec.to_builtins(options),
        columns=COLUMNS,
        rows=rows,
        ratios=(
            Ratio.held("gateway.idle_open", "streams open of those wanted", seen.open / wanted),
            Ratio.held("gateway.idle_memory", "memory of the API process per stream, KiB", rows[0]["kib_per_stream"]),
        ),
        notes=(
            f"At rest: each stream gets a comment every {options.idle_keep_alive_s:g} s. No worker runs.",
            *(f"fault: {fault}" for fault in seen.faults),
        ),
    )


def allow_files(wanted: int) -> None:
    """Raise this process's limit, which its children inherit. Raises OSError with the way out."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise OSError(
            f"this machine allows {hard} open files in a process, and {wanted} are needed: raise the hard limit "
            f"(ulimit -Hn, /etc/security/limits.conf), or hold fewer streams: --idle {max(1, hard - SPARE_FILES)}"
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _hold(penstock: Penstock, options: GatewayOptions, stage: Testbed) -> IdleSample:
    """Open them, wait until each has been told that it is open, and watch them do nothing."""
    processes = penstock.processes
    await _touch(penstock)
    before = processes.memory_mib()
    streams = [Stream(penstock.port) for _ in range(options.idle_streams)]
    faults: list[str] = []
    try:
        stage.say(f"opening {options.idle_streams:,} streams")
        answers = [answer for answer in await _open(streams, faults) if answer is not None]
        stage.done()
        stage.say("waiting for their headers")
        deadline = time.monotonic() + OPEN_TIMEOUT_S
        while any(not answer.arrivals for answer in answers) and time.monotonic() < deadline:
            processes.check()
            await asyncio.sleep(POLL_INTERVAL_S)
        stage.done()
        stage.say("at rest")
        after, cpu, began = processes.memory_mib(), processes.cpu_s(), time.monotonic()
        await asyncio.sleep(options.idle_rest_s)
        seconds, later = time.monotonic() - began, processes.cpu_s()
        stage.done()
        opened = [answer for answer in answers if answer.arrivals and not answer.fault]
        refused = [answer for answer in opened if not answer.arrivals[0][1].startswith(b"HTTP/1.1 200")]
        faults += [answer.arrivals[0][1][:300].decode(errors="replace") for answer in refused[:3]]
        faults += [answer.fault for answer in answers if answer.fault][:3]
    finally:
        for stream in streams:
            stream.close()
    spent = {name: later[name] - cpu[name] for name in later}
    return IdleSample(len(opened) - len(refused), before, after, spent, seconds, tuple(faults))


async def _touch(penstock: Penstock) -> None:
    """A few streams that come and go, so that what the first ones bring into memory is there before."""
    streams = [Stream(penstock.port) for _ in range(AT_ONCE)]
    await _open(streams, [])
    await asyncio.sleep(OPEN_FOR_S)
    for stream in streams:
        stream.close()
    await asyncio.sleep(GONE_FOR_S)


async def _open(streams: Sequence[Stream], faults: list[str]) -> list[StreamedAnswer | None]:
    """An unanswered request on each; None where there is no connection."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(stream: Stream, number: int) -> StreamedAnswer | None:
        async with gate:
            try:
                await stream.connect()
            except OSError as error:
                faults.append(str(error))
                return None
            answer = stream.begin(chat("/v1/chat/completions", MODEL, f"Wait for water {number}.", 16, {}), 16)
            await asyncio.sleep(0.05)  # the door is not to be stormed: what waits before it is no stream yet
            return answer

    return list(await asyncio.gather(*(one(stream, number) for number, stream in enumerate(streams))))
