"""F12: the store's clock jumps. libfaketime makes the server believe it (Debian: apt-get install faketime)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from bench.chaos.budget import Budget
from bench.chaos.rows.workers import asks, requests, victim
from bench.chaos.servers import RedisServer
from bench.chaos.stage import FaultRow, FaultTestbed
from bench.chaos.stalls import percentile, stalls_ms
from bench.chaos.waiting import until

JUMP_S = 600
DEADLINE_MS = 1500 * JUMP_S
"""Of every second job: one jump does not reach it. Deadlines go by the store's clock, so a longer jump would."""
BEYOND_LEASE_MS = 4000


def find_library() -> str:
    """libfaketime, for LD_PRELOAD. Raises FileNotFoundError."""
    found = sorted(Path("/usr/lib").glob("**/libfaketime.so.1"))
    if not found:
        raise FileNotFoundError("libfaketime is not installed (on Debian and Ubuntu: apt-get install faketime)")
    return str(found[0])


async def f12(stage: FaultTestbed) -> None:
    """Ten minutes forward, ten minutes back, and back just after a worker was killed."""
    offset = stage.folder / "offset"
    offset.write_text("+0\n")
    clock = {
        "LD_PRELOAD": find_library(),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    server = RedisServer(stage.folder, environ=clock)
    await server.start()
    here = 0
    async with stage.house(server) as house:
        for trial in stage.tries():
            limits = {"deadline_ms": DEADLINE_MS, "max_queue_ms": DEADLINE_MS}
            plain = asks(stage.row.id, trial, tokens=250)
            begun = house.begin(replace(ask, queue=limits if n % 2 else {}) for n, ask in enumerate(plain))
            await asyncio.gather(*(told.begun.wait() for told, _ in begun))
            here += JUMP_S if trial % 3 == 0 else -JUMP_S
            before = await _now(server)
            stage.fault("the clock jumps " + ("forward", "back", "back, and a worker dies")[trial % 3])
            if trial % 3 == 2:
                (await victim(stage, house)).kill()
            offset.write_text(f"{here:+d}\n")
            await until(lambda b=before: _jumped(server, b), 10)  # type: ignore[misc]
            await house.finish(begun)
            stage.bit(stage.across(requests(begun)), "nobody read across it")
            await house.ready()
    await server.child.end()
    p99, allowed = percentile(stalls_ms(stage.history.events), 0.99) or 0.0, stage.lease_ms + BEYOND_LEASE_MS
    stage.must(p99 <= allowed, f"streams waited p99 {p99:.0f} ms, allowed: {allowed} ms")


async def _now(server: RedisServer) -> int:
    return int((await server.command("TIME"))[0])


async def _jumped(server: RedisServer, before: int) -> bool:
    return abs(await _now(server) - before) > JUMP_S / 2


ROWS = (
    FaultRow(
        *("F12", "clock jumps", "the store's clock: 10 minutes forward, back, back as a worker dies", 18, f12, 400),
        proves="A jump of the store's clock ends no job before its deadline, strands none, costs no lease for long.",
        budget=Budget(broken=6, why="a worker that is fenced by the jump starts again"),
        short=3,
    ),
)
