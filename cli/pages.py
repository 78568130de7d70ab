"""`penstock version` and `penstock help`: help pages that are not about one command."""

from __future__ import annotations

import sys
import typing

import click

from cli.errors import DONE, USAGE, Problem
from cli.options import Command, json_option
from cli.output import line_result
from penstock import __version__
from runtime.config import nearest

EXIT_CODES = """\
Exit codes

  0    done; also an empty list; also `up` stopped by Ctrl-C after a clean drain
  1    the operation failed
  2    wrong usage: a flag, a variable or a setting
  3    cannot reach a server; nothing is running
  4    key missing, wrong or not allowed
  5    the job ended as failed, expired, cancelled or incomplete
  6    --wait ran out of time; the work goes on, its id is on stdout
  130  interrupted
"""

ELSEWHERE = {
    "PENSTOCK_API_KEY": "the key commands send to the API (or a file api-key, mode 0600, in its data folder)",
    "PENSTOCK_URL": "address of the API for chat, submit and jobs",
    "PENSTOCK_BENCH_CACHE": "where `penstock bench` keeps other systems' environments [~/.cache/penstock-bench]",
    "NO_COLOR": "any value: no styles in the output",
    "FORCE_COLOR": "any value: styles also where there is no terminal",
}


@click.command("version", cls=Command)
@json_option
def show_version(as_json: bool) -> int:
    """Print the version of Penstock."""
    line_result({"name": "penstock", "version": __version__}, f"penstock {__version__}").print(as_json=as_json)
    return DONE


@click.command("help", cls=Command)
@click.argument("topic", required=False)
@click.pass_context
def help_page(context: click.Context, topic: str | None) -> int:
    """Help on a command, or one of the pages exit-codes and environment."""
    root = context.find_root()
    if topic == "exit-codes":
        text = EXIT_CODES
    elif topic == "environment":
        text = environment_page()
    elif topic is None:
        text = root.get_help() + "\n"
    else:
        text = _command_help(root, topic)
    sys.stdout.write(text)
    return DONE


def _command_help(root: click.Context, name: str) -> str:
    group = root.command
    assert isinstance(group, click.Group)
    command = group.get_command(root, name)
    if command is None:
        pages = [*group.list_commands(root), "exit-codes", "environment"]
        raise Problem(f"no help on {name!r}", next_step=nearest(name, pages), exit_code=USAGE, code="usage")
    return command.get_help(click.Context(command, info_name=name, parent=root)) + "\n"


def environment_page() -> str:
    """Every environment variable, with its setting and default."""
    from cli.deployment import KINDS  # noqa: PLC0415 - every section's settings
    from runtime.config import ALIASES, ENV_PREFIX, TABLES, describe  # noqa: PLC0415

    lines = ["Variables (each is also a key of penstock.toml; flags outrank variables, variables the file)", ""]
    short = {target: name for name, target in ALIASES.items()}
    for section, kind in KINDS.items():
        if section in TABLES:
            continue
        hints = typing.get_type_hints(kind)
        for key, default in zip(kind.__struct_fields__, kind.__struct_defaults__, strict=True):
            name = short.get((section, key), f"{ENV_PREFIX}{section}_{key}".upper())
            shown = default if isinstance(default, (str, int, float)) else ""
            lines.append(f"  {name:<38} {describe(hints[key])} [{shown}]")
    lines += ["", *(f"  {name:<40} {text}" for name, text in ELSEWHERE.items())]
    return "\n".join(lines) + "\n"
