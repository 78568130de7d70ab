"""Finds a package's file through the user's own pip, and downloads it so that an interruption loses nothing."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import httpx2
import msgspec

ATTEMPTS = 4
"""Connections tried in a row without a single new byte before giving up."""

TIMEOUT_S = 30.0
"""Without a byte for so long, a connection is taken to be dead."""

RETRY_S = 0.5
"""Before the second try; each further one waits that much longer."""

PIP_TIMEOUT_S = 180.0


Bytes: TypeAlias = Callable[[int, int], None]
"""Called with the bytes that are there and the bytes there will be."""


class DownloadInterrupted(Exception):
    """Raised when the file cannot be had now. What has arrived stays."""


class _Report(msgspec.Struct):
    """The part of pip's installation report that matters here."""

    class Item(msgspec.Struct):
        class Info(msgspec.Struct):
            url: str

        download_info: Info

    install: list[Item]


def locate(requirement: str) -> str:
    """The address of the wheel pip would install for a pinned requirement. Raises Interrupted."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet"]
    command += ["--only-binary", ":all:", "--report", "-", requirement]
    try:
        asked = subprocess.run(command, capture_output=True, timeout=PIP_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DownloadInterrupted(f"pip does not answer ({type(error).__name__})") from error
    if asked.returncode != 0:
        raise DownloadInterrupted(f"pip cannot find it: {_last_line(asked.stderr)}")
    try:
        return msgspec.json.decode(asked.stdout, type=_Report).install[0].download_info.url
    except (msgspec.MsgspecError, IndexError) as error:
        raise DownloadInterrupted("pip's report is not understood; version 22.2 or newer is needed") from error


def download(url: str, part: Path, size: int, on_bytes: Bytes) -> None:
    """Complete `part` to `size` bytes, going on from what it holds. Raises Interrupted, OSError."""
    if url.startswith("file:"):
        _copy(Path(urllib.request.url2pathname(urllib.parse.urlsplit(url).path)), part, size, on_bytes)
        return
    failures = 0
    with httpx2.Client(follow_redirects=True, timeout=TIMEOUT_S, verify=ssl.create_default_context()) as client:
        while (before := _held(part, size)) < size:
            problem = _more(client, url, part, size, on_bytes)
            failures = 0 if _held(part, size) > before else failures + 1
            if problem and failures >= ATTEMPTS:
                raise DownloadInterrupted(problem)
            time.sleep(RETRY_S * failures)


def _more(client: httpx2.Client, url: str, part: Path, size: int, on_bytes: Bytes) -> str:
    """One connection. Returns what went wrong, or "". Raises Interrupted when trying again is of no use."""
    at = _held(part, size)
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={at}-"} if at else {})
    try:
        with client.stream("GET", url, headers=headers) as response:
            if 400 <= response.status_code < 500:
                raise DownloadInterrupted(f"the package index answers {response.status_code}")
            if response.status_code not in (200, 206):
                return f"the package index answers {response.status_code}"
            resumed = response.headers.get("content-range", "").startswith(f"bytes {at}-")
            with part.open("ab" if at and response.status_code == 206 and resumed else "wb") as out:
                # As it arrives: gathered into larger pieces, the last would be lost with the connection.
                for chunk in response.iter_raw():
                    out.write(chunk)
                    on_bytes(out.tell(), size)
    except httpx2.HTTPError as error:
        return f"the connection broke ({type(error).__name__})"
    return "" if _held(part, size) == size else "the connection ended early"


def _held(part: Path, size: int) -> int:
    """Bytes that are there already. A file that is too long is none of ours, and is dropped."""
    held = part.stat().st_size if part.exists() else 0
    if held > size:
        part.unlink()
        return 0
    return held


def _copy(source: Path, part: Path, size: int, on_bytes: Bytes) -> None:
    try:
        with source.open("rb") as file, part.open("wb") as out:
            shutil.copyfileobj(file, out)
    except FileNotFoundError as error:
        raise DownloadInterrupted(f"{source} is not there") from error
    on_bytes(part.stat().st_size, size)


def _last_line(text: bytes) -> str:
    lines = [line for line in text.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no reason given"
