"""F38-F41: the engine `upstream` in front of two servers that die, stall, lie, and lose their connections."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from bench.chaos.cluster import Begun, PenstockCluster
from bench.chaos.http import Cut, fetch
from bench.chaos.processes import ManagedProcess, until
from bench.chaos.proxy import Proxy
from bench.chaos.rows.workers import asks, requests
from bench.chaos.stage import FaultTestbed
from bench.chaos.upstream_server import STALL, UpstreamFault
from bench.ports import free_port

KINDS = ("vllm", "ollama")
"""One continues an answer by token ids, the other by the beginning of a message; both serve one model."""
BETWEEN_TOKENS_S, FIRST_TOKEN_S = 1.0, 2.0
LATE_S = 1.6 * BETWEEN_TOKENS_S
"""A server that is silent for so long has been given up, and speaks again while the answer goes on elsewhere."""
EARLY, LATE = 8, 6
"""Streams that are begun before a fault, and at it."""
LONG_OUTAGE_S = 60.0


class ServerUnderTest:
    """One upstream server, behind a proxy of its own."""

    def __init__(self, stage: FaultTestbed, number: int) -> None:
        self.kind = KINDS[number]
        self._port = free_port()
        argv = [sys.executable, "-m", "bench.chaos.upstream_server", str(self._port), self.kind]
        self.child = ManagedProcess(f"upstream-{self.kind}", argv, dict(os.environ), stage.folder)
        self.proxy = Proxy(self._port)

    async def start(self) -> None:
        await self.proxy.start()
        await self.child.start()
        await self.answers()

    async def answers(self) -> None:
        """Until it does. Raises TimeoutError."""
        await until(self._listens, 10.0)

    async def _listens(self) -> bool:
        with suppress(Cut):
            return (await fetch(self._port, "GET", "/v1/models"))[0] == 200
        return False

    async def stop(self) -> None:
        await self.child.end()
        await self.proxy.stop()

    async def set_fault(self, fault: UpstreamFault) -> int:
        """From now on. Returns how many replies have met faults so far. Raises Cut."""
        _, _, body = await fetch(self._port, "POST", "/fault", msgspec.json.encode(fault))
        return int(msgspec.json.decode(body)["met"])


Servers = Sequence[ServerUnderTest]
Injection = Callable[[Servers], Coroutine[Any, Any, None]]
"""Does what it should to these servers; new requests come while it does."""


@asynccontextmanager
async def in_front(stage: FaultTestbed) -> AsyncIterator[tuple[Servers, PenstockCluster]]:
    """Two servers, and a cluster whose workers send to both."""
    servers = [ServerUnderTest(stage, number) for number in range(len(KINDS))]
    environ = {
        "PENSTOCK_UPSTREAM_URLS": ",".join(f"http://127.0.0.1:{server.proxy.port}/v1" for server in servers),
        "PENSTOCK_UPSTREAM_BETWEEN_TOKENS_S": str(BETWEEN_TOKENS_S),
        "PENSTOCK_UPSTREAM_FIRST_TOKEN_S": str(FIRST_TOKEN_S),
    }
    try:
        await asyncio.gather(*(server.start() for server in servers))
        async with stage.cluster(workers=2, engine="upstream", environ=environ) as cluster:
            yield servers, cluster
    finally:
        await asyncio.gather(*(server.stop() for server in servers))


async def play(
    stage: FaultTestbed, servers: Servers, cluster: PenstockCluster, trial: int, what: str, inject: Injection
) -> list[Begun]:
    """One trial: streams run, some servers meet the fault, more streams are begun. All have ended when it returns."""
    begun = cluster.begin(asks(stage.row.id, trial, EARLY))
    await asyncio.sleep(stage.rng.uniform(0.2, 1.0))
    hit = servers if trial % 2 else [stage.rng.choice(servers)]
    stage.fault(f"{what}: {', '.join(server.kind for server in hit)}")
    injected = asyncio.create_task(inject(hit))
    begun += cluster.begin(asks(f"{stage.row.id} late", trial, LATE))
    await injected
    await cluster.finish(begun)
    for told, _ in begun:
        lost = await cluster.losses(told.job)
        stage.must(not lost, f"{what}: {told.job} has spent {lost} attempts")
    stage.must(not any(worker.exits for worker in cluster.workers), f"{what}: a worker has ended")
    return begun


async def play_faults(stage: FaultTestbed, faults: Sequence[UpstreamFault]) -> None:
    """Trials with these faults in turn, each at one server and then at both."""
    async with in_front(stage) as (servers, cluster):
        met = 0
        for trial in stage.tries():
            fault = faults[trial // 2 % len(faults)]

            async def inject(hit: Servers, fault: UpstreamFault = fault) -> None:
                await asyncio.gather(*(server.set_fault(fault) for server in hit))

            begun = await play(stage, servers, cluster, trial, fault.what, inject)
            before, met = met, sum([await server.set_fault(UpstreamFault()) for server in servers])
            stage.bit(met > before and stage.across(requests(begun)), "no reply met the fault")
        stage.figures["replies that met a fault"] = met


async def f38(stage: FaultTestbed) -> None:
    """kill -9 of one server or of both, which are back after a while; the last time after a minute."""
    async with in_front(stage) as (servers, cluster):
        for trial in stage.tries():
            last = not stage.short and stage.trials + 1 == stage.wanted
            away_s = LONG_OUTAGE_S if last else stage.rng.uniform(0.1, 3.0)

            async def inject(hit: Servers, away_s: float = away_s, *, last: bool = last) -> None:
                await asyncio.gather(*(_down(server, away_s) for server in (servers if last else hit)))

            begun = await play(stage, servers, cluster, trial, f"kill -9, back after {away_s:.1f} s", inject)
            stage.bit(stage.across(requests(begun)), "no stream was open")


async def _down(server: ServerUnderTest, seconds: float) -> None:
    lives = len(server.child.exits)
    server.child.patient.clear()
    server.child.kill()
    await server.child.exited(lives + 1)
    await asyncio.sleep(seconds)
    server.child.patient.set()
    await server.answers()


async def f39(stage: FaultTestbed) -> None:
    """Silences shorter and longer than the limits, and a trickle."""
    await play_faults(stage, SLOW)


async def f39b(stage: FaultTestbed) -> None:
    """The whole server stands still, with its connections open."""

    async def inject(hit: Servers) -> None:
        for server in hit:
            server.child.send(signal.SIGSTOP)
        await asyncio.sleep(stage.rng.choice((LATE_S, 3 * BETWEEN_TOKENS_S)))
        for server in hit:
            server.child.send(signal.SIGCONT)

    async with in_front(stage) as (servers, cluster):
        for trial in stage.tries():
            begun = await play(stage, servers, cluster, trial, "SIGSTOP", inject)
            stage.bit(stage.across(requests(begun)), "no stream was open")


async def f40(stage: FaultTestbed) -> None:
    """Replies that are not what they say."""
    await play_faults(stage, LIES)


async def f41(stage: FaultTestbed) -> None:
    """Connections that one side has closed, or that were reset."""
    await play_faults(stage, BROKEN)


async def f41b(stage: FaultTestbed) -> None:
    """A network that swallows what servers say, or closes every connection."""

    async def swallow(hit: Servers) -> None:
        for server in hit:
            server.proxy.cut(to_server=False)
        await asyncio.sleep(3 * BETWEEN_TOKENS_S)
        for server in hit:
            server.proxy.heal()

    async def drop(hit: Servers) -> None:
        for server in hit:
            server.proxy.drop()

    async with in_front(stage) as (servers, cluster):
        for trial in stage.tries():
            what, inject = (("answers swallowed", swallow), ("connections closed", drop))[trial // 2 % 2]
            begun = await play(stage, servers, cluster, trial, what, inject)
            stage.bit(stage.across(requests(begun)), "no stream was open")


SLOW = (
    UpstreamFault(what=STALL, replies=10, seconds=0.6 * BETWEEN_TOKENS_S),
    UpstreamFault(what=STALL, replies=6, seconds=LATE_S),
    UpstreamFault(what=STALL, replies=400, seconds=0.05),
    UpstreamFault(what="no head", replies=4, seconds=2 * FIRST_TOKEN_S),
)
LIES = (
    *(
        UpstreamFault(what=what, replies=8)
        for what in ("no finish reason", "error after 200", "malformed chunk", "[DONE] alone", "finish reason abort")
    ),
    UpstreamFault(what="nothing but [DONE]", replies=4),
    UpstreamFault(what="429", replies=12, seconds=1),
    UpstreamFault(what="429", replies=12),
    UpstreamFault(what="503", replies=6),
)
BROKEN = (
    *(UpstreamFault(what=what, replies=8) for what in ("cut", "half-closed", "reset")),
    UpstreamFault(what="reset at once", replies=4),
)
