"""`penstock ps`, `penstock probe` and `penstock down`: the processes of an instance, whether one is ready, their end.

A probe is for a HEALTHCHECK or a kubelet's exec probe. It asks an API process over HTTP. Other roles have no port, so
it reads their last report in the fleet's registry; a process whose event loop hangs stops reporting and is removed from
it after ten seconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import click
import msgspec

from api.settings import ApiSettings
from cli.instance import SUPERVISED, WILDCARDS, Instance, ProcessEntry, url_of
from cli.options import Where, command
from cli.output import CommandResult, Exit, Problem, ProgressLine, note, print_rows, timed
from penstock.config import Config
from streaming.fleet.process import HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMEOUT_S, Process

STORE_TIMEOUT_S = 2.0
ORDER = ("redis", "api", "worker", "scheduler", "offline")
FLEET_COLUMNS = ("role", "id", "host", "pid", "state", "since", "model", "shape", "used", "reserved")
FLEET_FIELDS = ("role", "id", "pid", "state", "since", "model", "shape", "host", "slots", "running", "reserved")
SERVER_AWAY = "server away"
"""Shown as the state of a worker that is ready, and none of whose servers is there."""
NO_STORE, UNREACHABLE_STORE, SILENT = "no store", "no answer", "silent"
"""Shown as the state of a process that is ready while the store does not answer, of the store itself, and of a process
whose reports have stopped, as if it hung."""
COLUMNS = ("role", "id", "pid", "state", "since", "restarts", "model", "shape")


@command("ps")
def ps(where: Where, as_json: bool) -> None:
    """Show role, id, pid, state and start of every process.

    In a data folder these are the processes `penstock up` supervises there, and below them those of other machines
    that share its Redis; with --redis-url, those of all machines.

    \b
    Examples:
      penstock ps
      penstock ps --json
      penstock ps --redis-url redis://127.0.0.1:6379/0
    """
    config, instance = where.config(), None if where.redis_url else where.home().read()
    if instance is None:
        if "url" not in config.raw.get("redis", {}):
            where.home().running()  # raises Problem
        from cli.registry import processes  # noqa: PLC0415 - imports a Redis client

        if not (fleet := processes(config)):
            raise Problem("nothing is running on this Redis", next_step="penstock up", code="not_running")
        _print(_in_order(map(fleet_row, fleet)), FLEET_COLUMNS, as_json=as_json)
        return
    found = rows_of(instance, config)
    _print(found.own, COLUMNS, as_json=as_json)
    if found.others:
        if not as_json:
            note(f"on other machines, or in other data folders of {socket.gethostname()}:")
        _print(found.others, FLEET_COLUMNS, as_json=as_json)
    if not as_json:
        note(found.problem or verdict(instance))


def _print(rows: list[dict[str, Any]], names: Sequence[str], *, as_json: bool) -> None:
    """Print the processes: a table of these columns."""
    shown = []
    for each in rows:
        state = SERVER_AWAY if each["away"] and each["state"] == "ready" else each["state"]
        used = f"{each['running']}/{each['slots']}" if each.get("slots") else None
        shown.append(each | {"state": state, "used": used})
    CommandResult(rows, lambda: print_rows(shown, names)).print(as_json=as_json)


class ProcessRows(NamedTuple):
    """The processes of an instance, those of others that share its store, and why the store does not answer."""

    own: list[dict[str, Any]]
    others: list[dict[str, Any]]
    problem: str = ""


def rows_of(instance: Instance, config: Config) -> ProcessRows:
    """The rows of `penstock ps`."""
    from cli.registry import processes  # noqa: PLC0415 - imports a Redis client

    if instance.state != "ready":
        return ProcessRows(_in_order(map(row, instance.processes)), [])
    fleet, problem = None, ""
    for is_last in (False, True):
        try:
            fleet = processes(config, instance, STORE_TIMEOUT_S)
        except Problem as error:
            fleet, problem = None, f"the store does not answer, so no request is accepted: {error.cause}"
        now = time.time()
        own = _in_order(row(each) | {"state": judged_state(each, fleet, now)} for each in instance.processes)
        if is_last or fleet is None or all(each["state"] != SILENT for each in own):
            break
        time.sleep(HEARTBEAT_INTERVAL_S + 0.5)  # reports may have expired while the store was away
    # The report of a process that has exited expires a little later, so those of former processes are left out.
    ours = {life for entry in instance.processes for life in entry.lives}
    others = [fleet_row(each) for each in fleet or () if each.life not in ours]
    return ProcessRows(own, _in_order(others), problem)


def judged_state(entry: ProcessEntry, fleet: Sequence[Process] | None, now: float) -> str:
    """The state of a supervised process, which counts only as far as the store confirms it.

    Args:
        fleet: the processes that report themselves in the store; None: it does not answer.
    """
    if entry.state != "ready" or not (entry.lives or fleet is None):  # no lives: of an older version
        return entry.state
    if fleet is None:
        return UNREACHABLE_STORE if entry.role == "redis" else NO_STORE
    is_new = now - entry.since < HEARTBEAT_TIMEOUT_S
    reports = entry.role == "redis" or any(each.life in entry.lives for each in fleet)
    return entry.state if reports or is_new else SILENT


def row(entry: ProcessEntry) -> dict[str, Any]:
    """A supervised process as JSON."""
    found = {name: value for name, value in msgspec.structs.asdict(entry).items() if name not in SUPERVISED}
    return timed(found | {"away_since": entry.away_since or None})


def fleet_row(process: Process) -> dict[str, Any]:
    """A process of the fleet's registry as JSON."""
    found = timed({name: getattr(process, name) for name in FLEET_FIELDS})
    return found | {"away": "; ".join(process.away)}


def verdict(instance: Instance) -> str:
    """The summary line: whether the instance serves requests, its URL, and its engines."""
    if instance.state != "ready":
        return f"{instance.state}: {instance.phase}" if instance.phase else instance.state
    if problem := instance.worker_problem():
        return problem
    return f"ready at {instance.url}, engine {instance.engine}"


def _in_order(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda one: ORDER.index(one["role"]))


TIMEOUT_S = 3.0


@command("probe", redis=False)
@click.argument("role", type=click.Choice(["api", "worker", "scheduler", "offline"]))
@click.option("--id", "name", help="The process's name in `penstock ps` [this machine's name].")
@click.option("--alive", is_flag=True, help="Ask only whether it lives, not whether it is ready.")
def probe(role: str, name: str | None, alive: bool, where: Where) -> None:
    """Exit 0 if a process of this ROLE on this machine is ready.

    With --alive a process that is starting or draining also counts, and so does every process while Redis is
    unavailable: a liveness probe must not kill it for that.

    \b
    Examples:
      penstock probe api
      penstock probe worker --id worker-1 --alive
    """
    config, instance = where.config(role), where.home().read()
    if role == "api":
        settings = config.section("api", ApiSettings)
        host = WILDCARDS.get(settings.host, settings.host)
        url = instance.url if instance else url_of(host, settings.port, settings.scheme)
        certificate = instance.certificate if instance else settings.tls_certificate
        _probe_api(url, "/healthz" if alive else "/readyz", certificate)
        return
    from cli.registry import processes  # noqa: PLC0415 - imports a Redis client, not needed for an API process

    try:
        found = processes(config, instance)
    except Problem as problem:
        if not alive:
            raise
        note(f"taken to live: {problem.cause}")
        return
    host = socket.gethostname()
    same = [each for each in found if (each.role, each.id) == (role, name or host)]
    states = {each.state for each in same if not name or each.host == host}  # other machines may have the same name
    if not states:
        what = f"{role} {name or host} has said nothing lately"
        raise Problem(what, next_step="penstock ps", exit_code=Exit.FAILED, code="not_running")
    if not alive and "ready" not in states:
        raise Problem(f"{role} {name or host} is {', '.join(sorted(states))}", code="not_ready")


def _probe_api(url: str, path: str, certificate: Path | str | None) -> None:
    import http.client  # noqa: PLC0415 - used by this probe alone

    address = urlsplit(url).netloc
    connected = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    if certificate:
        from api.tls import trusting  # noqa: PLC0415 - imports an event loop, which `ps` needs not

        connected = http.client.HTTPSConnection(address, timeout=TIMEOUT_S, context=trusting(certificate))
    try:
        with contextlib.closing(connected) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            status, body = answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        cause = str(error) or type(error).__name__
        raise Problem(f"nothing answers at {address}", cause=cause, code="unreachable") from None
    if status != 200:
        raise Problem(f"{path} answers {status}", cause=body.decode(errors="replace"), code="not_ready")


POLL_INTERVAL_S = 0.05


@command("down", redis=False)
@click.option("--now", "at_once", is_flag=True, help="Do not wait for running jobs; they stay in the queue.")
def down(at_once: bool, where: Where) -> None:
    """Drain and stop the instance that runs in the data folder; returns when it has ended.

    \b
    Examples:
      penstock down
      penstock down --now
      penstock down --data-dir /srv/penstock
    """
    home = where.home()
    instance = home.running()
    _terminate(instance.pid)
    with ProgressLine() as progress:
        progress.phase("stopping; unfinished jobs stay in the queue" if at_once else "draining")
        if at_once:
            # Two signals sent at once may be delivered as one.
            while (now := home.read()) is not None and now.state != "draining":
                time.sleep(POLL_INTERVAL_S)
            _terminate(instance.pid)
        while home.locked():
            if not at_once and (now := home.read()) is not None and now.state == "draining" and now.phase:
                progress.phase(f"draining: {now.phase}")
            time.sleep(POLL_INTERVAL_S)


def _terminate(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
        os.kill(pid, signal.SIGTERM)
