"""`penstock version`, `penstock help` and `penstock completion`: what is not about one command."""

from __future__ import annotations

import re
import sys
import typing
from collections.abc import Iterator, Sequence

import click
from click.shell_completion import get_completion_class

from cli.app import app
from cli.options import command
from cli.output import CommandResult, Problem, fitted, line_result
from penstock import __version__
from penstock.config import nearest

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
    "PENSTOCK_API_KEY": ("the key that commands send to the API", "the file api-key, mode 0600, of the data folder"),
    "PENSTOCK_URL": ("address of the API for commands", "of the instance in the data folder"),
    "PENSTOCK_BENCH_CACHE": ("for `penstock bench`, other systems' environments", "~/.cache/penstock-bench"),
    "NO_COLOR": ("any value: no styles in the output", "not set"),
    "FORCE_COLOR": ("any value: styles also where there is no terminal", "not set"),
}
"""Variables that are no settings: what each is, and what counts without it."""


HEAD = (
    "Variables, each with its default in brackets. Those of the first part are also keys of penstock.toml\n"
    "(flags outrank variables, variables the file), in the section named above them."
)
MEANING_INDENT = "      "
NAME_WIDTH = 40

UP_SETS = {
    ("redis", "url"): "a server of its own in `penstock up`, else redis://127.0.0.1:6379/0",
    ("files", "dir"): "files in the data folder",
}
"""Settings whose default `penstock up` replaces."""


@command("version")
def show_version() -> CommandResult:
    """Print the version of Penstock.

    \b
    Examples:
      penstock version
      penstock version --json
    """
    return line_result({"name": "penstock", "version": __version__}, "{name} {version}")


@command("help")
@click.argument("topic", nargs=-1)
@click.pass_context
def help_page(context: click.Context, topic: tuple[str, ...]) -> None:
    """Help on a command, or one of the pages exit-codes and environment. `environment WORD` shows only the variables
    that have the word in their name, section or meaning.

    \b
    Examples:
      penstock help up
      penstock help jobs ls
      penstock help environment
    """
    if topic == ("exit-codes",):
        text = EXIT_CODES
    elif topic[:1] == ("environment",):
        lines = []
        for line in environment_page(topic[1:]).split("\n"):
            column = re.match(rf"  \S+ {{2,}}|{MEANING_INDENT}", line)  # of a row's kind, or of a meaning
            lines.append(fitted(sys.stdout, line, column.end() if column else 0))
        text = "\n".join(lines)
    else:
        text = _command_help(context.find_root(), topic)
    sys.stdout.write(text)


def _command_help(context: click.Context, names: Sequence[str]) -> str:
    """The help page of the command under the context's that these names lead to."""
    for name in names:
        group = context.command
        command = group.get_command(context, name) if isinstance(group, click.Group) else None
        if command is None:
            known = group.list_commands(context) if isinstance(group, click.Group) else []
            pages = [*known, "exit-codes", "environment"] if context.parent is None else known
            raise Problem(f"no help on {name!r}", next_step=nearest(name, pages), code="usage")
        context = click.Context(command, info_name=name, parent=context)
    return context.get_help() + "\n"


def environment_page(words: Sequence[str] = ()) -> str:
    """Every environment variable, with its kind, its default and, below, its meaning; of those with words, only these.
    Raises Problem if none has all of the words."""
    from cli.deployment import KINDS  # noqa: PLC0415 - every section's settings
    from penstock import config  # noqa: PLC0415

    def rows(section: str, *fields: tuple[str, str, str, str]) -> Iterator[str]:
        shown = [each for each in fields if _has(words, section, *each)]
        yield from ("", section) if shown and section else ("",) if shown else ()
        for name, kind, default, meaning in shown:
            yield f"  {name:<{NAME_WIDTH}}  {kind} [{default}]"
            yield from [MEANING_INDENT + meaning] if meaning else []

    lines = list[str]()
    short = {target: name for name, target in config.ALIASES.items()}
    for section, kind in KINDS.items():
        if section in config.TABLES:
            continue
        hints, meanings = typing.get_type_hints(kind), config.field_meanings(kind)
        fields = list[tuple[str, str, str, str]]()
        for key, default in zip(kind.__struct_fields__, kind.__struct_defaults__, strict=True):
            if typing.get_origin(hints[key]) is not dict:  # a table has no variable
                name = short.get((section, key), f"{config.ENV_PREFIX}{section}_{key}".upper())
                shown = UP_SETS.get((section, key)) or _default(default)
                fields.append((name, config.describe(hints[key]), shown, meanings.get(key, "")))
        lines += rows(f"[{section}]", *fields)
    lines += rows("", *((name, text, default, "") for name, (text, default) in ELSEWHERE.items()))
    if not lines:
        said = f"no variable has {' '.join(words)!r} in its name, section or meaning"
        raise Problem(said, next_step="penstock help environment", code="usage")
    return "\n".join([HEAD, *lines, ""])


def _has(words: Sequence[str], *texts: str) -> bool:
    """Whether each word is in one of the texts, whatever its case."""
    return all(any(word.lower() in text.lower() for text in texts) for word in words)


def _default(value: object) -> str:
    """A default as people read it."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return "not set" if value is None else text or "empty"


VARIABLE = "_PENSTOCK_COMPLETE"
"""Variable by which the shell's script asks `penstock` for completions; click answers."""


@command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of SHELL, for its start-up file.

    \b
    Examples:
      eval "$(penstock completion bash)"    # in ~/.bashrc
      eval "$(penstock completion zsh)"     # in ~/.zshrc, after compinit
      penstock completion fish > ~/.config/fish/completions/penstock.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None  # click knows the three
    script = kind(app, {}, "penstock", VARIABLE)
    sys.stdout.write(script.source_template % script.source_vars() + "\n")
