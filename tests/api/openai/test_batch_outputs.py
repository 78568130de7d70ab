"""The output and error files of a batch, while it runs and once it has ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from api.openai.batch_lines import output_lines, so_far
from streaming.batches.ledger import InputPlan, Ledger, LineOutcome, Segment

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
