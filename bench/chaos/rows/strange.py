"""F33, F34: random bytes in everything that is read, and what a newer version of Penstock writes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from redis.exceptions import RedisError

from bench.chaos.asks import FIRST, Ask, authorization
from bench.chaos.cluster import PenstockCluster
from bench.chaos.http import fetch
from bench.chaos.processes import ManagedProcess, becomes, until
from bench.chaos.rows.clients import put_raw
from bench.chaos.rows.workers import asks, requests, victim
from bench.chaos.stage import FaultTestbed
from streaming.jobs.job import JobState
from streaming.keys import ROOT, fleet_key, partition_key, prefix

TOKENS = 200

FIELDS = (
    *("state", "body", "tenant", "reply", "created", "lane", "entry", "keep", "owed", "events", "metadata", "idem"),
    *("deadline", "queue_deadline", "pinned", "worker", "attempt", "run", "claimed", "started", "runs", "alone"),
    *("cancel", "losses", "epoch", "abandoned", "delivered", "size"),
)
"""Of the hash of a job that has not ended."""
MANNERS = ("plain end", "cancel", "kill", "drain", "expiry")
"""What becomes of jobs once their records are spoiled, in turn."""
SPOILED_TOKENS = 600
EXPIRY_MS = 4000
END_TIMEOUT_S = 40.0
"""Within so long after the fault each spoiled job must have ended: its tokens, a lease, and a second run of it."""


@dataclass(slots=True)
class Spoiled:
    """Jobs of which one field each is spoiled; the store is asked what became of them, for their readers may not be
    able to ask: the field may be their tenant."""

    cluster: PenstockCluster
    manner: str
    jobs: Mapping[str, str] = field(default_factory=dict)
    """By the name of the field."""

    @classmethod
    async def begun(cls, cluster: PenstockCluster, manner: str, trial: int) -> Spoiled:
        """Put, and begun by some worker."""
        found = cls(cluster, manner)
        queue = {"deadline_ms": EXPIRY_MS} if manner == "expiry" else {"deadline_ms": 600_000}
        found.jobs = {name: await found._put(f"{name} {trial}", queue) for name in FIELDS}
        await until(found._all_run, 20)
        return found

    async def _put(self, prompt: str, queue: Mapping[str, int]) -> str:
        body = Ask(prompt, SPOILED_TOKENS, chat=False, queue=queue).body
        _, _, answer = await fetch(self.cluster.ports[0], "POST", "/v1/jobs", body, authorization(FIRST))
        return str(msgspec.json.decode(answer)["id"])

    async def _states(self) -> dict[str, bytes]:
        redis: Any = self.cluster.wire.redis
        return {name: await redis.hget(_job_key(job), "state") or b"" for name, job in self.jobs.items()}

    async def _all_run(self) -> bool:
        return set((await self._states()).values()) == {b"in_progress"}

    async def spoil(self, stage: FaultTestbed) -> None:
        """Random bytes into each job's field, or digits, or nothing."""
        redis: Any = self.cluster.wire.redis
        for name, job in self.jobs.items():
            noise = stage.rng.choice([_noise(stage), _noise(stage), b"9" * 30, b""])
            await spoil_running(redis, job, name, noise)

    async def cancel(self, stage: FaultTestbed) -> None:
        """Each, as its owner would. One whose record cannot be read may be answered as failed, or not be there."""
        for name, job in self.jobs.items():
            at = f"/v1/jobs/{job}/cancel"
            status, _, body = await fetch(self.cluster.ports[0], "POST", at, headers=authorization(FIRST))
            stage.must(
                status in (200, 404, 410) or b"malformed_job" in body,
                f"a cancel is answered {status} where {name} is spoiled: {body[:100]!r}",
            )

    async def judge(self, stage: FaultTestbed) -> None:
        """Each has one of the final states and is kept for a time, not for ever."""
        redis: Any = self.cluster.wire.redis
        final = {state.encode() for state in JobState if state.final}

        async def all_ended() -> bool:
            return set((await self._states()).values()) <= final

        await becomes(all_ended, END_TIMEOUT_S, 0.1)
        for name, state in (await self._states()).items():
            what = f"{self.manner}, {name} spoiled"
            stage.must(state in final, f"{what}: the job is {state!r} after {END_TIMEOUT_S:g} s")
            stage.must(await redis.ttl(_job_key(self.jobs[name])) != -1, f"{what}: the job is kept for ever")
        await forget_runs(stage, redis, self.jobs["runs"])


async def f33(stage: FaultTestbed) -> None:
    """Random bytes into the logs, plans, overrides, the fleet, every channel, and each field of jobs' records, which
    then end, are cancelled, lose their worker by kill -9 or SIGTERM, or expire."""
    async with stage.cluster(environ={"PENSTOCK_WORKER_DRAIN_S": "0.5"}) as cluster:
        redis: Any = cluster.wire.redis
        exits = {child.name: len(child.exits) for child in cluster.children}
        meant: list[tuple[str, int]] = []
        for trial in stage.tries():
            manner = MANNERS[trial % len(MANNERS)]
            spoiled = await Spoiled.begun(cluster, manner, trial)
            begun = cluster.begin(asks(stage.row.id, trial, tokens=TOKENS))
            touched = cluster.begin(
                [Ask(f"touched {trial}", 600, False, may=("completed", "failed"), reads=trial % 2 == 0)]
            )
            await cluster.all_begun(begun)
            await cluster.all_accepted(touched)
            stage.fault(f"random bytes, then {manner}")
            written = await _into_logs(stage, redis)
            await spoiled.spoil(stage)
            meant += await _bring_about(stage, cluster, spoiled)
            for _ in range(5):
                written += await _into_logs(stage, redis)
                await _into_fleet(stage, redis)
                await _into_channels(stage, redis)
                await asyncio.sleep(0.1)
            spoilt = await _into_record(stage, redis, touched[0][0].job, trial)
            # What comes now is read from the log.
            await redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            await cluster.finish([*begun, *touched])
            await spoiled.judge(stage)
            await forget_runs(stage, redis, touched[0][0].job)
            across = stage.across(requests(begun))
            stage.bit(written and spoilt and across, "nothing was spoiled, or nobody read across it")
            await _clean(redis)
            await cluster.ready()
        ended = [(child.name, code) for child in cluster.children for code in child.exits[exits[child.name] :]]
    stage.must(sorted(ended) == sorted(meant), f"processes ended: {ended}, meant to: {meant}")


async def _bring_about(stage: FaultTestbed, cluster: PenstockCluster, spoiled: Spoiled) -> list[tuple[str, int]]:
    """What the manner says; the process that is to end by it, with its exit code."""
    if spoiled.manner == "cancel":
        await spoiled.cancel(stage)
    if spoiled.manner not in ("kill", "drain"):
        return []
    doomed: ManagedProcess = await victim(stage, cluster)
    lives = len(doomed.exits)
    number = signal.SIGKILL if spoiled.manner == "kill" else signal.SIGTERM
    doomed.send(number)
    await doomed.exited(lives + 1)
    return [(doomed.name, -number if spoiled.manner == "kill" else 0)]


def _job_key(job: str) -> str:
    return partition_key(0, "job", job)


async def _into_logs(stage: FaultTestbed, redis: Any) -> int:
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


async def _into_fleet(stage: FaultTestbed, redis: Any) -> None:
    await redis.hset(fleet_key("plan"), "sim", _noise(stage))
    await redis.hset(fleet_key("plan"), _noise(stage), _noise(stage))
    await redis.hset(fleet_key("cold"), "sim", _noise(stage))
    await redis.hset(fleet_key("card"), "noise", _noise(stage))
    await redis.set(fleet_key("override", "sim"), _noise(stage), ex=5)
    await redis.set(fleet_key("proc", "worker:noise"), _noise(stage), ex=5)
    await redis.zadd(fleet_key("procs"), {"worker:noise": 1 << 40, _noise(stage): 1 << 40})


async def _into_channels(stage: FaultTestbed, redis: Any) -> None:
    for name in await redis.execute_command("PUBSUB", "CHANNELS", f"{ROOT}*"):
        for data in (_noise(stage), b"", b"\x93\xa1f", msgspec.msgpack.encode(["f", 1, 2, 3])):
            await redis.publish(name, data)


async def _into_record(stage: FaultTestbed, redis: Any, job: str, trial: int) -> bool:
    """Of one job, the only one that may fail of it, unless it has ended. Returns whether it was written."""
    field = ("runs", "body", "created", "deadline")[trial % 4]
    return await spoil_running(redis, job, field, _noise(stage))


_SPOIL = """
local state = redis.call('HGET', KEYS[1], 'state')
if state ~= 'queued' and state ~= 'in_progress' then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
"""


async def spoil_running(redis: Any, job: str, field: str, noise: bytes) -> bool:
    """Write into a job's record unless the job has ended: an end that was told once cannot be read again where its
    record is spoiled after it. Returns whether it was written."""
    return bool(await redis.eval(_SPOIL, 1, _job_key(job), field, noise))


async def forget_runs(stage: FaultTestbed, redis: Any, job: str) -> None:
    """A job whose runs cannot be read keeps the logs of workers it may have had, for its retention, not for ever."""
    async for key in redis.scan_iter(match=f"{prefix(0)}heirs:*"):
        if await redis.sismember(key, job):
            stage.must(await redis.ttl(key) != -1, f"a log is kept for ever for {job}, whose runs are unreadable")
            await redis.srem(key, job)


async def _clean(redis: Any) -> None:
    """What an operator would remove; the processes' own words come back by themselves."""
    await redis.delete(fleet_key("plan"), fleet_key("cold"), fleet_key("override", "sim"), fleet_key("procs"))
    await redis.hdel(fleet_key("card"), "noise")


def _noise(stage: FaultTestbed) -> bytes:
    return stage.rng.randbytes(stage.rng.choice([1, 40, 4000]))


async def f34(stage: FaultTestbed) -> None:
    """A process of a newer version writes jobs, messages and entries of a version that is not known here."""
    async with stage.cluster() as cluster:
        redis: Any = cluster.wire.redis
        exits = [len(child.exits) for child in cluster.children]
        for trial in stage.tries():
            begun = cluster.begin(asks(stage.row.id, trial, tokens=TOKENS))
            await cluster.all_begun(begun)
            stage.fault("a newer version speaks")
            job = f"job_00{trial:030x}"
            await _newer_job(redis, job)
            for _ in range(5):
                await _newer_messages(redis)
                await asyncio.sleep(0.1)
            late = cluster.begin(asks(f"{stage.row.id} behind it", trial, 4, 20))
            await cluster.finish([*begun, *late])
            stage.bit(stage.across(requests(begun)), "nobody read across it")
            state = (await redis.hget(partition_key(0, "job", job), "state") or b"gone").decode()
            stage.must(state == "queued", f"a job of a newer version was not set aside: it is {state}")
            status, _, body = await fetch(cluster.ports[0], "GET", f"/v1/jobs/{job}")
            stage.must(status < 500 or status == 503, f"a read of a newer job is answered {status}: {body[:100]!r}")
            await _remove(redis, job)
            await cluster.ready()
        ended = [c.name for c, was in zip(cluster.children, exits, strict=True) if len(c.exits) > was]
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
