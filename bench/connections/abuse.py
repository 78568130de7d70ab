"""Requests that no server should take, one at a time: what each is answered, and how much memory it costs."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.processes import status_mib

HOST = "127.0.0.1"
WAIT_TIMEOUT_S = 60.0
MIB = 1024 * 1024
PIECE = b"x" * 65536
CHAT = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
SETTLE_S = 0.5


@dataclass(frozen=True, slots=True)
class Abuse:
    """One request, as the pieces it is sent in."""

    name: str
    pieces: Callable[[], Iterator[bytes]]


@dataclass(frozen=True, slots=True)
class AbuseCost:
    """What came of one."""

    name: str
    status: int
    """0: the connection ended without an answer."""
    memory_mib: float
    """The process's peak beyond what it had before."""
    seconds: float
    code: str = ""
    """Of the error."""


def one_field(size: int) -> Iterator[bytes]:
    yield b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Large: "
    for _ in range(size // len(PIECE)):
        yield PIECE
    yield b"\r\n\r\n"


def many_fields(size: int) -> Iterator[bytes]:
    yield b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
    fields = b"".join(b"x-%07d: y\r\n" % number for number in range(4096))
    for _ in range(size // len(fields)):
        yield fields
    yield b"\r\n"


def announced_body(size: int) -> Iterator[bytes]:
    yield f"{CHAT}Content-Length: {size}\r\n\r\n".encode()
    for _ in range(size // len(PIECE)):
        yield PIECE


def chunked_body(size: int) -> Iterator[bytes]:
    yield f"{CHAT}Transfer-Encoding: chunked\r\n\r\n".encode()
    for _ in range(size // len(PIECE)):
        yield b"%x\r\n" % len(PIECE) + PIECE + b"\r\n"
    yield b"0\r\n\r\n"


def json_body(body: bytes) -> Iterator[bytes]:
    yield f"{CHAT}Content-Length: {len(body)}\r\n\r\n".encode() + body


def _extra(value: bytes) -> bytes:
    return b'{"model":"bench","messages":[{"role":"user","content":"x"}],"x":' + value + b"}"


def _nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


ABUSES = (
    Abuse("2 MB header field", lambda: one_field(2 * MIB)),
    Abuse("91 MiB of header fields", lambda: many_fields(91 * MIB)),
    Abuse("100 MB body, announced", lambda: announced_body(100 * MIB)),
    Abuse("100 MB body, in chunks", lambda: chunked_body(100 * MIB)),
    Abuse("25,000-deep JSON, of too many values", lambda: json_body(_extra(_nested(25_000)))),
    Abuse("5,000-deep JSON, light enough, beyond the parser's depth", lambda: json_body(_extra(_nested(5_000)))),
    Abuse("100-deep JSON, beyond the depth of a request", lambda: json_body(_extra(_nested(100)))),
    Abuse("2 MB of empty lists", lambda: json_body(_extra(b"[" + b"[]," * (2 * MIB // 3 - 100) + b"1]"))),
)


def try_abuse(abuse: Abuse, port: int, pid: int) -> AbuseCost:
    """Send it to the process with that pid, and wait until its connection has ended."""
    before = _reset_peak_mib(pid)
    began = time.monotonic()
    status, code = _send(abuse, port)
    seconds = time.monotonic() - began
    time.sleep(SETTLE_S)
    return AbuseCost(abuse.name, status, max(0.0, status_mib(pid, "VmHWM") - before), seconds, code)


def _send(abuse: Abuse, port: int) -> tuple[int, str]:
    """Status and code of the answer; 0 without one."""
    with socket.create_connection((HOST, port), WAIT_TIMEOUT_S) as line:
        with contextlib.suppress(OSError):  # it may be cut off in the middle, and still have an answer to read
            for piece in abuse.pieces():
                line.sendall(piece)
        response = http.client.HTTPResponse(line)
        try:
            response.begin()
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError):
            return 0, ""
        return response.status, str((answer.get("error") or {}).get("code", ""))


def _reset_peak_mib(pid: int) -> float:
    """Its memory now, from which its peak is counted anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return status_mib(pid, "VmRSS")
