"""F04, F19, F25, F35: the store dies, loses its subscribers, cannot write its file, or forgets."""

from __future__ import annotations

import asyncio
import resource
from itertools import count

from redis.exceptions import RedisError

from bench.chaos.asks import TENANTS, Ask, ClientView, authorization
from bench.chaos.cluster import PenstockCluster
from bench.chaos.history import of_kind
from bench.chaos.http import Cut, Exchange, answered
from bench.chaos.processes import RedisServer, becomes
from bench.chaos.rows.workers import STREAMS, asks, requests
from bench.chaos.stage import FaultTestbed

RETENTION_S = 3
SLOW_TOKENS = 2000
"""Of a job that is read slowly. Its events are many times what all buffers hold between its log and the reader."""
BUFFER = 4096
MAX_BUFFERED = 96 << 10
"""Bytes that these buffers may hold: those of an API process and of its socket, for a reader with a small one."""


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
    told = cluster.clients.join(owner, chat=False)
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


WORKERS = 3
ENDLESS = resource.RLIM_INFINITY
MIN_STORM_KILLS = 20
"""Subscriptions that the quick kills must have met, in 4 s: two processes come back every 250 ms at the latest."""


async def f04(stage: FaultTestbed) -> None:
    """kill -9 of the server, up to 3 s down, back from its file. Streams fill every slot, so that other jobs wait."""
    late: list[float] = []
    environ = {"PENSTOCK_SIM_SLOTS": str(STREAMS // WORKERS), "PENSTOCK_WORKER_PREFETCH": "0"}
    async with stage.cluster(workers=WORKERS, environ=environ) as cluster:
        server = cluster.server
        for trial in stage.tries():
            begun = cluster.begin(asks(stage.row.id, trial, tokens=160))
            await cluster.all_begun(begun)
            queued = cluster.begin(Ask(f"{stage.row.id} waits {trial} {n}", 20, chat=False) for n in range(4))
            await asyncio.sleep(stage.rng.uniform(0.1, 1.2))
            stage.fault("kill -9")
            readers, waiting = requests(begun), stage.waiting(requests(queued))
            down = asyncio.create_task(server.down(3.0 if trial % 4 == 0 else stage.rng.uniform(0.2, 2.0)))
            queued += cluster.begin(asks(f"{stage.row.id} meanwhile", trial, 2, 20))
            await down
            before = [told.shown for told, _ in begun]
            began = asyncio.get_running_loop().time()
            grown = await becomes(lambda b=before, told=begun: _all_grew(told, b), 20)  # type: ignore[misc]
            late.append(asyncio.get_running_loop().time() - began)
            stage.must(grown, f"trial {trial}: some stream did not go on within 20 s")
            await cluster.finish([*begun, *queued])
            stage.bit(stage.across(readers) and waiting, "nobody read across it, or nobody waited")
            broken = [life.name for life in stage.lives(waiting) if life.of("cut")]
            stage.must(not broken, f"readers of waiting jobs were broken off: {broken}")
            await cluster.ready()
    stage.figures["all streams went on after s, worst"] = round(max(late), 2)
    stage.must(max(late) <= 5.0, f"streams went on {max(late):.1f} s after the server answered, allowed: 5 s")
    _refused_rightly(stage)


def _all_grew(begun: list[tuple[ClientView, asyncio.Task[ClientView]]], before: list[int]) -> bool:
    pairs = zip(begun, before, strict=True)
    return all(told.state or task.done() or told.shown > shown for (told, task), shown in pairs)


def _refused_rightly(stage: FaultTestbed) -> None:
    """Every refusal is a 503 that says when to come back, and there were some."""
    refusals = of_kind(stage.history.events, "refused")
    wrong = [event for event in refusals if event["status"] != 503 or not event["retry_after"]]
    stage.figures["refused with 503"] = len(refusals)
    stage.must(bool(refusals), "nothing was refused: the fault did not bite")
    stage.must(not wrong, f"refused otherwise than by 503 with Retry-After: {wrong[:2]}")


async def f19(stage: FaultTestbed) -> None:
    """Every subscription cut each second; then for a while as fast as they come back."""
    async with stage.cluster() as cluster:
        server = cluster.server
        running, numbers = asyncio.Event(), count()
        running.set()
        readers = [asyncio.create_task(_reading(cluster, running, numbers)) for _ in range(8)]
        for _ in stage.tries():
            await asyncio.sleep(1.0)
            stage.fault("CLIENT KILL TYPE pubsub")
            killed = await kill_subscriptions(server)
            stage.bit(killed >= len(cluster.apis), f"only {killed} subscriptions were cut")
        stage.history.add("fault", trial=stage.trials, what="CLIENT KILL TYPE pubsub, every 20 ms for 4 s")
        killed = 0
        for _ in range(200):
            killed += await kill_subscriptions(server)
            await asyncio.sleep(0.02)
        stage.figures["subscriptions cut by the quick kills"] = killed
        stage.must(killed >= MIN_STORM_KILLS, f"the quick kills cut only {killed} subscriptions")
        running.clear()
        await asyncio.gather(*readers)
    stage.stalled_at_most(500)  # a poll of 250 ms after a wait of 250 ms to subscribe


async def kill_subscriptions(server: RedisServer) -> int:
    """How many connections were cut."""
    return int(await server.command("CLIENT", "KILL", "TYPE", "pubsub"))


async def _reading(cluster: PenstockCluster, running: asyncio.Event, numbers: count[int]) -> None:
    while running.is_set():
        await cluster.finish(cluster.begin([Ask(f"reader {next(numbers)}", 130)]))


async def f25(stage: FaultTestbed) -> None:
    """The append-only file cannot grow: no room on the disk, as the server sees it."""
    async with stage.cluster() as cluster:
        server = cluster.server
        for trial in range(stage.wanted):
            begun = cluster.begin(asks(stage.row.id, trial, 4, 150))
            await cluster.all_begun(begun)
            stage.fault("no room for the file")
            resource.prlimit(server.child.pid, resource.RLIMIT_FSIZE, (4096, ENDLESS))
            stage.must(await becomes(lambda: _misconf(server), 10), "the server did not notice: the fault did not bite")
            began = cluster.history.events[-1]["t"]
            begun += cluster.begin(
                [Ask(f"full {trial} {n}", 10, n % 2 == 0, key=f"full {trial} {n}") for n in range(6)]
            )
            await asyncio.sleep(stage.rng.uniform(0.5, 2.0))
            accepted = [event for event in of_kind(cluster.history.events, "accepted") if event["t"] > began]
            stage.must(not accepted, f"{len(accepted)} requests were accepted while nothing could be kept")
            resource.prlimit(server.child.pid, resource.RLIMIT_FSIZE, (ENDLESS, ENDLESS))
            await cluster.finish(begun)
            await cluster.ready()
        stage.must(not server.child.exits, "the server ended")
    _refused_rightly(stage)


async def _misconf(server: RedisServer) -> bool:
    try:
        await server.command("SET", "probe", "1")
    except RedisError as error:
        return "MISCONF" in str(error)
    return False
