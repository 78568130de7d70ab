"""When a turn at a batch gives up what is left of its lines, when it ends, and what an overtaken one leaves."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from batching import MODELS, batch_record, jsonl, line, tools_of
from flow import until
from msgspec.structs import replace

from offline.batch import turn as turns
from offline.batch.batch_runner import BatchRunner
from offline.batch.lines import Terms, validate_input
from offline.batch.turn import BatchTurn
from streaming.batches.ledger import PLAN, LineOutcome, Segment
from streaming.batches.store import Batches, BatchLease, BatchProgress, BatchState
from streaming.errors import Fenced
from streaming.jobs.codec import Terminal
from streaming.jobs.job import JobState
from streaming.jobs.lease import Claim, Finish, Lease
from streaming.keys import partition_key
from streaming.redis.client import RedisClient

GOING_ON, CANCELLING = BatchState.IN_PROGRESS, BatchState.CANCELLING
BATCH = batch_record(window="24h")


def a_turn(wire: RedisClient, folder: Path, **lease: Any) -> BatchTurn:
    """At a batch that is held by a lease with these fields."""
    fields: dict[str, Any] = {"batch": BATCH, "epoch": 1, "now_ms": 0, "state": GOING_ON, "progress": BatchProgress()}
    return BatchTurn(tools_of(wire, folder), BatchLease(**fields | lease), asyncio.Event())


@pytest.mark.parametrize(("expires_ms", "now_ms", "state", "why"), [
    (1000, 999, GOING_ON, ""),
    (1000, 1000, GOING_ON, "expired"),
    (1000, 999, CANCELLING, "cancelled"),
    (1000, 1000, CANCELLING, "cancelled"),
    (0, 10**15, GOING_ON, ""),
])  # fmt: skip
async def test_a_batch_is_over_when_its_owner_or_its_window_says_so(
    wire: RedisClient, tmp_path: Path, expires_ms: int, now_ms: int, state: BatchState, why: str
) -> None:
    """From the very millisecond in which its window ends, when no line is put any more; never, without a window."""
    turn = a_turn(wire, tmp_path, expires_ms=expires_ms, now_ms=now_ms, state=state)
    assert turn._stop_reason() == why


class Desk:
    """A batch of two lines, of which the second has its answer, and turns at it."""

    def __init__(self, wire: RedisClient, folder: Path) -> None:
        self.wire, self.batches, self.tools, self.notice = wire, Batches(wire), tools_of(wire, folder, keep_s=10), 0
        self.file_store = self.tools.file_store
        self.batch = replace(BATCH, id=self.batches.new_id("t"), window="none")

    async def open(self) -> None:
        await self.tools.store.require()
        work = self.file_store.work(self.batch.id)
        work.mkdir(parents=True)
        (work / "input").write_bytes(jsonl([line(number) for number in range(2)]))
        segment = Segment(work, 1)
        validate_input(work / "input", Terms(self.batch.endpoint, MODELS, 10), segment).plan.save(work)
        segment.add(1, LineOutcome.DONE, 0, b"{}")
        segment.commit()
        segment.close()
        await self.batches.create(self.batch, "digest")
        ((_, self.notice, _),) = await self.batches.due(1)

    async def turn(self, save_interval_s: float) -> BatchTurn:
        """It has the batch from now on, whoever had it before."""
        await self.wire.redis.hset(partition_key(0, "batch", self.batch.id), "lease", 0)
        hold = await self.batches.hold(self.batch.id, self.notice)
        return BatchTurn(dataclasses.replace(self.tools, save_interval_s=save_interval_s), hold, asyncio.Event())

    async def found(self) -> tuple[BatchState, set[str]]:
        """How the batch stands, and the files it is said to have left."""
        record = await self.batches.get(self.batch.id, "t")
        return record.state, {record.progress.output_file, record.progress.error_file} - {""}

    @property
    def files(self) -> set[str]:
        """Those that are there."""
        return {path.name for path in (self.file_store.folder / "files").iterdir()}


@pytest.fixture
async def desk(wire: RedisClient, tmp_path: Path) -> Desk:
    desk = Desk(wire, tmp_path)
    await desk.open()
    return desk


@pytest.mark.parametrize("stops", [True, False])
async def test_a_cancelled_batch_ends_once_its_lines_have_stopped_or_had_their_time(
    desk: Desk, wire: RedisClient, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    """It is not kept waiting for a worker that has said so, nor for ever by one that says nothing."""
    monkeypatch.setattr(turns, "CANCEL_TIMEOUT_S", 600.0 if stops else 0.1)
    turn, lease = asyncio.create_task((await desk.turn(0.05)).run()), Lease(wire, "sim")
    await lease.register()
    claimed = await until(lambda: claims_of(lease))
    await desk.batches.request(desk.batch.id, "cancel")
    if stops:
        await until(lambda: is_cancelled(lease))
        end = Terminal(claimed.job.id, JobState.CANCELLED, 0)
        await lease.calls([lease.finish_call(Finish(end, claimed.run_number, True))])
    async with asyncio.timeout(20):
        await turn
    assert await desk.found() == (BatchState.CANCELLED, desk.files) and len(desk.files) == 2


async def claims_of(lease: Lease) -> Claim | None:
    jobs = (await lease.claim(0, 1)).jobs
    assert all(isinstance(job, Claim) for job in jobs)
    return jobs[0] if jobs else None  # type: ignore[return-value]


async def is_cancelled(lease: Lease) -> bool:
    return any(held.cancelled for held in (await lease.beat(0)).values())


async def test_a_turn_that_was_overtaken_leaves_no_files(desk: Desk) -> None:
    """It was held up until another had the batch, and hears so at its last word: its files are in nobody's record."""
    await desk.batches.request(desk.batch.id, "cancel")
    overtaken, last = await desk.turn(600), await desk.turn(600)
    with pytest.raises(Fenced):
        await overtaken.run()
    assert desk.files == set()
    await last.run()
    assert await desk.found() == (BatchState.CANCELLED, desk.files) and len(desk.files) == 2


async def test_a_batch_that_is_cancelled_before_it_began_has_lost_nothing(desk: Desk) -> None:
    """Its lines were never read, so none of its work can be missing. What is left of them once it has ended, as by a
    process that was killed, is removed; what is not ours stays."""
    (desk.file_store.work(desk.batch.id) / PLAN).unlink()
    await desk.batches.request(desk.batch.id, "cancel")
    await (await desk.turn(600)).run()
    record = await desk.batches.get(desk.batch.id, "t")
    assert (record.state, record.progress.faults) == (BatchState.CANCELLED, ())
    works = desk.file_store.work(desk.batch.id).parent
    assert list(works.iterdir()) == []
    for name in (desk.batch.id, "not-ours"):
        (works / name).mkdir()
    desk.file_store.adopt(desk.tools.store.deployment)
    await BatchRunner(desk.tools, 60.0).tidy()
    assert [path.name for path in works.iterdir()] == ["not-ours"]
