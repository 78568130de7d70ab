"""What a tenant keeps is counted by what is there, and bounded; no loss of anything makes a count drift."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flow
import pytest
from batching import client, content, ended, jsonl, line
from house import House, key_rows, module_house, redis_process
from openai import RateLimitError
from redis import Redis

from cli.__main__ import main
from penstock.engine import ChatTurn
from streaming.batches.store import Files, StoredFile
from streaming.errors import QuotaExceeded
from streaming.ids import partition_of
from streaming.jobs import quotas as quotas_module
from streaming.jobs.codec import Terminal
from streaming.jobs.job import Chat, Job, JobState
from streaming.jobs.lease import Finish
from streaming.jobs.queue import Queue
from streaming.jobs.quotas import Quotas, TenantUsage
from streaming.jobs.settings import QuotaSettings
from streaming.keys import partition_key
from streaming.redis.client import Call, RedisClient
from streaming.redis.settings import RedisSettings

pytestmark = pytest.mark.slow

RETENTION_S = 48
TENANT = "t"
LEAST_FILE = 4096


@pytest.fixture
async def wire(redis_url: str) -> AsyncIterator[RedisClient]:
    """A wire of one partition whose spans are two seconds."""
    wire = RedisClient.open(RedisSettings(url=redis_url, lease_ms=1_000, retention_s=RETENTION_S))
    yield wire
    await wire.close()


def a_job(queue: Queue, tenant: str = TENANT, text: str = "hello", **changes: Any) -> Job:
    fields = {"id": queue.new_id(tenant), "tenant": tenant, "prompt": Chat((ChatTurn("user", text),))}
    return flow.a_job(queue, **fields | changes)


async def run(wire: RedisClient, count: int = 1) -> None:
    """Work off so many jobs."""
    lease = await flow.a_lease(wire)
    for _ in range(count):
        claim = await flow.claim_one(lease)
        rows = (flow.delta(claim, 1, "answer"),)
        await lease.calls([flow.append(lease, {"-": rows}, claim, oldest=claim.first_frame)])
        terminal = Terminal(claim.job.id, JobState.COMPLETED, 1, ("stop",), rows=rows)
        await lease.calls([lease.finish_call(Finish(terminal, claim.run_number, True))])
    await lease.leave()


async def stored(wire: RedisClient, job_id: str) -> tuple[int, int]:
    """Bytes of a job's request and of its result, as they lie in the store."""
    fields: dict[bytes, bytes] = await wire.redis.hgetall(partition_key(0, "job", job_id))  # type: ignore[misc]
    length = {name.decode(): len(value) for name, value in fields.items()}
    return length["body"] + length.get("metadata", 0), length.get("record", 0) + length.get("rows", 0)


# --- jobs ------------------------------------------------------------------------------------------------------------


async def test_a_tenant_has_as_many_jobs_as_it_may(wire: RedisClient) -> None:
    """Waiting, running and ended alike; another tenant's are its own, and a request that comes again finds its job."""
    queue, quota = Queue(wire), QuotaSettings(jobs=3)
    first = a_job(queue)
    for job in (first, a_job(queue)):
        await queue.put(job, quota=quota, idempotency_key=f"key {job.id}", digest="d")
    await run(wire)
    await queue.put(a_job(queue), quota=quota)
    with pytest.raises(QuotaExceeded) as refused:
        await queue.put(a_job(queue), quota=quota)
    assert (refused.value.name, refused.value.used, refused.value.limit) == ("jobs", 3, 3)
    again = await queue.put(
        a_job(queue, id=queue.new_id(TENANT, f"key {first.id}")),
        quota=quota, idempotency_key=f"key {first.id}", digest="d",
    )  # fmt: skip
    assert again.joined and again.id == first.id
    await queue.put(a_job(queue, "other"), quota=quota)
    assert (await Quotas(wire).usage(TENANT)).jobs == 3
    assert (await Quotas(wire).usage("other")).jobs == 1


async def test_bytes_are_those_that_are_stored(wire: RedisClient) -> None:
    """Of requests from their acceptance, of results from their end, whichever way a job ends."""
    queue, quotas = Queue(wire), Quotas(wire)
    done, cancelled, waiting = (a_job(queue, text=text, metadata={"a": text}) for text in ("x" * 500, "y" * 70, "z"))
    for job in (done, cancelled, waiting):
        await queue.put(job)
    await run(wire)
    await queue.cancel(cancelled.id)
    sizes = [await stored(wire, job.id) for job in (done, cancelled, waiting)]
    assert sizes[0][1] > 0 == sizes[1][1]
    usage = await quotas.usage(TENANT)
    assert usage == TenantUsage(3, sum(size for size, _ in sizes), sizes[0][1], waiting=1)


@pytest.mark.parametrize("name", ["job_bytes", "result_bytes"])
async def test_bytes_are_bounded(wire: RedisClient, name: str) -> None:
    """A request that does not fit is refused, and one that comes while results fill the quota."""
    queue = Queue(wire)
    await queue.put(a_job(queue))
    await run(wire)
    held = getattr(await Quotas(wire).usage(TENANT), name)
    assert held > 0
    with pytest.raises(QuotaExceeded) as refused:
        await queue.put(a_job(queue), quota=QuotaSettings(**{name: held}))
    assert (refused.value.name, refused.value.used) == (name, held)
    await queue.put(a_job(queue), quota=QuotaSettings(**{name: held + 10_000}))


async def test_many_puts_at_once_share_what_is_left(wire: RedisClient) -> None:
    """They go to the server in one call, and each counts those before it."""
    queue, quota = Queue(wire), QuotaSettings(jobs=10)

    async def put() -> bool:
        try:
            await queue.put(a_job(queue), quota=quota)
        except QuotaExceeded:
            return False
        return True

    outcomes = await asyncio.gather(*(put() for _ in range(40)))
    assert sum(outcomes) == 10
    usage = await Quotas(wire).usage(TENANT)
    assert (usage.jobs, usage.waiting) == (10, 10)


async def test_no_loss_makes_a_count_drift(wire: RedisClient) -> None:
    """Jobs whose worker was killed, that were given up, expired, cancelled twice, put twice, or whose records cannot be
    read: what is counted is what is stored, and it is nothing when their time is over."""
    queue, quotas = Queue(wire), Quotas(wire)
    jobs = [a_job(queue, text="n" * number) for number in range(6)]
    for job in jobs:
        await queue.put(job)
    await queue.put(jobs[0])
    await queue.put(a_job(queue, text="too late", max_queue_ms=1))
    for _ in range(3):  # three lost workers: the job is given up
        lease = await flow.a_lease(wire)
        await lease.claim(0, 1)
        await flow.lapse(wire, lease)
    await queue.cancel(jobs[3].id)
    await queue.cancel(jobs[3].id)
    await wire.call("fail_malformed", 0, jobs[4].id, "a test")
    keys = await wire.redis.keys(partition_key(0, "job", "*"))
    sizes = [await stored(wire, key.decode().rpartition(":")[2]) for key in keys]
    usage = await quotas.usage(TENANT)
    assert usage.jobs == len(keys) == 7
    assert usage.job_bytes == sum(size for size, _ in sizes)
    fields: dict[bytes, bytes] = await wire.redis.hgetall(partition_key(0, "kept", TENANT))  # type: ignore[misc]
    assert 0 < await wire.redis.ttl(partition_key(0, "kept", TENANT)) <= RETENTION_S + 4
    now_s = await wire.now_ms() // 1000
    assert all(now_s + RETENTION_S <= int(name.lstrip(b"r")) <= now_s + RETENTION_S + 4 for name in fields)


async def test_bytes_are_counted_until_the_record_is_gone_and_no_longer(wire: RedisClient) -> None:
    """A span that is over counts no more, and its field is dropped with the next that begins."""
    queue, quotas = Queue(wire), Quotas(wire)
    key = partition_key(0, "kept", TENANT)
    await queue.put(a_job(queue))
    now_s = await wire.now_ms() // 1000
    await wire.redis.hset(key, mapping={str(now_s - 1): 7_000, f"r{now_s - 1}": 8_000})  # type: ignore[misc]
    usage = await quotas.usage(TENANT)
    assert usage.job_bytes < 7_000 and usage.result_bytes == 0
    await run(wire)
    assert all(int(name.lstrip(b"r")) > now_s for name in await wire.redis.hkeys(key))  # type: ignore[misc]


async def test_partitions_share_a_limit(redis_url: str) -> None:
    """What other partitions hold is taken off, as it was a second ago at most; a process that just came knows it."""
    wire = RedisClient.open(RedisSettings(url=redis_url, partitions=4))
    queue = Queue(wire)
    for _ in range(20):
        await queue.put(a_job(queue))
    used = (await Quotas(wire).usage(TENANT)).jobs
    assert used == 20
    jobs = [a_job(queue) for _ in range(8)]
    assert len({partition_of(job.id) for job in jobs}) > 1
    for job in jobs:
        with pytest.raises(QuotaExceeded) as refused:
            await Queue(wire).put(job, quota=QuotaSettings(jobs=20))
        assert (refused.value.used, refused.value.limit) == (20, 20)
    await queue.put(jobs[0], quota=QuotaSettings(jobs=21))
    await wire.close()


async def test_what_other_partitions_hold_is_as_it_was_a_second_ago(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not older: a tenant would exceed its limit by all that it brought since."""
    now_s, quota = 1000.0, QuotaSettings(jobs=10)
    monkeypatch.setattr(quotas_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    wire = RedisClient.open(RedisSettings(url=redis_url, partitions=2))
    quotas, queue = Quotas(wire), Queue(wire)

    async def left() -> int:
        return (await quotas.left(TENANT, 0, quota))["jobs"]

    assert await left() == 10
    await queue.put(next(job for _ in range(200) if partition_of((job := a_job(queue)).id) == 1))
    now_s += 0.9
    assert await left() == 10
    now_s += 0.2
    assert await left() == 9
    await wire.close()


async def test_how_jobs_stand_is_counted_in_all_slices(wire: RedisClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few are looked at in one call."""
    monkeypatch.setattr(quotas_module, "MAX_LOOKED", 2)
    queue, lease = Queue(wire), await flow.a_lease(wire)
    for number in range(7):
        await queue.put(a_job(queue))
        if number < 3:
            await flow.claim_one(lease)
    usage = await Quotas(wire).usage(TENANT)
    assert (usage.jobs, usage.waiting, usage.running) == (7, 4, 3)


async def test_the_loss_of_one_partition_refuses_nobody_elsewhere(
    redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two servers with a partition each, of which one ends: what was known of it still counts, a tenant of which
    nothing was known is let in, and it is said once."""
    here = RedisClient.open(RedisSettings(url=redis_url, partitions=2))
    with redis_process(tmp_path) as address:
        there = RedisClient.open(RedisSettings(url=address, partitions=2, timeout_s=1))
        calls = here.calls

        async def split(asked: Sequence[Call]) -> list[Any]:
            return [answer for call in asked for answer in await (there.calls if call[1] else calls)([call])]

        here.calls = split  # type: ignore[method-assign]
        queue = Queue(here)
        for _ in range(3):
            await Queue(there).put(in_partition(queue, 1))
        quota = QuotaSettings(jobs=5)
        await queue.put(in_partition(queue, 0), quota=quota)
    queue._quotas._seen = {tenant: (-math.inf, parts) for tenant, (_, parts) in queue._quotas._seen.items()}
    with caplog.at_level("WARNING", "streaming.jobs.quotas"):
        await queue.put(in_partition(queue, 0), quota=quota)
        with pytest.raises(QuotaExceeded) as refused:
            await queue.put(in_partition(queue, 0), quota=quota)
        assert (refused.value.used, refused.value.limit) == (5, 5)
        for _ in range(5):
            await queue.put(in_partition(queue, 0, "other"), quota=quota)
        with pytest.raises(QuotaExceeded):
            await queue.put(in_partition(queue, 0, "other"), quota=quota)
    assert [each.levelname for each in caplog.records if "last known of partition 1" in each.message] == ["WARNING"]
    assert len(caplog.records) == 1
    await here.close()
    await there.close()


def in_partition(queue: Queue, partition: int, tenant: str = TENANT) -> Job:
    return next(job for job in iter(lambda: a_job(queue, tenant), None) if partition_of(job.id) == partition)


# --- files -----------------------------------------------------------------------------------------------------------


def a_file(files: Files, size: int, tenant: str = TENANT) -> StoredFile:
    return StoredFile(
        id=files.new_id(tenant), tenant=tenant, name="f", size=size, purpose="batch", created_ms=0, expires_ms=60_000
    )


async def test_files_are_bounded_by_their_bytes(wire: RedisClient) -> None:
    """Exactly, each tenant's by itself; one that is deleted makes room, once; one put again is counted once."""
    files, quotas = Files(wire), Quotas(wire)
    first = a_file(files, 6000)
    await files.put(first, 11_000)
    await files.put(first, 11_000)
    with pytest.raises(QuotaExceeded) as refused:
        await files.put(a_file(files, 5001), 11_000)
    assert (refused.value.name, refused.value.used, refused.value.limit) == ("file_bytes", 6000, 11_000)
    await files.put(a_file(files, 5000), 11_000)
    await files.put(a_file(files, 11_000, "other"), 11_000)
    assert await quotas.file_bytes(TENANT) == 11_000
    for _ in range(2):
        await files.forget(first.id, TENANT)
    assert (await quotas.usage(TENANT)).files == 1 and await quotas.file_bytes(TENANT) == 5000


# --- the whole -------------------------------------------------------------------------------------------------------

SETTINGS = "[quotas]\njobs = 1000\nfile_bytes = 50000\n" + key_rows(
    ann="quotas = { jobs = 2, file_bytes = 8000 }", bob="", ops="admin = true"
)


door = module_house("workers", "offline", settings=SETTINGS)
"""An API process, a worker and an offline process; two tenants, of which one has small quotas."""


@pytest.fixture
def emptied(door: House) -> House:
    """Nothing is kept from another test."""
    with Redis.from_url(door.redis_url) as store:
        for name in ("jobs", "kept", "files", "sizes"):
            for tenant in ("ann", "bob"):
                store.delete(partition_key(0, name, tenant))
    return door


def headers(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def chat(house: House, name: str) -> tuple[int, dict[str, str], bytes]:
    asked = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    return house.post("/v1/chat/completions", asked, headers(name))


def test_a_tenant_over_its_quota_is_told_what_and_what_to_do(emptied: House) -> None:
    """429 that names the field and the fix, and that no client library repeats; others are served."""
    assert [chat(emptied, "ann")[0] for _ in range(2)] == [200, 200]
    status, given, body = chat(emptied, "ann")
    assert (status, given["x-should-retry"]) == (429, "false")
    error = json.loads(body)["error"]
    assert (error["code"], error["param"], error["type"]) == ("quota_exceeded", "jobs", "rate_limit_error")
    assert "2 jobs and may keep 2" in error["message"] and "[quotas]" in error["message"]
    assert chat(emptied, "bob")[0] == 200


def test_files_and_batches_are_bounded(emptied: House) -> None:
    """An upload over the quota leaves no byte on the disk; a batch whose output would come on top is refused, unless it
    was accepted before."""
    ann = client(emptied, "ann")
    lines = [line(number) for number in range(4)]
    file = ann.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")

    def begin(key: str = "") -> Any:
        headers = {"Idempotency-Key": key} if key else {}
        return ann.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", extra_headers=headers
        )

    batch = begin("once")
    on_disk = {path.name for path in (emptied.folder / ".penstock/files/files").iterdir()}
    with pytest.raises(RateLimitError) as refused:
        ann.files.create(file=("more.jsonl", jsonl([line(number) for number in range(20)])), purpose="batch")
    assert refused.value.code == "quota_exceeded" and refused.value.param == "file"
    done = ended(ann, batch)
    assert [each["custom_id"] for each in content(ann, done.output_file_id)] == [each["custom_id"] for each in lines]
    output = ann.files.retrieve(done.output_file_id)
    left = {path.name for path in (emptied.folder / ".penstock/files/files").iterdir()}
    assert left == on_disk | {output.id}
    assert not list((emptied.folder / ".penstock/files/incoming").iterdir())
    assert max(file.bytes, LEAST_FILE) + max(output.bytes, LEAST_FILE) > 8000, "the output fills the quota"
    assert begin("once").id == batch.id
    with pytest.raises(RateLimitError) as refused:
        begin()
    assert refused.value.code == "quota_exceeded" and "DELETE /v1/files" in refused.value.message
    assert {path.name for path in (emptied.folder / ".penstock/files/batches").iterdir()} <= {batch.id}
    ann.files.delete(output.id)
    assert ended(ann, begin()).status == "completed"


def test_an_admin_sees_what_tenants_keep(emptied: House, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Counts and limits, by API and by command; nobody else does."""
    chat(emptied, "ann")
    client(emptied, "bob").files.create(file=("in.jsonl", jsonl([line(1)])), purpose="batch")
    _, _, body = emptied.request("GET", "/admin/tenants", headers=headers("ops"))
    found = {each["tenant"]: each for each in json.loads(body)["data"]}
    assert set(found) == {"ann", "bob", "ops"}
    ann, bob = found["ann"], found["bob"]
    assert (ann["jobs"], ann["waiting"], ann["running"], ann["files"]) == (1, 0, 0, 0)
    assert ann["job_bytes"] > 0 and ann["result_bytes"] > 0
    assert (bob["jobs"], bob["files"], bob["file_bytes"]) == (0, 1, LEAST_FILE)
    limits = {"jobs": 2, "job_bytes": None, "result_bytes": None, "file_bytes": 8000, "store_share": 0.5}
    assert ann["quotas"] == limits
    assert bob["quotas"]["jobs"] == 1000
    assert json.loads(emptied.request("GET", "/admin/tenants/bob", headers=headers("ops"))[2]) == bob
    assert emptied.request("GET", "/admin/tenants/gone", headers=headers("ops"))[0] == 404
    with Redis.from_url(emptied.redis_url) as store:  # a tenant whose key was taken away still keeps a file
        store.zadd(partition_key(0, "files", "gone"), {"file-" + "0" * 32: 1})
    status, _, body = emptied.request("GET", "/admin/tenants/gone", headers=headers("ops"))
    assert status == 200 and json.loads(body)["files"] == 1
    assert emptied.request("GET", "/admin/tenants/a%20b", headers=headers("ops"))[0] == 400
    for path in ("/admin/tenants", "/admin/tenants/ann"):
        assert emptied.request("GET", path, headers=headers("ann"))[0] == 403
        assert emptied.request("GET", path)[0] == 401
    monkeypatch.setenv("PENSTOCK_API_KEY", "ops")
    assert main(["tenants", "--url", emptied.url]) == 0
    row = next(each.split() for each in capsys.readouterr().out.splitlines() if each.startswith("ann"))
    assert row[:2] == ["ann", "1/2"] and row[-1] == "0/8000"
    assert main(["tenants", "bob", "--json", "--url", emptied.url]) == 0
    assert json.loads(capsys.readouterr().out) == bob
