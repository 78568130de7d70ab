"""`penstock ps`: the processes of an instance and their states."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from cli.errors import DONE, UNREACHABLE, Problem
from cli.instance import Instance, ProcessEntry
from cli.options import Command, Where, json_option, where_options
from cli.output import CommandResult, note, print_rows, timed
from cli.suggestions import completed
from streaming.fleet.process import HEARTBEAT_TIMEOUT_S, Process
from streaming.redis.settings import RedisSettings

STORE_TIMEOUT_S = 2.0
ORDER = ("redis", "api", "worker", "scheduler", "offline")
FLEET_COLUMNS = ("role", "id", "host", "pid", "state", "since", "model", "used", "reserved")
FLEET_FIELDS = ("role", "id", "pid", "state", "since", "model", "shape", "host", "slots", "running", "reserved")
SERVER_AWAY = "server away"
"""Shown as the state of a worker that is ready, and none of whose servers is there."""
NO_STORE, UNREACHABLE_STORE, SILENT = "no store", "no answer", "silent"
"""Shown as the state of a process that is ready while the store does not answer, of the store itself, and of a process
whose reports have stopped, as if it hung."""
COLUMNS = ("role", "id", "pid", "state", "since", "restarts", "model")


@click.command(cls=Command)
@where_options(url=False)
@json_option
def ps(where: Where, as_json: bool) -> int:
    """Show role, id, pid, state and start of every process.

    In a data folder these are the processes `penstock up` supervises there, and below them those of other machines
    that share its Redis; with --redis-url, those of all machines.
    """
    instance = None if where.redis_url else where.home().read()
    if instance is not None:
        fleet, problem = _reported(where, instance)
        rows = _in_order(judged(row(entry), fleet, time.time()) for entry in instance.processes)
        _found(rows, COLUMNS).print(as_json=as_json)
        if others := _in_order(map(fleet_row, others_of(instance, fleet or ()))):
            if not as_json:
                note(f"on other machines, or in other data folders of {socket.gethostname()}:")
            _found(others, FLEET_COLUMNS).print(as_json=as_json)
        if not as_json:
            note(completed(problem or verdict(instance)))
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


def _reported(where: Where, instance: Instance) -> tuple[list[Process] | None, str]:
    """The processes that report themselves in the instance's store; or None, and why the store does not answer."""
    from cli.registry import processes  # noqa: PLC0415 - imports a Redis client

    if instance.state != "ready":
        return [], ""
    settings = where.config().section("redis", RedisSettings, {"url": instance.redis_url})
    try:
        return processes(msgspec.structs.replace(settings, timeout_s=min(STORE_TIMEOUT_S, settings.timeout_s))), ""
    except Problem as error:
        return None, f"the store does not answer, so no request is accepted: {error.cause}"


def judged(found: dict[str, Any], fleet: Sequence[Process] | None, now: float) -> dict[str, Any]:
    """A row of a supervised process, whose state counts only as far as the store confirms it.

    Args:
        fleet: the processes that report themselves in the store; None: it does not answer.
    """
    if found["state"] != "ready":
        return found
    if found["role"] == "redis":
        return found | {"state": UNREACHABLE_STORE} if fleet is None else found
    if fleet is None:
        return found | {"state": NO_STORE}
    is_new = now - datetime.fromisoformat(found["since"]).timestamp() < HEARTBEAT_TIMEOUT_S
    reports = any((each.host, each.pid) == (socket.gethostname(), found["pid"]) for each in fleet)
    return found if reports or is_new or not fleet else found | {"state": SILENT}


def others_of(instance: Instance, fleet: Sequence[Process]) -> list[Process]:
    """Those of the fleet that this instance does not supervise, without those of this machine that have exited: their
    reports expire a little later."""
    here, ours = socket.gethostname(), {entry.pid for entry in instance.processes}
    return [
        each for each in fleet if each.host != here or (each.pid not in ours and Path(f"/proc/{each.pid}").exists())
    ]


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
