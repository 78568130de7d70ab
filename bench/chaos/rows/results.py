"""F32, F35: the results of accepted jobs fill the store; retention passes while a job waits or is read."""

from __future__ import annotations

import asyncio

from bench.chaos.asks import ANY, TENANTS, Ask, Budget, ClientView, authorization
from bench.chaos.cluster import PenstockCluster
from bench.chaos.history import of_kind
from bench.chaos.http import Cut, Exchange, answered
from bench.chaos.processes import RedisServer, becomes
from bench.chaos.rows.workers import requests
from bench.chaos.stage import FaultRow, FaultTestbed

WAVES, TOKENS = (400, 50, 50, 50), 1000
"""Jobs of each wave, which comes when the jobs of the one before have ended: so the store really fills with results.
Those of the first wave alone would fill it, and it could be accepted before the first of them is long."""
JOBS = sum(WAVES)
MAXMEMORY = 8 << 20
"""maxmemory, before the first process starts. What the results of all jobs would take is measured, and is more."""
MAX_PEAK = 1.25
"""Times maxmemory. The peak counts the buffers of hundreds of clients at once: it was 97 % of maxmemory, and 306 %
where admission reserved nothing for the output."""
RETENTION_S = 3
SLOW_TOKENS = 2000
"""Of a job that is read slowly. Its events are many times what all buffers hold between its log and the reader."""
BUFFER = 4096
MAX_BUFFERED = 96 << 10
"""Bytes that these buffers may hold: those of an API process and of its socket, for a reader with a small one."""


async def f32(stage: FaultTestbed) -> None:
    """More jobs than the store has room for with their results: admission must end before they are all in."""
    environ = {"PENSTOCK_SIM_STEP_MS": "5", "PENSTOCK_SIM_SLOTS": "64"}
    for _ in stage.tries():
        server = RedisServer(stage.folder, f"redis-{stage.trials}-{stage.missed}", f"maxmemory {MAXMEMORY}")
        await server.start()
        async with stage.cluster(server, workers=2, environ=environ) as cluster:
            before = await _used(server)
            stage.fault(f"{JOBS} jobs, and room for the results of some")
            told = [one for wave in WAVES for one in await _wave(stage, cluster, wave)]
            accepted, growth = sum(bool(one.job) for one in told), await _used(server) - before
            needed = growth * JOBS // max(1, accepted)
            stage.figures |= {
                "jobs accepted": accepted,
                "memory used at the end, % of maxmemory": round(100 * (before + growth) / MAXMEMORY),
                "results of all jobs would take, % of maxmemory": round(100 * needed / MAXMEMORY),
            }
            stage.bit(needed > MAXMEMORY, "the results of all jobs would fit")
            stage.must(accepted < JOBS, "nothing was refused")
            stage.must(before + growth > MAXMEMORY / 2, "the store was left half empty: admission refuses too early")
            peak = int((await server.command("INFO", "memory"))["used_memory_peak"])
            stage.figures["most memory used, % of maxmemory"] = round(100 * peak / MAXMEMORY)
            stage.must(peak < MAX_PEAK * MAXMEMORY, f"accepted jobs filled the store: {peak} bytes of {MAXMEMORY}")
            full = (await server.command("INFO", "errorstats")).get("errorstat_OOM")
            stage.must(full is None, f"the store was full before admission ended: {full}")
            await server.command("CONFIG", "SET", "maxmemory", 0)  # what is left over is looked at with room again
        await server.child.end()
    refused = of_kind(stage.history.events, "refused")
    others = {(event["status"], event["code"]) for event in refused} - {(503, "no_capacity")}
    stage.must(not others, f"refused as {others} instead of 503 no_capacity")
    poison = [event for event in of_kind(stage.history.events, "final") if event["code"] == "poison"]
    stage.must(not poison, f"{len(poison)} innocent jobs were given up as poison")


async def _wave(stage: FaultTestbed, cluster: PenstockCluster, jobs: int) -> list[ClientView]:
    """Put jobs as fast as it goes, and wait until those that were accepted have ended."""
    begun = cluster.begin(
        Ask(f"{stage.row.id} {stage.trials} {n}", TOKENS, False, reads=False, retries=False, tenant=TENANTS[n % 2])
        for n in range(jobs)
    )
    told = await asyncio.gather(*(task for _, task in begun))
    await asyncio.gather(*(cluster.clients.read_finally(one.job, patience_s=90.0) for one in told if one.job))
    return told


async def _used(server: RedisServer) -> int:
    return int((await server.command("INFO", "memory"))["used_memory"])


async def f35(stage: FaultTestbed) -> None:
    """Retention is three seconds: a job waits longer with its key, and another one is read more slowly."""
    environ = {
        "PENSTOCK_REDIS_RETENTION_S": str(RETENTION_S),
        "PENSTOCK_SIM_SLOTS": "3",
        "PENSTOCK_SIM_STEP_MS": "5",
        "PENSTOCK_WORKER_PREFETCH": "0",
    }
    async with stage.cluster(workers=1, environ=environ) as cluster:
        for trial in stage.tries():
            lengths = (1000, 1000, SLOW_TOKENS)
            hogs = cluster.begin(
                Ask(f"hog {trial} {n}", length, False, reads=False) for n, length in enumerate(lengths)
            )
            await cluster.all_accepted(hogs)
            slow = asyncio.create_task(_read_slowly(cluster, hogs[-1][0]))
            ends = [asyncio.create_task(cluster.clients.read_finally(told.job, patience_s=60.0)) for told, _ in hogs]
            ask = Ask(f"{stage.row.id} waits {trial}", 100, False, key=f"waits {trial}", tenant=TENANTS[trial % 2])
            first = cluster.begin([ask])
            await cluster.all_accepted(first)
            accepted_at = stage.history.now()
            stage.fault("retention passes while a job waits")
            await asyncio.sleep(RETENTION_S + 1)
            again = cluster.begin([ask])  # the same key: the same job, for as long as that waits
            waited = not any(life.of("token") for life in stage.lives(requests(first)))
            await cluster.finish([*first, *again])
            waited = waited and stage.history.now() - accepted_at > RETENTION_S
            await asyncio.gather(*ends)
            unread = await slow
            stage.figures["still to be read when retention was over, KiB"] = unread // 1024
            stage.bit(
                waited and unread > MAX_BUFFERED,
                f"{unread} bytes were unread when retention was over" if waited else "the job did not wait so long",
            )
            told = first[0][0]
            gone = await becomes(lambda t=told: _is_gone(cluster.ports[1], t.job, t.ask.tenant), 10, 0.2)  # type: ignore[misc]
            stage.must(gone, "a result outlived its retention by far")


async def _read_slowly(cluster: PenstockCluster, owner: ClientView) -> int:
    """Follow a job's events, a few a second until its record is gone from the store, then as they come. The checker
    judges what was read. Returns how many bytes came when the record was gone."""
    told = cluster.clients.tell(Ask(owner.ask.prompt, owner.ask.tokens, chat=False, tenant=owner.ask.tenant))
    told.job = owner.job
    cluster.history.add("accepted", req=told.req, job=told.job, status=200, ms=0)
    cluster.history.add("resume", req=told.req, after="")
    path, headers = f"/v1/jobs/{told.job}/events", authorization(told.ask.tenant)
    exchange = await Exchange.begin(cluster.ports[0], "GET", path, headers=headers, receive_buffer=BUFFER)
    gone = asyncio.create_task(becomes(lambda: _is_gone(cluster.ports[1], told.job, told.ask.tenant), 60.0, 0.2))
    unread = 0
    try:
        await exchange.answer()
        async for block in exchange.blocks():
            cluster.clients.take_event(told, block)
            if told.state:
                break
            if gone.done():
                unread += sum(map(len, (*block, *block.values())))
            else:
                await asyncio.sleep(0.06)
    except Cut as cut:
        cluster.history.add("cut", req=told.req, why=str(cut))
    finally:
        gone.cancel()
        exchange.close()
    if not told.state:
        cluster.history.add("gave_up", req=told.req, why="a slow reader was told no end")
    return unread


async def _is_gone(port: int, job: str, tenant: str) -> bool:
    async with answered(port, "GET", f"/v1/jobs/{job}", headers=authorization(tenant)) as exchange:
        return exchange.status in (404, 410)


ROWS = (
    FaultRow(
        *("F32", "results fill the store", f"{JOBS} jobs whose results need more than maxmemory", 2, f32, 300),
        proves="Admission leaves room for the output it owes: every accepted job ends, none is given up.",
        budget=Budget(refused=ANY, why="more is asked than the store can hold; the row judges what was accepted"),
        short=1,
    ),
    FaultRow(
        *("F35", "retention passes", f"{RETENTION_S} s, while a job waits and while it is read", 6, f35, 180),
        proves="A key lives as long as its job, however long that waits; a reader that has begun reads to the end.",
    ),
)
