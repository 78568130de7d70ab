"""What is played between hosts: each row is a fault of whole hosts or of the network between them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.chaos.asks import NOTHING, TENANTS, Ask, Budget, ClientView
from bench.chaos.checker import trials_of
from bench.chaos.cluster import Begun
from bench.chaos.history import of_kind
from bench.chaos.http import SILENCE_S
from bench.chaos.processes import ManagedProcess, RedisServer, until
from bench.chaos.replicated import GUARD, NODE, ClusterNodes, Sentinels
from bench.chaos.rows.failover import MAX_OUTAGE_MS
from bench.chaos.rows.operations import find_library
from bench.chaos.rows.workers import FENCED_EXIT, asks, come, requests
from bench.chaos.stage import FaultRow, FaultTestbed
from bench.hosts.containers import REDIS, SENTINEL, HostCluster, StoreHost, heal, part
from streaming.fleet.plans import LEADER
from streaming.fleet.processes import Fleet

LEASE_MS = 2000
PARTITIONS = 6
D3 = {"PENSTOCK_REDIS_DURABILITY": "D3", "PENSTOCK_REDIS_TIMEOUT_S": "1"}
SILENCE = 5.0
"""After so long without a byte a client gives an API host up. One that lives cancels the chat of such a client."""
ONE_ADDRESS = {"PENSTOCK_API_MAX_CONNECTIONS_PER_CLIENT": "4096"}
"""A published port hides where clients come from: to a host, all of them are one."""
STREAMS, STREAM_TOKENS = 256, 300
AWAY_S = 3 * LEASE_MS / 1000
BUSY = {"PENSTOCK_SIM_STEP_MS": "80", "PENSTOCK_SIM_SLOTS": "160"}
"""Two workers that are left have room for all streams, and two cores for what these say."""


@asynccontextmanager
async def hosts(
    stage: FaultTestbed, url: str = "", environ: dict[str, str] | None = None, **options: Any
) -> AsyncIterator[HostCluster]:
    """Penstock on eight hosts, in front of a store that is there, or of one on a host of its own; judged at the end."""
    stage.clusters += 1
    stage.lease_ms = LEASE_MS
    store = None if url else StoreHost(stage.folder, 1)
    if store is not None:
        await store.start()
        url = store.url
    environ = ONE_ADDRESS | (environ or {})
    cluster = HostCluster(stage.folder, stage.history, url, lease_ms=LEASE_MS, environ=environ, **options)
    try:
        await cluster.start()
        yield cluster
        await cluster.quiet()
        for child in cluster.children:
            ends = Counter(child.exits)
            if child in cluster.workers:  # once in a fault it may lose its lease
                ends[FENCED_EXIT] -= stage.trials + stage.missed
            stage.must(not +ends, f"{child.name} ended by itself, code and times: {dict(+ends)}")
        if limit_ms := MAX_STALL_MS.get(stage.row.id):
            stage.stalled_at_most(limit_ms)
    finally:
        await cluster.close()
        if store is not None:
            await store.child.end()


def sentinels(folder: Path) -> Sentinels:
    """Three hosts: a primary with two replicas, and a Sentinel on each."""
    first = StoreHost(folder, 1, *GUARD)
    first.watch(first)
    servers = [first, *(StoreHost(folder, n, *GUARD, f"replicaof {first.host} {REDIS}", primary=first) for n in (2, 3))]
    return Sentinels(servers, [(server.host, SENTINEL) for server in servers])


def chats(stage: FaultTestbed, trial: int) -> list[Ask]:
    """More than two worker hosts hold without the third."""
    name = f"{stage.row.id} trial {trial} number"
    return [Ask(f"{name} {n}", STREAM_TOKENS, tenant=TENANTS[n % 2]) for n in range(STREAMS)]


async def begun(stage: FaultTestbed, cluster: HostCluster, wanted: Sequence[Ask]) -> list[Begun]:
    """Clients in the middle of reading."""
    found = cluster.begin(wanted)
    await cluster.all_begun(found)
    await asyncio.sleep(stage.rng.uniform(0.5, 1.5))
    return found


async def through(
    stage: FaultTestbed,
    cluster: HostCluster,
    readers: list[Begun],
    what: str,
    hurt: Callable[[], Awaitable[object]],
    mend: Callable[[], Awaitable[object]],
    *,
    moves: bool = False,
    bites: Callable[[float], Awaitable[object]] | None = None,
) -> None:
    """A fault that lasts longer than a lease, with requests meanwhile. `moves`: it must take jobs from a worker;
    `bites`: whether it did what it is for, asked at the end with the moment in which it was mended."""
    stage.fault(what)
    await hurt()
    late = cluster.begin(asks(f"{stage.row.id} late", stage.trials + 100 * stage.missed, 12))
    await asyncio.sleep(AWAY_S)
    mended = stage.history.now()
    await mend()
    await cluster.finish([*readers, *late])
    across, moved = stage.across(requests(readers)), stage.moved(requests(readers))
    for name, figure in (("readers across it, least", across), ("jobs moved, least", moved)):
        stage.figures[name] = min(figure, float(stage.figures.get(name, figure)))
    did = bites is None or await bites(mended)
    why_not = f"{across} readers across the fault, {moved} jobs moved" + (", and it changed nothing" if not did else "")
    stage.bit(across and (moved or not moves) and did, why_not)
    await cluster.ready()


async def move(stage: FaultTestbed) -> None:
    """Readers go to the other API host after every few tokens, with the id of the last event."""
    async with hosts(stage) as cluster:
        for trial in stage.tries():
            name = f"{stage.row.id} trial {trial} number"
            jobs = cluster.begin(Ask(f"{name} {n}", 200, False, reads=False, tenant=TENANTS[n % 2]) for n in range(24))
            await asyncio.gather(*(task for _, task in jobs))
            readers = [cluster.clients.join(told, reads=False) for told, _ in jobs]
            stage.fault("readers move between API hosts")

            async def follow(reader: ClientView, number: int) -> int:
                for moves in range(200):
                    if reader.state:
                        break
                    await come(cluster, reader, number + moves, 7)
                return moves

            moved = min(await asyncio.gather(*(follow(reader, n) for n, reader in enumerate(readers))))
            await asyncio.gather(*(cluster.clients.read_finally(told.job) for told, _ in jobs))
            stage.figures["moves of a reader, least"] = moved
            stage.bit(moved > 2, "some readers did not move in the middle")
            ended = sum(reader.state == "completed" and reader.shown == 200 for reader in readers)
            stage.must(ended == len(readers), f"only {ended} of {len(readers)} readers had all tokens")


async def worker(stage: FaultTestbed) -> None:
    """One of three worker hosts vanishes under 256 streams."""
    async with hosts(stage, environ=BUSY) as cluster:
        for trial in stage.tries():
            readers = await begun(stage, cluster, chats(stage, trial))
            lost: Any = (await cluster.holders())[0]
            await through(stage, cluster, readers, f"{lost.name} vanishes", lost.vanish, lost.back, moves=True)


async def api(stage: FaultTestbed) -> None:
    """One of two API hosts vanishes under 256 streams; its readers give it up and go on at the other."""
    SILENCE_S.set(SILENCE)

    async def breaks(_: float) -> bool:
        return bool(of_kind(trials_of(stage.history.events)[-1], "cut"))

    async with hosts(stage, environ=BUSY) as cluster:
        for trial in stage.tries():
            readers = await begun(stage, cluster, chats(stage, trial))
            lost: Any = cluster.apis[trial % 2]
            await through(stage, cluster, readers, f"{lost.name} vanishes", lost.vanish, lost.back, bites=breaks)


async def scheduler(stage: FaultTestbed) -> None:
    """The host of the scheduler that leads vanishes; the other one leads, and readers notice nothing."""
    slowest = 0.0
    async with hosts(stage) as cluster:

        async def leader() -> Any:
            holder = (await cluster.wire.ask(LEADER)).holder
            return next((each for each in cluster.schedulers if each.name in holder), None)

        async def leads(lost: ManagedProcess) -> bool:
            return await leader() not in (lost, None)

        for trial in stage.tries():
            await until(leader, 30, 0.05)
            lost = await leader()

            async def replaced(lost: Any = lost) -> None:
                nonlocal slowest
                began = time.monotonic()
                await lost.vanish()
                await until(partial(leads, lost), 30, 0.05)
                slowest = max(slowest, time.monotonic() - began)

            readers = await begun(stage, cluster, asks(stage.row.id, trial, tokens=800))
            await through(stage, cluster, readers, f"{lost.name} vanishes", replaced, lost.back)
    stage.figures["the other leads after s, worst"] = round(slowest, 1)


async def partition(stage: FaultTestbed) -> None:
    """The networks part: all worker hosts, or one of them, cannot reach the store for three leases."""
    async with hosts(stage) as cluster:
        for trial in stage.tries():
            readers = await begun(stage, cluster, asks(stage.row.id, trial, 24, tokens=400))
            one: Any = (await cluster.holders())[0]
            cut = [one.address] if trial % 2 else []
            what = f"{one.name if cut else 'every worker host'} cut off"
            await through(stage, cluster, readers, what, partial(part, *cut), heal, moves=True)


async def primary(stage: FaultTestbed) -> None:
    """D3: the host of the primary and of its Sentinel vanishes; the two others name a replica."""
    servers = sentinels(stage.folder)
    await _stores(stage, servers, D3, lambda _: servers.primary())


async def cluster_primary(stage: FaultTestbed) -> None:
    """D3: three primaries with a replica each, and the host of one primary vanishes."""
    await _cluster(stage, 6, D3)


async def cluster_part(stage: FaultTestbed) -> None:
    """D1: three primaries without replicas: while the host of one is away nothing is taken; then all is back."""
    await _cluster(stage, 3, {"PENSTOCK_REDIS_TIMEOUT_S": "1"})


async def _cluster(stage: FaultTestbed, count: int, environ: dict[str, str]) -> None:
    servers = ClusterNodes([StoreHost(stage.folder, n, *NODE) for n in range(1, count + 1)], [10000 + REDIS] * count)
    environ = environ | {"PENSTOCK_REDIS_PARTITIONS": str(PARTITIONS)}
    await _stores(stage, servers, environ, servers.owner, replicas=count > 3)


async def _stores(
    stage: FaultTestbed,
    servers: Sentinels | ClusterNodes,
    environ: dict[str, str],
    owner: Callable[[int], Awaitable[RedisServer]],
    *,
    replicas: bool = True,
) -> None:
    """The owner of a partition vanishes: a replica takes its place, or nothing is served while it is away."""
    await servers.start()
    try:
        async with hosts(stage, servers.url, environ) as cluster:
            for trial in stage.tries():
                readers = await begun(stage, cluster, asks(stage.row.id, trial, 24, tokens=400))
                partition = stage.rng.randrange(PARTITIONS)
                lost = await owner(partition)

                async def bites(mended: float, partition: int = partition, lost: RedisServer = lost) -> bool:
                    await servers.settled()
                    if replicas:
                        return await owner(partition) is not lost
                    served = of_kind(stage.history.events, "accepted", "token")
                    return not any(mended - AWAY_S / 2 < each["t"] < mended for each in served)

                what = f"{lost.child.name} vanishes"
                await through(stage, cluster, readers, what, lost.kill, lost.back, bites=bites)
    finally:
        await servers.close()


async def clocks(stage: FaultTestbed) -> None:
    """An API host and two worker hosts whose clocks are an hour wrong, in both directions; jobs have deadlines."""
    wrong = {"api-1": "+3600", "worker-sim-1": "-3600", "worker-sim-2": "+3600"}
    limits = {"deadline_ms": 600_000, "max_queue_ms": 600_000}
    async with hosts(stage, clocks=(wrong, find_library())) as cluster:
        for trial in stage.tries():
            off = {each.host: abs(each.since - time.time()) for each in await Fleet(cluster.wire).processes()}
            stage.fault("clocks of hosts are an hour wrong")
            await cluster.finish(cluster.begin(replace(ask, queue=limits) for ask in asks(stage.row.id, trial, 48)))
            stage.bit(all(off[host] > 1800 for host in wrong), f"clocks are off by {off} s")


def _row(name: str, play: Any, title: str, inject: str, trials: int, limit_s: float, budget: Budget) -> FaultRow:
    return FaultRow(name, title, inject, trials, play, limit_s, proves=" ".join(play.__doc__.split()), budget=budget)


STORE = ("store_unavailable",)
AWAY = Budget(refused=32, codes=STORE, why="nothing is accepted without a primary; requests are sent again")
AWAY_LONG = replace(AWAY, refused=50)
MAX_STALL_MS = {
    "H02": 6000,
    "H03": 10000,
    "H04": 15000,
    "H05": MAX_OUTAGE_MS,
    "H06": MAX_OUTAGE_MS,
    "H07": 16000,
    "H08": LEASE_MS,
}
"""Of the 99th percentile: about twice what was measured."""
ROWS: Sequence[FaultRow] = (
    _row("H01", move, "reader moves", "between API hosts, every 7 tokens", 3, 180, NOTHING),
    _row("H02", worker, "worker host vanishes", "1 of 3, under 256 streams", 3, 300, NOTHING),
    _row("H03", api, "API host vanishes", "1 of 2, under 256 streams", 4, 400,
         Budget(broken=160, unanswered=12, why="half of the streams were read there")),
    _row("H04", partition, "networks part", "workers cut off for 3 leases", 6, 400, NOTHING),
    _row("H05", primary, "primary's host vanishes", "Sentinel, 2 replicas, D3", 4, 400, AWAY),
    _row("H06", cluster_primary, "primary's host vanishes", "cluster of 3 + 3, D3", 4, 400, AWAY),
    _row("H07", cluster_part, "node's host vanishes", "cluster of 3, no replica, D1", 3, 400, AWAY_LONG),
    _row("H08", scheduler, "scheduler's host vanishes", "the one that leads", 3, 300, NOTHING),
    _row("H09", clocks, "clocks differ", "3 hosts, an hour", 2, 200, NOTHING),
)  # fmt: skip
