"""The scripts of docker/ with programs that only write down what they are asked."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from docker_files import DOCKER, SECTIONS

Run: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a script of docker/ in a copy of it; each program does what its lines of shell say."""
    shutil.copytree(DOCKER, tmp_path / "docker", ignore=shutil.ignore_patterns("penstock.toml", "secrets", ".env"))
    for made in (".env", "penstock.toml"):
        (tmp_path / "docker/compose" / made).touch()
    (tmp_path / "bin").mkdir()

    def run(*script: str | Path, **programs: str) -> subprocess.CompletedProcess[str]:
        for name, lines in ({"docker": "exit 1", "podman": "exit 1", "buildah": "exit 1"} | programs).items():
            program = tmp_path / "bin" / name.replace("_", "-")
            program.write_text(f"#!/bin/sh\n{lines}\n")
            program.chmod(0o755)
        name, *options = script
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environ = {**os.environ, "PATH": path, "PYTHON_IMAGE": "python", "TENSORRT_LLM_IMAGE": ""}
        command = ["sh", tmp_path / "docker" / name, *options]
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)

    return run


def test_no_image_is_built_after_one_that_failed(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "log"
    ran = run("build-images", docker=f'case "$*" in build*scheduler*) exit 1 ;; build*) echo "$*" >> {log} ;; esac')
    assert ran.returncode == 1 and "penstock-scheduler" in ran.stderr
    (built,) = log.read_text().splitlines()
    assert "--target api" in built


def test_a_stack_is_up_once_every_role_is_ready(run: Run, tmp_path: Path) -> None:
    """Which is more than alive."""
    log = tmp_path / "log"
    ran = run("stack", docker=f'case "$*" in *exec*) echo "$*" >> {log} ;; esac')
    assert ran.returncode == 0
    asked = [line.partition(" penstock ")[2] for line in log.read_text().splitlines()]
    assert sorted(asked) == sorted(f"probe {role}" for role in SECTIONS)


def test_a_stack_that_does_not_get_ready_is_named(run: Run, tmp_path: Path) -> None:
    """After two minutes, by the clock of this test."""
    docker = 'case "$*" in *"exec -T scheduler"*) exit 1 ;; esac'
    date = f"cat {tmp_path}/now 2> /dev/null || echo 0; echo 121 > {tmp_path}/now"
    ran = run("stack", docker=docker, date=date, sleep="exit 9")
    assert ran.returncode == 1 and "scheduler is not ready" in ran.stderr


@pytest.mark.parametrize(("engine", "form"), [("docker", ""), ("podman", "docker"), ("buildah", "docker")])
def test_images_keep_their_health_checks(run: Run, engine: str, form: str) -> None:
    """Buildah's own format has none, and podman builds with it."""
    assert run("engine", "build", **{engine: "echo $BUILDAH_FORMAT"}).stdout.strip() == form


def test_an_old_podman_gets_no_option_that_it_does_not_know(run: Run) -> None:
    compose = 'case "$*" in *version) ;; *) cat ;; esac'
    shown = run("engine", "compose", "up", podman="", podman_compose=compose).stdout
    written = (DOCKER / "compose/compose.yaml").read_text()
    assert shown.splitlines() == [line for line in written.splitlines() if "start_interval:" not in line] != []
    assert "start_interval:" in written


def test_what_has_no_stand_in_is_not_started(run: Run, tmp_path: Path) -> None:
    """The names of all others are those of images that were built."""
    log = tmp_path / "log"
    assert run("stand-ins", tmp_path, docker=f'case "$*" in build*) echo "$*" >> {log} ;; esac').returncode == 0
    made = dict(line.split("=", 1) for line in (tmp_path / ".env").read_text().splitlines())
    named = {value for name, value in made.items() if name.endswith("_IMAGE") and name != "PYTHON_IMAGE"}
    assert {each for each in named if f"--tag {each} " not in log.read_text()} == {made["GRAFANA_IMAGE"]}
    assert made["GRAFANA_SCALE"] == "0"
