"""What `penstock doctor` says of the records: lost ones, an instance that writes none, and the size of the folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(("samples", "running", "status"), [
    ([(0, 0)], True, "ok"), ([], False, "ok"), ([(3, 0)], True, "warn"), ([(3, 4000), (0, 0)], True, "ok"),
    ([(0, 120)], True, "warn"), ([(0, 120)], False, "ok"),
], ids=["well", "nothing yet", "lost", "lost long ago", "silent", "stopped"])  # fmt: skip
def test_records_are_judged(samples: list[tuple[int, int]], running: bool, status: str, tmp_path: Path) -> None:
    """`samples`: records that were lost, and how many seconds ago that was written."""
    for dropped, age_s in samples:
        sampled(tmp_path, dropped, age_s)
    assert found(tmp_path, running=running).status == status
    assert found(tmp_path, enabled=False).status == "ok"
