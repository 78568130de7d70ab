"""One line of a batch by itself: what is wrong with it is said in words, and the name it gives itself is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from api.openai.batch_lines import envelope, job_of, not_run, output_line, output_lines, request_of, so_far, traits
from api.openai.fields import UNKNOWN
from api.openai.schemas import to_job
from streaming.batches.ledger import InputPlan, Ledger, LineOutcome, Segment
from streaming.batches.store import Batch
from streaming.fleet.aliases import NO_ALIASES
from streaming.order import Priority

ENDPOINT = "/v1/completions"
BATCH = Batch(
    id="batch_1", tenant="t", ceiling=Priority.BATCH, endpoint=ENDPOINT, input_file="f", window="none", output_keep_ms=1
)
GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": ENDPOINT, "body": {"model": "m"}}


def line(**changes: Any) -> bytes:
    return json.dumps(GOOD | changes).encode()


@pytest.mark.parametrize("name", ["a", 'é"\u2028', "x" * 512])
def test_a_line_of_output_has_its_lines_own_name(name: str) -> None:
    """On one line, as JSON; the same line has the same id whenever it is written."""
    written = output_line("batch_1", 7, line(custom_id=name), not_run("expired"))
    assert len(written.decode().splitlines()) == 1
    shown = json.loads(written)
    assert {**shown, "id": "", "error": ""} == {"id": "", "custom_id": name, "line": 7, "response": None, "error": ""}
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
    return request_of(found, "", NO_ALIASES, {}, validated=True)


@pytest.mark.parametrize(
    ("endpoint", "field"),
    [
        (ENDPOINT, {"echo": True}), (CHAT, {"reasoning_effort": "high"}), (CHAT, {"top_k": 5}),
        (CHAT, {"only_a_server_reads_it": 1}),
    ],
)  # fmt: skip
def test_a_line_asks_for_what_its_request_would(endpoint: str, field: dict[str, Any]) -> None:
    """Also if no worker has loaded the model yet; and it shares no answer with a line that asks for something else."""
    request = asked(endpoint, **field)
    job = job_of(request, BATCH, job_id="j", number=1, lane=Priority.BATCH, left_ms=None)
    direct = to_job(request, job_id="j", tenant="t", ceiling=Priority.BATCH, card=UNKNOWN)
    same = ("prompt", "sampling", "tools", "reasoning", "task", "echo", "response", "passed")
    assert [getattr(job, name) for name in same] == [getattr(direct, name) for name in same]
    assert job.passed == {name: value for name, value in field.items() if name == "only_a_server_reads_it"}
    assert traits(request, None).digest != traits(asked(endpoint), None).digest
    assert traits(request, None).digest == traits(asked(endpoint, **field), None).digest


LINES = [json.dumps({"custom_id": f"line-{number}"}).encode() + b"\n" for number in range(4)]
ANSWER = b'{"response":{"status_code":200},"error":null}'
REFUSAL = b'{"response":null,"error":{"code":"x"}}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a batch of four lines: the first has an answer, the second was refused, nothing is known of the others."""
    plan, offset = InputPlan(), 0
    for number, line in enumerate(LINES, 1):
        plan.add(number, offset, len(line))
        offset += len(line)
    plan.save(tmp_path)
    (tmp_path / "input").write_bytes(b"".join(LINES))
    segment = Segment(tmp_path, 1)
    segment.add(0, LineOutcome.DONE, 0, ANSWER)
    segment.add(1, LineOutcome.FAILED, 0, REFUSAL)
    segment.commit()
    segment.close()
    return tmp_path


def names(data: bytes) -> list[str]:
    return [json.loads(line)["custom_id"] for line in data.splitlines()]


def test_while_it_runs_only_lines_that_have_ended_are_there(folder: Path) -> None:
    """A line that waits has not failed."""
    assert names(b"".join(so_far("b", folder, LineOutcome.DONE))) == ["line-0"]
    assert names(b"".join(so_far("b", folder, LineOutcome.FAILED))) == ["line-1"]


def test_before_its_input_was_validated_there_is_nothing(tmp_path: Path) -> None:
    assert list(so_far("b", tmp_path, LineOutcome.DONE)) == []


def test_what_did_not_run_is_among_the_failed_once_it_has_ended(folder: Path) -> None:
    """With the reason for which the batch stopped."""
    plan = InputPlan.load(folder)
    ledger = Ledger.load(folder, len(plan))
    done = b"".join(output_lines("b", folder, plan, ledger, LineOutcome.DONE, "expired"))
    failed = b"".join(output_lines("b", folder, plan, ledger, LineOutcome.FAILED, "expired"))
    assert names(done) == ["line-0"] and names(failed) == ["line-1", "line-2", "line-3"]
    assert "batch_expired" in failed.decode().splitlines()[-1]
