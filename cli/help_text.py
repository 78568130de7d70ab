"""Help pages of commands: each ends with its examples (cli/examples.py)."""

from __future__ import annotations

from typing import Any

import click

MAX_SENTENCE = 300
"""Characters of the first sentence of a command's help, in the help of its group."""


class CommandWithExamples(click.Command):
    """A click command whose help page has examples."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from cli.examples import EXAMPLES  # noqa: PLC0415 - only a help page needs them

        super().format_epilog(ctx, formatter)
        if lines := EXAMPLES.get(ctx.command_path):
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in lines))


class Group(CommandWithExamples, click.Group):
    """A click group whose help page has examples; `-h` also shows it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("context_settings", {"help_option_names": ["-h", "--help"]})
        super().__init__(*args, **kwargs)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As in click, but a mistyped name gets the nearest ones."""
        names = self.list_commands(ctx)
        if args and args[0] not in names and not args[0].startswith("-"):
            raise click.exceptions.NoSuchCommand(args[0], possibilities=names, ctx=ctx)
        return super().resolve_command(ctx, args)

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
