"""Resumable downloader of a Python package's wheel, from the address that the user's own pip names."""

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


class _Report(msgspec.Struct):
    """The part of pip's installation report that matters here."""

    class Item(msgspec.Struct):
        class Info(msgspec.Struct):
            url: str

        download_info: Info

    install: list[Item]


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
        return msgspec.json.decode(asked.stdout, type=_Report).install[0].download_info.url
    except (msgspec.MsgspecError, IndexError) as error:
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
    """OnBytes received so far. A file that is too long is not from this download and is deleted."""
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
