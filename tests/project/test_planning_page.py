"""docs/planning.md: every command is understood."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from cli.app import app

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
