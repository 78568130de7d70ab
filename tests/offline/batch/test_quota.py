"""Token quotas of batches: every line by the unit of work, while it is read, while it runs, and given back exactly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from batching import MODELS, TOKENS, batch_record, begin, client, ended, jsonl, line, tools_of
from house import House, eventually, key_rows
from openai import OpenAI
from redis import Redis

from offline.batch.lines import Lines, Terms, validate_input
from offline.batch.turn import BatchTurn
from penstock.engine import Capabilities, ModelCard
from streaming.batches.file_store import BatchSettings
from streaming.batches.ledger import LineOutcome, Segment
from streaming.batches.store import Batches, BatchLease, BatchProgress, BatchState
from streaming.jobs.job import Job
from streaming.keys import partition_key
from streaming.redis.client import RedisClient

pytestmark = pytest.mark.slow

DEFAULT = 128
"""Tokens of the simulated engine's answers to requests without max_tokens."""
CARDS = {
    "sim": ModelCard(
        name="sim", engine="sim", context=8192, max_output=8191, capabilities=Capabilities(), created=1,
        default_output=DEFAULT,
    )
}  # fmt: skip


PLAIN = {"endpoint": "/v1/completions"}


def completion(number: int, **body: Any) -> dict[str, Any]:
    asked = {"model": "sim", **body}
    return {"custom_id": f"r-{number}", "method": "POST", "url": "/v1/completions", "body": asked}


@pytest.mark.parametrize(("body", "tokens"), [
    ({"prompt": "a" * 40, "max_tokens": 100}, 110),
    ({"prompt": "a" * 40, "max_tokens": 100, "n": 8}, 8 * 110),
    ({"prompt": ["a" * 40] * 16, "max_tokens": 100, "n": 8}, 16 * 8 * 110),
    ({"prompt": "a" * 40}, 10 + DEFAULT),
    ({"prompt": [[1, 2], [3, 4, 5]], "n": 2}, 2 * 5 + 4 * DEFAULT),
    ({"prompt": [[1] * 8100]}, 8100 + 92),
    ({"prompt": "a" * 40, "max_tokens": 1_000_000}, 10 + 8191),
])  # fmt: skip
def test_a_line_weighs_what_it_may_have_computed(tmp_path: Path, body: dict[str, Any], tokens: int) -> None:
    """n, lists of prompts and a missing max_tokens are no way around a quota."""
    (tmp_path / "input").write_bytes(jsonl([completion(0, **body)]))
    segment = Segment(tmp_path, 1)
    found = validate_input(tmp_path / "input", Terms("/v1/completions", MODELS, 10, cards=CARDS), segment)
    segment.close()
    assert (found.faults, found.tokens, list(found.plan.tokens)) == ([], tokens, [tokens])


@pytest.fixture
def ann(empty_house: House) -> OpenAI:
    """A tenant who may have 1,000 tokens waiting, and a worker that takes long for them."""
    house = empty_house
    (house.folder / "penstock.toml").write_text(key_rows(ann="batch_tokens = 1000"))
    house.environ |= {"PENSTOCK_SIM_SLOTS": "2", "PENSTOCK_SIM_STEP_MS": "10", "PENSTOCK_WORKER_RESERVED_SLOTS": "0"}
    house.start_all("workers", "offline")
    return client(house, "ann")


def test_a_quota_of_a_thousand_tokens_holds(empty_house: House, ann: OpenAI) -> None:
    """Lists of prompts, n and lines without max_tokens are counted, whatever the endpoint; a batch that is paused keeps
    its share, and one that was resumed, cancelled or is done has given back all of it."""
    house = empty_house
    with Redis.from_url(house.redis_url) as redis:
        enqueued = partition_key(0, "enqueued", "ann")

        def waiting() -> int:
            return sum(map(int, redis.hvals(enqueued)))  # type: ignore[arg-type]

        too_many = (
            [completion(0, prompt=["a"] * 16, n=4, max_tokens=200)],
            [completion(number, prompt=["a"]) for number in range(8)],
            [line(number, max_tokens=None) for number in range(8)],
            [line(number, n=8, max_tokens=100) for number in range(2)],
        )
        for lines in too_many:
            over = ended(ann, begin(ann, lines, endpoint=lines[0]["url"]))
            assert over.status == "failed" and over.errors and over.errors.data
            assert over.errors.data[0].code == "token_limit_exceeded"
            assert redis.exists(enqueued) == 0
        rows = [completion(number, prompt=["a" * 8] * 2, n=2, max_tokens=110) for number in range(2)]
        held = begin(ann, rows, **PLAIN)
        eventually(lambda: ann.batches.retrieve(held.id).status == "in_progress")
        assert waiting() == 2 * 4 * (2 + 110) == 896
        assert house.post(f"/v1/batches/{held.id}/pause", {}, {"Authorization": "Bearer ann"})[0] == 200
        assert ended(ann, begin(ann, [completion(0, prompt="a", max_tokens=105)], **PLAIN)).status == "failed"
        assert 0 < waiting() <= 896
        assert house.post(f"/v1/batches/{held.id}/resume", {}, {"Authorization": "Bearer ann"})[0] == 200
        ann.batches.cancel(held.id)
        assert ended(ann, held).status == "cancelled" and redis.exists(enqueued) == 0
        rows = [completion(number, prompt=["a"], max_tokens=20) for number in range(50)]
        done = ended(ann, begin(ann, rows, **PLAIN))
        assert done.status == "completed" and redis.exists(enqueued) == 0


@pytest.fixture
async def lines(wire: RedisClient, tmp_path: Path) -> AsyncIterator[Lines]:
    """A turn at a batch of ten lines of different weight, of which the fourth has its answer."""
    asked = [line(number, f"line {number}", n=1 + number % 3) for number in range(10)]
    (tmp_path / "input").write_bytes(jsonl(asked))
    segment = Segment(tmp_path, 1)
    found = validate_input(tmp_path / "input", Terms("/v1/chat/completions", MODELS, 100, cards=CARDS), segment)
    segment.add(3, LineOutcome.DONE, 0, b"{}")
    segment.commit()
    segment.close()
    found.plan.save(tmp_path)
    hold = BatchLease(
        batch=batch_record(), epoch=2, now_ms=0, state=BatchState.IN_PROGRESS, progress=BatchProgress(total=10)
    )
    tools = tools_of(wire, tmp_path, batch=BatchSettings(window=4))
    await tools.store.require()
    lines = await Lines.open(tools, hold, tmp_path)
    yield lines
    lines.close()


def units(*numbers: int) -> int:
    """Of these lines."""
    texts = [json.dumps(f"line {number}") for number in numbers]
    assert len({len(text) for text in texts}) <= 1
    return sum((1 + number % 3) * (len("user" + "line 0") // 4 + TOKENS) for number in numbers)


async def test_what_is_left_is_what_has_no_answer(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line on its way into the queue counts like all others, so no other batch of the tenant takes its place."""
    whole = units(*(number for number in range(10) if number != 3))
    assert lines.tokens_left == whole
    seen: list[int] = []
    put = lines._queue.put_parts

    async def watched(jobs: Sequence[Job], *given: Any) -> Any:
        seen.append(lines.tokens_left)
        return await put(jobs, *given)

    monkeypatch.setattr(lines._queue, "put_parts", watched)
    await lines.feed()
    assert lines._queued and seen == [whole]
    queued = dict(lines._queued)
    await lines.withdraw()
    assert lines.idle and lines.tokens_left == whole
    await lines.feed()
    await lines.give_up()
    assert lines.tokens_left == whole
    first = min(queued.values())
    lines._segment.add(first, LineOutcome.FAILED, 9, b"{}")
    await lines._commit()
    assert lines.tokens_left == whole - units(first)
    lines._segment.add(first, LineOutcome.FAILED, 9, b"{}")  # by a turn that was overtaken
    await lines._commit()
    assert lines.tokens_left == whole - units(first)


async def test_nothing_is_said_of_a_ledger_that_is_being_read(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that begins says how far the batch is every second, also while it reads: it must not give the quota back,
    nor take back what was completed."""
    said: list[tuple[int | None, int]] = []

    async def save(
        batches: Batches, hold: BatchLease, state: BatchState, progress: BatchProgress, **more: Any
    ) -> BatchLease:
        said.append((more["tokens"], progress.total))
        return hold

    monkeypatch.setattr(Batches, "save", save)
    turn = BatchTurn(lines._tools, lines._lease, asyncio.Event())
    await turn._save()
    turn._lines = lines
    await turn._save()
    assert said == [(None, 10), (lines.tokens_left, 10)]
