"""F07, F12: the network between two roles is cut by a proxy; the store's clock jumps.

libfaketime makes the server believe in the jump (Debian: apt-get install faketime).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from bench.chaos.asks import TENANTS, Ask
from bench.chaos.cluster import PenstockCluster
from bench.chaos.history import of_kind
from bench.chaos.processes import RedisServer, becomes, until
from bench.chaos.proxy import Proxy
from bench.chaos.rows.workers import asks, requests, victim
from bench.chaos.stage import FaultTestbed
from bench.report import bound

ROLES = ("api", "workers", "scheduler")
WAYS: tuple[dict[str, bool], ...] = ({}, {"to_server": False}, {"to_client": False})
"""Both directions, only to the client, only to the server."""
WORDS = ("black hole", "answers lost", "questions lost")
TOKENS = 300


@asynccontextmanager
async def _behind_proxies(stage: FaultTestbed) -> AsyncIterator[tuple[PenstockCluster, dict[str, Proxy]]]:
    server = RedisServer(stage.folder)
    await server.start()
    proxies = {role: Proxy(server.port) for role in ROLES}
    await asyncio.gather(*(proxy.start() for proxy in proxies.values()))
    environ = {"PENSTOCK_REDIS_TIMEOUT_S": "1"}
    urls = {role: proxy.url for role, proxy in proxies.items()}
    async with stage.cluster(server, environ=environ, urls=urls) as cluster:
        yield cluster, proxies
    await asyncio.gather(*(proxy.stop() for proxy in proxies.values()))
    await server.child.end()


async def f07(stage: FaultTestbed) -> None:
    """Each role is cut off in each way, for less than a lease and for longer."""
    async with _behind_proxies(stage) as (cluster, proxies):
        for trial in stage.tries():
            role, way = ROLES[trial % 3], trial // 3 % 3
            begun = cluster.begin(asks(stage.row.id, trial, tokens=TOKENS))
            await cluster.all_begun(begun)
            proxy = proxies[role]
            before = proxy.swallowed
            stage.fault(f"{role}: {WORDS[way]}")
            proxy.cut(**WAYS[way])
            meanwhile = [Ask(f"{stage.row.id} cut {trial} {n}", 20, n == 0, tenant=TENANTS[n]) for n in range(2)]
            begun += cluster.begin(meanwhile)
            await asyncio.sleep(stage.rng.choice([0.6, 2.5, 5.0]))
            proxy.heal()
            await cluster.finish(begun)
            judge_cut(stage, requests(begun), proxy.swallowed - before)
            await cluster.ready()


def judge_cut(stage: FaultTestbed, readers: Sequence[int], swallowed: int) -> None:
    """Whichever role was cut off: something it said or was told was lost, and somebody read meanwhile."""
    stage.bit(swallowed > 0 and stage.across(readers), "nothing was swallowed, or nobody read across it")


async def f07b(stage: FaultTestbed) -> None:
    """At D3 the replica is cut off: nothing may be accepted that only the primary knows."""
    primary, replica = (RedisServer(stage.folder, f"server-{number}") for number in (1, 2))
    await asyncio.gather(primary.start(), replica.start())
    between = Proxy(primary.port)
    await between.start()
    await replica.command("REPLICAOF", "127.0.0.1", between.port)

    async def is_in_step() -> bool:
        info = await primary.command("INFO", "replication")
        return int(info["connected_slaves"]) == 1 and info["slave0"]["state"] == "online"

    await until(is_in_step, 30, 0.05)
    environ = {"PENSTOCK_REDIS_DURABILITY": "D3", "PENSTOCK_REDIS_TIMEOUT_S": "1"}
    async with stage.cluster(primary, environ=environ) as cluster:
        for trial in stage.tries():
            begun = cluster.begin(asks(stage.row.id, trial, 4, 200))
            await cluster.all_begun(begun)
            stage.fault("the replica hears nothing")
            between.cut()
            await asyncio.sleep(0.1)
            began = stage.history.now()
            late = cluster.begin(
                [Ask(f"{stage.row.id} alone {trial} {n}", 10, n % 2 == 0, key=f"alone {trial} {n}") for n in range(4)]
            )

            async def is_refused(began: float = began) -> bool:
                return any(event["t"] > began for event in of_kind(stage.history.events, "refused"))

            await asyncio.sleep(stage.rng.choice([1.5, 3.0]))
            refused = await becomes(is_refused, 10, 0.05)
            accepted = [event for event in of_kind(stage.history.events, "accepted") if event["t"] > began]
            stage.must(not accepted, f"{len(accepted)} requests were accepted that no replica had")
            between.heal()
            stage.must(await becomes(is_in_step, 30, 0.05), "the replica did not come back")
            await cluster.finish([*begun, *late])
            stage.bit(refused, "nothing was refused while the replica was cut off")
            await cluster.ready()
    await between.stop()
    await asyncio.gather(primary.child.end(), replica.child.end())


JUMP_S = 600
DEADLINE_MS = 1500 * JUMP_S
"""Of every second job: one jump does not reach it. Deadlines go by the store's clock, so a longer jump would."""
MAX_RECOVERY_MS = bound("chaos.jump")


def find_library() -> str:
    """libfaketime, for LD_PRELOAD. Raises FileNotFoundError."""
    found = sorted(Path("/usr/lib").glob("**/libfaketime.so.1"))
    if not found:
        raise FileNotFoundError("libfaketime is not installed (on Debian and Ubuntu: apt-get install faketime)")
    return str(found[0])


async def f12(stage: FaultTestbed) -> None:
    """Ten minutes forward, ten minutes back, and back just after a worker was killed."""
    offset = stage.folder / "offset"
    offset.write_text("+0\n")
    clock = {
        "LD_PRELOAD": find_library(),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    here = 0
    async with stage.cluster(store_environ=clock) as cluster:
        server = cluster.server
        for trial in stage.tries():
            limits = {"deadline_ms": DEADLINE_MS, "max_queue_ms": DEADLINE_MS}
            plain = asks(stage.row.id, trial, tokens=250)
            begun = cluster.begin(replace(ask, queue=limits if n % 2 else {}) for n, ask in enumerate(plain))
            await cluster.all_begun(begun)
            here += JUMP_S if trial % 3 == 0 else -JUMP_S
            before = await _now(server)
            stage.fault("the clock jumps " + ("forward", "back", "back, and a worker dies")[trial % 3])
            if trial % 3 == 2:
                (await victim(stage, cluster)).kill()
            offset.write_text(f"{here:+d}\n")
            await until(lambda b=before: _jumped(server, b), 10)  # type: ignore[misc]
            await cluster.finish(begun)
            judge_jump(stage, requests(begun), worker_died=trial % 3 == 2)
            await cluster.ready()
    stage.stalled_at_most(stage.lease_ms + MAX_RECOVERY_MS)


def judge_jump(stage: FaultTestbed, readers: Sequence[int], *, worker_died: bool) -> None:
    """Somebody read across it, and a worker that died with it had held a job."""
    across = stage.across(readers)
    moved = not worker_died or stage.moved(readers)
    stage.bit(across and moved, "the worker held no job" if across else "nobody read across it")


async def _now(server: RedisServer) -> int:
    return int((await server.command("TIME"))[0])


async def _jumped(server: RedisServer, before: int) -> bool:
    return abs(await _now(server) - before) > JUMP_S / 2
