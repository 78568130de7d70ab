"""Commands in messages: complete, named as the shell finds them, and without a password."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click
import pytest

from cli.app import app
from cli.suggestions import GROUPS, TAKEN, completed


def under(*words: str) -> click.Context:
    """The context of a command line, as if it ran."""
    context, rest = click.Context(app, info_name="penstock"), list(words)
    while isinstance(context.command, click.Group):
        name, command, rest = context.command.resolve_command(context, rest)
        assert command is not None
        context = command.make_context(name, rest, parent=context)
    return context


@pytest.mark.parametrize(("line", "text", "shown"), [
    ("submit hi --url http://box:8000 --wait 5", "penstock jobs events job_1",
     "penstock jobs events --url http://box:8000 job_1"),
    ("jobs show job_1 --data-dir 'my data'", "penstock up, or --url http://HOST:8000 (or PENSTOCK_URL)",
     "penstock up --data-dir 'my data', or --url http://HOST:8000 (or PENSTOCK_URL)"),
    ("doctor --config a.toml --data-dir d", "penstock dlq show job_1",  # `dlq show` takes no --config
     "penstock dlq show --data-dir d job_1"),
    ("up --engine sim --port 8000 --detach", "penstock up --port 8001",
     "penstock up --engine sim --detach --port 8001"),
    ("up --engine sim --data-dir d", "penstock ps, penstock down, or a --data-dir (and --port) of its own",
     "penstock ps --data-dir d, penstock down --data-dir d, or a --data-dir (and --port) of its own"),
    ("store reset --redis-url redis://h:1/0", "penstock store reset --yes",
     "penstock store reset --redis-url redis://h:1/0 --yes"),
    ("ps --redis-url redis://:secret@h:1/0", "penstock up", "penstock up"),
    ("jobs ls --url http://h", "penstock jobs --help", "penstock jobs --help"),
    ("jobs ls --url http://h", "start it, which penstock waits for", None),
    ("logs --data-dir d", "its log is d/penstock up.log", None),
])  # fmt: skip
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
        assert command is not None
        subcommands = list(command.commands.values()) if isinstance(command, click.Group) else [command]
        for each in subcommands:
            taken = {option.name for option in each.params} & {"data_dir", "redis_url", "url", "config"}
            if taken and name != "bench":
                found.setdefault(name, taken)
                assert found[name] == taken, each.name
    assert found == {name: set(taken) for name, taken in TAKEN.items()}
    assert {name for name in found if isinstance(app.get_command(root, name), click.Group)} == set(GROUPS)
