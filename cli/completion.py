"""`penstock completion`: prints the script by which a shell completes commands and flags."""

from __future__ import annotations

import sys

import click
from click.shell_completion import get_completion_class

from cli.app import app
from cli.errors import DONE
from cli.options import Command

VARIABLE = "_PENSTOCK_COMPLETE"
"""With it the shell's script calls `penstock`; click answers then."""


@click.command("completion", cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print the completion script of SHELL, for its start-up file."""
    kind = get_completion_class(shell)
    assert kind is not None  # click knows the three
    script = kind(app, {}, "penstock", VARIABLE)
    sys.stdout.write(script.source_template % script.source_vars() + "\n")
    return DONE
