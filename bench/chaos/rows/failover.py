"""F06, F23: the store's primary is lost or stands still, and another one takes its place; slots move."""

from __future__ import annotations

import asyncio
import signal

from bench.chaos.budget import Budget
from bench.chaos.house import House
from bench.chaos.replicated import ClusterNodes, Sentinels
from bench.chaos.rows.workers import asks, requests
from bench.chaos.servers import RedisServer
from bench.chaos.stage import FaultRow, FaultTestbed
from bench.chaos.stalls import percentile, stalls_ms

PARTITIONS = 6
LEASE_MS = 2000
MAX_OUTAGE_MS = 10_000.0
KEPT = {"PENSTOCK_REDIS_DURABILITY": "D3", "PENSTOCK_REDIS_TIMEOUT_S": "1"}


async def f06(stage: FaultTestbed) -> None:
    """The primary is killed, or stopped and continued, in turn; the Sentinels name another."""
    stage.lease_ms = LEASE_MS
    servers = Sentinels(stage.folder)
    await servers.start()
    try:
        async with stage.house(url=servers.url, lease_ms=LEASE_MS, environ=KEPT) as house:
            for trial in stage.tries():
                begun = house.begin(asks(stage.row.id, trial, tokens=200))
                await asyncio.sleep(stage.rng.uniform(0.1, 1.0))
                primary = await servers.primary()
                await _lose(stage, primary, trial)
                await house.finish(begun)
                await servers.settled()
                failed_over = await servers.primary() is not primary
                stage.bit(failed_over and stage.across(requests(begun)), "no failover, or nobody read across it")
                await house.ready()
    finally:
        await servers.close()
    _outage(stage)


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
    servers = ClusterNodes(stage.folder)
    await servers.start()
    environ = {**KEPT, "PENSTOCK_REDIS_PARTITIONS": str(PARTITIONS)}
    try:
        async with stage.house(url=servers.url, lease_ms=LEASE_MS, environ=environ) as house:
            for trial in stage.tries():
                await _lose_or_move(stage, house, servers, trial)
    finally:
        await servers.close()
    _outage(stage)


async def _lose_or_move(stage: FaultTestbed, house: House, servers: ClusterNodes, trial: int) -> None:
    begun = house.begin(asks(stage.row.id, trial, tokens=200))
    await asyncio.sleep(stage.rng.uniform(0.1, 1.0))
    partition = stage.rng.randrange(PARTITIONS)
    owner = await servers.owner(partition)
    if trial % 2:
        stage.fault(f"the slot of partition {partition} moves")
        await servers.move(partition)
    else:
        stage.fault(f"kill -9 {owner.child.name}")
        await owner.down(3.0)
    await house.finish(begun)
    await servers.settled()
    await house.ready()
    gone = await servers.owner(partition) is not owner
    stage.bit(gone and stage.across(requests(begun)), "the partition did not move, or nobody read across it")


def _outage(stage: FaultTestbed) -> None:
    p99 = percentile(stalls_ms(stage.history.events), 0.99) or 0.0
    stage.must(p99 <= MAX_OUTAGE_MS, f"streams waited p99 {p99:.0f} ms, allowed: {MAX_OUTAGE_MS:.0f} ms")


FAILING_OVER = Budget(refused=120, unanswered=2, broken=60, why="nothing is accepted or read without a primary")

ROWS = (
    FaultRow(
        *("F06", "primary lost (Sentinel)", "kill -9, or SIGSTOP for 4 s, of the primary; D3", 20, f06, 420),
        proves="What was answered at D3 survives the loss of the primary.",
        budget=FAILING_OVER,
    ),
    FaultRow(
        *("F23", "node lost, slot moved (cluster)", "kill -9 of a primary; MIGRATE of a slot; D3", 20, f23, 420),
        proves="The same in a cluster, and while a partition moves.",
        budget=FAILING_OVER,
    ),
)
