"""`penstock bench`: runs the benchmark programs. Each is `python -m bench.<name>`, imported only when it is used."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import click

from cli.app import Group

PROGRAMS = {
    "gateway": "Penstock and other gateways in front of the same simulated engine.",
    "jobs": "One-token jobs per second, against Celery, arq and taskiq.",
    "order": "The order and the gate beside other rules, simulated.",
    "recovery": "Kill the only worker of `penstock up`: how long its reader waits.",
    "abuse": "Short chats of one tenant while another one does its worst.",
    "content": "Content rules: what they find, take for it wrongly, and cost.",
    "adapters": "Adapters of one worker: loads and waits, with loaded ones first and without.",
    "conformance": "The conformance suite of Open Responses, from a folder of yours, against real processes.",
    "chaos": "Fault injection: kill, stop, cut off, fill up and flood real processes, and judge what clients received.",
}
"""Help line of each program, which parses its own arguments."""


class BenchGroup(Group):
    """Lists the programs that are installed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in PROGRAMS if _is_here(name)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _command(cmd_name) if cmd_name in PROGRAMS and _is_here(cmd_name) else None


def _is_here(name: str) -> bool:
    return find_spec("bench") is not None and find_spec(f"bench.{name}") is not None


def _command(name: str) -> click.Command:
    """A command that passes all arguments on unchanged, including --help."""

    @click.command(
        name,
        short_help=PROGRAMS[name],
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    )
    @click.argument("words", nargs=-1, type=click.UNPROCESSED)
    def run(words: tuple[str, ...]) -> int:
        spec = find_spec(f"bench.{name}")
        is_package = spec is not None and spec.submodule_search_locations is not None
        module = importlib.import_module(f"bench.{name}.__main__" if is_package else f"bench.{name}")
        try:
            return int(module.main(list(words)))
        except SystemExit as end:  # argparse raises it for --help and for wrong arguments
            return end.code if isinstance(end.code, int) else 0

    return run


@click.group(cls=BenchGroup)
def bench() -> None:
    """Measure. A program prints a table and writes it as JSON, with plots beside.

    `penstock bench PROGRAM --help` says what a program takes.

    \b
    Examples:
      penstock bench gateway --quick
      penstock bench gateway --help
    """
