"""F33, F34: random bytes in everything that is read, and what a newer version of Penstock writes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from redis.exceptions import RedisError

from bench.chaos.asks import Ask
from bench.chaos.budget import Budget, Other
from bench.chaos.http import fetch
from bench.chaos.rows.requests import put_raw
from bench.chaos.rows.workers import asks, requests
from bench.chaos.stage import Row, Stage
from bench.chaos.waiting import until
from streaming.keys import ROOT, fleet_key, partition_key, prefix

TOKENS = 200


async def f33(stage: Stage) -> None:
    """Random bytes into the logs, one job's record, plans, overrides, the fleet and every channel."""
    async with stage.house() as house:
        redis: Any = house.wire.redis
        exits = [len(child.exits) for child in house.children]
        for trial in stage.tries():
            begun = house.begin(asks(stage.row.id, trial, tokens=TOKENS))
            touched = house.begin(
                [Ask(f"touched {trial}", 600, False, may=("completed", "failed"), reads=trial % 2 == 0)]
            )
            await asyncio.gather(*(told.begun.wait() for told, _ in begun))
            await asyncio.gather(*(told.accepted.wait() for told, _ in touched))
            stage.fault("random bytes")
            written = 0
            for _ in range(5):
                written += await _into_logs(stage, redis)
                await _into_fleet(stage, redis)
                await _into_channels(stage, redis)
                await asyncio.sleep(0.1)
            await _into_record(stage, redis, touched[0][0].job, trial)
            # What comes now is read from the log.
            await redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            await house.finish([*begun, *touched])
            stage.bit(written and stage.across(requests(begun)), "no frame was written, or nobody read across it")
            await _clean(redis)
            await house.ready()
        ended = [c.name for c, was in zip(house.children, exits, strict=True) if len(c.exits) > was]
    stage.must(not ended, f"processes ended: {ended}")


async def _into_logs(stage: Stage, redis: Any) -> int:
    """Entries between a worker's last frame and its next one; how many."""
    written = 0
    async for key in redis.scan_iter(match=f"{prefix(0)}log:*"):
        newest = await redis.xrevrange(key, count=1)
        number = int(newest[0][0].split(b"-")[0]) if newest else 0
        field = stage.rng.choice([b"-", b"noise"])
        try:
            await redis.xadd(key, {field: _noise(stage)}, id=f"{number}-7")
            written += 1
        except RedisError:
            pass  # the worker was quicker
    return written


async def _into_fleet(stage: Stage, redis: Any) -> None:
    await redis.hset(fleet_key("plan"), "sim", _noise(stage))
    await redis.hset(fleet_key("plan"), _noise(stage), _noise(stage))
    await redis.hset(fleet_key("cold"), "sim", _noise(stage))
    await redis.hset(fleet_key("card"), "noise", _noise(stage))
    await redis.set(fleet_key("override", "sim"), _noise(stage), ex=5)
    await redis.set(fleet_key("proc", "worker:noise"), _noise(stage), ex=5)
    await redis.zadd(fleet_key("procs"), {"worker:noise": 1 << 40, _noise(stage): 1 << 40})


async def _into_channels(stage: Stage, redis: Any) -> None:
    for name in await redis.execute_command("PUBSUB", "CHANNELS", f"{ROOT}*"):
        for data in (_noise(stage), b"", b"\x93\xa1f", msgspec.msgpack.encode(["f", 1, 2, 3])):
            await redis.publish(name, data)


async def _into_record(stage: Stage, redis: Any, job: str, trial: int) -> None:
    """Of one job, the only one that may fail of it."""
    field = ("runs", "body", "created", "deadline")[trial % 4]
    await redis.hset(partition_key(0, "job", job), field, _noise(stage))


async def _clean(redis: Any) -> None:
    """What an operator would remove; the processes' own words come back by themselves."""
    await redis.delete(fleet_key("plan"), fleet_key("cold"), fleet_key("override", "sim"), fleet_key("procs"))
    await redis.hdel(fleet_key("card"), "noise")


def _noise(stage: Stage) -> bytes:
    return stage.rng.randbytes(stage.rng.choice([1, 40, 4000]))


async def f34(stage: Stage) -> None:
    """A process of a newer version writes jobs, messages and entries of a version that is not known here."""
    async with stage.house() as house:
        redis: Any = house.wire.redis
        exits = [len(child.exits) for child in house.children]
        for trial in stage.tries():
            begun = house.begin(asks(stage.row.id, trial, tokens=TOKENS))
            await asyncio.gather(*(told.begun.wait() for told, _ in begun))
            stage.fault("a newer version speaks")
            job = f"job_00{trial:030x}"
            await _newer_job(redis, job)
            for _ in range(5):
                await _newer_messages(redis)
                await asyncio.sleep(0.1)
            late = house.begin(asks(f"{stage.row.id} behind it", trial, 4, 20))
            await house.finish([*begun, *late])
            stage.bit(stage.across(requests(begun)), "nobody read across it")
            state = (await redis.hget(partition_key(0, "job", job), "state") or b"gone").decode()
            stage.must(state == "queued", f"a job of a newer version was not set aside: it is {state}")
            status, _, body = await fetch(house.ports[0], "GET", f"/v1/jobs/{job}")
            stage.must(status < 500 or status == 503, f"a read of a newer job is answered {status}: {body[:100]!r}")
            await _remove(redis, job)
            await house.ready()
        ended = [c.name for c, was in zip(house.children, exits, strict=True) if len(c.exits) > was]
    stage.must(not ended, f"processes ended: {ended}")


NEWER = 99


async def _newer_job(redis: Any, job: str) -> None:
    """A body that says that its version is 99, at the head of its lane."""
    body = {
        "v": NEWER,
        "id": job,
        "model": "sim",
        "tenant": "first",
        "priority": "interactive",
        "prompt": ["chat99", 1],
    }
    await put_raw(redis, f"{prefix(0)}lane:sim:interactive", prefix(0), job, msgspec.msgpack.encode(body))


async def _newer_messages(redis: Any) -> None:
    """Known kinds in a version that is not known, and fields nobody knows."""
    for name in await redis.execute_command("PUBSUB", "CHANNELS", f"{ROOT}*"):
        for tag in ("f", "t", "e", "w", "c", "a", "d", "h"):
            await redis.publish(name, msgspec.msgpack.encode([f"{tag}{NEWER}", "x", 1, []]))
    await redis.hset(fleet_key("plan"), "newer", msgspec.json.encode({"v": NEWER, "wanted": {"many": 1}}))
    await redis.set(fleet_key("override", "newer"), msgspec.json.encode({"v": NEWER}), ex=5)
    newer = {"v": NEWER, "id": "newer", "role": "router", "pid": "x"}
    await redis.set(fleet_key("proc", "router:newer"), msgspec.json.encode(newer), ex=5)
    await redis.zadd(fleet_key("procs"), {"router:newer": 1 << 40})


async def _remove(redis: Any, job: str) -> None:
    """The newer version has taken its job."""

    async def is_out() -> bool:
        found = 0
        async for key in redis.scan_iter(match=f"{prefix(0)}*:sim:interactive"):
            if await redis.type(key) == b"stream":
                for entry, fields in await redis.xrange(key):
                    if fields.get(b"job") == job.encode():
                        await redis.xdel(key, entry)
                        found += 1
        return not found

    await until(is_out, 5, 0.1)
    async for key in redis.scan_iter(match=f"{prefix(0)}claims:*"):
        await redis.srem(key, job)
    await redis.delete(partition_key(0, "job", job))
    await redis.hdel(fleet_key("plan"), "newer")


MALFORMED = Other(500, "malformed_job", 4)
"""Of the touched job alone: its reader, and the one who reads it in the end."""

ROWS = (
    Row(
        *("F33", "corrupt frames and records", "random bytes in logs, a record, plans, fleet, channels", 12, f33, 300),
        proves="Bytes nobody can read cost at most the one job they belong to, and end no process.",
        budget=Budget(broken=20, others=(MALFORMED,), why="readers of the touched job may be told that it is lost"),
        short=4,
    ),
    Row(
        *("F34", "version N beside N+1", "jobs, messages and entries of an unknown version", 10, f34, 240),
        proves="What a newer version writes is set aside for it, and ends no loop.",
    ),
)
