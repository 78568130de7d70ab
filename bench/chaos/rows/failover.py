"""F05, F06, F23: the store's primary is lost and replaced, or the store goes back to an earlier moment."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from bench.chaos.asks import TENANTS, Ask
from bench.chaos.cluster import Begun, PenstockCluster
from bench.chaos.history import of_kind
from bench.chaos.processes import ManagedProcess, RedisServer, until
from bench.chaos.proxy import Proxy
from bench.chaos.replicated import ClusterNodes, Sentinels
from bench.chaos.rows.workers import asks, requests, victim
from bench.chaos.stage import FaultTestbed
from bench.report import bound

PARTITIONS = 6
LEASE_MS = 2000
MAX_OUTAGE_MS = bound("chaos.outage")
KEPT = {"PENSTOCK_REDIS_DURABILITY": "D3", "PENSTOCK_REDIS_TIMEOUT_S": "1"}


async def f06(stage: FaultTestbed) -> None:
    """The primary is killed, or stopped and continued, in turn; the Sentinels name another."""
    stage.lease_ms = LEASE_MS
    servers = Sentinels.here(stage.folder)
    await servers.start()
    try:
        async with stage.cluster(url=servers.url, lease_ms=LEASE_MS, environ=KEPT) as cluster:
            for trial in stage.tries():
                begun = cluster.begin(asks(stage.row.id, trial, tokens=200))
                await asyncio.sleep(stage.rng.uniform(0.1, 1.0))
                primary = await servers.primary()
                await _lose(stage, primary, trial)
                await cluster.finish(begun)
                await servers.settled()
                failed_over = await servers.primary() is not primary
                stage.bit(failed_over and stage.across(requests(begun)), "no failover, or nobody read across it")
                await cluster.ready()
    finally:
        await servers.close()
    stage.stalled_at_most(MAX_OUTAGE_MS)


async def _lose(stage: FaultTestbed, primary: RedisServer, trial: int) -> None:
    """Gone for long enough to be replaced; then it is back, as a replica or believing that it is still the primary."""
    if trial % 4 == 3:
        stage.fault(f"SIGSTOP {primary.child.name}")
        primary.child.send(signal.SIGSTOP)
        await asyncio.sleep(4)
        primary.child.send(signal.SIGCONT)
    else:
        stage.fault(f"kill -9 {primary.child.name}")
        await primary.down(3.0)


async def f23(stage: FaultTestbed) -> None:
    """In turn: a primary is killed, and the slot of a partition moves."""
    stage.lease_ms = LEASE_MS
    servers = ClusterNodes.here(stage.folder)
    await servers.start()
    environ = {**KEPT, "PENSTOCK_REDIS_PARTITIONS": str(PARTITIONS)}
    try:
        async with stage.cluster(url=servers.url, lease_ms=LEASE_MS, environ=environ) as cluster:
            for trial in stage.tries():
                await _lose_or_move(stage, cluster, servers, trial)
    finally:
        await servers.close()
    stage.stalled_at_most(MAX_OUTAGE_MS)


async def _lose_or_move(stage: FaultTestbed, cluster: PenstockCluster, servers: ClusterNodes, trial: int) -> None:
    begun = cluster.begin(asks(stage.row.id, trial, tokens=200))
    await asyncio.sleep(stage.rng.uniform(0.1, 1.0))
    partition = stage.rng.randrange(PARTITIONS)
    owner = await servers.owner(partition)
    if trial % 2:
        stage.fault(f"the slot of partition {partition} moves")
        await servers.move(partition)
    else:
        stage.fault(f"kill -9 {owner.child.name}")
        await owner.down(3.0)
    await cluster.finish(begun)
    await servers.settled()
    await cluster.ready()
    gone = await servers.owner(partition) is not owner
    stage.bit(gone and stage.across(requests(begun)), "the partition did not move, or nobody read across it")


TOKENS = 150
TWO_SLOTS = {"PENSTOCK_SIM_SLOTS": "2", "PENSTOCK_WORKER_PREFETCH": "0"}
"""With three workers: some jobs wait, and the store may forget that they were claimed."""


async def f05(stage: FaultTestbed) -> None:
    """The append-only folder is copied, and some time later the server is killed and begins again from the copy."""
    async with stage.cluster(environ=TWO_SLOTS) as cluster:
        server = cluster.server
        for trial in stage.tries():
            begun = await _begin(stage, cluster, trial)
            since = stage.history.now()
            copy = await server.copy_file()
            begun += await _go_on(stage, cluster, trial)
            doomed = await _doomed(stage, cluster, trial)
            stage.fault("back to an earlier moment")
            await server.kill()
            if doomed is not None:
                doomed.kill()
            server.put_back(copy)
            stage.history.add("rollback", since=since)
            await asyncio.sleep(stage.rng.choice([0.0, 1.5]))
            await server.back()
            await cluster.finish(begun)
            judge_loss(stage, requests(begun), since, worker_died=doomed is not None)
            await cluster.ready()
    count_resets(stage)


async def f05b(stage: FaultTestbed) -> None:
    """A proxy holds replication back, the primary is killed, and the replica that is behind takes its place."""
    servers = [RedisServer(stage.folder, f"server-{number}") for number in (1, 2)]
    await asyncio.gather(*(server.start() for server in servers))
    front, between = Proxy(servers[0].port), Proxy(servers[0].port)
    await asyncio.gather(front.start(), between.start())
    primary, replica = servers
    await _follow(replica, between)
    async with stage.cluster(url=front.url, environ=TWO_SLOTS) as cluster:
        for trial in stage.tries():
            begun = await _begin(stage, cluster, trial)
            since = stage.history.now() - 0.05  # what was being sent
            between.cut()
            begun += await _go_on(stage, cluster, trial)
            doomed = await _doomed(stage, cluster, trial)
            stage.fault("a replica that is behind is promoted")
            await primary.kill()
            if doomed is not None:
                doomed.kill()
            front.target = replica.port
            await replica.command("REPLICAOF", "NO", "ONE")
            stage.history.add("rollback", since=since)
            front.drop()
            await cluster.finish(begun)
            judge_loss(stage, requests(begun), since, worker_died=doomed is not None)
            await cluster.ready()
            between.heal()
            between.drop()
            between.target = replica.port
            primary, replica = replica, primary
            await replica.back()
            await _follow(replica, between)
            await cluster.ready()
    await asyncio.gather(front.stop(), between.stop(), *(server.child.end() for server in servers))
    count_resets(stage)


async def _follow(replica: RedisServer, way: Proxy) -> None:
    await replica.command("REPLICAOF", "127.0.0.1", way.port)

    async def is_in_step() -> bool:
        info = await replica.command("INFO", "replication")
        return bool(info["master_link_status"] == "up")

    await until(is_in_step, 30, 0.05)
    await asyncio.sleep(0.2)


async def _doomed(stage: FaultTestbed, cluster: PenstockCluster, trial: int) -> ManagedProcess | None:
    """Every third time a worker that holds jobs dies together with the store, so that others begin behind what the
    store knows."""
    return await victim(stage, cluster) if trial % 3 == 2 else None


async def _begin(stage: FaultTestbed, cluster: PenstockCluster, trial: int) -> list[Begun]:
    """More jobs than slots; the store is copied while some wait, or while those that began are under way."""
    begun = cluster.begin(asks(stage.row.id, trial, 9, TOKENS))
    await cluster.all_accepted(begun)
    await asyncio.sleep(stage.rng.uniform(0.0, 0.1) if trial % 2 else stage.rng.uniform(0.5, 1.2))
    return begun


async def _go_on(stage: FaultTestbed, cluster: PenstockCluster, trial: int) -> list[Begun]:
    """What the store will not know any more: more tokens, and more jobs, some of which end."""
    late = [Ask(f"{stage.row.id} late {trial} {n}", 10 + 90 * n, n % 2 == 0, tenant=TENANTS[n % 2]) for n in range(4)]
    begun = cluster.begin(late)
    await cluster.all_accepted(begun)
    await asyncio.sleep(stage.rng.uniform(0.2, 1.8))
    return begun


def judge_loss(stage: FaultTestbed, readers: Sequence[int], since: float, *, worker_died: bool) -> None:
    """The trial counts if readers who had not ended were shown what the store forgot, and if a worker that died with
    it had held a job."""
    open_then = set(readers)
    forgotten_at = of_kind(stage.history.events, "rollback")[-1]["t"]
    events = of_kind(stage.history.events, "token", "end")
    open_then -= {event["req"] for event in events if event["event"] == "end" and event["t"] < forgotten_at}
    seen = [e for e in events if e["event"] == "token" and since < e["t"] < forgotten_at and e["req"] in open_then]
    moved = not worker_died or stage.moved(readers)
    stage.bit(seen and moved, "the worker held no job" if seen else "no open reader had been shown what was forgotten")


def count_resets(stage: FaultTestbed) -> None:
    resets = len(of_kind(stage.history.events, "reset"))
    stage.figures["readers told to begin anew"] = resets
    # In the few trials of the short form every reader may happen to be told that the job is gone instead.
    stage.must(stage.short or resets > 0, "no reader was told stream.reset")
    told = [event for event in of_kind(stage.history.events, "end") if event["state"] == "forgotten"]
    stage.figures["told that the job is gone"] = len(told)
