"""`python -m bench.syncs`: counts acknowledged writes that a killed Redis server loses while its disk syncs are slow.

At `appendfsync everysec` a server holds writes to its file back while a sync of it is under way, and answers
nevertheless. strace makes each sync slow, so that a kill -9 meets one; the server is then started again and counted.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from bench import program, report
from bench.penstock import find_server
from bench.ports import free_port
from bench.processes import Died
from bench.program import BenchProgram, Option, ProgramRun, WrongArguments
from bench.report import columns

SYNC_MS = 300
SLOW = ("strace", "-f", "-qq", "-o", os.devnull, "-e", f"inject=fdatasync:delay_enter={1000 * SYNC_MS}")
WRITES_S = (2.0, 3.0)
"""Range of the random time between the first write and the kill, in seconds."""
WRITERS = 64
"""Concurrent writers: at fsync always the server answers all writes of one sync together."""
READY_TIMEOUT_S = 20.0
COLUMNS = columns("""
    fsync: appendfsync; kills: kills; lossy: of them lost something; answered: writes answered; lost: of them lost;
    worst: most at once
""")


def _run(run: ProgramRun) -> int:
    if shutil.which("strace") is None:
        raise WrongArguments("strace is needed to make syncs slow (Debian: apt-get install strace)")
    rows = []
    for fsync in ("everysec", "always"):
        with run.console.status(fsync):
            rows.append(_row(fsync, [_kill(fsync) for _ in range(run.args.kills)]))
    title = f"kill -9 of a server whose syncs take {SYNC_MS} ms"
    note = f"{WRITERS} writers at the same time; a write counts as answered when its writer has read the answer."
    run.tell(run.result("syncs", title, COLUMNS, rows, (), [note], sync_ms=SYNC_MS, kills=run.args.kills), run.args.out)
    return 0


def _row(fsync: str, kills: Sequence[tuple[int, int]]) -> dict[str, Any]:
    lost = [answered - kept for answered, kept in kills]
    return {
        "fsync": fsync,
        "kills": len(kills),
        "lossy": sum(each > 0 for each in lost),
        "answered": sum(answered for answered, _ in kills),
        "lost": sum(lost),
        "worst": max(lost),
    }


def _kill(fsync: str, slow: Sequence[str] = SLOW) -> tuple[int, int]:
    """Writes that were answered before a kill at a random moment, and those of them that are there afterwards."""
    with tempfile.TemporaryDirectory(prefix="penstock-syncs-") as folder:
        with _server(Path(folder), fsync, slow) as redis, ThreadPoolExecutor(WRITERS) as writers:
            pid = int(redis.info("server")["process_id"])
            begin = threading.Barrier(WRITERS + 1, timeout=READY_TIMEOUT_S)
            written = [writers.submit(_write, redis, f"writer {number}", begin) for number in range(WRITERS)]
            begin.wait()
            time.sleep(random.uniform(*WRITES_S))  # noqa: S311 - any moment
            os.kill(pid, signal.SIGKILL)
            answered = [key for each in written for key in each.result()]
        with _server(Path(folder), fsync) as redis:
            there = {key.decode() for key in redis.scan_iter(count=10_000)}
            return len(answered), len(there.intersection(answered))


def _write(server: Redis, name: str, begin: threading.Barrier) -> list[str]:
    """The keys of the writes that were answered until the server was gone. All begin together, once all are connected:
    a server that syncs is slow to let anybody in."""
    answered: list[str] = []
    with (
        contextlib.suppress(RedisError),
        Redis(connection_pool=server.connection_pool, single_connection_client=True) as redis,
    ):
        begin.wait()
        while True:
            key = f"{name}, {len(answered)}"
            redis.set(key, "x")
            answered.append(key)
    return answered


@contextlib.contextmanager
def _server(folder: Path, fsync: str, before: Sequence[str] = ()) -> Iterator[Redis]:
    """One that answers, on the file in the folder. Raises Died."""
    port = free_port()
    options = ("--dir", str(folder), "--save", "", "--appendonly", "yes", "--appendfsync", fsync)
    command = [*before, find_server(), "--port", str(port), "--bind", "127.0.0.1", *options]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True) as process:
        try:
            with Redis(port=port) as redis:
                _wait(redis)
                yield redis
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                os.killpg(process.pid, signal.SIGKILL)  # strace alone would leave its server behind


def _wait(redis: Redis) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        try:
            redis.ping()
            return
        except RedisError as error:
            if time.monotonic() > deadline:
                raise Died(f"the server does not answer: {error}") from error
            time.sleep(0.05)


main = BenchProgram("python -m bench.syncs", __doc__, _run, Died, RedisError, OSError).taking(
    Option("--kills", type=program.count, default=10, help="with each setting (default: 10)"),
    Option("--out", type=Path, default=report.RESULTS / "syncs.json", help="where the figures go"),
)

if __name__ == "__main__":
    main.exit()
