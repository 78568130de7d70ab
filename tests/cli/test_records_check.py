"""What `penstock doctor` says of the records: lost ones, an instance that writes none, and the size of the folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

from cli.doctor import Check, check_records
from telemetry.records.reader import create
from telemetry.records.schema import ENCODER, RecordSettings, SampleRecord


def found(folder: Path, *, running: bool = True, enabled: bool = True) -> Check:
    (check,) = check_records(RecordSettings(enabled=enabled), folder, running=running)
    return check


def sampled(folder: Path, dropped: int, age_s: float = 0.0) -> None:
    at = time.time() - age_s
    path, file = create(folder, at, "api", 1)
    sample = SampleRecord(at_us=int(at * 1e6), role="api", process="api-1", pid=1, cpu_s=1.0, dropped=dropped)
    os.write(file, ENCODER.encode(sample) + b"\n")
    os.close(file)
    os.utime(path, (at, at))


def test_all_is_well(tmp_path: Path) -> None:
    sampled(tmp_path, 0)
    assert found(tmp_path).status == "ok"
    assert found(tmp_path / "missing", running=False).status == "ok", "nothing has run yet"


def test_lost_records_are_told_with_the_fix(tmp_path: Path) -> None:
    sampled(tmp_path, 3)
    check = found(tmp_path)
    assert (check.status, check.detail) == ("warn", "3 records lost in the last hour") and "make room" in check.hint


def test_a_loss_of_long_ago_is_over(tmp_path: Path) -> None:
    sampled(tmp_path, 3, age_s=4000)
    sampled(tmp_path, 0)
    assert found(tmp_path).status == "ok"


def test_an_instance_that_writes_nothing_is_noticed(tmp_path: Path) -> None:
    """A full disk, for example; a stopped instance writes nothing, and that is right."""
    sampled(tmp_path, 0, age_s=120)
    assert found(tmp_path).status == "warn" and found(tmp_path, running=False).status == "ok"


def test_records_that_are_switched_off_are_no_problem(tmp_path: Path) -> None:
    assert found(tmp_path, enabled=False).status == "ok"
