"""/v1/files with the official client: what is uploaded is what is read, within limits, and nobody else's."""

from __future__ import annotations

import asyncio
import http.client
from pathlib import Path
from typing import Literal

import pytest
from batching import client, jsonl, line
from house import House, eventually, key_rows, module_house
from openai import BadRequestError, NotFoundError, OpenAI
from redis import Redis

from api.files import RECORDS_PER_CALL
from streaming.batches.file_store import FileStore
from streaming.batches.store import Files, StoredFile
from streaming.keys import fleet_key
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings

LIMIT = 64 * 1024


door = module_house(settings=f"[files]\nsize_limit = {LIMIT}\n[batch]\nmax_lines = 50\n" + key_rows(ann="", bob=""))
"""An API process with two tenants and a small limit; nothing behind it."""


@pytest.fixture
def ann(door: House) -> OpenAI:
    return client(door, "ann")


def on_disk(door: House) -> list[str]:
    """Names of all there is."""
    folder = door.folder / ".penstock" / "files"
    return sorted(path.name for part in ("files", "incoming") for path in (folder / part).glob("*"))


def test_what_is_uploaded_is_what_is_read(door: House, ann: OpenAI, tmp_path: Path) -> None:
    """Every field of the file object; the bytes, whole and in part; gone after delete."""
    data = jsonl([line(number) for number in range(20)]) + "\u2028\x85é".encode()
    path = tmp_path / "in put.jsonl"
    path.write_bytes(data)
    with path.open("rb") as source:
        file = ann.files.create(file=source, purpose="batch")
    assert (file.object, file.bytes, file.filename, file.purpose, file.status) == (
        "file", len(data), "in put.jsonl", "batch", "processed",
    )  # fmt: skip
    assert file.expires_at is not None and file.expires_at - file.created_at == 30 * 86_400
    assert ann.files.retrieve(file.id) == file
    assert ann.files.wait_for_processing(file.id) == file
    assert ann.files.content(file.id).content == data
    status, headers, part = door.request(
        "GET", f"/v1/files/{file.id}/content", headers={"Authorization": "Bearer ann", "Range": "bytes=3-7"}
    )
    assert (status, part, headers["x-content-type-options"]) == (206, data[3:8], "nosniff")
    assert headers["content-type"] == "application/octet-stream"
    assert on_disk(door) == [file.id]
    assert ann.files.delete(file.id).deleted
    assert on_disk(door) == []
    for call in (ann.files.retrieve, ann.files.content, ann.files.delete):
        with pytest.raises(NotFoundError):
            call(file.id)


def test_expiry_is_as_asked(ann: OpenAI) -> None:
    """Within OpenAI's bounds; anything else names the field."""
    file = ann.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200})
    assert file.expires_at is not None and file.expires_at - file.created_at == 7200
    ann.files.delete(file.id)
    with pytest.raises(BadRequestError, match="seconds must be a whole number from 3600"):
        ann.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 5})


def test_what_is_wrong_is_refused_and_leaves_nothing(door: House, ann: OpenAI) -> None:
    """Purpose, lines, size; size also while it comes without a length."""
    with pytest.raises(BadRequestError, match="purpose must be 'batch'"):
        ann.files.create(file=b"x", purpose="fine-tune")
    with pytest.raises(BadRequestError, match="more than 50 lines"):
        ann.files.create(file=b"{}\n" * 51, purpose="batch")
    assert _raw(door, b"x" * (LIMIT + 1), chunked=False) == 413
    assert _raw(door, b"x" * (LIMIT + 1), chunked=True) == 413
    assert _raw(door, b"x" * LIMIT, chunked=True) == 200
    (kept,) = ann.files.list()
    ann.files.delete(kept.id)
    assert on_disk(door) == []


def _raw(door: House, data: bytes, *, chunked: bool) -> int:
    """The status of an upload, sent with a length or in chunks."""
    body = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + data + b"\r\n--b--\r\n"
    )
    connection = http.client.HTTPConnection("127.0.0.1", door.port, timeout=30)
    headers = {"Authorization": "Bearer ann", "Content-Type": "multipart/form-data; boundary=b"}
    try:
        parts = iter([body[at : at + 1000] for at in range(0, len(body), 1000)])
        connection.request("POST", "/v1/files", parts if chunked else body, headers, encode_chunked=chunked)
        return connection.getresponse().status
    except (BrokenPipeError, ConnectionResetError):
        return 413  # refused before all of it was sent
    finally:
        connection.close()


def test_the_folder_of_files_says_whose_it_is(door: House, ann: OpenAI) -> None:
    """From the first upload on: a store that was emptied must not take the files of another for its own."""
    file_store = FileStore(door.folder / ".penstock" / "files")
    ann.files.delete(ann.files.create(file=b"{}\n", purpose="batch").id)
    with Redis.from_url(door.redis_url) as store:
        ours = store.hget(fleet_key("store"), "deployment")
    assert ours and file_store.owner == ours.decode()


def test_lists_in_pages_and_orders(ann: OpenAI) -> None:
    """The client's own paging sees each once, newest or oldest first."""
    made = [ann.files.create(file=(f"{number}.jsonl", b"{}\n"), purpose="batch").id for number in range(7)]
    assert ann.files.list(limit=3, after=made[2]).data[0].id == made[1], "else the client pages without end"
    assert [file.id for file in ann.files.list(limit=3)] == made[::-1]
    assert [file.id for file in ann.files.list(limit=2, order="asc")] == made
    assert [file.id for file in ann.files.list(purpose="batch_output")] == []
    with pytest.raises(BadRequestError, match="after names no file"):
        ann.files.list(after="file-" + "0" * 32)
    for name in made:
        ann.files.delete(name)


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_files_that_are_deleted_while_they_are_listed_are_each_seen_once(
    door: House, ann: OpenAI, order: Literal["asc", "desc"]
) -> None:
    """The client's next page names the last file of the page before, which is gone by then. Nobody else's file is a
    cursor, deleted or not."""
    made = [ann.files.create(file=(f"{number}.jsonl", b"{}\n"), purpose="batch").id for number in range(7)]
    seen = []
    for file in ann.files.list(limit=2, order=order):
        seen.append(file.id)
        ann.files.delete(file.id)
    assert seen == made[:: 1 if order == "asc" else -1]
    with pytest.raises(BadRequestError, match="after names no file"):
        client(door, "bob").files.list(after=made[0])


async def test_a_list_goes_on_behind_the_records_of_one_call(door: House, ann: OpenAI) -> None:
    """A page may need more records than are read at once, and so may the files of one purpose."""
    wire = RedisClient.open(RedisSettings(url=door.redis_url))
    files, now_ms = Files(wire), await wire.now_ms()
    made = [
        StoredFile(
            id=files.new_id("ann"), tenant="ann", name="f", size=1,
            purpose="batch" if number in (0, RECORDS_PER_CALL) else "batch_output",
            created_ms=now_ms + number, expires_ms=now_ms + 10**7,
        )
        for number in range(RECORDS_PER_CALL + 1)
    ]  # fmt: skip
    try:
        await asyncio.gather(*(files.put(file) for file in made))
        assert len(ann.files.list().data) == len(made)
        assert [file.id for file in ann.files.list(purpose="batch").data] == [made[-1].id, made[0].id]
        for order in ("desc", "asc"):
            page = ann.files.list(limit=RECORDS_PER_CALL, order=order)  # type: ignore[arg-type]
            assert page.has_more and len(page.data) == RECORDS_PER_CALL, "one call reads as many as the page shows"
        await files.forget(made.pop().id, "ann")
        page = ann.files.list(limit=RECORDS_PER_CALL)
        assert len(page.data) == RECORDS_PER_CALL and not page.has_more
    finally:
        await asyncio.gather(*(files.forget(file.id, "ann") for file in made))
        await wire.close()


@pytest.mark.parametrize("name", ["../../../etc/passwd", "file-../x", "%2e%2e%2fx", "file-" + "0" * 31 + "%00"])
def test_ids_lead_nowhere_else(door: House, name: str) -> None:
    """What is no id of ours is 404, whatever it looks like."""
    assert door.request("GET", f"/v1/files/{name}", headers={"Authorization": "Bearer ann"})[0] == 404


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only where the kernel tells")
def test_a_large_file_stays_out_of_memory(empty_house: House) -> None:
    """40 MB in and out, and the process has grown by less than 32 MiB."""
    empty_house.forks = False
    process, path = empty_house.start_api(), empty_house.folder / "large.jsonl"
    row = jsonl([line(1, "x" * 4000)])
    path.write_bytes(row * (40_000_000 // len(row)))
    openai = client(empty_house)
    openai.files.create(file=b"warm", purpose="batch")
    before = peak(process.pid)
    with path.open("rb") as source:
        stored = openai.files.create(file=source, purpose="batch", timeout=120)
    with openai.files.with_streaming_response.content(stored.id) as answer:
        size = sum(len(chunk) for chunk in answer.iter_bytes(1 << 16))
    assert size == stored.bytes == path.stat().st_size
    assert peak(process.pid) - before < 32 * 1024


def peak(pid: int) -> int:
    """The most memory a process has had, in KiB."""
    found = eventually(lambda: [row for row in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmHWM" in row])
    assert isinstance(found, list)
    return int(found[0].split()[1])
