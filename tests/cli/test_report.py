"""`penstock report`: windows, the page without external assets, comparisons, and errors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_instance import said_here
from recorded import delivery, request, sample

from cli.options import moment
from cli.output import ProgressLine
from telemetry.records.reader import create
from telemetry.records.schema import ENCODER

NOW = 1_800_000_000.0
HOUR = ("--from", "2027-01-15T08:00", "--to", "2027-01-15T09:00")


def recorded(folder: Path, slow: float = 20.0, tenant: str = "t") -> Path:
    """A folder with a slow worker's load."""
    rows = [request(number, 100.0 * number, tenant=tenant) for number in range(20)]
    rows += [request(100 + number, 100.0 * number, by="worker-2", per_token=slow) for number in range(20)]
    lines = [ENCODER.encode(each) for record in rows for each in (record, delivery(record))]
    lines += [ENCODER.encode(sample("api", "api-1", at, at / 1000)) for at in (0, 10_000)]
    path, file = create(folder, NOW, "worker", 1)
    os.write(file, b"\n".join(lines) + b'\n{"kind":"requ')
    os.close(file)
    os.utime(path, (NOW + 60, NOW + 60))
    return folder


@pytest.fixture
def penstock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, int, str]]:
    """`penstock report` in an empty folder; of the hour of NOW, unless other words say what of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_RECORDS_DIR", str(tmp_path / "records"))
    return lambda *words: said_here("report", *(words if "--compare" in words else (*HOUR, *words)))


def test_a_window_is_reported_in_80_columns_or_as_json(
    tmp_path: Path, penstock: Callable[..., tuple[str, int, str]]
) -> None:
    """And an empty one is said to be empty."""
    recorded(tmp_path / "records")
    said, code, errors = penstock()
    assert code == 0, errors
    assert "worker-2 is slow" in said and "1 lines of the records could not be read" in said
    assert max(map(len, said.splitlines())) <= 80
    found = json.loads(penstock("--json")[0])
    assert found["figures"]["whole"]["requests"] == 40 and found["torn_lines"] == 1
    assert [each["kind"] for each in found["advice"]] == ["slow_worker"]
    _, code, errors = penstock("--from", "2027-01-16T08:00", "--to", "2027-01-16T09:00")
    assert code == 0 and "no request ended in this window" in errors


def test_no_records_is_an_error_with_its_cause(penstock: Callable[..., tuple[str, int, str]]) -> None:
    _, code, errors = penstock()
    assert code == 1 and "nothing has run here yet" in errors


def test_two_folders_are_compared(tmp_path: Path, penstock: Callable[..., tuple[str, int, str]]) -> None:
    (tmp_path / "records").mkdir()
    before, after = recorded(tmp_path / "before"), recorded(tmp_path / "after", slow=5.0)
    said, code, errors = penstock("--compare", str(before), str(after))
    assert code == 0, errors
    assert "Only in A: worker-2 is slow." in said and "whole answer p99" in said and "x 0." in said


def test_the_page_is_the_report_and_needs_nothing_else(
    tmp_path: Path, penstock: Callable[..., tuple[str, int, str]]
) -> None:
    """No address, no script; a name with markup stays text."""
    recorded(tmp_path / "records", tenant="<script>alert(1)</script>&co")
    assert penstock("--html", "r.html")[1] == 0
    text = Path("r.html").read_text()
    assert text.startswith("<!DOCTYPE html>") and "<script" not in text and "&lt;script&gt;" in text
    assert not re.findall(r"(?:src|href|@import|url\(|http)", text)
    assert "worker-2 is slow" in text and "between tokens" in text


@pytest.mark.parametrize(
    ("text", "at"),
    [("90s", NOW - 90), ("2h", NOW - 7200), ("1.5d", NOW - 129_600), ("2027-01-15T08:00", NOW),
     ("2027-01-15", NOW - 28_800), ("2027-01-15T09:00+01:00", NOW)],
)  # fmt: skip
def test_times_as_people_write_them(text: str, at: float) -> None:
    assert moment(text, NOW) == at


def test_an_interrupted_report_says_what_it_has_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, penstock: Callable[..., tuple[str, int, str]]
) -> None:
    """Ctrl-C after the first file of two."""
    for _ in range(2):
        recorded(tmp_path / "records")

    def interrupted(_self: ProgressLine, _text: str, done: int, _total: int) -> None:
        if done:
            raise KeyboardInterrupt

    monkeypatch.setattr(ProgressLine, "amount", interrupted)
    said, code, _ = penstock()
    assert code == 130 and "40 requests" in said and "Interrupted" in said
    said, code, _ = penstock("--json")
    assert code == 130 and json.loads(said)["interrupted"] is True


def test_a_comparison_without_requests_is_json(tmp_path: Path, penstock: Callable[..., tuple[str, int, str]]) -> None:
    """Its windows end now: JSON has no Infinity."""
    for name in ("records", "before", "after"):
        (tmp_path / name).mkdir()
    said, code, errors = penstock("--compare", "before", "after", "--json")
    assert code == 0, errors
    assert "Infinity" not in said and json.loads(said)
