"""`python -m bench.chaos.soak --minutes 30`: F29. Load, kills and cancels for a long time; what is left is counted.

The number of keys and the memory of the store and of every process must return to what they were: a job's keys live for
its retention, and what is left then depends on the number of workers and models, not on the number of jobs.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.chaos.asks import ANY, TENANTS, Ask, Budget
from bench.chaos.cluster import PenstockCluster
from bench.chaos.processes import RedisServer, becomes
from bench.chaos.report import as_document, small, table, what_failed
from bench.chaos.rows.operations import is_at_work
from bench.chaos.stage import FaultRow, FaultTestbed, play_row
from bench.processes import memory_mib
from bench.program import BenchProgram, Option, ProgramRun
from bench.report import RESULTS, bound, write

RETENTION_S = 10
LOG_KEPT_S = 60
"""How long the log of a dead worker is kept."""
SETTLE_S = LOG_KEPT_S + RETENTION_S
CLIENTS = 12
KILL_INTERVAL_S = 45.0
WORK_TIMEOUT_S = 10.0
"""How long a kill waits until its process has something to do."""
MORE_KEYS, MORE_ENTRIES = int(bound("chaos.soak_keys")), int(bound("chaos.soak_entries"))
"""Than after warming up. 2652 requests and 6 kills in 5 minutes left 3 keys more, the lanes for jobs of killed workers
(one per priority), and no entry more. One key that stayed for every hundredth job would be 26."""
APART = frozenset({"worker", "log", "actions", "procs"})
"""Counted apart: the keys of dead workers and the names of dead processes, which are kept for an hour, the record of
actions, which is kept at a thousand, and logs: there must be no more of them, but a live one has some entries more or
less."""
MORE_MIB = bound("chaos.soak_memory")
"""Than after warming up, of a process or the store. The most that one grew in 5 minutes was 3, an API process that was
never killed."""


def soak(minutes: float) -> FaultRow:
    """The row, as long as asked."""

    async def play(stage: FaultTestbed) -> None:
        await _soak(stage, 60 * minutes)

    return FaultRow(
        *("F29", "soak", f"{minutes:g} minutes of load, cancels and kills", 1, play, 60 * minutes + 400),
        proves="Keys and memory do not grow with the number of jobs.",
        budget=Budget(refused=ANY, unanswered=ANY, broken=ANY, why="processes are killed all the time"),
        short=1,
    )


async def _soak(stage: FaultTestbed, seconds: float) -> None:
    environ = {"PENSTOCK_REDIS_RETENTION_S": str(RETENTION_S), "PENSTOCK_SIM_STEP_MS": "40"}
    async with stage.cluster(workers=2, environ=environ) as cluster:
        server = cluster.server
        numbers = itertools.count()
        await _load(cluster, numbers, min(30.0, seconds / 4), stage, kills=False)
        await asyncio.sleep(SETTLE_S)
        held, memory = await _held(cluster), await _memory(cluster, server)
        stage.fault("the soak begins")
        await _load(cluster, numbers, seconds, stage, kills=True)
        await asyncio.sleep(SETTLE_S)
        judge_keys(stage, held, await _held(cluster))
        _judge_memory(stage, memory, await _memory(cluster, server))
    stage.figures["requests"] = next(numbers)


async def _load(
    cluster: PenstockCluster, numbers: itertools.count[int], seconds: float, stage: FaultTestbed, *, kills: bool
) -> None:
    """Clients of both tenants that ask one request after the other; every fifth is cancelled."""
    over = time.monotonic() + seconds

    async def client(number: int) -> None:
        while time.monotonic() < over:
            asked = next(numbers)
            may = ("completed", "cancelled") if asked % 5 == 0 else ("completed",)
            ask = Ask(f"soak {asked}", 40, asked % 3 != 0, may=may, tenant=TENANTS[number % 2], key=f"soak {asked}")
            begun = cluster.begin([ask])
            if asked % 5 == 0:
                await begun[0][0].begun.wait()
                if begun[0][0].job:
                    await cluster.clients.cancel(begun[0][0].job, cluster.ports[0])
            await cluster.finish(begun)
            cluster.forget_clients()

    async def killer() -> None:
        # The first of each role lives to the end, so that what it holds is that of all the work it has done.
        met = list[bool]()
        turns = itertools.cycle((*cluster.workers[1:], *cluster.apis[1:]))
        while kills and time.monotonic() + KILL_INTERVAL_S < over:
            await asyncio.sleep(min(KILL_INTERVAL_S, seconds / 4))
            child = next(turns)
            met.append(await becomes(partial(is_at_work, cluster, child), WORK_TIMEOUT_S, 0.02))
            stage.history.add("fault", trial=stage.trials, what=f"kill -9 {child.name}")
            child.kill()

        if kills:
            judge_kills(stage, met)

    await asyncio.gather(killer(), *(client(number) for number in range(CLIENTS)))
    await cluster.ready()


def judge_kills(stage: FaultTestbed, met: Sequence[bool]) -> None:
    """Each kill met a worker that held jobs, or an API process with readers."""
    stage.figures["kills"] = len(met)
    stage.must(all(met), f"{met.count(False)} of {len(met)} kills met a process that had nothing to do")


@dataclass(frozen=True)
class StoreUsage:
    """What the store holds, by kind of key: what stands behind the hash tag, without ids."""

    keys: Counter[str]
    entries: Counter[str]


async def _held(cluster: PenstockCluster) -> StoreUsage:
    redis: Any = cluster.wire.redis
    sizes = {b"set": redis.scard, b"zset": redis.zcard, b"stream": redis.xlen, b"hash": redis.hlen, b"list": redis.llen}
    found = StoreUsage(Counter(), Counter())
    async for key in redis.scan_iter(count=1000):
        name, size = key.decode(), sizes.get(await redis.type(key))
        kind = name.partition("}:")[2].partition(":")[0] or name
        found.keys[kind] += 1
        found.entries[kind] += await size(key) if size else 1
    return found


async def _memory(cluster: PenstockCluster, server: RedisServer) -> dict[str, float]:
    """MiB of the store and of every process."""
    used = int((await server.command("INFO", "memory"))["used_memory"]) / (1 << 20)
    return {"store": used, **{child.name: memory_mib(child.pid) for child in cluster.children}}


def judge_keys(stage: FaultTestbed, then: StoreUsage, now: StoreUsage) -> None:
    for what, before, after, more in (
        ("keys", then.keys, now.keys, MORE_KEYS),
        ("entries", then.entries, now.entries, MORE_ENTRIES),
    ):
        was, is_now = (sum(n for kind, n in each.items() if kind not in APART) for each in (before, after))
        grown = {kind: f"{before[kind]} -> {n}" for kind, n in after.items() if n > before[kind] and kind not in APART}
        stage.figures[what] = f"{was} before, {is_now} after, grown: {grown or 'none'}"
        stage.must(is_now <= was + more, f"{is_now} {what} are left, {was} before; grown: {grown}")
    were, are = then.keys["log"], now.keys["log"]
    stage.figures["logs of workers"] = f"{were} before, {are} after, of {now.entries['log']} entries"
    stage.must(are <= were, f"{are} logs of workers are left, {were} before: some outlived their worker's minute")
    stage.figures["keys of dead workers"] = now.keys["worker"]
    stage.figures["names of processes"] = f"{then.entries['procs']} before, {now.entries['procs']} after"


def _judge_memory(stage: FaultTestbed, then: dict[str, float], now: dict[str, float]) -> None:
    for name, mib in now.items():
        stage.figures[f"{name} MiB"] = f"{then[name]:.0f} -> {mib:.0f}"
        stage.must(mib <= then[name] + MORE_MIB, f"{name} holds {mib:.0f} MiB, {then[name]:.0f} before")


def _run(run: ProgramRun) -> int:
    folder = Path(tempfile.mkdtemp(prefix="penstock-soak-"))
    outcome = asyncio.run(play_row(soak(run.args.minutes), folder))
    run.console.print(table([outcome], outcome.seconds))
    write(run.args.out, small(as_document([outcome], outcome.seconds)))
    run.console.print(", ".join(f"{name}: {value}" for name, value in outcome.figures.items()))
    if outcome.passed:
        shutil.rmtree(folder)
        return 0
    run.console.print(what_failed(outcome), soft_wrap=True, markup=False)
    return 1


main = BenchProgram("python -m bench.chaos.soak", __doc__, _run).taking(
    Option("--minutes", type=float, default=30.0, help="default: 30"),
    Option("--out", type=Path, default=RESULTS / "soak.json", help="where the figures go"),
)

if __name__ == "__main__":
    main.exit()
