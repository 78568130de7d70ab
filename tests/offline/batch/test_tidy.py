"""Files and the store: what the store has forgotten is quarantined, and nothing is touched by a store of another
deployment."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from batching import client, jsonl, line
from house import House, eventually, redis_process
from openai import OpenAI
from redis import Redis

from offline.batch.desk import BatchRunner
from offline.batch.lines import BatchTools
from offline.batch.turn import TurnContext
from streaming.batches.file_store import DAY_S, ORPHAN_AGE_S, FileStore
from streaming.batches.files import Files, StoredFile
from streaming.jobs.quotas import Quotas
from streaming.keys import fleet_key, partition_key
from streaming.redis.client import RedisClient
from streaming.settings import BatchSettings
from streaming.store.identity import disagreement, enter_store, identify
from streaming.store.memory import Headroom
from streaming.store.monitor import StoreMonitor
from telemetry.metrics import Metrics

pytestmark = pytest.mark.slow

KEEP_S = 90 * DAY_S
LONG_AGO = 2 * ORPHAN_AGE_S


def age(path: Path, seconds: float = LONG_AGO) -> Path:
    """As if nobody had touched it for so long."""
    then = time.time() - seconds
    os.utime(path, (then, then))
    return path


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    metrics = Metrics.start("", "offline")
    yield metrics
    metrics.close()


@pytest.fixture
async def desk(wire: RedisClient, metrics: Metrics, tmp_path: Path) -> BatchRunner:
    """A store and an empty folder that have found each other."""
    await enter_store(wire)
    tools = BatchTools(wire, Headroom(wire), StoreMonitor(wire), (), BatchSettings(), 64)
    shelf = FileStore(tmp_path / "files")
    shelf.prepare()
    desk = BatchRunner(TurnContext(tools, shelf, metrics, 3600, 1.0), KEEP_S)
    await desk.tidy()
    return desk


@pytest.fixture
def shelf(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "files")


async def kept(wire: RedisClient, shelf: FileStore, *, lives_ms: int = 3_600_000) -> StoredFile:
    """A file as it is uploaded, long ago."""
    files, now_ms = Files(wire), await wire.now_ms()
    incoming = shelf.open_incoming()
    incoming.write(b"{}\n")
    file = StoredFile(
        id=files.new_id("t"), tenant="t", name="in.jsonl", size=3, purpose="batch", created_ms=now_ms,
        expires_ms=now_ms + lives_ms,
    )  # fmt: skip
    shelf.keep(incoming, file.id)
    await files.put(file)
    age(shelf.path(file.id))
    return file


def quarantined(shelf: FileStore) -> list[str]:
    return sorted(path.name for path in (shelf.folder / "quarantine").glob("*/*/*"))


async def test_what_the_store_forgot_is_quarantined(wire: RedisClient, desk: BatchRunner, shelf: FileStore) -> None:
    """As after a restore to an earlier moment: files and batches without a record; what has one stays in place."""
    known, forgotten, batch = await kept(wire, shelf), await kept(wire, shelf), "batch_00" + 30 * "a"
    work = shelf.work(batch)
    work.mkdir()
    (work / "1.results").write_bytes(b"answers")
    age(work)
    await wire.redis.delete(partition_key(0, "file", forgotten.id))
    await desk.tidy()
    assert shelf.path(known.id).exists() and not shelf.path(forgotten.id).exists() and not work.exists()
    assert quarantined(shelf) == sorted([batch, forgotten.id])
    (place,) = (shelf.folder / "quarantine").glob(f"*/files/{forgotten.id}")
    assert place.read_bytes() == b"{}\n"
    assert [path.read_bytes() for path in (shelf.folder / "quarantine").glob("*/batches/*/1.results")] == [b"answers"]


async def test_files_whose_records_are_lost_end_with_their_time(
    wire: RedisClient, desk: BatchRunner, shelf: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot be read and one that is gone: nobody is charged for them for ever, and however many there are,
    they keep no other from being forgotten."""
    monkeypatch.setattr("offline.batch.desk.MAX_EXPIRED", 2)
    files = [await kept(wire, shelf, lives_ms=lives_ms) for lives_ms in (1, 2, 3, 4)]
    await wire.redis.set(partition_key(0, "file", files[0].id), b"\xc1")
    for file in files[1:3]:
        await wire.redis.delete(partition_key(0, "file", file.id))
    quotas = Quotas(wire)
    assert (await quotas.usage("t")).files == 4 and await quotas.file_bytes("t") > 0
    while await wire.now_ms() <= max(file.expires_ms for file in files):
        await asyncio.sleep(0.001)
    await desk.tidy()
    usage = await quotas.usage("t")
    assert (usage.files, usage.file_bytes) == (0, 0) and await Files(wire).expired(10) == []
    assert not any(shelf.path(file.id).exists() for file in files) and quarantined(shelf) == []


async def test_notes_of_ended_batches_end_with_their_records(desk: BatchRunner, shelf: FileStore) -> None:
    """A note restores an end that the store forgot: it is needed for as long as the store would have kept that."""
    for name, seconds in (("batch_old", 3700.0), ("batch_new", 3500.0)):
        shelf.note(name, 1, b"")
        age(next(shelf.folder.rglob(f"{name}.*")), seconds)
    await desk.tidy()
    assert (shelf.notes("batch_old"), shelf.notes("batch_new")) == ([], [b""])


async def test_what_is_young_is_left_alone(wire: RedisClient, desk: BatchRunner, shelf: FileStore) -> None:
    """Its record may be on its way: a file that is being uploaded, a batch that is being created."""
    file, work = await kept(wire, shelf), shelf.work("batch_00" + 30 * "b")
    work.mkdir()
    age(shelf.path(file.id), 0)
    await wire.redis.delete(partition_key(0, "file", file.id))
    await desk.tidy()
    assert shelf.path(file.id).exists() and work.exists() and quarantined(shelf) == []
    age(work)
    await desk.tidy()
    assert not work.exists() and quarantined(shelf) == [work.name]


async def test_an_emptied_store_touches_nothing(wire: RedisClient, desk: BatchRunner, shelf: FileStore) -> None:
    """Not even what is expired or half uploaded, until a person adopts the folder; then it is quarantined."""
    file, batch = await kept(wire, shelf), shelf.work("batch_00" + 30 * "b")
    batch.mkdir()
    age(batch)
    half = shelf.open_incoming()
    half.write(b"half")
    half.close()
    age(half.path)
    await wire.redis.flushall()
    await desk.tidy()
    late = await kept(wire, shelf, lives_ms=1)
    await desk.tidy()
    now = await identify(wire)  # as the monitor of a running process does
    await desk.tidy()
    assert all(path.exists() for path in (shelf.path(file.id), shelf.path(late.id), batch, half.path))
    assert "store adopt" in disagreement(now.deployment, shelf.owner, shelf.folder)
    shelf.adopt(now.deployment)
    await desk.tidy()
    assert quarantined(shelf) == sorted([batch.name, file.id])
    assert not any(path.exists() for path in (shelf.path(late.id), half.path))


async def test_a_store_that_is_emptied_while_it_is_asked(
    wire: RedisClient, desk: BatchRunner, shelf: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knew the deployment, and then no file any more."""
    file, ask = await kept(wire, shelf), Files.known

    async def known(self: Files, ids: list[str]) -> set[str]:
        await wire.redis.flushall()
        return await ask(self, ids)

    monkeypatch.setattr(Files, "known", known)
    await desk.tidy()
    assert shelf.path(file.id).exists()


async def test_a_folder_with_files_of_nobody_is_not_taken(
    wire: RedisClient, desk: BatchRunner, shelf: FileStore
) -> None:
    """As one of an earlier version is; an empty one is taken by the first that comes, and by nobody after that."""
    file = await kept(wire, shelf)
    await wire.redis.delete(partition_key(0, "file", file.id))
    (shelf.folder / "deployment").unlink()
    await desk.tidy()
    assert shelf.owner == "" and shelf.path(file.id).exists()
    empty = FileStore(shelf.folder / "other")
    assert [empty.claim("dep_a"), empty.claim("dep_b"), empty.owner] == ["dep_a"] * 3


def test_the_quarantine_ends(shelf: FileStore) -> None:
    """A day's at once, when all of it has been there for long enough; other people's folders stay."""
    shelf.prepare()
    now = time.time()
    for days, name in ((91.5, "old"), (1, "young"), (1, "young")):
        shelf.path(name).write_bytes(name.encode())
        shelf.set_aside("files", name, now - days * DAY_S)
    (shelf.folder / "quarantine" / "mine").mkdir()
    assert [number for _, number in shelf.quarantined()] == [1, 2]
    assert len(shelf.end_quarantine(KEEP_S, now)) == 1
    assert [number for _, number in shelf.quarantined()] == [2] and (shelf.folder / "quarantine" / "mine").exists()
    names = quarantined(shelf)
    assert len(names) == 2 and names[0] == "young" and names[1].startswith("young.")


def test_the_quarantine_keeps_the_end_of_a_day_for_as_long_as_its_beginning(shelf: FileStore) -> None:
    """What is set aside in a day's last second is kept for all of the time that is documented."""
    shelf.prepare()
    midnight = datetime(2026, 3, 2, tzinfo=UTC).timestamp()
    shelf.path("late").write_bytes(b"x")
    shelf.set_aside("files", "late", midnight - 1)
    assert [day for day, _ in shelf.quarantined()] == ["2026-03-01"]
    assert shelf.end_quarantine(KEEP_S, midnight + KEEP_S - 1) == [] and quarantined(shelf) == ["late"]
    assert shelf.end_quarantine(KEEP_S, midnight + KEEP_S + 1) == ["2026-03-01"] and quarantined(shelf) == []


def test_what_lies_in_the_quarantine_ends_no_emptying(shelf: FileStore, tmp_path: Path) -> None:
    """Plain files beside the days and in one, even one named as a day is, and a day that cannot be removed."""
    shelf.prepare()
    shelf.path("old").write_bytes(b"x")
    now = time.time()
    shelf.set_aside("files", "old", now - 100 * DAY_S)
    folder = shelf.folder / "quarantine"
    (old,) = folder.iterdir()
    (old / "note").write_text("mine")
    (folder / ".DS_Store").write_text("x")
    (folder / "2001-01-01").write_text("no folder")
    (tmp_path / "elsewhere").mkdir()
    (folder / "2001-01-02").symlink_to(tmp_path / "elsewhere")  # nothing removes a folder through a link
    assert dict(shelf.quarantined())[old.name] == 1
    assert shelf.end_quarantine(KEEP_S, now) == [old.name] and not old.exists()
    assert (folder / "2001-01-01").exists() and (tmp_path / "elsewhere").exists()


# --- as people meet it -----------------------------------------------------------------------------------------------


def upload(openai: OpenAI) -> str:
    return openai.files.create(file=("lines.jsonl", jsonl([line(1)])), purpose="batch").id


def test_a_wrong_redis_url_destroys_nothing(empty_house: House, tmp_path: Path) -> None:
    """Files uploaded, then the offline process is given another, empty Redis; then the right one again."""
    house = empty_house
    house.start_api()
    file_id = upload(client(house))
    folder = house.folder / ".penstock" / "files"
    path = age(folder / "files" / file_id)
    other = tmp_path / "other"
    other.mkdir()
    with redis_process(other, None, "--appendonly", "yes") as url:
        wrong = house.start("offline", PENSTOCK_REDIS_URL=url)
        eventually(lambda: "penstock store adopt" in house.log("offline"))
        assert path.exists()
        wrong.terminate()
        assert wrong.wait(60) == 0
    house.start("offline", "--id", "right")
    eventually(lambda: any(b"right" in name for name in names_of(house.redis_url)))
    assert path.exists() and client(house).files.content(file_id).read() == jsonl([line(1)])


def names_of(url: str) -> list[bytes]:
    with Redis.from_url(url) as redis:
        found = redis.keys(fleet_key("proc", "offline:*"))
        return [value for value in redis.mget(found) if value] if found else []
