"""Exit codes and the errors of commands that reach nobody."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
import pytest
from cli_instance import running_at

from cli.__main__ import main
from cli.app import LazyGroup, app
from cli.instance import DataDir
from cli.options import GROUPS, TAKEN, completed
from penstock import __version__
from workers.engines.llamacpp import weights


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in a folder without settings or instance, and nothing listens where they look."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_PORT", "1")


def test_no_command_shows_the_help(told: Any) -> None:
    """As --help does. The version is an option too, as SECURITY.md asks for it."""
    said = told()
    assert "Usage: penstock " in said.out and not said.err
    assert told("--version").out == f"penstock, version {__version__}\n"


@pytest.mark.parametrize(
    ("command", "variables", "code", "says"),
    [
        ("jobs", {}, 2, "penstock jobs --help"),
        ("doctr", {}, 2, "Did you mean 'doctor'"),
        ("down", {}, 3, "nothing is running"),
        ("ps --redis-url redis://127.0.0.1:1/0", {}, 3, "Redis"),
        ("up --engine sim --host 0.0.0.0", {}, 2, "no API key is configured"),
        ("up --engine sim --port 0 --redis-url redis://127.0.0.1:port", {}, 2, "error: redis"),
        ("up --engine sim", {"PENSTOCK_PROT": "1"}, 2, "PENSTOCK_PORT"),
        ("up --engine sim", {"PENSTOCK_WORKERS": "many"}, 2, "a whole number"),
    ],
)
def test_what_cannot_be_done_says_why(
    command: str, variables: dict[str, str], code: int, says: str, monkeypatch: pytest.MonkeyPatch, told: Any
) -> None:
    """Wrong usage, a setting that is wrong, or nobody to reach; nothing is left of a start."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    error = told(command, code=code).err
    assert "error:" in error and says in error
    assert not Path(".penstock", "run").exists()


def test_bad_settings_file_is_wrong_usage(told: Any) -> None:
    """A key of penstock.toml that nobody knows stops every command that reads it."""
    Path("penstock.toml").write_text('[up]\nengin = "sim"\n')
    said = "up.engin: no such setting\ncause: set in penstock.toml\nnext:  did you mean 'engine'?"
    assert said in told("ps", code=2).err


@pytest.mark.parametrize(
    ("settings", "environ", "cause"),
    [
        ('options.path = "gone.gguf"', {}, "set in penstock.toml"),
        ("", {"PENSTOCK_LLAMACPP_PATH": "gone.gguf"}, "set by the variable PENSTOCK_LLAMACPP_PATH"),
    ],
)
def test_missing_model_file_is_found_before_the_start(
    settings: str, environ: dict[str, str], cause: str, monkeypatch: pytest.MonkeyPatch, told: Any
) -> None:
    """No worker is started three times for it, and nothing else is. Without workers no file is needed."""
    Path("penstock.toml").write_text(f'[models.m]\nengine = "llamacpp"\nmin_workers = 1\n{settings}\n')
    for name, value in ({"PENSTOCK_PORT": "0"} | environ).items():
        monkeypatch.setenv(name, value)
    assert f"path: there is no {Path('gone.gguf').absolute()}\ncause: {cause}\n" in told("up", code=2).err
    assert not Path(".penstock").exists()
    assert "there is no" not in told("up --workers 0 --host nowhere.invalid", code=None).err


def test_unexpected_error_is_one_block(monkeypatch: pytest.MonkeyPatch, told: Any) -> None:
    """No traceback unless --debug asks for it."""
    monkeypatch.setattr(app, "main", Mock(side_effect=RuntimeError("boom")))
    assert "Traceback" not in told("version", code=1).err
    assert "Traceback" in told("version --debug", code=1).err


def test_help_pages(told: Any) -> None:
    """Exit codes and environment have pages of their own, and every command has help."""
    assert "130  interrupted" in told("help exit-codes").out
    page = told("help environment").out
    for name, meaning in (
        ("API_HOSTS", "texts, with commas between [none]"), ("DATA_DIR", "a path [.penstock]"),
        ("SIM_FAULTS", "true or false [false]"), ("FILES_DIR", "a path [files in the data folder]"),
        ("EVENTS_TAKE_PRIORITY", "one of interactive, standard, batch [standard]"),
    ):  # fmt: skip
        assert re.search(rf"^  PENSTOCK_{name} +{re.escape(meaning)}$", page, re.MULTILINE), name
    assert "PENSTOCK_API_KEY" in page and "\n[up]\n" in page
    variables = [line for line in page.split("\n") if re.match("  [A-Z]", line)]
    assert all(re.fullmatch(r"  [A-Z0-9_]+ +\S.* \[[^\[\]]+\]", line) for line in variables), variables
    meanings = [line for line in page.split("\n") if re.match("      [^ ]", line)]
    settings = page[: page.index("  PENSTOCK_API_KEY ")].count("\n  PENSTOCK_")
    assert len(meanings) == settings > 100, "each setting has a meaning below it"
    for command in LazyGroup.COMMANDS:
        assert "Usage: penstock" in told("help", command).out


def test_list_is_another_word_for_ls(told: Any) -> None:
    assert told("keys list --help").out == told("keys ls --help").out != ""


@pytest.mark.parametrize("command", [["--help"], ["ps"]])
def test_commands_import_only_what_they_use(command: list[str]) -> None:
    """--help imports no settings, and ps neither HTTP nor Redis nor an event loop: that is what makes them fast."""
    code = (
        "import sys; from cli.__main__ import main; main(sys.argv[1:]);"
        "heavy = {'msgspec', 'asyncio', 'redis', 'httpx2', 'starlette', 'pydantic', 'rich'};"
        "print('imported', *sorted(sys.modules.keys() & heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True)
    imported = done.stdout.strip().rpartition("\n")[2].split()[1:]
    assert imported == ([] if command == ["--help"] else ["msgspec"])


def test_the_supervisor_loads_no_command() -> None:
    """The processes that it keeps are none of theirs."""
    heavy = {"click", "cli.options", "cli.logs", "api.settings"}
    code = f"import sys, cli.supervisor; print(*sys.modules.keys() & {heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_the_fetch_of_the_model_is_a_start_that_others_see_and_can_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may take minutes. `down` sends SIGTERM to the process that is named."""
    home = DataDir(tmp_path / ".penstock")

    def fetch(_: Path, on_progress: Callable[[str, int, int], None]) -> None:
        on_progress("downloading", 1, 2)
        assert main(["ps"]) == 0
        assert capsys.readouterr().err.endswith("\nstarting: downloading\n")
        assert main(["jobs", "ls"]) == 3
        said = f"error: penstock is starting in {home.path}\ncause: downloading\nnext:  wait for it: penstock ps\n"
        assert capsys.readouterr().err == said
        os.kill(home.running().pid, signal.SIGTERM)

    monkeypatch.setattr(weights, "fetch", fetch)
    assert main(["up", "--port", "0"]) == 130
    assert not home.run.exists()


@pytest.mark.parametrize("flags", [[], ["--now"]])
def test_down_of_an_instance_that_has_just_ended(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read as running, and then had no process any more."""
    with ExitStack() as held:
        held.enter_context(running_at("http://127.0.0.1:9", tmp_path / ".penstock"))

        def ended(*_: int) -> None:
            held.close()
            raise ProcessLookupError

        monkeypatch.setattr("os.kill", ended)
        assert main(["down", *flags]) == 0


# --- commands in messages --------------------------------------------------------------------------------------------


def under(*words: str) -> click.Context:
    """The context of a command line, as if it ran."""
    context, rest = click.Context(app, info_name="penstock"), list(words)
    while isinstance(context.command, click.Group):
        name, command, rest = context.command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    return context


@pytest.mark.parametrize(
    ("line", "text", "shown"),
    [
        (
            "submit hi --url http://box:8000 --wait 5",
            "penstock jobs events job_1",
            "penstock jobs events --url http://box:8000 job_1",
        ),
        (
            "jobs show job_1 --data-dir 'my data'",
            "penstock up, or --url http://HOST:8000 (or PENSTOCK_URL)",
            "penstock up --data-dir 'my data', or --url http://HOST:8000 (or PENSTOCK_URL)",
        ),
        (
            "doctor --config a.toml --data-dir d",
            "penstock dlq show job_1",  # `dlq show` takes no --config
            "penstock dlq show --data-dir d job_1",
        ),
        (
            "up --engine sim --port 8000 --detach",
            "penstock up --port 8001",
            "penstock up --engine sim --detach --port 8001",
        ),
        (
            "up --engine sim --data-dir d",
            "penstock ps, penstock down, or a --data-dir (and --port) of its own",
            "penstock ps --data-dir d, penstock down --data-dir d, or a --data-dir (and --port) of its own",
        ),
        (
            "store reset --redis-url redis://h:1/0",
            "penstock store reset --yes",
            "penstock store reset --redis-url redis://h:1/0 --yes",
        ),
        ("ps --redis-url redis://:secret@h:1/0", "penstock up", "penstock up"),
        ("jobs ls --url http://h", "penstock jobs --help", "penstock jobs --help"),
        ("jobs ls --url http://h", "start it, which penstock waits for", None),
        ("logs --data-dir d", "its log is d/penstock up.log", None),
    ],
)
def test_the_flags_that_were_typed_are_repeated(line: str, text: str, shown: str | None) -> None:
    """Where the command takes them: those that choose the deployment, and all of another `up`."""
    with under(*shlex.split(line)):
        assert completed(text) == (shown or text)


def test_variables_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """They still hold for the next command."""
    monkeypatch.setenv("PENSTOCK_URL", "http://box:8000")
    with under("jobs", "show", "job_1"):
        assert completed("penstock jobs ls") == "penstock jobs ls"


def test_the_program_is_named_as_it_was_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `make up`, no shell finds `penstock` by its name alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr("sys.argv", [".venv/bin/penstock", "ps"])
    with under("ps"):
        assert completed("penstock doctor; its log is x") == ".venv/bin/penstock doctor; its log is x"


@pytest.mark.parametrize("words", [("jobs", "ls"), ("dlq", "ls"), ("submit", "hi")])
def test_an_error_of_a_command_names_them(words: tuple[str, ...], tmp_path: Path, told: Any) -> None:
    """At the boundary, too."""
    assert f"next:  penstock up --data-dir {tmp_path}, or" in told(*words, "--data-dir", str(tmp_path), code=3).err


def test_the_table_names_what_each_command_takes() -> None:
    """Of every command and subcommand."""
    root, found = click.Context(app, info_name="penstock"), {}
    for name in app.list_commands(root):
        command = app.get_command(root, name)
        subcommands = list(command.commands.values()) if isinstance(command, click.Group) else [command]
        for each in subcommands:
            taken = {option.name for option in each.params} & {"data_dir", "redis_url", "url", "config"}
            if taken and name != "bench":
                found.setdefault(name, taken)
                assert found[name] == taken, each.name
    assert found == {name: set(taken) for name, taken in TAKEN.items()}
    assert {name for name in found if isinstance(app.get_command(root, name), click.Group)} == set(GROUPS)
