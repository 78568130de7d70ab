"""Cases of a client: runs its program for one case against a running Penstock, and judges what it printed."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bench.clients.catalogue import PLAIN, RESUMED, SIM, STREAMED, STRUCTURED, ClientProgram
from bench.environments import Environment
from bench.load.streams import misplaced
from bench.penstock import Penstock, own_environ, restart_api

RUN_TIMEOUT_S = 120.0
BEGUN = "begun"
"""The line that a program prints once the API process may be killed."""
WORDS = 160
FEWEST_PIECES = 5
"""A stream comes in more pieces than this."""


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """What became of one case. `wrong` is "" if it went as it should."""

    wrong: str
    refused: bool = False
    skipped: str = ""

    @property
    def cell(self) -> str:
        """As a table shows it."""
        if self.wrong:
            return "**failed**"
        return "not run" if self.skipped else "refused" if self.refused else "yes"


def run_case(client: ClientProgram, python_or_modules: Path, penstock: Penstock, case: str, log: Path) -> CaseOutcome:
    """Run one case to its end."""
    if reason := client.skipped.get((penstock.engine, case)):
        return CaseOutcome("", skipped=reason)
    command, environ = command_of(client, python_or_modules)
    ended, said, errors = _printed(
        [*command, case],
        {**own_environ(), **environ, "PENSTOCK_URL": penstock.url},
        log,
        (lambda: restart_api(penstock.processes, "api-1", penstock.port)) if case == RESUMED else None,
    )
    if words := client.refused.get((penstock.engine, case)):
        wrong = "" if ended and words in errors else f"no refusal with the words {words!r}: {_last(errors or said)}"
        return CaseOutcome(wrong, refused=True)
    if ended:
        return CaseOutcome(f"{case}: {_last(errors)}")
    return CaseOutcome(fault_of(penstock.engine, case, said))


def command_of(client: ClientProgram, python_or_modules: Path) -> tuple[list[str], dict[str, str]]:
    """The words that run a client's program, and its variables."""
    if isinstance(client.environment, Environment):
        return [str(python_or_modules), str(client.path)], {"PYTHONPATH": ""}
    return [shutil.which("node") or "node", str(client.path)], {"NODE_PATH": str(python_or_modules)}


def fault_of(engine: str, case: str, said: str) -> str:
    """What is wrong with the answer that a program printed as its last line; "" if nothing is."""
    try:
        found: Any = json.loads(said.strip().rpartition("\n")[2])
    except ValueError:
        return f"{case}: it printed {_last(said)!r}, which is no JSON"
    if case == STRUCTURED:
        good = isinstance(found, dict) and isinstance(found.get("name"), str) and isinstance(found.get("long"), bool)
        return "" if good else f"{case}: {found!r} is no river"
    pieces = found if isinstance(found, list) else [found]
    if not any(pieces):
        return f"{case}: nothing came"
    if case in (STREAMED, RESUMED) and len(pieces) < FEWEST_PIECES:
        return f"{case}: it came in {len(pieces)} pieces"
    if engine != SIM or case not in (PLAIN, STREAMED, RESUMED) or not all(isinstance(piece, str) for piece in pieces):
        return ""
    words = "".join(pieces).split()
    wrong = misplaced(words, len(words))  # every token of the simulated engine has its number
    return f"{case}: {wrong}" if wrong else ""


def _last(said: str) -> str:
    """The last words of a program that failed."""
    lines = [line.strip() for line in said.strip().splitlines() if line.strip()]
    return " / ".join(lines[-2:])[-WORDS:] or "it said nothing"


def _printed(
    command: Sequence[str], environ: Mapping[str, str], log: Path, begun: Callable[[], None] | None
) -> tuple[int, str, str]:
    """Run a program to its end; `begun` is called at its line BEGUN. Returns its exit status, stdout and stderr."""
    with log.open("wb") as errors, subprocess.Popen(
        command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        lines = _lines(process.stdout)
        said, deadline = "", time.monotonic() + RUN_TIMEOUT_S
        try:
            while (line := lines.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
                said += line
                if begun is not None and line.strip() == BEGUN:
                    begun()
        except queue.Empty:
            os.killpg(process.pid, signal.SIGKILL)
            return 1, said, f"no end after {RUN_TIMEOUT_S:.0f} s"
    return process.returncode, said, log.read_text(errors="replace")


def _lines(stream: IO[str]) -> queue.SimpleQueue[str | None]:
    """The lines of a stream as they come, and None at its end."""
    found: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in stream:
            found.put(line)
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    return found
