"""`penstock scale`: shows how many workers each model has and should have, and why; sets manual overrides."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

import click

from cli.client import Client
from cli.errors import DONE, Problem
from cli.options import Command, Where, json_option, where_options
from cli.output import note, print_json, print_rows, rfc3339

COLUMNS = ("model", "want", "ready", "starting", "draining", "min", "max", "waiting", "wait", "override", "reason")
ACTIONS = ("at", "epoch", "model", "action", "what", "by", "reason")
PERIOD = re.compile(r"([1-9][0-9]*)(s|m|h|d)?")
SECONDS = {None: 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


class Period(click.ParamType[int]):
    """A click type for a duration such as 90, 90s, 10m, 2h or 1d; in seconds."""

    name = "while"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = PERIOD.fullmatch(value)
        if match is None:
            self.fail(f"{value!r} is no while: write 90s, 10m, 2h or 1d", param, ctx)
        return int(match[1]) * SECONDS[match[2]]


for_option = click.option("--for", "hold_s", type=Period(), help="For so long (90s, 10m, 2h, 1d) [until resumed].")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def scale() -> None:
    """Show and set how many workers each model has."""


@scale.command("status", cls=Command)
@where_options(url=True)
@json_option
def status(where: Where, as_json: bool) -> int:
    """Show wanted and actual workers of every model, the reason, and who decides."""
    answer = Client.find(where).get("/admin/pools")
    if as_json:
        print_rows([shown(pool) for pool in answer["data"]], (), as_json=True)
        return DONE
    _table(answer["data"])
    leader = answer["leader"]
    note(f"{leader['id']} leads (epoch {leader['epoch']})" if leader else "no scheduler leads: nothing is changed")
    return DONE


@scale.command("log", cls=Command)
@where_options(url=True)
@json_option
def log(where: Where, as_json: bool) -> int:
    """Show what was decided and done to the pools, the newest first."""
    actions = [action | {"at": rfc3339(action["at"])} for action in Client.find(where).get("/admin/pools")["actions"]]
    if actions or as_json:
        print_rows(actions if as_json else [_said(action) for action in actions], ACTIONS, as_json=as_json)
    else:
        note("nothing was done yet")
    return DONE


@scale.command("set", cls=Command)
@click.argument("model")
@click.argument("want", type=click.IntRange(0))
@for_option
@where_options(url=True)
@json_option
def fix(model: str, want: int, hold_s: int | None, where: Where, as_json: bool) -> int:
    """Give MODEL a fixed number of workers, whatever waits."""
    return _override(where, model, {"want": want, "for_s": hold_s}, as_json=as_json)


@scale.command("pause", cls=Command)
@click.argument("model")
@for_option
@where_options(url=True)
@json_option
def pause(model: str, hold_s: int | None, where: Where, as_json: bool) -> int:
    """Change nothing: MODEL keeps the workers it has."""
    return _override(where, model, {"paused": True, "for_s": hold_s}, as_json=as_json)


@scale.command("resume", cls=Command)
@click.argument("model")
@where_options(url=True)
@json_option
def resume(model: str, where: Where, as_json: bool) -> int:
    """Let the scheduler decide again."""
    return _show(Client.find(where).delete(_path(model)), as_json=as_json)


def shown(pool: dict[str, Any]) -> dict[str, Any]:
    """A pool for JSON output: the API's object with RFC 3339 times."""
    override = pool["override"]
    if override is not None:
        until = override["until"]
        override |= {"at": rfc3339(override["at"]), "until": None if until is None else rfc3339(until)}
    decided = pool["decided_at"]
    workers = [worker | {"since": rfc3339(worker["since"])} for worker in pool["workers"]]
    return pool | {"decided_at": None if decided is None else rfc3339(decided), "workers": workers}


def _override(where: Where, model: str, body: dict[str, Any], *, as_json: bool) -> int:
    given = {name: value for name, value in body.items() if value is not None}
    return _show(Client.find(where).put(_path(model), given), as_json=as_json)


def _show(pool: dict[str, Any], *, as_json: bool) -> int:
    if as_json:
        print_json(shown(pool))
    else:
        _table([pool])
    return DONE


def _table(pools: Sequence[dict[str, Any]]) -> None:
    """One row per model, followed by one for each of its shapes."""
    rows = [row for pool in pools for row in (_row(pool), *_shapes(pool))]
    shaped = any(pool.get("shapes") for pool in pools)
    print_rows(rows, (*COLUMNS[:1], "shape", *COLUMNS[1:]) if shaped else COLUMNS, as_json=False)


def _shapes(pool: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, shape in pool.get("shapes", {}).items():
        yield shape | {"model": pool["model"], "shape": f"{name} (new jobs)" if shape["takes"] else name}


def _path(model: str) -> str:
    if not model:
        raise Problem("no model is named", next_step="penstock scale status")
    return f"/admin/pools/{quote(model)}"


def _row(pool: dict[str, Any]) -> dict[str, Any]:
    waits = [lane["wait_s"] for lane in pool["lanes"].values() if lane["wait_s"] is not None]
    return pool | {
        "waiting": sum(lane["waiting"] for lane in pool["lanes"].values()),
        "wait": f"{min(waits):.1f} s" if waits else None,
        "override": _hand(pool["override"]),
    }


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
