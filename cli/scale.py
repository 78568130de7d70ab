"""`penstock scale`: shows how many workers each model has and should have, and why; sets manual overrides."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

import click

from cli.app import Group
from cli.client import Client
from cli.options import command
from cli.output import CommandResult, Problem, list_result, note, print_rows, rfc3339, timed

COLUMNS = ("model", "want", "ready", "starting", "draining", "range", "waiting", "wait", "override", "reason")
ACTIONS = ("at", "epoch", "model", "action", "what", "by", "reason")
PERIOD = re.compile(r"([1-9][0-9]*)(s|m|h|d)?")
SECONDS = {None: 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


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
        return int(match[1]) * SECONDS[match[2]]


for_option = click.option("--for", "hold_s", type=Period(), help="For so long (90s, 10m, 2h, 1d) [until resumed].")


@click.group(cls=Group)
def scale() -> None:
    """Show and set how many workers each model has.

    \b
    Examples:
      penstock scale status
      penstock scale set sim 3 --for 10m
      penstock scale resume sim
    """


@command("status", scale)
def status(client: Client) -> CommandResult:
    """Show wanted and actual workers of every model, the reason, and who decides.

    \b
    Examples:
      penstock scale status
      penstock scale status --json
    """
    answer = client.get("/admin/pools")
    leader = answer["leader"]

    def show() -> None:
        _table(answer["data"])
        for pool in answer["data"]:
            if stalled := pool.get("stalled"):
                note(f"{pool['model']}: no worker may run: {stalled['cause']}; next: {stalled['fix']}")
            for worker in pool["workers"]:
                if worker.get("away"):
                    note(f"{worker['id']} waits for its server, {worker['away_s']:.0f} s: {'; '.join(worker['away'])}")
        note(f"{leader['id']} leads (epoch {leader['epoch']})" if leader else "no scheduler leads: nothing is changed")

    return CommandResult(map(shown, answer["data"]), show)


@command("log", scale)
def log(client: Client) -> CommandResult:
    """Show what was decided and done to the pools, the newest first.

    \b
    Examples:
      penstock scale log
    """
    actions = [timed(action) for action in client.get("/admin/pools")["actions"]]
    return list_result(actions, ACTIONS, "nothing was done yet", map(_said, actions))


@command("set", scale)
@click.argument("model")
@click.argument("want", type=click.IntRange(0))
@for_option
def fix(client: Client, model: str, want: int, hold_s: int | None) -> CommandResult:
    """Give MODEL a fixed number of workers, whatever waits.

    \b
    Examples:
      penstock scale set sim 3
      penstock scale set sim 3 --for 10m
    """
    return _override(client, model, {"want": want}, hold_s)


@command("pause", scale)
@click.argument("model")
@for_option
def pause(client: Client, model: str, hold_s: int | None) -> CommandResult:
    """Change nothing: MODEL keeps the workers it has.

    \b
    Examples:
      penstock scale pause sim --for 2h
    """
    return _override(client, model, {"paused": True}, hold_s)


@command("resume", scale)
@click.argument("model")
def resume(client: Client, model: str) -> CommandResult:
    """Let the scheduler decide again.

    \b
    Examples:
      penstock scale resume sim
    """
    return _found_pool(client.delete(_path(model)))


def shown(pool: dict[str, Any]) -> dict[str, Any]:
    """A pool for JSON output: the API's object with RFC 3339 times."""
    override = pool["override"] and timed(pool["override"])
    workers = [timed(worker) for worker in pool["workers"]]
    return timed(pool) | {"override": override, "workers": workers}


def _override(client: Client, model: str, body: dict[str, Any], hold_s: int | None) -> CommandResult:
    return _found_pool(client.put(_path(model), body if hold_s is None else body | {"for_s": hold_s}))


def _found_pool(pool: dict[str, Any]) -> CommandResult:
    return CommandResult(shown(pool), lambda: _table([pool]))


def _table(pools: Sequence[dict[str, Any]]) -> None:
    """One row per model, followed by one for each of its shapes."""
    rows = [row for pool in pools for row in (_row(pool), *_shapes(pool))]
    shaped = any(pool.get("shapes") for pool in pools)
    print_rows(rows, (*COLUMNS[:1], "shape", *COLUMNS[1:]) if shaped else COLUMNS)


def _shapes(pool: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, shape in pool.get("shapes", {}).items():
        yield (
            shape | _range(shape) | {"model": pool["model"], "shape": f"{name} (new jobs)" if shape["takes"] else name}
        )


def _path(model: str) -> str:
    if not model:
        raise Problem("no model is named", next_step="penstock scale status")
    return f"/admin/pools/{quote(model)}"


def _row(pool: dict[str, Any]) -> dict[str, Any]:
    waits = [lane["wait_s"] for lane in pool["lanes"].values() if lane["wait_s"] is not None]
    return pool | {
        **_range(pool),
        "waiting": sum(lane["waiting"] for lane in pool["lanes"].values()),
        "wait": f"{min(waits):.1f} s" if waits else None,
        "override": _hand(pool["override"]),
    }


def _range(limits: dict[str, Any]) -> dict[str, str]:
    return {"range": f"{limits['min']}-{limits['max']}"}


def _hand(override: dict[str, Any] | None) -> str | None:
    if override is None:
        return None
    what = "paused" if override["paused"] else f"set to {override['want']}"
    until = "" if override["until"] is None else f" until {rfc3339(override['until'])}"
    return f"{what} by {override['by']} at {rfc3339(override['at'])}{until}"


def _said(action: dict[str, Any]) -> dict[str, Any]:
    change = "" if action["want"] is None else f"{'-' if action['was'] is None else action['was']} -> {action['want']}"
    words = (action.get("shape"), action["worker"] or change)
    return action | {"what": " ".join(word for word in words if word)}
