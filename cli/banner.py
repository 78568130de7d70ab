"""Text that `penstock up` prints when it is ready (addresses, folders, next commands), while it starts and drains."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from urllib.parse import urlsplit

from cli.child import Child
from cli.instance import Instance
from cli.settings import UpSettings

QUESTION = "What is a penstock?"


def ready_block(instance: Instance, *, detached: bool = False, keyed: bool = False) -> list[str]:
    """The lines printed when everything is ready: at most nine, with the next commands last."""
    workers = sum(entry.role == "worker" for entry in instance.processes)
    here = Path(instance.data_dir)
    option = "" if here == UpSettings().data_dir.absolute() else f" --data-dir {shlex.quote(_short(here))}"
    return [
        f"penstock {instance.version}   engine {instance.engine}   model {', '.join(instance.models)}   "
        f"{counted(workers, 'worker')}   ready in {instance.ready_s:.1f} s",
        f"  API    {instance.url}/v1",
        *([f"  API    {instance.outside_url}/v1 (other machines)"] if instance.outside_url else []),
        f"  Kept   {_kept(instance)}",
        f"  Log    {_short(here / 'logs')}",
        "",
        f"  Try    {_curl(instance, keyed=keyed)}",
        f'         penstock chat{option} "{QUESTION}"',
        f"  Stop   penstock down{option}" if detached else "  Stop   Ctrl-C (finishes running jobs, again to stop now)",
    ]


def draining(jobs: int | None) -> str:
    """The message after the first Ctrl-C; `jobs` is None if the number is unknown."""
    return f"draining{'' if jobs is None else ' ' + counted(jobs, 'job')}, Ctrl-C again to stop now"


def phase(children: list[Child]) -> str:
    """What `up` waits for, or "": a process that reports a phase, else the first that is not ready."""
    waiting = [child for child in children if child.status.state in ("starting", "restarting")]
    if not waiting:
        return ""
    child = next((child for child in waiting if child.status.detail), waiting[0])
    if child.status.state == "restarting":
        return f"{child.program.id}: waiting to start it again"
    return f"{child.program.id}: {child.status.detail or 'starting'}"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _kept(instance: Instance) -> str:
    here = Path(instance.data_dir)
    if any(entry.role == "redis" for entry in instance.processes):
        return f"{_short(here)}  (queue and results survive a restart)"
    return f"in Redis at {place(instance.redis_url)}"


def place(redis_url: str) -> str:
    """The address of a Redis URL (it may name several hosts), without its password."""
    parts = urlsplit(redis_url)
    return parts.netloc.rpartition("@")[2] or parts.path


def _short(path: Path) -> str:
    """The path relative to the current folder, if it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _curl(instance: Instance, *, keyed: bool) -> str:
    body = {"model": instance.models[0], "messages": [{"role": "user", "content": QUESTION}], "stream": True}
    key = ' -H "Authorization: Bearer $PENSTOCK_API_KEY"' if keyed else ""
    data = shlex.quote(json.dumps(body, separators=(",", ":")))
    return f"curl -N {instance.url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {data}"
