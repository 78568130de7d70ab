"""`python -m bench.adapters`: how often one worker loads adapters, and how long requests wait, in two orders.

Requests of several tenants name adapters of one model, a few of them often and others rarely. The simulated engine
keeps some loaded, and a load takes as long as several answers. One order prefers loaded adapters as workers do; the
other is the plain order, which a worker has that takes every adapter for loaded. Both get the same requests at the same
times, other ones in each round, and take turns in going first. A row shows medians of the rounds.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from msgspec.structs import replace

from bench.penstock import start_redis
from bench.processes import Died, Processes
from bench.program import OUT, BenchProgram, Option, ProgramRun, Testbed, count
from bench.report import Ratio, columns
from bench.stats import spread
from penstock.engine import Piece, Sampling, Stats
from streaming.jobs.job import JOB_VERSION, Job, Text
from streaming.jobs.queue import Queue
from streaming.order import Priority
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings
from telemetry.metrics import Metrics
from telemetry.tracing import Tracing
from workers.engines.sim.engine import SimEngine
from workers.engines.sim.settings import SimSettings
from workers.record import Recorder
from workers.settings import WorkerSettings
from workers.worker import Worker

MODEL, TENANTS = "sim", 3
TOKENS, LOAD_MS, SLOTS, LOADED = 8, 40.0, 4, 2
ADAPTERS = [f"adapter-{number}" for number in range(8)]
LOADS = {"light": 0.25, "steady": 0.75, "beyond": 1.2}
"""Requests a second, as a share of what the engine computes when every load is of use to four requests."""


class BlindEngine(SimEngine):
    """Says of every adapter that it is loaded."""

    def stats(self) -> Stats:
        return replace(super().stats(), adapters=tuple(ADAPTERS))


ORDERS: dict[str, type[SimEngine]] = {"loaded first": SimEngine, "plain": BlindEngine}


@dataclass
class Waits:
    """When each job was put and got its first token (monotonic), by its id."""

    total: int
    put: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    all_begun: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, worker: list[Worker], pieces: list[Piece]) -> None:
        now = time.monotonic()
        for piece in pieces:
            self.first.setdefault(piece.id.partition("/")[0], now)
        worker[0].on_step(pieces)
        if len(self.first) == self.total:
            self.all_begun.set()


def requests(number: int, share: float, seed: int) -> list[tuple[float, Job]]:
    """Jobs with the seconds at which they come. The n-th adapter is asked for 1/n as often as the first."""
    draw = random.Random(seed)  # noqa: S311 - a load, no secret
    rate = share * SLOTS / ((TOKENS * 2.0 + LOAD_MS / 4) / 1000)
    at, found, sampling = 0.0, [], Sampling(max_tokens=TOKENS)
    for _ in range(number):
        at += draw.expovariate(rate)
        (adapter,) = draw.choices(ADAPTERS, [1 / rank for rank in range(1, len(ADAPTERS) + 1)])
        tenant = f"tenant-{draw.randrange(TENANTS)}"
        about: dict[str, Any] = {"model": MODEL, "adapter": adapter, "tenant": tenant, "v": JOB_VERSION}
        found.append((at, Job(id="", priority=Priority.STANDARD, prompt=Text(("a",)), sampling=sampling, **about)))
    return found


async def measured(url: str, order: str, jobs: list[tuple[float, Job]], recorder: Recorder) -> dict[str, Any]:
    """Serve the requests once; the figures of this order."""
    client = RedisClient.open(RedisSettings(url=url))
    settings = SimSettings(step_ms=2, prefill_ms=0, slots=SLOTS, max_adapters=LOADED, adapter_load_ms=LOAD_MS)
    engine, waits, worker = ORDERS[order](MODEL, settings, ADAPTERS), Waits(len(jobs)), list[Worker]()
    card, stop = await engine.start(partial(waits.note, worker), lambda _: None), asyncio.Event()
    worker.append(Worker(client, engine, card, WorkerSettings(), recorder))
    working, queue, asked = asyncio.create_task(worker[0].run(stop)), Queue(client), dict[str, Job]()
    began = time.monotonic()
    for at, job in jobs:
        await asyncio.sleep(began + at - time.monotonic())
        job_id = queue.new_id(job.tenant)
        waits.put[job_id], asked[job_id] = time.monotonic(), job
        await queue.put(replace(job, id=job_id))
    await waits.all_begun.wait()
    took_s = time.monotonic() - began
    stop.set()
    await working
    await engine.stop()
    await client.close()
    of = defaultdict[str, list[float]](list)
    for job_id, at in waits.put.items():
        for name in ("", asked[job_id].adapter, asked[job_id].tenant):
            of[name].append(1000 * (waits.first[job_id] - at))
    every, rarest = spread(of[""]), spread(of[ADAPTERS[-1]])
    return {
        "swaps": 1000 * engine.stats().swaps / len(jobs), "rate": len(jobs) / took_s,
        "p50": every.p50, "p99": every.p99, "rarest_p50": rarest.p50, "rarest_p99": rarest.p99,
        "tenant_p99": max(spread(waited).p99 for name, waited in of.items() if name.startswith("tenant")),
    }  # fmt: skip


def _run(run: ProgramRun) -> int:
    rows, ratios, recorder = [], list[Ratio](), Recorder(MODEL, Metrics.start("", "worker"), Tracing())
    with Testbed(run.console, "adapters", len(LOADS) * len(ORDERS) * run.args.rounds) as bed:
        for load, share in LOADS.items():
            found = defaultdict[str, list[dict[str, float]]](list)
            for number in range(run.args.rounds):
                jobs = requests(run.args.requests, share, number)
                for order in sorted(ORDERS, reverse=bool(number % 2)):
                    bed.say(f"{load}, {order}, round {number + 1}")
                    with Processes(bed.room(load, order, str(number))) as processes:
                        url = start_redis(processes)
                        found[order].append(asyncio.run(measured(url, order, jobs, recorder)))
                    bed.done()
            for order in ORDERS:
                figures = {key: median([each[key] for each in found[order]]) for key in found[order][0]}
                rows.append({"load": load, "order": order, **figures})
            ratios += _ratios(load, *found.values())
    title = "Adapters: loads and waits, with loaded ones first and without"
    about = {"requests": run.args.requests, "adapters": len(ADAPTERS), "loaded": LOADED, "load_ms": LOAD_MS}
    about |= {"rounds": run.args.rounds, "loads": LOADS}
    return run.keep(run.result("adapters", title, COLUMNS, rows, ratios, slots=SLOTS, tenants=TENANTS, **about))


def _ratios(load: str, mine: list[dict[str, float]], plain: list[dict[str, float]]) -> list[Ratio]:
    found = []
    for key, what in (("swaps", "loads"), ("rate", "requests a second"), ("tenant_p99", "wait of a tenant, p99")):
        each = [own[key] / other[key] for own, other in zip(mine, plain, strict=True)]
        found.append(Ratio(what=f"{load}: {what}, loaded first / plain", value=median(each), rounds=tuple(each)))
    return found


COLUMNS = columns("""
    load: load; order: order; swaps: loads per 1,000 .0; rate: requests a second .0; p50: wait for a token, ms: p50 .0;
    p99: p99 .0; rarest_p50: of the rarest: p50 .0; rarest_p99: p99 .0; tenant_p99: of the slowest tenant: p99 .0
""")

main = BenchProgram("penstock bench adapters", __doc__, _run, OSError, Died).taking(
    Option("--requests", type=count, default=600, help="for each load, order and round (default 600)"),
    Option("--rounds", type=count, default=3, help="with other requests each (default 3)"),
    OUT,
)

if __name__ == "__main__":
    main.exit()
