"""The error answers: shape, status, what a client library is told about trying again."""

from __future__ import annotations

import inspect
import json
from concurrent.futures import ThreadPoolExecutor

import httpx2
import msgspec
import openai
import pytest
from house import House, eventually
from msgspec.structs import replace
from redis import Redis

from api.auth import access_errors
from api.openai import errors
from api.openai.errors import ApiError, Wait
from api.stream import connection_guard
from penstock.engine import ChatTurn, Failure, Task, TaskKind
from streaming.errors import QuotaExceeded
from streaming.jobs.codec import Terminal
from streaming.jobs.job import Chat, Job, JobState
from streaming.jobs.records import expired_in_queue
from streaming.keys import fleet_key
from streaming.order import Priority

pytestmark = pytest.mark.slow

JOB = Job(id="j1", model="m", tenant="t", priority=Priority.STANDARD, prompt=Chat((ChatTurn("user", "x"),)))

EVERY: dict[str, tuple[ApiError, int, str]] = {
    "invalid_request": (errors.invalid_request("n must be at most 8.", "n"), 400, "invalid_request_error"),
    "too_large_for_store": (errors.too_large_for_store(JOB, 9 << 20, 8 << 20), 400, "too_large_for_store"),
    "body_too_complex": (errors.body_too_complex(131_072), 400, "body_too_complex"),
    "invalid_http": (connection_guard.invalid_http("no version"), 400, "invalid_http"),
    "headers_too_large": (connection_guard.headers_too_large(16_384, 100), 431, "headers_too_large"),
    "request_timeout": (connection_guard.request_timeout("body", "body_timeout_s"), 408, "request_timeout"),
    "too_many_connections": (connection_guard.too_many_connections(20_000), 503, "too_many_connections"),
    "too_many_connections_of_a_client": (
        connection_guard.too_many_connections_of_a_client(9),
        503,
        "too_many_connections",
    ),
    "foreign_origin": (access_errors.foreign_origin("https://a.example", can_be_listed=True), 403, "foreign_origin"),
    "foreign_site": (access_errors.foreign_site("cross-site"), 403, "foreign_origin"),
    "unlisted_origin": (access_errors.unlisted_origin("https://a.example"), 403, "foreign_origin"),
    "foreign_host": (access_errors.foreign_host("a.example"), 421, "misdirected_request"),
    "unlisted_host": (access_errors.unlisted_host("a.example"), 421, "misdirected_request"),
    "proxy_without_keys": (access_errors.proxy_without_keys(), 403, "proxy_without_keys"),
    "admin_token_required": (access_errors.admin_token_required(), 401, "admin_token_required"),
    "wrong_admin_token": (access_errors.wrong_admin_token(), 401, "admin_token_required"),
    "admin_not_configured": (access_errors.admin_not_configured(), 403, "admin_not_configured"),
    "invalid_api_key": (access_errors.invalid_api_key("No key."), 401, "invalid_api_key"),
    "used_link": (access_errors.used_link(), 401, "invalid_api_key"),
    "permission_denied": (access_errors.permission_denied("Not this model.", "model"), 403, "permission_denied"),
    "model_not_found": (errors.model_not_found("gpt", ["b", "a"]), 404, "model_not_found"),
    "job_not_found": (errors.job_not_found(), 404, "job_not_found"),
    "response_not_found": (errors.response_not_found(), 404, "response_not_found"),
    "previous_response_not_found": (errors.previous_response_not_found("r1"), 400, "previous_response_not_found"),
    "conversation_not_found": (errors.conversation_not_found(), 404, "conversation_not_found"),
    "conversation_item_not_found": (errors.conversation_item_not_found(), 404, "item_not_found"),
    "conversation_unreadable": (errors.conversation_unreadable(), 500, "malformed_conversation"),
    "conversation_locked": (errors.conversation_locked(), 400, "conversation_locked"),
    "mutually_exclusive": (errors.mutually_exclusive(), 400, "mutually_exclusive_parameters"),
    "response_still_ends": (errors.response_still_ends(), 409, "response_still_ends"),
    "cursor_lost": (errors.cursor_lost(), 409, "stream_reset"),
    "file_not_found": (errors.file_not_found(), 404, "file_not_found"),
    "batch_not_found": (errors.batch_not_found(), 404, "batch_not_found"),
    "tenant_not_found": (errors.tenant_not_found(), 404, "tenant_not_found"),
    "dead_letter_not_found": (errors.dead_letter_not_found(), 404, "dead_letter_not_found"),
    "webhook_not_found": (errors.webhook_not_found(), 404, "webhook_not_found"),
    "unknown_route": (errors.unknown_route(), 404, "not_found"),
    "method_not_allowed": (errors.method_not_allowed(["POST", "GET"]), 405, "method_not_allowed"),
    "upload_stalled": (errors.upload_stalled(30), 408, "upload_stalled"),
    "deadline_exceeded": (errors.deadline_exceeded(), 408, "deadline_exceeded"),
    "job_cancelled": (errors.job_cancelled(), 409, "job_cancelled"),
    "batch_not_commanded": (errors.batch_not_commanded("pause", "failed"), 409, "batch_not_steerable"),
    "nothing_to_replay": (errors.nothing_to_replay("j1", "no map"), 409, "malformed_job"),
    "result_expired": (errors.result_expired("j1"), 410, "result_expired"),
    "offset_gone": (errors.offset_gone(), 410, "offset_gone"),
    "payload_too_large": (errors.payload_too_large(1024), 413, "payload_too_large"),
    "unsupported_media_type": (errors.unsupported_media_type(), 415, "unsupported_media_type"),
    "unsupported_upload": (errors.unsupported_upload(), 415, "unsupported_media_type"),
    "idempotency_key_reused": (errors.idempotency_key_reused(), 422, "idempotency_key_reused"),
    "queue_full": (errors.queue_full(10_000, 7, 900.0), 429, "queue_full"),
    "deadline_unreachable": (
        errors.deadline_unreachable("queue.max_queue_ms", 1_000, Priority.STANDARD, Wait(9_000, 8_000, 12_000)),
        429,
        "deadline_unreachable",
    ),
    "quota_exceeded": (errors.quota_exceeded(QuotaExceeded("jobs", 9, 9)), 429, "quota_exceeded"),
    "internal_error": (errors.internal_error("r1"), 500, "internal_error"),
    "stream_reset": (errors.stream_reset("j1"), 500, "stream_reset"),
    "resume_impossible": (errors.resume_impossible("j1"), 500, "resume_impossible"),
    "no_capacity": (errors.no_capacity(2.5), 503, "no_capacity"),
    "store_full": (errors.store_full("its memory is full"), 503, "no_capacity"),
    "unsupported_coding": (errors.unsupported_coding(["gzip"]), 415, "unsupported_content_encoding"),
    "coding_mismatch": (errors.coding_mismatch("gzip"), 400, "invalid_content_encoding"),
    "encoded_part": (errors.encoded_part("Content-Encoding"), 415, "unsupported_content_encoding"),
    "draining": (errors.draining(), 503, "draining"),
    "store_unavailable": (errors.store_unavailable(), 503, "store_unavailable"),
    "not_accepted": (errors.not_accepted(), 503, "store_unavailable"),
    "put_cut_off": (errors.put_cut_off(), 503, "draining"),
    "acceptance_unknown": (errors.acceptance_unknown(), 503, "store_unavailable"),
    "job_unreadable": (errors.job_unreadable("j1"), 503, "store_unavailable"),
    "wait_timeout": (errors.wait_timeout("j1", 600.0), 504, "wait_timeout"),
    "wait_cut_off": (errors.wait_cut_off("j1", repeatable=False), 503, "draining"),
}
NOT_TO_BE_RETRIED = {
    "deadline_exceeded", "job_cancelled", "batch_not_commanded", "nothing_to_replay",
    "quota_exceeded", "conversation_unreadable", "cursor_lost", "stream_reset", "resume_impossible", "wait_timeout",
    "wait_cut_off",
}  # fmt: skip


def test_every_error_is_in_the_table() -> None:
    """A new one is held to the same rules."""
    made = {
        name
        for module in (errors, access_errors, connection_guard)
        for name, make in vars(module).items()
        if inspect.isfunction(make) and make.__annotations__.get("return") == "ApiError" and not name.startswith("_")
    }
    assert made == EVERY.keys() | {"from_failure", "from_terminal"}


def test_every_error_has_the_one_shape() -> None:
    """Status, code and the four keys of the body are as the contract says."""
    for name, (error, status, code) in EVERY.items():
        assert (error.status, error.code) == (status, code), name
        assert set(error.body) == {"error"}, name
        shape = {"message": str(error), "type": error.type, "param": error.param, "code": code}
        assert error.body["error"] == shape | ({} if error.eta_ms is None else {"eta_ms": error.eta_ms}), name
        assert (error.eta_ms is not None) == (name == "deadline_unreachable")
        assert error.type.endswith("_error"), name


@pytest.mark.parametrize(
    ("error", "settings"),
    [
        (connection_guard.headers_too_large(16_384, 100), "[api] max_header_bytes, max_headers"),
        (errors.payload_too_large(1024), "[api] body_limit"),
        (connection_guard.request_timeout("body", "body_timeout_s"), "[api] body_timeout_s"),
        (connection_guard.too_many_connections(9), "[api] max_connections)"),
        (connection_guard.too_many_connections_of_a_client(9), "[api] max_connections_per_client"),
    ],
)
def test_errors_of_limits_name_their_setting(error: ApiError, settings: str) -> None:
    """Whoever runs the server need not look for it."""
    assert settings in error.message


def test_no_blind_retry_where_it_would_do_harm() -> None:
    """What libraries retry comes with a time to wait, or with a no where a retry does not help or makes more work."""
    for name, (error, _, _) in EVERY.items():
        assert error.headers.get("x-should-retry") == ("false" if name in NOT_TO_BE_RETRIED else None), name
        if name in NOT_TO_BE_RETRIED:
            assert "Retry-After" not in error.headers, name
        elif error.status in (409, 429, 503):
            assert 1 <= int(error.headers["Retry-After"]) <= 120, name


def test_whoever_is_not_known_is_told_how_to_say_who_it_is() -> None:
    """Every 401 and no other error."""
    for name, (error, _, _) in EVERY.items():
        assert error.headers.get("WWW-Authenticate") == ("Bearer" if error.status == 401 else None), name


@pytest.mark.parametrize(
    "name", ["stream_reset", "resume_impossible", "job_unreadable", "wait_timeout", "wait_cut_off"]
)
def test_an_error_whose_job_goes_on_says_where_it_is(name: str) -> None:
    """In its words and its headers: a retry could compute it a second time."""
    error = EVERY[name][0]
    assert "/v1/jobs/j1" in error.message
    assert error.headers["X-Job-Id"] == "j1"
    if name in ("job_unreadable", "wait_timeout", "wait_cut_off"):
        assert error.headers["Location"] == "/v1/jobs/j1"


def test_refusals_for_load_come_back_when_the_wait_says() -> None:
    """What is not known is left out of the body, and never shown as nothing."""
    full, none = errors.queue_full(9, 9, 7.2, 30_000), errors.no_capacity(0.2)
    assert (full.body["error"]["eta_ms"], full.headers["Retry-After"]) == (30_000, "8")
    assert "eta_ms" not in none.body["error"] and none.headers["Retry-After"] == "1"
    late = EVERY["deadline_unreachable"][0]
    assert late.headers["Retry-After"] == "8", "9 s, less the second that the request allows"
    top = errors.deadline_unreachable("queue.deadline_ms", 1, Priority.INTERACTIVE, Wait(9, 8, 9))
    assert "higher lane" in late.message and "higher lane" not in top.message


@pytest.mark.parametrize(
    ("seconds", "whole", "milliseconds"),
    [(0.0, "1", "1000"), (2.5, "3", "2500"), (120.4, "120", "120000"), (1e9, "120", "120000")],
)
def test_retry_after_stays_within_what_libraries_accept(seconds: float, whole: str, milliseconds: str) -> None:
    """At least a second, never above 120, rounded up."""
    assert errors.retry_after(seconds) == {"Retry-After": whole, "retry-after-ms": milliseconds}


def test_a_failure_keeps_its_code_status_and_param() -> None:
    """A worker's refusal reaches the client as it was said."""
    error = errors.from_failure(Failure("context_length_exceeded", "Too long.", 400, "messages"))
    assert (error.status, error.code, error.message, error.param) == (
        400,
        "context_length_exceeded",
        "Too long.",
        "messages",
    )
    assert error.headers == {}


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_failed_job_is_not_retried_by_libraries(status: int) -> None:
    """The queue has done its attempts; a library must not start over."""
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


def test_the_openai_library_reads_every_error() -> None:
    """The real client raises its own class with our code and message in it."""
    answers = iter(error for error, _, _ in EVERY.values())

    def answer(_: httpx2.Request) -> httpx2.Response:
        error = next(answers)
        return httpx2.Response(error.status, headers=error.headers, json=error.body)

    transport = httpx2.Client(transport=httpx2.MockTransport(answer))
    with openai.OpenAI(api_key="k", base_url="http://127.0.0.1/v1", http_client=transport, max_retries=0) as client:
        for error, _, code in EVERY.values():
            with pytest.raises(openai.APIStatusError) as raised:
                client.models.list()
            assert (raised.value.status_code, raised.value.code, raised.value.type) == (error.status, code, error.type)
            assert error.message in str(raised.value)


def test_a_joined_job_that_is_lost_ends_its_reader(empty_house: House) -> None:
    """Two requests with one key wait for one job, which the store then no longer has: both are told so, and the key is
    free for the next try."""
    empty_house.start_api()
    body = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "stream": True}
    with ThreadPoolExecutor(2) as pool, Redis.from_url(empty_house.redis_url) as redis:
        key = {"Idempotency-Key": "k"}
        first = pool.submit(empty_house.post, "/v1/chat/completions", body, key)
        (name,) = eventually(lambda: redis.keys("*:job:job_*"))  # type: ignore[misc]
        redis.config_set("slowlog-log-slower-than", 0)  # every command, so that the second request's join is seen
        redis.config_set("slowlog-max-len", 10_000)
        second = pool.submit(empty_house.post, "/v1/chat/completions", body, key)
        joining = name.rpartition(b":")[2] + b" penstock:api:"  # as only `follow` is called
        try:
            eventually(lambda: any(joining in call for call in _commands(redis)))
            redis.delete(name)
            for answer in (first, second):
                assert b"job_lost" in answer.result(30)[2]
        except (TimeoutError, AssertionError):
            empty_house.close()  # else their requests are waited for
            raise
        status, _, answer = empty_house.post("/v1/chat/completions", body, key | {"Prefer": "respond-async"})
        assert status == 202 and json.loads(answer)["id"] not in name.decode()


def _commands(redis: Redis) -> list[bytes]:
    """What the server has logged as slow."""
    return [bytes(entry["command"]) for entry in redis.slowlog_get(-1)]  # type: ignore[union-attr]


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


def test_an_error_is_counted_each_time_that_it_is_told(empty_house: House) -> None:
    """Each of three answers about one failed job is an error told; the job has failed once."""
    empty_house.start_api()
    body = {"model": "sim", "messages": [{"role": "user", "content": "x"}]}
    job_id = json.loads(empty_house.post("/v1/jobs", body)[2])["id"]
    assert empty_house.post(f"/v1/jobs/{job_id}/cancel", {})[0] == 200
    for _ in range(3):
        status, answer = empty_house.get(f"/v1/jobs/{job_id}/result")
        assert status == 409 and json.loads(answer)["error"]["code"] == "job_cancelled"
    assert b'penstock_errors_total{code="job_cancelled"} 3.0' in empty_house.get("/metrics")[1]


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


@pytest.mark.parametrize(("kind", "param"), errors.TASK_FIELDS.items())
def test_a_task_that_no_store_can_hold_names_its_own_field(kind: TaskKind, param: str) -> None:
    """It has neither max_tokens nor n that could be lowered."""
    error = errors.too_large_for_store(replace(JOB, task=Task(kind=kind)), 9 << 20, 8 << 20)
    assert (error.status, error.code, error.param) == (400, "too_large_for_store", param)
    assert error.message.endswith(f"Send {param} in several requests.") and "max_tokens" not in error.message
