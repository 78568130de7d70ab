"""F05: the store goes back to an earlier moment, from an old copy of its file or by a replica that was behind."""

from __future__ import annotations

import asyncio

from bench.chaos.asks import Ask
from bench.chaos.budget import Budget
from bench.chaos.history import of_kind
from bench.chaos.house import Begun, House
from bench.chaos.proxy import Proxy
from bench.chaos.rows.workers import asks
from bench.chaos.servers import RedisServer
from bench.chaos.stage import FaultRow, FaultTestbed
from bench.chaos.tenants import TENANTS
from bench.chaos.waiting import until

TOKENS = 150
FEW_SLOTS = {"PENSTOCK_SIM_SLOTS": "2", "PENSTOCK_WORKER_PREFETCH": "0"}
"""With three workers: some jobs wait, and the store may forget that they were claimed."""


async def f05(stage: FaultTestbed) -> None:
    """The append-only folder is copied, and some time later the server is killed and begins again from the copy."""
    server = RedisServer(stage.folder)
    await server.start()
    async with stage.house(server, environ=FEW_SLOTS) as house:
        for trial in stage.tries():
            begun = await _begin(stage, house, trial)
            since = stage.history.now()
            copy = await server.copy_file()
            begun += await _go_on(stage, house, trial)
            stage.fault("back to an earlier moment")
            await server.kill()
            await _lose_worker(house, trial)
            server.put_back(copy)
            stage.history.add("rollback", since=since)
            await asyncio.sleep(stage.rng.choice([0.0, 1.5]))
            await server.back()
            await _finish(stage, house, begun, since)
    await server.child.end()
    count_resets(stage)


async def f05_replica(stage: FaultTestbed) -> None:
    """A proxy holds replication back, the primary is killed, and the replica that is behind takes its place."""
    servers = [RedisServer(stage.folder, f"server-{number}") for number in (1, 2)]
    await asyncio.gather(*(server.start() for server in servers))
    front, between = Proxy(servers[0].port), Proxy(servers[0].port)
    await asyncio.gather(front.start(), between.start())
    primary, replica = servers
    await _follow(replica, between)
    async with stage.house(url=front.url, environ=FEW_SLOTS) as house:
        for trial in stage.tries():
            begun = await _begin(stage, house, trial)
            since = stage.history.now() - 0.05  # what was being sent
            between.cut()
            begun += await _go_on(stage, house, trial)
            stage.fault("a replica that is behind is promoted")
            await primary.kill()
            await _lose_worker(house, trial)
            front.target = replica.port
            await replica.command("REPLICAOF", "NO", "ONE")
            stage.history.add("rollback", since=since)
            front.drop()
            await _finish(stage, house, begun, since)
            between.heal()
            between.drop()
            between.target = replica.port
            primary, replica = replica, primary
            await replica.back()
            await _follow(replica, between)
            await house.ready()
    await asyncio.gather(front.stop(), between.stop(), *(server.child.end() for server in servers))
    count_resets(stage)


async def _follow(replica: RedisServer, way: Proxy) -> None:
    await replica.command("REPLICAOF", "127.0.0.1", way.port)

    async def is_in_step() -> bool:
        info = await replica.command("INFO", "replication")
        return bool(info["master_link_status"] == "up")

    await until(is_in_step, 30, 0.05)
    await asyncio.sleep(0.2)


async def _lose_worker(house: House, trial: int) -> None:
    """Every third time a worker dies together with the store, so that others begin behind what the store knows."""
    if trial % 3 == 2:
        house.workers[trial % len(house.workers)].kill()


async def _begin(stage: FaultTestbed, house: House, trial: int) -> list[Begun]:
    """More jobs than slots; the store is copied while some wait, or while those that began are under way."""
    begun = house.begin(asks(stage.row.id, trial, 9, TOKENS))
    await asyncio.gather(*(told.accepted.wait() for told, _ in begun))
    await asyncio.sleep(stage.rng.uniform(0.0, 0.1) if trial % 2 else stage.rng.uniform(0.5, 1.2))
    return begun


async def _go_on(stage: FaultTestbed, house: House, trial: int) -> list[Begun]:
    """What the store will not know any more: more tokens, and more jobs, some of which end."""
    late = [Ask(f"{stage.row.id} late {trial} {n}", 10 + 90 * n, n % 2 == 0, tenant=TENANTS[n % 2]) for n in range(4)]
    begun = house.begin(late)
    await asyncio.gather(*(told.accepted.wait() for told, _ in begun))
    await asyncio.sleep(stage.rng.uniform(0.2, 1.8))
    return begun


async def _finish(stage: FaultTestbed, house: House, begun: list[Begun], since: float) -> None:
    """The trial counts if readers who had not ended were shown what the store forgot."""
    await house.finish(begun)
    open_then = {told.req for told, _ in begun}
    forgotten_at = of_kind(stage.history.events, "rollback")[-1]["t"]
    events = of_kind(stage.history.events, "token", "end")
    open_then -= {event["req"] for event in events if event["event"] == "end" and event["t"] < forgotten_at}
    seen = [e for e in events if e["event"] == "token" and since < e["t"] < forgotten_at and e["req"] in open_then]
    stage.bit(seen, "no open reader had been shown what was forgotten")
    await house.ready()


def count_resets(stage: FaultTestbed) -> None:
    resets = len(of_kind(stage.history.events, "reset"))
    stage.figures["readers told to begin anew"] = resets
    # In the few trials of the short form every reader may happen to be told that the job is gone instead.
    stage.must(stage.short or resets > 0, "no reader was told stream.reset")
    told = [event for event in of_kind(stage.history.events, "end") if event["state"] == "forgotten"]
    stage.figures["told that the job is gone"] = len(told)


def _away(why: str) -> Budget:
    # Three times the most that was seen: 1 refused and 4 broken off in a trial, on a machine that was far too busy.
    return Budget(refused=6, unanswered=2, broken=12, why=why)


ROWS = (
    FaultRow(
        *("F05", "store restored", "killed, and back from a copy of its file that is up to 1 s old", 20, f05, 400),
        resets_allowed=True,
        proves="Readers of a store that lost answered writes are told stream.reset, or that the job is gone.",
        budget=_away("nothing is accepted or read while the store is away"),
        short=3,
    ),
    FaultRow(
        *("F05b", "replica behind", "replication held back by a proxy, then failover; D1", 20, f05_replica, 400),
        resets_allowed=True,
        proves="The same where a replica that had not heard the last second takes over.",
        budget=_away("nothing is accepted or read while there is no primary"),
        short=3,
    ),
)
