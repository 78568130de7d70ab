"""Root command of the CLI: the list of subcommands, each of whose modules is imported only when it is used."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar, cast

import click

from penstock import __version__

MAX_SENTENCE = 300
"""Characters of the first sentence of a command's help, in the help of its group."""


class Group(click.Group):
    """A click group whose help wraps the sentences of its commands; click cuts them. `-h` also shows it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"context_settings": {"help_option_names": ["-h", "--help"]}, **kwargs})

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As in click, which names the nearest commands only if all are imported."""
        names = self.list_commands(ctx)
        if args and args[0] == "list" and "ls" in names:
            args = ["ls", *args[1:]]
        if args and args[0] not in names and not args[0].startswith("-"):
            raise click.exceptions.NoSuchCommand(args[0], possibilities=names, ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(self.help_lines(ctx))

    def help_lines(self, ctx: click.Context) -> list[tuple[str, str]]:
        """The name and the sentence of each command."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        return [(name, each.get_short_help_str(MAX_SENTENCE)) for name, each in found if each is not None]


class LazyGroup(Group):
    """A click group that lists its commands by name and help line without importing them."""

    COMMANDS: ClassVar[dict[str, tuple[str, str]]] = {
        "up": ("cli.up:up", "Start everything on this machine, in one go."),
        "down": ("cli.processes:down", "Drain and stop the instance that runs here."),
        "ps": ("cli.processes:ps", "Show the processes and their states."),
        "chat": ("cli.chat:chat", "Ask the model; the answer streams to stdout."),
        "submit": ("cli.jobs:submit", "Put a job in the queue; its id goes to stdout."),
        "top": ("cli.top:top", "Show live what waits, what the workers do, and what is wrong."),
        "console": ("cli.admin:console", "Open the console in a browser, logged in."),
        "jobs": ("cli.jobs:jobs", "List, show, follow and cancel jobs."),
        "logs": ("cli.logs:logs", "Show what the processes have logged, about one job or all."),
        "batch": ("cli.batch:batch", "Run files of prompts, and manage batches."),
        "dlq": ("cli.admin:dlq", "List, show, replay and drop dead letters."),
        "webhooks": ("cli.admin:webhooks", "List, show and replay webhook messages."),
        "keys": ("cli.admin:keys", "List, create, rotate and revoke API keys."),
        "audit": ("cli.admin:audit", "Show what admins did, and who was refused."),
        "tenants": ("cli.admin:tenants", "Show the usage and limits of each tenant."),
        "usage": ("cli.admin:usage", "Show how many requests and tokens were used, by day, key and model."),
        "scale": ("cli.admin:scale", "Show and set how many workers each model has."),
        "store": ("cli.store:store", "Show what the store is, adopt its files, or delete everything."),
        "report": ("cli.report:report", "Say what happened, where time went, and what to change first."),
        "plan": ("cli.plan:plan", "Plan before you buy: which GPU, how many, what batch, what price."),
        "tune": ("cli.plan:tune", "Measure a running server: its best batch, and the rate it serves in time."),
        "bench": ("cli.bench:bench", "Measure speed, cost and faults on this machine."),
        "probe": ("cli.processes:probe", "Say by exit code whether one process here is ready."),
        "doctor": ("cli.doctor:doctor", "Say what is wrong with this machine, and the fix."),
        "completion": ("cli.pages:completion", "Print the script by which bash, zsh or fish completes commands."),
        "version": ("cli.pages:show_version", "Print the version."),
        "help": ("cli.pages:help_page", "Help on a command, or on: exit-codes, environment."),
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.COMMANDS:
            return None
        module, _, name = self.COMMANDS[cmd_name][0].partition(":")
        return cast(click.Command, getattr(importlib.import_module(module), name))

    def help_lines(self, ctx: click.Context) -> list[tuple[str, str]]:
        return [(name, text) for name, (_, text) in self.COMMANDS.items()]


@click.group(cls=LazyGroup, invoke_without_command=True)
@click.version_option(__version__, prog_name="penstock")
@click.pass_context
def app(context: click.Context) -> None:
    """Penstock: a durable queue in front of LLM engines.

    Start with `penstock up`, then `penstock chat "What is a penstock?"`.

    \b
    Examples:
      penstock up --engine sim
      penstock chat "What is a penstock?"
      penstock submit "Write a haiku about water." --wait
      penstock jobs ls
      eval "$(penstock completion bash)"
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
