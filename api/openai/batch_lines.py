"""One line of a batch: from its JSON to a job, and from the job's end to its output. Knows no HTTP and no files."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from api.openai.errors import ApiError, model_not_found
from api.openai.json_weight import nested_beyond
from api.openai.rendering import Facts, completion, to_json
from api.openai.schemas import Kind, Request, check_choices, parse
from streaming.batches.batch import Batch
from streaming.jobs.cards import ModelCard
from streaming.jobs.job import Chat, Job, JobState, Text, Tokens
from streaming.jobs.records import JobRecord
from streaming.jobs.work import weight_of
from streaming.priority import Priority

ENDPOINTS: Mapping[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
"""What a batch may ask for: every endpoint the engines serve."""

MAX_CUSTOM_ID = 512
MAX_LINE_DEPTH = 256
"""Levels of nested JSON in a whole line. Where the reader of lines gives up, at about 900, depends on its caller, and a
line is read again when its output is written: what was read once must be read then. A request that is nested less
deeply than this, and still too deeply, has an error of its own."""
PREFIX_SIZES = (256, 1024, 4096, 16384)
"""Characters of a prompt by which lines are grouped, so that those that begin alike follow each other."""

_NOT_RUN = {
    "expired": ("batch_expired", "The batch's time was over before this line was computed."),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this line was computed."),
}


class Envelope(msgspec.Struct):
    """What stands around a request."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Name(msgspec.Struct):
    custom_id: str


_ENVELOPE = msgspec.json.Decoder(Envelope)
_NAME = msgspec.json.Decoder(_Name)


class BadLine(Exception):
    """Raised when a line is not a request of this batch: nothing of the batch is run."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


@dataclass(frozen=True, slots=True)
class Traits:
    """What is worth knowing of a request beside its text, to plan the work."""

    model: str
    tokens: int
    """What quotas count: the prompt of each choice, estimated where it is a text, and the most tokens it may have."""
    twin: bytes
    """Equal for requests whose answers must be equal; b"" if they need not be."""
    groups: tuple[int, ...]
    """Equal for prompts that begin alike, ever longer."""


def envelope(data: bytes, endpoint: str) -> Envelope:
    """Raises BadLine."""
    try:
        found = _ENVELOPE.decode(data)
    except UnicodeDecodeError:
        raise BadLine("invalid_json_line", "This line is not UTF-8 text.") from None
    except msgspec.ValidationError as error:
        raise BadLine(
            "invalid_request", f"A line is an object with custom_id, method, url and body: {error}."
        ) from None
    except msgspec.DecodeError as error:
        raise BadLine("invalid_json_line", f"This line is not valid JSON: {error}.") from None
    except RecursionError:
        raise _too_deep() from None
    if nested_beyond(data, MAX_LINE_DEPTH):
        raise _too_deep()
    if not found.custom_id or len(found.custom_id) > MAX_CUSTOM_ID:
        raise BadLine("invalid_custom_id", f"custom_id must have 1 to {MAX_CUSTOM_ID} characters.", "custom_id")
    if found.method != "POST":
        raise BadLine("invalid_method", "method must be POST.", "method")
    if found.url != endpoint:
        raise BadLine("mismatched_endpoint", f"url must be the batch's endpoint, {endpoint}.", "url")
    return found


def _too_deep() -> BadLine:
    return BadLine("invalid_json_line", f"This line is nested more than {MAX_LINE_DEPTH} levels deep.")


def request_of(found: Envelope, models: Collection[str] | None, max_choices: int | None = None) -> Request:
    """The request in a line, to one of these models and of at most so many choices (None: any). Raises ApiError, which
    becomes the line's answer."""
    request = parse(ENDPOINTS[found.url], bytes(found.body))
    if max_choices is not None:
        check_choices(request, max_choices)
    if models is not None and request.model not in models:
        raise model_not_found(request.model, models)
    return request


def traits(request: Request, card: ModelCard | None) -> Traits:
    """Of a request that was read without error. `card`: what is known of its model, if anything is."""
    job_prompt, sampling = request.prompt_asked, request.sampling
    text = _text(job_prompt)
    sure = sampling.temperature == 0 or sampling.seed is not None
    twin = hashlib.sha256(msgspec.msgpack.encode((request.model, job_prompt, sampling))).digest()[:16] if sure else b""
    head = f"{request.model}\0{text}"
    groups = tuple(_digest(head[:size]) for size in PREFIX_SIZES)
    return Traits(request.model, weight_of(job_prompt, sampling, card), twin, groups)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest())


def _text(prompt: Chat | Text | Tokens) -> str:
    match prompt:
        case Chat(turns):
            return "\n".join(f"{turn.role}: {turn.content}" for turn in turns)
        case Text(texts):
            return "\n".join(texts)
        case Tokens(ids):
            return " ".join(str(each) for row in ids for each in row)


def job_of(request: Request, batch: Batch, *, job_id: str, number: int, lane: Priority, left_ms: int | None) -> Job:
    """The job of line `number`; `left_ms` of the batch's window are left. What the line says of lanes, streams and
    disconnects has no meaning here."""
    own = request.queue.deadline_ms
    deadlines = [each for each in (own, left_ms) if each is not None]
    return Job(
        id=job_id,
        model=request.model,
        tenant=batch.tenant,
        priority=lane,
        prompt=request.prompt_asked,
        sampling=request.sampling,
        deadline_ms=min(deadlines, default=None),
        max_queue_ms=request.queue.max_queue_ms,
        metadata={"batch": batch.id, "line": str(number)},
        user=request.user,
        on_disconnect="continue",
    )


# --- answers -------------------------------------------------------------------------------------------------------

# What is kept of an answer is everything of its line of output but the line's own names: equal lines share it.


def answer(record: JobRecord) -> tuple[bool, bytes]:
    """Whether a job that has ended gave what was asked, and what is kept of it."""
    assert record.terminal is not None
    try:
        body = completion(Facts.of(record.job, record.created_ms), record.terminal, record.terminal.rows)
    except ApiError as error:
        return False, refusal(error, record.job.id)
    return True, _kept(200, record.job.id, body)


def refusal(error: ApiError, request_id: str = "") -> bytes:
    """The answer to a request that ended in an error."""
    return _kept(error.status, request_id, error.body)


def not_run(why: str) -> bytes:
    """The answer to a line nobody computed: `why` is expired or cancelled."""
    code, message = _NOT_RUN[why]
    return to_json({"response": None, "error": {"code": code, "message": message}})


def _kept(status: int, request_id: str, body: dict[str, Any]) -> bytes:
    response = {"status_code": status, "request_id": request_id, "body": body}
    return to_json({"response": response, "error": None})


def output_line(batch_id: str, number: int, line: bytes, kept: bytes) -> bytes:
    """The line of output for a line of input; `kept` is its answer."""
    name = hashlib.sha256(f"{batch_id}:{number}".encode()).hexdigest()[:32]
    custom_id = to_json(_NAME.decode(line).custom_id)
    return b'{"id":"batch_req_%b","custom_id":%b,"line":%d,' % (name.encode(), custom_id, number) + kept[1:] + b"\n"


def worth_retrying(record: JobRecord) -> bool:
    """Whether another try may end better: a fault of the engine, not of the request, and not a killer of workers."""
    end = record.terminal
    if end is None or record.state is not JobState.FAILED:
        return False
    return end.failure is None or (end.failure.status >= 500 and end.failure.code not in ("poison", "malformed_job"))
