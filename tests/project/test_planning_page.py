"""docs/planning.md: every command is understood, and its formulas' golden numbers are those of the code."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from random import Random

import click
import pytest

from cli.__main__ import main
from cli.app import app
from cli.plan import plan, tune
from planner.load import RequestLengths
from planner.tuning import LevelReading, frontier_of, recommend

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


def test_the_worked_example_writes_what_is_recommended() -> None:
    """The batch and the cache of a knee at 64, with the lengths of the example."""
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    written = tomllib.loads(block)["models"]["llama-8b"]["options"]
    rates = {batch: batch / (1.0 + 0.08 * batch) for batch in (1, 2, 4, 8, 16, 32, 64, 128)}
    readings = {batch: [LevelReading(batch, 1, 0, rate, rate, rate, 1.0, [])] for batch, rate in rates.items()}
    found = recommend(frontier_of(readings, Random(1)), RequestLengths(1024, 256), context=131_072)
    assert written == {"max_batch_size": found.max_batch_size, "kv_cache": {"max_tokens": found.kv_tokens}}
