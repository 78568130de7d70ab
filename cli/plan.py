"""`penstock plan` and `penstock tune`: each command is a plan, imported when it is asked for, and printed here."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from cli.app import Group
from cli.options import JSON, Command, Where, moment
from cli.output import Exit, Problem, ProgressLine, emit, fitted, note, print_json, print_table
from planner.answers import PlanAnswer
from planner.facts.catalogue import PlanError
from planner.options import PlanCommand
from planner.search import SearchWatch

MODULES = {
    **dict.fromkeys(("memory", "roofline"), "planner.roofline"),
    "cost": "planner.cost",
    **dict.fromkeys(("search", "grid"), "planner.search"),
    "goodput": "planner.goodput",
    "place": "planner.placement",
    "what-if": "planner.cost",
    "simulate": "planner.simulation",
    "fit": "planner.fit",
}
"""Where each plan is, by its command's name."""


class PlanGroup(Group):
    """A click group of plans. `modules` says where each is, by the command's name."""

    def __init__(self, *args: Any, modules: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.modules:
            return None
        return _command(
            getattr(importlib.import_module(self.modules[cmd_name]), f"{cmd_name.replace('-', '_')}_command")
        )


@click.group(cls=PlanGroup, modules=MODULES)
def plan() -> None:
    """Plan before you buy: which GPU, how many, what batch, at which price.

    Everything is computed here, without a GPU or a server. docs/planning.md explains every formula.

    \b
    Examples:
      penstock plan memory --model llama-3.1-8b --gpu h200
      penstock plan cost --model llama-3.1-8b --gpu l4 --gpu h200
    """


@click.group(cls=PlanGroup, modules={"frontier": "cli.tune", "goodput": "cli.tune"})
def tune() -> None:
    """Measure a running server: its best batch, and the rate that it serves in time.

    The server is a Penstock or any other with OpenAI's API. PENSTOCK_API_KEY is sent as a bearer token.

    \b
    Examples:
      penstock tune frontier --requests 60
      penstock tune goodput
    """


def _command(plan: PlanCommand) -> click.Command:
    """The click command of a plan. A PlanError becomes one line, or two, and exit code 2."""

    def call(as_json: bool, **values: Any) -> int:
        try:
            with ProgressLine(quiet=as_json or not sys.stderr.isatty()) as progress:
                progress.phase(plan.shown)
                watch = SearchWatch(partial(progress.amount, plan.shown))
                values |= {"watch": watch} if plan.takes("watch") else {}
                values |= {"source": _records_source} if plan.takes("source") else {}
                answer = plan.answer(**values)
        except PlanError as error:
            raise Problem(str(error), next_step=error.next_step, code="plan") from None
        _print(answer, as_json=as_json)
        if watch.interrupted:
            note("interrupted: these are the best of those that were tried")
            return Exit.INTERRUPTED
        return answer.exit_code

    command = click.command(plan.name, cls=Command, help=plan.function.__doc__)(call)
    command.params[:0] = [*plan.options, JSON]
    return command


def _records_source(path: Path | None, since: str | None) -> tuple[Path, float]:
    """The folder or file of records that was named, or that of this folder's instance. Raises PlanError."""
    from cli.report import source  # noqa: PLC0415 - only one plan reads them

    try:
        return source(Where(), None)[0] if path is None else path, moment(since, time.time()) if since else 0.0
    except Problem as error:
        raise PlanError(f"{error}; {error.next_step}" if error.next_step else str(error)) from None


def _print(answer: PlanAnswer, *, as_json: bool) -> None:
    if as_json:
        print_json({**answer.value, "advice": answer.advice})
        return
    for table in answer.tables:
        if table.title:
            emit(f"{table.title}\n")
        print_table(table.header, table.rows)
        emit("\n")
    if answer.plot:
        emit(fitted(sys.stdout, answer.plot) + "\n\n")
    for line in (answer.advice, *answer.notes):
        emit(fitted(sys.stdout, line) + "\n")
