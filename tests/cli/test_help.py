"""Help pages: each has examples that the command understands, and shells complete what the pages list."""

from __future__ import annotations

import inspect
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from cli_commands import commands

from cli.app import app

pytestmark = pytest.mark.slow


ALL = {path: each for path, each in commands(app, "penstock") if not path.startswith("penstock bench ")}
"""Programs of the benchmarks have parsers of their own."""


def examples(path: str) -> list[str]:
    """The lines of a command's help behind the word "Examples:"."""
    text = inspect.cleandoc(ALL[path].help or "").partition("\b\nExamples:\n")[2]
    return [line.strip() for line in text.split("\n") if line]


def test_a_help_page_shows_its_examples(told: Any) -> None:
    """By --help, a line each."""
    for path in ALL:
        page = told(*path.split()[1:], "--help").out
        shown = [line.strip() for line in page.partition("Examples:\n")[2].split("\n")]
        assert examples(path) and shown[: len(examples(path))] == examples(path), page


def parsed(words: list[str]) -> None:
    """Parse the words as the command would, but do not run it. Raises click.UsageError."""
    context = app.make_context("penstock", list(words))
    while isinstance(context.command, click.Group):
        name, command, rest = context.command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)


def test_every_example_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command, arguments and flags exist."""
    monkeypatch.chdir(tmp_path)
    for name in ("input.jsonl", "rows.csv"):
        Path(name).touch()
    Path("notes").mkdir()
    for line in (line for path in ALL for line in examples(path)):
        words = shlex.split(line.replace('eval "$(', "").replace(')"', ""), comments=True)
        while "=" in words[0]:  # a variable
            words = words[1:]
        assert words[0] == "penstock", line
        ends = [place for place, word in enumerate(words) if word in ("<", ">")]
        parsed(words[1 : ends[0] if ends else None])


# --- completion ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_command(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which `penstock` is on the PATH."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "penstock"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m cli "$@"\n')
    command.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return {"PATH": path, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HOME": str(folder)}


OFFERED = {
    "penstock jobs t": "timing", "penstock jobs ls --sta": "--status", "penstock jobs ls --status can": "cancelled",
    "penstock nothing": "",
}  # fmt: skip


def test_bash_completes(with_command: dict[str, str]) -> None:
    """The script is sourced as a start-up file does it, and asked as bash asks it."""
    script = """
        eval "$(penstock completion bash)" || exit 9
        complete -p penstock >/dev/null || exit 8
        for typed; do
            COMP_WORDS=($typed); [ "${typed% }" = "$typed" ] || COMP_WORDS+=("")
            COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
            _penstock_completion penstock
            echo "${COMPREPLY[*]}"
        done
    """
    command = ["bash", "--norc", "-c", script, "bash", *OFFERED]
    done = subprocess.run(command, env=with_command, capture_output=True, text=True, check=True)
    assert dict(zip(OFFERED, done.stdout.splitlines(), strict=True)) == OFFERED, done.stderr


def test_the_page_of_variables_is_filtered_by_words(told: Any) -> None:
    """By name, section or meaning, whatever the case; a word that none has is wrong usage."""
    page = told("help environment Redis url").out
    assert "PENSTOCK_REDIS_URL" in page and "PENSTOCK_REDIS_TIMEOUT_S" not in page and "[api]" not in page
    assert "NO_COLOR" in told("help environment no_color").out
    assert "'xyzzy'" in told("help environment xyzzy", code=2).err
