"""A worker's steps: written where they are made, one write at a time, again what went wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from flow import delta
from sim_worker import a_claim, a_job

from streaming.errors import Fenced
from streaming.jobs.codec import Opening, Run, Section, encode_delta
from streaming.jobs.history import History, LogName, read_log
from streaming.jobs.lease import SILENT, Finish, Lease
from streaming.jobs.queue import Queue
from streaming.redis.client import RedisClient
from workers.attempt import Attempt
from workers.held_jobs import HeldJobs
from workers.writer import StepWrite, Writer


class AnAttempt(SimpleNamespace):
    __hash__ = object.__hash__


def a_run(own: list[bytes], name: str = "job", **changes: object) -> Any:
    """Stands for an attempt of partition 0 with these deltas."""
    fields: dict[str, object] = {
        "job": SimpleNamespace(id=name), "partition": 0, "opening": Opening(name), "own": lambda: list(own),
        "run_number": 1, "first_frame": 1, "seq": 0, "checkpointing": False, "over": False,
        "claim": SimpleNamespace(first_frame=1),
    }  # fmt: skip
    return AnAttempt(**fields | changes)


class Writing:
    """A writer of one job's deltas, its lease registered: so the connection is open."""

    def __init__(self, wire: RedisClient) -> None:
        self.wire, self.lease, self.seq = wire, Lease(wire, "m"), 0
        self.held = HeldJobs(self.lease)
        self.writer = Writer(self.lease, 0, self.held, self.on_written)

    def on_written(self, step: StepWrite, refused: Sequence[Finish]) -> None:
        """Nothing is finished here."""

    def step(self) -> None:
        """One more delta, sent."""
        self.seq += 1
        self.writer.step.rows[SILENT].append(encode_delta(delta(1, self.seq)))
        self.writer.send()

    async def written(self) -> None:
        async with asyncio.timeout(20):
            await self.writer.flushed()

    async def logged(self) -> list[list[int]]:
        """The numbers of the deltas in each frame of the log."""
        frames = read_log(self.wire, 0, LogName("log", self.lease.id), 1)
        return [[row.seq for row in frame.rows] async for frame in frames]


@pytest.fixture
async def writing(wire: RedisClient) -> AsyncIterator[Writing]:
    writing = Writing(wire)
    await writing.lease.register()
    yield writing


async def test_a_step_is_written_without_a_task(writing: Writing) -> None:
    """What comes while it is under way goes out together."""
    for _ in range(4):
        writing.step()
    await writing.written()
    assert await writing.logged() == [[1], [2, 3, 4]]


async def test_a_checkpoint_holds_all_that_came_before_it_is_written(writing: Writing) -> None:
    """Also what came while it waited for an earlier step's answer: all frames before it may be trimmed."""
    own: list[bytes] = []
    run = writing.held.attempts["job"] = a_run(own)
    writing.step()
    own.append(encode_delta(delta(1, 1)))
    writing.writer.checkpoint(0)
    writing.step()
    own.append(encode_delta(delta(1, 2)))
    await writing.written()
    assert await writing.logged() == [[1], [2], [1, 2]]
    assert (run.first_frame, run.checkpointing) == (3, False)


async def test_a_job_logs_its_deltas_again_in_its_own_partition_once_and_while_it_runs(writing: Writing) -> None:
    """Not in the log of another partition, not while that is being written already, and not when it is over."""
    ways: dict[str, dict[str, object]] = {
        "long": {}, "elsewhere": {"partition": 1}, "under way": {"checkpointing": True}, "over": {"over": True},
    }  # fmt: skip
    writing.held.attempts = {name: a_run([], name, **changes) for name, changes in ways.items()}
    writing.writer.send = lambda: None  # type: ignore[method-assign]
    age = writing.lease.next_frame(0) - 1
    writing.writer.checkpoint(age + 1)
    assert not writing.writer.step.checkpoints, "its log is not long enough yet"
    for _ in range(2):
        writing.writer.checkpoint(age)
        assert list(writing.writer.step.checkpoints) == [writing.held.attempts["long"]]


async def test_a_repaired_log_has_the_deltas_of_all_runs_and_says_whose_they_are(writing: Writing) -> None:
    job, sections = a_job(Queue(writing.wire)), (Section(1, Run("lost", 4)),)
    history = History(rows=[delta(4, 1), delta(4, 2)], sections=sections)
    writing.held.attempts[job.id] = Attempt(a_claim(job, 2), history)
    await writing.lease.calls([*writing.writer._repair()])
    (frame,) = [each async for each in read_log(writing.wire, 0, LogName("log", writing.lease.id), 1)]
    assert [(row.run_number, row.seq) for row in frame.rows] == [(-2, 1), (-2, 2)]
    assert frame.openings[-2].copied == sections and frame.openings[2].first == 3


async def test_no_frame_has_more_than_its_readers_can_hold(writing: Writing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that came while a write was under way, a checkpoint, a repair: each address gets all of its rows in order,
    and no delta is split, however large."""
    size = len(encode_delta(delta(1, 1)))
    monkeypatch.setattr("streaming.jobs.codec.MAX_FRAME_BYTES", 3 * size)
    for _ in range(8):
        writing.step()
    large = [delta(1, 2), delta(1, 3, "x" * 9 * size), delta(1, 4)]
    writing.writer.step.rows["elsewhere"] += map(encode_delta, large)
    writing.writer.send()
    await writing.written()
    assert await writing.logged() == [[1], [2, 3, 4], [2], [5, 6, 7], [3], [8], [4]]
    own = [encode_delta(delta(1, seq)) for seq in range(1, 6)]
    writing.held.attempts["job"] = a_run(own, seq=5, logged=lambda: own, openings={1: Opening("job")})
    writing.writer.checkpoint(0)
    await writing.written()
    await writing.lease.calls([*writing.writer._repair()])
    assert (await writing.logged())[7:] == 2 * [[1, 2, 3], [4, 5]]


async def test_rows_of_a_run_that_changed_its_readers_stay_in_one_frame(
    writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader looks for what it lacks from the frame of its last delta on: no later delta may be in an earlier one."""
    monkeypatch.setattr("streaming.jobs.codec.MAX_FRAME_BYTES", 3 * len(encode_delta(delta(1, 1))))
    for _ in range(8):
        writing.step()
    step = writing.writer.step
    step.rows["elsewhere"] += [encode_delta(delta(1, 9))]
    step.is_whole = True
    writing.writer.send()
    await writing.written()
    assert sorted(len(each) for each in await writing.logged()) == [1, 1, 7]


async def test_a_repair_of_nothing_is_written_too(writing: Writing) -> None:
    """Else the store would go on to miss the frames before the next one."""
    writing.lease._frames[0] += 5
    await writing.lease.calls([*writing.writer._repair()])
    writing.step()
    await writing.written()
    assert await writing.logged() == [[], [1]]


async def test_what_cannot_be_sent_at_once_or_was_not_answered_is_sent_again(writing: Writing) -> None:
    running = asyncio.create_task(writing.writer.run())
    await writing.wire.close()
    writing.step()
    await writing.written()
    writing.step()
    await writing.wire.redis.client_kill_filter(_type="normal")
    await writing.written()
    await writing.wire.redis.function_flush()
    writing.step()
    await writing.written()
    assert await writing.logged() == [[1], [2], [3]]
    running.cancel()


async def test_nothing_is_written_once_its_run_is_over(writing: Writing) -> None:
    running = asyncio.create_task(writing.writer.run())
    writing.step()
    await writing.written()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    writing.step()
    await writing.lease.beat(0)  # over the same connection: behind whatever was sent
    assert await writing.logged() == [[1]]


async def test_each_step_is_counted_once_it_is_written(writing: Writing) -> None:
    """Once, also one that was sent again; not one of a worker that was fenced before."""
    counted: list[int] = []
    writing.writer = Writer(writing.lease, 0, writing.held, lambda step, _: counted.append(step.tokens[""]))
    running = asyncio.create_task(writing.writer.run())
    for _ in range(3):
        writing.writer.step.tokens[""] += 2
        writing.step()
    await writing.written()
    assert sum(counted) == 6
    await writing.wire.call("reap", 0, 10, 10, 3, 60, 5_000, writing.lease.id, 0, 0)
    writing.writer.step.tokens[""] += 2
    writing.step()
    with pytest.raises(Fenced):
        async with asyncio.timeout(20):
            await running
    assert sum(counted) == 6


async def test_what_breaks_behind_a_step_ends_the_run(writing: Writing) -> None:
    """Nobody waits for the answer of a step: it is not to be lost there, for the worker would hang."""
    writing.writer = Writer(writing.lease, 0, writing.held, Mock(side_effect=RuntimeError("broken")))
    running = asyncio.create_task(writing.writer.run())
    writing.step()
    with pytest.raises(RuntimeError, match="broken"):
        async with asyncio.timeout(20):
            await running
