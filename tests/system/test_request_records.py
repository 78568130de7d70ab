"""Records on the local disk, by real processes: one for each request, whatever ends it, and what it says is true."""

from __future__ import annotations

import json
import resource
import socket
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from house import House, eventually, free_port, unstarted
from stream_reader import StreamReader

from telemetry.records.reader import Skipped, read_records
from telemetry.records.schema import DeliveryRecord, Record, RequestRecord

pytestmark = pytest.mark.slow

LONG = 30_000
"""Tokens of a job that runs until it is ended: it would take minutes, so that no slow machine sees it complete."""
SECRET = "a secret of the prompt"
FINAL = ("completed", "failed", "cancelled", "expired")


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with unstarted(tmp_path) as house:
        house.environ |= {
            "PENSTOCK_RECORDS_DIR": str(tmp_path / "records"),
            "PENSTOCK_RECORDS_SAMPLE_S": "0.5",
            "PENSTOCK_SIM_SLOTS": "2",
            "PENSTOCK_WORKER_PREFETCH": "0",  # else the engine may hold a job that is to expire in the lane
            "PENSTOCK_SIM_CONTEXT": str(2 * LONG),
            "PENSTOCK_SIM_STEP_MS": "5",
            "PENSTOCK_REDIS_PARTITIONS": "2",
        }
        yield house


def kept(house: House) -> list[Record]:
    return list(read_records(house.folder / "records", 0, 1e11, Skipped()))


def requests(house: House) -> list[RequestRecord]:
    return [record for record in kept(house) if isinstance(record, RequestRecord)]


def submit(house: House, tokens: int, **queue: Any) -> str:
    body = {"model": "sim", "max_tokens": tokens, "messages": [{"role": "user", "content": SECRET}], "queue": queue}
    status, _, answer = house.post("/v1/jobs", body)
    assert status == 202, answer
    return str(json.loads(answer)["id"])


def shown(house: House, job_id: str) -> dict[str, Any]:
    return json.loads(house.get(f"/v1/jobs/{job_id}")[1])


def all_ended(house: House, ids: list[str]) -> bool:
    return all(shown(house, job_id)["status"] in FINAL for job_id in ids)


def check(house: House, ids: list[str]) -> dict[str, RequestRecord]:
    """One record for each of these jobs, in the state that the API shows. Returns them by id."""
    eventually(lambda: all_ended(house, ids))
    eventually(lambda: {record.id for record in requests(house)} >= set(ids))
    time.sleep(1.0)  # a second record of a job would come with the next sweep or write
    count = Counter(record.id for record in requests(house))
    assert {job_id: count[job_id] for job_id in ids} == dict.fromkeys(ids, 1)
    found = {record.id: record for record in requests(house) if record.id in set(ids)}
    assert {job_id: record.state for job_id, record in found.items()} == {
        job_id: shown(house, job_id)["status"] for job_id in ids
    }
    return found


def test_every_request_has_one_record_whatever_ends_it(house: House) -> None:
    """Completed, cancelled while it waits and while it runs, expired in the lane and at the claim, refused; streamed
    and whole, with several choices. No record has a prompt, an answer, an id, a model or a key that a client chose."""
    house.start_all("workers")
    completed = [submit(house, 20, priority=lane) for lane in ("interactive", "standard", "batch") for _ in range(5)]
    running = submit(house, LONG)
    eventually(lambda: shown(house, running)["status"] == "in_progress")
    blocked = [submit(house, LONG) for _ in range(2)]
    eventually(lambda: any(shown(house, job_id)["status"] == "in_progress" for job_id in blocked))
    waiting = [submit(house, 10) for _ in range(3)]
    expired = [submit(house, 10, max_queue_ms=50, priority="batch") for _ in range(3)]
    for job_id in waiting:
        assert house.post(f"/v1/jobs/{job_id}/cancel", None)[0] == 200
    eventually(lambda: all_ended(house, expired))
    assert [shown(house, job_id)["status"] for job_id in expired] == ["expired"] * 3
    for job_id in (running, *blocked):
        house.post(f"/v1/jobs/{job_id}/cancel", None)
    choices = {"model": "sim", "max_tokens": 5, "n": 3, "stream": True, "messages": [{"role": "user", "content": "x"}]}
    _, headers, _ = house.post("/v1/chat/completions", choices)
    streamed = headers["x-job-id"]
    _, headers, _ = house.post("/v1/chat/completions", {**choices, "stream": False, "n": 1})
    whole = headers["x-job-id"]
    ids = [*completed, running, *blocked, *waiting, *expired, streamed, whole]
    found = check(house, ids)
    assert Counter(record.state for record in found.values()) == {"completed": 17, "cancelled": 6, "expired": 3}
    assert {(record.state, record.cancelled_by) for record in found.values()} == {
        ("completed", ""), ("cancelled", "owner"), ("expired", "")
    }  # fmt: skip
    for record in (found[job_id] for job_id in (*completed, streamed, whole)):
        stamps = (record.received_us, record.accepted_us, record.started_us, record.claimed_us, record.released_us)
        stamps = (*stamps, record.scheduled_us, record.first_us, record.last_us, record.ended_us)
        slack_us = 1000 + 2 * record.clock_us
        assert all(one <= two + slack_us for one, two in pairwise(stamps)) and all(stamps)
        assert record.attempts == 1 + record.preempted + record.lost and record.model == "sim"
    assert (found[streamed].choices, found[streamed].completion_tokens) == (3, 15)
    deliveries = {record.id: record for record in kept(house) if isinstance(record, DeliveryRecord)}
    assert not deliveries[streamed].whole and deliveries[whole].whole
    assert found[streamed].first_us <= deliveries[streamed].first_sent_us + 2000
    refused = house.post("/v1/chat/completions", {"model": "sim", "messages": []})
    body = {"model": f"sk-{SECRET}", "messages": [{"role": "user", "content": SECRET}], "user": SECRET}
    chosen = {"X-Request-Id": "sk-chosen", "Authorization": "Bearer sk-x"}
    unknown = house.post("/v1/chat/completions", body, chosen)
    assert (refused[0], unknown[0]) == (400, 404)
    eventually(lambda: len([one for one in requests(house) if one.state == "refused"]) == 2)
    (record,) = [one for one in requests(house) if one.id == refused[1]["x-request-id"]]
    assert (record.state, record.status, record.code) == ("refused", 400, "invalid_request_error")
    text = "".join(path.read_text() for path in (house.folder / "records").iterdir())
    assert SECRET not in text and "sk-" not in text


def test_a_job_whose_worker_is_killed_has_one_record_of_all_attempts(house: House) -> None:
    house.start_api()
    worker = house.start("workers")
    house.wait_ready()
    job_id = submit(house, 800)
    reader = StreamReader(house.port, f"/v1/jobs/{job_id}/events")
    eventually(lambda: b"event: delta" in reader.data)
    worker.kill()
    worker.wait()
    house.start("workers", "--id", "worker-2")
    record = check(house, [job_id])[job_id]
    assert record.by == f"worker-2@{socket.gethostname()}"
    assert (record.attempts, record.lost, record.completion_tokens) == (2, 1, 800)
    assert 0 < record.continued_tokens < 800
    assert record.started_us < record.claimed_us


def test_a_full_disk_costs_records_and_no_request(house: House) -> None:
    """The worker's files may not grow: its jobs end as before, every line that it drops is counted, and once there is
    room again every job has its record."""
    port, dropped = free_port(), 'penstock_records_dropped_total{reason="disk"}'
    house.start_api()
    house.environ |= {"PENSTOCK_TELEMETRY_LOG_LEVEL": "error", "PENSTOCK_RECORDS_SAMPLE_S": "600"}
    worker = house.start("workers", PENSTOCK_TELEMETRY_METRICS_PORT=str(port))
    house.wait_ready()

    def counted() -> float:
        lines = house.get("/metrics", port)[1].decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(dropped))

    check(house, [submit(house, 5) for _ in range(5)])
    (file,) = (house.folder / "records").glob("*-worker-*.jsonl")
    resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (file.stat().st_size + 100, resource.RLIM_INFINITY))
    during = [submit(house, 5) for _ in range(30)]
    eventually(lambda: all_ended(house, during))
    eventually(lambda: counted() >= 29)
    assert {shown(house, job_id)["status"] for job_id in during} == {"completed"}
    resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    check(house, [submit(house, 5) for _ in range(5)])
    kept_during = [record.id for record in requests(house) if record.id in set(during)]
    assert len(during) - len(kept_during) == counted()


def test_jobs_that_no_worker_ends_have_records_from_the_api_alone(house: House) -> None:
    """Also those that are given up with their workers, and one whose stored record cannot be read."""
    house.environ["PENSTOCK_REDIS_MAX_ATTEMPTS"] = "1"
    house.start_api()
    cancelled, expired = submit(house, 5), submit(house, 5, max_queue_ms=20)
    house.post(f"/v1/jobs/{cancelled}/cancel", None)
    eventually(lambda: shown(house, expired)["status"] == "expired")
    worker = house.start("workers")
    house.wait_ready()
    given_up = submit(house, LONG)
    reader = StreamReader(house.port, f"/v1/jobs/{given_up}/events")
    eventually(lambda: b"event: delta" in reader.data)
    worker.kill()
    worker.wait()
    found = check(house, [cancelled, expired, given_up])
    assert {record.by for record in found.values()} == {"api-1"}
    assert found[cancelled].cancelled_by == "owner"
    assert (found[given_up].state, found[given_up].lost) == ("failed", 1) and found[given_up].completion_tokens > 0
    assert found[given_up].code in ("attempts_exhausted", "poison")
