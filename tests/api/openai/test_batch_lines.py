"""One line of a batch by itself: what is wrong with it is said in words, and the name it gives itself is kept."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api.openai.batch_lines import BadLine, envelope, not_run, output_line

ENDPOINT = "/v1/completions"
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
