"""Pages of jobs as lists show them: over partitions, in bounds, each job once, whatever an entry holds."""

from __future__ import annotations

import unicodedata
from typing import Any

import msgspec
import pytest
from flow import MODEL, a_job, claim_one, put_job
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.engine import ChatTurn
from streaming.ids import partition_of
from streaming.jobs.codec import Terminal, Usage
from streaming.jobs.job import MAX_PREVIEW_CHARS, Chat, Inputs, Job, JobState, Prompt, Text, Tokens, preview_of
from streaming.jobs.lease import Finish, Lease
from streaming.jobs.queue import Queue
from streaming.jobs.reader import ANY, JobFilter, JobPage, JobReader, PageKey, Summaries, merged
from streaming.jobs.records import JobRecord
from streaming.keys import partition_key
from streaming.order import Priority
from streaming.redis.client import RedisClient


def summary(key: PageKey) -> JobRecord:
    job = Job(id=key[1], model="m", tenant="t", priority=Priority.BATCH, prompt=Text(("",)))
    return JobRecord(job=job, state=JobState.QUEUED, created_ms=key[0], keep_s=1, terminal=None)


PLACES = st.lists(st.tuples(st.integers(0, 9), st.text("ab", min_size=1, max_size=3)), max_size=40, unique=True)


@given(st.lists(PLACES, min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 7))
def test_pages_hold_every_job_once_in_order(partitions: list[list[PageKey]], limit: int, looked: int) -> None:
    """However unevenly those of a state lie in partitions, and however few jobs a partition looks at for a page."""
    jobs = [sorted({(time, f"{name}{number}") for time, name in each}) for number, each in enumerate(partitions)]

    def is_listed(key: PageKey) -> bool:
        return key[1].startswith("a")

    def part(own: list[PageKey], before: PageKey | None) -> JobPage:
        rest = [key for key in reversed(own) if before is None or key < before]
        found: list[PageKey] = []
        count = 0
        while count < min(looked, len(rest)) and len(found) < limit:
            found += [rest[count]] if is_listed(rest[count]) else []
            count += 1
        return JobPage([(key, summary(key)) for key in found], rest[count - 1] if count < len(rest) else None)

    found: list[PageKey] = []
    before: PageKey | None = None
    while True:
        page = merged([part(own, before) for own in jobs], limit)
        assert len(page.jobs) <= limit
        found += [(each.created_ms, each.job.id) for each in page.jobs]
        if page.behind is None:
            break
        assert before is None or page.behind < before
        before = page.behind
    assert found == sorted((key for own in jobs for key in own if is_listed(key)), reverse=True)


async def pages(wire: RedisClient, limit: int, wanted: JobFilter = ANY) -> list[str]:
    found: list[str] = []
    before = None
    while True:
        page = await Summaries(wire).recent(["t"], before, limit, wanted)
        found += [each.job.id for each in page.jobs]
        if (before := page.behind) is None:
            return found


async def test_a_page_says_what_was_put_and_how_it_ended(wire: RedisClient) -> None:
    """Of a job that waits, one that runs, one that was cancelled, and one that ended with its answer."""
    queue, lease = Queue(wire), Lease(wire, MODEL)
    await lease.register()
    jobs = [replace(a_job(queue), metadata={"n": str(number)}) for number in range(4)]
    ended = jobs[0].id
    await queue.put(jobs[0])
    claim = await claim_one(lease)
    end = Terminal(ended, JobState.COMPLETED, 3, ("stop",), Usage(1, 2, 0), worker=lease.id, first_ms=7)
    await lease.calls([lease.finish_call(Finish(end, claim.attempt, False))])
    await queue.put(jobs[1])
    await lease.claim(0, 1)
    for job in jobs[2:]:
        await queue.put(job)
    await queue.cancel(jobs[2].id)
    page = await Summaries(wire).recent(["t"], None, 10)
    shown = {each.job.id: each for each in page.jobs}
    assert [shown[job.id].job.metadata for job in jobs] == [{"n": str(number)} for number in range(4)]
    assert [shown[job.id].state for job in jobs] == [
        JobState.COMPLETED,
        JobState.RUNNING,
        JobState.CANCELLED,
        JobState.QUEUED,
    ]
    assert {(each.job.model, each.job.priority) for each in page.jobs} == {(MODEL, Priority.STANDARD)}
    assert shown[ended].terminal == end and shown[ended].done_ms >= shown[ended].started_ms > 0
    cancelled = shown[jobs[2].id].terminal
    assert cancelled is not None and cancelled.failure is not None and cancelled.failure.code == "job_cancelled"
    assert shown[jobs[1].id].terminal is None and page.behind is None
    assert await pages(wire, 10, JobFilter(JobState.QUEUED)) == [jobs[3].id]


async def test_pages_under_a_filter_have_each_job_that_passes_once(wide: RedisClient) -> None:
    """In any partition, with any page size; a job that was put back to a lane still has its model and its lane."""
    queue, made = Queue(wide), dict[str, tuple[str, Priority, int]]()
    for number in range(60):
        model, lane = ("m", "other:model")[number % 2], list(Priority)[number % 3]
        job = replace(a_job(queue), model=model, priority=lane)
        await queue.put(job)
        at = await wide.now_ms() // 10**7 * 10**7 + number // 4
        await wide.redis.zadd(partition_key(partition_of(job.id) or 0, "jobs", "t"), {job.id: at})
        made[job.id] = model, lane, at
    times = sorted(at for _, _, at in made.values())
    for wanted in (
        JobFilter(model="m"), JobFilter(model="other:model", lane=Priority.BATCH), JobFilter(lane=Priority.STANDARD),
        JobFilter(since_ms=times[20]), JobFilter(until_ms=times[20]), JobFilter(since_ms=times[10], until_ms=times[40]),
        JobFilter(JobState.QUEUED, "m", Priority.BATCH, times[5], times[50]), JobFilter(JobState.FAILED),
        JobFilter(since_ms=times[-1] + 1), JobFilter(until_ms=times[0] - 1), JobFilter(model="none"),
    ):  # fmt: skip
        passing = [
            job
            for job, (model, lane, at) in made.items()
            if wanted.state in (None, JobState.QUEUED) and wanted.model in ("", model) and wanted.lane in (None, lane)
            and (wanted.since_ms or 0) <= at <= (wanted.until_ms or at)
        ]  # fmt: skip
        for limit in (3, 100):
            assert sorted(await pages(wide, limit, wanted)) == sorted(passing), (wanted, limit)


TURNS = {
    "Name a river.": (("system", "Be brief."), ("user", "Name a river.")),
    "[tool] What is the weather?": (("user", "What is the weather?"), ("assistant", ""), ("tool", "22 degrees")),
    "[system] Be brief.": (("system", "Be brief."),),
    "a b [31m c": (("user", "  a\r\n\tb \x1b[31m\x07\u202ec\ud800 "),),
    "": (("user", ""),),
    "late": (("user", " " * 10**5 + "late"),),
}


@pytest.mark.parametrize(
    ("words", "prompt"),
    [
        *((words, Chat(tuple(ChatTurn(*turn) for turn in turns))) for words, turns in TURNS.items()),
        ("one", Text(("one",))),
        ("[2 prompts] one", Text(("one", "two"))),
        ("[3 token ids]", Tokens(((1, 2, 3),))),
        ("[2 prompts of token ids]", Tokens(((1,), (2,)))),
        ("[3 inputs] query", Inputs((("query", "a"), ("b",)))),
        ("[2 token ids]", Inputs((((1, 2),),))),
        ("[2 inputs] late", Inputs(((), ("late", "b")))),
        ("", Chat(())),
        ("", Text(())),
        ("[0 prompts of token ids]", Tokens(())),
        ("[0 token ids]", Tokens(((),))),
        ("", Inputs(())),
        ("", Inputs(((),))),
    ],
)
def test_the_first_words_of_a_prompt_are_one_line_without_control_characters(words: str, prompt: Prompt) -> None:
    assert preview_of(prompt) == words


LONG_TEXTS = ("x" * 81, "word " * 10**5, "e\u0301" * 200, "\U0001f468\u200d\U0001f469" * 90, "\u6c34" * 500)


@pytest.mark.parametrize("text", LONG_TEXTS)
def test_the_first_words_of_a_long_prompt_are_bounded_and_end_between_characters(text: str) -> None:
    found = preview_of(Text((text,)))
    assert len(found) <= MAX_PREVIEW_CHARS and found.endswith("…")
    assert text.startswith(found[:-1].rstrip()) and not unicodedata.combining(text[len(found) - 1])


async def test_jobs_of_one_moment_are_told_apart(wide: RedisClient) -> None:
    """Accepted in the same millisecond, in any partition, behind a job that is gone since: each is listed once."""
    queue = Queue(wide)
    jobs = [a_job(queue).id for _ in range(60)]
    for job in jobs:
        await queue.put(a_job(queue, id=job))
        at = await wide.now_ms() // 10**7 * 10**7
        await wide.redis.zadd(partition_key(partition_of(job) or 0, "jobs", "t"), {job: at})
    assert await pages(wide, 7) == sorted(jobs, reverse=True)
    page = await Summaries(wide).recent(["t"], None, 7)
    assert page.behind is not None
    await wide.redis.zrem(partition_key(partition_of(page.behind[1]) or 0, "jobs", "t"), page.behind[1])
    rest = await Summaries(wide).recent(["t"], page.behind, 100)
    assert [each.job.id for each in rest.jobs] == sorted(jobs, reverse=True)[7:]


async def test_a_made_up_cursor_reads_no_more_than_a_page(wire: RedisClient) -> None:
    """A reader may pair any time with any id. A time before all jobs with the id of the newest one leads behind all of
    them, and the server does not walk there."""
    now, jobs = await wire.now_ms(), partition_key(0, "jobs", "t")
    ids = [f"job_00{number:030x}" for number in range(20_000)]
    await wire.redis.zadd(jobs, {job: now + number // 5_000 for number, job in enumerate(ids)})

    async def entries_read() -> int:
        stats = await wire.redis.info("commandstats")
        return int(stats.get("cmdstat_zrange", {"calls": 0})["calls"])

    before = await entries_read()
    for time, job in ((1, ids[-1]), (now, ids[0]), (now - 1, ids[-1]), (now, "")):
        assert await Summaries(wire).recent(["t"], (time, job), 10) == JobPage([], None)
    assert await entries_read() - before < 60
    for key in ((now, ids[-1]), (now + 3, "job_ff" + 30 * "f"), (now + 4, "")):
        assert (await Summaries(wire).recent(["t"], key, 10)).behind is not None


async def test_the_last_page_of_a_long_list_costs_what_the_first_does(wire: RedisClient) -> None:
    """Each job is listed once, the newest first. A state that hardly any job has is looked for in bounds: a page may be
    empty, and leads on."""
    waiting, ids = await put_job(Queue(wire)), [f"job_00{number:030x}" for number in range(2_400)]
    now, lane = await wire.now_ms(), partition_key(0, "lane", MODEL, Priority.BATCH)
    redis: Any = wire.redis
    pipeline = redis.pipeline(transaction=False)
    for number, job in enumerate(ids, 1):
        row = {"state": "cancelled", "body": "", "lane": lane, "created": now + number}
        pipeline.hset(partition_key(0, "job", job), mapping=row)
        pipeline.zadd(partition_key(0, "jobs", "t"), {job: now + number})
    await pipeline.execute()

    async def jobs_read() -> int:
        return int((await redis.info("commandstats")).get("cmdstat_hmget", {"calls": 0})["calls"])

    found, costs = list[str](), list[int]()
    before: PageKey | None = None
    while before is not None or not costs:
        read = await jobs_read()
        page = await Summaries(wire).recent(["t"], before, 100)
        costs.append(await jobs_read() - read)
        found, before = found + [each.job.id for each in page.jobs], page.behind
    assert found == [*reversed(ids), waiting.id]
    assert costs[0] >= 100 and max(costs) <= 110, costs
    read, queued = await jobs_read(), JobFilter(JobState.QUEUED)
    page = await Summaries(wire).recent(["t"], None, 100, queued)
    assert page.jobs == [] and page.behind is not None
    assert await jobs_read() - read < len(ids) / 2
    assert await pages(wire, 100, queued) == [waiting.id]


async def test_a_list_says_what_a_look_says_of_an_end_that_cannot_be_read(wire: RedisClient) -> None:
    """One that a newer version wrote, and one that nobody can read."""
    queue = Queue(wire)
    codes = {"newer_version": msgspec.msgpack.encode(["t2", "x", {}]), "malformed_job": b"\xc1"}
    for end in codes.values():
        job = await put_job(queue)
        fields = {"state": "completed", "record": end}
        await wire.redis.hset(partition_key(0, "job", job.id), mapping=fields)  # type: ignore[misc]
    listed = (await Summaries(wire).recent(["t"], None, 10)).jobs
    found = [each.terminal for each in listed]
    assert {end.failure.code for end in found if end and end.failure} == codes.keys()
    assert found == [(await JobReader(wire).record(each.job.id)).terminal for each in listed]
