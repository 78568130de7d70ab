"""Suggested commands: adds the flags that the reader typed to each `penstock` command that a message suggests.

A suggestion names the program as the reader's shell finds it, and repeats the flags by which the reader chose the
deployment. Another `penstock up` repeats all its flags.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from click.core import ParameterSource

COMMAND = re.compile(r"(?<![\w/.-])penstock (?P<words>[a-z]+(?: [a-z]+)?)(?P<rest>[^,;]*)")
"""A command and its arguments, as far as a comma or semicolon tells where they end."""
TAKEN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("down", "logs", "probe"), ("data_dir",)),
    **dict.fromkeys(("ps", "store"), ("data_dir", "redis_url")),
    **dict.fromkeys(("up", "doctor", "report"), ("data_dir", "redis_url", "config")),
    **dict.fromkeys(
        ("chat", "submit", "jobs", "batch", "dlq", "webhooks", "tenants", "scale", "console", "top"),
        ("data_dir", "redis_url", "url"),
    ),
}
"""By command or group, its parameters that choose the deployment. A table, because an import of the command is slow."""
GROUPS = ("jobs", "batch", "dlq", "webhooks", "scale", "store")
PASSWORD = re.compile(r"[a-z+]+://[^/@]*:[^/@]+@")


def own_command(argv0: str) -> str:
    """The words by which this program was called, for commands to paste: `penstock` if the PATH leads to it."""
    path = Path(argv0).absolute()
    if path.name == "__main__.py":  # python -m cli
        return f"{_program(Path(sys.executable))} -m {path.parent.name}"
    return _program(path)


def _program(path: Path) -> str:
    """A program by its name if the shell finds it so, else by its path."""
    found = shutil.which(path.name)
    if found and Path(found).absolute() == path:
        return path.name
    short = short_path(path)
    return shlex.quote(short if "/" in short else f"./{short}")


def short_path(path: Path) -> str:
    """The path relative to the current folder, if it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def completed(text: str, context: click.Context | None = None) -> str:
    """The message with its commands completed from the flags of the running command.

    A password is not repeated: `--redis-url` asks for it in PENSTOCK_REDIS_URL, which the suggested command reads.
    """
    context = context or click.get_current_context(silent=True)
    if context is None:
        return text
    program = own_command(sys.argv[0]) if Path(sys.argv[0]).name == "penstock" else "penstock"
    return COMMAND.sub(lambda found: _completed(found, context, program), text)


def _completed(found: re.Match[str], context: click.Context, program: str) -> str:
    names = found["words"].split()[: 2 if found["words"].partition(" ")[0] in GROUPS else 1]
    taken = TAKEN.get(names[0])
    if taken is None or "--help" in found["rest"]:
        return found[0]
    rest = found[0].partition(f"penstock {' '.join(names)}")[2]
    if names == ["up"] and context.command.name == "up":
        taken = tuple(context.params)
    return " ".join([program, *names, *_flags(context, taken, rest)]) + rest


def _flags(context: click.Context, taken: Sequence[str], rest: str) -> Iterator[str]:
    """The flags to repeat: those that were typed, that the command takes, too, and that do not follow in `rest`."""
    for option in context.command.params:
        name = option.name or ""
        given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        value, flag = str(context.params.get(name)), max(option.opts, key=len)
        if given and name in taken and not PASSWORD.match(value) and f" {flag} " not in rest:
            yield flag if isinstance(option, click.Option) and option.is_flag else f"{flag} {shlex.quote(value)}"
