"""Where a job's time went: a delay shows in exactly the part it was put into, and the parts are the whole."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import pytest
from house import House, eventually

from penstock.engine import Piece, Request
from streaming.jobs.lease import Claimed, Lease
from streaming.redis.client import Call, RedisClient
from streaming.redis.settings import RedisSettings
from telemetry.latency import PARTS
from telemetry.metrics import Metrics
from telemetry.tracing import Tracing
from workers.engines.sim.engine import SimEngine
from workers.engines.sim.settings import SimSettings
from workers.record import Recorder
from workers.settings import WorkerSettings
from workers.worker import Worker

pytestmark = pytest.mark.slow

DELAY_S = 0.2
STEP_MS, PREFILL_MS, TOKENS = 5.0, 10.0, 56
"""Decode takes longer than the delay, or a late first chunk would be a late last one too."""
ROUNDS = 5
ALLOWED = 0.3
"""Of the delay: so much a part may be off, and what the machine alone makes of it."""

MAX_S = 150.0
"""A hang becomes a failure."""


# --- a delay in each part ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder("sim", Metrics.start("", "worker"), Tracing())


class SlowLease(Lease):
    """Late with what one part consists of."""

    def __init__(self, wire: RedisClient, slow: str) -> None:
        super().__init__(wire, "sim")
        self._slow = slow
        self._begun = False

    async def claim(self, partition: int, want: int, **options: Any) -> Claimed:
        await _pause(self._slow == "queue")
        claimed = await super().claim(partition, want, **options)
        await _pause(self._slow == "gate" and bool(claimed.jobs))
        return claimed

    def send_nowait(self, calls: Sequence[Call], on_done: Callable[[bool, Sequence[Any]], None]) -> bool:
        return not self._slow.startswith("egress") and super().send_nowait(calls, on_done)  # else by `calls`, late

    async def calls(self, calls: Sequence[Call]) -> None:
        finishes = any(name == "finish" for name, _, _ in calls)
        await _pause(self._slow == "egress_tail" and finishes)
        await _pause(self._slow == "egress_first" and not self._begun)
        self._begun = not finishes
        await super().calls(calls)


class SlowEngine(SimEngine):
    """Late in running what it was given."""

    def __init__(self, settings: SimSettings, slow: str) -> None:
        super().__init__("sim", settings)
        self._slow = slow

    def submit(self, request: Request) -> None:
        if self._slow == "engine_wait":
            asyncio.get_running_loop().call_later(DELAY_S, super().submit, request)
        else:
            super().submit(request)


async def _pause(wanted: bool) -> None:
    if wanted:
        await asyncio.sleep(DELAY_S)


@asynccontextmanager
async def working(wire: RedisClient, recorder: Recorder, slow: str = "", drain_s: float = 10) -> AsyncIterator[Worker]:
    """A worker that is late in one part. It polls so seldom that only a wake-up brings it its work."""
    late_ms = DELAY_S * 1000 if slow == "prefill" else 0.0
    engine = SlowEngine(SimSettings(step_ms=STEP_MS, prefill_ms=PREFILL_MS + late_ms), slow)
    worker: Worker | None = None

    def on_step(pieces: list[Piece]) -> None:
        assert worker is not None
        worker.on_step(pieces)

    card = await engine.start(on_step, lambda _: None)
    with patch("workers.worker.Lease", lambda wire, _model, _name: SlowLease(wire, slow)):
        worker = Worker(wire, engine, card, WorkerSettings(poll_ms=1_500, drain_s=drain_s), recorder)
    stop = asyncio.Event()
    task = asyncio.create_task(worker.run(stop))
    try:
        yield worker
    finally:
        stop.set()
        await asyncio.gather(task)
        await engine.stop()


async def ask(port: int, slow: str = "") -> tuple[str, float]:
    """One streamed chat; the job's id and the client's own end-to-end time in seconds."""
    tokens = TOKENS + (round(DELAY_S * 1000 / STEP_MS) if slow == "decode" else 0)
    chat = {"model": "sim", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "stream": True}
    body = json.dumps(chat).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    )
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode())
    begun = time.monotonic()
    await writer.drain()
    await _pause(slow == "ingress")
    writer.write(body)
    async with asyncio.timeout(MAX_S):
        answer = await reader.read()
    spent = time.monotonic() - begun
    writer.close()
    assert b"data: [DONE]" in answer, answer[-300:]
    return answer.lower().split(b"x-job-id: ")[1].split(b"\r\n")[0].decode(), spent


def timing_of(house: House, job_id: str) -> dict[str, Any]:
    """Once its delivery is noted, a moment after the answer."""

    def noted() -> dict[str, Any] | None:
        status, body = house.get(f"/v1/jobs/{job_id}/timing")
        found: dict[str, Any] = json.loads(body)
        assert status == 200, found
        return found if found["until"] == "last_sent" else None

    timing = eventually(noted)
    assert isinstance(timing, dict)
    return timing


Samples = dict[str, dict[str, list[float]]]
"""Milliseconds by injected part and part."""


async def test_a_delay_shows_in_exactly_one_part(empty_house: House, recorder: Recorder) -> None:
    """A delay before the body, the claim, the submit, the engine's run, in prefill, in decode, before the first write
    and before the last: each lengthens its own part and no other, by medians, beside the same request without a delay
    in the same round. And the parts are what the client waits."""
    house = empty_house
    house.start_api()
    wire = RedisClient.open(RedisSettings(url=house.redis_url, lease_ms=5_000))
    injected = ["", "ingress", "queue", "gate", "engine_wait", "prefill", "decode", "egress_first", "egress_tail"]
    samples: Samples = defaultdict(lambda: defaultdict(list))
    try:
        for _ in range(ROUNDS):
            for slow in injected:
                async with working(wire, recorder, slow):
                    await _sample(house, slow, samples[slow])
    finally:
        await wire.close()
    assert _misplaced(samples) == []


async def _sample(house: House, slow: str, found: dict[str, list[float]]) -> None:
    job_id, spent = await ask(house.port, slow)
    timing = await asyncio.to_thread(timing_of, house, job_id)
    assert abs(timing["sum_ms"] - timing["end_to_end_ms"]) <= 1.0
    for part, time_ms in timing["parts_ms"].items():
        found[part].append(time_ms)
    found["outside"].append(spent * 1000 - timing["end_to_end_ms"])


def _misplaced(samples: Samples) -> list[str]:
    """What grew that should not have, or did not grow by the delay; and time of the client's that is in no part. What
    is allowed: see ALLOWED; the machine's own part is how far the control's samples are apart."""
    wrong = []
    control = samples[""]
    for slow, parts in samples.items():
        for part, times in parts.items():
            grown, wanted = median(times) - median(control[part]), DELAY_S * 1000 if part == slow else 0.0
            if abs(grown - wanted) > ALLOWED * DELAY_S * 1000 + _unrest(control[part]):
                wrong.append(f"{slow or 'nothing'} late by {DELAY_S:g} s: {part} by {grown:.1f} ms")
    if (outside := median(control["outside"])) > ALLOWED * DELAY_S * 1000 + _unrest(control["outside"]):
        wrong.append(f"the client waited {outside:.1f} ms longer than the parts say")
    return wrong


def _unrest(times: Sequence[float]) -> float:
    """How far the middle samples are apart."""
    _, low, *_, high, _ = sorted(times)
    return high - low


# --- every kind of job -----------------------------------------------------------------------------------------------


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [{"role": "user", "content": text}], **more}


def shown(house: House, job_id: str) -> dict[str, Any]:
    """The timing as it is now."""
    status, body = house.get(f"/v1/jobs/{job_id}/timing")
    assert status == 200
    found: dict[str, Any] = json.loads(body)
    return found


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


def test_an_answer_in_one_piece_has_no_first_part(house: House) -> None:
    """Its TTFT is its end-to-end time."""
    headers = house.post("/v1/chat/completions", chat("whole", max_tokens=5))[1]
    timing = timing_of(house, headers["x-job-id"])
    assert timing["reasons"] == {"egress_first": "the answer was sent in one piece"}
    assert timing["time_to_first_token_ms"] == timing["end_to_end_ms"] and timing["time_per_output_token_ms"] is None


def test_a_job_nobody_waits_for_ends_with_its_last_token(house: House) -> None:
    """And says why it was not sent; one token has no time per token."""
    job = json.loads(house.post("/v1/jobs", chat("later", max_tokens=1))[2])
    eventually(lambda: shown(house, job["id"])["status"] == "completed")
    timing = shown(house, job["id"])
    assert timing["until"] == "last_token" and timing["parts_ms"]["decode"] == 0
    assert (
        set(timing["reasons"]) == {"egress_first", "egress_tail"} and "did not wait" in timing["reasons"]["egress_tail"]
    )
    assert timing["sum_ms"] == pytest.approx(timing["end_to_end_ms"], abs=1.0)


def test_what_is_known_of_a_job_under_way(empty_house: House) -> None:
    """Waiting: how it came in. Running: how long it waited. Cancelled: where it was then."""
    house = empty_house
    house.start_api()
    job = json.loads(house.post("/v1/jobs", chat("slow", max_tokens=4_000))[2])
    waiting = shown(house, job["id"])
    assert waiting["status"] == "queued" and waiting["parts_ms"]["ingress"] > 0 and waiting["end_to_end_ms"] is None
    assert waiting["reasons"]["queue"] == "not yet"
    house.start("workers", PENSTOCK_SIM_STEP_MS="20")
    eventually(lambda: shown(house, job["id"])["status"] == "in_progress")
    running = shown(house, job["id"])
    assert running["parts_ms"]["queue"] > 0 and running["reasons"]["decode"] == "not yet" and running["until"] is None
    house.post(f"/v1/jobs/{job['id']}/cancel", b"")
    eventually(lambda: shown(house, job["id"])["status"] == "cancelled")
    ended = shown(house, job["id"])
    assert ended["sum_ms"] == pytest.approx(ended["end_to_end_ms"], abs=1.0)


def test_a_job_that_expires_spent_its_time_in_the_queue(empty_house: House) -> None:
    """The lane has all of it, and the error's way to the client is the tail."""
    house = empty_house
    house.start_api()
    house.start("scheduler")
    status, headers, _ = house.post("/v1/chat/completions", chat("soon", stream=True, queue={"max_queue_ms": 50}))
    assert status == 408
    timing = timing_of(house, headers["x-job-id"])
    assert timing["status"] == "expired" and timing["parts_ms"]["queue"] >= 49
    assert timing["reasons"]["decode"] == "the job ended before"
    assert timing["sum_ms"] == pytest.approx(timing["end_to_end_ms"], abs=1.0)


async def test_a_job_that_was_handed_on_tells_of_its_earlier_attempt(empty_house: House, recorder: Recorder) -> None:
    """From the first worker's claim to the second's is a part of its own; the first worker's tokens have no stamp."""
    house = empty_house
    house.start_api()
    wire = RedisClient.open(RedisSettings(url=house.redis_url, lease_ms=5_000))
    async with working(wire, recorder, drain_s=0.05) as first:
        asking = asyncio.create_task(ask(house.port))
        await asyncio.to_thread(eventually, lambda: first.running)
    async with working(wire, recorder):
        job_id, _ = await asking
        timing = await asyncio.to_thread(timing_of, house, job_id)
    await wire.close()
    assert timing["parts_ms"]["retries"] > 0 and timing["sum_ms"] == pytest.approx(timing["end_to_end_ms"], abs=1.0)


def test_timings_are_their_owners(house: House) -> None:
    """A job nobody knows, an id that is none: 404, as everywhere."""
    for job_id in ("job_" + "0" * 32, "nonsense"):
        status, body = house.get(f"/v1/jobs/{job_id}/timing")
        assert status == 404 and json.loads(body)["error"]["code"] == "job_not_found"


def test_the_command_line_draws_it(house: House) -> None:
    """`penstock jobs timing`: a bar for each part on stdout, the clocks' bound beside it; --json for programs."""
    headers = house.post("/v1/chat/completions", chat("draw", max_tokens=20, stream=True))[1]
    job_id = headers["x-job-id"]
    timing_of(house, job_id)

    def penstock(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cli", "jobs", "timing", job_id, "--url", house.url, *words]
        return subprocess.run(command, cwd=house.folder, capture_output=True, text=True, timeout=60, check=True)

    table = penstock()
    lines = {line.split()[0]: line for line in table.stdout.splitlines()}
    assert {part.name for part in PARTS} <= lines.keys() and lines["decode"].count("█") > lines["gate"].count("█")
    assert "clocks known to" in table.stderr
    assert json.loads(penstock("--json").stdout)["object"] == "job.timing"
