"""docs/planning.md: every command is understood, and its formulas' golden numbers are those of the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from cli.__main__ import main
from cli.app import app
from cli.plan import plan, tune

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
COMMANDS = sorted(
    {" ".join(found.split()) for found in re.findall(r"(?:\$ |`)(penstock (?:plan|tune) [^`\n]*--[^`\n]*)", PAGE)}
)


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_page_is_understood(line: str) -> None:
    """Its command and flags exist."""
    context = app.make_context("penstock", shlex.split(line)[1:])
    while isinstance(context.command, click.Group):
        name, command, rest = context.command.resolve_command(context, [*context._protected_args, *context.args])
        assert command is not None
        context = command.make_context(name, rest, parent=context)


def test_the_page_shows_every_command() -> None:
    """Each of `penstock plan` and `penstock tune`."""
    for group, names in ((plan.name, plan.modules), (tune.name, tune.modules)):
        assert [name for name in names if f"`penstock {group} {name} " not in PAGE] == []


def test_the_worked_example_says_what_the_command_says(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = [each for each in COMMANDS if each.startswith("penstock plan memory --model llama-3.1-8b --gpu l4")]
    assert main(shlex.split(line)[1:]) == 0
    said = capsys.readouterr().out
    for pattern in (r"(\d+) requests at once, and", r"weights take (\d+) %"):
        assert (found := re.search(pattern, PAGE)) is not None and found[1] in said
