"""Results of very many rows: read and told in slices, fetched for those who want them, given up with their clients."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
from flow import kept
from house import House
from msgspec.structs import replace
from redis import Redis
from rendered import completion, facts_of
from starlette.requests import Request

from api.durable import page_after
from api.jobs import own_record
from api.openai.errors import ApiError
from api.openai.rendering import Facts, completion_in_slices, to_json
from penstock.engine import ChatTurn, Logprob, Sampling
from penstock.loops import ROWS_PER_SLICE, Turns, at_once
from streaming.errors import UnknownJob
from streaming.jobs.codec import (
    LONG_BYTES,
    Delta,
    Run,
    Section,
    Terminal,
    decode_job,
    decode_terminal,
    encode,
    record_rows,
)
from streaming.jobs.job import Chat, Job, JobState, Text
from streaming.jobs.lease import without_rows
from streaming.jobs.reader import JobReader
from streaming.keys import partition_key
from streaming.order import Priority
from streaming.redis.client import RedisClient

pytestmark = pytest.mark.slow

JOB = "job_00" + "1" * 30
ROWS = 5 * ROWS_PER_SLICE
RUN = Run("w", 1)


def long_end(job_id: str = JOB, rows: int = ROWS, logprobs: tuple[Logprob, ...] = ()) -> Terminal:
    """The end of a job with so many tokens."""
    deltas = tuple(Delta(1, seq, f"a token {seq} ", (seq,), 0, 1, "", logprobs) for seq in range(1, rows + 1))
    return Terminal(job_id, JobState.COMPLETED, rows, ("stop",), sections=(Section(1, RUN),), rows=deltas)


def stored(end: Terminal) -> dict[str, bytes]:
    """As the store holds it."""
    return {"record": encode(without_rows(end)), "rows": record_rows(end)}


async def put_ended(wire: RedisClient, end: Terminal) -> None:
    """A job of tenant `t` that has ended so."""
    job = Job(id=end.job, model="m", tenant="t", priority=Priority.STANDARD, prompt=Chat((ChatTurn("user", "x"),)))
    lane = partition_key(0, "lane", "m", "standard")
    fields = {"state": "completed", "body": encode(job), "tenant": "t", "lane": lane, "runs": "w:1:1;", "created": 1}
    await wire.redis.hset(partition_key(0, "job", end.job), mapping={**fields, **stored(end)})  # type: ignore[misc]


class Counted(Turns):
    """Says how many slices were done."""

    slices = 0

    async def __aenter__(self) -> None:
        await super().__aenter__()
        self.slices += 1


async def test_a_long_result_is_decoded_in_slices(wire: RedisClient) -> None:
    """What is read is what was written, by a slice for each so many rows; a short one is read at once."""
    end = long_end()
    assert len(record_rows(end)) > LONG_BYTES
    await put_ended(wire, end)
    wire.turns = counted = Counted()
    assert (await JobReader(wire).record(JOB)).terminal == replace(end, rows=kept(end.rows))
    assert counted.slices >= ROWS // ROWS_PER_SLICE
    await put_ended(wire, short := long_end(rows=10))
    before = counted.slices
    assert (await JobReader(wire).outline(JOB)).terminal == replace(short, rows=kept(short.rows))
    assert counted.slices == before


async def test_a_result_is_fetched_for_nobody_but_its_owner(wire: RedisClient) -> None:
    """Nor for the owner, where no row is wanted."""
    end = long_end()
    await put_ended(wire, end)
    job_reader = JobReader(wire)

    async def fetched() -> int:
        return int((await wire.redis.info("stats"))["total_net_output_bytes"])

    before = await fetched()
    record = await job_reader.outline(JOB, "t")
    assert record.rowless and record.terminal == without_rows(end)
    with pytest.raises(UnknownJob):
        await job_reader.outline(JOB, "another")
    assert await fetched() - before < LONG_BYTES
    passed = (await job_reader.record(JOB, rows=False)).terminal
    assert passed == without_rows(end)


@pytest.mark.parametrize("chat", [False, True])
def test_a_long_answer_is_rendered_in_slices(chat: bool) -> None:
    """It is the same answer, its log-probabilities included."""
    facts = facts_of(chat=chat, job_id=JOB)
    end = long_end()
    steps = sum(1 for _ in completion_in_slices(facts, end, end.rows))
    assert steps >= ROWS // ROWS_PER_SLICE  # its text is joined in a slice of its own
    said = completion(facts, end, end.rows)["choices"][0]
    assert (said["message"]["content"] if chat else said["text"]) == "".join(row.text for row in end.rows)
    facts, odd = facts_of(chat=chat, logprobs=True, job_id=JOB), Logprob("\u2028é", -0.5, (("a", -1.0),))
    end = long_end(rows=950, logprobs=(odd,))
    assert sum(1 for _ in completion_in_slices(facts, end, end.rows)) >= 9
    shown = json.loads(to_json(at_once(completion_in_slices(facts, end, end.rows))))
    assert shown["choices"][0]["logprobs"] == json.loads(to_json(facts.logprobs_object([odd] * 950)))


def test_every_look_at_a_long_result_tells_the_same(empty_house: House) -> None:
    """Job, result, events; the answer of a cancel, and the timing, need none of it."""
    house = empty_house
    house.start_all("workers")
    body = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    job_id = json.loads(house.post("/v1/jobs", body)[2])["id"]
    path = f"/v1/jobs/{job_id}"
    short = json.loads(house.get(f"{path}?wait=30")[1])
    timing = json.loads(house.get(f"{path}/timing")[1])
    key = partition_key(0, "job", job_id)
    with Redis.from_url(house.redis_url) as store:
        was = decode_terminal(cast(bytes, store.hget(key, "record")))
        end = replace(was, seq=ROWS, rows=long_end().rows)
        store.hset(key, mapping=cast(dict[Any, Any], stored(end)))
        before = int(cast(dict[str, Any], store.info("stats"))["total_net_output_bytes"])
        cancelled = json.loads(house.post(f"{path}/cancel", {})[2])
        after = int(cast(dict[str, Any], store.info("stats"))["total_net_output_bytes"])
    assert after - before < LONG_BYTES
    shown = json.loads(house.get(path)[1])
    assert shown["result"]["choices"][0]["message"]["content"] == "".join(row.text for row in end.rows)
    assert json.loads(house.get(f"{path}/result")[1]) == shown["result"]
    assert cancelled == shown | {"result": None, "already_ended": True}
    assert shown | {"result": None, "last_event_id": ""} == short | {"result": None, "last_event_id": ""}
    assert json.loads(house.get(f"{path}/timing")[1])["parts_ms"] == timing["parts_ms"]
    log = house.get(f"{path}/events")[1].decode()
    texts = [json.loads(data)["text"] for data in re.findall(r"event: delta\nid: \S+\ndata: (.*)\n", log)]
    assert texts == [row.text for row in end.rows]
    assert f"event: completed\nid: {shown['last_event_id']}\n" in log


BODY = 400_000
JOBS = 12


def put(house: House, text: str, **more: Any) -> str:
    body = {"model": "sim", "messages": [{"role": "user", "content": text}], **more}
    status, _, answer = house.post("/v1/jobs", body)
    assert status == 202, answer
    return str(json.loads(answer)["id"])


def jobs(house: House, query: str = "") -> dict[str, Any]:
    status, data = house.get(f"/v1/jobs?{query}")
    assert status == 200, data
    found: dict[str, Any] = json.loads(data)
    return found


def enlarge(store: Redis, job_id: str) -> None:
    """As if its prompt were as long as one may be."""
    key = f"penstock:{{0}}:job:{job_id}"
    job = decode_job(store.hget(key, "body"))
    store.hset(key, "body", encode(replace(job, prompt=Text(("x" * BODY,)))))


def sent_by(store: Redis) -> int:
    """Bytes the server has sent to everybody."""
    return int(store.info("stats")["total_net_output_bytes"])


@pytest.fixture
def store(empty_house: House) -> Any:
    with Redis.from_url(empty_house.redis_url) as client:
        yield client


def test_a_list_reads_summaries(empty_house: House, store: Redis) -> None:
    """A page of jobs with large prompts costs the store a few kB, and shows what each job shows itself, but neither
    result nor attempts."""
    house = empty_house
    house.start_all("workers")
    done = put(house, "hello", max_tokens=4, metadata={"who": "me"}, queue={"priority": "batch"})
    assert json.loads(house.get(f"/v1/jobs/{done}?wait=30")[1])["status"] == "completed"
    refused = put(house, "hello", max_tokens=2000, queue={"deadline_ms": 50})
    assert json.loads(house.get(f"/v1/jobs/{refused}?wait=30")[1])["status"] == "expired"
    large = [put(house, "hello", max_tokens=1) for _ in range(JOBS)]
    for job in large:
        assert json.loads(house.get(f"/v1/jobs/{job}?wait=30")[1])["status"] == "completed"
    for job in large:
        enlarge(store, job)
    before = sent_by(store)
    listed = jobs(house, "limit=100")["data"]
    assert sent_by(store) - before < BODY / 2
    assert [each["id"] for each in listed] == [*reversed(large), refused, done]
    for job in (done, refused):
        shown = json.loads(house.get(f"/v1/jobs/{job}")[1])
        (row,) = [each for each in listed if each["id"] == job]
        assert row == shown | {"result": None, "attempt_log": None, "preview": "hello"}


@pytest.mark.parametrize(
    ("tenant", "job_id", "code"),
    [
        ("red", "job_00" + "1" * 30, "result_expired"),
        ("blue", "job_00" + "1" * 30, "job_not_found"),
        ("red", "job_00" + "2" * 30, "job_not_found"),
        ("red", "job_ff" + "1" * 30, "job_not_found"),
        ("red", "nonsense", "job_not_found"),
    ],
)
async def test_only_the_owner_is_told_that_a_job_was_kept_once(
    wire: RedisClient, tenant: str, job_id: str, code: str
) -> None:
    """Everybody else hears the same as of a job that never was."""
    await wire.redis.zadd(partition_key(0, "jobs", "red"), {"job_00" + "1" * 30: 1})
    app = SimpleNamespace(
        state=SimpleNamespace(services=SimpleNamespace(store_client=wire, job_reader=JobReader(wire)))
    )
    state = {"caller": SimpleNamespace(tenant=tenant)}
    with pytest.raises(ApiError) as refused:
        await own_record(Request({"type": "http", "app": app, "state": state, "path_params": {"job_id": job_id}}))
    assert refused.value.code == code


async def test_messages_with_many_log_probabilities_are_rendered_in_slices(wire: RedisClient) -> None:
    """Each row may have those of a whole prompt: few rows are much work."""
    rows, asked = 20, Sampling(logprobs=0)
    await put_ended(wire, long_end(rows=rows, logprobs=(Logprob("token", -1.0, ()),) * 1000))
    record, wire.turns = await JobReader(wire).outline(JOB), Counted()
    services = SimpleNamespace(
        job_reader=JobReader(wire),
        store_client=SimpleNamespace(turns=(counted := Counted())),
        facts=lambda job, created_ms: Facts(replace(job, sampling=asked), created_ms),
    )
    page = await page_after(cast(Any, services), record, None)
    assert len(page.messages) == rows + 1 and page.closed and counted.slices >= rows / 2
