"""Process main: what every Penstock process does around its own work.

It exits with what the work returns, 0 after SIGTERM or SIGINT; with 1 if it cannot start and 2 if its settings cannot
be used. The reason goes to stderr and to the supervisor.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from runtime.config import FILE, Config, ConfigError, load
from runtime.lifeline import Lifeline


class StartError(Exception):
    """Raised when a process cannot start. The message names the cause."""

    def __init__(self, reason: str, exit_code: int = 1) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Launch:
    """Arguments, settings and supervisor of a process at its start."""

    options: argparse.Namespace
    config: Config
    lifeline: Lifeline
    on_exit: contextlib.ExitStack
    """Resources to close when the event loop has ended."""


def argument_parser(package: str, description: str | None, process_id: str) -> argparse.ArgumentParser:
    """Parser of the arguments that all processes have. `process_id` is the default of --id."""
    parser = argparse.ArgumentParser(prog=f"python -m penstock.run {package}", description=description)
    parser.add_argument("--settings", type=Path, help="merged settings as written by `penstock up`")
    parser.add_argument("--config", type=Path, help=f"settings file (default: {FILE} in this folder, if there is one)")
    parser.add_argument("--id", default=process_id, help="this process's name in `penstock ps`")
    return parser


def run_process(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    sections: Mapping[str, type[msgspec.Struct]],
    start: Callable[[Launch], Coroutine[Any, Any, int]],
    *,
    fast_loop: bool = False,
) -> int:
    """Parse, configure, run. Returns the exit code.

    Args:
        sections: the settings this process reads.
        start: prepares the work and returns it. It and the work may raise ConfigError and StartError.
        fast_loop: whether the event loop is uvloop's, where that is installed.
    """
    options = parser.parse_args(arguments)
    lifeline = Lifeline.from_environ()
    try:
        with contextlib.ExitStack() as on_exit:
            work = start(Launch(options, _config(options, sections), lifeline, on_exit))
            with asyncio.Runner(loop_factory=_fast_loop if fast_loop else None) as runner:
                return runner.run(work)
    except ConfigError as error:
        code, reason = 2, str(error)
    except StartError as error:
        code, reason = error.exit_code, str(error)
    lifeline.say("failed", reason)
    sys.stderr.write(f"error: {reason}\n")
    return code


@contextlib.contextmanager
def needed_to_start(*errors: type[Exception], exit_code: int = 1) -> Iterator[None]:
    """Within the block these errors mean that the process cannot start. Raises StartError."""
    try:
        yield
    except errors as error:
        raise StartError(str(error), exit_code) from error


def on_stop_signal(handler: Callable[[], object]) -> None:
    """Have SIGTERM and SIGINT call `handler` in the running event loop."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, handler)


def collect_rarely() -> None:
    """Keep what is loaded now out of garbage collections, and collect less often than Python does by itself.

    A full collection walks all that open streams hold, and every stream waits for it: with 200 stalled readers the
    others' 99th percentile was 29 ms with Python's thresholds and is 23 ms with these. In a worker, collections that
    find nothing were a seventh of its time.
    """
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


def _config(options: argparse.Namespace, sections: Mapping[str, type[msgspec.Struct]]) -> Config:
    if options.settings:
        return Config.saved(options.settings)
    path = options.config or (Path(FILE) if Path(FILE).exists() else None)
    return load(sections, path=path, environ=os.environ)


def _fast_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop  # noqa: PLC0415 - not on every platform
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
