"""Parquet export: every record of the window becomes a row with its values and types. Needs pyarrow, an extra."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from telemetry.records import reader
from telemetry.records.schema import ENCODER, DeliveryRecord, RecordedDepth, RequestRecord, SampleRecord

NOW_S = 1_795_693_000
RECORDS = [
    RequestRecord(
        id="job_1", ended_us=NOW_S * 1_000_000, state="completed", model="m", tenant="ann", completion_tokens=7,
        stream=True,
    ),
    RequestRecord(id="job_2", ended_us=(NOW_S + 1) * 1_000_000, state="failed", model="m", code="poison", attempts=3),
    RequestRecord(id="job_3", ended_us=(NOW_S + 900) * 1_000_000, state="completed", model="m"),
    DeliveryRecord(id="job_1", by="api-1", last_sent_us=NOW_S * 1_000_000 + 5),
    SampleRecord(
        at_us=NOW_S * 1_000_000, role="worker", process="worker-1", pid=7, cpu_s=1.5,
        lanes={"m/batch": RecordedDepth(waiting=2)}, gpus={"GPU-a": 12.5},
    ),
]  # fmt: skip
"""The third request ended after the window."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    records = tmp_path / "records"
    records.mkdir()
    lines = b"".join(ENCODER.encode(record) + b"\n" for record in RECORDS)
    (records / "20261126T103000.000-worker-7.jsonl").write_bytes(lines + b'{"kind":"request","id":"torn')
    return records


def test_every_record_of_the_window_is_a_row(folder: Path, tmp_path: Path) -> None:
    """With the types of its fields; maps are JSON, and half a line is left out."""
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: pip install penstock[parquet]")
    counts = reader.export(folder, tmp_path / "out", NOW_S - 60, NOW_S + 60)
    assert counts == {"requests": 2, "deliveries": 1, "samples": 1}
    requests: list[dict[str, Any]] = pq.read_table(tmp_path / "out" / "requests.parquet").to_pylist()
    assert [row["id"] for row in requests] == ["job_1", "job_2"]
    assert (requests[0]["completion_tokens"], requests[0]["stream"], requests[0]["tenant"]) == (7, True, "ann")
    assert (requests[1]["code"], requests[1]["attempts"], requests[1]["v"]) == ("poison", 3, 1)
    (sample,) = pq.read_table(tmp_path / "out" / "samples.parquet").to_pylist()
    assert sample["cpu_s"] == 1.5 and json.loads(sample["gpus"]) == {"GPU-a": 12.5}
    assert json.loads(sample["lanes"]) == {"m/batch": {"waiting": 2}}
    (delivery,) = pq.read_table(tmp_path / "out" / "deliveries.parquet").to_pylist()
    assert delivery["last_sent_us"] == NOW_S * 1_000_000 + 5 and delivery["first_sent_us"] == 0


def test_many_rows_are_written_in_groups(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a week of records needs little memory; none is lost between two groups."""
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: pip install penstock[parquet]")
    monkeypatch.setattr(reader, "ROWS_PER_GROUP", 1)
    reader.export(folder, tmp_path / "out", NOW_S - 60, NOW_S + 60)
    file = pq.ParquetFile(tmp_path / "out" / "requests.parquet")
    assert file.num_row_groups >= 2 and file.read().num_rows == 2
    file.close()


def test_a_window_without_records_is_files_without_rows(folder: Path, tmp_path: Path) -> None:
    """Other tools can read their columns."""
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed: pip install penstock[parquet]")
    assert set(reader.export(folder, tmp_path / "out", 0, 60).values()) == {0}
    table = pq.read_table(tmp_path / "out" / "samples.parquet")
    assert table.num_rows == 0 and {"at_us", "gpus", "gpu_busy"} <= set(table.column_names)


def test_without_pyarrow_the_error_says_so(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(reader.MissingParquetError, match="pyarrow"):
        reader.export(folder, tmp_path / "out", 0, 60)
