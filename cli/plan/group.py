"""`penstock plan`: the list of its subcommands, each of whose modules is imported only when it is used."""

from __future__ import annotations

import importlib
from typing import ClassVar, cast

import click

from cli.help_text import Group


class PlanGroup(Group):
    """A click group that imports a command when it is asked for."""

    COMMANDS: ClassVar[tuple[str, ...]] = (
        "memory",
        "roofline",
        "cost",
        "search",
        "grid",
        "goodput",
        "place",
        "what-if",
        "simulate",
        "fit",
    )

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        return cast(click.Command, getattr(importlib.import_module(f"cli.plan.{name}"), name))


@click.group(cls=PlanGroup)
def plan() -> None:
    """Plan before you buy: which GPU, how many, what batch, at which price.

    Everything is computed here, without a GPU or a server. docs/planning.md explains every formula.
    """
