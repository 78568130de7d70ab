"""Every command that prints, in a terminal of 80 columns with colour: styles reach it, and data cannot style it."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_instance import ROOT, Instance
from rich.cells import cell_len

pytestmark = pytest.mark.slow

COLUMNS = 80
HOSTILE = "\x1b]0;title\x07\x1b[31mred \x9b2J 王王"
"""Sets the title, colours, clears; wide characters."""
ALLOWED = re.compile(r"\x1b\[[0-9;]*[mKHJ]|\x1b\[\?(?:25|1049)[hl]|\x1b\[[0-9]*[ABCD]|\r")
"""Styles, and what a live screen needs: cursor, erasing, the other screen."""

LOCAL = [
    "", "--help", "version", "help exit-codes", "help environment", "doctor -v", "no-such-command", "jobs --flag",
    "plan memory --model qwen3-8b --gpu h200", "plan memory --model deepseek-v3 --gpu l4",
    "plan roofline --model llama-3.1-8b --gpu h100", "plan cost --model llama-3.3-70b --gpu h200 --gpu b200 --tp 2",
    "plan search --model gemma-3-27b --gpu h100 --gpus 4", "plan place --help", "tune frontier --help",
    "store acl", "completion bash",
]  # fmt: skip
"""Commands that ask no server."""
SERVED = [
    "ps", "jobs ls", "jobs show JOB", "jobs timing JOB", "jobs events JOB", "jobs result JOB", "jobs watch JOB",
    "batch ls", "webhooks ls", "tenants", "scale status", "scale log", "dlq ls", "store show", "logs", "logs -v",
    "report --since 1h", "report --compare 1h..0s 1h..0s", "keys", "records check", "jobs show no-such-job",
    "chat hello --max-tokens 5", "submit hello --max-tokens 5 --wait", "plan fit",
]  # fmt: skip
LIVE = ["top", "logs -f"]
"""Commands that end with Ctrl-C."""


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """With a job whose texts try to style the terminal."""
    running = Instance(tmp_path_factory.mktemp("up"), "--engine", "sim", "--sim-step-ms", "1")
    try:
        body = {"model": "sim", "messages": [{"role": "user", "content": HOSTILE}], "max_tokens": 3}
        status, job = running.ask("/v1/jobs", {**body, "metadata": {"note": HOSTILE}, "user": HOSTILE})
        assert status == 202
        assert running.ask(f"/v1/jobs/{job['id']}?wait=30")[1]["status"] == "completed"
        running.job = job["id"]  # type: ignore[attr-defined]
        yield running
    finally:
        running.close()


def on_terminal(folder: Path, line: str, *, interrupt_after_s: float | None = None) -> str:
    """What a command writes to a terminal of 80 columns that has colours."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, COLUMNS))
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "NO_COLOR"))}
    environ |= {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "", "LINES": ""}
    command = [sys.executable, "-m", "cli", *shlex.split(line)]
    said, until = b"", time.monotonic() + (interrupt_after_s or 60)
    with subprocess.Popen(command, cwd=folder, env=environ, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        while True:
            if select.select([ours], [], [], 0.2)[0]:
                try:
                    data = os.read(ours, 65_536)
                except OSError:  # the other end was closed
                    break
                said += data
            elif process.poll() is not None:
                break
            if time.monotonic() > until:
                process.send_signal(signal.SIGINT)
                until += 30
    os.close(ours)
    return said.decode(errors="replace")


def check(shown: str) -> None:
    """No escape that was escaped, none that came from data, no line that the terminal would have to break."""
    assert r"\u001b[" not in shown.replace(r"\u001b]0;title\u0007\u001b[31mred", "")
    rest = ALLOWED.sub("", shown)
    assert not re.findall(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", rest)
    lines = re.split(r"\x1b\[[0-9;]*H|[\r\n]", shown)
    lines = [ALLOWED.sub("", line) for line in lines]
    wide = [line for line in lines if cell_len(line) > COLUMNS and " " in line.strip()]  # a path is never broken
    assert wide == []


@pytest.mark.parametrize("line", LOCAL)
def test_commands_without_a_server(line: str, tmp_path: Path) -> None:
    shown = on_terminal(tmp_path, line)
    assert shown
    if line not in ("store acl", "completion bash"):  # files for programs, whose lines are as long as they are
        check(shown)


@pytest.mark.parametrize("line", SERVED)
def test_commands_that_ask_a_server(line: str, instance: Instance) -> None:
    shown = on_terminal(instance.folder, f"{line.replace('JOB', instance.job)} --data-dir data")  # type: ignore[attr-defined]
    assert shown
    check(shown)


@pytest.mark.parametrize("line", LIVE)
def test_commands_that_go_on(line: str, instance: Instance) -> None:
    shown = on_terminal(instance.folder, f"{line} --data-dir data", interrupt_after_s=3)
    assert shown
    check(shown)


def test_styles_reach_a_terminal_and_no_pipe(instance: Instance) -> None:
    """A table's head is bold there."""
    for line in ("report --since 1h", "ps"):
        assert "\x1b[1m" in on_terminal(instance.folder, f"{line} --data-dir data")
        assert "\x1b" not in instance.run(*line.split(), "--data-dir", "data").stdout
