"""Records check of `penstock doctor`: whether the processes of this machine keep their records, and have lost any."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from cli.check import Check
from penstock.text import counted
from telemetry.records.reader import Skipped, files, read_records
from telemetry.records.schema import RecordSettings, SampleRecord

LOOKED_BACK_S = 3600.0
MAX_SILENT_SAMPLES = 6
"""A running process writes a sample every `sample_s`; after so many without one, something refuses them."""
ROOM = "make room on its disk, or set records.dir to another one"


def check_records(settings: RecordSettings, folder: Path, *, running: bool) -> Iterator[Check]:
    """Judge the records of the last hour. `running`: whether an instance runs, which should write them."""
    if not settings.enabled:
        yield Check("records", "ok", "switched off (records.enabled)")
        return
    now = time.time()
    try:
        found, skipped = files(folder), Skipped()
        samples = [
            record
            for record in read_records(folder, now - LOOKED_BACK_S, now + LOOKED_BACK_S, skipped)
            if isinstance(record, SampleRecord)
        ]
    except OSError as error:
        yield Check("records", "warn", f"{folder} cannot be read: {error.strerror}", "penstock report needs them")
        return
    silent_s = now - max((each.changed for each in found), default=now)
    dropped = sum({(each.process, each.pid): each.dropped for each in samples}.values())
    if running and silent_s > MAX_SILENT_SAMPLES * settings.sample_s:
        yield Check("records", "warn", f"none has come into {folder} for {silent_s:.0f} s", ROOM)
    elif dropped:
        yield Check("records", "warn", f"{counted(dropped, 'record')} lost in the last hour", ROOM)
    else:
        size = sum(each.size for each in found)
        yield Check("records", "ok", f"{size / 1e6:.1f} MB of at most {settings.max_bytes / 1e6:.0f} in {folder}")
