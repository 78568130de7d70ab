"""The record writer: what a crash, a full disk and a full buffer leave, and the limits of the folder."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from flow import until

from telemetry import gpu
from telemetry.gpu import Sampler
from telemetry.records import writer as writer_module
from telemetry.records.reader import Skipped, create, files, read_records, trim
from telemetry.records.schema import RecordSettings, RequestRecord
from telemetry.records.writer import RecordWriter

NOW = 1_800_000_000.0
FOREVER = (0.0, 1e11)


def record(number: int) -> RequestRecord:
    return RequestRecord(id=f"job_{number:032x}", ended_us=int(NOW * 1e6) + number, state="completed", model="m")


def opened(
    folder: Path, told: Counter[str] | None = None, clock: Callable[[], float] = lambda: NOW, **settings: float
) -> RecordWriter:
    """`told` counts what the writer reports."""
    told = Counter() if told is None else told
    return RecordWriter(
        RecordSettings(dir=str(folder), **{"keep_s": 1e9, **settings}),  # type: ignore[arg-type]
        "worker",
        on_written=lambda number: told.update(written=number),
        on_dropped=lambda why, number: told.update({why: number}),
        clock=clock,
    )


def write(writer: RecordWriter, *numbers: int) -> None:
    """These records, at once."""
    for number in numbers:
        writer.write(record(number))
    writer.flush()


def ids(folder: Path, skipped: Skipped | None = None) -> list[str]:
    return [each.id for each in read_records(folder, *FOREVER, skipped or Skipped()) if isinstance(each, RequestRecord)]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    told = Counter[str]()
    writer = opened(tmp_path, told)
    write(writer, *range(1000))
    assert ids(tmp_path) == [record(number).id for number in range(1000)]
    assert (told, writer.written, writer.dropped) == ({"written": 1000}, 1000, 0)
    lines = files(tmp_path)[0].path.read_bytes().splitlines()
    assert all(b'"v":1' in line for line in lines), "a later version must know which one wrote it"


def test_an_idle_writer_sleeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread wakes for records alone, and those are on the disk within the interval, each time."""
    monkeypatch.setattr(writer_module, "WRITE_INTERVAL_S", 0.01)
    writer = opened(tmp_path)
    flush, flushed = writer.flush, Counter[int]()

    def counted() -> None:
        flushed[writer.written] += 1
        flush()

    monkeypatch.setattr(writer, "flush", counted)
    writer.start()
    for number in range(3):
        time.sleep(0.2)
        writer.write(record(number))
        deadline = time.monotonic() + 10
        while writer.written == number and time.monotonic() < deadline:
            time.sleep(0.005)
    writer.close()
    assert ids(tmp_path) == [record(number).id for number in range(3)]
    assert max(flushed.values()) <= 3 and not writer._thread.is_alive(), flushed


CHILD = """
import sys, time
from pathlib import Path
from telemetry.records.schema import RequestRecord
from telemetry.records.schema import RecordSettings
from telemetry.records.writer import RecordWriter

writer = RecordWriter(RecordSettings(dir=sys.argv[1]), "worker")
writer.start()
number = 0
while True:
    writer.write(RequestRecord(id=f"job_{number:032x}", ended_us=int(time.time() * 1e6), state="completed", model="m"))
    number += 1
    print(number, time.time(), flush=True)
    time.sleep(0.002)
"""


@pytest.mark.slow
def test_a_killed_process_loses_what_came_in_the_last_second(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    told = []
    for line in child.stdout:
        told.append(line.split())
        if len(told) == 1000:
            child.send_signal(signal.SIGKILL)
            break
    told += [line.split() for line in child.stdout if len(line.split()) == 2]
    child.wait()
    child.stdout.close()
    skipped = Skipped()
    found = ids(tmp_path, skipped)
    assert found == [f"job_{number:032x}" for number in range(len(found))], "none is missing in between"
    killed_at = float(told[-1][1])
    due = sum(float(at) < killed_at - 1.0 for _, at in told)
    assert due <= len(found) and skipped.torn <= 1


def test_a_torn_line_is_skipped_and_counted(tmp_path: Path) -> None:
    """Whatever its length: all cuts of the last line, also in the middle of a character."""
    writer = opened(tmp_path)
    write(writer, *range(3))
    (file,) = files(tmp_path)
    whole = file.path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(last + 1, len(whole) - 1):
        file.path.write_bytes(whole[:cut])
        skipped = Skipped()
        assert (ids(tmp_path, skipped), skipped.torn) == ([record(0).id, record(1).id], 1)


def test_lines_of_a_newer_version_and_other_text_are_skipped(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    write(writer, 0)
    with files(tmp_path)[0].path.open("ab") as file:
        file.write(b'{"kind":"request","v":2,"id":"x","ended_us":1,"state":"completed","model":"m"}\n')
        file.write(b'{"kind":"dream","v":1}\n\n\xff\xfe\x00\n[1]\n')
    skipped = Skipped()
    assert ids(tmp_path, skipped) == [record(0).id]
    assert (skipped.newer, skipped.torn) == (2, 2)


FULL = """
import resource, sys
from telemetry.records.schema import RequestRecord
from telemetry.records.schema import RecordSettings
from telemetry.records.writer import RecordWriter

lost = {}
writer = RecordWriter(RecordSettings(dir=sys.argv[1]), "worker", on_dropped=lambda why, n: lost.update({why: n}))
def write(first, last):
    for number in range(first, last):
        writer.write(RequestRecord(id=f"job_{number:032x}", ended_us=1, state="completed", model="m"))
    writer.flush()
write(0, 2)
resource.setrlimit(resource.RLIMIT_FSIZE, (450, resource.RLIM_INFINITY))  # a write may grow no file beyond this
write(2, 10)
write(10, 12)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
write(12, 14)
print(writer.written, writer.dropped, lost)
"""


def test_a_full_disk_costs_records_and_nothing_else(tmp_path: Path) -> None:
    """A write that the system takes only in part leaves a torn line; later records are whole again, all are counted."""
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True)
    skipped = Skipped()
    found = ids(tmp_path, skipped)
    assert found[:2] == [f"job_{number:032x}" for number in range(2)]
    assert found[-2:] == [f"job_{number:032x}" for number in (12, 13)]
    written, dropped, *_ = done.stdout.split()
    assert (int(written), int(dropped)) == (len(found), 14 - len(found)) and 4 < len(found) < 14
    assert skipped.torn == 1 and "{'disk': 2}" in done.stdout


def test_a_folder_that_cannot_be_written_costs_records_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "records").write_text("not a folder")
    told = Counter[str]()
    writer = opened(tmp_path / "records", told)
    write(writer, 0)
    assert told["disk"] == 1 and not told["written"]
    (tmp_path / "records").unlink()
    write(writer, 1)
    assert ids(tmp_path / "records") == [record(1).id]


def test_a_full_buffer_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MAX_BUFFERED_BYTES", 1000)
    told = Counter[str]()
    writer = opened(tmp_path, told)
    write(writer, *range(100))
    found = ids(tmp_path)
    assert 0 < len(found) < 100 and told == {"full": 100 - len(found), "written": len(found)}


def test_a_disk_that_does_not_answer_holds_up_no_writer(tmp_path: Path) -> None:
    """A pipe that nobody reads stands for it: `write` returns while the thread waits inside the system."""
    writer = opened(tmp_path)
    reading, writing = os.pipe()
    os.set_blocking(writing, True)
    writer._file, writer._began = writing, NOW
    for number in range(2000):
        writer.write(record(number))
    stuck = threading.Thread(target=writer.flush, daemon=True)
    stuck.start()
    stuck.join(0.2)
    assert stuck.is_alive(), "the pipe has taken everything"
    caller = threading.Thread(target=lambda: [writer.write(record(number)) for number in range(2000)], daemon=True)
    caller.start()
    caller.join(20)
    assert not caller.is_alive(), "who writes a record waits for the disk"
    left = bytearray()
    while left.count(b"\n") < 2000:
        left += os.read(reading, 1 << 16)
    stuck.join(20)
    assert not stuck.is_alive() and left.endswith(b"\n")
    os.set_blocking(reading, False)
    with pytest.raises(BlockingIOError):
        os.read(reading, 1)
    os.close(reading)


def test_a_file_is_left_when_it_is_large_or_old(tmp_path: Path) -> None:
    clock = Mock(return_value=NOW)
    writer = opened(tmp_path, clock=clock, file_bytes=4096, file_s=60)
    for number in range(100):
        write(writer, number)
        clock.return_value += 0.001
    by_size = len(files(tmp_path))
    assert by_size > 1 and all(each.size < 4096 + 200 for each in files(tmp_path))
    clock.return_value += 60
    write(writer, 100)
    assert len(files(tmp_path)) == by_size + 1
    assert ids(tmp_path) == [record(number).id for number in range(101)]


def test_the_folder_is_bounded(tmp_path: Path) -> None:
    clock = Mock(return_value=NOW)
    writer = opened(tmp_path, clock=clock, file_bytes=4096, max_bytes=20_000)
    for number in range(600):
        write(writer, number)
        clock.return_value += 1
        assert sum(each.size for each in files(tmp_path)) <= 20_000 + 4096 + 200
    found = ids(tmp_path)
    assert found == [record(number).id for number in range(600 - len(found), 600)], "the newest stay"


def test_old_files_go(tmp_path: Path) -> None:
    for age in (100, 50, 10):
        path, file = create(tmp_path, NOW - age, "api", 1)
        os.close(file)
        os.utime(path, (NOW - age, NOW - age))
    trim(tmp_path, NOW, keep_s=60, max_bytes=10**9)
    assert [each.began for each in files(tmp_path)] == [NOW - 50, NOW - 10]


def test_two_processes_of_one_name_share_no_file(tmp_path: Path) -> None:
    """Containers on one volume have the same pid, and may start in the same millisecond."""
    one, two = create(tmp_path, NOW, "api", 1), create(tmp_path, NOW, "api", 1)
    for _, file in (one, two):
        os.close(file)
    assert one[0] != two[0] and len(files(tmp_path)) == 2


async def test_a_held_up_loop_is_said_and_recorded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A synchronous sleep is the worst thing a coroutine can do."""
    monkeypatch.setattr(gpu, "MIN_LOGGED_LAG_S", 0.2)
    samples: list[Any] = []
    sampling = asyncio.create_task(
        Sampler(Mock(written=0, dropped=0, write=samples.append), "api", "p").keep_sampling()
    )
    await asyncio.sleep(0)
    time.sleep(gpu.LAG_CHECK_INTERVAL_S + 0.3)
    await until(lambda: "held up" in caplog.text)
    sampling.cancel()
    await asyncio.gather(sampling, return_exceptions=True)
    assert samples[0].lag_ms == 0 and samples[-1].lag_ms > 200


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
