"""`up --detach`: starts `up` in the background, waits until it is ready, and shows its progress."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cli import banner
from cli.deployment import environment
from cli.errors import DONE
from cli.instance import DataDir, Instance
from cli.progress import ProgressLine

POLL_INTERVAL_S = 0.05


def start_detached(
    home: DataDir, arguments: Sequence[str], progress: ProgressLine, *, keyed: bool, redis_url: str | None
) -> int:
    """Start `up` in a new session. Returns its exit code if it exits, else 0 once it is ready.

    `redis_url` is passed in the environment, because it may hold a password and every user of the machine can read a
    process's arguments.
    """
    environ = environment() if redis_url is None else {**environment(), "PENSTOCK_REDIS_URL": redis_url}
    home.make_private()
    home.logs.mkdir(mode=0o700, exist_ok=True)
    output = home.logs / "up.out"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cli", "up", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environ,
            start_new_session=True,
        )
    try:
        instance = _wait(process, home, progress)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    progress.end()
    if instance is None:
        sys.stderr.write(_after_first_line(output))
        return process.returncode
    sys.stdout.write("\n".join(banner.ready_block(instance, detached=True, keyed=keyed)) + "\n")
    return DONE


def _wait(process: subprocess.Popen[bytes], home: DataDir, progress: ProgressLine) -> Instance | None:
    """The instance once it is ready; None if the process has exited."""
    while process.poll() is None:
        instance = home.read()
        if instance is not None and instance.pid == process.pid:
            if instance.state == "ready":
                return instance
            progress.phase(instance.phase)
        time.sleep(POLL_INTERVAL_S)
    return None


def _after_first_line(output: Path) -> str:
    """The output of `up` without its first line, the version, which was printed before."""
    return output.read_text(errors="replace").partition("\n")[2]
