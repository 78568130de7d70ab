"""F11, F13, F16, F22, F24: requests that kill engines, come twice, run out of time, are cancelled, or are none."""

from __future__ import annotations

import asyncio
import math
import signal
import time
from dataclasses import replace
from typing import Any, cast

import msgspec

from bench.chaos.asks import SECOND, TENANTS, Ask, ClientView
from bench.chaos.cluster import PenstockCluster
from bench.chaos.history import of_kind
from bench.chaos.http import Exchange, fetch
from bench.chaos.processes import becomes
from bench.chaos.readings import CANCEL
from bench.chaos.stage import FaultTestbed
from streaming.keys import prefix as partition_prefix

BATCH = 64
COPIES = 50
EXPIRED_IN_QUEUE = 408
POISON_MODELS = ("m1", "m2", "m3", "m4")


async def f11(stage: FaultTestbed) -> None:
    """Each model gets one request that kills its engine, among 63 that do not."""
    faults = {"PENSTOCK_SIM_FAULTS": "true", "PENSTOCK_SIM_STEP_MS": "5"}
    async with stage.cluster(models=POISON_MODELS, workers=2, environ=faults) as cluster:
        for turn in range(-(-stage.wanted // len(POISON_MODELS))):
            await asyncio.gather(*(_poison(stage, cluster, model, turn) for model in POISON_MODELS))
        crashes = sum(worker.exits.count(-signal.SIGKILL) for worker in cluster.workers)
        letters = await _dead_letters(cluster)
    stage.figures["engine crashes"] = crashes
    stage.must(crashes <= 3 * stage.trials, f"{crashes} crashes for {stage.trials} poison requests, allowed: 3 each")
    poisons = {event["job"] for event in of_kind(stage.history.events, "final") if event["code"] == "poison"}
    stage.must(len(poisons) == stage.trials, f"{len(poisons)} jobs failed as poison, expected {stage.trials}")
    stage.must(letters.count('"reason":"poison"') == stage.trials, "not exactly one dead letter for each poison")
    stage.must("crash@" not in letters, "a dead letter shows the prompt")


async def _poison(stage: FaultTestbed, cluster: PenstockCluster, model: str, turn: int) -> None:
    name = f"{model} turn {turn}"
    stage.fault(f"poison, {name}")
    poison = Ask(f"[[crash@{5 + turn}]] {name}", 30, chat=False, may=("failed",), model=model)
    mates = [Ask(f"{name} mate {n}", 30, chat=n < 8, reads=False, model=model) for n in range(BATCH - 1)]
    await cluster.finish(cluster.begin([poison, *mates]))


async def _dead_letters(cluster: PenstockCluster) -> str:
    _, _, body = await fetch(cluster.ports[0], "GET", "/admin/dlq?limit=100")
    return body.decode()


async def f13(stage: FaultTestbed) -> None:
    """The same key fifty times at once, once more after a lost answer, and with another body."""
    async with stage.cluster(workers=2) as cluster:
        for number in stage.tries():
            key, loses = f"key {number}", stage.trials % 4 > 1
            ask = Ask(f"once, {key}", 20, chat=stage.trials % 2 == 0, key=key)
            headers = {"Idempotency-Key": key}
            if loses:  # the first answer is lost: the client goes before it has read it
                lost = await Exchange.begin(cluster.ports[0], "POST", ask.path, ask.body, headers)
                await asyncio.sleep(stage.rng.uniform(0, 0.1))
                lost.close()
            again = time.time()
            stage.fault(f"{COPIES} times {key}")
            # The other tenant means another job by the same key.
            theirs = replace(ask, prompt=f"theirs, {key}", tenant=SECOND)
            begun = cluster.begin([*[ask] * COPIES, theirs])
            await cluster.finish(begun)
            other = Ask(f"something else, {key}", 20, chat=ask.chat)
            status, _, body = await fetch(cluster.ports[1], "POST", other.path, other.body, headers)
            stage.must(status == 422, f"another body with {key} was answered {status}: {body[:80]!r}")
            met = [told.job for told, _ in begun[:COPIES] if told.job]
            before = again if loses else math.inf
            stage.bit(
                len(met) > 1 and float((await cluster.view(met[0]))["created_at"]) < before,
                "the key was not known when it came again",
            )
        jobs = await _count_jobs(cluster)
    stage.figures["jobs"] = jobs
    keys = stage.trials + stage.missed
    stage.must(jobs == keys, f"{jobs} jobs for {keys} keys")


async def _count_jobs(cluster: PenstockCluster) -> int:
    count, cursor = 0, ""
    while True:
        _, _, body = await fetch(cluster.ports[0], "GET", f"/v1/jobs?limit=100{cursor}")
        page = msgspec.json.decode(body)
        count += len(page["data"])
        if not page["has_more"]:
            return count
        cursor = f"&cursor={page['next_cursor']}"


async def f16(stage: FaultTestbed) -> None:
    """Two slots, both taken: what may wait 300 ms expires unbegun; what runs is stopped at its deadline."""
    environ = {"PENSTOCK_SIM_SLOTS": "12", "PENSTOCK_WORKER_PREFETCH": "0"}
    async with stage.cluster(workers=1, environ=environ) as cluster:
        for turn in stage.tries():
            limits = {"deadline_ms": 1000}
            running = [Ask(f"stopped {turn} {n}", 900, queue=limits, may=("expired",)) for n in range(12)]
            begun = cluster.begin(running)
            await cluster.all_begun(begun)
            limits = {"max_queue_ms": 300}
            waiting = [Ask(f"unbegun {turn} {n}", 50, n % 2 == 0, queue=limits, may=("expired",)) for n in range(12)]
            for _ in range(24):
                stage.fault("a deadline")
            begun += cluster.begin(waiting)
            await cluster.finish(begun)
            for number, (told, _) in enumerate(begun):
                await _judge_expiry(stage, cluster, told.job, begun=number < 12)
                stage.bit(has_expired(told, begun=number < 12), "a job was not begun, or did not expire")


def has_expired(told: ClientView, *, begun: bool) -> bool:
    """Whether a request's time was over: after its reader was shown a token, or before, and so perhaps refused."""
    if begun:
        return told.shown > 0 and told.state == "expired"
    return told.state == "expired" or told.refused == EXPIRED_IN_QUEUE


async def _judge_expiry(stage: FaultTestbed, cluster: PenstockCluster, job: str, *, begun: bool) -> None:
    if not job:
        return  # refused or expired without an id: the client was told, and the checker has seen it
    view = await cluster.view(job)
    if begun:
        over = view["completed_at"] - view["created_at"] - 1.0
        stage.must(over <= 0.5, f"{job} ran {over:.2f} s past its deadline, allowed: 0.5 s")
    else:
        stage.must(view["started_at"] is None, f"{job} was begun although its time in the queue was over")


async def f22(stage: FaultTestbed) -> None:
    """Cancels at random moments of queued, running and just finished jobs, twice, at both API processes."""
    environ = {"PENSTOCK_SIM_SLOTS": "6", "PENSTOCK_WORKER_PREFETCH": "1"}
    may = ("completed", "cancelled")
    async with stage.cluster(workers=2, environ=environ) as cluster:
        for turn in range(-(-stage.wanted // 20)):
            asks = [
                Ask(f"cancel {turn} {n}", 40, n % 2 == 0, may=may, reads=n % 4 != 3, tenant=TENANTS[n // 10])
                for n in range(20)
            ]
            begun = cluster.begin(asks)
            await asyncio.gather(*(_cancel(stage, cluster, told) for told, _ in begun))
            await cluster.finish(begun)
        ends = [event["state"] for event in of_kind(stage.history.events, "final")]
    for state in may:
        stage.figures[state] = ends.count(state)
        stage.must(
            ends.count(state) >= stage.wanted // 10, f"only {ends.count(state)} jobs were {state}: no race was run"
        )


async def _cancel(stage: FaultTestbed, cluster: PenstockCluster, told: ClientView) -> None:
    after, at_end = stage.rng.uniform(0, 1.0), stage.rng.random() < 0.3
    await told.accepted.wait()
    if at_end:
        await becomes(lambda: told.shown >= told.ask.tokens - 1 or told.state, after + 1.0, 0.001)
    else:
        await asyncio.sleep(after)
    if told.job:
        await cluster.clients.try_as_other(told.job, cluster.ports[0], *CANCEL)
        stage.fault("cancel, twice")
        await asyncio.gather(*(cluster.clients.cancel(told.job, port) for port in cluster.ports))


async def f24(stage: FaultTestbed) -> None:
    """What is no job lies in the lanes, between jobs that are."""
    async with stage.cluster(workers=2) as cluster:
        prefix, redis = partition_prefix(0), cluster.wire.redis
        lane = f"{prefix}lane:sim:interactive"
        for trial in range(stage.wanted):
            begun = cluster.begin([Ask(f"beside {trial} {n}", 40, n % 2 == 0) for n in range(4)])
            stage.fault("alien entries")
            noise = stage.rng.randbytes(64)
            await redis.xadd(lane, {noise: noise})
            await redis.xadd(lane, {"job": "job_00" + "0" * 30, "more": "x"})
            await redis.xadd(lane, {"version": "0", "payload": "x" * (10_000_000 if trial == 0 else 1000)})
            await _old_schema(cluster, lane, prefix, trial)
            await cluster.finish(begun)
        expected = 4 * stage.wanted

        async def all_buried() -> bool:
            return int(await redis.xlen(f"{prefix}dead")) >= expected

        await becomes(all_buried, 10, 0.1)
        letters = await redis.xlen(f"{prefix}dead")
        exits = [list(worker.exits) for worker in cluster.workers]
    stage.figures["dead letters"] = letters
    stage.must(letters == expected, f"{letters} dead letters for {expected} entries that are no jobs")
    stage.must(not any(exits), f"workers ended: {exits}")


_PUT_OLD = """
local entry = redis.call('XADD', KEYS[1], '*', 'job', ARGV[1])
redis.call('HSET', KEYS[2], 'lane', KEYS[1], 'entry', entry, unpack(ARGV, 2))
"""


async def _old_schema(cluster: PenstockCluster, lane: str, prefix: str, trial: int) -> None:
    """A job whose body nobody can read any more: it must end, as failed."""
    await put_raw(cluster.wire.redis, lane, prefix, f"job_00{trial:030x}", b"\x93old")


async def put_raw(redis: Any, lane: str, prefix: str, job: str, body: bytes) -> None:
    """A job with any body, as if a process had put it."""
    fields: dict[str, str | bytes | int] = {
        "state": "queued",
        "body": body,
        "tenant": "first",
        "model": "sim",
        "priority": "interactive",
        "reply": "",
        "attempt": 0,
        "losses": 0,
        "created": 1,
        "keep": 60,
        "runs": "",
    }
    flat = [part for pair in fields.items() for part in pair]
    await cast(Any, redis.eval(_PUT_OLD, 2, lane, f"{prefix}job:{job}", job, *flat))
