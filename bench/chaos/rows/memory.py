"""F14, F32: the store's memory is limited, and a flood comes, or more results than it has room for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import count

from bench.chaos.asks import TENANTS, Ask, ClientView
from bench.chaos.cluster import PenstockCluster
from bench.chaos.history import of_kind
from bench.chaos.processes import RedisServer, becomes
from bench.chaos.stage import FaultTestbed
from bench.report import bound

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
