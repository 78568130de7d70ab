"""A store that is restored to an earlier moment, and batches that have ended since."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from batching import begin, client, content, ended, line, nothing_left_over
from house import House, eventually, redis_process

from offline.batch.turn import Ending, noted_ending
from streaming.batches.file_store import FileStore
from streaming.batches.store import BatchProgress, BatchState, StoredFile

pytestmark = pytest.mark.slow

OPTIONS = ("--appendonly", "yes", "--appendfsync", "always")
LINES = 60


@contextmanager
def house_on(data: Path, folder: Path) -> Iterator[House]:
    """A house without a process, on a store whose files are kept."""
    with redis_process(data, None, *OPTIONS) as url:
        house = House(url, folder)
        house.environ |= {"PENSTOCK_SIM_SLOTS": "8", "PENSTOCK_SIM_STEP_MS": "10"}
        try:
            yield house
        finally:
            house.close()


def copied(data: Path, copy: Path) -> bool:
    """A copy of the store's files; False if one went away meanwhile."""
    try:
        shutil.copytree(data, copy)
    except shutil.Error:
        shutil.rmtree(copy)
        return False
    return True


def test_a_batch_that_had_ended_ends_again_as_it_did(tmp_path: Path) -> None:
    """Completed, with the same output, though the store knows it as begun and the tidying has set the files aside;
    cancelled as cancelled. One whose end is not on disk fails and says why: nobody has cancelled it."""
    data, copy = tmp_path / "redis", tmp_path / "copy"
    data.mkdir()
    lines = [line(number, max_tokens=30) for number in range(LINES)]
    with house_on(data, tmp_path) as house:
        house.start_all("workers", "offline")
        openai = client(house)
        batches = [begin(openai, lines) for _ in range(4)]
        for batch in batches:
            eventually(lambda b=batch: openai.batches.retrieve(b.id).status == "in_progress")  # type: ignore[misc]
        while not copied(data, copy):
            pass
        openai.batches.cancel(batches[1].id)
        before = [ended(openai, batch) for batch in batches]
        assert [batch.status for batch in before] == ["completed", "cancelled", "completed", "completed"]
        output = content(openai, before[0].output_file_id)
        nothing_left_over(tmp_path)
    file_store = FileStore(tmp_path / ".penstock" / "files")
    file_store.set_aside("files", before[0].output_file_id or "")
    for path in (file_store.folder / "ended").iterdir():
        if path.name.startswith((batches[2].id, batches[3].id)):
            path.unlink()
    shutil.rmtree(data)
    shutil.copytree(copy, data)
    with house_on(data, tmp_path) as house:
        house.start_api()
        openai = client(house)
        begun = [eventually(lambda b=batch: openai.batches.retrieve(b.id), Exception) for batch in batches]  # type: ignore[misc]
        assert all(batch.status == "in_progress" for batch in begun)  # type: ignore[attr-defined]
        openai.batches.cancel(batches[3].id)
        house.start("offline")
        after = [ended(openai, batch) for batch in batches]
        assert [batch.status for batch in after] == ["completed", "cancelled", "failed", "cancelled"]
        for now, then in zip(after[:2], before[:2], strict=True):
            same = ("request_counts", "output_file_id", "error_file_id", "usage", "completed_at", "cancelled_at")
            assert [getattr(now, name) for name in same] == [getattr(then, name) for name in same]
            assert now.errors is None
        assert content(openai, after[0].output_file_id) == output and len(output) == LINES
        for lost in after[2:]:
            assert lost.errors and lost.errors.data
            (fault,) = lost.errors.data
            assert fault.code == "work_lost" and "restored to an earlier moment" in (fault.message or "")


@pytest.fixture
def file_store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "files")


def a_file(file_store: FileStore, name: str) -> StoredFile:
    incoming = file_store.open_incoming()
    file_store.keep(incoming, name)
    return StoredFile(id=name, tenant="t", name=name, size=0, purpose="batch_output", created_ms=1, expires_ms=2)


def test_the_last_note_whose_files_are_there_counts(file_store: FileStore) -> None:
    """A turn that was overtaken may have left one whose files it has removed; a half-readable one is none."""
    file, other = a_file(file_store, "file-a"), a_file(file_store, "file-b")
    assert noted_ending(file_store, "batch_a") is None
    first = Ending(BatchState.COMPLETED, BatchProgress(total=3, output_file="file-a"), (file,))
    file_store.note("batch_a", 9, msgspec.json.encode(first))
    later = Ending(BatchState.EXPIRED, BatchProgress(total=3), (other,))
    file_store.note("batch_a", 10, msgspec.json.encode(later))
    file_store.note("batch_a", 11, b"{")
    file_store.note("batch_b", 12, b"{}")
    last = noted_ending(file_store, "batch_a")
    assert last is not None and last.state is BatchState.EXPIRED
    file_store.remove("file-b")
    assert noted_ending(file_store, "batch_a") == first
    file_store.remove("file-a")
    assert noted_ending(file_store, "batch_a") is None
