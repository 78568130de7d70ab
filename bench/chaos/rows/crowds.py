"""F30, F31: a worker lost with all its slots full, and thousands of readers that come back at once."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from bench.chaos.asks import TENANTS, Ask, ClientView, authorization
from bench.chaos.cluster import PenstockCluster
from bench.chaos.http import Cut, Exchange, fetch
from bench.chaos.rows.workers import MAX_RECOVERY_MS, requests
from bench.chaos.stage import PASSES, FaultRow, FaultTestbed, yardstick
from bench.processes import rss_bytes

SLOTS, READ = 256, 24
READERS, JOBS = 2000, 40
MAX_RESUME_S = 5.0
MAX_HEALTH_MS = 250.0
"""Beside a bare server. What asks usually gives up after a second."""
MIB = 1 << 20
MAX_GROWTH = 400 * MIB
"""Of an API process, for a thousand readers."""


async def f30(stage: FaultTestbed) -> None:
    """Every slot of a worker is taken by a long output; it is killed when another one is there."""
    tokens, step_ms = (300, 40) if stage.short else (1000, 40)
    environ = {"PENSTOCK_SIM_SLOTS": str(SLOTS), "PENSTOCK_SIM_STEP_MS": str(step_ms)}
    async with stage.cluster(workers=1, environ=environ) as cluster, yardstick(stage) as bare_ms:
        for trial in stage.tries():
            begun = cluster.begin(
                Ask(f"{stage.row.id} {trial} {n}", tokens, chat=n < READ // 2, reads=n < READ, tenant=TENANTS[n % 2])
                for n in range(SLOTS)
            )
            await asyncio.gather(*(told.begun.wait() for told, _ in begun[:READ]))
            await cluster.all_accepted(begun)
            await asyncio.sleep(tokens * step_ms / 3000)
            doomed = cluster.workers[0] if trial == 0 else (await cluster.holders())[0]
            if trial == 0:
                await cluster.add_worker()
            bare_ms.clear()
            async with asking(cluster.ports[0]) as waits:
                stage.fault(f"kill -9 {doomed.name}")
                doomed.kill()
                await asyncio.gather(*(task for _, task in begun))
            await cluster.finish(begun)
            moved = stage.moved(requests(begun))
            stage.bit(moved >= SLOTS // 2, f"only {moved} jobs lost their worker")
            stage.figures["jobs moved"] = max(moved, float(stage.figures.get("jobs moved", 0)))
            judge_health(stage, waits, bare_ms)
            await cluster.ready()
    stage.stalled_at_most(stage.lease_ms + MAX_RECOVERY_MS)


def judge_health(stage: FaultTestbed, waits: Sequence[float], bare_ms: Sequence[float]) -> None:
    """The API process said that it was well in time, beside a bare server that was asked meanwhile."""
    worst, bare = max(waits, default=math.inf), max(bare_ms, default=0.0)
    name = "health answered in ms, worst"
    if worst >= float(stage.figures.get(name, 0.0)):
        stage.figures |= {name: round(worst, 1), "bare server, worst ms": round(bare, 1)}
    allowed = MAX_HEALTH_MS + PASSES * bare
    stage.must(worst <= allowed, f"an API process said after {worst:.0f} ms that it is well, allowed: {allowed:.0f} ms")


@asynccontextmanager
async def asking(port: int) -> AsyncIterator[list[float]]:
    """How long an API process takes to say that it is well, in milliseconds, asked all the time; infinity for an
    answer that did not come."""
    waits: list[float] = []
    began: list[float] = []

    async def ask() -> None:
        while True:
            began.append(time.monotonic())
            try:
                status, _, _ = await fetch(port, "GET", "/healthz")
            except Cut:
                status = 0
            waits.append(1000 * (time.monotonic() - began.pop()) if status == 200 else math.inf)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(ask())
    try:
        yield waits
    finally:
        if not task.done() and began:
            waits.append(1000 * (time.monotonic() - began[-1]))  # the question that is open
        task.cancel()
        await asyncio.wait([task])


async def f31(stage: FaultTestbed) -> None:
    """Readers of running jobs are all cut off at once and come back at once with their cursors."""
    readers, jobs = (READERS // 10, 10) if stage.short else (READERS, JOBS)
    async with stage.cluster(workers=1, environ={"PENSTOCK_SIM_STEP_MS": "100"}) as cluster:
        for trial in stage.tries():
            asks = [
                Ask(f"{stage.row.id} {trial} {n}", 400, chat=False, reads=False, tenant=TENANTS[n % 2])
                for n in range(jobs)
            ]
            begun = cluster.begin(asks)
            await asyncio.gather(*(task for _, task in begun))
            owners = [told for told, _ in begun]
            crowd = [_reader(cluster, owners[n % jobs]) for n in range(readers)]
            before = max(rss_bytes(api.pid) for api in cluster.apis)
            first = await asyncio.gather(*(_come(cluster, told, n, 3) for n, told in enumerate(crowd)))
            stage.fault(f"{readers} readers are cut off")
            back = await asyncio.gather(*(_come(cluster, told, n + 1, 3) for n, told in enumerate(crowd)))
            grown = max(rss_bytes(api.pid) for api in cluster.apis) - before
            stage.bit(all(each is not None for each in first), "some readers had seen nothing yet")
            slowest = max((each for each in back if each is not None), default=0.0)
            missing = sum(each is None for each in back)
            stage.figures |= {
                "readers": readers,
                "all back after s": round(slowest, 2),
                "memory of an API process, MiB more": round(grown / MIB),
            }
            stage.must(not missing, f"{missing} readers got nothing when they came back")
            stage.must(
                slowest <= MAX_RESUME_S, f"the last reader went on after {slowest:.1f} s, allowed: {MAX_RESUME_S} s"
            )
            stage.must(grown <= MAX_GROWTH, f"an API process grew by {grown / MIB:.0f} MiB")
            ends = [cluster.clients.read_finally(told.job, patience_s=90.0) for told, _ in begun]
            await asyncio.gather(*ends)
            await cluster.ready()


def _reader(cluster: PenstockCluster, owner: ClientView) -> ClientView:
    """One more client of a job, which only reads."""
    told = cluster.clients.tell(Ask(owner.ask.prompt, owner.ask.tokens, reads=False, tenant=owner.ask.tenant))
    told.job = owner.job
    cluster.history.add("accepted", req=told.req, job=told.job, status=200, ms=0)
    return told


async def _come(cluster: PenstockCluster, told: ClientView, number: int, events: int) -> float | None:
    """Read some deltas behind the cursor, then go; seconds to the first one, or None if there was none."""
    began, first, port = time.monotonic(), None, cluster.ports[number % len(cluster.ports)]
    headers = authorization(told.ask.tenant) | ({"Last-Event-ID": told.cursor} if told.cursor else {})
    cluster.history.add("resume", req=told.req, after=told.cursor)
    try:
        exchange = await Exchange.begin(port, "GET", f"/v1/jobs/{told.job}/events", headers=headers)
    except Cut as cut:
        cluster.history.add("cut", req=told.req, why=str(cut))
        return None
    try:
        await exchange.answer()
        async for block in exchange.blocks():
            before = told.shown
            cluster.clients.take_event(told, block)
            if told.shown > before and first is None:
                first = time.monotonic() - began
            events -= told.shown > before
            if not events or told.state:
                break
    except Cut as cut:
        cluster.history.add("cut", req=told.req, why=str(cut))
    finally:
        exchange.close()
    cluster.history.add("left", req=told.req)
    return first


ROWS = (
    FaultRow(
        *("F30", "full worker killed", f"kill -9 of a worker that runs {SLOTS} long outputs", 2, f30, 420),
        alone=True,
        proves="The loss of a worker with all slots full stalls its readers no longer than that of an idle one.",
        short=1,
    ),
    FaultRow(
        *("F31", "readers come back at once", f"{READERS} readers of {JOBS} jobs cut off and resumed", 2, f31, 300),
        alone=True,
        proves="Thousands of readers resume in seconds and in bounded memory, each with exactly what follows.",
        short=1,
    ),
)
