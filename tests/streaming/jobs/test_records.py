"""What becomes of a read of the reader that nobody waits for any more."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest
from flow import until

from streaming.errors import MalformedJob, UnknownJob
from streaming.jobs.codec import encode
from streaming.jobs.job import Endpoint, Job, Text
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.records import REASONS, parse_record
from streaming.order import Priority
from streaming.redis.client import RedisClient


async def test_a_read_that_nobody_waits_for_fails_in_silence(wire: RedisClient) -> None:
    """The last of those who asked has left, and the job is gone: there is nothing to complain of."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    reader, gone = JobReader(wire), Queue(wire).new_id("t")
    asking = asyncio.create_task(reader.ended(gone))
    await asyncio.sleep(0)
    asking.cancel()
    await until(lambda: not reader._ended)
    del asking  # it knows the read, which complains once nobody does
    with pytest.raises(UnknownJob):
        await reader.ended(gone)
    gc.collect()
    assert complaints == []


def test_a_key_of_another_kind_is_no_record() -> None:
    """It says what is wrong with it."""
    with pytest.raises(MalformedJob, match="the key holds no hash"):
        parse_record("j", b"text", None)  # type: ignore[arg-type]


def test_the_letter_of_an_endpoint_of_a_newer_version_is_no_fault() -> None:
    """A process of this version still shows the job, and lists it among others."""
    body = encode(Job(id="j", model="m", tenant="t", priority=Priority.BATCH, prompt=Text(("a",))))
    fields = [b"state", b"queued", b"lane", b"m:batch", b"body", body, b"endpoint", b"?"]
    record = parse_record("j", fields, None)
    assert record is not None and record.endpoint is Endpoint.COMPLETIONS and not record.fault


def test_why_a_script_ended_a_job_has_the_code_that_the_page_lists() -> None:
    """With its status. Only the store's own words for a cancel and for an unreadable record differ from it."""
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
    other = {"cancelled": "job_cancelled", "malformed": "malformed_job"}
    for reason, failure in REASONS.items():
        assert failure.code == other.get(reason, reason)
        assert f"| {failure.status} | `{failure.code}` |" in page
