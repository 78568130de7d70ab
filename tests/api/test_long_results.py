"""Results of very many rows: read and told in slices, fetched for those who want them, given up with their clients."""

from __future__ import annotations

import json
import re
from typing import Any, cast

import pytest
from flow import kept
from house import House
from msgspec.structs import replace
from redis import Redis
from rendered import completion, facts_of

from api.openai.rendering import completion_in_slices, to_json
from penstock.engine import ChatTurn, Logprob
from penstock.loops import ROWS_PER_SLICE, Turns, at_once
from streaming.errors import UnknownJob
from streaming.jobs.codec import LONG_BYTES, Delta, Run, Section, Terminal, decode_terminal, encode, record_rows
from streaming.jobs.job import Chat, Job, JobState
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
