"""`penstock ps`: the processes of an instance and their states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import click
import msgspec

from cli.errors import DONE, UNREACHABLE, Problem
from cli.instance import Instance, ProcessEntry
from cli.options import Command, Where, json_option, where_options
from cli.output import CommandResult, note, print_rows, timed
from cli.suggestions import completed
from streaming.fleet.process import Process
from streaming.redis.settings import RedisSettings

ORDER = ("redis", "api", "worker", "scheduler", "offline")
FLEET_COLUMNS = ("role", "id", "host", "pid", "state", "since", "model", "used", "reserved")
FLEET_FIELDS = ("role", "id", "pid", "state", "since", "model", "shape", "host", "slots", "running", "reserved")
SERVER_AWAY = "server away"
"""Shown as the state of a worker that is ready, and none of whose servers is there."""
COLUMNS = ("role", "id", "pid", "state", "since", "restarts", "model")


@click.command(cls=Command)
@where_options(url=False)
@json_option
def ps(where: Where, as_json: bool) -> int:
    """Show role, id, pid, state and start of every process.

    In a data folder these are the processes `penstock up` supervises there; with --redis-url, those of all machines
    that share this Redis.
    """
    instance = None if where.redis_url else where.home().read()
    if instance is not None:
        rows = _in_order(map(row, instance.processes))
        _found(rows, COLUMNS).print(as_json=as_json)
        if not as_json:
            note(completed(verdict(instance)))
        return DONE
    config = where.config()
    if "url" not in config.raw.get("redis", {}):
        where.home().running()  # raises Problem
    rows = _in_order(map(fleet_row, _fleet(config.section("redis", RedisSettings))))
    _found(rows, FLEET_COLUMNS).print(as_json=as_json)
    return DONE


def _found(rows: list[dict[str, Any]], names: Sequence[str]) -> CommandResult:
    """The processes, in a table of these columns; with "shape" if any process has one."""
    if any(each["shape"] for each in rows):
        place = names.index("model") + 1
        names = (*names[:place], "shape", *names[place:])
    shown = [each | {"state": SERVER_AWAY} if each["away"] and each["state"] == "ready" else each for each in rows]
    used = [each | {"used": f"{each['running']}/{each['slots']}"} if each.get("slots") else each for each in shown]
    return CommandResult(rows, lambda: print_rows(used, names))


def row(entry: ProcessEntry) -> dict[str, Any]:
    """A supervised process as JSON."""
    found = msgspec.structs.asdict(entry) | {"away_since": entry.away_since or None}
    return timed(found, ("since", "away_since"))


def fleet_row(process: Process) -> dict[str, Any]:
    """A process of the fleet's registry as JSON."""
    found = timed({name: getattr(process, name) for name in FLEET_FIELDS}, ("since",))
    return found | {"away": "; ".join(process.away)}


def verdict(instance: Instance) -> str:
    """The summary line: whether the instance serves requests, its URL, and its engines."""
    if instance.state != "ready":
        return f"{instance.state}: {instance.phase}" if instance.phase else instance.state
    if problem := instance.worker_problem:
        return problem
    return f"ready at {instance.url}, engine {instance.engine}"


def _in_order(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda one: ORDER.index(one["role"]))


def _fleet(settings: RedisSettings) -> list[Process]:
    from cli.registry import processes  # noqa: PLC0415 - imports a Redis client, not needed for a local instance

    found = processes(settings)
    if not found:
        raise Problem(
            "nothing is running on this Redis", next_step="penstock up", exit_code=UNREACHABLE, code="not_running"
        )
    return found
