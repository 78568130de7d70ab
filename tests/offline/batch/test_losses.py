"""Kill -9 of what works on batches: no line is lost, none answered twice, whatever Celery loses."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from batching import answers_are_right, begin, client, content, ended, jsonl, line, nothing_left_over, reaches
from house import House, eventually, restartable

pytestmark = pytest.mark.slow

LINES = 160


LASTING = {"PENSTOCK_REDIS_LEASE_MS": "30000"}
"""Of a worker that nobody replaces: it would end, fenced, if the machine stood still for its lease."""


@pytest.fixture
def served(empty_house: House) -> House:
    """Slow enough to be hit in the middle; a lost worker is noticed within a second."""
    house = empty_house
    house.environ |= {
        "PENSTOCK_SIM_SLOTS": "8",
        "PENSTOCK_SIM_STEP_MS": "5",
        "PENSTOCK_REDIS_LEASE_MS": "500",
        "PENSTOCK_REDIS_MAX_ATTEMPTS": "50",
    }
    house.start("scheduler")
    house.start_api()
    return house


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_offline_and_engine_workers_are_killed_again_and_again(served: House) -> None:
    """In all phases: 160 lines, each answered once, in order, and nothing is left over. Told to end instead, in the
    middle of a turn, a process does so soon."""
    openai = client(served)
    worker, offline = served.start("workers"), served.start("offline")
    lines = [line(number) for number in range(LINES)]
    batch = begin(openai, lines)
    for completed in (1, 30, 80, 130, 155):
        reaches(openai, batch, completed)
        if completed == 1:  # only of this process it is certain that it has begun
            offline.terminate()
            assert offline.wait(10) == 0
        else:
            kill(offline)
        if completed in (30, 130):
            kill(worker)
            worker = served.start("workers")
        offline = served.start("offline")
    done = ended(openai, batch)
    assert done.status == "completed" and done.error_file_id is None
    answers_are_right(content(openai, done.output_file_id), lines)
    assert done.usage and done.usage.output_tokens == LINES * 6
    nothing_left_over(served.folder)


def test_two_offline_processes_share_the_work(served: House) -> None:
    """A stopped one is overtaken; when it wakes up it is refused and spoils nothing."""
    openai = client(served)
    served.start("workers", **LASTING)
    first = served.start("offline", "--id", "offline-1")
    lines = [line(number, max_tokens=40) for number in range(LINES)]
    batch = begin(openai, lines)
    reaches(openai, batch, 5)
    first.send_signal(signal.SIGSTOP)
    served.start("offline", "--id", "offline-2")
    before = openai.batches.retrieve(batch.id).request_counts
    assert before
    reaches(openai, batch, before.completed + 20)
    first.send_signal(signal.SIGCONT)
    done = ended(openai, batch)
    answers_are_right(content(openai, done.output_file_id), lines)
    gave_up = ("another process has the batch now", "because the store is away")  # a command timed out in its sleep
    eventually(lambda: any(each in served.log("offline") for each in gave_up))
    assert openai.batches.retrieve(batch.id) == done
    answers_are_right(content(openai, done.output_file_id), lines)


def test_after_a_restart_of_everything_it_goes_on(tmp_path: Path) -> None:
    """Redis too, all killed at once."""
    lines = [line(number, max_tokens=30) for number in range(LINES)]
    with restartable(tmp_path) as (house, restart):
        house.environ |= {"PENSTOCK_SIM_SLOTS": "8", "PENSTOCK_REDIS_LEASE_MS": "500"}
        house.start_all("scheduler", "workers", "offline")
        openai = client(house)
        batch = begin(openai, lines)
        reaches(openai, batch, 40)
        for process in house._processes:
            kill(process)
        restart()
        house.start_all("scheduler", "workers", "offline")
        done = ended(openai, batch)
        answers_are_right(content(openai, done.output_file_id), lines)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only where the kernel tells")
def test_reading_and_assembling_stay_out_of_memory(served: House) -> None:
    """36 MB in and 40 MB out, and the process has grown by less than 28 MiB."""
    openai = client(served)
    served.start("workers", **LASTING, PENSTOCK_SIM_SLOTS="32", PENSTOCK_SIM_STEP_MS="1")
    served.forks = False
    offline = served.start("offline")
    warm = ended(openai, begin(openai, [line(0)]))
    assert warm.status == "completed"
    before = _peak(offline.pid)
    padding, count = "x" * 8000, 4_000
    rows: list[Any] = [
        line(number, f"{padding} {number % 25}", temperature=0, max_tokens=1200) for number in range(count)
    ]
    path = served.folder / "large.jsonl"
    path.write_bytes(jsonl(rows))
    del rows
    with path.open("rb") as source:
        file = openai.files.create(file=source, purpose="batch", timeout=120)
    batch = openai.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    done = ended(openai, batch, 120)
    assert done.status == "completed" and done.request_counts and done.request_counts.completed == count
    assert done.to_dict()["lines_distinct"] == 25
    assert openai.files.retrieve(done.output_file_id or "").bytes > 32_000_000
    assert _peak(offline.pid) - before < 28 * 1024


def _peak(pid: int) -> int:
    """The most memory a process has had, in KiB."""
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("VmHWM"))


def test_a_turn_that_fails_stops_no_other(served: House) -> None:
    """A file system that refuses: the process goes on, and so does the batch when it can."""
    openai = client(served)
    batch = begin(openai, [line(number) for number in range(50)])
    source = served.folder / ".penstock" / "files" / "batches" / batch.id / "input"
    source.mkdir()
    served.start("workers", **LASTING)
    served.start("offline")
    eventually(lambda: "a turn at a batch failed" in served.log("offline"))
    assert ended(openai, begin(openai, [line(0)])).status == "completed"
    source.rmdir()
    assert ended(openai, batch).status == "completed"
