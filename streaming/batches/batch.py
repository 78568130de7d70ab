"""Batch: the owner's request and the progress of one batch, as the store keeps both."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from streaming.jobs.codec import decode
from streaming.jobs.terminal import Usage
from streaming.priority import Priority


class BatchState(StrEnum):
    """State of a batch, by OpenAI's names."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return self in (BatchState.COMPLETED, BatchState.FAILED, BatchState.EXPIRED, BatchState.CANCELLED)


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The owner's request: every line of a file is a request to one endpoint."""

    id: str
    tenant: str
    ceiling: Priority
    """The highest lane its lines may use."""
    endpoint: str
    input_file: str
    window: str
    """As the client wrote it: 15m, 1h, 24h or none."""
    window_ms: int | None = None
    """Time limit from creation to the last line; None: no limit."""
    output_keep_ms: int
    metadata: dict[str, str] = {}
    token_limit: int | None = None
    """Tokens that its tenant may have waiting, including this batch's."""
    events: str = ""
    """Recipients of the event of its end, as letters: "b" the broker, "w" webhooks; "": none."""
    trace: dict[str, str] = {}
    """W3C trace context of the request that created it."""


class LineFault(msgspec.Struct, frozen=True):
    """An error in one line, or in the whole file (line 0)."""

    line: int
    code: str
    message: str
    param: str | None = None


class BatchProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far a batch is. Times are Redis milliseconds, 0 for "not yet"."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    distinct: int = 0
    """Lines that differ, which are computed: the others get copies of their answers."""
    in_queue: int = 0
    """Lines that wait in a lane or run."""
    retried: int = 0
    usage: Usage = Usage()
    model: str = ""
    """"" if the lines name several."""
    lane: str = ""
    lane_reason: str = ""
    per_second: float = 0.0
    """Lines that ended a second, lately."""
    faults: tuple[LineFault, ...] = ()
    output_file: str = ""
    error_file: str = ""
    began_ms: int = 0
    finalizing_ms: int = 0
    ended_ms: int = 0
    tokens: int = 0
    """Estimate of the tokens to compute, taken when the lines were read."""


_BATCH = msgspec.msgpack.Decoder(Batch)
_PROGRESS = msgspec.msgpack.Decoder(BatchProgress)


def decode_batch(data: bytes) -> Batch:
    """Raises DecodeError."""
    return decode(_BATCH, data)


def decode_progress(data: bytes) -> BatchProgress:
    """Of a batch nobody has worked on yet it is empty. Raises DecodeError."""
    return decode(_PROGRESS, data) if data else BatchProgress()
