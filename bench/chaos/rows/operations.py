"""F07, F12, F17, F18, F37: scaling down and rolling restarts as operators do them; a proxy cuts the network between two
roles; the store's clock jumps; batch work gives way to a storm of chats, and workers die while they put it back.

libfaketime makes the server believe in the jump (Debian: apt-get install faketime)."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import msgspec

from bench.chaos.asks import TENANTS, Ask, authorization
from bench.chaos.cluster import Begun, PenstockCluster
from bench.chaos.history import of_kind
from bench.chaos.http import Exchange, fetch
from bench.chaos.processes import ManagedProcess, RedisServer, becomes, until
from bench.chaos.proxy import Proxy
from bench.chaos.rows.workers import asks, requests, victim
from bench.chaos.stage import FaultTestbed
from bench.report import bound

MAX_EXIT_S = bound("chaos.exit")
CLAIM_TIMEOUT_S = 5.0
"""How long a worker under load may take to come to a job."""
MAX_GAP_MS = bound("chaos.restart")


async def f17(stage: FaultTestbed) -> None:
    """Two of three workers get SIGTERM with streams open; the grace time is enough for some of them only."""
    async with stage.cluster(environ={"PENSTOCK_WORKER_DRAIN_S": "0.6"}) as cluster:
        for trial in stage.tries():
            begun = cluster.begin(asks(stage.row.id, trial))
            await asyncio.sleep(stage.rng.uniform(0.1, 1.2))
            leaving = stage.rng.sample(cluster.workers, 2)
            holders = await cluster.holders()
            stage.fault(" and ".join(f"SIGTERM {worker.name}" for worker in leaving))
            await asyncio.gather(*(_stop(stage, worker, 5.0) for worker in leaving))
            await cluster.finish(begun)
            stage.bit(holds_some(leaving, holders), "no worker that was stopped held a job")
            await cluster.ready()
        jobs = [event["job"] for event in of_kind(stage.history.events, "final")]
        lost = [job for job in jobs if await cluster.losses(job)]
    moved = sum(event["attempts"] > 1 for event in of_kind(stage.history.events, "final"))
    stage.figures["jobs handed over"] = moved
    least = max(1, stage.wanted // 4)
    stage.must(moved >= least, f"only {moved} jobs were handed over in {stage.wanted} trials")
    stage.must(not lost, f"{len(lost)} handed-over jobs count as lost by a worker")


def holds_some(children: Sequence[ManagedProcess], holders: Sequence[ManagedProcess]) -> bool:
    """Whether one of these processes is among those that hold jobs."""
    return any(child in holders for child in children)


async def _stop(stage: FaultTestbed, child: ManagedProcess, within_s: float) -> None:
    """SIGTERM; it must end by itself, in time, with exit code 0."""
    lives = len(child.exits)
    child.send(signal.SIGTERM)
    try:
        async with asyncio.timeout(within_s):
            await child.exited(lives + 1)
    except TimeoutError:
        stage.must(False, f"{child.name} did not end within {within_s:g} s of SIGTERM")
        return
    stage.must(child.exits[lives] == 0, f"{child.name} ended with {child.exits[lives]}")


async def f18(stage: FaultTestbed) -> None:
    """Every process restarted, one by one, again and again, under load, with readers that have stalled, and with
    requests for whole answers that take longer than an API process has to drain."""
    environ = {"PENSTOCK_API_DRAIN_S": "3", "PENSTOCK_WORKER_DRAIN_S": "1"}
    async with stage.cluster(environ=environ) as cluster:
        running, numbers = asyncio.Event(), count()
        running.set()
        load = [asyncio.create_task(_load(cluster, running, numbers)) for _ in range(6)]
        whole: list[Begun] = []
        await asyncio.sleep(1.0)
        while stage.trials < stage.wanted and stage.missed <= stage.row.most_missed:
            for child in cluster.children:
                stalled = [await _stalled(port) for port in cluster.ports]
                if child in cluster.apis:
                    port = cluster.ports[cluster.apis.index(child)]
                    whole += cluster.begin([Ask(f"whole {len(whole)}", WHOLE_TOKENS, whole=True)], port=port)
                held = await becomes(partial(is_at_work, cluster, child), CLAIM_TIMEOUT_S, 0.02)
                readers = readers_of(cluster, child)
                stage.fault(f"SIGTERM {child.name}")
                await _stop(stage, child, MAX_EXIT_S)
                await cluster.ready()
                for exchange in stalled:
                    exchange.close()
                read = stage.across(readers)
                stage.bit(held and read, "nobody read across it" if held else f"{child.name} had nothing to do")
        running.clear()
        await asyncio.gather(*load)
        await cluster.finish(whole)
    lives = stage.lives(requests(whole))
    cut_off = sum(event["why"] == "draining" for life in lives for event in life.of("cut"))
    stage.figures["whole answers cut off by the end of a drain"] = cut_off
    stage.must(cut_off > 0, "no whole answer outlasted the drain of its process")
    refused = of_kind(stage.history.events, "refused", "unknown")
    stage.figures["requests"] = len(of_kind(stage.history.events, "ask"))
    stage.must(not refused, f"{len(refused)} requests were refused or not answered: {refused[:2]}")
    stage.stalled_at_most(MAX_GAP_MS)


WHOLE_TOKENS = 600
"""Twice as many as a process has time for while it drains."""


async def is_at_work(cluster: PenstockCluster, child: ManagedProcess) -> bool:
    """Whether the end of a process meets somebody: a worker's jobs, an API process's own readers, anybody's of the
    scheduler."""
    return bool(readers_of(cluster, child)) and (
        child not in cluster.workers or holds_some([child], await cluster.holders())
    )


def readers_of(cluster: PenstockCluster, child: ManagedProcess) -> list[int]:
    """The requests of readers who are in the middle of a stream that a process may break: of an API process its own,
    of any other all."""
    ports = dict(zip(cluster.apis, cluster.ports, strict=True))
    return [req for port in ([ports[child]] if child in ports else cluster.ports) for req in cluster.readers_at(port)]


async def _load(cluster: PenstockCluster, running: asyncio.Event, numbers: count[int]) -> None:
    while running.is_set():
        number = next(numbers)
        await cluster.finish(
            cluster.begin([Ask(f"rolling {number}", 80, number % 3 != 2)], port=cluster.ports[number % 2])
        )


async def _stalled(port: int) -> Exchange:
    """A client that asks and never reads; its job is not judged."""
    ask = Ask("stalled", 1200, queue={"on_disconnect": "cancel"})
    return await Exchange.begin(port, "POST", ask.path, ask.body, receive_buffer=4096)


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


SLOTS, WORKERS, STEP_MS = 4, 2, 20
LINES, LINE_TOKENS = (SLOTS - 1) * WORKERS, 400
"""Each worker reserves a slot, so all lines run at the same time."""
WAVES, CHATS, CHAT_TOKENS, PAUSE_S = 5, 10, 12, 0.25


async def f37(stage: FaultTestbed) -> None:
    """Batch jobs with readers fill every slot; waves of chats take their places. In every second trial a worker that
    holds jobs is killed amid the waves."""
    environ = {"PENSTOCK_SIM_SLOTS": str(SLOTS), "PENSTOCK_SIM_STEP_MS": str(STEP_MS)}
    async with stage.cluster(workers=WORKERS, environ=environ) as cluster:
        for trial in stage.tries():
            lines = cluster.begin(
                Ask(
                    *(f"{stage.row.id} {trial} line {number}", LINE_TOKENS),
                    chat=number % 2 == 0,
                    queue={"priority": "batch"},
                    tenant=TENANTS[number % 2],
                )
                for number in range(LINES)
            )
            await asyncio.gather(*(told.begun.wait() for told, _ in lines))
            kills = trial % 2 == 1
            stage.fault(f"{WAVES} waves of chats" + (" and kill -9 of a worker" if kills else ""))
            chats = await _storm(stage, cluster, trial, kills=kills)
            await cluster.finish([*lines, *chats])
            await _judge(stage, cluster, lines, kills=kills)
            await cluster.ready()


async def _storm(stage: FaultTestbed, cluster: PenstockCluster, trial: int, *, kills: bool) -> list[Begun]:
    chats: list[Begun] = []
    for wave in range(WAVES):
        chats += cluster.begin(
            Ask(f"{stage.row.id} {trial} chat {wave} {number}", CHAT_TOKENS, queue={"priority": "interactive"})
            for number in range(CHATS)
        )
        await asyncio.sleep(PAUSE_S)
        if kills and wave == WAVES // 2 and (holders := await cluster.holders()):
            holders[0].kill()
    return chats


async def _judge(stage: FaultTestbed, cluster: PenstockCluster, lines: list[Begun], *, kills: bool) -> None:
    """The storm must have preempted jobs, and a preemption is no loss."""
    preempted = 0
    for told, _ in lines:
        _, _, body = await fetch(
            cluster.ports[0], "GET", f"/v1/jobs/{told.job}", headers=authorization(told.ask.tenant)
        )
        log = msgspec.json.decode(body)["attempt_log"]
        preempted += sum(attempt["outcome"] == "preempted" for attempt in log)
        lost = await cluster.losses(told.job)
        stage.must(kills or not lost, f"{told.job}: a preemption counts as the loss of a worker")
    stage.bit(preempted > 0, "no batch job was preempted")
    stage.figures["preemptions"] = preempted + float(stage.figures.get("preemptions", 0))
