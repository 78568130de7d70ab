"""Commands that messages suggest, ready to paste: the program as the user's shell finds it, and the flags by which the
user chose the deployment."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from click.core import ParameterSource

SUGGESTED = re.compile(r"(?<![\w/.-])penstock (?P<words>[a-z]+(?: [a-z]+)?)(?P<rest>[^,;]*)")
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
"""Not repeated: `--redis-url` asks for it in PENSTOCK_REDIS_URL, which the suggested command reads."""


def own_command() -> str:
    """The program as the user's shell finds it: by its name if the PATH leads to it, else by its path."""
    path = Path(sys.argv[0]).absolute()
    is_module = path.name == "__main__.py"
    program = Path(sys.executable) if is_module else path
    name = program.name if shutil.which(program.name) == str(program) else shlex.quote(short_path(program))
    return f"{name} -m cli" if is_module else name


def short_path(path: Path) -> str:
    """The path relative to the current folder, if it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def completed(text: str) -> str:
    """The message with its commands completed from the flags of the running command."""
    context = click.get_current_context(silent=True)
    if context is None or "penstock " not in text:
        return text
    return SUGGESTED.sub(lambda found: _completed(found, context), text)


def _completed(found: re.Match[str], context: click.Context) -> str:
    names = found["words"].split()[: 2 if found["words"].partition(" ")[0] in GROUPS else 1]
    taken = TAKEN.get(names[0])
    if taken is None or "--help" in found["rest"]:
        return found[0]
    rest = found[0].removeprefix(f"penstock {' '.join(names)}")
    if names == ["up"] and context.command.name == "up":
        taken = tuple(context.params)  # another one repeats all its flags
    program = own_command() if Path(sys.argv[0]).name == "penstock" else "penstock"
    return " ".join([program, *names, *_flags(context, taken, rest)]) + rest


def _flags(context: click.Context, taken: Sequence[str], rest: str) -> Iterator[str]:
    """The flags to repeat: those that were typed, that the command takes, too, and that do not follow in `rest`."""
    for option in context.command.params:
        name = option.name or ""
        given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        value, flag = str(context.params.get(name)), max(option.opts, key=len)
        if given and name in taken and not PASSWORD.match(value) and f" {flag} " not in rest:
            yield flag if isinstance(option, click.Option) and option.is_flag else f"{flag} {shlex.quote(value)}"
