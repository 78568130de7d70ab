"""Replies on their way back: in order, once, whatever pub/sub loses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import pytest
from flow import a_lease, append, claim_one, delta, numbers_read, put_job, until

from streaming.jobs.codec import Delta, Frame, Opening, Run, Section, Terminal, author
from streaming.jobs.history import LogName, read_log
from streaming.jobs.job import JobState
from streaming.jobs.lease import SILENT, Claim, Finish, Lease
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.records import JobRecord
from streaming.jobs.relay import MAX_ROWS, NO_RUN, Relay, ReorderBuffer
from streaming.keys import partition_key
from streaming.order import Priority
from streaming.redis.client import RedisClient

pytestmark = pytest.mark.slow


class Running:
    """A job claimed by a lease of the test's own, which writes what the test says."""

    def __init__(self, lease: Lease, claim: Claim) -> None:
        self.lease, self.claim, self.rows = lease, claim, []
        self.run = Run(lease.id, claim.run_number)
        self._told: set[str] = set()
        """Addresses that know the job's number."""

    @classmethod
    async def begin(cls, wire: RedisClient, relay: Relay, job_id: str, reply_to: str | None = None) -> Running:
        reply = relay.address if reply_to is None else reply_to
        await put_job(Queue(wire), Priority.BATCH, id=job_id, stream=True, reply_to=reply)
        lease = await a_lease(wire)
        return cls(lease, await claim_one(lease))

    async def write(self, count: int, address: str) -> None:
        for _ in range(count):
            await self.write_frame(1, address)

    async def write_frame(self, count: int, address: str) -> None:
        """So many deltas in one frame."""
        rows = [delta(self.claim, len(self.rows) + number) for number in range(1, count + 1)]
        self.rows += rows
        opened = () if address in self._told else (self.claim,)
        self._told.add(address)
        await self.lease.calls([append(self.lease, {address: rows}, *opened)])

    async def finish(self) -> None:
        rows, sections = tuple(self.rows), (Section(1, self.run),)
        end = Terminal(self.claim.job.id, JobState.COMPLETED, len(rows), ("stop",), sections=sections, rows=rows)
        await self.lease.calls([self.lease.finish_call(Finish(end, self.claim.run_number, False))])


async def listening(wire: RedisClient, relay: Relay, **options: Any) -> tuple[ReorderBuffer, Running]:
    """A reader of a new job, and the job's run."""
    buffer = relay.open(Queue(wire).new_id("t"), **options)
    return buffer, await Running.begin(wire, relay, buffer.job_id)


def test_a_buffer_puts_what_comes_in_order_and_takes_each_once() -> None:
    """Any order, with repetitions: 1..n comes out."""
    buffer, order = ReorderBuffer("j"), [*range(1, 51), *range(1, 51)]
    random.Random(7).shuffle(order)
    for seq in order:
        buffer.push(delta(0, seq))
    buffer.end(Terminal("j", JobState.COMPLETED, 50, sections=(Section(1, NO_RUN),)))
    assert buffer.terminal is not None and [row.seq for row in buffer._rows] == list(range(1, 51))


def test_a_slow_reader_is_bounded_in_memory() -> None:
    """What it cannot take now is left in the log."""
    buffer = ReorderBuffer("j")
    for seq in range(1, 3 * MAX_ROWS):
        buffer.push(delta(0, seq))
    assert buffer.seq == MAX_ROWS and buffer.stale and not buffer._early


def test_a_frame_that_is_begun_is_held_whole() -> None:
    """A job of many choices has more deltas in a step than are kept otherwise: they are not read from the log again."""
    buffer = ReorderBuffer("j")
    for seq in range(1, 3 * MAX_ROWS):
        buffer.push(delta(0, seq), frame_number=7)
    assert buffer.seq == 3 * MAX_ROWS - 1 and not buffer.stale
    buffer.push(delta(0, 3 * MAX_ROWS), frame_number=8)
    assert buffer.seq == 3 * MAX_ROWS - 1 and buffer.stale


async def test_a_late_reader_reads_a_long_log_about_once(
    wire: RedisClient, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what it cannot take yet nothing is read."""
    frames, rows = 80, MAX_ROWS // 4
    job_id = Queue(wire).new_id("t")
    running = await Running.begin(wire, relay, job_id)
    for _ in range(frames):
        await running.write_frame(rows, SILENT)
    count = 0

    async def counted(client: RedisClient, partition: int, name: LogName, first: int) -> AsyncGenerator[Frame, None]:
        nonlocal count
        async for frame in read_log(client, partition, name, first):
            count += 1
            yield frame

    monkeypatch.setattr("streaming.jobs.relay.read_log", counted)
    buffer = relay.open(job_id)
    await relay.subscribe(buffer)
    taken = 0
    while taken < frames * rows:
        taken += len((await buffer.take(20))[0])
    assert frames <= count <= 2 * frames


async def test_a_lost_end_is_noticed_in_the_silence(wire: RedisClient, relay: Relay) -> None:
    """Nothing at all is published, not even the terminal's message."""
    job_id = Queue(wire).new_id("t")
    buffer = relay.open(job_id)
    running = await Running.begin(wire, relay, job_id, reply_to="")
    await running.write(5, "-")
    await running.finish()
    assert await numbers_read(buffer) == [1, 2, 3, 4, 5]


async def test_a_reader_that_the_store_has_forgotten_follows_again(wire: RedisClient, relay: Relay) -> None:
    """The record does not have its address: it hears the rest as it comes, and misses nothing."""
    buffer = relay.open(Queue(wire).new_id("t"))
    running = await Running.begin(wire, relay, buffer.job_id, reply_to="")

    async def follows() -> bool:
        return (await JobReader(wire).record(buffer.job_id)).addresses == (relay.address,)

    await until(follows)
    await running.write(2, relay.address)
    await running.finish()
    assert await numbers_read(buffer) == [1, 2]


async def test_a_record_read_before_the_put_came_does_not_lose_the_job(wire: RedisClient, relay: Relay) -> None:
    """The put is answered, and tokens come, between the reading of the record and the look at it."""
    job_id = Queue(wire).new_id("t")
    buffer = relay.open(job_id)
    read = relay._reader.records

    async def early(job_ids: Sequence[str], **options: Any) -> list[JobRecord | None]:
        found = await read(job_ids, **options)
        buffer.accepted = True
        buffer.push(delta(0, 1))
        return found

    relay._reader.records = early  # type: ignore[method-assign]
    await relay._refill([buffer])
    assert buffer.terminal is None and buffer.seq == 1
    await relay._refill([buffer])
    assert buffer.terminal is not None and buffer.terminal.failure is not None
    assert buffer.terminal.failure.code == "job_lost"


async def test_a_cut_subscription_loses_nothing(wire: RedisClient, relay: Relay) -> None:
    """The server drops every subscriber again and again while tokens flow."""
    buffer, running = await listening(wire, relay)
    reading = asyncio.create_task(numbers_read(buffer))
    for _ in range(10):
        await running.write(5, relay.address)
        await wire.redis.client_kill_filter(_type="pubsub")
    await running.finish()
    assert await reading == list(range(1, 51))


async def test_a_fault_nobody_expected_costs_no_reader(
    wire: RedisClient, relay: Relay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The relay's own task breaks while it looks for what was lost: that is told, and it is begun again."""
    records, broken = JobReader.records, 0

    async def breaks_twice(job_reader: JobReader, job_ids: Sequence[str], **options: Any) -> list[JobRecord | None]:
        nonlocal broken
        if broken < 2:
            broken += 1
            raise RuntimeError("nobody thought of this")
        return await records(job_reader, job_ids, **options)

    buffer, running = await listening(wire, relay)
    await running.write(2, relay.address)
    await running.write(1, "-")
    monkeypatch.setattr(JobReader, "records", breaks_twice)
    await running.finish()
    assert await numbers_read(buffer) == [1, 2, 3]
    assert broken == 2 and "nobody thought of this" in caplog.text


async def test_a_reader_behind_two_hand_overs_gets_what_every_run_logged(wire: RedisClient, relay: Relay) -> None:
    """Nothing of the second and third run was published: it comes from their logs while the job still runs."""
    buffer, first = await listening(wire, relay)
    job_id = buffer.job_id
    await first.write(2, relay.address)
    before, holder, claim = first.run, first.lease, first.claim
    for written in (2, 4):
        await holder.release(job_id, claim.run_number)
        holder = await a_lease(wire)
        claimed = await claim_one(holder)
        claim, opening = claimed, Opening(job_id, written + 1, before)
        rows = [delta(claim, written + number) for number in (1, 2)]
        await holder.calls([append(holder, {SILENT: rows}, (claim.run_number, opening))])
        before = Run(holder.id, claim.run_number)
    seen: list[int] = []
    async with asyncio.timeout(20):
        while len(seen) < 6:
            rows, terminal = await buffer.take(0.5)
            seen += [row.seq for row in rows]
            assert terminal is None
    assert seen == [1, 2, 3, 4, 5, 6] and buffer.author(6) == before


async def test_copies_of_what_earlier_runs_wrote_stand_in_for_a_log_that_is_gone(
    wire: RedisClient, relay: Relay
) -> None:
    """The store lost frames, and the worker logged all of its job anew: a late reader is given all of it at once."""
    job_id = Queue(wire).new_id("t")
    running = await Running.begin(wire, relay, job_id)
    await running.write(2, SILENT)
    first, heir = running.run, await a_lease(wire)
    await running.lease.release(job_id, first.number)
    claim = await claim_one(heir)
    await wire.redis.delete(partition_key(0, "log", first.worker))
    rows = [delta(-claim.run_number, 1), delta(-claim.run_number, 2), delta(claim, 3)]
    copies = Opening(job_id, copied=(Section(1, first),))
    opened = (claim.run_number, Opening(job_id, 3, first)), (-claim.run_number, copies)
    await heir.calls([append(heir, {SILENT: rows}, *opened)])
    assert await first_of(relay, job_id, 3) == [(1, first), (2, first), (3, Run(heir.id, claim.run_number))]


async def first_of(relay: Relay, job_id: str, count: int) -> list[tuple[int, Run | None]]:
    """The first deltas that a reader who comes now is given of a running job, and who wrote each."""
    buffer = relay.open(job_id)
    await relay.subscribe(buffer)
    seen: list[int] = []
    async with asyncio.timeout(20):
        while len(seen) < count:
            rows, terminal = await buffer.take(0.5)
            seen += [row.seq for row in rows]
            assert terminal is None
    relay.close(buffer)
    return [(seq, buffer.author(seq)) for seq in seen]


async def test_a_cancel_in_the_queue_reaches_the_reader(wire: RedisClient, relay: Relay) -> None:
    """A script ended the job: the reader is told what the record says."""
    queue = Queue(wire)
    buffer = relay.open(queue.new_id("t"))
    await put_job(queue, id=buffer.job_id, reply_to=relay.address)
    await queue.cancel(buffer.job_id)
    assert await numbers_read(buffer) == []
    assert buffer.terminal is not None and buffer.terminal.state is JobState.CANCELLED


FIRST, SECOND, THIRD = Run("a", 1), Run("b", 1), Run("a", 2)


def reader(*openings: tuple[Run, Opening], given: int = 0) -> ReorderBuffer:
    """A buffer that was given the first deltas of the first run."""
    buffer = ReorderBuffer("j")
    buffer.openings |= {FIRST: Opening("j")} | dict(openings)
    for seq in range(1, given + 1):
        buffer.push(delta(0, seq), FIRST)
    return buffer


def test_a_run_that_goes_on_where_the_last_one_ended_is_put_behind_it() -> None:
    """Whether by another worker or by the same one once more; repetitions of either are harmless."""
    buffer = reader((SECOND, Opening("j", 4, FIRST)), (THIRD, Opening("j", 6, SECOND)), given=3)
    for seq, run in ((4, SECOND), (2, FIRST), (5, SECOND), (4, SECOND), (6, THIRD)):
        buffer.push(delta(0, seq), run)
    assert buffer.seq == 6 and not buffer.rewound and not buffer.stale
    assert [buffer.author(seq) for seq in (3, 4, 5, 6)] == [FIRST, SECOND, SECOND, THIRD]


@pytest.mark.parametrize(
    ("opening", "seq"),
    [
        (Opening("j"), 4),  # began anew, and its first deltas were lost on the way
        (Opening("j", 3, FIRST), 4),  # goes on from an earlier delta of the same run
        (Opening("j", 4, Run("c", 1)), 4),  # goes on from what another has written
        (Opening("j"), 2),
    ],
)
@pytest.mark.parametrize("run", [SECOND, THIRD])
def test_a_run_that_contradicts_what_was_given_is_never_spliced_to_it(run: Run, opening: Opening, seq: int) -> None:
    """Which of two is right the record tells: the reader's runs are void, or the others are ignored."""
    for valid, rewound in (([run], True), ([FIRST, run], True), ([FIRST], False)):
        buffer = reader((run, opening), given=3)
        buffer.push(delta(0, seq), run)
        assert buffer.seq == 3 and buffer.stale and not buffer.rewound
        buffer.push(delta(0, 4), FIRST)
        assert buffer.seq == 3, "nothing more before it is settled"
        buffer.settle(buffer.standing(), valid)
        assert buffer.rewound is rewound
        buffer.push(delta(0, 5), run)
        buffer.push(delta(0, 4), FIRST)
        assert buffer.seq == (3 if rewound else 4)


def test_what_comes_while_the_record_is_read_is_not_judged_by_it() -> None:
    """A record that was read before another worker began does not know its run."""
    buffer = reader((SECOND, Opening("j", 4, FIRST)), (THIRD, Opening("j")), given=3)
    buffer.push(delta(0, 1), THIRD)
    held = buffer.standing()
    buffer.settle(held, [FIRST])
    buffer.push(delta(0, 4), SECOND)
    buffer.settle(held, [FIRST])
    assert buffer.seq == 4 and not buffer.rewound


@pytest.mark.parametrize(
    ("sections", "seq", "agrees"),
    [
        ((Section(1, FIRST),), 5, True),
        ((Section(1, FIRST), Section(4, SECOND)), 5, True),
        ((Section(1, FIRST), Section(4, SECOND), Section(4, THIRD)), 3, True),
        ((Section(1, FIRST), Section(3, SECOND)), 5, False),  # the last delta given was lost
        ((Section(1, SECOND),), 5, False),
        ((Section(1, FIRST),), 2, False),  # shorter than what was given
        ((), 5, False),
    ],
)
@pytest.mark.parametrize("with_rows", [True, False])
@pytest.mark.parametrize("resumed", [True, False])
def test_an_end_that_does_not_begin_with_what_was_given_is_no_end_of_it(
    sections: tuple[Section, ...], seq: int, agrees: bool, with_rows: bool, resumed: bool
) -> None:
    """The terminal says who wrote which delta: also a reader who came back with a cursor is told."""
    buffer = ReorderBuffer("j", 3, runs=[FIRST]) if resumed else reader(given=3)
    rows = tuple(delta(0, number) for number in range(1, seq + 1)) if with_rows else ()
    buffer.end(Terminal("j", JobState.COMPLETED, seq, ("stop",), sections=sections, rows=rows))
    assert buffer.rewound is not agrees
    assert (buffer.terminal is not None) is (agrees and (with_rows or seq == 3))
    if buffer.terminal is not None:
        assert [row.seq for row in buffer._rows][-(seq - 3) or 99 :] == list(range(4, seq + 1))
        assert all(buffer.author(number) == author(sections, number) for number in range(4, seq + 1))


def test_a_result_with_a_hole_ends_its_reader_with_an_error() -> None:
    """It neither waits for ever nor is shown a shorter text."""
    buffer = reader(given=1)
    rows = (delta(0, 1), delta(0, 3))
    buffer.end(Terminal("j", JobState.COMPLETED, 3, ("stop",), sections=(Section(1, FIRST),), rows=rows))
    assert buffer.terminal is not None and buffer.terminal.failure is not None
    assert (buffer.terminal.state, buffer.terminal.failure.code) == (JobState.FAILED, "result_incomplete")


async def test_the_end_hands_over_every_delta_at_once(wire: RedisClient, relay: Relay) -> None:
    """A long answer in one piece: one reading of its record, however many deltas it has."""
    buffer, running = await listening(wire, relay, whole=True)
    running.rows = [delta(running.claim, seq) for seq in range(1, 40 * MAX_ROWS)]
    read, times = relay._reader.records, 0

    async def counted(job_ids: Sequence[str], **options: Any) -> list[JobRecord | None]:
        nonlocal times
        times += 1
        return await read(job_ids, **options)

    relay._reader.records = counted  # type: ignore[method-assign]
    await running.finish()
    rows, terminal = await buffer.take(20)
    assert terminal is not None and len(rows) == 40 * MAX_ROWS - 1
    assert times <= 2, "once to fetch them, and perhaps once in a tick before"


async def test_a_sink_that_has_enough_gets_no_more_until_it_asks(wire: RedisClient, relay: Relay) -> None:
    """A congested connection: what comes meanwhile waits for `take` or the next `attach_sink`."""
    buffer = ReorderBuffer("j")
    for seq in (1, 2):
        buffer.push(delta(0, seq))
    seen: list[int] = []

    def full(rows: list[Delta], _: Terminal | None) -> bool:
        seen.extend(row.seq for row in rows)
        return False

    await asyncio.wait_for(buffer.attach_sink(full), 20)
    buffer.push(delta(0, 3))
    buffer.flush()
    assert seen == [1, 2]
    rows, _ = await buffer.take(1)
    assert [row.seq for row in rows] == [3]


async def test_a_reader_who_leaves_ends_the_pouring() -> None:
    buffer = ReorderBuffer("j")
    pouring = asyncio.create_task(buffer.attach_sink(lambda *_: True))
    await asyncio.sleep(0)
    buffer.hang_up()
    await asyncio.wait_for(pouring, 20)
    assert buffer.hung_up and buffer.terminal is None


class Taker:
    """A flow that passes its deltas to a function."""

    def __init__(self, take: Callable[[Delta], bool], flushed: Callable[[float], object] = lambda _now: None) -> None:
        self.write, self._flushed = take, flushed

    def flush(self, now: float) -> None:
        self._flushed(now)


async def test_deltas_flow_one_by_one_and_go_round_where_something_is_missing(wire: RedisClient, relay: Relay) -> None:
    """Lost frames, several deltas in a frame, another worker: each delta once and in order, whichever way it goes."""
    buffer, running = await listening(wire, relay)
    flowed: list[int] = []
    seen: list[int] = []

    def sink(rows: list[Delta], terminal: Terminal | None) -> bool:
        seen.extend(row.seq for row in rows)
        return True

    def take(row: Delta) -> bool:
        flowed.append(row.seq)
        seen.append(row.seq)
        return True

    pouring = asyncio.create_task(buffer.attach_sink(sink, Taker(take)))
    await running.write(1, relay.address)
    await until(lambda: len(seen) == 1)  # what comes in one read with the first goes the same way
    await running.write(9, relay.address)
    await until(lambda: len(seen) == 10)
    assert flowed == list(range(2, 11)), "the first shows who the worker is"
    await running.write(1, "-")
    await running.write(1, relay.address)
    await until(lambda: len(seen) == 12)
    await running.write(1, relay.address)
    await until(lambda: len(seen) == 13)
    assert flowed[-1] == 13, "it flows again"
    await running.write_frame(2, relay.address)
    await running.finish()
    await asyncio.wait_for(pouring, 20)
    assert seen == list(range(1, 16)) and flowed[-2:] == [14, 15], "several in a frame flow, too"


async def test_a_flow_that_has_enough_stops_and_one_that_fails_fails_alone(wire: RedisClient, relay: Relay) -> None:
    """The fault of a reader is raised where it pours, one by one or several at a time; the others get everything."""
    job_id = Queue(wire).new_id("t")
    first, second, third, fourth, fifth = (relay.open(job_id) for _ in range(5))
    running = await Running.begin(wire, relay, job_id)

    def faulty(*_: object) -> bool:
        raise LookupError("rendering failed")

    full = asyncio.create_task(first.attach_sink(lambda *_: True, Taker(lambda _: False)))
    failing = [
        asyncio.create_task(each)
        for each in (
            second.attach_sink(lambda *_: True, Taker(faulty)),
            fourth.attach_sink(faulty),
            fifth.attach_sink(lambda *_: True, Taker(lambda _: True, flushed=faulty)),
        )
    ]
    await asyncio.sleep(0)
    await running.write(1, relay.address)
    await until(lambda: third.seq == 1)  # a flow begins behind the read that has the first delta
    await running.write(1, relay.address)
    await asyncio.wait_for(full, 20)
    for task in failing:
        with pytest.raises(LookupError, match="rendering failed"):
            await asyncio.wait_for(task, 20)
    await running.write(1, relay.address)
    await running.finish()
    assert await numbers_read(third) == [1, 2, 3]
    rows, _ = await first.take(5)
    assert [row.seq for row in rows] == [3]


async def test_nothing_is_kept_of_a_job_nobody_listens_to(wire: RedisClient, relay: Relay) -> None:
    """Neither of its buffers nor of the numbers its workers gave it."""
    job_id = Queue(wire).new_id("t")
    first, second = relay.open(job_id), relay.open(job_id)
    running = await Running.begin(wire, relay, job_id)
    await running.write(1, relay.address)
    await until(lambda: first.seq == second.seq == 1)
    relay.close(first)
    await running.write(1, relay.address)
    await until(lambda: second.seq == 2)
    assert first.seq == 1
    for _ in range(2):
        relay.close(second)
    assert not relay._subscribers and not relay._by_run
    late = relay.open(job_id)
    await relay.subscribe(late)
    await running.write(1, relay.address)
    await running.finish()
    assert await numbers_read(late) == [1, 2, 3], "its name is in the log"


def test_what_no_log_has_is_looked_for_less_and_less_often() -> None:
    """A frame that cannot be read leaves a gap until the job ends: its reader does not read the log without end."""
    buffer = reader(given=1)
    now, looks = 100.0, 0
    while now < 130.0:
        buffer.push(delta(0, 3), FIRST)
        if buffer.is_due(now, 2.0):
            looks += 1
            buffer.look(now)
        now += 0.01
    assert 30 <= looks <= 36
    buffer.push(delta(0, 2), FIRST)
    buffer.push(delta(0, 5), FIRST)
    assert buffer.seq == 3 and buffer.is_due(now + 1.0, 2.0)
    buffer.look(now + 1.0)
    buffer.push(delta(0, 5), FIRST)
    assert buffer.is_due(now + 1.1, 2.0), "something new came: soon again"
