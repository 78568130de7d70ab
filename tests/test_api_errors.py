"""The error answers: shape, status, what a client library is told about trying again."""

from __future__ import annotations

from collections.abc import Callable

import httpx2
import openai
import pytest

from api import errors
from api.errors import ApiError
from streaming.messages import Failure, State, Terminal

EVERY: dict[str, tuple[Callable[[], ApiError], int]] = {
    "invalid_request_error": (lambda: errors.invalid_request("n must be at most 8.", "n"), 400),
    "context_length_exceeded": (lambda: errors.context_length_exceeded(9000, 8192), 400),
    "invalid_api_key": (lambda: errors.invalid_api_key("No key."), 401),
    "permission_denied": (lambda: errors.permission_denied("Not this model.", "model"), 403),
    "model_not_found": (lambda: errors.model_not_found("gpt", ["b", "a"]), 404),
    "job_not_found": (errors.job_not_found, 404),
    "not_found": (errors.unknown_route, 404),
    "method_not_allowed": (lambda: errors.method_not_allowed(["POST", "GET"]), 405),
    "deadline_exceeded_in_queue": (errors.deadline_exceeded_in_queue, 408),
    "deadline_exceeded": (errors.deadline_exceeded, 408),
    "idempotency_in_progress": (errors.idempotency_in_progress, 409),
    "job_cancelled": (errors.job_cancelled, 409),
    "result_expired": (lambda: errors.result_expired("j1"), 410),
    "payload_too_large": (lambda: errors.payload_too_large(1024), 413),
    "unsupported_media_type": (errors.unsupported_media_type, 415),
    "idempotency_key_reused": (errors.idempotency_key_reused, 422),
    "queue_full": (lambda: errors.queue_full(10_000, 900.0), 429),
    "internal_error": (lambda: errors.internal_error("r1"), 500),
    "no_capacity": (lambda: errors.no_capacity(2.5), 503),
    "draining": (errors.draining, 503),
    "store_unavailable": (errors.store_unavailable, 503),
    "wait_timeout": (lambda: errors.wait_timeout("j1", 600.0), 504),
}
MORE_WORK_IF_RETRIED = {"deadline_exceeded_in_queue", "deadline_exceeded", "job_cancelled", "wait_timeout"}


@pytest.mark.parametrize("code", EVERY)
def test_every_error_has_the_one_shape(code: str) -> None:
    """Status, code and the four keys of the body are as the contract says."""
    make, status = EVERY[code]
    error = make()
    assert (error.status, error.code) == (status, code)
    assert set(error.body) == {"error"}
    assert set(error.body["error"]) == {"message", "type", "param", "code"}
    assert error.body["error"] == {"message": str(error), "type": error.type, "param": error.param, "code": code}
    assert error.type.endswith("_error")


@pytest.mark.parametrize("code", EVERY)
def test_no_blind_retry_where_it_would_do_harm(code: str) -> None:
    """What libraries retry comes with a time to wait, or with a no where a retry makes more work."""
    error = EVERY[code][0]()
    if code in MORE_WORK_IF_RETRIED:
        assert error.headers["x-should-retry"] == "false"
        assert "Retry-After" not in error.headers
    elif error.status in (409, 429, 503):
        assert 1 <= int(error.headers["Retry-After"]) <= 120


@pytest.mark.parametrize(
    ("seconds", "whole", "milliseconds"),
    [(0.0, "1", "1000"), (2.5, "3", "2500"), (120.4, "120", "120000"), (1e9, "120", "120000")],
)
def test_retry_after_stays_within_what_libraries_accept(seconds: float, whole: str, milliseconds: str) -> None:
    """At least a second, never above 120, rounded up."""
    assert errors.retry_after(seconds) == {"Retry-After": whole, "retry-after-ms": milliseconds}


def test_a_wait_that_is_over_does_not_lose_the_job() -> None:
    """The 504 carries the job's id in its words and its headers."""
    error = errors.wait_timeout("j1", 600.0)
    assert "/v1/jobs/j1" in error.message
    assert error.headers["X-Job-Id"] == "j1"
    assert error.headers["Location"] == "/v1/jobs/j1"


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
        (Terminal("j", State.CANCELLED, 3), 409, "job_cancelled"),
        (Terminal("j", State.EXPIRED, 0), 408, "deadline_exceeded_in_queue"),
        (Terminal("j", State.EXPIRED, 5), 408, "deadline_exceeded"),
        (Terminal("j", State.FAILED, 0, failure=Failure("poison", "Gave up.", 500)), 500, "poison"),
        (Terminal("j", State.FAILED, 0), 500, "job_failed"),
    ],
)
def test_each_unhappy_end_has_its_error(terminal: Terminal, status: int, code: str) -> None:
    """Every final state but completed maps to one answer."""
    error = errors.from_terminal(terminal)
    assert (error.status, error.code) == (status, code)


@pytest.mark.parametrize("code", EVERY)
def test_the_openai_library_reads_every_error(code: str) -> None:
    """The real client raises its own class with our code and message in it."""
    error = EVERY[code][0]()

    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(error.status, headers=error.headers, json=error.body)

    transport = httpx2.Client(transport=httpx2.MockTransport(answer))
    client = openai.OpenAI(api_key="k", base_url="http://127.0.0.1/v1", http_client=transport, max_retries=0)
    with client, pytest.raises(openai.APIStatusError) as raised:
        client.models.list()
    assert (raised.value.status_code, raised.value.code, raised.value.type) == (error.status, code, error.type)
    assert error.message in str(raised.value)
