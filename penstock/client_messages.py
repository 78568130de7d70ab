"""Events and errors of the client, and its parser of server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

Json = dict[str, Any]

NEWER_VERSION = "newer_version"
"""Code of a server that cannot read a job: one that is upgraded already may."""
NO_CAPACITY = "no_capacity"
"""Code of the answer to a request that must not queue; also of a store that has no room now."""
DEADLINE_UNREACHABLE = "deadline_unreachable"
"""Code of the answer to a request that would not start in the time that it allows. A client that waited before the next
try would only move the wait out of the queue."""


class PenstockError(Exception):
    """Base class of this client's errors."""


class InvalidAddress(PenstockError, ValueError):
    """Raised when an address of a server is none."""


class InvalidRequest(PenstockError, ValueError):
    """Raised when a request cannot be sent as it is."""


class NoAnswer(PenstockError):
    """Raised when no server has answered for as long as the client was told to try."""

    def __init__(self, url: str, cause: str) -> None:
        super().__init__(f"no penstock answers at {url}: {cause}")
        self.url, self.cause = url, cause


class ApiRefusal(PenstockError):
    """Raised when a server refuses a request, and another try cannot help or did not help in time."""

    def __init__(self, status: int, code: str, message: str, *, param: str = "", request_id: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.param, self.request_id = param, request_id


class JobFailed(PenstockError):
    """Raised when a job has ended in any state but completed; `job` is the job object."""

    def __init__(self, job: Json) -> None:
        error = job.get("error") or {}
        self.job, self.status = job, str(job["status"])
        self.code, self.message = str(error.get("code") or self.status), str(error.get("message") or "")
        super().__init__(f"the job ended as {self.status}" + (f": {self.message}" if self.message else ""))


class StreamReset(PenstockError):
    """Raised when the store lost tokens of a stream and others replaced them: the two texts must not be joined.

    Discard what came before. `stream(job_id, after=error.cursor)` then has all events from the new beginning.
    """

    def __init__(self, job_id: str, event: StreamEvent) -> None:
        super().__init__(f"the store lost part of the stream of {job_id}, which begins again")
        self.job_id, self.event, self.cursor = job_id, event, event.id


class EventsUnreadable(PenstockError):
    """Raised when the server cannot read a job's events to their end, or sends one that is no JSON object."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class WaitTimeout(PenstockError):
    """Raised when the time of a wait is over; the job goes on. `job` is the job object as last seen, if it was."""

    def __init__(self, job_id: str, timeout_s: float, job: Json | None) -> None:
        super().__init__(f"{job_id} has not ended after {timeout_s:g} s; it goes on")
        self.job_id, self.job = job_id, job


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a job: `queued`, `queue.position`, `started`, `interrupted`, `delta`, or the end, named after its
    final state."""

    name: str
    id: str
    """The cursor to resume after this event."""
    data: Json

    @property
    def text(self) -> str:
        """The text of a delta; "" of every other event."""
        return str(self.data["text"]) if self.name == "delta" else ""

    @property
    def choice(self) -> int:
        """The index of the choice that a delta belongs to."""
        return int(self.data.get("index", 0))


class ServerSentEvent(NamedTuple):
    """One server-sent event. `id` is the last id of the stream so far."""

    name: str
    id: str
    data: str


class EventParser:
    """Parses server-sent events from the pieces of a stream; comments and events without data are skipped."""

    def __init__(self) -> None:
        self._lines = LineSplitter()
        self._name = self._id = ""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> Iterator[ServerSentEvent]:
        """Yield the events that are complete with this piece."""
        for data_line in self._lines.feed(piece):
            line = data_line.removesuffix(b"\r").decode(errors="replace")
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            match field:
                case "" if not line:
                    if self._data:
                        yield ServerSentEvent(self._name or "message", self._id, "\n".join(self._data))
                    self._name, self._data = "", []
                case "event":
                    self._name = value
                case "id":
                    self._id = value
                case "data":
                    self._data.append(value)


class LineSplitter:
    """Splits the pieces of a stream into lines. They end at a newline only: text may hold other line separators."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the lines that are complete with this piece."""
        first, *others = piece.split(b"\n")
        self._rest.append(first)
        for line in others:
            yield b"".join(self._rest)
            self._rest = [line]


def lines_of(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a whole stream that are not empty."""
    splitter = LineSplitter()
    for piece in pieces:
        yield from filter(None, splitter.feed(piece))


def refusal_of(status: int, body: bytes, request_id: str) -> ApiRefusal:
    """The error for an answer of 400 or more, whoever wrote it."""
    try:
        error = json.loads(body)["error"]
        message, code, param = str(error["message"]), str(error["code"]), str(error.get("param") or "")
    except (ValueError, KeyError, TypeError):  # a proxy's own page
        message, code, param = f"the server answered {status}", "http_error", ""
    return ApiRefusal(status, code, message, param=param, request_id=request_id)
