"""A server with the users of docker/redis/users.acl, each with a password, and Penstock's roles as these users."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from house import House, free_port, redis_process
from redis import Redis

from streaming.store.acl import SCRIPTS, acl_file

MODULES = {"api": "api", "workers": "worker", "scheduler": "scheduler", "offline": "offline"}
"""The role of each module that is started."""
PASSWORD = "not-a-secret"


class GuardedHouse(House):
    """Each role is a user of its own. The test itself, and whatever has no role, is root."""

    def start(self, role: str, *args: str, **environ: str) -> subprocess.Popen[bytes]:
        """As the role's user."""
        return super().start(role, *args, **{"PENSTOCK_REDIS_URL": as_user(self.redis_url, MODULES[role]), **environ})

    def denied(self) -> list[dict[str, str]]:
        """What was refused since the start, or since it was asked last, but for CONFIG: no role may read passwords. A
        worker that is first on a server tries to load the functions, and then waits for another process."""
        with Redis.from_url(self.redis_url, decode_responses=True) as root:
            entries: list[dict[str, str]] = root.acl_log()
            root.acl_log_reset()
        by_workers = {"function|load", "function|list"}
        return [
            entry
            for entry in entries
            if entry["object"] != "config|get" and not (entry["username"] == "worker" and entry["object"] in by_workers)
        ]


def as_user(url: str, name: str) -> str:
    """The same address with another login."""
    return f"redis://{name}:{PASSWORD}@{url.rpartition('@')[2]}"


def users(text: str) -> str:
    """An ACL file in which all users of Penstock have the same password and are on, and `root` is a test's own."""
    lines = [
        f"{line} on >{PASSWORD}" if line.split()[1] in (*SCRIPTS, "operator") else line for line in text.splitlines()
    ]
    return "\n".join([*lines, f"user root on >{PASSWORD} ~* &* +@all", ""])


@contextmanager
def guarded(folder: Path) -> Iterator[GuardedHouse]:
    """An empty server with these users."""
    (folder / "users.acl").write_text(users(acl_file()))
    options = ("--appendonly", "yes", "--maxmemory", "256mb", "--aclfile", str(folder / "users.acl"))
    port = free_port()
    with (
        redis_process(folder, port, *options, login={"username": "root", "password": PASSWORD}),
        GuardedHouse(f"redis://root:{PASSWORD}@127.0.0.1:{port}/0", folder) as house,
    ):
        yield house
