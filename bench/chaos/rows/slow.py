"""F09: readers that take nothing, or next to nothing."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.chaos.asks import Ask
from bench.chaos.checker import lives_of
from bench.chaos.house import House
from bench.chaos.http import Cut, Exchange, fetch
from bench.chaos.stage import FaultRow, FaultTestbed
from bench.chaos.stalls import percentile
from bench.chaos.yardstick import PASSES, yardstick

SEND_TIMEOUT_S = 10.0
LATE_S = 5.0
FULL_S = 14.0
"""Until every buffer between a slow reader and the process is full, about."""
STEP_MS = 20
OTHERS = 8
WAVES = 3
"""Crowds, one after the other. The slowest 1 % of the gaps come from three engine steps, so one pause of the machine
decides the figure; three crowds show its spread."""
BUFFER = 4096
MAX_RSS_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Wave:
    """What one crowd of slow readers did to the others, beside the same work that nobody reads slowly."""

    others_ms: float
    """99th percentile of the time between two tokens of the others."""
    undisturbed_ms: float
    bare_ms: float
    """99th percentile of a bare server's answers, beside the crowd and, next, without it."""
    bare_undisturbed_ms: float
    cut_s: tuple[float, ...]
    each: float
    """Bytes of memory the API process took for each reader."""


async def f09(stage: FaultTestbed) -> None:
    """Crowds of readers that stall at once, beside eight that do not; the others must not notice."""
    environ = {"PENSTOCK_SIM_STEP_MS": str(STEP_MS), "PENSTOCK_API_SEND_TIMEOUT_S": str(SEND_TIMEOUT_S)}
    async with stage.house(apis=1, workers=1, environ=environ) as house, yardstick(stage) as bare_ms:
        crowd = stage.wanted // WAVES
        warm = house.begin([Ask(f"warm {n}", 20) for n in range(crowd)])
        await asyncio.gather(*(task for _, task in warm))
        await house.finish(warm)
        # One reader shows how long the buffers take to fill; a crowd must be cut as timely as that one.
        alone_s = await _stall(stage, house, "alone", takes_some=False)
        waves = [await _wave(stage, house, f"{wave}", crowd, bare_ms) for wave in range(WAVES)]
    spent = [each for wave in waves for each in wave.cut_s]
    late = max(abs(each - alone_s) for each in spent)
    stage.must(late <= LATE_S, f"slow readers were cut up to {late:.1f} s off the time, allowed: {LATE_S} s")
    stage.must(min(spent) >= SEND_TIMEOUT_S, f"a slow reader was cut after {min(spent):.1f} s")
    most = max(wave.each for wave in waves)
    stage.must(most <= MAX_RSS_BYTES, f"{most / 1024:.0f} KiB for each slow reader, allowed: {MAX_RSS_BYTES // 1024}")
    stage.figures |= {
        "memory each KiB": round(most / 1024, 1),
        "others' gap p99 ms": _listed(wave.others_ms for wave in waves),
        "undisturbed p99 ms": _listed(wave.undisturbed_ms for wave in waves),
        "bare server, p99 ms": _listed(wave.bare_ms for wave in waves),
        "bare server, undisturbed": _listed(wave.bare_undisturbed_ms for wave in waves),
        "cut after s, worst": round(max(spent), 1),
        "cut after s, one alone": round(alone_s, 1),
    }
    for wave in waves:
        allowed = 1.1 * wave.undisturbed_ms + PASSES * max(0.0, wave.bare_ms - wave.bare_undisturbed_ms)
        stage.must(wave.others_ms <= allowed, f"others' p99 {wave.others_ms:.1f} ms, allowed: {allowed:.1f} ms")


async def _wave(stage: FaultTestbed, house: House, name: str, crowd: int, bare_ms: list[float]) -> Wave:
    unread = house.begin([Ask(f"unread {name} {n}", 500, chat=False, reads=False) for n in range(crowd)])
    undisturbed, bare_then = await _others(house, f"undisturbed {name}", bare_ms)
    await house.finish(unread)
    before = _rss(house.apis[0].pid)
    slow = [asyncio.create_task(_stall(stage, house, f"{name} {n}", takes_some=n % 2 == 1)) for n in range(crowd)]
    await asyncio.sleep(FULL_S)
    beside = asyncio.create_task(_others(house, f"beside {name}", bare_ms))
    most = before
    while not beside.done():
        most = max(most, _rss(house.apis[0].pid))
        await asyncio.sleep(0.1)
    disturbed, bare_now = await beside
    spent = await asyncio.gather(*slow)
    return Wave(disturbed, undisturbed, bare_now, bare_then, tuple(spent), (most - before) / (crowd + OTHERS))


def _listed(figures: Iterable[float]) -> str:
    return " / ".join(f"{each:.1f}" for each in figures)


async def _others(house: House, name: str, bare_ms: list[float]) -> tuple[float, float]:
    """p99 of the time between two tokens of some readers, and of the bare server's answers meanwhile, in ms."""
    bare_ms.clear()
    begun = house.begin([Ask(f"{name} {n}", 300) for n in range(OTHERS)])
    await asyncio.gather(*(task for _, task in begun))
    await house.finish(begun)
    requests = {told.req for told, _ in begun}
    gaps = []
    for req, life in lives_of(house.history.events).items():
        if req in requests:
            gaps += [b["t"] - a["t"] for a, b in itertools.pairwise(life.of("token"))]
    bare = percentile(sorted(bare_ms), 0.99) or 0.0
    return 1000 * (percentile(sorted(gaps), 0.99) or 0.0), bare


async def _stall(stage: FaultTestbed, house: House, name: str, *, takes_some: bool) -> float:
    """Ask, then read 100 B/s, or nothing; seconds to the end of its work, which is looked at only then."""
    told = house.clients.tell(Ask(f"slow {name}", 6000, may=("cancelled",), reads=False))
    exchange = await Exchange.begin(house.ports[0], "POST", told.ask.path, told.ask.body, receive_buffer=BUFFER)
    with suppress(Cut):
        await exchange.answer()
    job = exchange.headers["x-job-id"]
    house.history.add("accepted", req=told.req, job=job, status=exchange.status, ms=0)
    stage.fault("reads 100 B/s" if takes_some else "reads nothing")
    sipping = asyncio.create_task(_sip(exchange)) if takes_some else None
    await asyncio.sleep(FULL_S + SEND_TIMEOUT_S + LATE_S)
    state = await house.clients.read_finally(job, patience_s=1.0)
    if sipping:
        sipping.cancel()
    exchange.close()
    stage.must(state == "cancelled", f"the job of slow reader {name} ended {state!r}")
    _, _, body = await fetch(house.ports[0], "GET", f"/v1/jobs/{job}")
    view = msgspec.json.decode(body)
    return float((view["completed_at"] or time.time()) - view["created_at"])


async def _sip(exchange: Exchange) -> None:
    while await exchange.sip(100):  # noqa: ASYNC110 - a slow reader's pace
        await asyncio.sleep(1.0)


def _rss(pid: int) -> int:
    """Bytes of memory a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


ROWS = (
    FaultRow(
        *("F09", "slow readers", "100 B/s or nothing, 3 x 200 at once", 600, f09, 300),
        alone=True,
        proves="Readers that take nothing are cut off, in bounded memory, and others do not notice them.",
        short=150,
    ),
)
