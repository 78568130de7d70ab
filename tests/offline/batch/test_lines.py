"""One turn at the lines of a batch, against jobs that the test itself ends: what becomes of a line, and how often."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from batching import batch_record, jsonl, line, tools_of

from api.openai.errors import links_in_the_way
from offline.batch.lines import ANSWERED_RETENTION_S, MAX_BLOCKED, MIN_WINDOW, Lines, lane_of, window_of
from offline.tools import OfflineTools
from penstock.engine import Failure
from streaming.batches.file_store import BatchSettings
from streaming.batches.ledger import InputPlan, LineOutcome
from streaming.batches.store import BatchLease, BatchProgress, BatchState
from streaming.jobs.codec import Terminal
from streaming.jobs.job import Job, JobState, Media
from streaming.jobs.lease import Claim, Finish, Lease
from streaming.jobs.reader import JobReader
from streaming.keys import partition_key
from streaming.order import Priority
from streaming.redis.client import RedisClient
from streaming.store.identity import enter_store

RETRIES = 2


BATCH = batch_record()


async def turn_at(tools: OfflineTools, folder: Path, lines: Sequence[bytes], now_ms: int, **lease: Any) -> Lines:
    """A turn at a batch of these lines."""
    (folder / "input").write_bytes(b"".join(lines))
    plan, at = InputPlan(), 0
    for number, each in enumerate(lines, 1):
        plan.order.append(plan.add(number, at, len(each)))
        at += len(each)
    plan.save(folder)
    fields: dict[str, Any] = {"batch": BATCH, "epoch": 1, "state": BatchState.IN_PROGRESS, "progress": BatchProgress()}
    return await Lines.open(tools, BatchLease(now_ms=now_ms, created_ms=now_ms, **fields | lease), folder)


async def one_line(wire: RedisClient, folder: Path, data: bytes = jsonl([line(1)])) -> Lines:
    """A turn at a batch of one line, which is in the queue if it can be."""
    tools = tools_of(wire, batch=BatchSettings(retries=RETRIES))
    lines = await turn_at(tools, folder, [data], await wire.now_ms())
    await put(lines)
    return lines


def progress_of(lines: Lines) -> BatchProgress:
    return lines.progress(BatchProgress())


async def put(lines: Lines) -> None:
    await lines._put([lines._waiting[0]], None)


async def claim_one(lease: Lease) -> Claim:
    (claim,) = (await lease.claim(0, 1)).jobs
    return claim


async def test_an_answer_of_a_newer_worker_is_left_to_a_newer_offline_process(
    wire: RedisClient, tmp_path: Path
) -> None:
    """This process cannot read it: it writes nothing down, and the line stays where the other one finds it."""
    lines, lease = await one_line(wire, tmp_path), Lease(wire, "sim")
    await lease.register()
    claim = await claim_one(lease)
    end = Terminal(claim.job.id, JobState.COMPLETED, 0, ("stop",))
    await lease.calls([lease.finish_call(Finish(end, claim.run_number, True))])
    newer = msgspec.msgpack.encode(["t2", claim.job.id])
    await wire.redis.hset(partition_key(0, "job", claim.job.id), "record", newer)  # type: ignore[misc]
    assert (await JobReader(wire).record(claim.job.id)).newer
    assert await lines.collect() == 0
    assert progress_of(lines).in_queue == 1 and progress_of(lines).failed == 0 and not lines.done
    assert list(lines.ledger.ends) == [None] and list(lines.ledger.attempts) == [0]
    lines.close()


async def test_a_line_that_an_older_version_took_ends_with_the_error(wire: RedisClient, tmp_path: Path) -> None:
    """It was read before there was this bound: the batch goes on without it."""
    lines = await one_line(wire, tmp_path, jsonl([line(1, z=[[]] * 100_000)]))
    assert lines.done and progress_of(lines).failed == 1
    assert [end.outcome for end in lines.ledger.ends if end] == [LineOutcome.FAILED]
    lines.close()


async def test_a_line_is_tried_again_as_often_as_is_set(wire: RedisClient, tmp_path: Path) -> None:
    """Its first try and `retries` more, each as a new job; then its error is its answer."""
    lines, lease, jobs = await one_line(wire, tmp_path), Lease(wire, "sim"), list[str]()
    await lease.register()
    while True:
        claim = await claim_one(lease)
        jobs.append(claim.job.id)
        end = Terminal(claim.job.id, JobState.FAILED, 0, failure=Failure("engine_error", "It broke.", 500))
        await lease.calls([lease.finish_call(Finish(end, claim.run_number, True))])
        await lines.collect()
        if lines.done:
            break
        assert len(jobs) <= RETRIES, "tried once too often"
        await put(lines)
    assert len(set(jobs)) == len(jobs) == 1 + RETRIES
    assert (progress_of(lines).failed, progress_of(lines).retried) == (1, RETRIES)
    (row,) = lines.ledger.ends
    assert row is not None and row.outcome is LineOutcome.FAILED
    lines.close()
    later = await Lines.open(lines._tools, dataclasses.replace(lines._lease, epoch=2), tmp_path)
    assert progress_of(later).retried == RETRIES, "the next turn knows of them too"
    later.close()


async def test_media_of_a_failed_line_end_with_the_record_of_its_job(wire: RedisClient, tmp_path: Path) -> None:
    """They stay for a replay of a failed job, but of one whose error is in the batch's file there is none."""
    tools = tools_of(wire, media=SlowMedia())
    await tools.store.require()
    await tools.headroom.look()
    lines = await turn_at(tools, tmp_path, [of_media(1)], await wire.now_ms())
    await lines.feed()
    lease = Lease(wire, "sim")
    await lease.register()
    claim = await claim_one(lease)
    end = Terminal(claim.job.id, JobState.FAILED, 0, failure=Failure("engine_error", "It broke.", 500))
    await lease.calls([lease.finish_call(Finish(end, claim.run_number, True))])
    kept = [partition_key(0, name, claim.job.id) for name in ("job", "media")]
    assert min([await wire.redis.ttl(key) for key in kept]) > ANSWERED_RETENTION_S
    await lines.collect()
    assert 0 < max([await wire.redis.ttl(key) for key in kept]) <= ANSWERED_RETENTION_S
    lines.close()


async def test_lines_that_an_earlier_turn_put_are_found_though_the_window_is_smaller_now(
    wire: RedisClient, tmp_path: Path
) -> None:
    """Else each would be put once more behind them, and its place in the queue be lost."""
    count = 2 + MAX_BLOCKED + 8
    tools, batch = (
        tools_of(wire, batch=BatchSettings(window=1)),
        msgspec.structs.replace(BATCH, id="batch_00" + 30 * "b"),
    )
    data = [jsonl([line(number)]) for number in range(count)]
    first = await turn_at(tools, tmp_path, data, await wire.now_ms(), batch=batch)
    await first._put(list(first._waiting)[:count], None)
    progress = progress_of(first)
    first.close()
    second = await Lines.open(tools, dataclasses.replace(first._lease, epoch=2, progress=progress), tmp_path)
    assert progress.in_queue == progress_of(second).in_queue == count
    second.close()


async def test_no_line_is_put_into_a_store_that_may_be_given_nothing(wire: RedisClient, tmp_path: Path) -> None:
    """Whether it is the right one is not known before the monitor has entered it."""
    await enter_store(wire)
    lines = await one_line(wire, tmp_path)
    await lines.withdraw()
    assert await lines.feed() == 0 and lines.idle
    await lines._tools.store.enter()
    await lines.feed()
    assert not lines.idle
    lines.close()


DAY = 86_400.0


@pytest.mark.parametrize(
    ("standing", "lane", "reason"),
    [
        ((1000, 1.0, None, None), Priority.BATCH, "no deadline"),
        ((1000, 0.0, DAY / 2, DAY), Priority.BATCH, "in time"),
        ((1000, 1.0, DAY / 2, DAY), Priority.BATCH, "in time"),
        ((1000, 1.0, 2001, 3600), Priority.BATCH, "in time"),
        ((1000, 1.0, 1999, 3600), Priority.STANDARD, "1000 s of work at the present pace, 1999 s are left"),
        ((1, 100.0, 90, 900), Priority.STANDARD, "90 s are left of 900 s"),
        ((1, 0.0, -5, 900), Priority.STANDARD, "0 s are left of 900 s"),
    ],
)
def test_lanes(standing: tuple[int, float, float | None, float | None], lane: Priority, reason: str) -> None:
    """Nearer the deadline the lane is higher, and the reason says what was compared. The key's ceiling holds."""
    assert lane_of(*standing, Priority.INTERACTIVE) == (lane, reason)
    highest, words = lane_of(*standing, Priority.BATCH)
    assert highest is Priority.BATCH and ("no higher lane than batch" in words) == (lane is Priority.STANDARD)


@pytest.mark.parametrize(
    ("slots", "most", "lines"),
    [(0, 1024, MIN_WINDOW), (8, 1024, MIN_WINDOW), (256, 1024, 512), (900, 1024, 1024), (4, 3, 3)],
)
def test_the_window_follows_the_slots(slots: int, most: int, lines: int) -> None:
    """Twice what runs, within bounds."""
    assert window_of(slots, most) == lines


class SlowMedia:
    """Reads 1,000 bytes for each line, and fails at some."""

    def __init__(self, *fails: BaseException) -> None:
        self.fails, self.at_once, self.most = list(fails), 0, 0

    async def taken(self, job: Job, *_: Any) -> tuple[Job, tuple[bytes, ...]]:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0.01)
        self.at_once -= 1
        if self.fails:
            raise self.fails.pop()
        return msgspec.structs.replace(job, media=(Media("image/png", 1000),)), (bytes(1000),)


def of_media(number: int) -> bytes:
    image = {"type": "image_url", "image_url": {"url": "https://a.example/x.png"}}
    return jsonl([line(number, messages=[{"role": "user", "content": [image]}])])


async def test_media_of_few_lines_are_in_memory_at_once(
    wire: RedisClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for the next look at what the batch was told. One that breaks is answered so, and alone."""
    monkeypatch.setattr("offline.batch.lines.MEDIA_BYTES", 3500)
    media = SlowMedia(links_in_the_way(1), RuntimeError("an unforeseen link"))
    tools = tools_of(wire, media=media)
    await tools.store.require()
    await tools.headroom.look()
    lines = await turn_at(tools, tmp_path, [of_media(number) for number in range(12)], await wire.now_ms())
    await lines.feed()
    assert media.most == 4 and (progress_of(lines).in_queue, progress_of(lines).failed) == (6, 1)
    await lines.feed()
    assert (progress_of(lines).in_queue, progress_of(lines).failed) == (10, 1)
    await lines.feed()
    assert (progress_of(lines).in_queue, progress_of(lines).failed, media.most) == (11, 1, 4)
    lines.close()
