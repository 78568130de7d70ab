"""API commands of the CLI: a decorator adds the API's flags to a command, finds the API, and prints the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from cli.client import Client
from cli.errors import DONE
from cli.ids import LISTINGS, whole_id
from cli.options import Command, Where, json_option, where_options
from cli.output import CommandResult


def limit_option(most: int | None = None) -> Callable[[Callable[..., CommandResult]], Callable[..., CommandResult]]:
    """Add --limit to a command that lists."""
    kind = click.IntRange(1, most)
    return click.option("--limit", type=kind, default=20, show_default=True, help="Maximum number, newest first.")


def api_command(name: str, group: click.Group | None = None) -> Callable[[Callable[..., CommandResult]], click.Command]:
    """Make a command of a function that gets `client` and its own arguments, and returns what it found."""

    def decorate(function: Callable[..., CommandResult]) -> click.Command:
        def call(where: Where, as_json: bool, **arguments: Any) -> int:
            with Client.find(where) as client:
                whole = {name: whole_id(client, name, given) for name, given in arguments.items() if name in LISTINGS}
                function(client, **arguments | whole).print(as_json=as_json)
            return DONE

        command = click.command(name, cls=Command, help=function.__doc__)(where_options(url=True)(json_option(call)))
        command.params[:0] = reversed(getattr(function, "__click_params__", []))
        if group is not None:
            group.add_command(command)
        return command

    return decorate
