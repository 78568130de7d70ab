"""Runs of one job by several workers: each goes on behind the log of the one before, or begins anew."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from flow import append, claim_one, delta, lapse, waits_again
from sim_worker import Workshop, expected, lose_lease, text_of, until

from penstock.engine import ChatTurn, Sampling
from streaming.jobs.codec import AddAddress, Control, Frame, Terminal, decode_reply
from streaming.jobs.dead_letters import DeadLetters
from streaming.jobs.history import LogName, read_log
from streaming.jobs.job import JobState
from streaming.jobs.lease import Finish, Lease
from streaming.jobs.records import JobRecord
from streaming.keys import channel, partition_key
from workers.engines.sim.answers import prompt_text, token_text
from workers.engines.sim.settings import SimSettings
from workers.settings import WorkerSettings
from workers.writer import StepWrite

pytestmark = pytest.mark.slow


async def test_a_store_that_lost_frames_gets_them_again(shop: Workshop) -> None:
    """The worker still has every token of its running jobs: the log is made whole and the text stays exact."""
    running = await shop.start(SimSettings(step_ms=5, prefill_ms=1))
    job = await shop.put("set back", 200)
    await until(lambda: shop.has_deltas(job, 30))
    # As after a power loss: the last frames are gone, and the worker's frame number with them.
    lease = running.worker.lease.id
    await shop.wire.redis.hset(partition_key(0, "worker", lease), "frame", 10)
    await shop.wire.redis.xtrim(partition_key(0, "log", lease), maxlen=0, approximate=False)
    record = await shop.ended(job)
    assert record.attempt == 1 and text_of(record) == expected("set back", 200)


async def test_the_next_worker_numbers_on_where_the_log_ends(shop: Workshop) -> None:
    """No delta has two authors: what the lost worker has said is never said anew."""
    lost = Lease(shop.wire, "m")
    job = await shop.put("on", 20)
    await lost.register()
    claim = await claim_one(lost)
    prompt = prompt_text((ChatTurn("user", "on"),))
    rows = [delta(claim, index + 1, token_text(prompt, index)) for index in range(5)]
    await lost.calls([append(lost, {"-": rows}, claim)])
    assert (await lapse(shop.wire, lost)).requeued == 1
    heir = await shop.start()
    assert text_of(await shop.ended(job)) == expected("on", 20)
    frames = [frame async for frame in read_log(shop.wire, 0, LogName("log", heir.worker.lease.id), 1)]
    assert [row.seq for frame in frames for row in frame.rows] == list(range(6, 21))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_long_job_does_not_keep_the_whole_log(shop: Workshop, stream: bool) -> None:
    """Its tokens are logged anew now and then and what lies before is trimmed, beside neighbours that come and go; a
    reader from the beginning, and the next worker, find all of them."""
    settings = WorkerSettings(checkpoint_frames=150)
    first = await shop.start(SimSettings(step_ms=1, prefill_ms=1), settings)
    earlier = await shop.put("before", 40)
    await shop.ended(earlier)
    long = await shop.put("long", 5000, stream=stream)
    log, most = partition_key(0, "log", first.worker.lease.id), 0

    async def far() -> bool:
        nonlocal most
        most = max(most, await shop.wire.redis.xlen(log))
        return first.worker.lease.next_frame(0) >= 900  # a slow machine writes several tokens in one

    await until(far)
    written = first.worker.lease.next_frame(0)
    assert most < 0.7 * written, f"{most} of {written} frames were kept"
    record = await shop.reader.record(long.id)
    history = await shop.reader.history(long.id, record.runs)
    assert history.whole and record.runs[0].frame > 150
    first.task.cancel()
    await asyncio.gather(first.task, return_exceptions=True)
    assert (await lapse(shop.wire, first.worker.lease)).requeued == 1
    await shop.start(SimSettings(step_ms=1, prefill_ms=1), settings)
    done = await shop.ended(long)
    assert text_of(done) == expected("long", 5000) and done.attempt == 2 and done.epoch == record.epoch


async def test_a_job_whose_log_has_a_hole_begins_anew(shop: Workshop) -> None:
    """Half of what the lost worker logged is gone: neither a splice nor a shorter text, and a new epoch says so."""
    lost = Lease(shop.wire, "m")
    job = await shop.put("hole", 20)
    await lost.register()
    claim = await claim_one(lost)
    for first in (1, 4):
        rows = [delta(claim, seq, "lost") for seq in range(first, first + 3)]
        await lost.calls([append(lost, {"-": rows}, claim)])
    await shop.wire.redis.xdel(partition_key(0, "log", lost.id), "1-0")
    before = (await shop.reader.record(job.id)).epoch
    assert (await lapse(shop.wire, lost)).requeued == 1
    heir = await shop.start()
    record = await shop.ended(job)
    assert text_of(record) == expected("hole", 20) and record.terminal is not None
    assert [row.seq for row in record.terminal.rows] == list(range(1, 21))
    assert [logged.run.worker for logged in record.runs] == [heir.worker.lease.id]
    assert record.epoch == before + 1 and record.attempt == 2


@pytest.mark.parametrize("shape", [{"sampling": Sampling(max_tokens=60)}, {"sampling": Sampling(max_tokens=60, n=2)}])
async def test_a_worker_that_is_given_a_job_it_still_runs_lets_the_old_run_go(
    shop: Workshop, shape: dict[str, object]
) -> None:
    """The store forgot its claim, as after a failover: two runs of one job on one engine never mix."""
    running = await shop.start(SimSettings(step_ms=20, prefill_ms=1))
    job = await shop.put("twice", 60, **shape)
    await until(lambda: shop.has_deltas(job, 10))
    pipe = shop.wire.redis.pipeline(transaction=True)  # at once: the worker may claim again between any two of these
    pipe.hdel(partition_key(0, "job", job.id), "worker", "attempt", "run", "runs", "claimed")
    pipe.srem(partition_key(0, "claims", running.worker.lease.id), job.id)
    await waits_again(shop.wire.redis, job.id, "m", pipe)
    await pipe.execute()
    record = await shop.ended(job)
    assert record.terminal is not None and record.attempt == 1
    for index in range(job.choices):
        assert text_of(record, index) == expected("twice", 60)
    assert [row.seq for row in record.terminal.rows] == list(range(1, 60 * job.choices + 1))
    assert record.terminal.usage.completion == 60 * job.choices
    assert len(record.terminal.sections) == 1 and running.worker.running == 0 and not running.worker._starter.texts


@pytest.mark.parametrize("spoiled", ["runs", "body"])
async def test_a_record_spoiled_between_two_attempts_ends_no_worker(shop: Workshop, spoiled: str) -> None:
    """The second claim finds a record it cannot read, or a job that has failed since; the worker goes on."""
    lost = Lease(shop.wire, "m")
    job = await shop.put()
    await lost.register()
    await lost.claim(0, 1)
    await lost.release(job.id, 1)
    await shop.wire.redis.hset(partition_key(0, "job", job.id), spoiled, b"\xc1x")
    running, fine = await shop.start(), await shop.put()
    assert (await shop.ended(fine)).state is JobState.COMPLETED
    assert (await shop.ended(job)).state is JobState.FAILED and not running.task.done()
    (letter,) = await DeadLetters(shop.wire).recent(10)
    assert letter.job == job.id and "unreadable" in letter.reason


async def test_a_reader_who_comes_while_the_history_is_read_is_heard(shop: Workshop) -> None:
    """The claim is under way, its reply addresses are read already: the follow is remembered until the job begins."""
    lost = Lease(shop.wire, "m")
    job = await shop.put("late", 30, stream=True)
    await lost.register()
    await lost.claim(0, 1)
    await lost.release(job.id, 1)
    running = await shop.start()
    reader, reading, followed = running.worker._claimer._reader, asyncio.Event(), asyncio.Event()
    read, obey = reader.records, running.worker._obey

    async def slow(job_ids: Sequence[str], *, bodies: bool = True) -> list[JobRecord | None]:
        reading.set()
        await followed.wait()
        return await read(job_ids, bodies=bodies)

    def obeyed(control: Control) -> None:
        obey(control)
        if isinstance(control, AddAddress):
            followed.set()

    reader.records = slow  # type: ignore[method-assign]
    running.worker._obey = obeyed  # type: ignore[method-assign]
    address = channel("api", "reader")
    async with shop.wire.subscribe(address) as subscription:
        await asyncio.wait_for(reading.wait(), 20)
        await shop.queue.add_address(job.id, address)
        reply = decode_reply(await asyncio.wait_for(subscription.message(), 20))
        assert isinstance(reply, Frame) and job.id in [each.job for each in reply.openings.values()]


@pytest.mark.parametrize("comes", ["before", "during"])
async def test_a_reader_beside_the_client_of_an_answer_in_one_piece_gets_deltas(shop: Workshop, comes: str) -> None:
    """At the same API process, which otherwise gets the end alone. It comes before the claim or after it."""
    queue, wire, address = shop.queue, shop.wire, channel("api", "both")
    job = await shop.put("whole", 2000, reply_to=address)
    async with wire.subscribe(address) as subscription:
        if comes == "before":
            await queue.add_address(job.id, address, again=True)
        await shop.start(SimSettings(step_ms=20, prefill_ms=1))
        if comes == "during":
            await until(lambda: shop.has_deltas(job, 2))
            await queue.add_address(job.id, address)
            await queue.add_address(job.id, address, again=True)
        replies = [decode_reply(await asyncio.wait_for(subscription.message(), 20)) for _ in range(20)]
        assert isinstance(replies[0], Frame) and job.id in [each.job for each in replies[0].openings.values()]
        assert sum(bool(isinstance(reply, Frame) and reply.openings) for reply in replies) == 1
        await queue.add_address(job.id, address, again=True)
        await queue.abandon(job.id, address)
        assert (await shop.ended(job)).state is JobState.CANCELLED


async def test_the_late_end_of_an_earlier_run_does_not_end_the_run_held_now(shop: Workshop) -> None:
    """The answer to an old run's finish may come after the same worker has claimed the job again."""
    running = await shop.start(SimSettings(step_ms=20, prefill_ms=1))
    job = await shop.put(max_tokens=4000)
    await until(lambda: running.engine.stats().running == 1)
    number = running.worker._attempts[job.id].run_number
    late = StepWrite()
    late.finishes.append(Finish(Terminal(job.id, JobState.COMPLETED, 0, ("stop",)), number - 1, False))
    running.worker._on_written(late, ())
    assert running.worker.running == 1
    await shop.queue.cancel(job.id)
    record = await shop.ended(job)
    assert record.state is JobState.CANCELLED and record.attempt == 1 and running.worker.running == 0


async def test_the_first_token_of_a_job_stays_that_of_the_attempt_that_gave_it(shop: Workshop) -> None:
    """Continued by another worker, and by a third, whose attempts each say how many tokens they gave."""
    job = await shop.put("first", 120, stream=True, reply_to="someone")
    firsts = []
    for place in (1, 2, 3):
        running = await shop.start(SimSettings(step_ms=5, prefill_ms=1))
        await until(lambda: shop.has_deltas(job, 20 * place))  # noqa: B023
        record = await shop.reader.record(job.id)
        firsts.append((await shop.reader.history(job.id, record.runs)).first_ms)
        if place < 3:
            running.task.cancel()
            await asyncio.gather(running.task, return_exceptions=True)
            await lose_lease(shop.wire, running.worker)
    record = await shop.ended(job)
    assert record.terminal is not None and record.attempt == 3 and text_of(record) == expected("first", 120)
    assert [row.seq for row in record.terminal.rows] == list(range(1, 121))
    first, second, _ = record.attempts
    assert {*firsts, record.first_ms} == {record.first_ms}
    assert first.started_ms <= record.first_ms <= first.ended_ms <= second.started_ms
    made, third = record.terminal.generated, record.attempts[2]
    assert made.shown == 1000 * record.first_ms and abs(made.shown_claimed // 1000 - first.started_ms) <= 1
    written_ms = [each.seen_ms - each.started_ms for each in (first, second)]
    assert 0 < made.kept // 1000 <= sum(written_ms) and made.first // 1000 >= third.started_ms
    tokens = [each.tokens or 0 for each in record.attempts]
    assert sum(tokens) == 120 and all(tokens) and record.terminal.tokens == tuple(tokens)
    assert [each.outcome for each in record.attempts] == ["lost", "lost", "completed"]
