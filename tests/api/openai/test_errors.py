"""The error answers: shape, status, what a client library is told about trying again."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from house import House, eventually
from msgspec.structs import replace
from redis import Redis

from api.openai import errors
from api.openai.errors import ApiError, Wait
from api.stream import connection_guard
from penstock.engine import ChatTurn, Failure
from streaming.errors import LimitReached, QuotaExceeded
from streaming.jobs.codec import Terminal
from streaming.jobs.job import Chat, Job, JobState, MessageForm, ResponseForm
from streaming.jobs.records import expired_in_queue
from streaming.keys import fleet_key
from streaming.order import Priority

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
JOB = Job(id="j1", model="m", tenant="t", priority=Priority.STANDARD, prompt=Chat((ChatTurn("user", "x"),)))

SAMPLES: dict[str, Any] = {
    "allowed": ["POST", "GET"], "can_be_listed": True, "command": "pause", "fault": "no map",
    "field": "queue.max_queue_ms", "host": "a.example", "job": JOB, "job_id": "j1",
    "known": ["b", "a"], "lane": Priority.STANDARD, "limit": 1024,
    "limit_ms": 1000, "max_bytes": 16_384, "max_fields": 100, "message": "No.", "model": "gpt", "most": 8 << 20,
    "name": "gzip", "needed": 9 << 20, "origin": "https://a.example", "own": 7, "param": "messages",
    "quota": QuotaExceeded("jobs", 9, 9), "rule": "pii",
    "reached": LimitReached("key:k", "requests_per_minute", 100, 0, 5_000, (0, 0, 0, 0, 0, 0)),
    "reason": "its memory is full", "repeatable": False, "request_id": "r1", "response_id": "resp_1", "retry_s": 900.0,
    "setting": "body_timeout_s", "silence_s": 30.0, "site": "cross-site", "status": "failed",
    "wait": Wait(9000, 8000, 12_000), "waited_s": 600.0, "waiting": 10_000, "what": "body",
}  # fmt: skip
"""What each parameter of an error may be."""


def made(make: Callable[..., ApiError]) -> ApiError:
    """The error with a sample of each parameter that it needs."""
    params = [] if isinstance(make, partial) else inspect.signature(make).parameters.values()
    return make(**{each.name: SAMPLES[each.name] for each in params if each.default is inspect.Parameter.empty})


EVERY: dict[str, ApiError] = {
    name: made(make)
    for module in (errors, connection_guard)
    for name, make in vars(module).items()
    if isinstance(make, partial) or (inspect.isfunction(make) and make.__annotations__.get("return") == "ApiError"
    and not name.startswith(("_", "from_")))
}  # fmt: skip
DOCUMENTED = {
    (int(status), code)
    for row in re.findall(r"^\| ([0-9, ]+) \| (`.+`) \|", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    for status in row[0].split(", ")
    for code in re.findall(r"`(\w+)`", row[1].split(" |")[0])
}
"""The statuses and codes that the table of errors has."""
NOT_TO_BE_RETRIED = {
    "deadline_exceeded", "job_cancelled", "batch_not_commanded", "nothing_to_replay", "key_revoked",
    "quota_exceeded", "conversation_unreadable", "cursor_lost", "stream_reset", "resume_impossible", "wait_timeout",
    "wait_cut_off",
}  # fmt: skip


def test_every_error_is_documented_and_has_the_one_shape() -> None:
    """Status, code and the four keys of the body."""
    assert len(EVERY) > 60
    for name, error in EVERY.items():
        assert (error.status, error.code) in DOCUMENTED, name
        shape = {"message": str(error), "type": error.type, "param": error.param, "code": error.code}
        eta = {"eta_ms": 9000} if name == "deadline_unreachable" else {}
        assert error.body == {"error": shape | eta} and error.type.endswith("_error"), name


def test_no_blind_retry_where_it_would_do_harm() -> None:
    """What libraries retry comes with a time to wait, or with a no where a retry does not help or makes more work."""
    for name, error in EVERY.items():
        assert error.headers.get("x-should-retry") == ("false" if name in NOT_TO_BE_RETRIED else None), name
        assert error.headers.get("WWW-Authenticate") == ("Bearer" if error.status == 401 else None), name
        if name in NOT_TO_BE_RETRIED:
            assert "Retry-After" not in error.headers, name
        elif error.status in (409, 429, 503):
            assert 1 <= int(error.headers["Retry-After"]) <= 120, name


@pytest.mark.parametrize(
    "name", ["stream_reset", "resume_impossible", "job_unreadable", "wait_timeout", "wait_cut_off"]
)
def test_an_error_whose_job_goes_on_says_where_it_is(name: str) -> None:
    """In its words and its headers: a retry could compute it a second time."""
    error = EVERY[name]
    assert "/v1/jobs/j1" in error.message
    assert error.headers["X-Job-Id"] == "j1"
    if name in ("job_unreadable", "wait_timeout", "wait_cut_off"):
        assert error.headers["Location"] == "/v1/jobs/j1"


@pytest.mark.parametrize(
    ("form", "path", "events"),
    [
        ({"message": MessageForm()}, "/v1/messages/msg_j1", "?stream=true"),
        ({"response": ResponseForm()}, "/v1/responses/resp_j1", "?stream=true"),
        ({"response": ResponseForm(store=False)}, "/v1/jobs/j1", "/events"),
    ],
)
def test_an_answer_is_read_where_its_clients_api_has_it(form: dict[str, Any], path: str, events: str) -> None:
    job = replace(JOB, **form)
    assert errors.wait_timeout(job, 1.0).headers["Location"] == path
    assert f"at {path}." in errors.wait_cut_off(job, repeatable=False).message
    assert f"at {path}{events}." in errors.stream_reset(job).message
    assert f"at {path}, " in errors.resume_impossible(job).message


def test_refusals_for_load_come_back_when_the_wait_says() -> None:
    """What is not known is left out of the body, and never shown as nothing."""
    full, none = errors.queue_full(9, 9, 7.2, 30_000), errors.no_capacity(0.2)
    assert (full.body["error"]["eta_ms"], full.headers["Retry-After"]) == (30_000, "8")
    assert "eta_ms" not in none.body["error"] and none.headers["Retry-After"] == "1"
    late = EVERY["deadline_unreachable"]
    assert late.headers["Retry-After"] == "8", "9 s, less the second that the request allows"
    top = errors.deadline_unreachable("queue.deadline_ms", 1, Priority.INTERACTIVE, Wait(9, 8, 9))
    assert "higher lane" in late.message and "higher lane" not in top.message


@pytest.mark.parametrize(
    ("seconds", "whole", "milliseconds"), [(0.0, "1", "1000"), (2.5, "3", "2500"), (1e9, "120", "120000")]
)
def test_retry_after_stays_within_what_libraries_accept(seconds: float, whole: str, milliseconds: str) -> None:
    """At least a second, never above 120, rounded up."""
    assert errors.retry_after(seconds) == {"Retry-After": whole, "retry-after-ms": milliseconds}


def test_a_failure_keeps_its_code_status_and_param() -> None:
    """A worker's refusal reaches the client as it was said."""
    error = errors.from_failure(Failure("context_length_exceeded", "Too long.", 400, "messages"))
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert (error.message, error.param) == ("Too long.", "messages")
    assert error.headers == {}
    for status in (408, 429, 500, 503):  # the queue has done its attempts: libraries must not start over
        assert errors.from_failure(Failure("poison", "Crashed three workers.", status)).headers == errors.FINAL


@pytest.mark.parametrize(
    ("terminal", "status", "code"),
    [
        (Terminal("j", JobState.CANCELLED, 3), 409, "job_cancelled"),
        (Terminal("j", JobState.EXPIRED, 0, failure=expired_in_queue(1, 0, 0)), 408, "deadline_exceeded_in_queue"),
        (Terminal("j", JobState.EXPIRED, 5), 408, "deadline_exceeded"),
        (Terminal("j", JobState.FAILED, 0, failure=Failure("poison", "Gave up.", 500)), 500, "poison"),
        (Terminal("j", JobState.FAILED, 0), 500, "job_failed"),
    ],
)
def test_each_unhappy_end_has_its_error(terminal: Terminal, status: int, code: str) -> None:
    """Every final state but completed maps to one answer."""
    error = errors.from_terminal(terminal)
    assert (error.status, error.code) == (status, code)


def test_a_job_that_cannot_be_read_is_an_error_for_its_reader_alone(empty_house: House) -> None:
    """A record spoiled while its reader waits: 500 malformed_job within seconds, a dead letter, and lists go on."""
    empty_house.start_api()
    with ThreadPoolExecutor(1) as pool, Redis.from_url(empty_house.redis_url) as redis:
        body = {"model": "sim", "messages": [{"role": "user", "content": "x"}]}
        other = json.loads(empty_house.post("/v1/jobs", body)[2])["id"]
        empty_house.post("/v1/jobs", body)
        before = set(redis.keys("*:job:job_*"))
        waiting = pool.submit(empty_house.post, "/v1/chat/completions", body)
        (name,) = eventually(lambda: set(redis.keys("*:job:job_*")) - before)  # type: ignore[misc]
        (spoiled,) = [each for each in before if not each.endswith(other.encode())]
        for each in (name, spoiled):
            redis.hset(each, "created", b"yesterday")
        status, _, answer = waiting.result(30)
        assert status == 500 and json.loads(answer)["error"]["code"] == "malformed_job"
        listed = {job["id"]: job for job in json.loads(empty_house.get("/v1/jobs")[1])["data"]}
        assert listed[other]["status"] == "queued"
        bad = listed[spoiled.rpartition(b":")[2].decode()]
        assert (bad["status"], bad["error"]["code"]) == ("failed", "malformed_job")
        shown = json.loads(empty_house.get(f"/v1/jobs/{bad['id']}")[1])
        assert bad["completed_at"] and bad["completed_at"] == shown["completed_at"] < shown["expires_at"]
        letters = json.loads(empty_house.get("/admin/dlq")[1])["data"]
        assert {letter["job_id"] for letter in letters} == {bad["id"], name.rpartition(b":")[2].decode()}
        status, _, answer = empty_house.post(f"/admin/dlq/{letters[0]['id']}/replay", {})
        assert status == 409 and "nothing to replay" in json.loads(answer)["error"]["message"]
        assert len(json.loads(empty_house.get("/admin/dlq")[1])["data"]) == 2


def test_a_result_of_a_newer_version_is_told_as_such(empty_house: House) -> None:
    """Job, result and events of a job that a newer worker has ended: 503 newer_version, and nothing is changed."""
    empty_house.start_api()
    body = {"model": "sim", "messages": [{"role": "user", "content": "x"}]}
    job_id = json.loads(empty_house.post("/v1/jobs", body)[2])["id"]
    with Redis.from_url(empty_house.redis_url) as redis:
        (name,) = redis.keys(f"*:job:{job_id}")
        record = msgspec.msgpack.encode(["t2", job_id, {}])
        redis.hset(name, mapping={"state": "completed", "record": record})
        shown = json.loads(empty_house.get(f"/v1/jobs/{job_id}")[1])
        assert (shown["status"], shown["result"], shown["error"]["code"]) == ("completed", None, "newer_version")
        status, answer = empty_house.get(f"/v1/jobs/{job_id}/result")
        assert status == 503 and json.loads(answer)["error"]["code"] == "newer_version"
        assert b"event: error\n" in empty_house.get(f"/v1/jobs/{job_id}/events")[1]
        assert redis.hget(name, "record") == record


def test_a_client_is_told_no_command_of_the_operators(empty_house: House) -> None:
    """A store of another version is refused, and the log names the fix; clients read that it is refused, no more."""
    empty_house.start_api()
    with Redis.from_url(empty_house.redis_url) as redis:
        redis.hset(fleet_key("store"), "format", 99)
    body = {"model": "sim", "messages": [{"role": "user", "content": "x"}]}

    def answers() -> list[bytes]:
        refused = empty_house.post("/v1/jobs", body), empty_house.post("/v1/jobs", body, {"Idempotency-Key": "k"})
        found = [answer for status, _, answer in refused if status == 503 and b"no_capacity" in answer]
        status, ready = empty_house.get("/readyz")
        return [*found, ready] if len(found) == 2 and status == 503 and b"running" not in ready else []

    eventually(answers)
    *refused, ready = answers()
    assert json.loads(ready).keys() == {"status", "reason", "stalled"}
    for answer in (*refused, ready):
        assert b"the store is not one that this server may use" in answer
        assert b"reset" not in answer and b"redis." not in answer
    assert "penstock store reset --yes" in empty_house.log("api")
