"""`penstock tune`: the list of its subcommands."""

from __future__ import annotations

import importlib
from typing import ClassVar, cast

import click

from cli.help_text import Group


class TuneGroup(Group):
    """A click group that imports a command when it is asked for."""

    COMMANDS: ClassVar[tuple[str, ...]] = ("frontier", "goodput")

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.COMMANDS:
            return None
        return cast(click.Command, getattr(importlib.import_module(f"cli.tune.{cmd_name}"), cmd_name))


@click.group(cls=TuneGroup)
def tune() -> None:
    """Measure a running server: its best batch, and the rate that it serves in time.

    The server is a Penstock or any other with OpenAI's API. PENSTOCK_API_KEY is sent as a bearer token.
    """
