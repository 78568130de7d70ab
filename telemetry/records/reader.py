"""Record files: names them, trims them, and reads a time window of them, whatever state a crash has left them in.

A request of a report is its record, joined to its delivery, and the latencies that follow from both.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from telemetry.latency import GROUPS, OF_ANSWER, Split, Stamps, first_seen, split
from telemetry.records.schema import DECODER, VERSION, DeliveryRecord, Record, RequestRecord, SampleRecord

_NAME = re.compile(r"([0-9]{8}T[0-9]{6})\.([0-9]{3})-([a-z]+)-([0-9]+)(?:-[0-9]+)?\.jsonl")
MODE = 0o600


@dataclass(frozen=True, slots=True)
class RecordFile:
    """One file of the folder. Times are Unix seconds.

    Each process writes files of its own, so no file has two writers. A name tells when its file was begun, by which
    role and by which process: `20261124T182259.123-worker-4711.jsonl`.
    """

    path: Path
    began: float
    """When it was begun, by its name."""
    changed: float
    """When it was written last."""
    size: int


def create(folder: Path, now: float, role: str, pid: int) -> tuple[Path, int]:
    """Create the file that a process appends to from now on. Returns its path and a descriptor. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    at = datetime.fromtimestamp(now, UTC)
    name = f"{at:%Y%m%dT%H%M%S}.{at.microsecond // 1000:03d}-{role}-{pid}"
    for number in range(100):
        path = folder / (f"{name}-{number}.jsonl" if number else f"{name}.jsonl")
        with contextlib.suppress(FileExistsError):
            return path, os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
    raise FileExistsError(f"{folder / name} and its numbers are taken")


def files(folder: Path) -> list[RecordFile]:
    """The files of a folder, oldest first; those of other names are left out. Raises OSError."""
    found = list(_files(folder)) if folder.is_dir() else []
    return sorted(found, key=lambda each: (each.began, each.path.name))


def _files(folder: Path) -> Iterator[RecordFile]:
    for path in folder.iterdir():
        if match := _NAME.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError, ValueError):  # removed meanwhile; no date
                began = datetime.strptime(match[1], "%Y%m%dT%H%M%S").replace(tzinfo=UTC).timestamp()
                stat = path.stat()
                yield RecordFile(path, began + int(match[2]) / 1000, stat.st_mtime, stat.st_size)


def trim(folder: Path, now: float, *, keep_s: float, max_bytes: int, own: Path | None = None) -> None:
    """Remove the files that were not written for `keep_s`, and the oldest until the others are `max_bytes` or less, but
    for `own`, which the caller writes. Raises OSError.

    Another process may write a file that goes: it notices, and begins a new one.
    """
    found = files(folder)
    total = sum(each.size for each in found)
    for each in found:
        if each.path != own and (total > max_bytes or now - each.changed > keep_s):
            each.path.unlink(missing_ok=True)
            total -= each.size


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
        yield from read_file(each.path, since, until, skipped)
        done += each.size
    on_read(done, total)


def time_of(record: Record) -> int:
    """The time that places a record into a window, in microseconds: its end."""
    if isinstance(record, SampleRecord):
        return record.at_us
    if isinstance(record, DeliveryRecord):
        return record.last_sent_us or record.last_got_us or record.first_sent_us
    return record.ended_us


def read_file(path: Path, since: float, until: float, skipped: Skipped) -> Iterator[Record]:
    """Read the records of a window (Unix seconds) from one file, whatever its name; counts what it skips."""
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
            if since * 1e6 - late_us <= time_of(record) < until * 1e6 + late_us:
                yield record


def decode_line(line: bytes, skipped: Skipped) -> Record | None:
    """Decode one line; None, and counted, if that is not possible."""
    if not line.strip():
        return None
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        record: Record = DECODER.decode(line)
        if record.v <= VERSION:
            return record
    is_newer = _is_newer(line)
    skipped.newer, skipped.torn = skipped.newer + is_newer, skipped.torn + (not is_newer)
    return None


def _is_newer(line: bytes) -> bool:
    try:
        envelope = _ENVELOPE.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return bool(envelope.kind) and envelope.v >= VERSION


# --- requests ---------------------------------------------------------------------------------------------------------


GROUP_OF = {part: group for group, parts in GROUPS.items() for part in parts}
"""The group of each part."""


@dataclass(frozen=True)
class ReportedRequest:
    """One request. Times are milliseconds; None: the request has no such time."""

    record: RequestRecord
    delivery: DeliveryRecord | None = None

    @property
    def stamps(self) -> Stamps:
        """The stamps of the record and of the delivery. One that was not received, as far as is known, begins when it
        was accepted."""
        known, sent = self.record.stamps, self.delivery
        of_answer = {name: getattr(sent, f"{name}_us") for name in OF_ANSWER} if sent is not None else {}
        return replace(known, received=known.received or known.accepted, **of_answer)

    @property
    def split(self) -> Split:
        """Its time by parts, in microseconds."""
        return split(self.stamps, over=True)

    @property
    def completed(self) -> bool:
        return self.record.state == "completed"

    @property
    def wait_ms(self) -> float | None:
        """From acceptance to the first claim; to its end, if no worker claimed it."""
        accepted = self.record.accepted_us
        until = self.record.started_us or self.record.claimed_us or self.record.ended_us
        return max(0, until - accepted) / 1000 if accepted else None

    @property
    def ttft_ms(self) -> float | None:
        """From receipt to the first token, as `first_seen` defines that."""
        stamps = self.stamps
        first = first_seen(stamps, whole=self.delivery is not None and self.delivery.whole)
        return max(0, first - stamps.received) / 1000 if first and stamps.received else None

    @property
    def itl_ms(self) -> float | None:
        """Mean time between two tokens of one of its texts, after the first, in the engine."""
        first, last, own = self.record.first_us, self.record.last_us, self.own_tokens / (self.record.choices or 1)
        return max(0, last - first) / 1000 / (own - 1) if first and last and own > 1 else None

    @property
    def e2e_ms(self) -> float | None:
        """From receipt to the end of the answer; to the end of the job, if no client waited."""
        whole = self.split.end_to_end
        return None if whole is None else max(0, whole) / 1000

    @property
    def own_tokens(self) -> int:
        """Tokens that the last attempt has generated."""
        return max(0, self.record.completion_tokens - self.record.continued_tokens)


@dataclass
class Evidence:
    """All records of a window: requests, and the samples of each process in the order of time."""

    requests: list[ReportedRequest] = field(default_factory=list)
    samples: dict[tuple[str, int], list[SampleRecord]] = field(default_factory=dict)
    """By name and pid of the process."""
    interrupted: bool = False
    """Whether Ctrl-C ended the reading, so that records are missing."""


def evidence_of(records: Iterable[Record], *, keep_partial: bool = False) -> Evidence:
    """Join the records of a window. A delivery whose request is not in the window is left out.

    Args:
        keep_partial: Ctrl-C ends the reading, and what was read is returned, if there is a request in it.
    """
    deliveries: dict[str, DeliveryRecord] = {}
    requests: list[RequestRecord] = []
    found = Evidence()
    try:
        for record in records:
            if isinstance(record, RequestRecord):
                requests.append(record)
            elif isinstance(record, DeliveryRecord):
                deliveries.setdefault(record.id, record)
            else:
                found.samples.setdefault((record.process, record.pid), []).append(record)
    except KeyboardInterrupt:
        if not (keep_partial and requests):
            raise
        found.interrupted = True
    requests.sort(key=lambda each: (each.ended_us, each.id))
    found.requests = [ReportedRequest(record, deliveries.get(record.id)) for record in requests]
    for samples in found.samples.values():
        samples.sort(key=lambda sample: sample.at_us)
    return found
