"""F01-F03, F27, F30, F31: workers that die, stop, hang or block, idle or full, and readers that come back at once."""

from __future__ import annotations

import asyncio
import math
import re
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from bench.chaos.asks import TENANTS, Ask, ClientView, authorization
from bench.chaos.cluster import Begun, PenstockCluster
from bench.chaos.history import of_kind
from bench.chaos.http import Cut, Exchange, fetch
from bench.chaos.processes import ManagedProcess, becomes
from bench.chaos.stage import PASSES, FaultTestbed, bare_answer, bare_server, yardstick
from bench.processes import rss_bytes
from bench.report import bound

SLOTS, READ = 256, 24
READERS, JOBS = 2000, 40
MAX_RESUME_S = bound("chaos.crowd_resumed")
MAX_HEALTH_MS = bound("chaos.health")
"""Beside a bare server. What asks usually gives up after a second."""
MIB = 1 << 20
MAX_GROWTH = bound("chaos.crowd_memory") * MIB
"""Of an API process, for a thousand readers."""


async def f30(stage: FaultTestbed) -> None:
    """Every slot of a worker is taken by a long output; it is killed when another one is there."""
    tokens, step_ms = (300, 40) if stage.short else (1000, 40)
    environ = {"PENSTOCK_SIM_SLOTS": str(SLOTS), "PENSTOCK_SIM_STEP_MS": str(step_ms)}
    async with stage.cluster(workers=1, environ=environ) as cluster, yardstick(stage) as bare_ms:
        for trial in stage.tries():
            begun = cluster.begin(
                Ask(f"{stage.row.id} {trial} {n}", tokens, chat=n < READ // 2, reads=n < READ, tenant=TENANTS[n % 2])
                for n in range(SLOTS)
            )
            await asyncio.gather(*(told.begun.wait() for told, _ in begun[:READ]))
            await cluster.all_accepted(begun)
            await asyncio.sleep(tokens * step_ms / 3000)
            doomed = cluster.workers[0] if trial == 0 else (await cluster.holders())[0]
            if trial == 0:
                await cluster.add_worker()
            bare_ms.clear()
            async with asking(cluster.ports[0]) as waits:
                stage.fault(f"kill -9 {doomed.name}")
                doomed.kill()
                await asyncio.gather(*(task for _, task in begun))
            await cluster.finish(begun)
            moved = stage.moved(requests(begun))
            stage.bit(moved >= SLOTS // 2, f"only {moved} jobs lost their worker")
            stage.figures["jobs moved"] = max(moved, float(stage.figures.get("jobs moved", 0)))
            judge_health(stage, waits, bare_ms)
            await cluster.ready()
    stage.stalled_at_most(stage.lease_ms + MAX_RECOVERY_MS)


def judge_health(stage: FaultTestbed, waits: Sequence[float], bare_ms: Sequence[float]) -> None:
    """The API process said that it was well in time, beside a bare server that was asked meanwhile."""
    worst, bare = max(waits, default=math.inf), max(bare_ms, default=0.0)
    name = "health answered in ms, worst"
    if worst >= float(stage.figures.get(name, 0.0)):
        stage.figures |= {name: round(worst, 1), "bare server, worst ms": round(bare, 1)}
    allowed = MAX_HEALTH_MS + PASSES * bare
    stage.must(worst <= allowed, f"an API process said after {worst:.0f} ms that it is well, allowed: {allowed:.0f} ms")


@asynccontextmanager
async def asking(port: int) -> AsyncIterator[list[float]]:
    """How long an API process takes to say that it is well, in milliseconds, asked all the time; infinity for an
    answer that did not come."""
    waits: list[float] = []
    began: list[float] = []

    async def ask() -> None:
        while True:
            began.append(time.monotonic())
            try:
                status, _, _ = await fetch(port, "GET", "/healthz")
            except Cut:
                status = 0
            waits.append(1000 * (time.monotonic() - began.pop()) if status == 200 else math.inf)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(ask())
    try:
        yield waits
    finally:
        if not task.done() and began:
            waits.append(1000 * (time.monotonic() - began[-1]))  # the question that is open
        task.cancel()
        await asyncio.wait([task])


async def f31(stage: FaultTestbed) -> None:
    """Readers of running jobs are all cut off at once and come back at once with their cursors."""
    readers, jobs = (READERS // 10, 10) if stage.short else (READERS, JOBS)
    async with (
        stage.cluster(workers=1, environ={"PENSTOCK_SIM_STEP_MS": "100"}) as cluster,
        bare_server(stage) as bare_port,
    ):
        for trial in stage.tries():
            asks = [
                Ask(f"{stage.row.id} {trial} {n}", 400, chat=False, reads=False, tenant=TENANTS[n % 2])
                for n in range(jobs)
            ]
            begun = cluster.begin(asks)
            await asyncio.gather(*(task for _, task in begun))
            owners = [told for told, _ in begun]
            crowd = [cluster.clients.join(owners[n % jobs], reads=False) for n in range(readers)]
            before = max(rss_bytes(api.pid) for api in cluster.apis)
            first = await asyncio.gather(*(come(cluster, told, n, 3) for n, told in enumerate(crowd)))
            stage.fault(f"{readers} readers are cut off")
            back = await asyncio.gather(*(come(cluster, told, n + 1, 3) for n, told in enumerate(crowd)))
            grown = max(rss_bytes(api.pid) for api in cluster.apis) - before
            bare = max(await asyncio.gather(*(bare_answer(bare_port) for _ in crowd)))
            stage.bit(all(each is not None for each in first), "some readers had seen nothing yet")
            slowest = max((each for each in back if each is not None), default=0.0)
            missing = sum(each is None for each in back)
            stage.figures |= {
                "readers": readers,
                "all back after s": round(slowest, 2),
                "as many at a bare server, s": round(bare, 2),
                "memory of an API process, MiB more": round(grown / MIB),
            }
            stage.must(not missing, f"{missing} readers got nothing when they came back")
            allowed = MAX_RESUME_S + PASSES * bare
            stage.must(slowest <= allowed, f"the last reader went on after {slowest:.1f} s, allowed: {allowed:.1f} s")
            stage.must(grown <= MAX_GROWTH, f"an API process grew by {grown / MIB:.0f} MiB")
            ends = [cluster.clients.read_finally(told.job, patience_s=90.0) for told, _ in begun]
            await asyncio.gather(*ends)
            await cluster.ready()


async def come(cluster: PenstockCluster, told: ClientView, number: int, events: int) -> float | None:
    """Read some deltas behind the cursor, then go; seconds to the first one, or None if there was none."""
    began, first, port = time.monotonic(), None, cluster.ports[number % len(cluster.ports)]
    headers = authorization(told.ask.tenant) | ({"Last-Event-ID": told.cursor} if told.cursor else {})
    cluster.history.add("resume", req=told.req, after=told.cursor)
    try:
        exchange = await Exchange.begin(port, "GET", f"/v1/jobs/{told.job}/events", headers=headers)
    except Cut as cut:
        cluster.history.add("cut", req=told.req, why=str(cut))
        return None
    try:
        await exchange.answer()
        async for block in exchange.blocks():
            before = told.shown
            cluster.clients.take_event(told, block)
            if told.shown > before and first is None:
                first = time.monotonic() - began
            events -= told.shown > before
            if not events or told.state:
                break
    except Cut as cut:
        cluster.history.add("cut", req=told.req, why=str(cut))
    finally:
        exchange.close()
    cluster.history.add("left", req=told.req)
    return first


STREAMS = 6
TOKENS = 130
WATCHDOG_S = bound("chaos.watchdog")
MAX_RECOVERY_MS = bound("chaos.recovery")
"""A lost worker's streams go on a lease, a sweep and a prefill later."""
HELD_TIMEOUT_S = 3.0
"""For a job to be claimed."""
FENCED_EXIT = 75
"""The exit code of a worker that lost its lease."""


def asks(row: str, trial: int, count: int = STREAMS, tokens: int = TOKENS) -> list[Ask]:
    """Chats and jobs of both tenants in turn, each with a prompt of its own."""
    return [
        Ask(f"{row} trial {trial} number {number}", tokens, chat=number % 3 != 2, tenant=TENANTS[number % 2])
        for number in range(count)
    ]


async def victim(stage: FaultTestbed, cluster: PenstockCluster) -> ManagedProcess:
    """Some worker that holds jobs; any, where all have ended before it was looked for: then the fault does not bite."""
    found: list[ManagedProcess] = []

    async def some_hold() -> bool:
        found[:] = await cluster.holders()
        return bool(found)

    await becomes(some_hold, HELD_TIMEOUT_S)
    return stage.rng.choice(found or cluster.workers)


def requests(begun: Sequence[Begun]) -> list[int]:
    """The numbers of these clients' requests."""
    return [told.req for told, _ in begun]


async def _kill(stage: FaultTestbed, cluster: PenstockCluster, latest_s: float) -> None:
    for _ in stage.tries():
        begun = cluster.begin(asks(stage.row.id, stage.trials + 100 * stage.missed))
        await asyncio.sleep(stage.rng.uniform(0.02, latest_s))
        doomed = await victim(stage, cluster)
        stage.fault(f"kill -9 {doomed.name}")
        doomed.kill()
        await cluster.finish(begun)
        stage.bit(stage.moved(requests(begun)), "the worker held no job")
        await cluster.ready()


def _stalls_end(stage: FaultTestbed, after_ms: float = 0.0) -> None:
    """Readers waited for the loss to be seen, then for a lease and little more."""
    stage.stalled_at_most(after_ms + stage.lease_ms + MAX_RECOVERY_MS)


def moved(stage: FaultTestbed) -> int:
    """Jobs that went on with another worker."""
    return sum(event["attempts"] > 1 for event in of_kind(stage.history.events, "final"))


async def f01(stage: FaultTestbed) -> None:
    """kill -9 of a worker at any moment of its streams' lives."""
    async with stage.cluster() as cluster:
        await _kill(stage, cluster, 1.2)
    stage.figures["jobs moved"] = moved(stage)
    _stalls_end(stage)
    stage.must(moved(stage) >= stage.wanted, f"only {moved(stage)} jobs lost their worker in {stage.wanted} kills")


async def f01d(stage: FaultTestbed) -> None:
    """The same with the lease people have by default."""
    stage.lease_ms = 5000
    async with stage.cluster(lease_ms=5000) as cluster:
        await _kill(stage, cluster, 1.2)
    _stalls_end(stage)
    stage.figures["jobs moved"] = moved(stage)


async def f02(stage: FaultTestbed) -> None:
    """SIGSTOP for four leases, then CONT: the zombie must end by itself, within a second, and have written nothing."""
    slowest = 0.0
    async with stage.cluster() as cluster:
        for trial in stage.tries():
            begun = cluster.begin(asks(stage.row.id, trial, tokens=160))
            await asyncio.sleep(stage.rng.uniform(0.05, 1.2))
            zombie = await victim(stage, cluster)
            lives, others = len(zombie.exits), [w for w in cluster.workers if w is not zombie]
            stage.fault(f"SIGSTOP {zombie.name}")
            zombie.send(signal.SIGSTOP)
            await asyncio.sleep(4 * cluster.lease_ms / 1000)
            stage.must(all(w.alive for w in others), "a worker that was not stopped has ended")
            zombie.send(signal.SIGCONT)
            began = asyncio.get_running_loop().time()
            ended = await becomes(lambda z=zombie, n=lives: len(z.exits) > n, 10, 0.01)  # type: ignore[misc]
            slowest = max(slowest, asyncio.get_running_loop().time() - began)
            stage.must(ended and zombie.exits[-1] == FENCED_EXIT, f"zombie {zombie.name} did not end as fenced")
            await cluster.finish(begun)
            stage.bit(stage.moved(requests(begun)), "the zombie had held no job")
            await cluster.ready()
    stage.figures["zombie ended after s"] = round(slowest, 2)
    stage.must(slowest <= 1.0, f"a zombie lived {slowest:.2f} s after CONT, allowed: 1 s")


async def f03(stage: FaultTestbed) -> None:
    """In each model a request hangs the engine that takes it, until it is given up; its mates are judged."""
    models = ("m1", "m2", "m3", "m4")
    async with stage.cluster(apis=1, workers=2, models=models, environ={"PENSTOCK_SIM_FAULTS": "true"}) as cluster:
        watching = asyncio.create_task(_note_exits(stage, cluster))
        turn = 0
        while stage.trials < stage.wanted:
            turn += 1
            names = [(model, f"{model} turn {turn}") for model in models]
            mates = [Ask(f"{name} mate {n}", TOKENS, n % 2 == 0, model=m) for m, name in names for n in range(4)]
            hangs = [Ask(f"[[hang@20]] {name}", 60, chat=False, may=("failed",), model=m) for m, name in names]
            await cluster.finish(cluster.begin([*mates, *hangs]))
            await cluster.ready()
        watching.cancel()
        logs = "".join(worker.log.read_text() for worker in cluster.workers)
        ends = {code for worker in cluster.workers for code in worker.exits}
    silences = [int(seconds) for seconds in re.findall(r"no step for (\d+) s", logs)]
    stage.figures["watchdog after s, worst"] = max(silences, default=0)
    stage.must(bool(silences) and max(silences) <= WATCHDOG_S, f"engines were given up after {silences} s")
    stage.must(ends == {FENCED_EXIT}, f"workers ended with {sorted(ends)}, expected {FENCED_EXIT}")
    # One that hangs every engine is found after two losses, alone: mates claimed behind it wait for all three.
    _stalls_end(stage, 3 * (1000 * WATCHDOG_S + stage.lease_ms))


async def _note_exits(stage: FaultTestbed, cluster: PenstockCluster) -> None:
    """Each engine that is given up is a fault; it is noted when its process has ended."""
    seen = 0
    while True:
        ended = sum(len(worker.exits) for worker in cluster.workers)
        for _ in range(ended - seen):
            stage.fault("engine hung until its process ended")
        seen = ended
        await asyncio.sleep(0.02)


async def f27(stage: FaultTestbed) -> None:
    """The whole process stands still for two leases and a half: an API process and a worker in turn."""
    async with stage.cluster() as cluster:
        for trial in stage.tries():
            begun = cluster.begin(asks(stage.row.id, trial, tokens=160))
            await asyncio.sleep(stage.rng.uniform(0.05, 1.2))
            blocked = cluster.apis[trial // 2 % 2] if trial % 2 else await victim(stage, cluster)
            lives = len(blocked.exits)
            stage.fault(f"{blocked.name} stands still")
            blocked.send(signal.SIGSTOP)
            await asyncio.sleep(2.5 * cluster.lease_ms / 1000)
            blocked.send(signal.SIGCONT)
            await cluster.finish(begun)
            readers = requests(begun)
            stage.bit(stage.across(readers) if trial % 2 else stage.moved(readers), "nobody's work was held up")
            await cluster.ready()
            fenced = blocked.exits[lives:] == [FENCED_EXIT]
            stage.must(fenced != bool(trial % 2), f"{blocked.name} ended with {blocked.exits[lives:]}")
        for what, children in (("fenced", cluster.workers), ("held up", cluster.apis)):
            logs = "".join(child.log.read_text() for child in children)
            stage.must(what in logs, f"no log says {what!r}")
