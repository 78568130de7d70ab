"""Requests that are too large for the store: refused for good if no waiting can help, else waited for beside others."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from batching import MODELS, batch_record, client, content, ended, jsonl, tools_of
from batching import begin as begin_batch
from brokering import intake_of
from house import House, redis_process, unstarted

from api.openai.errors import too_large_for_store
from offline.batch import lines as lines_module
from offline.batch.lines import Lines, Terms, validate_input
from offline.broker import Rejected
from penstock.engine import Capabilities, ModelCard, Sampling
from streaming.batches.file_store import BatchSettings
from streaming.batches.ledger import Segment
from streaming.batches.store import BatchLease, BatchProgress, BatchState
from streaming.errors import NeverFits, StoreFull
from streaming.fleet.processes import Fleet
from streaming.ids import partition_of
from streaming.jobs.job import Job, Text
from streaming.jobs.queue import Accepted, Queue
from streaming.jobs.waiting import TOKEN_BYTES, reserved_bytes
from streaming.keys import partition_key
from streaming.order import Priority
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings
from streaming.store.monitor import ADMISSION_SHARE, BATCH_LINE_SHARE, Headroom, StoreMonitor, max_job_bytes

pytestmark = pytest.mark.slow

MIB = 1 << 20
LIMIT = ("--maxmemory", "32mb", "--maxmemory-policy", "noeviction")
HUGE: dict[str, Any] = {"model": "sim", "prompt": ["a"] * 8, "n": 8, "max_tokens": 8000}
"""Its answer may need 35 MiB."""
WORDS = ("35.2 MiB", "max_tokens", "logprobs")


def completion(name: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"model": "sim", **body}}


# --- as people meet it -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """All roles on a store of 32 MB."""
    folder = tmp_path_factory.mktemp("house")
    with unstarted(folder, *LIMIT) as house:
        house.start_all("workers", "offline")
        yield house


def test_a_request_that_never_fits_is_no_reason_to_try_again(small_house: House) -> None:
    """Whole, streamed, with a key and as a job: 400 with the fields and the numbers, and nothing is accepted."""
    job = {"endpoint": "/v1/completions", **HUGE}
    for path, body, headers in (
        ("/v1/completions", HUGE, {}),
        ("/v1/completions", HUGE | {"stream": True}, {}),
        ("/v1/completions", HUGE, {"Idempotency-Key": "huge"}),
        ("/v1/jobs", job, {}),
    ):
        status, answer, data = small_house.post(path, body, headers)
        assert status == 400 and "retry-after" not in answer, data
        error = json.loads(data)["error"]
        assert (error["code"], error["param"]) == ("too_large_for_store", "prompt")
        assert all(word in error["message"] for word in WORDS)
    assert json.loads(small_house.get("/v1/jobs")[1])["data"] == []
    assert small_house.post("/v1/completions", HUGE | {"n": 1, "max_tokens": 4})[0] == 200


@pytest.mark.parametrize(
    ("prompts", "sampling", "param"),
    [(1, Sampling(), "max_tokens"), (1, Sampling(n=8), "n"), (64, Sampling(max_tokens=9, logprobs=20), "prompt")],
)
def test_the_field_at_fault_is_named(prompts: int, sampling: Sampling, param: str) -> None:
    job = Job(id="j", model="m", tenant="t", priority=Priority.BATCH, prompt=Text(("a",) * prompts), sampling=sampling)
    error = too_large_for_store(job, 30 * MIB)
    assert (error.status, error.param) == (400, param)
    assert "30.0 MiB" in error.message


def test_a_line_that_never_fits_is_answered_with_the_error(small_house: House) -> None:
    """The lines behind it are computed, and the batch ends."""
    openai = client(small_house)
    rows = [completion(f"l{number}", prompt=f"a {number}", max_tokens=4) for number in range(7)]
    rows.insert(1, completion("huge", **HUGE))
    done = ended(openai, begin_batch(openai, rows, endpoint="/v1/completions"))
    assert done.status == "completed" and done.request_counts
    assert (done.request_counts.completed, done.request_counts.failed) == (7, 1)
    (bad,) = content(openai, done.error_file_id)
    assert bad["custom_id"] == "huge" and bad["response"]["status_code"] == 400
    error = bad["response"]["body"]["error"]
    assert error["code"] == "too_large_for_store" and all(word in error["message"] for word in WORDS)


# --- below -----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[RedisClient]:
    """The wire to a store of 32 MB."""
    with redis_process(tmp_path, None, "--appendonly", "yes", *LIMIT) as url:
        wire = RedisClient.open(RedisSettings(url=url))
        yield wire
        await wire.close()


def a_job(queue: Queue, tokens: int) -> Job:
    fields: dict[str, Any] = {"model": "sim", "tenant": "t", "priority": Priority.STANDARD, "prompt": Text(("hello",))}
    return Job(id=queue.new_id("t"), sampling=Sampling(max_tokens=tokens), **fields)


def tokens_of(size: int) -> int:
    """Of an answer that may need so many bytes."""
    return size // TOKEN_BYTES


async def test_what_is_refused_for_good_depends_on_the_store_alone(small: RedisClient) -> None:
    """Not on what others hold: a full store refuses for now what an idle one would take, and lines by their share. A
    job just below the bound is accepted by an idle store, so nothing waits for room that never comes."""
    headroom = Headroom(small)
    await headroom.look()
    queue = Queue(small, headroom)
    (memory,) = await small.memory()
    door, lines = max_job_bytes(memory, ADMISSION_SHARE), max_job_bytes(memory, BATCH_LINE_SHARE)
    assert 0 < memory.at_start < memory.used and lines < door < 0.8 * memory.allowed

    async def put_line(job: Job) -> object:
        (answer,) = await queue.put_parts([job])
        return answer

    with pytest.raises(NeverFits) as caught:
        await queue.put(too_large := a_job(queue, tokens_of(door)))
    assert caught.value.most == door < caught.value.needed <= reserved_bytes(too_large) + 1000
    assert isinstance(await put_line(a_job(queue, tokens_of(lines))), NeverFits)
    largest = a_job(queue, tokens_of(lines - 4096))
    assert isinstance(await put_line(largest), Accepted)
    again = await put_line(msgspec.structs.replace(largest, id=queue.new_id("t")))
    assert isinstance(again, StoreFull) and not isinstance(again, NeverFits) and again.needed > lines - 8192
    await queue.cancel(largest.id)
    await headroom.look()
    await queue.put(largest := a_job(queue, tokens_of(door - 4096)))
    with pytest.raises(StoreFull) as full:
        await queue.put(a_job(queue, tokens_of(door - 4096)))
    assert not isinstance(full.value, NeverFits)
    with pytest.raises(NeverFits):
        await queue.put(a_job(queue, tokens_of(door)))


async def test_a_key_leads_to_its_job_whatever_the_store_gives_now(small: RedisClient) -> None:
    """The store was larger when it was accepted."""
    headroom = Headroom(small)
    queue, job = Queue(small, headroom), a_job(Queue(small), tokens_of(15 * MIB))
    await queue.put(job, idempotency_key="k", digest="d")
    await small.redis.config_set("maxmemory", 16 * MIB)
    await headroom.look()
    found = await queue.put(a_job(queue, tokens_of(15 * MIB)), idempotency_key="k", digest="d")
    assert found.joined and found.id == job.id
    with pytest.raises(NeverFits):
        await queue.put(a_job(queue, tokens_of(15 * MIB)), idempotency_key="other", digest="d")


async def test_a_message_that_never_fits_is_rejected(small: RedisClient) -> None:
    """As any that can never be a job, so that those behind it are taken."""
    intake = await intake_of(small)
    asked = {"endpoint": "/v1/completions", **HUGE}
    with pytest.raises(Rejected) as caught:
        await intake.accept(json.dumps(asked).encode(), "huge")
    assert all(word in str(caught.value) for word in WORDS)
    assert await intake.accept(json.dumps(asked | {"n": 1, "max_tokens": 4}).encode(), "small")


# --- lines that wait for room ----------------------------------------------------------------------------------------


@pytest.fixture
async def begin(small: RedisClient, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Makes a turn at a batch of lines that may need so many MiB each, on the store of 32 MB."""
    begun: list[Lines] = []
    headroom, monitor = Headroom(small), StoreMonitor(small)
    await monitor.require()
    card = ModelCard(
        name="sim", engine="sim", context=1 << 20, max_output=1 << 20, capabilities=Capabilities(), created=1
    )
    await Fleet(small).publish_card(card)

    async def begin(*sizes: float, window: int = 64) -> Lines:
        rows = [
            completion(str(number), prompt=f"a {number}", max_tokens=tokens_of(int(size * MIB)))
            for number, size in enumerate(sizes)
        ]
        folder = tmp_path / f"batch{len(begun)}"
        folder.mkdir()
        (folder / "input").write_bytes(jsonl(rows))
        segment = Segment(folder, 1)
        found = validate_input(folder / "input", Terms("/v1/completions", MODELS, 100_000), segment)
        segment.close()
        found.plan.save(folder)
        batch = batch_record(id=f"batch_00{len(begun):030x}", endpoint="/v1/completions")
        hold = BatchLease(
            batch=batch, epoch=2, now_ms=0, state=BatchState.IN_PROGRESS, progress=BatchProgress(total=len(sizes))
        )
        tools = tools_of(small, headroom=headroom, store=monitor, batch=BatchSettings(window=window))
        lines = await Lines.open(tools, hold, folder)
        begun.append(lines)
        await headroom.look()
        return lines

    yield begin
    for lines in begun:
        lines.close()


def queued(lines: Lines) -> list[int]:
    return sorted(lines._queued.values())


async def end(lines: Lines, *which: int) -> None:
    """As if these had been computed: cancelled by their ids, then given up as lines."""
    jobs = [job for job, line in lines._queued.items() if line in which]
    await lines._queue.stop(jobs, waiting_only=False)
    for job in jobs:
        del lines._queued[job]
    await lines._tools.headroom.look()


async def test_a_line_that_waits_for_room_lets_smaller_ones_pass(begin: Callable[..., Any]) -> None:
    """It keeps its place in front of all others, and is put as soon as there is room; the others keep their order."""
    lines: Lines = await begin(12, 12, 1, 12, 1, 1)
    assert await lines.feed() == 0
    assert queued(lines) == [0, 2, 4, 5] and list(lines._waiting) == [1, 3]
    await lines.feed()
    assert queued(lines) == [0, 2, 4, 5] and list(lines._waiting) == [1, 3]
    await end(lines, 0)
    await lines.feed()
    assert queued(lines) == [1, 2, 4, 5] and list(lines._waiting) == [3]
    await end(lines, 1)
    await lines.feed()
    assert queued(lines) == [2, 3, 4, 5] and not lines._waiting and not lines._needed


async def test_a_line_whose_job_the_store_has_lost_is_put_again(small: RedisClient, begin: Callable[..., Any]) -> None:
    lines: Lines = await begin(0.01, 0.01, 15, 15)
    await lines.feed()
    (lost,) = [job for job, line in lines._queued.items() if line == 0]
    await small.redis.delete(partition_key(partition_of(lost) or 0, "job", lost))
    assert await lines.collect() == 0
    assert queued(lines) == [1, 2] and list(lines._waiting) == [0, 3]


async def test_lines_that_wait_are_not_read_again(begin: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor encoded and tried, while what they need is not there: they may be large, and are looked at often. They take
    no place in the window, so more of them than it has places are passed in one round, but never more than
    MAX_BLOCKED and those of one call."""
    few: Lines = await begin(15, *[15] * 9, *[0.01] * 8, window=4)
    await few.feed()
    assert queued(few) == [0, 10, 11, 12]
    await end(few, 0, 10, 11, 12)
    monkeypatch.setattr(lines_module, "MAX_BLOCKED", 10)
    lines: Lines = await begin(15, *[15] * 70, *[0.01] * 8, window=2)
    read: list[int] = []
    jobs = lines._jobs
    monkeypatch.setattr(lines, "_jobs", lambda some, *rest: read.extend(some) or jobs(some, *rest))
    for _ in range(5):
        await lines.feed()
    assert queued(lines) == [0]
    assert read == list(range(12)) and list(lines._waiting) == list(range(1, 79))
