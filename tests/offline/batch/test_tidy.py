"""Files and the store: what the store has forgotten is quarantined, and nothing is touched by a store of another
deployment."""

from __future__ import annotations

import asyncio
import os
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from batching import tools_of

from offline.batch.batch_runner import BatchRunner
from streaming.batches.file_store import DAY_S, ORPHAN_AGE_S, FileStore
from streaming.batches.store import Files, StoredFile
from streaming.jobs.quotas import Quotas
from streaming.keys import partition_key
from streaming.redis.client import RedisClient
from streaming.store.identity import disagreement, enter_store, identify

pytestmark = pytest.mark.slow

KEEP_S = 90 * DAY_S
LONG_AGO = 2 * ORPHAN_AGE_S


def age(path: Path, seconds: float = LONG_AGO) -> Path:
    """As if nobody had touched it for so long."""
    then = time.time() - seconds
    os.utime(path, (then, then))
    return path


@pytest.fixture
async def runner(wire: RedisClient, file_store: FileStore) -> BatchRunner:
    """A store and an empty folder that have found each other."""
    await enter_store(wire)
    file_store.prepare()
    runner = BatchRunner(tools_of(wire, file_store.folder), KEEP_S)
    await runner.tidy()
    return runner


@pytest.fixture
def file_store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "files")


async def kept(wire: RedisClient, file_store: FileStore, *, lives_ms: int = 3_600_000) -> StoredFile:
    """A file as it is uploaded, long ago."""
    files, now_ms = Files(wire), await wire.now_ms()
    incoming = file_store.open_incoming()
    incoming.write(b"{}\n")
    file = StoredFile(
        id=files.new_id("t"), tenant="t", name="in.jsonl", size=3, purpose="batch", created_ms=now_ms,
        expires_ms=now_ms + lives_ms,
    )  # fmt: skip
    file_store.keep(incoming, file.id)
    await files.put(file)
    age(file_store.path(file.id))
    return file


def quarantined(file_store: FileStore) -> list[str]:
    return sorted(path.name for path in (file_store.folder / "quarantine").glob("*/*/*"))


async def test_what_the_store_forgot_is_quarantined(
    wire: RedisClient, runner: BatchRunner, file_store: FileStore
) -> None:
    """As after a restore to an earlier moment: files and batches without a record; what has one stays in place."""
    known, forgotten, batch = await kept(wire, file_store), await kept(wire, file_store), "batch_00" + 30 * "a"
    work = file_store.work(batch)
    work.mkdir()
    (work / "1.results").write_bytes(b"answers")
    age(work)
    await wire.redis.delete(partition_key(0, "file", forgotten.id))
    await runner.tidy()
    assert file_store.path(known.id).exists() and not file_store.path(forgotten.id).exists() and not work.exists()
    assert quarantined(file_store) == sorted([batch, forgotten.id])
    quarantine = file_store.folder / "quarantine"
    for pattern, content in ((f"*/files/{forgotten.id}", b"{}\n"), (f"*/batches/{batch}/1.results", b"answers")):
        assert [path.read_bytes() for path in quarantine.glob(pattern)] == [content]


async def test_files_whose_records_are_lost_end_with_their_time(
    wire: RedisClient, runner: BatchRunner, file_store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot be read and one that is gone: nobody is charged for them for ever, and however many there are,
    they keep no other from being forgotten."""
    monkeypatch.setattr("offline.batch.batch_runner.MAX_EXPIRED", 2)
    files = [await kept(wire, file_store, lives_ms=lives_ms) for lives_ms in (1, 2, 3, 4)]
    await wire.redis.set(partition_key(0, "file", files[0].id), b"\xc1")
    for file in files[1:3]:
        await wire.redis.delete(partition_key(0, "file", file.id))
    quotas = Quotas(wire)
    assert (await quotas.usage("t")).files == 4 and await quotas.file_bytes("t") > 0
    while await wire.now_ms() <= max(file.expires_ms for file in files):
        await asyncio.sleep(0.001)
    await runner.tidy()
    usage = await quotas.usage("t")
    assert (usage.files, usage.file_bytes) == (0, 0) and await Files(wire).expired(10) == []
    assert not any(file_store.path(file.id).exists() for file in files) and quarantined(file_store) == []


async def test_notes_of_ended_batches_end_with_their_records(runner: BatchRunner, file_store: FileStore) -> None:
    """A note restores an end that the store forgot: it is needed for as long as the store would have kept that."""
    for name, seconds in (("batch_old", 3700.0), ("batch_new", 3500.0)):
        file_store.note(name, 1, b"")
        age(next(file_store.folder.rglob(f"{name}.*")), seconds)
    await runner.tidy()
    assert (file_store.notes("batch_old"), file_store.notes("batch_new")) == ([], [b""])


async def test_what_is_young_is_left_alone(wire: RedisClient, runner: BatchRunner, file_store: FileStore) -> None:
    """Its record may be on its way: a file that is being uploaded, a batch that is being created."""
    file, work = await kept(wire, file_store), file_store.work("batch_00" + 30 * "b")
    work.mkdir()
    age(file_store.path(file.id), 0)
    await wire.redis.delete(partition_key(0, "file", file.id))
    await runner.tidy()
    assert file_store.path(file.id).exists() and work.exists() and quarantined(file_store) == []
    age(work)
    await runner.tidy()
    assert not work.exists() and quarantined(file_store) == [work.name]


async def test_an_emptied_store_touches_nothing(
    wire: RedisClient, runner: BatchRunner, file_store: FileStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does that of a wrong URL: not even what is expired or half uploaded, until a person adopts the folder, as the
    log says; then it is quarantined."""
    file, batch = await kept(wire, file_store), file_store.work("batch_00" + 30 * "b")
    batch.mkdir()
    age(batch)
    half = file_store.open_incoming()
    half.write(b"half")
    half.close()
    age(half.path)
    await wire.redis.flushall()
    await runner.tidy()
    late = await kept(wire, file_store, lives_ms=1)
    await runner.tidy()
    now = await identify(wire)  # as the monitor of a running process does
    await runner.tidy()
    assert all(path.exists() for path in (file_store.path(file.id), file_store.path(late.id), batch, half.path))
    await runner.tidy()
    (said,) = [message for message in caplog.messages if "store adopt" in message]
    assert disagreement(now.deployment, file_store.owner, file_store.folder) in said
    file_store.adopt(now.deployment)
    await runner.tidy()
    assert quarantined(file_store) == sorted([batch.name, file.id])
    assert not any(path.exists() for path in (file_store.path(late.id), half.path))


async def test_a_store_that_is_emptied_while_it_is_asked(
    wire: RedisClient, runner: BatchRunner, file_store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knew the deployment, and then no file any more."""
    file, ask = await kept(wire, file_store), Files.known

    async def known(self: Files, ids: list[str]) -> set[str]:
        await wire.redis.flushall()
        return await ask(self, ids)

    monkeypatch.setattr(Files, "known", known)
    await runner.tidy()
    assert file_store.path(file.id).exists()


async def test_a_folder_with_files_of_nobody_is_not_taken(
    wire: RedisClient, runner: BatchRunner, file_store: FileStore
) -> None:
    """As one of an earlier version is; an empty one is taken by the first that comes, and by nobody after that."""
    file = await kept(wire, file_store)
    await wire.redis.delete(partition_key(0, "file", file.id))
    (file_store.folder / "deployment").unlink()
    await runner.tidy()
    assert file_store.owner == "" and file_store.path(file.id).exists()
    empty = FileStore(file_store.folder / "other")
    assert [empty.claim("dep_a"), empty.claim("dep_b"), empty.owner] == ["dep_a"] * 3


def test_the_quarantine_keeps_the_end_of_a_day_for_as_long_as_its_beginning(file_store: FileStore) -> None:
    """What is set aside in a day's last second is kept for all of the time that is documented."""
    file_store.prepare()
    midnight = datetime(2026, 3, 2, tzinfo=UTC).timestamp()
    file_store.path("late").write_bytes(b"x")
    file_store.set_aside("files", "late", midnight - 1)
    assert [day.name for day in (file_store.folder / "quarantine").iterdir()] == ["2026-03-01"]
    assert file_store.end_quarantine(KEEP_S, midnight + KEEP_S - 1) == [] and quarantined(file_store) == ["late"]
    assert file_store.end_quarantine(KEEP_S, midnight + KEEP_S + 1) == ["2026-03-01"] and quarantined(file_store) == []


def test_the_quarantine_ends_beside_what_others_put_there(file_store: FileStore, tmp_path: Path) -> None:
    """A day's at once, when all of it has been there for long enough. Younger days and other people's folders stay, and
    nothing stops it: plain files beside the days and in one, even one named as a day is, and a day that is a link."""
    file_store.prepare()
    now = time.time()
    for days, name in ((100, "old"), (1, "young"), (1, "young")):
        file_store.path(name).write_bytes(name.encode())
        file_store.set_aside("files", name, now - days * DAY_S)
    assert file_store.quarantined() == 3
    folder = file_store.folder / "quarantine"
    old = min(folder.iterdir())
    (old / "note").write_text("mine")
    (folder / "mine").mkdir()
    (folder / ".DS_Store").write_text("x")
    (folder / "2001-01-01").write_text("no folder")
    (tmp_path / "elsewhere").mkdir()
    (folder / "2001-01-02").symlink_to(tmp_path / "elsewhere")  # nothing removes a folder through a link
    assert file_store.quarantined() == 3
    assert file_store.end_quarantine(KEEP_S, now) == [old.name] and not old.exists()
    assert all(path.exists() for path in (folder / "mine", folder / "2001-01-01", tmp_path / "elsewhere"))
    names = quarantined(file_store)
    assert len(names) == 2 and names[0] == "young" and names[1].startswith("young.")
