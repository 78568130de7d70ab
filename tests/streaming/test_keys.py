"""Every key of the catalogue has a bound: what is left when everything has ended and its time is over."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from batching import begin, client, ended, line
from flow import until
from house import House, eventually, redis_process
from redis import Redis

from streaming.jobs.reaper import Reaper
from streaming.keys import BROKER, CATALOGUE, FLEET, ROOT, Key, partition_key
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings

pytestmark = pytest.mark.slow

RETENTION_S, PARTITIONS = 2, 2
DAY, HOUR = 86_400, 3600
BOUNDED = {
    "tick": "string", "swept": "string", "epoch": "string", "mark": "string",
    "lane": "stream", "retry": "stream", "suspects": "stream", "dead": "stream",
}  # fmt: skip
"""Keys of a partition that stay: single numbers, streams that are empty once their jobs have ended, and dead letters,
of which the newest ten thousand are kept."""
FLEET_BOUNDED = {
    *("procs", "card", "leader_epoch", "plan", "cold", "actions", "store"),
    *("api_keys", "api_keys_version", "api_keys_used", "audit"),
}
"""Those of the fleet: as many fields as there are models, processes of the last hour, the newest thousand actions, ten
thousand created keys, as many entries of the audit log."""
EXPIRY_S = {
    "account": 40 * DAY, "open": 40 * DAY, "usage": 100 * DAY, "usage_names": 100 * DAY, "usage_tenants": 100 * DAY,
    "job": RETENTION_S, "idem": RETENTION_S, "jobs": 2 * RETENTION_S, "worker": HOUR, "log": 60, "parked": 60,
    "yielding": 10, "prefetching": 10, "alone": 60, "kept": RETENTION_S + 2,
    "outbox": 7 * DAY, "hook": 31 * DAY, "hook_due": 31 * DAY, "hooks": 2 * RETENTION_S,
    "proc": 10, "leader": 60, "redelivery": DAY, "shares": 60, "served": HOUR, "credit": HOUR,
    "script_ends": DAY, "console": 12 * HOUR, "scheduled_of": 31 * DAY, "conversation": RETENTION_S, "places": DAY,
    "media": RETENTION_S,
}  # fmt: skip
"""The longest that a key of the kind may live on by itself once everything has ended, in seconds."""


def test_nothing_but_what_is_bounded_is_left(tmp_path: Path) -> None:
    """Many jobs, streams, batches and files; workers killed and drained, an API process killed under its readers. Then
    everything ends, and each key that is left is one of constant size, or goes by itself when the catalogue says."""
    with (
        redis_process(tmp_path, None, "--appendonly", "yes") as url,
        Redis.from_url(url, decode_responses=True) as store,
    ):
        settings = {"REDIS_RETENTION_S": RETENTION_S, "REDIS_PARTITIONS": PARTITIONS, "FILES_RETENTION_S": 60}
        with House(url, tmp_path) as house:
            house.environ |= {f"PENSTOCK_{name}": str(value) for name, value in settings.items()}
            house.environ["PENSTOCK_SIM_STEP_MS"] = "5"
            soak(house)
        asyncio.run(workers_lapse(url, store))
        expire_kept(store)
        left: list[str] = []
        with suppress(AssertionError):
            eventually(lambda: not left.clear() and not left.extend(unbounded(store)) and not left, seconds=20)
        assert not left


def soak(house: House) -> None:
    """Ends with every process gone."""
    doomed, drained = (house.start("workers", "--id", f"worker-{number}") for number in (1, 2))
    house.start("offline")
    house.start_api()
    other = house.port + 1
    dying = house.start_api(other)
    house.wait_ready()
    openai = client(house)
    batch = begin(openai, [line(number) for number in range(60)])
    with ThreadPoolExecutor(24) as pool:
        streams = [pool.submit(stream, house, number, other if number % 3 else None) for number in range(24)]
        for number in range(60):
            asked = {"model": "sim", "messages": [{"role": "user", "content": str(number)}], "max_tokens": 20}
            assert house.post("/v1/jobs", asked, {"Idempotency-Key": f"key {number}"})[0] == 202
        doomed.kill()
        dying.kill()
        house.start("workers", "--id", "worker-3")
        drained.send_signal(signal.SIGTERM)
        for each in streams:
            each.result()
    assert ended(openai, batch).status == "completed"
    eventually(lambda: unfinished(house) == 0)
    drained.wait(60)


async def workers_lapse(url: str, store: Any) -> None:
    """The processes were killed: whoever comes next fences their leases."""
    wire = RedisClient.open(RedisSettings(url=url, lease_ms=1000, partitions=PARTITIONS))
    reaper = Reaper(wire)

    async def nobody_left() -> bool:
        await reaper.sweep()
        return not any(store.exists(partition_key(partition, "leases")) for partition in range(PARTITIONS))

    await until(nobody_left)
    await wire.close()


def stream(house: House, number: int, port: int | None) -> None:
    """A chat; its API process may die of it."""
    messages = [{"role": "user", "content": f"stream {number}"}]
    asked = {"model": "sim", "stream": True, "messages": messages, "max_tokens": 300}
    try:
        house.request("POST", "/v1/chat/completions", asked, port=port)
    except (OSError, HTTPException):
        assert port is not None


def unfinished(house: House) -> int:
    with Redis.from_url(house.redis_url, decode_responses=True) as store:
        jobs = store.keys(f"{ROOT}*:job:*")
        states = [store.hget(job, "state") for job in jobs]
    return sum(state in ("queued", "in_progress") for state in states)


def expire_kept(store: Any) -> None:
    """Files and batches are forgotten by an offline process when their time has come: each must be on its list."""
    for partition in range(PARTITIONS):
        due = partition_key(partition, "expiring")
        listed = set(store.zrange(due, 0, -1))
        prefix = partition_key(partition, "file", "")[: -len("file:")]
        kept = [key.removeprefix(prefix).split(":", 1) for key in store.keys(f"{prefix}*")]
        assert {name for kind, name in (pair for pair in kept if len(pair) == 2) if kind in ("file", "batch")} == {
            name.removesuffix(":local") for name in listed
        }
        for member in listed:
            name = member.removesuffix(":local")
            kind = "file" if name.startswith("file-") else "batch"
            store.delete(partition_key(partition, kind, name))
            store.zrem(due, member)
            store.zrem(partition_key(partition, "files" if kind == "file" else "batches", "local"), name)
            store.hdel(partition_key(partition, "sizes", "local"), name, "total")


def unbounded(store: Any) -> list[str]:
    """Keys that may stay and grow for ever, or longer than is said, with their time to live."""
    return [f"{key} {store.ttl(key)}" for key in store.keys("*") if store.exists(key) and not bounded(store, key)]


def kind_of(keys: Iterable[Key], rest: str) -> str:
    """Which of these a key is, by what follows the prefix of its slot."""
    return next(key.name for key in keys if key.pattern.split(":")[0] == rest.split(":", maxsplit=1)[0])


def bounded(store: Any, key: str) -> bool:
    if key.startswith(BROKER):
        return True  # reminders, never work: a handful of names that Celery chose
    slot, _, rest = key.removeprefix(ROOT).partition(":")
    if slot == "{fleet}":
        name = kind_of(FLEET, rest)
        return name in FLEET_BOUNDED or 0 < store.ttl(key) <= EXPIRY_S[name]
    name = kind_of(CATALOGUE, rest)
    if name == "lane":
        return store.xlen(key) == 0
    if name in BOUNDED:
        return store.type(key) == BOUNDED[name]
    return name in EXPIRY_S and 0 < store.ttl(key) <= EXPIRY_S[name]


def test_the_catalogue_says_how_long_each_key_lives() -> None:
    """Each kind is bounded, expires by itself, or is empty when everything has ended."""
    emptied = {
        "leases", "claims", "idle", "cut", "timers", "owed", "heirs", "lane", "retry", "suspects", "tenants", "line",
        "arrivals", "batch", "batches", "due", "enqueued", "file", "files", "sizes", "readers", "expiring",
        "tenant_owed", "scheduled",
    }  # fmt: skip
    assert {key.name for key in CATALOGUE} <= BOUNDED.keys() | EXPIRY_S.keys() | emptied
    assert {key.name for key in FLEET} <= FLEET_BOUNDED | EXPIRY_S.keys() | {"override"}
