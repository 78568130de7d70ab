"""`penstock probe`: readiness and liveness probe of one process, for container health checks; answers by exit code.

For a HEALTHCHECK or a kubelet's exec probe. It probes an API process over HTTP. Other roles have no port, so it reads
their last report in the fleet's registry; a process whose event loop hangs stops reporting and is removed from it after
ten seconds.
"""

from __future__ import annotations

import http.client
import os
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

import click

from api.settings import ApiSettings
from cli import ports
from cli.options import Command, Where, where_options
from cli.output import DONE, FAILED, Problem, note
from streaming.fleet.process import Process

TIMEOUT_S = 3.0


@click.command(cls=Command)
@click.argument("role", type=click.Choice(["api", "worker", "scheduler", "offline"]))
@click.option("--id", "name", help="The process's name in `penstock ps` [this machine's name].")
@click.option("--alive", is_flag=True, help="Ask only whether it lives, not whether it is ready.")
@where_options(url=False, redis=False)
def probe(role: str, name: str | None, alive: bool, where: Where) -> int:
    """Exit 0 if a process of this ROLE on this machine is ready.

    With --alive a process that is starting or draining also counts, and so does every process while Redis is
    unavailable: a liveness probe must not kill it for that.

    \b
    Examples:
      penstock probe api
      penstock probe worker --id worker-1 --alive
    """
    config, instance = where.config(), where.home().read()
    if role == "api":
        settings = config.section("api", ApiSettings)
        address = urlsplit(instance.url) if instance else None
        host = address.hostname if address else ports.WILDCARDS.get(settings.host, settings.host)
        port = address.port if address else settings.port
        return _probe_api(host or "", port or 0, "/healthz" if alive else "/readyz")
    from cli.registry import processes  # noqa: PLC0415 - imports a Redis client, not needed for an API process

    try:
        found = processes(config, instance)
    except Problem as problem:
        if not alive:
            raise
        note(f"taken to live: {problem.cause}")
        return DONE
    host = socket.gethostname()
    return _probe_fleet(found, role, name or host, host if name else "", alive=alive)


def _probe_api(host: str, port: int, path: str) -> int:
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        status, body = answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise Problem(f"nothing answers at {host}:{port}", cause=_cause(error), code="unreachable") from None
    finally:
        connection.close()
    if status != 200:
        raise Problem(f"{path} answers {status}", cause=body.decode(errors="replace"), code="not_ready")
    return DONE


def _cause(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


def _probe_fleet(found: Sequence[Process], role: str, name: str, host: str, *, alive: bool) -> int:
    """Probe a process by its report. `host`: its machine, if other machines may run one of the same name; else ""."""
    states = {each.state for each in found if (each.role, each.id) == (role, name) and host in ("", each.host)}
    if not states:
        raise Problem(
            f"{role} {name} has said nothing lately", next_step="penstock ps", exit_code=FAILED, code="not_running"
        )
    if not alive and "ready" not in states:
        raise Problem(f"{role} {name} is {', '.join(sorted(states))}", code="not_ready")
    return DONE
