"""F04, F14, F19, F25, F32, F35: the store dies, loses its subscribers, cannot write its file, or forgets; its memory is
limited, and a flood comes, or more results than it has room for."""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass
from itertools import count

from redis.exceptions import RedisError

from bench.chaos.asks import TENANTS, Ask, ClientView, authorization
from bench.chaos.cluster import PenstockCluster
from bench.chaos.history import of_kind
from bench.chaos.http import Cut, Exchange, answered
from bench.chaos.processes import RedisServer, becomes
from bench.chaos.rows.workers import STREAMS, asks, requests
from bench.chaos.stage import FaultTestbed
from bench.report import bound

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


ACCEPTED = 202
MIB = 1 << 20
WAVES, TOKENS = (400, *(50,) * 12), 1000
"""Jobs of each wave, which comes when the jobs of the one before have ended: so the store really fills with results.
Those of the first wave alone would fill it, and it could be accepted before the first of them is long."""
JOBS = sum(WAVES)
MAXMEMORY = 8 << 20
"""maxmemory, before the first process starts. What the results of all jobs would take is measured, and is more."""
MAX_PEAK = bound("chaos.store_peak")
"""Times maxmemory. The peak counts the buffers of hundreds of clients at once: it was 97 % of maxmemory, and 306 %
where admission reserved nothing for the output."""


async def f32(stage: FaultTestbed) -> None:
    """More jobs than the store has room for with their results: admission must end before they are all in."""
    environ = {"PENSTOCK_SIM_STEP_MS": "5", "PENSTOCK_SIM_SLOTS": "64"}
    environ |= {"PENSTOCK_QUOTAS_STORE_SHARE": "1.0"}  # the store's limit is meant here, not that of a tenant
    for _ in stage.tries():
        async with stage.cluster(store=[f"maxmemory {MAXMEMORY}"], workers=2, environ=environ) as cluster:
            server = cluster.server
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
    judge_full(stage)
    poison = [event for event in of_kind(stage.history.events, "final") if event["code"] == "poison"]
    stage.must(not poison, f"{len(poison)} innocent jobs were given up as poison")


def judge_full(stage: FaultTestbed) -> None:
    """A store that is full is what every refusal says."""
    refused = of_kind(stage.history.events, "refused")
    others = {(event["status"], event["code"]) for event in refused} - {(503, "no_capacity")}
    stage.must(not others, f"refused as {others} instead of 503 no_capacity")


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


FLOOD_RETENTION_S = 30
"""A slow machine must have filled the store before the first results of its flood are forgotten."""


async def f14(stage: FaultTestbed) -> None:
    """The store's memory is limited, and a flood of large jobs comes; then their results' time is over."""
    environ = {"PENSTOCK_REDIS_RETENTION_S": str(FLOOD_RETENTION_S), "PENSTOCK_SIM_STEP_MS": "20"}
    async with stage.cluster(workers=2, environ=environ) as cluster:
        server = cluster.server
        # Once: later trials find results of the flood before them, whose room will come free while they flood.
        idle = int((await server.command("INFO", "memory"))["used_memory"])
        for trial in range(stage.wanted):
            await server.command("CONFIG", "SET", "maxmemory", idle + 16 * MIB)
            streams = cluster.begin([Ask(f"{stage.row.id} {trial} {n}", 200) for n in range(6)])
            await cluster.all_begun(streams)
            stage.fault("flood")
            finishing = asyncio.create_task(cluster.finish(streams))
            judge_flood(stage, await _flood(cluster, trial))
            await finishing
            await _recovers(stage, cluster, server, trial)
            await server.command("CONFIG", "SET", "maxmemory", 0)
        stats = await server.command("INFO", "stats")
        errors = await server.command("INFO", "errorstats")
    stage.must(int(stats["evicted_keys"]) == 0, f"{stats['evicted_keys']} keys were evicted")
    stage.must("errorstat_OOM" not in errors, f"the store was full before admission stopped: {errors}")
    judge_full(stage)


@dataclass(frozen=True, slots=True)
class FloodResult:
    """What became of a flood of jobs."""

    refused: int
    """The status of the refusal that ended it; 0 if none did."""
    taken: int
    """Jobs accepted before it."""
    used: float
    """Memory used when it was refused, as a share of maxmemory."""


def judge_flood(stage: FaultTestbed, flood: FloodResult) -> None:
    """It was refused, and not before the store had taken some of it."""
    refused, share = flood.refused, round(100 * flood.used)
    stage.must(refused == 503, f"the flood was answered {refused} in the end, expected 503")
    stage.must(flood.taken > 0, "none of the flood was accepted")
    stage.must(flood.used > 0.5, f"the flood was refused with {share} % of maxmemory used: admission ends too early")
    for name, figure in (("accepted in a flood, least", flood.taken), ("memory used, % of maxmemory, least", share)):
        stage.figures[name] = min(float(stage.figures.get(name, figure)), figure)


async def _flood(cluster: PenstockCluster, trial: int) -> FloodResult:
    """Large jobs as fast as they are taken, until one is refused. What was taken must end, each job."""
    big, used = "flood " * 4000, 0.0
    numbers, taken = count(), list[asyncio.Task[str]]()

    async def one() -> int:
        nonlocal used
        while (number := next(numbers)) < 3000:
            ask = Ask(f"{trial} {number} {big}", 5, chat=False, reads=False, retries=False, tenant=TENANTS[number % 2])
            told = await cluster.clients.run(cluster.clients.tell(ask), cluster.ports[number % 2])
            if told.refused:
                memory = await cluster.server.command("INFO", "memory")
                used = max(used, int(memory["used_memory"]) / int(memory["maxmemory"]))
                return told.refused
            # At once, for results are soon forgotten in this row.
            if told.job:
                taken.append(asyncio.create_task(cluster.clients.read_finally(told.job, 60.0)))
        return 0

    refused = max(await asyncio.gather(*(one() for _ in range(8))))
    await asyncio.gather(*taken)
    return FloodResult(refused, len(taken), used)


async def _recovers(stage: FaultTestbed, cluster: PenstockCluster, server: RedisServer, trial: int) -> None:
    """Results are forgotten in time; from then on it takes five seconds at most until jobs are accepted again."""

    async def has_room() -> bool:
        memory = await server.command("INFO", "memory")
        return int(memory["used_memory"]) < 0.8 * int(memory["maxmemory"])

    async def takes_again() -> bool:
        ask = Ask(f"after the flood {trial}", 5, chat=False)
        return await cluster.clients.put_unread(ask, cluster.ports[0]) == ACCEPTED

    stage.must(await becomes(has_room, 40, 0.1), "no memory came free within 40 s")
    stage.must(await becomes(takes_again, 5, 0.1), "jobs were not accepted again within 5 s")
