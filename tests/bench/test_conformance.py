"""The conformance suite of others: how its verdicts are read and counted. The suite is not part of this tree."""

from __future__ import annotations

import json
import re
from pathlib import Path

from bench.conformance.__main__ import EXPECTED, PASSED, CaseVerdict, failures_of, row_of, run_suite


def bun(folder: Path, text: str) -> None:
    """The program that runs the suite, as a script."""
    path = folder / "node_modules" / ".bin" / "bun"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_the_results_are_read_and_counted(tmp_path: Path) -> None:
    """A case that is not passed counts as failed unless there is a reason for it."""
    results = [
        {"id": "basic-response", "status": "passed"},
        {"id": "image-input", "status": "failed", "errors": ["400"]},
        {"id": "tool-calls", "status": "failed", "errors": ["wrong"]},
    ]
    said = json.dumps({"results": results})
    bun(tmp_path, f'test "$3" = http://x/v1 || exit 1\ncat <<END\n{said}\nEND\nexit 1')
    found = run_suite(tmp_path, "http://x", tmp_path)
    assert found[:2] == [CaseVerdict("basic-response", PASSED), CaseVerdict("image-input", "failed", "400")]
    row = row_of("1.0", found)
    assert [row[key] for key in ("cases", "passed", "excepted", "failed")] == [3, 1, 1, 1]
    assert failures_of(found) == ["tool-calls: failed: wrong"] and "images" in found[1].reason


def test_no_exception_excuses_everything() -> None:
    assert [pattern for pattern in EXPECTED if re.search(pattern, "") or re.search(pattern, "a case")] == []
