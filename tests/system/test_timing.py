"""Where a job's time went: what its timing says of every kind of job, in every state."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from house import House, eventually

from telemetry.report.report import Scope, report_of

pytestmark = pytest.mark.slow


def shown(house: House, job_id: str) -> dict[str, Any]:
    """The timing as it is now."""
    status, body = house.get(f"/v1/jobs/{job_id}/timing")
    found: dict[str, Any] = json.loads(body)
    assert status == 200, found
    return found


def timing_of(house: House, job_id: str) -> dict[str, Any]:
    """Once its delivery is noted, a moment after the answer."""
    return eventually(lambda: (found := shown(house, job_id))["until"] == "last_sent" and found)


# --- every kind of job -----------------------------------------------------------------------------------------------


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [{"role": "user", "content": text}], **more}


def test_a_stream_has_every_part_and_its_latencies(house: House) -> None:
    """Stamps in order, TTFT before end-to-end, TPOT by its formula, and how exact it is."""
    headers = house.post("/v1/chat/completions", chat("stream", max_tokens=9, stream=True))[1]
    timing = timing_of(house, headers["x-job-id"])
    assert not timing["reasons"] and timing["attempts"] == 1 and timing["status"] == "completed"
    stamps = timing["stamps"]
    for before, after in (("accepted", "claimed"), ("released", "last_token"), ("first_sent", "last_sent")):
        assert stamps[before] <= stamps[after]
    assert timing["sum_ms"] == pytest.approx(timing["end_to_end_ms"], abs=1.0)
    assert timing["end_to_end_ms"] == pytest.approx((stamps["last_sent"] - stamps["received"]) * 1000, abs=0.01)
    assert timing["gateway_time_to_first_token_ms"] <= timing["time_to_first_token_ms"] < timing["end_to_end_ms"]
    per_token = (stamps["last_sent"] - stamps["first_sent"]) * 1000 / 8
    assert timing["time_per_output_token_ms"] == pytest.approx(per_token, abs=0.01)
    assert sum(timing["groups_ms"].values()) == pytest.approx(timing["sum_ms"], abs=0.01)
    assert 0 < timing["clock_error_ms"]["api"] < 1_000 and 0 < timing["clock_error_ms"]["worker"] < 1_000


def overview_of(house: House) -> Any:
    return json.loads(house.get("/admin/overview")[1])


def test_tokens_are_counted_as_they_are_written(empty_house: House) -> None:
    """The rate and the counter grow while a job of two texts runs that nobody reads; at its end each token was counted
    once. The lane counts one running job, the worker two slots in use. Its timing says what is known: before a worker
    is there, while it runs, and where it was when it was cancelled. One that expires spent its time in the queue."""
    house = empty_house
    house.environ["PENSTOCK_TELEMETRY_METRICS_DIR"] = str(house.folder / "metrics")
    house.start_api()
    body = chat("long", max_tokens=4_000, n=2, queue={"priority": "batch"})
    job = json.loads(house.post("/v1/jobs", body)[2])
    waiting = shown(house, job["id"])
    assert waiting["status"] == "queued" and waiting["parts_ms"]["ingress"] > 0 and waiting["end_to_end_ms"] is None
    assert waiting["reasons"]["queue"] == "not yet"
    status, headers, _ = house.post("/v1/chat/completions", chat("soon", stream=True, queue={"max_queue_ms": 50}))
    expired = timing_of(house, headers["x-job-id"])
    assert (status, expired["status"], expired["reasons"]["decode"]) == (408, "expired", "the job ended before")
    assert expired["parts_ms"]["queue"] >= 49, "the lane has all of it; the error's way to the client is the tail"
    assert expired["sum_ms"] == pytest.approx(expired["end_to_end_ms"], abs=1.0)
    house.start("workers", PENSTOCK_SIM_STEP_MS="10")

    def counted() -> float:
        lines = house.get("/metrics")[1].decode().splitlines()
        found = [line for line in lines if line.startswith("penstock_tokens_total") and "completion" in line]
        return sum(float(line.split()[-1]) for line in found)

    eventually(lambda: overview_of(house)["rates"]["tokens_per_s"] > 20)
    now = eventually(lambda: (found := overview_of(house))["history"][-1]["tokens_per_s"] and found)
    assert now["history"][-1]["tokens_per_s"] == now["rates"]["tokens_per_s"]
    assert [pool["lanes"]["batch"]["running"] for pool in now["pools"]] == [1]
    (worker,) = [process for process in now["processes"] if process["role"] == "worker"]
    assert (worker["running"], worker["waiting"]) == (2, 0) and worker["tokens_per_s"] > 20
    before = eventually(counted)
    assert eventually(lambda: counted() > before)
    running = shown(house, job["id"])
    assert running["parts_ms"]["queue"] > 0 and running["reasons"]["decode"] == "not yet" and running["until"] is None
    house.post(f"/v1/jobs/{job['id']}/cancel", b"")
    usage = eventually(lambda: json.loads(house.get(f"/v1/jobs/{job['id']}")[1])["usage"])
    assert eventually(lambda: counted() == usage["completion_tokens"])
    assert eventually(lambda: overview_of(house)["rates"]["tokens_per_s"] == 0)
    ended = shown(house, job["id"])
    assert ended["status"] == "cancelled" and ended["sum_ms"] == pytest.approx(ended["end_to_end_ms"], abs=1.0)


WAYS = {
    "stream": ("/v1/chat/completions", {"stream": True}),
    "whole": ("/v1/chat/completions", {}),
    "job": ("/v1/jobs", {"n": 2}),
}


def test_the_first_token_after_a_lost_worker_is_what_the_reader_saw(empty_house: House) -> None:
    """Whichever way a request is asked. The worker dies after it has shown tokens: the timing, the job, the request's
    record and the report mean the same first token, that of the first attempt (of an answer in one piece, its end);
    the pause is lost to retries."""
    house = empty_house
    house.environ |= {"PENSTOCK_RECORDS_DIR": str(house.folder / "records"), "PENSTOCK_REDIS_LEASE_MS": "1500"}
    house.environ["PENSTOCK_SIM_STEP_MS"] = "10"
    house.start_api()
    worker = house.start("workers", "--id", "worker-0")
    for number, (way, (path, more)) in enumerate(WAYS.items(), 1):
        eventually(lambda: overview_of(house)["rates"]["tokens_per_s"] == 0)
        since = time.time()
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(house.post, path, chat(way, max_tokens=400, **more))
            eventually(lambda: overview_of(house)["rates"]["tokens_per_s"] > 0)
            worker.kill()
            worker.wait()
            worker = house.start("workers", "--id", f"worker-{number}")
            job_id = asked.result()[1]["x-job-id"]
        first_token_is_the_readers(house, way, job_id, since)


def first_token_is_the_readers(house: House, way: str, job_id: str, since: float) -> None:
    """Of the one job that has ended since then."""
    eventually(lambda: shown(house, job_id)["status"] == "completed")
    timing = timing_of(house, job_id) if way in ("stream", "whole") else shown(house, job_id)
    job = json.loads(house.get(f"/v1/jobs/{job_id}")[1])
    lost, last = job["attempt_log"]
    assert lost["outcome"] == "lost" and lost["started_at"] <= job["first_token_at"] <= lost["ended_at"]
    parts, ttft_ms = timing["parts_ms"], timing["time_to_first_token_ms"]
    assert timing["sum_ms"] == pytest.approx(timing["end_to_end_ms"], abs=1.0)
    assert sum(timing["groups_ms"].values()) == pytest.approx(timing["sum_ms"], abs=0.01)
    logged_ms = 1000 * (job["first_token_at"] - timing["stamps"]["received"])
    if way == "whole":
        assert ttft_ms == timing["end_to_end_ms"]
    else:
        assert logged_ms - 5 <= ttft_ms <= 1000 * (last["started_at"] - timing["stamps"]["received"])
    assert timing["stamps"]["first_token"] == pytest.approx(job["first_token_at"], abs=0.002)
    pause_ms = 1000 * (last["started_at"] - lost["ended_at"])
    assert pause_ms <= parts["retries"] <= timing["sum_ms"] - parts["decode"]
    assert list(parts).index("retries") > list(parts).index("prefill"), "the first token came before the loss"
    queued_ms = 1000 * (lost["started_at"] - job["created_at"])
    assert parts["decode"] >= 3500 and timing["groups_ms"]["queue"] <= queued_ms + 5
    same = ("retries", "decode")
    expected = pytest.approx([ttft_ms, *(parts[name] for name in same)], abs=2)

    def reported() -> bool:
        whole = report_of(house.folder / "records", Scope(since, time.time()), {}).figures.whole
        if whole.requests != 1 or whole.ttft is None:
            return False
        return [whole.ttft.max, *(whole.parts[name] for name in same)] == expected

    assert eventually(reported), "once its records are written"
