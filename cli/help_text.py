"""Help pages of commands: a click group and a function that end each page with its examples (cli/examples.py)."""

from __future__ import annotations

from typing import Any

import click

MAX_SENTENCE = 300
"""Characters of the first sentence of a command's help, in the help of its group."""


def write_examples(context: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the section of examples of the context's command."""
    from cli.examples import EXAMPLES  # noqa: PLC0415 - only a help page needs them

    if lines := EXAMPLES.get(context.command_path):
        with formatter.section("Examples"):
            formatter.write("".join(f"  {line}\n" for line in lines))


class Group(click.Group):
    """A click group whose help page has examples; `-h` also shows it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("context_settings", {"help_option_names": ["-h", "--help"]})
        super().__init__(*args, **kwargs)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As in click, but each sentence is wrapped, not cut."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        shown = [
            (name, command.get_short_help_str(MAX_SENTENCE))
            for name, command in commands
            if command is not None and not command.hidden
        ]
        if shown:
            with formatter.section("Commands"):
                formatter.write_dl(shown)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        write_examples(ctx, formatter)
