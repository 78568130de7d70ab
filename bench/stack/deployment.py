"""The compose deployment: starts a copy of it with the container engine that answers here (docker/engine)."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.chaos.asks import FIRST, authorization, configuration, key_of
from bench.http import fetch
from bench.ports import free_port

PROJECT = "penstock-test"
MODEL = "smollm2-135m-instruct"
ROLES = ("api", "worker", "scheduler", "offline")
COMMAND_TIMEOUT_S = 300
UNANSWERED = (OSError, http.client.HTTPException)


class StackError(Exception):
    """A command of the engine failed, or an answer is not what it must be."""


class Stack:
    """A copy of docker/ in `folder`, with ports, names and keys of its own, so that it may run beside the real one."""

    def __init__(self, folder: Path) -> None:
        self.docker = folder / "docker"
        self.compose = self.docker / "compose"
        self.port = free_port()
        shutil.copytree("docker", self.docker, ignore=shutil.ignore_patterns("penstock.toml", "secrets"))
        if not (self.compose / ".env").exists():
            raise StackError("docker/compose/.env is missing: make images says how to get it")
        text = (self.compose / "compose.yaml").read_text()
        for before, after in (
            ("name: penstock\n", f"name: {PROJECT}\n"),
            ("127.0.0.1:8000:8000", f"127.0.0.1:{self.port}:8000"),
            ("127.0.0.1:3000:3000", f"127.0.0.1:{free_port()}:3000"),
        ):
            assert text.count(before) == 1, before
            text = text.replace(before, after)
        (self.compose / "compose.yaml").write_text(text)
        self._run("sh", str(self.docker / "new-key"), str(self.compose))
        own = self.compose / "secrets" / "api.toml"
        own.write_text(own.read_text().replace("[keys.first]", "[keys.printed]") + configuration())

    def _run(self, *words: str, **environ: str) -> str:
        """What a command prints; podman-compose may lie beside Python. Raises StackError."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environ = {**os.environ, "PATH": path, **environ}
        try:
            done = subprocess.run(
                words, env=environ, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise StackError(f"{' '.join(words[1:4])}: not over within {COMMAND_TIMEOUT_S} s") from error
        if done.returncode:
            raise StackError(f"{' '.join(words[1:4])}: {done.stderr.strip()[-400:]}")
        return done.stdout

    # --- containers ---------------------------------------------------------------------------------------------------

    def engine(self, *words: str) -> str:
        """What a command of the engine prints. Raises StackError."""
        return self._run("sh", str(self.docker / "engine"), *words)

    def log(self, service: str) -> str:
        """What a container wrote to its standard output."""
        return self.engine("logs", self.containers()[service])

    def up(self) -> float:
        """Start everything that is not there, and wait until every role is ready. Returns the seconds it took."""
        began = time.monotonic()
        self._run("sh", str(self.docker / "stack"))
        return time.monotonic() - began

    def down(self, *words: str) -> None:
        """Remove the containers and networks; the volumes stay, unless `words` has --volumes."""
        self.engine("compose", "down", *words)

    def containers(self) -> dict[str, str]:
        """The name of each service's container."""
        mine = f"label=com.docker.compose.project={PROJECT}"
        names = self.engine("ps", "--all", "--filter", mine, "--format", "{{.Names}}").split()
        return {each["Config"]["Labels"]["com.docker.compose.service"]: each["Name"].lstrip("/")
                for each in self.inspected(*names)}  # fmt: skip

    def inspected(self, *names: str) -> list[dict[str, Any]]:
        """What the engine tells of containers or images."""
        return list(json.loads(self.engine("inspect", *names)))

    def image(self, name: str) -> str:
        """With its tag; "" if it is not built."""
        listed = self.engine("image", "ls", "--format", "{{.Repository}}:{{.Tag}}").split()
        return next((each for each in listed if f"/{each}".partition(f"/{name}:")[2]), "")

    def address(self, service: str, network: str) -> str:
        """Where this machine reaches a container that publishes no port."""
        (found,) = self.inspected(self.containers()[service])
        return str(found["NetworkSettings"]["Networks"][f"{PROJECT}_{network}"]["IPAddress"])

    # --- API ----------------------------------------------------------------------------------------------------------

    def ask(self, method: str, path: str, body: Any = None) -> tuple[dict[str, str], bytes]:
        """Headers and body of an answer to the first tenant's key, which is an admin's. Raises StackError."""
        headers = authorization(FIRST) | {"Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        status, found, answer = fetch(self.port, method, path, data, headers)
        if status >= 300:
            raise StackError(f"{method} {path}: {status} {answer.decode(errors='replace')[:200]}")
        return found, answer

    def penstock(self, *words: str) -> str:
        """Run a command of the CLI against this API. Raises StackError."""
        url = f"http://127.0.0.1:{self.port}"
        return self._run(sys.executable, "-m", "cli", *words, PENSTOCK_API_KEY=key_of(FIRST), PENSTOCK_URL=url)

    def simulate(self) -> None:
        """Restart all roles with the simulated engine, whose text the checker knows."""
        file = self.compose / "penstock.toml"
        file.write_text(file.read_text().replace('"llamacpp"', '"sim"'))
        names = self.containers()
        self.engine("restart", *(names[role] for role in ROLES))
        self.up()
