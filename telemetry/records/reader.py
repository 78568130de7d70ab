"""Record reader: reads a folder's records of a time window, whatever state a crash has left its files in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import msgspec

from telemetry.records.folder import files
from telemetry.records.schema import DECODER, VERSION, DeliveryRecord, Record, SampleRecord

SLACK_S = 120.0
"""Clocks of two machines, and of Redis, may differ; and a request ends some time before its line is written."""


OnRead: TypeAlias = Callable[[int, int], object]
"""Told how many bytes are read, and of how many, before each file and at the end."""


class _Envelope(msgspec.Struct):
    kind: str = ""
    v: int = 0


_ENVELOPE = msgspec.json.Decoder(_Envelope)


@dataclass
class Skipped:
    """Lines that could not be read. `torn`: cut by a crash or a full disk; `newer`: of a later version of Penstock."""

    torn: int = 0
    newer: int = 0
    unreadable: list[str] = field(default_factory=list)
    """Names of files that could not be opened."""


def read_records(
    folder: Path, since: float, until: float, skipped: Skipped, on_read: OnRead = lambda _done, _total: None
) -> Iterator[Record]:
    """Read the records of a window (Unix seconds, `since` <= time < `until`), file by file; counts what it skips.

    Raises OSError if the folder cannot be read.
    """
    wanted = [each for each in files(folder) if each.changed >= since - SLACK_S and each.began < until + SLACK_S]
    done, total = 0, sum(each.size for each in wanted)
    for each in wanted:
        on_read(done, total)
        yield from _of_file(each.path, since * 1e6, until * 1e6, skipped)
        done += each.size
    on_read(done, total)


def time_of(record: Record) -> int:
    """The time that places a record into a window, in microseconds: its end."""
    if isinstance(record, SampleRecord):
        return record.at_us
    if isinstance(record, DeliveryRecord):
        return record.last_sent_us or record.last_got_us or record.first_sent_us
    return record.ended_us


def _of_file(path: Path, since_us: float, until_us: float, skipped: Skipped) -> Iterator[Record]:
    try:
        file = path.open("rb")
    except OSError as error:
        skipped.unreadable.append(f"{path.name}: {error.strerror}")
        return
    with file:
        for line in file:
            record = decode_line(line, skipped)
            if record is None:
                continue
            late_us = SLACK_S * 1e6 if isinstance(record, DeliveryRecord) else 0  # it may come after its request's end
            if since_us - late_us <= time_of(record) < until_us + late_us:
                yield record


def decode_line(line: bytes, skipped: Skipped) -> Record | None:
    """Decode one line; None, and counted, if that is not possible."""
    if not line.strip():
        return None
    try:
        record: Record = DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        if _is_newer(line):
            skipped.newer += 1
        else:
            skipped.torn += 1
        return None
    if record.v > VERSION:
        skipped.newer += 1
        return None
    return record


def _is_newer(line: bytes) -> bool:
    try:
        envelope = _ENVELOPE.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return bool(envelope.kind) and envelope.v >= VERSION
