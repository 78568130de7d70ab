"""Common options of all commands: --color, --debug, --json, and the flags that select a deployment; also the commands
that messages suggest, with the flags of the one that runs."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from click.core import ParameterSource

from api.settings import ApiSettings
from cli.instance import DataDir, UpSettings, settings_file
from cli.output import CommandResult, Problem, note
from penstock.config import FILE, Config, load, own_file
from streaming.batches.file_store import FilesSettings
from streaming.redis.settings import RedisSettings

IDS = ("job_id", "batch_id", "letter_id", "message_id", "key_id")
"""Arguments that are ids."""


JSON_HELP = "JSON on stdout, nothing else: one object, or one object per line for a list."

AGO = re.compile(r"([0-9]+(?:\.[0-9]+)?)(s|m|h|d)")
PERIOD = re.compile(r"([1-9][0-9]*)(s|m|h|d)?")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
TIME_HINT = "write 90s, 15m, 2h or 7d (ago), or a time such as 2026-11-24T18:30 (UTC)"

F = TypeVar("F", bound=Callable[..., Any])


class Command(click.Command):
    """A click command that also takes --color and --debug (read by cli/__main__.py) in any position."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += [
            click.Option(
                ["--color"],
                type=click.Choice(["auto", "always", "never"]),
                expose_value=False,
                is_eager=True,
                callback=_choose_color,
                help="Colour in the output (also NO_COLOR, FORCE_COLOR).",
            ),
            click.Option(["--debug"], is_flag=True, expose_value=False, help="Show the traceback of an error."),
        ]

    def invoke(self, ctx: click.Context) -> Any:
        """As in click, but the next step of a Problem is completed while the flags are known."""
        try:
            return super().invoke(ctx)
        except Problem as problem:
            problem.next_step = completed(problem.next_step)
            raise


def _choose_color(_context: click.Context, _option: click.Parameter, value: str | None) -> None:
    """Set the variables from the flag, which takes precedence, so that children inherit the choice."""
    if value in ("always", "never"):
        on, off = ("FORCE_COLOR", "NO_COLOR") if value == "always" else ("NO_COLOR", "FORCE_COLOR")
        os.environ[on] = "1"
        os.environ.pop(off, None)


@dataclass(frozen=True, slots=True)
class Where:
    """The flags that select the deployment of a command."""

    data_dir: Path | None = None
    redis_url: str | None = None
    url: str | None = None

    @property
    def flags(self) -> dict[tuple[str, str], str | None]:
        """The settings behind these flags."""
        data_dir = None if self.data_dir is None else str(self.data_dir)
        return {("up", "data_dir"): data_dir, ("redis", "url"): self.redis_url}

    def config(self, role: str = "") -> Config:
        """The merged settings that locate a deployment, with these flags; of a role started alone, with its own file.
        Raises ConfigError."""
        kinds: dict[str, type[msgspec.Struct]] = {
            "up": UpSettings,
            "redis": RedisSettings,
            "api": ApiSettings,
            "files": FilesSettings,
        }
        own = own_file(Path.cwd() / FILE, role) if role else None
        return load(kinds, path=settings_file(Path.cwd()), own=own, environ=os.environ, flags=self.flags)

    def home(self) -> DataDir:
        """The data folder. Raises ConfigError."""
        return DataDir(self.config().section("up", UpSettings).data_dir)


def warn_of_password(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """Called with --redis-url. Warns about a password in it, which every user of the machine can read."""
    if value and PASSWORD.match(value):
        note("every user of this machine can read the password in --redis-url: set PENSTOCK_REDIS_URL instead")
    return value


DATA_DIR = click.Option(["--data-dir"], type=click.Path(path_type=Path), help="Folder of the instance [.penstock].")
REDIS_URL = click.Option(
    ["--redis-url"], callback=warn_of_password, help="Find the instance through its Redis instead."
)
URL = click.Option(["--url"], envvar="PENSTOCK_URL", help="Address of the API.")
JSON = click.Option(["--json", "as_json"], is_flag=True, help=JSON_HELP)


def command(
    name: str, group: click.Group | None = None, *, redis: bool = True, options: Sequence[click.Option] = ()
) -> Callable[[F], click.Command]:
    """Make a command of a function. The names of its parameters choose its flags: `where`, or a `client` of the API,
    adds those that select a deployment; `as_json` adds --json; an id is an argument of which a beginning is enough. A
    CommandResult that it returns is printed, and adds --json, too. `options`: further ones, which commands share."""

    def decorate(function: F) -> click.Command:
        wanted = function.__annotations__

        def call(as_json: bool = False, **arguments: Any) -> Any:
            where = Where(*(arguments.pop(option.name, None) for option in (DATA_DIR, REDIS_URL, URL)))
            more: dict[str, Any] = {"where": where, "as_json": as_json}
            with contextlib.ExitStack() as stack:
                if "client" in wanted:
                    from cli.client import Client, whole_ids  # noqa: PLC0415 - imports an HTTP client

                    more["client"] = stack.enter_context(Client.find(where))
                    arguments |= whole_ids(more["client"], arguments)
                found = function(**arguments, **{name: value for name, value in more.items() if name in wanted})
                return found.print(as_json=as_json) if isinstance(found, CommandResult) else found

        made = click.command(name, cls=Command, help=function.__doc__)(call)
        finds, shows = {"where", "client"} & {*wanted}, "as_json" in wanted or wanted["return"] == "CommandResult"
        flags = {DATA_DIR: finds, REDIS_URL: finds and redis, URL: "client" in wanted, JSON: shows}
        ids = [click.Argument([each]) for each in wanted if each in IDS]
        own = reversed(getattr(function, "__click_params__", []))
        made.params[:0] = [*ids, *own, *options, *(flag for flag, is_taken in flags.items() if is_taken)]
        if group is not None:
            group.add_command(made)
        return made

    return decorate


def config_option(command: F) -> F:
    """Add --config, as the argument `config`."""
    text = "Settings file [penstock.toml in this folder]."
    return click.option("--config", type=click.Path(path_type=Path), help=text)(command)


def moment(text: str, now: float) -> float:
    """Unix seconds of a time as people write it. Raises Problem."""
    if match := AGO.fullmatch(text.strip()):
        return now - float(match[1]) * SECONDS[match[2]]
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        raise Problem(f"{text!r} is no time", next_step=TIME_HINT, code="usage") from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


class Period(click.ParamType[int]):
    """A click type for a duration such as 90, 90s, 10m, 2h or 1d; in seconds."""

    name = "while"

    def __init__(self, *, needs_unit: bool = False) -> None:
        """`needs_unit`: a number alone is refused."""
        self._needs_unit = needs_unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = PERIOD.fullmatch(value)
        if match is None or (self._needs_unit and match[2] is None):
            self.fail(f"{value!r} is no while: write 90s, 10m, 2h or 1d", param, ctx)
        return int(match[1]) * SECONDS[match[2] or "s"]


# --- commands that messages suggest: ready to paste, with the flags by which the user chose the deployment ------------


SUGGESTED = re.compile(r"(?<![\w/.-])penstock (?P<words>[a-z]+(?: [a-z]+)?)(?P<rest>[^,;]*)")
"""A command and its arguments, as far as a comma or semicolon tells where they end."""
TAKEN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("down", "logs", "probe"), ("data_dir",)),
    **dict.fromkeys(("ps", "store"), ("data_dir", "redis_url")),
    **dict.fromkeys(("up", "doctor", "report"), ("data_dir", "redis_url", "config")),
    **dict.fromkeys(
        (
            *("chat", "submit", "jobs", "batch", "dlq", "webhooks", "keys", "audit", "tenants", "usage", "scale"),
            *("console", "top"),
        ),
        ("data_dir", "redis_url", "url"),
    ),
}
"""By command or group, its parameters that choose the deployment. A table, because an import of the command is slow."""
GROUPS = ("jobs", "batch", "dlq", "webhooks", "keys", "scale", "store")
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
