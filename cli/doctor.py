"""`penstock doctor`: checks this machine, its settings and its Redis, and prints a fix for each problem."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from cli.banner import counted
from cli.checks import Check, examine
from cli.deployment import load_deployment
from cli.errors import DONE, FAILED
from cli.instance import DataDir
from cli.options import Command, Where, json_option, where_options
from cli.output import emit, print_json
from runtime.config import ConfigError


@click.command(cls=Command)
@click.option("-v", "--verbose", is_flag=True, help="Show the checks that passed, too.")
@where_options(url=False)
@json_option
def doctor(verbose: bool, where: Where, as_json: bool) -> int:
    """Check this machine; nothing is changed. Exit code 1 if something must be fixed."""
    found = list(_checks(where))
    ok = not any(check.status == "fail" for check in found)
    if as_json:
        print_json({"ok": ok, "checks": [dataclasses.asdict(check) for check in found]})
    else:
        emit("\n".join([*_lines(found, verbose=verbose), summary(found)]) + "\n")
    return DONE if ok else FAILED


def summary(found: Sequence[Check]) -> str:
    """The summary line."""
    fails = sum(check.status == "fail" for check in found)
    warnings = sum(check.status == "warn" for check in found)
    if not fails and not warnings:
        return "Ready."
    parts = [f"{counted(fails, 'thing')} to fix"] if fails else []
    parts += [counted(warnings, "warning")] if warnings else []
    return ", ".join(parts) + "."


def _checks(where: Where) -> Iterator[Check]:
    try:
        flags = {
            ("up", "data_dir"): None if where.data_dir is None else str(where.data_dir),
            ("redis", "url"): where.redis_url,
        }
        deployment = load_deployment(flags, os.environ, Path.cwd())
    except ConfigError as error:
        yield Check("settings", "fail", f"{error.key}: {error.problem}", error.hint or "penstock help environment")
        return
    yield Check("settings", "ok", "file, variables and flags are understood")
    home = DataDir(deployment.up.data_dir)
    yield from examine(deployment, home, home.read(), os.environ)


def _lines(found: Sequence[Check], *, verbose: bool) -> Iterator[str]:
    for check in found:
        if verbose or check.status in ("warn", "fail"):
            yield f"{check.status:<5} {check.name}: {check.detail}"
        if check.status in ("warn", "fail") and check.hint:
            yield f"      {check.hint}"
