"""One line of a batch by itself: what is wrong with it is said in words, and the name it gives itself is kept."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api.openai.batch_lines import BadLine, envelope, job_of, not_run, output_line, request_of, traits
from api.openai.schemas import to_job
from streaming.batches.store import Batch
from streaming.order import Priority

ENDPOINT = "/v1/completions"
BATCH = Batch(
    id="batch_1", tenant="t", ceiling=Priority.BATCH, endpoint=ENDPOINT, input_file="f", window="none", output_keep_ms=1
)
GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": ENDPOINT, "body": {"model": "m"}}


def line(**changes: Any) -> bytes:
    return json.dumps(GOOD | changes).encode()


@pytest.mark.parametrize(
    ("data", "code", "param"),
    [
        (b"{not json", "invalid_json_line", None),
        (b"\xff\xfe", "invalid_json_line", None),
        (line(body="DEEP").replace(b'"DEEP"', b"[" * 10_000 + b"]" * 10_000), "invalid_json_line", None),
        (line(body="DEEP").replace(b'"DEEP"', b"[" * 256 + b"]" * 256), "invalid_json_line", None),
        (b"[1]", "invalid_request", None),
        (line(custom_id=None), "invalid_request", None),
        (line(custom_id=""), "invalid_custom_id", "custom_id"),
        (line(custom_id="x" * 513), "invalid_custom_id", "custom_id"),
        (line(method="GET"), "invalid_method", "method"),
        (line(url="/v1/chat/completions"), "mismatched_endpoint", "url"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_in_a_sentence(data: bytes, code: str, param: str | None) -> None:
    """For the person who reads the batch's errors, beside a code for programs and the field at fault."""
    with pytest.raises(BadLine) as raised:
        envelope(data, ENDPOINT)
    assert (raised.value.code, raised.value.param) == (code, param)
    assert " " in raised.value.message and raised.value.message.endswith(".")


def test_a_good_line_is_read() -> None:
    """The longest name that is taken, and POST where no method is said."""
    found = envelope(line(custom_id="x" * 512), ENDPOINT)
    assert (found.custom_id, found.method, json.loads(bytes(found.body))) == ("x" * 512, "POST", {"model": "m"})
    silent = json.dumps({name: value for name, value in GOOD.items() if name != "method"}).encode()
    assert envelope(silent, ENDPOINT).method == "POST"


@pytest.mark.parametrize("name", ["a", 'é"\u2028', "x" * 512])
def test_a_line_of_output_has_its_lines_own_name(name: str) -> None:
    """On one line, as JSON; the same line has the same id whenever it is written."""
    written = output_line("batch_1", 7, line(custom_id=name), not_run("expired"))
    assert len(written.decode().splitlines()) == 1
    shown = json.loads(written)
    assert shown | {"id": "", "error": None} == {
        "id": "",
        "custom_id": name,
        "line": 7,
        "response": None,
        "error": None,
    }
    assert shown["error"]["code"] == "batch_expired" and shown["error"]["message"].endswith(".")
    assert output_line("batch_1", 7, line(custom_id=name), not_run("expired")) == written
    assert json.loads(output_line("batch_1", 8, line(custom_id=name), not_run("expired")))["id"] != shown["id"]


CHAT = "/v1/chat/completions"
ASKED: dict[str, dict[str, Any]] = {
    ENDPOINT: {"prompt": "once", "temperature": 0},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "temperature": 0},
}


def asked(endpoint: str, **more: Any) -> Any:
    found = envelope(line(url=endpoint, body={"model": "m"} | ASKED[endpoint] | more), endpoint)
    return request_of(found, None)


@pytest.mark.parametrize(
    ("endpoint", "field"), [(ENDPOINT, {"echo": True}), (CHAT, {"reasoning_effort": "high"}), (CHAT, {"top_k": 5})]
)
def test_a_line_asks_for_what_its_request_would(endpoint: str, field: dict[str, Any]) -> None:
    """And it shares no answer with a line that does not."""
    request = asked(endpoint, **field)
    job = job_of(request, BATCH, job_id="j", number=1, lane=Priority.BATCH, left_ms=None)
    direct = to_job(request, job_id="j", tenant="t", ceiling=Priority.BATCH, reply_to="", trace={})
    same = ("prompt", "sampling", "tools", "reasoning", "task", "echo", "response")
    assert [getattr(job, name) for name in same] == [getattr(direct, name) for name in same]
    assert traits(request, None).digest != traits(asked(endpoint), None).digest
    assert traits(request, None).digest == traits(asked(endpoint, **field), None).digest
