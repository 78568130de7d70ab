"""What is played between hosts: each row is a fault of whole hosts or of the network between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.chaos.asks import ANY, NOTHING, TENANTS, Ask, Budget
from bench.chaos.cluster import Begun
from bench.chaos.history import of_kind
from bench.chaos.http import SILENCE_S
from bench.chaos.processes import ManagedProcess, RedisServer, becomes, until
from bench.chaos.replicated import GUARD, NODE, ClusterNodes, Sentinels
from bench.chaos.rows.operations import find_library
from bench.chaos.rows.workers import asks, come, requests
from bench.chaos.stage import FaultRow, FaultTestbed
from bench.hosts.containers import REDIS, SENTINEL, Host, HostCluster, StoreHost, heal, part
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


def nodes(folder: Path, count: int) -> ClusterNodes:
    """So many hosts with one node each."""
    return ClusterNodes([StoreHost(folder, n, *NODE) for n in range(1, count + 1)], [10000 + REDIS] * count)


def spread(stage: FaultTestbed, trial: int) -> list[Ask]:
    """As many chats as one worker host holds, and more."""
    return [
        Ask(f"{stage.row.id} trial {trial} number {n}", STREAM_TOKENS, tenant=TENANTS[n % 2]) for n in range(STREAMS)
    ]


def late(stage: FaultTestbed, cluster: HostCluster, trial: int) -> list[Begun]:
    """Requests that come while the fault lasts."""
    return cluster.begin(asks(f"{stage.row.id} late", trial, 12))


async def moves(stage: FaultTestbed) -> None:
    """Readers go to the other API host after every few tokens, with the id of the last event."""
    async with hosts(stage) as cluster:
        for trial in stage.tries():
            begun = cluster.begin(
                Ask(f"{stage.row.id} {trial} {n}", 200, chat=False, reads=False, tenant=TENANTS[n % 2])
                for n in range(24)
            )
            await asyncio.gather(*(task for _, task in begun))
            readers = [cluster.clients.join(told, reads=False) for told, _ in begun]
            stage.fault("readers move between API hosts")

            async def follow(reader: Any, number: int) -> int:
                times = 0
                while not reader.state and times < 200:
                    await come(cluster, reader, number + times, 7)
                    times += 1
                return times

            moved = await asyncio.gather(*(follow(reader, n) for n, reader in enumerate(readers)))
            await asyncio.gather(*(cluster.clients.read_finally(told.job) for told, _ in begun))
            stage.figures["moves of a reader"] = min(moved)
            stage.bit(min(moved) > 2, "some readers did not move in the middle")
            ended = sum(reader.state == "completed" and reader.shown == 200 for reader in readers)
            stage.must(ended == len(readers), f"only {ended} of {len(readers)} readers had all tokens")


async def vanish(
    stage: FaultTestbed,
    cluster: HostCluster,
    begun: list[Begun],
    choose: Callable[[], Awaitable[Host]],
    trial: int,
    *,
    lost_job: bool = False,
) -> None:
    """A host vanishes in the middle, stays away for longer than a lease, and comes back."""
    await cluster.all_begun(begun)
    await asyncio.sleep(stage.rng.uniform(0.5, 1.5))
    host = await choose()
    stage.fault(f"{host.name} vanishes")
    await host.vanish()
    begun += late(stage, cluster, trial)
    await asyncio.sleep(AWAY_S)
    host.back()
    await cluster.finish(begun)
    across, moved = stage.across(requests(begun)), stage.moved(requests(begun))
    stage.figures["readers across it, least"] = min(across, stage.figures.get("readers across it, least", across))
    stage.bit(across and (moved or not lost_job), f"{across} readers across the fault, {moved} jobs moved")
    await cluster.ready()


async def worker(stage: FaultTestbed) -> None:
    """One of three worker hosts vanishes under 256 streams."""
    async with hosts(stage, environ=BUSY) as cluster:

        async def holder() -> Any:
            return (await cluster.holders())[0]

        for trial in stage.tries():
            await vanish(stage, cluster, cluster.begin(spread(stage, trial)), holder, trial, lost_job=True)
        stage.figures["jobs moved"] = stage.moved(range(1, 1 + stage.trials * STREAMS))


async def api(stage: FaultTestbed) -> None:
    """One of two API hosts vanishes under 256 streams; its readers give it up and go on at the other."""
    SILENCE_S.set(SILENCE)
    async with hosts(stage, environ=BUSY) as cluster:

        async def one() -> Any:
            return cluster.apis[stage.trials % 2]

        for trial in stage.tries():
            await vanish(stage, cluster, cluster.begin(spread(stage, trial)), one, trial)


async def scheduler(stage: FaultTestbed) -> None:
    """The host of the scheduler that leads vanishes; the other one leads, and readers notice nothing."""
    slowest = 0.0
    async with hosts(stage) as cluster:

        async def leader() -> ManagedProcess | None:
            holder = (await cluster.wire.ask(LEADER)).holder
            return next((each for each in cluster.schedulers if each.name in holder), None)

        for trial in stage.tries():
            await until(leader, 30, 0.05)
            lost: Any = await leader()
            begun = cluster.begin(asks(stage.row.id, trial, tokens=800))
            await cluster.all_begun(begun)
            stage.fault(f"{lost.name} vanishes")
            began = asyncio.get_running_loop().time()
            await lost.vanish()
            (other,) = (each for each in cluster.schedulers if each is not lost)

            async def led(other: ManagedProcess = other) -> bool:
                return await leader() is other

            stage.must(await becomes(led, 30, 0.05), "the other scheduler does not lead")
            slowest = max(slowest, asyncio.get_running_loop().time() - began)
            lost.back()
            await cluster.finish(begun)
            stage.bit(stage.across(requests(begun)), "nobody read across it")
    stage.figures["the other leads after s, worst"] = round(slowest, 1)
    stage.stalled_at_most(LEASE_MS)


async def partition(stage: FaultTestbed) -> None:
    """The networks part: all worker hosts, or one of them, cannot reach the store for three leases."""
    async with hosts(stage) as cluster:
        for trial in stage.tries():
            begun = cluster.begin(asks(stage.row.id, trial, 24, tokens=300))
            await cluster.all_begun(begun)
            cut = [] if trial % 2 == 0 else [(await cluster.holders())[0].address]  # type: ignore[attr-defined]
            stage.fault(f"{cut[0] if cut else 'every worker host'} cut off for {AWAY_S:g} s")
            await part(*cut)
            begun += late(stage, cluster, trial)
            await asyncio.sleep(AWAY_S)
            await heal()
            await cluster.finish(begun)
            stage.bit(stage.moved(requests(begun)), "no job lost its worker")
            await cluster.ready()
        stage.figures["exits of workers"] = sum(len(each.exits) for each in cluster.workers)


async def primary(stage: FaultTestbed) -> None:
    """D3: the host of the primary and of its Sentinel vanishes; the two others name a replica."""
    servers = sentinels(stage.folder)
    await servers.start()
    try:
        async with hosts(stage, servers.url, D3) as cluster:
            for trial in stage.tries():
                await _lose(stage, cluster, servers, await servers.primary(), trial)
    finally:
        await servers.close()


async def cluster_primary(stage: FaultTestbed) -> None:
    """D3: three primaries with a replica each, and the host of one primary vanishes."""
    await _cluster(stage, 6, D3)


async def cluster_part(stage: FaultTestbed) -> None:
    """D1: three primaries without replicas: while the host of one is away nothing is taken; then all is back."""
    await _cluster(stage, 3, {"PENSTOCK_REDIS_TIMEOUT_S": "1"})


async def _cluster(stage: FaultTestbed, count: int, environ: dict[str, str]) -> None:
    servers = nodes(stage.folder, count)
    await servers.start()
    try:
        async with hosts(stage, servers.url, environ | {"PENSTOCK_REDIS_PARTITIONS": str(PARTITIONS)}) as cluster:
            for trial in stage.tries():
                owner = await servers.owner(stage.rng.randrange(PARTITIONS))
                await _lose(stage, cluster, servers, owner, trial)
    finally:
        await servers.close()


async def _lose(
    stage: FaultTestbed, cluster: HostCluster, servers: Sentinels | ClusterNodes, lost: RedisServer, trial: int
) -> None:
    begun = cluster.begin(asks(stage.row.id, trial, 24, tokens=300))
    await cluster.all_begun(begun)
    stage.fault(f"{lost.child.name} vanishes")
    await lost.kill()
    begun += late(stage, cluster, trial)
    await asyncio.sleep(AWAY_S)
    await lost.back()
    await cluster.finish(begun)
    await servers.settled()
    stage.bit(stage.across(requests(begun)), "nobody read across it")
    await cluster.ready()


async def clocks(stage: FaultTestbed) -> None:
    """An API host and a worker host whose clocks are an hour wrong, in both directions; jobs have deadlines."""
    wrong = {"api-1": "+3600", "worker-sim-1": "-3600", "worker-sim-2": "+3600"}
    async with hosts(stage, clocks=(wrong, find_library())) as cluster:
        for trial in stage.tries():
            limits = {"deadline_ms": 600_000, "max_queue_ms": 600_000}
            begun = cluster.begin(
                Ask(f"{stage.row.id} {trial} {n}", 100, n % 2 == 0, queue=limits, tenant=TENANTS[n // 2 % 2])
                for n in range(48)
            )
            known = {each.host: each.since - time.time() for each in await Fleet(cluster.wire).processes()}
            stage.fault("clocks of hosts are an hour wrong")
            await cluster.finish(begun)
            held = {event["state"] for event in of_kind(stage.history.events, "final")}
            stage.must(held == {"completed"}, f"jobs ended as {held}")
            stage.bit(all(abs(known[host]) > 1800 for host in wrong), f"the clocks are right: {known}")


def _row(name: str, play: Any, title: str, inject: str, trials: int, limit_s: float, budget: Budget) -> FaultRow:
    return FaultRow(name, title, inject, trials, play, limit_s, proves=" ".join(play.__doc__.split()), budget=budget)


STORE = ("store_unavailable",)
AWAY = Budget(refused=60, unanswered=24, broken=120, codes=STORE, why="nothing is accepted or read without a primary")
ROWS: Sequence[FaultRow] = (
    _row("H01", moves, "reader moves", "between API hosts, every 7 tokens", 3, 180, NOTHING),
    _row("H02", worker, "worker host vanishes", "1 of 3, under 256 streams", 3, 300, NOTHING),
    _row("H03", api, "API host vanishes", "1 of 2, under 256 streams", 4, 400,
         Budget(broken=STREAMS, unanswered=ANY, why="half of the streams were read there")),
    _row("H04", partition, "networks part", "workers cut off for 3 leases", 6, 400, NOTHING),
    _row("H05", primary, "primary's host vanishes", "Sentinel, 2 replicas, D3", 4, 400, AWAY),
    _row("H06", cluster_primary, "primary's host vanishes", "cluster of 3 + 3, D3", 4, 400, AWAY),
    _row("H07", cluster_part, "node's host vanishes", "cluster of 3, no replica, D1", 3, 400, AWAY),
    _row("H08", scheduler, "scheduler's host vanishes", "the one that leads", 3, 300, NOTHING),
    _row("H09", clocks, "clocks differ", "3 hosts, an hour", 2, 200, NOTHING),
)  # fmt: skip
