"""Bytes of files are bounded as they lie on the disk: while they come, while a batch has a link to them, when an answer
of the store is lost; and counting them costs the same for one file and for many."""

from __future__ import annotations

import http.client
import json
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from batching import batch_record, client, ended, jsonl, line
from house import House, eventually, key_rows, module_house, redis_process
from openai import OpenAI, RateLimitError
from redis import Redis
from severing import store_cut

from streaming.batches.store import Batches, BatchLease, BatchProgress, BatchState, Files, StoredFile
from streaming.errors import QuotaExceeded, UnknownBatch
from streaming.jobs.quotas import Quotas
from streaming.keys import partition_key
from streaming.redis.client import RedisClient

pytestmark = pytest.mark.slow

TENANT = "t"
LEAST_FILE = 4096
QUOTAS = {"small": 3 * LEAST_FILE + 1000, "middle": 40_000, "large": 2_000_000}
SETTINGS = key_rows(
    **{name: f"quotas = {{ file_bytes = {most} }}" for name, most in QUOTAS.items()}, free="", ops="admin = true"
)


door = module_house(settings=SETTINGS)
"""An API process, and tenants of whom each may keep so many bytes of files."""


def kept(house: House, tenant: str) -> tuple[int, int]:
    """How many files a tenant keeps, and how many bytes they count as, as an admin is told."""
    _, _, body = house.request("GET", f"/admin/tenants/{tenant}", headers={"Authorization": "Bearer ops"})
    found = json.loads(body)
    return found["files"], found["file_bytes"]


def on_disk(house: House) -> list[str]:
    return sorted(path.name for path in (house.folder / ".penstock/files/files").iterdir())


def upload(openai: OpenAI, data: bytes) -> Any:
    return openai.files.create(file=("in.jsonl", data), purpose="batch")


def of_size(size: int) -> bytes:
    """Lines of a batch, so many bytes of them or a few more."""
    return jsonl([line(number, "x" * 1000) for number in range(1 + size // 1000)])


# --- inputs of batches -----------------------------------------------------------------------------------------------


def test_a_deleted_input_is_counted_until_its_batch_has_ended(door: House) -> None:
    """The batch has its own link to the bytes: who uploads, begins, deletes and begins anew fills no disk. An input
    beside its batch counts once."""
    openai, data = client(door, "middle"), of_size(25_000)
    file = upload(openai, data)
    batch = openai.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"}
    )
    assert kept(door, "middle") == (1, len(data))
    openai.files.delete(file.id)
    assert kept(door, "middle") == (0, len(data))
    with pytest.raises(RateLimitError) as refused:
        upload(openai, data)
    assert refused.value.code == "quota_exceeded"
    door.start("workers")
    door.start("offline")
    done = ended(openai, batch)
    for output in filter(None, (done.output_file_id, done.error_file_id)):
        openai.files.delete(output)
    assert kept(door, "middle") == (0, 0)
    openai.files.delete(upload(openai, data).id)


async def begun(wire: RedisClient, file_id: str, size: int) -> BatchLease:
    """A batch made of this file, in somebody's hands."""
    batches = Batches(wire)
    batch = batch_record(id=batches.new_id(TENANT), input_file=file_id)
    await batches.create(batch, "digest", None, size)
    turns = {name: turn for name, turn, _ in await batches.due(10)}
    return await batches.hold(batch.id, turns[batch.id])


async def a_file(wire: RedisClient, size: int) -> StoredFile:
    now_ms, file_id = await wire.now_ms(), Files(wire).new_id(TENANT)
    times = {"created_ms": now_ms, "expires_ms": now_ms + 3_600_000}
    return StoredFile(id=file_id, tenant=TENANT, name="f", size=size, purpose="batch", **times)


async def test_an_input_is_counted_once_and_for_as_long_as_any_batch_has_it(wire: RedisClient) -> None:
    """Two batches of one file that is deleted, and one of a file that is gone before the batch is there."""
    files, batches, quotas = Files(wire), Batches(wire), Quotas(wire)
    file = await a_file(wire, 9000)
    await files.put(file)
    first, second = await begun(wire, file.id, 9000), await begun(wire, file.id, 9000)
    await files.forget(file.id, TENANT)
    await batches.save(first, BatchState.COMPLETED, BatchProgress(), keep_s=60)
    assert await quotas.file_bytes(TENANT) == 9000
    late = await begun(wire, files.new_id(TENANT), 7000)
    assert await quotas.file_bytes(TENANT) == 16_000
    await batches.save(second, BatchState.FAILED, BatchProgress(), keep_s=60)
    assert await quotas.file_bytes(TENANT) == 7000
    await batches.save(late, BatchState.CANCELLED, BatchProgress(), keep_s=60)
    assert await quotas.file_bytes(TENANT) == 0
    left = [key for kind in ("sizes", "readers") for key in await wire.redis.keys(f"*{kind}:*")]
    assert left == []


async def test_a_batch_of_a_tenant_whose_quota_is_full_is_refused(wire: RedisClient) -> None:
    """It would add its output; one byte of room is enough to begin, beside an input that does not count yet."""
    file, batches = await a_file(wire, 9000), Batches(wire)
    await Files(wire).put(file)
    batch = batch_record(id=batches.new_id(TENANT), input_file=file.id)
    with pytest.raises(QuotaExceeded) as refused:
        await batches.create(batch, "digest", 9000)
    assert (refused.value.name, refused.value.used, refused.value.limit) == ("file_bytes", 9000, 9000)
    with pytest.raises(UnknownBatch):
        await batches.get(batch.id, TENANT)
    assert (await batches.create(batch, "digest", 9001)).batch == batch
    other = batch_record(id=batches.new_id(TENANT), input_file=Files(wire).new_id(TENANT))
    with pytest.raises(QuotaExceeded):
        await batches.create(other, "digest", 13_999, 5000)
    assert (await batches.create(other, "digest", 14_000, 5000)).batch == other


async def test_an_input_of_a_lost_batch_is_not_counted_for_ever(wire: RedisClient) -> None:
    """Its record is gone from the store: what it held is looked at again when that is due."""
    files, quotas = Files(wire), Quotas(wire)
    file = await a_file(wire, 9000)
    await files.put(file)
    hold = await begun(wire, file.id, 9000)
    await files.forget(file.id, TENANT)
    await wire.redis.delete(partition_key(0, "batch", hold.batch.id))
    ((member, due),) = await wire.redis.zrange(partition_key(0, "expiring"), 0, -1, withscores=True)
    assert 0 < due - await wire.now_ms() <= 86_400_000 and await quotas.file_bytes(TENANT) == 9000
    await wire.redis.zadd(partition_key(0, "expiring"), {member: 1})
    ((file_id, tenant),) = await files.expired(10)
    await files.forget(file_id, tenant)
    assert await quotas.file_bytes(TENANT) == 0 and await files.expired(10) == []


# --- while they come -------------------------------------------------------------------------------------------------


def head(key: str, length: int) -> bytes:
    return (
        f"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


PARTS = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
)
CLOSING = b"\r\n--b--\r\n"


def answer(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    with closing(http.client.HTTPResponse(connection)) as response:
        response.begin()
        return response.status, json.loads(response.read())


def connected(house: House) -> closing[socket.socket]:
    return closing(socket.create_connection(("127.0.0.1", house.port), timeout=30))


def test_uploads_that_come_at_once_share_what_is_left(door: House) -> None:
    """What is on the disk already is taken off, also while it is not known yet whose file it becomes."""
    size, incoming = 1_400_000, door.folder / ".penstock/files/incoming"
    with connected(door) as first:
        first.sendall(head("large", len(PARTS) + size + len(CLOSING)) + PARTS + b"x" * size)
        eventually(lambda: sum(path.stat().st_size for path in incoming.iterdir()) > 1_000_000, FileNotFoundError)
        with connected(door) as second:
            second.sendall(head("large", len(PARTS) + size + len(CLOSING)))
            status, body = answer(second)
        assert (status, body["error"]["code"], body["error"]["param"]) == (429, "quota_exceeded", "file")
        first.sendall(CLOSING)
        status, file = answer(first)
    assert (status, file["bytes"], kept(door, "large")) == (200, size, (1, size))
    openai = client(door, "large")
    openai.files.delete(file["id"])
    openai.files.delete(upload(openai, b"x" * size).id)
    assert list(incoming.iterdir()) == [], "and nothing of it is counted as coming any more"


def test_an_upload_whose_answer_was_lost_leaves_nothing(tmp_path: Path) -> None:
    """The client is told 503, and the store has the file: when it answers again record, bytes and count are gone."""
    (tmp_path / "penstock.toml").write_text(SETTINGS)
    with (
        redis_process(tmp_path, None, "--appendonly", "yes") as url,
        store_cut(url) as cut,
        House(cut.url, tmp_path) as house,
    ):
        house.start_api()
        headers = {"Authorization": "Bearer middle", "Content-Type": "multipart/form-data; boundary=b"}
        eventually(lambda: house.request("GET", "/v1/files", headers=headers)[0] == 200)
        form = PARTS.replace(b'"f"', b'"told-by-this"') + b"x" * 20_000 + CLOSING
        cut.cut_when_asked(b"told-by-this")
        assert house.request("POST", "/v1/files", form, headers)[0] == 503
        with Redis.from_url(url) as store:
            assert store.zcard(partition_key(0, "files", "middle")) == 1
            cut.mend()
            eventually(lambda: store.zcard(partition_key(0, "files", "middle")) == 0)
            eventually(lambda: list((tmp_path / ".penstock/files/files").iterdir()) == [])
        assert kept(house, "middle") == (0, 0)


# --- many ------------------------------------------------------------------------------------------------------------


def test_small_files_are_bounded_too(door: House) -> None:
    """Each counts as what it costs at least, so the quota bounds their number. The bytes of one more would fit: it is
    refused when it lies on the disk already, and leaves nothing there."""
    openai = client(door, "small")
    files = [upload(openai, b"{}\n") for _ in range(3)]
    assert kept(door, "small") == (3, 3 * LEAST_FILE)
    there = on_disk(door)
    with pytest.raises(RateLimitError) as refused:
        upload(openai, b"{}\n")
    assert refused.value.code == "quota_exceeded" and on_disk(door) == there
    for file in files:
        openai.files.delete(file.id)
    assert kept(door, "small") == (0, 0)
