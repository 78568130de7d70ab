"""The frame of the measuring programs: exit codes, errors in one line, SIGTERM as Ctrl-C, figures kept."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from bench.program import BenchProgram, Option, ProgramRun, counts


def example(work: Callable[[ProgramRun], int], *errors: type[Exception]) -> BenchProgram:
    return BenchProgram("penstock bench example", None, work, *errors).taking(
        Option("--levels", type=counts, default=[1]), Option("--plots", type=Path), Option("--out", type=Path)
    )


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_known_error_is_a_line_and_an_unknown_one_is_not_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    def work(_run: ProgramRun) -> int:
        raise OSError("no [room] left")

    assert example(work, ValueError, OSError)([]) == 1
    assert capsys.readouterr().out == "error: no [room] left\n"
    with pytest.raises(OSError, match="room"):
        example(work, ValueError)([])


@pytest.mark.parametrize("ctrl_c", [signal.default_int_handler, signal.SIG_IGN], ids=["", "ignored"])
@pytest.mark.parametrize("loop", [None, asyncio.new_event_loop, uvloop.new_event_loop], ids=["", "asyncio", "uvloop"])
def test_sigterm_stops_it_as_ctrl_c_does(
    loop: Callable[[], asyncio.AbstractEventLoop] | None,
    ctrl_c: signal.Handlers,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What it cleans up, it cleans up, also where a shell has Ctrl-C ignored; then SIGTERM means what it meant."""
    cleaned: list[str] = []

    async def wait() -> None:
        asyncio.get_running_loop().call_later(0.05, stop)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            cleaned.append("tasks")

    def work(_run: ProgramRun) -> int:
        try:
            if loop is None:
                stop()
            else:
                with asyncio.Runner(loop_factory=loop) as runner:
                    runner.run(wait())
        finally:
            cleaned.append("processes")
        return 0

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, ctrl_c)
    try:
        assert example(work)([]) == 130
        assert signal.getsignal(signal.SIGTERM) is before[signal.SIGTERM]
    finally:
        signal.signal(signal.SIGINT, before[signal.SIGINT])
    assert cleaned == (["processes"] if loop is None else ["tasks", "processes"])
    assert capsys.readouterr().out == "stopped; every process has ended\n"
