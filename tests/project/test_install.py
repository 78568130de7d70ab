"""An installed wheel: what it adds to site-packages, and that it serves, measures and starts processes from there.

The wheel is installed into an environment that sees the dependencies of this one but not the checkout.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import penstock

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BUNDLED = ("api", "workers", "scheduler", "offline", "planner", "streaming", "telemetry", "cli", "bench")


class Installation:
    """An environment in which the wheel is the only Penstock."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.home, self.cwd = folder / "environment", folder / "elsewhere"
        self.cwd.mkdir()
        _run(sys.executable, "-m", "venv", "--without-pip", self.home)
        (self.packages,) = self.home.glob("lib/python3*/site-packages")
        self.names_before = self.names()
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.home)
        _run(*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", wheel)
        self.names_added = self.names() - self.names_before
        # Of a folder that a .pth file names, Python reads no .pth files: the checkout stays out.
        dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (self.packages / "dependencies.pth").write_text("\n".join(sorted(dependencies)) + "\n")
        left_out = ("PENSTOCK_", "PYTHON", "COV", "VIRTUAL_ENV")
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        self.environ |= {"PENSTOCK_SIM_STEP_MS": "2", "PENSTOCK_SIM_PREFILL_MS": "2"}

    def names(self) -> set[str]:
        return {path.name for path in self.packages.iterdir()}

    def run(self, program: str, *words: object) -> str:
        """A program of the environment, to its end. Returns what it wrote on stdout."""
        return _run(self.home / "bin" / program, *words, cwd=self.cwd, env=self.environ)

    @contextmanager
    def serving(self, **environ: str) -> Iterator[dict[str, Any]]:
        """`penstock up`. Yields the state of the instance."""
        command = [self.home / "bin" / "penstock", "up", "--port", "0"]
        env = {**self.environ, **environ}
        with subprocess.Popen(command, cwd=self.cwd, env=env, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None and any("Stop" in line for line in process.stdout)
                yield json.loads((self.cwd / ".penstock" / "run" / "state.json").read_text())
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(60)


def _run(*words: object, **options: Any) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist and the wheel of this tree."""
    folder = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "hatchling", "build", "--directory", folder, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def installation(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    (wheel,) = built.glob("*.whl")
    return Installation(tmp_path_factory.mktemp("installed"), wheel)


def test_the_sdist_makes_the_same_wheel(built: Path, tmp_path: Path) -> None:
    """Without the checkout, as package builders do. The examples are in the sdist alone, with the tests that run
    them."""
    (source,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
        packed = {name.partition("/")[2] for name in archive.getnames()}
    programs = {f"examples/{path.name}" for path in (ROOT / "examples").iterdir() if path.is_file()}
    assert "examples/job.py" in programs and programs <= packed and "tests/examples/test_examples.py" in packed
    (folder,) = tmp_path.iterdir()
    _run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", tmp_path, cwd=folder)
    (again,) = tmp_path.glob("*.whl")
    assert again.name == wheel.name == f"penstock-{penstock.__version__}-py3-none-any.whl"
    assert _contents(again) == _contents(wheel)
    assert not [name for name in _contents(wheel) if "examples/" in name]


def _contents(wheel: Path) -> dict[str, int]:
    """Checksums by file name."""
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist()}


def test_nothing_but_penstock_is_put_into_site_packages(installation: Installation) -> None:
    assert installation.names_added == {"penstock", f"penstock-{penstock.__version__}.dist-info"}


def test_the_plain_names_are_left_to_others(installation: Installation) -> None:
    """Penstock and its client, which is for programs with packages called `api` of their own, are imported without them
    and need no bundle on the path."""
    found = f"""
import importlib.util, sys
import penstock, penstock.client
names = [name for name in {BUNDLED} if name in sys.modules or importlib.util.find_spec(name)]
print(penstock.__file__, penstock.__version__, names, [path for path in sys.path if "_bundle" in path])
"""
    said = installation.run("python", "-P", "-c", found)
    assert said == f"{installation.packages / 'penstock' / '__init__.py'} {penstock.__version__} [] []\n"


MODELS = """
[models.toy]
engine = "sim"
[models.a]
engine = "echo_of_a_path:Echo"
[models.b]
engine = "echo"
"""


@pytest.fixture(scope="module")
def instance(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Three models: the engine of one can only be found by PYTHONPATH, and that of another belongs to a package that is
    installed. It starts where a folder is named `api`."""
    (installation.cwd / "api").mkdir()
    (installation.cwd / "api" / "__main__.py").write_text("raise SystemExit('a stranger')")
    (installation.cwd / "penstock.toml").write_text(MODELS)
    engine, path = (ROOT / "examples/engine/echo_engine.py").read_bytes(), tmp_path_factory.mktemp("path")
    (path / "echo_of_a_path.py").write_bytes(engine)
    (installation.packages / "echo_engine.py").write_bytes(engine)
    info = installation.packages / "penstock_echo_engine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock-echo-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[penstock.engines]\necho = echo_engine:Echo\n")
    with installation.serving(PYTHONPATH=str(path)) as instance:
        yield instance


def test_it_serves_and_measures_from_the_wheel(installation: Installation, instance: dict[str, Any]) -> None:
    """Every process imports the bundle, also what a program of `bench` starts."""
    assert installation.run("penstock", "chat", "--model", "toy", "hello").strip()
    bundle = installation.packages / "penstock" / "_bundle"
    assert len(instance["processes"]) >= 4
    for process in instance["processes"]:
        if process["role"] != "redis" and Path("/proc/self/environ").exists():
            environ = Path(f"/proc/{process['pid']}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{process['pid']}/cmdline").read_bytes().split(b"\0")
            assert any(each.startswith(f"PYTHONPATH={bundle}{os.pathsep}".encode()) for each in environ)
            assert command[0] == os.fsencode(installation.home / "bin" / "python")
    words = ("--systems", "penstock", "--rounds", "1", "--seconds", "1", "--callers", "2", "--out", "results")
    installation.run("penstock", "bench", "jobs", *words)
    assert (installation.cwd / "results" / "jobs.json").exists()


@pytest.mark.parametrize("model", ["a", "b"])
@pytest.mark.usefixtures("instance")
def test_it_serves_plug_ins(installation: Installation, model: str) -> None:
    """They import `penstock.engine` of the wheel, and the bundle does not hide them."""
    assert installation.run("penstock", "chat", "--model", model, "one two three").split() == ["one", "two", "three"]
