"""What jobs generated, read from the logs of their workers: one pass for all of them, in slices."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from flow import MODEL, a_job, append, delta
from hypothesis import given
from hypothesis import strategies as st

from streaming.jobs import history
from streaming.jobs.codec import Delta, Frame, Run, Section
from streaming.jobs.history import Histories, Logged, LoggedRun, dispatch, history_of
from streaming.jobs.lease import SILENT, Claim, Lease
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.redis.client import RedisClient

STEPS = st.lists(st.lists(st.integers(1, 6), max_size=6, unique=True), max_size=30)


@given(STEPS, st.sets(st.integers(1, 6)), st.sets(st.integers(1, 6)))
def test_rows_are_dealt_to_those_who_want_them(steps: list[list[int]], wanted: set[int], copying: set[int]) -> None:
    """Each run gets its own rows and its copies, whoever else is in the frames."""
    said: dict[int, list[Delta]] = {}
    logged = {Run("w", number): Logged() for number in wanted}
    for frame, numbers in enumerate(steps, 1):
        streams = [-number if number in copying else number for number in numbers]
        new = [Delta(stream, len(said.get(stream, ())) + 1, "x", (), 0, 1) for stream in streams]
        for row in new:
            said.setdefault(row.run_number, []).append(row)
        dispatch(Frame("w", frame, tuple(new)), logged)
        dispatch(Frame("v", frame, tuple(new)), logged)
    for number in wanted:
        taker = logged[Run("w", number)]
        assert list(taker.own.values()) == said.get(number, [])
        assert list(taker.copies.values()) == said.get(-number, [])


def test_copies_stand_in_for_what_is_missing_and_for_nothing_else() -> None:
    """The first run's log is gone, but for its third delta; the second run logged copies of all three."""
    first, second, idle = Run("v", 1), Run("w", 1), Run("w", 2)
    rows = {seq: Delta(1, seq, "x", (), 0, 1) for seq in range(1, 6)}
    copies = {seq: Delta(-1, seq, "x", (), 0, 1) for seq in (1, 2, 3)}
    logged = {first: Logged({3: rows[3]}), second: Logged({4: rows[4], 5: rows[5]}, copies), idle: Logged()}
    found = history_of([LoggedRun(run, 1) for run in (first, second, idle)], logged)
    assert found.rows == [copies[1], copies[2], rows[3], rows[4], rows[5]] and found.whole
    assert [section.first for section in found.sections] == [3, 4, 6] and found.last_run == second
    del copies[2]
    assert not history_of([LoggedRun(first, 1), LoggedRun(second, 1)], logged).whole


async def running(wire: RedisClient, jobs: int, steps: int) -> tuple[Lease, list[Claim]]:
    """A worker that has run so many jobs for so many steps."""
    queue, lease = Queue(wire), Lease(wire, MODEL)
    await lease.register()
    for _ in range(jobs):
        await queue.put(a_job(queue))
    claims = [claim for claim in (await lease.claim(0, jobs)).jobs if isinstance(claim, Claim)]
    for seq in range(1, steps + 1):
        opened = claims if seq == 1 else ()
        await lease.calls([append(lease, {SILENT: [delta(claim, seq) for claim in claims]}, *opened)])
    return lease, claims


async def reads(wire: RedisClient) -> int:
    stats = await wire.redis.info("commandstats")
    return int(stats.get("cmdstat_xrange", {"calls": 0})["calls"])


async def test_one_pass_serves_all_jobs_of_a_claim(wire: RedisClient) -> None:
    """However many there are, a log is read once; each job gets all of its own."""
    lease, claims = await running(wire, 24, 2 * history.PAGE)
    reader, before = JobReader(wire), await reads(wire)
    records = await reader.records([claim.job.id for claim in claims], bodies=False)
    found = await asyncio.gather(*(reader.history(record.job.id, record.runs) for record in records if record))
    assert await reads(wire) - before == 3  # two whole pages, and one that says that there is no more
    for claim, each in zip(claims, found, strict=True):
        assert each.rows == [delta(claim, seq) for seq in range(1, 2 * history.PAGE + 1)]
        assert each.sections == (Section(1, Run(lease.id, claim.run_number)),)


async def test_others_have_their_turn_while_a_log_is_read(wire: RedisClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page with very many rows is decoded in slices."""
    _, claims = await running(wire, 20, 40)
    monkeypatch.setattr(history, "ROWS_AT_ONCE", 100)
    turns, at_answer = 0, []
    read = wire.redis.xrange

    async def noted(*args: Any, **options: Any) -> Any:
        found = await read(*args, **options)
        at_answer.append(turns)
        return found

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(wire.redis, "xrange", noted)
    counting = asyncio.create_task(count())
    record = await JobReader(wire).record(claims[0].job.id)
    rows = (await Histories(wire).read(record.job.id, record.runs)).rows
    counting.cancel()
    assert len(rows) == 40 and len(at_answer) == 1
    assert turns - at_answer[0] >= 20 * 40 // 100 - 1
    assert {row.run_number for row in rows} == {claims[0].run_number}
