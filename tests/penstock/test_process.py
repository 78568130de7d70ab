"""The life of a process around its work: arguments, settings, exit codes, what the supervisor is told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock import process
from penstock.config import ConfigError, load
from penstock.process import Launch, StartError, argument_parser, needed_to_start, on_stop_signal, run_process


class ThingSettings(msgspec.Struct, frozen=True):
    """One section."""

    size: int = 1


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[tuple[str, str]]]]:
    """What a process says to its supervisor."""
    ours, theirs = socket.socketpair()
    monkeypatch.setenv(process.ENV, str(os.dup(theirs.fileno())))
    theirs.close()
    ours.settimeout(10)

    def read() -> list[tuple[str, str]]:
        return [(each["state"], each["detail"]) for each in map(json.loads, ours.recv(65536).splitlines())]

    # Its end would end this process: the thread that watches the line is not started.
    monkeypatch.setattr(process.threading.Thread, "start", lambda _: None)
    yield read
    ours.close()


def run(start: Callable[[Launch], Coroutine[Any, Any, int]], *arguments: str) -> int:
    """As `python -m thing` would."""
    return run_process(argument_parser("thing", "A thing.", "thing-1"), arguments, {"api": ThingSettings}, start)


def test_the_settings_of_a_role_stand_in_a_file_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They add to those of all roles, and outrank them; others do not read them, and a mistake names the file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "penstock.thing.toml").write_text("[api]\nsize = 3\n")
    (tmp_path / "penstock.other.toml").write_text("[api]\nsize = 4\n")
    sizes: list[int] = []

    def start(launch: Launch) -> Coroutine[Any, Any, int]:
        sizes.append(launch.config.section("api", ThingSettings).size)
        return asyncio.sleep(0, 0)

    assert run(start) == 0
    (tmp_path / "penstock.toml").write_text("[api]\nsize = 2\n[models.m]\n")
    assert run(start) == run(start, "--config", str(tmp_path / "penstock.toml")) == 0
    assert sizes == [3, 3, 3]
    (tmp_path / "penstock.thing.toml").write_text("[api]\nsize = 'many'\n")
    with pytest.raises(ConfigError) as mistake:
        load({"api": ThingSettings}, path=Path("penstock.toml"), own=Path("penstock.thing.toml"), environ={})
    assert (mistake.value.key, mistake.value.source) == ("api.size", "set in penstock.thing.toml")


def test_it_exits_with_what_its_work_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the settings of the file in this folder; what it opened is closed behind its event loop."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "penstock.toml").write_text("[api]\nsize = 3\n")
    loops: list[asyncio.AbstractEventLoop] = []
    closed: list[bool] = []

    def start(launch: Launch) -> Coroutine[Any, Any, int]:
        assert launch.options.id == "thing-1"
        launch.on_exit.callback(lambda: closed.append(loops[0].is_closed()))

        async def work() -> int:
            loops.append(asyncio.get_running_loop())
            return launch.config.section("api", ThingSettings).size

        return work()

    assert run(start) == 3
    assert closed == [True]


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (ConfigError("api.size", "too large"), 2, "api.size: too large"),
        (StartError("no port"), 1, "no port"),
        (StartError("no engine", 2), 2, "no engine"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_what_keeps_it_from_starting_is_told(
    error: Exception,
    code: int,
    reason: str,
    late: bool,
    told: Callable[[], list[tuple[str, str]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By its exit code, on stderr and to the supervisor; before its event loop runs, or in it."""

    def start(_: Launch) -> Coroutine[Any, Any, int]:
        async def work() -> int:
            raise error

        if not late:
            raise error
        return work()

    assert run(start) == code
    assert capsys.readouterr().err == f"error: {reason}\n"
    assert told() == [("failed", reason)]


def test_other_errors_are_not_hidden(tmp_path: Path) -> None:
    """A fault of ours keeps its traceback; what was opened is closed."""
    closed: list[str] = []

    def start(launch: Launch) -> Coroutine[Any, Any, int]:
        launch.on_exit.callback(closed.append, "closed")
        raise OSError("x")

    with pytest.raises(OSError, match="x"):
        run(start)
    assert closed == ["closed"]


@pytest.mark.parametrize("text", [None, "no JSON"])
def test_saved_settings_that_cannot_be_read_are_refused(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "settings.json"
    if text is not None:
        path.write_text(text)
    assert run(lambda _: pytest.fail("started"), "--settings", str(path)) == 2
    assert f"error: {path}: cannot be read: " in capsys.readouterr().err


def test_only_the_named_errors_keep_it_from_starting() -> None:
    with pytest.raises(StartError, match="x") as refused, needed_to_start(OSError, exit_code=2):
        raise FileNotFoundError("x")
    assert refused.value.exit_code == 2
    with pytest.raises(ValueError, match="x"), needed_to_start(OSError):
        raise ValueError("x")


async def test_signals_stop_it() -> None:
    stopped = asyncio.Event()
    on_stop_signal(stopped.set)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stopped.wait(), 10)
        stopped.clear()
        asyncio.get_running_loop().remove_signal_handler(number)


@pytest.mark.skipif(sys.platform == "win32", reason="no uvloop there")
def test_a_fast_loop_is_uvloops() -> None:
    def start(_: Launch) -> Coroutine[Any, Any, int]:
        async def work() -> int:
            return int(type(asyncio.get_running_loop()).__module__.startswith("uvloop"))

        return work()

    parser = argument_parser("thing", None, "thing-1")
    assert run_process(parser, [], {}, start) == 1
