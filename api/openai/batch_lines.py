"""Batch formats: the request that creates a batch, input lines as jobs, and ended jobs as output lines in input order.

Every input line is in exactly one of a batch's two output files, answers and errors. The functions that read files
block: call them from a thread.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import Field, model_validator

from api.openai.errors import ApiError, invalid_request, model_not_found
from api.openai.fields import UNKNOWN, ClosedBody, Metadata, StrictBody
from api.openai.json_body import NUMBER, nested_beyond, number_fault
from api.openai.rendering import to_json
from api.openai.responses.request import ResponseRequest, check_line
from api.openai.results import result
from api.openai.schemas import Kind, Request, check_choices, parse, to_job
from penstock.engine import ModelCard
from penstock.text import fault_of
from streaming.batches.cron import Cron
from streaming.batches.ledger import InputPlan, Ledger, LineOutcome, read_answer
from streaming.batches.store import Batch
from streaming.fleet.aliases import Aliases, Target
from streaming.fleet.settings import ModelSettings, served_names
from streaming.jobs.job import HINTS, Job, JobState, ResponseForm
from streaming.jobs.records import JobRecord
from streaming.jobs.waiting import weight_of
from streaming.order import Priority

ENDPOINTS: Mapping[str, Kind] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/responses": "response",
    "/v1/embeddings": "embedding",
    "/v1/messages": "message",
}
"""The endpoints that a batch may call, with their kind of request."""

MAX_CUSTOM_ID = 512
MAX_LINE_BYTES = 2 * 1024 * 1024
MAX_LINE_DEPTH = 256
"""Levels of nested JSON in a whole line. The JSON parser itself fails at about 900 levels, depending on its caller's
stack; this limit keeps a line that was accepted readable when its output is written. Requests have a stricter limit."""
PREFIX_SIZES = (256, 1024, 4096, 16384)
"""Bytes of the prompt prefixes by which lines are grouped, for the engine's prefix cache."""

_NOT_RUN = {
    "expired": ("batch_expired", "The batch's time was over before this line was computed."),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this line was computed."),
}


class Envelope(msgspec.Struct):
    """A line of the input: a request with its custom_id and endpoint."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Name(msgspec.Struct):
    custom_id: str


_ENVELOPE = msgspec.json.Decoder(Envelope)
_NAME = msgspec.json.Decoder(_Name)


class BadLine(Exception):
    """Raised when a line is not a valid request of this batch; the whole batch is then refused."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


@dataclass(frozen=True, slots=True)
class Traits:
    """Properties of a request by which a batch plans its work."""

    model: str
    tokens: int
    """Work for quotas: for each choice the prompt's tokens (estimated for text) plus the most it may generate."""
    digest: bytes
    """Equal for requests whose answers must be equal (greedy or seeded sampling), with what they show of the request;
    b"" if they may differ."""
    groups: tuple[int, ...]
    """Hashes of ever longer prompt prefixes: equal for prompts with a common prefix."""


def envelope(data: bytes, endpoint: str) -> Envelope:
    """Parse a line of the input. Raises BadLine."""
    try:
        found = _ENVELOPE.decode(data)
        deep = data.count(b"[") + data.count(b"{") > MAX_LINE_DEPTH
        if deep and nested_beyond(msgspec.json.decode(data), MAX_LINE_DEPTH):
            raise RecursionError
    except msgspec.ValidationError as error:
        message = f"A line is an object with custom_id, method, url and body: {error}."
        raise BadLine("invalid_request", message) from None
    except ValueError as error:
        if field := number_fault(data)[0]:
            raise BadLine("invalid_json_line", f"{field} {NUMBER}.", field) from None
        fault = fault_of(data)
        message = f"This line is {fault}." if fault else f"This line is not valid JSON: {error}."
        raise BadLine("invalid_json_line", message) from None
    except RecursionError:
        message = f"This line is nested more than {MAX_LINE_DEPTH} levels deep."
        raise BadLine("invalid_json_line", message) from None
    if not found.custom_id or len(found.custom_id) > MAX_CUSTOM_ID:
        raise BadLine("invalid_custom_id", f"custom_id must have 1 to {MAX_CUSTOM_ID} characters.", "custom_id")
    if found.method != "POST":
        raise BadLine("invalid_method", "method must be POST.", "method")
    if found.url != endpoint:
        raise BadLine("mismatched_endpoint", f"url must be the batch's endpoint, {endpoint}.", "url")
    return found


def request_of(
    found: Envelope,
    tenant: str,
    aliases: Aliases,
    models: Mapping[str, ModelSettings],
    max_choices: int | None = None,
    *,
    meant: dict[str, str] | None = None,
    validated: bool = False,
) -> Request:
    """Parse and check the request in a line.

    Args:
        tenant: whose batch it is.
        meant: by alias, the model that it meant in an earlier line of the batch; gets those of this one.
        models: the models that may be requested.
        max_choices: choices that one line may request; None: any number.
        validated: this line was found to be valid before: its model may be one of an older configuration.

    Raises:
        ApiError: the request is refused; this error becomes the line's answer.
    """
    request = parse(ENDPOINTS[found.url], bytes(found.body), aliases.default)
    if isinstance(request, ResponseRequest):
        check_line(request)
    if request.queue.webhook:
        raise invalid_request("queue.webhook has no place in a batch, whose lines have no events of their own. Leave "
                              "it out, and subscribe to batch.completed in [webhooks].", "queue.webhook")  # fmt: skip
    if request.queue.scheduled:
        raise invalid_request("queue.not_before and queue.delay_ms have no place in a batch, whose lines start as they "
                              "can. Give the batch a schedule.", "queue.not_before")  # fmt: skip
    if max_choices is not None:
        check_choices(request, max_choices)
    name = (meant or {}).get(request.model, request.model)
    found_model = aliases.resolve(tenant, name, models) or (Target(name) if validated else None)
    if found_model is None:
        raise model_not_found(request.model, served_names(models))
    if meant is not None and found_model.alias:
        meant[request.model] = found_model.full_model
    return request.naming(found_model.model, found_model.adapter)


def traits(request: Request, card: ModelCard | None) -> Traits:
    """Return the properties of a valid request. `card` is its model's card, if a worker has loaded the model."""
    job = to_job(request, tenant="", ceiling=Priority.BATCH, card=card or UNKNOWN)
    deterministic = job.sampling.temperature == 0 or job.sampling.seed is not None
    form = _form_of(job, request)
    passed = {name: each for name, each in job.passed.items() if name not in HINTS}
    rest = form and (form, job.user), job.message, job.tools, job.task, job.task_form, job.reasoning, job.echo, passed
    asked = msgspec.msgpack.encode((job.full_model, job.prompt, job.sampling, *rest))
    digest = hashlib.sha256(asked).digest()[:16] if deterministic else b""
    head = msgspec.json.encode((job.full_model, job.prompt))
    heads = [hashlib.blake2b(head[:size], digest_size=8) for size in PREFIX_SIZES]
    groups = tuple([int.from_bytes(each.digest()) for each in heads])
    return Traits(job.model, weight_of(job.prompt, job.sampling, card, job.tools), digest, groups)


def job_of(
    request: Request,
    batch: Batch,
    *,
    job_id: str,
    number: int,
    lane: Priority,
    left_ms: int | None,
    card: ModelCard | None = None,
) -> Job:
    """Build the job of line `number`; `left_ms` is what is left of the batch's window, and `card` that of its model.

    The line's own settings for lane, streaming and disconnects do not apply.
    """
    deadlines = [each for each in (request.queue.deadline_ms, left_ms) if each is not None]
    request = request.model_copy(update={"service_tier": None})  # the tier is that of the batch's lane
    job = to_job(request, tenant=batch.tenant, ceiling=lane, job_id=job_id, card=card or UNKNOWN)
    return msgspec.structs.replace(
        job,
        priority=lane,
        stream=False,
        deadline_ms=min(deadlines, default=None),
        metadata={"batch": batch.id, "line": str(number)},
        on_disconnect="continue",
        response=_form_of(job, request),
    )


def _form_of(job: Job, request: Request) -> ResponseForm | None:
    """Return the form of a line's response, which shows the labels of the line, not those of its job."""
    return job.response and msgspec.structs.replace(job.response, metadata=request.metadata or {})


# --- answers -------------------------------------------------------------------------------------------------------

# The ledger keeps an answer without id, custom_id and line number, so that duplicate lines can share it.


def answer(record: JobRecord) -> tuple[bool, bytes]:
    """Render an ended job for the ledger; return whether it completed, and the answer."""
    assert record.terminal is not None
    try:
        body = result(record)
    except ApiError as error:
        return False, refusal(error, record.job.id)
    return True, _stored(200, record.job.id, body)


def refusal(error: ApiError, request_id: str = "") -> bytes:
    """Render the answer to a refused or failed request."""
    return _stored(error.status, request_id, error.body)


def not_run(reason: str) -> bytes:
    """Render the answer to a line that was never computed; `reason` is expired or cancelled."""
    code, message = _NOT_RUN[reason]
    return to_json({"response": None, "error": {"code": code, "message": message}})


def _stored(status: int, request_id: str, body: dict[str, Any]) -> bytes:
    response = {"status_code": status, "request_id": request_id, "body": body}
    return to_json({"response": response, "error": None})


def output_line(batch_id: str, number: int, line: bytes, stored: bytes) -> bytes:
    """Render the output line for an input line; `stored` is its answer from the ledger."""
    name = hashlib.sha256(f"{batch_id}:{number}".encode()).hexdigest()[:32]
    custom_id = to_json(_NAME.decode(line).custom_id)
    return b'{"id":"batch_req_%b","custom_id":%b,"line":%d,' % (name.encode(), custom_id, number) + stored[1:] + b"\n"


def worth_retrying(record: JobRecord) -> bool:
    """Whether a retry may succeed: the engine failed, and neither the request is at fault nor did it kill workers."""
    end = record.terminal
    if end is None or record.state is not JobState.FAILED:
        return False
    return end.failure is None or (end.failure.status >= 500 and end.failure.code not in ("poison", "malformed_job"))


def output_lines(
    batch_id: str, folder: Path, plan: InputPlan, ledger: Ledger, outcome: LineOutcome, reason: str = ""
) -> Iterator[bytes]:
    """Yield the output lines of one outcome. Raises OSError.

    Args:
        reason: why the batch stopped early ("expired", "cancelled"): lines without an answer then count as failed.
            With "" they are left out.
    """
    unanswered = not_run(reason) if reason else b""
    with (folder / "input").open("rb") as source:
        for place, original in enumerate(plan.duplicate_of):
            end = ledger.ends[original]
            if end is None and (not reason or outcome is not LineOutcome.FAILED):
                continue
            if end is not None and end.outcome is not outcome:
                continue
            stored = read_answer(folder, end) if end is not None else unanswered
            yield output_line(batch_id, plan.numbers[place], plan.read(source, place), stored)


def blocks(lines: Iterator[bytes], size_bytes: int = 256 * 1024) -> Iterator[bytes]:
    """Join lines into blocks of at least `size_bytes`."""
    buffer = bytearray()
    for line in lines:
        buffer += line
        if len(buffer) >= size_bytes:
            yield bytes(buffer)
            buffer.clear()
    if buffer:
        yield bytes(buffer)


def so_far(batch_id: str, folder: Path, outcome: LineOutcome) -> Iterator[bytes]:
    """Yield the present output of a running batch, in blocks; nothing before its input was validated, and no more once
    the batch has ended and its folder is gone."""
    with suppress(FileNotFoundError):
        plan = InputPlan.load(folder)
        ledger = Ledger.load(folder, len(plan))
        yield from blocks(output_lines(batch_id, folder, plan, ledger, outcome))


WINDOWS: Mapping[str, int | None] = {"15m": 15 * 60_000, "1h": 3_600_000, "24h": 24 * 3_600_000, "none": None}
"""Deadline of each completion window, in milliseconds from creation; None: no deadline."""

MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 86_400
"""Bounds of a file's retention."""


class OutputExpiry(StrictBody):
    """When the output and error files expire."""

    anchor: Literal["created_at"]
    """The files' creation."""
    seconds: Annotated[int, Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]
    """From then on."""


class BatchSchedule(ClosedBody):
    """When a schedule begins its batches."""

    cron: Annotated[str, Field(max_length=256)]
    """Minute, hour, day of the month, month, day of the week (0 and 7: Sunday), e.g. 0 8 * * 1-5."""
    timezone: Annotated[str, Field(max_length=64)] = "UTC"

    @model_validator(mode="after")
    def _comes(self) -> Self:
        try:
            Cron(self.cron, self.timezone).after(int(1000 * time.time()))
        except ValueError as error:
            raise invalid_request(f"schedule {error}.", "schedule") from None
        return self


class BatchRequest(StrictBody):
    """The body of POST /v1/batches."""

    input_file_id: str
    """A file of yours with purpose `batch`."""
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages"]
    """The `url` of every line."""
    completion_window: Literal["15m", "1h", "24h", "none"] | None = "24h"
    """From creation to the last line; none: as long as it takes."""
    metadata: Metadata | None = None
    """Your own labels; the batch shows them."""
    output_expires_after: OutputExpiry | None = None
    """Null: [files] retention_s."""
    schedule: BatchSchedule | None = None
    """Begin such a batch at these times, until this one is cancelled."""
