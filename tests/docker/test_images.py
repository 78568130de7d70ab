"""The images, as far as Dockerfiles tell: who runs what in them, with which settings and packages, and its end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docker_files import DOCKER, PROJECT, ROOT, SECTIONS, Stage, images, is_pinned, settings_only, stages, versions
from house import House, eventually

from bench.report import REVISION, commit
from penstock.config import load
from workers.engines.llamacpp.weights import SMOLLM2

IMAGES = images()
FILES = ["Dockerfile", "Dockerfile.tensorrt-llm"]
MODULES = {"api": "api", "scheduler": "scheduler", "offline": "offline", "worker": "workers"}
LOCKED = set(re.findall(r"^([a-z0-9-]+)==", (ROOT / "requirements.lock").read_text(encoding="utf-8"), re.MULTILINE))

ONLY = """
import importlib.abc, runpy, sys
allowed = set(sys.argv[1].split(",")) | sys.stdlib_module_names
class Only(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Only())
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""Runs a module where nothing but the named packages can be imported."""


def pip_commands(name: str) -> list[str]:
    """Every pip command of a Dockerfile that gets or builds something."""
    lines = {rest for stage in stages(name).values() for instruction, rest in stage.lines if instruction == "RUN"}
    commands = [command for line in lines for command in re.split(r"&&", line)]
    return [command for command in commands if re.search(r"-m pip\b", command)]


@pytest.mark.parametrize("image", IMAGES)
def test_one_process_that_may_little_and_ends_well(image: str) -> None:
    """Not root, nothing written beside /tmp, one module under an init, drained by SIGTERM."""
    role, stage = IMAGES[image]
    assert stage.last("USER") == "10001:10001"
    assert stage.last("STOPSIGNAL") == "SIGTERM"
    assert stage.environ()["PYTHONDONTWRITEBYTECODE"] == "1"
    *init, shell, flag, line, zero = stage.command("ENTRYPOINT")
    assert (init, shell, flag, zero) == (["tini", "--"], "sh", "-c", role)
    # `exec`: the process gets the signals itself. A name of its own: the fleet knows processes by name.
    assert re.fullmatch(rf'exec python3? -P -m penstock\.run {MODULES[role]} --id "\$HOSTNAME" "\$@"', line)


@pytest.mark.parametrize("image", IMAGES)
def test_its_variables_are_settings(image: str) -> None:
    """Each is known to the role and has a value it takes; metrics and API can be reached from other containers."""
    role, stage = IMAGES[image]
    config = load(SECTIONS[role], environ=settings_only(stage.environ()))
    shown = [(config.raw["telemetry"]["metrics_host"], config.raw["telemetry"]["metrics_port"])]
    if role == "api":
        shown.insert(0, (config.raw["api"]["host"], config.raw["api"]["port"]))
    assert shown == [("0.0.0.0", port) for port in stage.ports()]  # noqa: S104


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_installed_that_the_lock_does_not_name(name: str) -> None:
    """What comes from outside is checked by hash; everything else comes from what was checked."""
    commands = pip_commands(name)
    fetching = [command for command in commands if "--no-index" not in command]
    assert len(commands) >= 3 and len(fetching) == 1
    assert "download --no-cache-dir --require-hashes --only-binary :all:" in fetching[0]
    assert "--requirement requirements.lock" in fetching[0]


@pytest.mark.parametrize("name", FILES)
def test_bases_are_named_by_whoever_builds(name: str) -> None:
    """By a digest; without one there is no build, for no name stands in the file. Each has a version to look for."""
    bases = {stage.base for stage in stages(name).values()}
    assert bases == {"${PYTHON}"} | ({"${TENSORRT_LLM}"} if "tensorrt" in name else set())
    assert {f"{base[2:-1]}_IMAGE" for base in bases} <= set(versions())
    text = (DOCKER / name).read_text(encoding="utf-8")
    assert all(f"--build-arg {base[2:-1]}=" in text for base in bases), "nobody is told"


def test_the_versions_are_pinned_and_plainly_named() -> None:
    """Whose registry they come from is the builder's business; no digest is in the tree."""
    assert [image for image in versions().values() if not is_pinned(image)] == []
    asked = subprocess.run(["git", "grep", "-lE", "sha256:[0-9a-f]{64}", "--", "docker"], cwd=ROOT, check=False)
    assert asked.returncode in (1, 128)  # 128: an exported tree without git


@pytest.mark.parametrize(("target", "extra"), [("scheduler", "kubernetes"), ("worker", "llamacpp")])
def test_each_role_gets_what_it_may_be_set_to(target: str, extra: str) -> None:
    """Pods as a pool, an engine: without its extra a role would refuse the setting."""
    here = stages("Dockerfile")
    (packages,) = [rest.split()[0] for name, rest in here[target].lines if name == "COPY" and "packages" in rest]
    runs = [rest for name, rest in here[packages.removeprefix("--from=")].lines if name == "RUN"]
    (installed,) = [rest.partition("'penstock[")[2] for rest in runs if "'penstock[" in rest]
    assert extra in re.findall(r"\w+", installed)


def test_the_default_model_lies_where_the_worker_looks() -> None:
    """Its file name is the one `fetch` gives it."""
    stage: Stage = IMAGES["penstock-worker-smollm2"][1]
    path = Path(stage.environ()["PENSTOCK_LLAMACPP_PATH"])
    assert path.name == SMOLLM2.result
    assert ("COPY", f"--from=weights /weights {path.parent}") in stage.lines


def test_the_build_sees_what_the_package_is_made_of() -> None:
    """Everything is kept out of the build but what is let in, and that is all of it."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_in = {line.removeprefix("!") for line in lines if line.startswith("!")}
    project = PROJECT["project"]
    needed = {*PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"], project["readme"]}
    assert "*" in lines and {*needed, *project["license-files"], "pyproject.toml", "requirements.lock"} == let_in


@pytest.mark.slow
def test_a_worker_needs_no_more_than_the_tensorrt_llm_image_gets(empty_house: House) -> None:
    """There only a few packages are laid over the image's own: with these alone a worker runs, sends traces, and can be
    probed."""
    (command,) = [line for line in pip_commands("Dockerfile.tensorrt-llm") if "--target" in line]
    packages = command.split("--target /opt/penstock")[1].split()
    assert packages[0] == "penstock" and set(packages[1:]) <= LOCKED
    ours = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    allowed = ",".join([*ours, *packages[1:], "pydantic-core", "typing-extensions"])  # these come with TensorRT-LLM
    allowed = allowed.replace("-", "_")

    def run(*words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", ONLY, allowed, *words]
        environ = empty_house.environ | {"PENSTOCK_TELEMETRY_OTLP_ENDPOINT": "http://127.0.0.1:1"}
        return subprocess.Popen(command, env=environ, cwd=empty_house.folder)

    worker = run("penstock.run", "workers", "--id", "w")
    try:
        eventually(lambda: run("penstock", "probe", "worker", "--id", "w").wait(30) == 0)
    finally:
        worker.terminate()
    assert worker.wait(30) == 0


@pytest.mark.parametrize("image", IMAGES)
def test_a_builder_of_any_age_takes_its_health_check(image: str) -> None:
    """Buildah knows no --start-interval; compose and Kubernetes have checks of their own."""
    health = IMAGES[image][1].last("HEALTHCHECK")
    assert set(re.findall(r"--(\S+)=", health)) == {"interval", "timeout", "start-period"}


@pytest.mark.parametrize(
    ("answers", "chosen"), [("docker podman buildah", "docker"), ("podman buildah", "podman"), ("buildah", "buildah")]
)
def test_the_engine_that_answers_is_taken(tmp_path: Path, answers: str, chosen: str) -> None:
    """A command may be there without its daemon."""
    for name in ("docker", "podman", "buildah"):
        command = tmp_path / name
        command.write_text(f'#!/bin/sh\ncase $1 in info) case "{answers}" in *{name}*) ;; *) exit 1 ;; esac ;; esac\n')
        with command.open("a") as file:
            file.write(f'[ "$1" = info ] || echo "{name} $*"\n')
        command.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    ran = subprocess.run(
        ["sh", DOCKER / "engine", "build", "."], env=environ, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == f"{chosen} build ."


ENGINE_STUB = """#!/bin/sh
case $1 in
    --version) echo podman version 4.3 ;;
    import) tar -t >> "$LOG" ;;
    build) echo "$*" >> "$LOG" ;;
esac
"""
BUNDLE = "/etc/ssl/certs/ca-certificates.crt"


@pytest.mark.skipif(
    not (Path("/etc/os-release").exists() and Path(BUNDLE).exists()), reason="needs a Linux like Debian"
)
def test_the_authorities_of_this_machine_stay_in_no_image(tmp_path: Path) -> None:
    """With programs that only write down what they are asked: every build reads them, and the base has none."""
    log = tmp_path / "log"
    made = 'for root in "$@"; do if [ -d "$root" ]; then mkdir -p "$root/etc/ssl/certs"; fi; done'
    for name, text in {"docker": "exit 1", "podman": ENGINE_STUB, "debootstrap": made}.items():
        (tmp_path / name).write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    outside = {name: value for name, value in os.environ.items() if not name.endswith("_IMAGE")}
    environ = outside | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "LOG": str(log)}
    subprocess.run(["sh", DOCKER / "stand-ins", tmp_path], env=environ, check=True, capture_output=True)
    pairs = [line.partition("=") for line in (tmp_path / ".env").read_text().splitlines()]
    environ |= {name: value for name, _, value in pairs}
    subprocess.run(["sh", DOCKER / "build-images"], env=environ, check=True, capture_output=True)
    lines = log.read_text().splitlines()
    builds = [line for line in lines if line.startswith("build")]
    assert len(builds) > len(IMAGES) and all(f"--volume {BUNDLE}:{BUNDLE}:ro" in line for line in builds)
    assert "./etc/ssl/certs/" in lines and f".{BUNDLE}" not in lines


def test_every_image_names_the_commit_that_it_was_built_of(tmp_path: Path) -> None:
    """By it the programs that try images refuse those of another tree."""
    command = tmp_path / "docker"
    command.write_text(f'#!/bin/sh\n[ "$1" = build ] && echo "$*" >> {tmp_path}/built\n[ "$1" != image ]\n')
    command.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    bases = {"PYTHON_IMAGE": "python:1", "TENSORRT_LLM_IMAGE": "trtllm:1"}
    subprocess.run(["sh", DOCKER / "build-images"], env=environ | bases, check=True)
    built = (tmp_path / "built").read_text().splitlines()
    assert len(built) == 6 and all(f"--label {REVISION}={commit()} " in line for line in built)
