"""Batches of the Messages API: the request that creates one, the lines of its input, and batches and results as clients
expect them. They are batches like any other, of the endpoint /v1/messages; `msg` before a batch's id is the id here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from api.anthropic.errors import error_kind
from api.openai.batch_lines import MAX_LINE_BYTES, BadLine, envelope
from api.openai.errors import invalid_request, refuse_if
from api.openai.rendering import to_json
from streaming.batches.store import BatchRecord, BatchState

ENDPOINT: Final = "/v1/messages"
PREFIX = "msg"


class BatchedMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One request of a batch: `params` is the body of a request to /v1/messages; a mistake in it becomes its result."""

    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    params: msgspec.Raw


class MessageBatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/messages/batches."""

    requests: Annotated[list[BatchedMessage], msgspec.Meta(min_length=1)]


_REQUEST = msgspec.json.Decoder(MessageBatchRequest)


def input_lines(body: bytes, most: int) -> list[bytes]:
    """Read the requests of a batch, as lines of an input that no reader refuses as a whole. A line break in JSON is no
    part of a text. Blocks. Raises ApiError (400)."""
    try:
        requests = _REQUEST.decode(body.decode()).requests
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        what = "requests must be a list of objects, each with a custom_id (1 to 64 characters) and params"
        raise invalid_request(f"{what}: {error}.", "requests") from None
    is_object = all(bytes(each.params)[:1] == b"{" for each in requests)
    refuse_if(not is_object, "requests", "must have params that are an object each")
    refuse_if(len(requests) > most, "requests", f"may have at most {most:,} ([batch] max_lines)")
    is_double = len({each.custom_id for each in requests}) < len(requests)
    refuse_if(is_double, "requests", "must have a custom_id of its own each")
    lines, line = list[bytes](), b'{"custom_id":%b,"method":"POST","url":"/v1/messages","body":%b}\n'
    for number, each in enumerate(requests):
        lines.append(line % (to_json(each.custom_id), bytes(each.params).replace(b"\n", b" ").replace(b"\r", b" ")))
        refuse_if(len(lines[-1]) > MAX_LINE_BYTES, f"requests[{number}]", f"may have at most {MAX_LINE_BYTES:,} bytes")
        try:
            envelope(lines[-1], ENDPOINT)
        except BadLine as bad:
            raise invalid_request(f"requests[{number}]: {bad}", f"requests[{number}]") from None
    return lines


def batch_of(message_batch: str) -> str:
    """Return the id of a batch; "" if this is no id of a message batch."""
    return message_batch.removeprefix(PREFIX) if message_batch.startswith(PREFIX) else ""


def message_batch_object(record: BatchRecord) -> dict[str, Any]:
    """Render a batch. Requests that a batch has not run, as it was cancelled or expired, count as that."""
    progress, state, name = record.progress, record.state, PREFIX + record.batch.id
    total = progress.total or record.batch.lines
    ended = {"succeeded": progress.completed, "errored": total - progress.completed - progress.not_run}
    ended |= {"canceled": 0, "expired": 0, "expired" if state is BatchState.EXPIRED else "canceled": progress.not_run}
    running = {**dict.fromkeys(ended, 0), "succeeded": progress.completed, "errored": progress.failed}
    counts = ended if state.final else running
    status = "ended" if state.final else "canceling" if record.cancelling_ms else "in_progress"
    return {
        "id": name,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": {"processing": total - sum(counts.values()), **counts},
        "created_at": _moment(record.created_ms),
        "expires_at": _moment(record.expires_ms),
        "ended_at": _moment(progress.ended_ms),
        "cancel_initiated_at": _moment(record.cancelling_ms),
        "archived_at": None,
        "results_url": f"{ENDPOINT}/batches/{name}/results" if state.final else None,
    }


def _moment(ms: int) -> str | None:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds") if ms else None


class _Answer(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Line(msgspec.Struct):
    custom_id: str
    response: _Answer | None = None
    error: dict[str, Any] | None = None


class _Refusal(msgspec.Struct):
    error: dict[str, Any]


_LINE = msgspec.json.Decoder(_Line)
_NOT_RUN = {"batch_expired": "expired", "batch_cancelled": "canceled"}


def results(paths: Iterable[Path]) -> Iterator[bytes]:
    """Yield the results in files of output lines: first all answers, then the others. Blocks. Raises OSError."""
    for path in paths:
        with path.open("rb") as lines:
            for line in lines:
                found = _LINE.decode(line)
                yield to_json({"custom_id": found.custom_id, "result": _result(found)}) + b"\n"


def _result(line: _Line) -> dict[str, Any]:
    if line.response is None:
        return {"type": _NOT_RUN[(line.error or {})["code"]]}
    if line.response.status_code == 200:
        return {"type": "succeeded", "message": line.response.body}
    error = msgspec.json.decode(line.response.body, type=_Refusal).error
    told = error | {"type": error_kind(line.response.status_code)}
    return {"type": "errored", "error": {"type": "error", "error": told, "request_id": None}}
