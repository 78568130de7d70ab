"""Parquet export of records: one file for each kind. Needs pyarrow, which only this uses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from telemetry.records.reader import OnRead, Skipped, read_records
from telemetry.records.schema import DeliveryRecord, RequestRecord, SampleRecord

ROWS_PER_GROUP = 50_000
KINDS: Mapping[type[msgspec.Struct], str] = {
    RequestRecord: "requests",
    DeliveryRecord: "deliveries",
    SampleRecord: "samples",
}


class MissingParquetError(Exception):
    """Raised where pyarrow is not installed."""


def export(
    folder: Path, target: Path, since: float, until: float, on_read: OnRead = lambda _done, _total: None
) -> dict[str, int]:
    """Write the records of a window (Unix seconds) into `target`; returns the number of rows by kind.

    Maps (lanes, gpus) become JSON text. Raises MissingParquetError, OSError.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415 - an extra
        import pyarrow.parquet as pq  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise MissingParquetError("Parquet files need pyarrow, which is not installed") from error
    target.mkdir(parents=True, exist_ok=True)
    counts = dict.fromkeys(KINDS.values(), 0)
    writers: dict[str, Any] = {}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in KINDS.values()}
    schemas = {name: pa.schema([(field, _type(pa, kind)) for field, kind in columns(of)]) for of, name in KINDS.items()}

    def write(name: str) -> None:
        writer = writers.get(name) or pq.ParquetWriter(target / f"{name}.parquet", schemas[name])
        writers[name] = writer
        writer.write_table(pa.Table.from_pylist(rows[name], schema=schemas[name]))
        rows[name] = []

    try:
        for record in read_records(folder, since, until, Skipped(), on_read):
            name = KINDS[type(record)]
            counts[name] += 1
            rows[name].append(row(record))
            if len(rows[name]) >= ROWS_PER_GROUP:
                write(name)
        for name in rows:
            write(name)
    finally:
        for writer in writers.values():
            writer.close()
    return counts


def columns(kind: type[msgspec.Struct]) -> list[tuple[str, type]]:
    """Names and types of the columns: int, float, bool or str."""
    plain = {"int": int, "float": float, "bool": bool}
    return [(field.name, plain.get(getattr(field.type, "__name__", ""), str)) for field in msgspec.structs.fields(kind)]


def row(record: msgspec.Struct) -> dict[str, Any]:
    """One record as a row of `columns`."""
    return {
        name: value if isinstance(value, (int, float, str)) else msgspec.json.encode(value).decode()
        for name, value in msgspec.structs.asdict(record).items()
    }


def _type(pa: Any, kind: type) -> Any:
    return {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), str: pa.string()}[kind]
