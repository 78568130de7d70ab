"""Cost of a record on the event loop: building, encoding and buffering the lines of one request."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from penstock.engine import ChatTurn, Sampling
from streaming.jobs.job import Chat, Job
from streaming.jobs.lease import Claim
from streaming.jobs.terminal import Generated, Terminal
from streaming.priority import Priority
from telemetry.records.schema import DeliveryRecord
from telemetry.records.settings import RecordSettings
from telemetry.records.writer import RecordWriter
from workers.attempt import Attempt
from workers.request_records import RequestRecords

REQUESTS, ROUNDS = 5000, 9
NOW_US = 1_800_000_000_000_000


def attempt() -> Attempt:
    """One of a chat."""
    job = Job(
        id=f"job_{7:032x}", model="bench", tenant="tenant", priority=Priority.INTERACTIVE,
        prompt=Chat((ChatTurn("user", "hello"),)), sampling=Sampling(max_tokens=100), stream=True,
        received_us=NOW_US,
    )  # fmt: skip
    return Attempt(
        Claim(
            job=job, partition=0, attempt=1, number=1, created_ms=NOW_US // 1000, claimed_ms=NOW_US // 1000,
            deadline_ms=None, reply=(), past=(), first_frame=1, accepted_us=NOW_US, claimed_us=NOW_US,
        )
    )  # fmt: skip


def record_cost_us() -> list[float]:
    """CPU time of the calling thread for one request, its end and its delivery, in microseconds; one for each round."""
    held = attempt()
    end = held.terminal("lease", Generated(NOW_US, NOW_US, NOW_US, NOW_US, 200))
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS):
            writer = RecordWriter(RecordSettings(dir=str(Path(folder) / str(number))), "worker")
            writer.start()
            costs.append(_round(RequestRecords("bench", writer, "worker-1"), writer, held, end))
            writer.close()
    return costs


def _round(records: RequestRecords, writer: RecordWriter, held: Attempt, end: Terminal) -> float:
    before = time.thread_time()
    for _ in range(REQUESTS):
        records.ended(held, end, NOW_US)
        records.written((end,))
        writer.write(
            DeliveryRecord(
                id=end.job,
                by="api-1",
                first_got_us=NOW_US,
                first_sent_us=NOW_US,
                last_got_us=NOW_US,
                last_sent_us=NOW_US,
                clock_us=200,
            )
        )
    return 1e6 * (time.thread_time() - before) / REQUESTS
