"""Help pages of commands: a click group and a function that end each page with its examples (cli/examples.py)."""

from __future__ import annotations

from typing import Any

import click


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

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        write_examples(ctx, formatter)
