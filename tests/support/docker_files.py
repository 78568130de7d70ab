"""What the tests of docker/ read: Dockerfiles by stage, YAML, and a folder of settings made the way people make it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml

from api.__main__ import SECTIONS as API
from offline.__main__ import SECTIONS as OFFLINE
from penstock.config import Config, load
from scheduler.__main__ import SECTIONS as SCHEDULER
from workers.__main__ import SECTIONS as WORKER

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE = DOCKER / "compose"
MONITORING = DOCKER / "monitoring"
KUBERNETES = DOCKER / "kubernetes"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
VERSION = PROJECT["project"]["version"]

SECTIONS: dict[str, dict[str, type[msgspec.Struct]]] = {
    "api": API, "worker": WORKER, "scheduler": SCHEDULER, "offline": OFFLINE,
}  # fmt: skip
"""The settings each role reads."""

FILES = "/var/lib/penstock/files"
"""Where files and batches lie in a container."""

SLACK_S = 10
"""What a role gets beyond the times its settings name before it is killed."""


@dataclass
class Stage:
    """One stage of a Dockerfile, with all it has from the stage it is built on."""

    base: str
    """The image at the bottom."""
    lines: list[tuple[str, str]] = field(default_factory=list)
    """(instruction, the rest)."""

    def last(self, instruction: str) -> str:
        return [rest for name, rest in self.lines if name == instruction][-1]

    def ports(self) -> list[str]:
        """What it listens at, the first for requests."""
        return self.last("EXPOSE").split()

    def command(self, instruction: str) -> list[str]:
        """A HEALTHCHECK or ENTRYPOINT in exec form. Raises ValueError for the shell form."""
        return list(json.loads("[" + self.last(instruction).partition("[")[2]))

    def environ(self) -> dict[str, str]:
        pairs = [re.findall(r"(\w+)=(\S*)", rest) for name, rest in self.lines if name == "ENV"]
        return dict(pair for line in pairs for pair in line)


def stages(name: str) -> dict[str, Stage]:
    """The stages of docker/<name> by their names."""
    text = (DOCKER / name).read_text(encoding="utf-8")
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    arguments: dict[str, str] = {}
    found: dict[str, Stage] = {}
    stage = Stage("")
    for line in filter(str.strip, text.splitlines()):
        instruction, rest = line.split(None, 1)
        if instruction == "ARG":
            name, _, value = rest.partition("=")
            arguments[name] = value or f"${{{name}}}"  # the builder must say it
        elif instruction == "FROM":
            base, _, title = rest.partition(" AS ")
            base = re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], base)
            below = found.get(base)
            stage = found[title] = Stage(below.base, list(below.lines)) if below else Stage(base)
        else:
            stage.lines.append((instruction, rest))
    return found


def images() -> dict[str, tuple[str, Stage]]:
    """What is built, by image name: the role in it, and its stage."""
    here = stages("Dockerfile")
    return {
        "penstock-api": ("api", here["api"]),
        "penstock-scheduler": ("scheduler", here["scheduler"]),
        "penstock-offline": ("offline", here["offline"]),
        "penstock-worker": ("worker", here["worker"]),
        "penstock-worker-smollm2": ("worker", here["worker-smollm2"]),
        "penstock-worker-tensorrt-llm": ("worker", stages("Dockerfile.tensorrt-llm")["worker"]),
    }


def documents(path: Path) -> list[Any]:
    """Every document of a YAML file."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def document(path: Path) -> Any:
    """The only document of a YAML file."""
    (found,) = documents(path)
    return found


def new_key(folder: Path, to: Path) -> tuple[Path, str]:
    """Let docker/new-key make the settings of `folder` in a copy of it; the file, and the key."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("penstock.toml", "secrets", ".env"))
    made = subprocess.run(["sh", DOCKER / "new-key", to], capture_output=True, text=True, check=True)
    return to / "penstock.toml", made.stdout.strip()


def config_of(role: str, settings: Path, environ: dict[str, str]) -> Config:
    """The settings of a role's container: those of all, and those that were made for it alone."""
    own = settings.parent / "secrets" / f"{role}.toml"
    return load(SECTIONS[role], path=settings, own=own if own.exists() else None, environ=environ)


def settings_only(environ: dict[str, str]) -> dict[str, str]:
    """The variables that are ours."""
    return {name: value for name, value in environ.items() if name.startswith("PENSTOCK_")}


def versions() -> dict[str, str]:
    """The images of docker/images, by the variable that holds the digest of each."""
    lines = (DOCKER / "images").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=") for line in lines if not line.startswith("#"))


def logins(folder: Path) -> dict[str, str]:
    """What docker/new-key has made in `folder` for each role: the address of Redis with its password."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted((folder / "secrets").iterdir())}
    urls = {role: re.findall(r'^(?:PENSTOCK_REDIS_URL=|url = ")([^"\s]+)', text, re.M) for role, text in texts.items()}
    return {role: found[0] for role, found in urls.items() if found}


DOCKER_STUB = """#!/bin/sh
case "$*" in
    "pull --quiet $BROKEN") exit 1 ;;
    pull* | info) ;;
    "image inspect"*)
        for image in "$@"; do :; done
        case $image in $LOCAL) echo ;; *) echo "other@sha256:$ZEROS"; echo "${image%:*}@sha256:$ONES" ;; esac ;;
    *) exit 2 ;;
esac
"""
ONES = "1" * 64


def pin(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """docker/pin-images with a docker that knows every image, but for one that is broken or in no registry."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    (tools / "docker").write_text(DOCKER_STUB)
    (tools / "docker").chmod(0o755)
    known = {"ONES": ONES, "ZEROS": "0" * 64, "BROKEN": "-", "LOCAL": "-"}
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["sh", DOCKER / "pin-images", *words],
        env={**os.environ, **known, **environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def is_pinned(image: str) -> bool:
    """A plain name, without the address of a registry, with a tag that names one version."""
    name, _, tag = image.rpartition(":")
    host = name.split("/")[0] if "/" in name else ""
    return bool(re.match(r"v?\d+\.\d+", tag)) and "." not in host and "@" not in image
