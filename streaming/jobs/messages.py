"""Every message that crosses a process, and its codec.

Frozen, tagged, validated on decoding; msgpack arrays, so that a Lua script can write the small ones with cmsgpack.
This module does not know Redis, HTTP or any client's request format.

Versions. Processes of version N and N+1 run side by side during an upgrade, so every message says its version:

- A message written as an array begins with its tag: a letter for its kind, followed by its version from 2 on ("f" is
  version 1 of a frame, "f2" version 2). A version costs a frame at most one byte, and a token nothing.
- A job's body is a map whose field "v" holds JOB_VERSION.
- A field may be added without a new version if it is the last one and has a default: older readers skip it, newer
  readers of an older message take the default. Any other change of a message needs a new tag, or JOB_VERSION + 1. The
  version that introduces it must also read the previous one (as a union of both structs).
- A tag or JOB_VERSION that a process does not know decodes to NewerMessage, a DecodeError of its own. Whoever reads it
  sets it aside: a worker puts the job back for a newer worker, an API process ends the reader with `newer_version`, a
  control message is ignored. Nobody fails the job for it, and no loop ends.
- Records of files and batches and the JSON of the fleet's keys are maps: they only ever gain fields with defaults. Any
  other change of a key or a record raises the format number of the store.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from enum import StrEnum
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

import msgspec
from msgspec.structs import astuple

from streaming.errors import DecodeError, NewerMessage
from streaming.priority import Priority


class JobState(StrEnum):
    """Where a job stands. The last four are final: a job reaches exactly one of them."""

    QUEUED = "queued"
    RUNNING = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def final(self) -> bool:
        return self not in (JobState.QUEUED, JobState.RUNNING)


# --- what is asked -------------------------------------------------------------------------------------------------


class ChatTurn(msgspec.Struct, frozen=True, array_like=True):
    """One turn of a chat, its content already flattened to text."""

    role: str
    content: str


class Chat(msgspec.Struct, frozen=True, array_like=True, tag="chat"):
    """A conversation the engine renders with its own chat template."""

    turns: tuple[ChatTurn, ...]


class Text(msgspec.Struct, frozen=True, array_like=True, tag="text"):
    """Raw prompts, one choice (times `n`) each."""

    texts: tuple[str, ...]


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag="tokens"):
    """Raw prompts as token ids, one choice (times `n`) each."""

    ids: tuple[tuple[int, ...], ...]


Prompt: TypeAlias = Chat | Text | Tokens


def prompt_count(prompt: Prompt) -> int:
    """How many prompts these are: a conversation is one."""
    match prompt:
        case Chat():
            return 1
        case Text(texts):
            return len(texts)
        case Tokens(ids):
            return len(ids)


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to sample. None means "the engine's own default"."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """None: off. k >= 0: the log-probability of each token and of its k best alternatives."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    json_schema: dict[str, Any] | None = None
    """The output must be JSON of this schema; `{}` means any JSON object."""


JOB_VERSION = 1
"""Of a job's body. A worker puts a job of a greater version back for a newer worker."""


class Job(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="v", tag=JOB_VERSION):
    """One accepted request, as it lies in the queue. Times are relative milliseconds: Redis alone has a clock."""

    id: str
    model: str
    tenant: str
    priority: Priority
    prompt: Prompt
    sampling: Sampling = Sampling()
    stream: bool = False
    """Whether somebody wants the tokens as they come."""
    reply_to: str = ""
    """The return address: the channel of the API process that holds the socket, or ""."""
    deadline_ms: int | None = None
    """From acceptance to the last token."""
    max_queue_ms: int | None = None
    """From acceptance to the claim."""
    trace: dict[str, str] = {}
    """W3C trace context (traceparent, tracestate)."""
    metadata: dict[str, str] = {}
    user: str | None = None
    on_disconnect: str = "cancel"
    received_us: int = 0
    """When its API process had the request's head, in microseconds of Redis time, within `clock_us`; 0: not known."""
    clock_us: int = 0
    events: str = ""
    """Whom its events are for, as in streaming.events.outbox; "": nobody."""

    @property
    def choices(self) -> int:
        """How many texts are to be generated."""
        return prompt_count(self.prompt) * self.sampling.n


# --- what comes back -----------------------------------------------------------------------------------------------


class Logprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One token's log-probability and its best alternatives as (token text, log-probability)."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


class Run(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One begin of a job by one worker: the author of its deltas. No two are equal: worker ids are random and new in
    every life of a process, and a worker never uses a number twice."""

    worker: str
    number: int

    def __str__(self) -> str:
        return f"{self.worker}-{self.number}"


class Section(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The stretch of a job's deltas that one run wrote: from `first` up to the next section. Of a run that wrote
    nothing, `first` is the next section's too."""

    first: int
    run: Run


def author(sections: Sequence[Section], seq: int) -> Run | None:
    """The run that wrote delta `seq`; None before the first section."""
    found = None
    for section in sections:
        if section.first > seq:
            break
        found = section.run
    return found


class Opening(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a worker says of a run in the first frame that has deltas of it: the job, the number of the run's first
    delta, and the run that wrote the delta before that one. Readers compare it with what they have: a run that does
    not go on from there is never spliced to it."""

    job: str
    first: int = 1
    parent: Run | None = None
    copied: tuple[Section, ...] = ()
    """Deltas under this number are copies of what these earlier runs wrote, logged anew for a store that lost them."""


def openings_of(job: str, sections: Sequence[Section]) -> list[tuple[Run, Opening]]:
    """What the runs of these sections said of themselves when they began."""
    return [(run, Opening(job, first, author(sections, first - 1))) for first, run in map(astuple, sections)]


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A few tokens of one choice of one job. `seq` counts 1, 2, 3... over the whole job, across attempts."""

    stream: int
    """The number of the run that wrote it; minus that number for a copy (`Opening.copied`). In a record the sections
    tell who wrote what, and this says nothing."""
    seq: int
    index: int
    text: str
    ids: tuple[int, ...]
    """The token ids, as far as the engine knows them; enough to go on after a loss."""
    n: int
    """How many tokens these are (may exceed len(ids))."""
    finish: str = ""
    """"stop" or "length" when this delta ends its choice."""
    logprobs: tuple[Logprob, ...] = ()
    prompt: tuple[int, int] | None = None
    """Tokens of its choice's prompt, and how many of them were cached: in the first delta of a choice, in no other."""


class PlainDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A Delta without `prompt`, as nearly all of them are written: read, it is one. Fields as there."""

    stream: int
    seq: int
    index: int
    text: str
    ids: tuple[int, ...]
    n: int
    finish: str = ""
    logprobs: tuple[Logprob, ...] = ()


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Token counts of a job, each token counted once whatever the number of attempts."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why a job did not complete, in words for its owner. `status` is the HTTP code it stands for."""

    code: str
    message: str
    status: int = 500
    param: str | None = None


class Frame(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """What one engine step gave the jobs of one API process: log entry and pub/sub message alike.

    A run is opened once, in the first frame with deltas of it that an address gets; from then on its number stands for
    it. Most of what a token weighs on the wire was its job's id.
    """

    worker: str
    number: int
    rows: tuple[Delta, ...]
    openings: dict[int, Opening] = {}
    """Runs by the numbers that stand for them, in every frame of this worker from now on."""


class Generated(msgspec.Struct, frozen=True, array_like=True):
    """When the last worker of a job saw it pass, in microseconds of Redis time, within `clock_us`; 0: not known."""

    released: int = 0
    """Given to the engine."""
    scheduled: int = 0
    """First run by the engine."""
    first: int = 0
    last: int = 0
    """The engine's first and last token."""
    clock_us: int = 0


class Terminal(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """The end of a job, as stored. The published form leaves `rows` out when the reader has already had them."""

    job: str
    state: JobState
    seq: int
    """The last delta's number: a reader that has fewer has missed some."""
    finishes: tuple[str, ...] = ()
    usage: Usage = Usage()
    failure: Failure | None = None
    worker: str = ""
    first_ms: int = 0
    """Redis time of the first token, or 0."""
    sections: tuple[Section, ...] = ()
    """Which run wrote which deltas, in order, runs that wrote none included; empty where a script ended the job."""
    rows: tuple[Delta, ...] = ()
    generated: Generated = Generated()
    """Left out of the published form too: readers do not need it."""


class _Parted(Terminal, frozen=True, array_like=True, tag="t"):
    """A terminal whose rows are only told apart."""

    rows: tuple[msgspec.Raw, ...] = ()  # type: ignore[assignment]


class _Headed(Terminal, frozen=True, array_like=True, tag="t"):
    """A terminal whose rows are only passed over."""

    rows: msgspec.Raw = msgspec.Raw()  # type: ignore[assignment]


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """A script ended this job (cancelled in the queue, expired, given up): look the record up."""

    job: str


Reply: TypeAlias = Frame | Terminal | Ended


class Delivered(msgspec.Struct, frozen=True, array_like=True):
    """When an API process handed a job's answer on, in microseconds of Redis time, within `clock_us`; 0: never."""

    first_got: int = 0
    first_sent: int = 0
    last_got: int = 0
    last_sent: int = 0
    """The first and last of the answer: come from the worker, given to the network."""
    clock_us: int = 0
    whole: bool = False
    """Sent in one piece, so it has no first."""


# --- what a worker is told -----------------------------------------------------------------------------------------


class Wake(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """There is work in a lane of yours."""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Stop this job and end it as cancelled."""

    job: str


class Follow(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """Send this job's deltas to this address as well."""

    job: str
    address: str


class Cordon(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """Take nothing more, finish what you have, and wait to be replaced."""

    reason: str


class Hold(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """Leave new jobs to the workers of another shape for so long; 0: take them again. It is said anew while it is to
    last, so a worker that nobody speaks to takes jobs."""

    for_ms: int


Control: TypeAlias = Wake | Cancel | Follow | Cordon | Hold


# --- files and batches ---------------------------------------------------------------------------------------------


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a file. Its bytes lie in the folder of files, under its id; `name` is for people only."""

    id: str
    tenant: str
    name: str
    size: int
    purpose: str
    created_ms: int
    expires_ms: int


class BatchState(StrEnum):
    """Where a batch stands, in OpenAI's words."""

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
    """What was asked for: every line of a file as a request to one endpoint."""

    id: str
    tenant: str
    ceiling: Priority
    """The highest lane its lines may use."""
    endpoint: str
    input_file: str
    window: str
    """As the client said it: 15m, 1h, 24h or none."""
    window_ms: int | None = None
    """From creation to the last line."""
    output_keep_ms: int
    metadata: dict[str, str] = {}
    token_limit: int | None = None
    """Tokens its tenant may have waiting, this batch's among them."""
    events: str = ""
    """Whom its end is for, as in streaming.events.outbox; "": nobody."""


class LineFault(msgspec.Struct, frozen=True):
    """What is wrong with one line, or with a whole file (line 0)."""

    line: int
    code: str
    message: str
    param: str | None = None


class BatchProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far a batch is. Times are Redis milliseconds, 0 for "not yet"."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    computed: int = 0
    """Lines that differ: the others get a copy of their twin's answer."""
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


# --- what processes say of themselves ------------------------------------------------------------------------------


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Which known request fields an engine honours. What it cannot do is refused with 400, never ignored."""

    chat: bool = True
    logprobs: int = 0
    """The most alternatives per token; -1: no log-probabilities at all."""
    json_schema: bool = False
    json_resume: bool = False
    """Whether the engine can continue JSON output that an earlier attempt began: it restores the grammar's state."""
    penalties: bool = False
    token_prompts: bool = False


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker found when it loaded a model. It stays in Redis, so a sleeping model is still described."""

    name: str
    engine: str
    context: int
    """Longest prompt + completion, in tokens."""
    max_output: int
    capabilities: Capabilities
    created: int
    """Unix seconds of the first load."""
    default_output: int = 0
    """Tokens of an answer whose request names no limit, at most; 0: max_output."""


Role: TypeAlias = Literal["redis", "api", "worker", "scheduler", "offline"]


class Served(msgspec.Struct, frozen=True, array_like=True):
    """What a worker has ended of one lane since its start."""

    jobs: int = 0
    tokens: int = 0
    """Prompts and answers together."""
    failed: int = 0
    """Jobs among them that failed by the engine's fault."""


class Process(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One process as it says of itself, every few seconds. What counts up does so from its start."""

    role: Role
    id: str
    """Its name for people; several machines may use the same one."""
    life: str
    """Random, and new with each start: what tells processes of the same name apart."""
    pid: int
    host: str
    state: str
    """starting | ready | draining | drained (cordoned, done, and still there)"""
    since: float
    """Unix seconds of its start: a scheduler's in Redis time, others' by their machine's clock. For people only."""
    model: str = ""
    url: str = ""
    lease: str = ""
    """Under which a worker holds its jobs: new in each of its lives."""
    slots: int = 0
    running: int = 0
    reserved: int = 0
    """Slots of a worker that lane batch may not fill."""
    waiting: int = 0
    """Jobs a worker holds that wait inside its engine."""
    kv_tokens: int = 0
    """Room of a worker's KV cache; 0: not limited beyond the slots."""
    kv_used: int = 0
    steps: int = 0
    """Engine steps whose time is known, in all `step_s` seconds with `step_tokens` tokens."""
    step_s: float = 0.0
    step_tokens: int = 0
    served: dict[str, Served] = {}
    """By lane."""
    shape: str = ""
    """Which of its model's pools a worker belongs to."""


T = TypeVar("T")

TAG = re.compile(r"[a-z][0-9]{0,3}")
"""A message's kind and its version; no number: version 1."""


class _JobVersion(msgspec.Struct):
    """Of a job's body, whatever else is in it."""

    v: int = 1


_REPLY = msgspec.msgpack.Decoder(Reply)
_CONTROL = msgspec.msgpack.Decoder(Control)
_JOB = msgspec.msgpack.Decoder(Job)
_JOB_VERSION = msgspec.msgpack.Decoder(_JobVersion)
_TERMINAL = msgspec.msgpack.Decoder(Terminal)
_PARTED = msgspec.msgpack.Decoder(_Parted)
_HEADED = msgspec.msgpack.Decoder(_Headed)
_DELIVERED = msgspec.msgpack.Decoder(Delivered)
_FILE = msgspec.msgpack.Decoder(StoredFile)
_BATCH = msgspec.msgpack.Decoder(Batch)
_PROGRESS = msgspec.msgpack.Decoder(BatchProgress)
_DELTAS = msgspec.msgpack.Decoder(tuple[Delta, ...])
_METADATA = msgspec.msgpack.Decoder(dict[str, str])
_ENCODER = msgspec.msgpack.Encoder()
_ARRAY_32 = b"\xdd"
"""What an array begins with in msgpack, its length in the four bytes behind."""
_TERMINAL_TAG = b"\xa1t"
"""As it stands in a message, behind a byte that tells the length of all."""


TAGS = frozenset(kind.__struct_config__.tag for kind in (*get_args(Reply), *get_args(Control)))
"""Those this version knows."""


def encode(message: msgspec.Struct) -> bytes:
    """Any message of this module as msgpack."""
    return _ENCODER.encode(message)


encode_plain: Callable[[PlainDelta], bytes] = _ENCODER.encode
"""The same, without a call of our own between: done once a token."""


def encode_delta(delta: Delta) -> bytes:
    """A delta in its shortest form."""
    if delta.prompt is not None:
        return _ENCODER.encode(delta)
    row = delta
    return encode_plain(PlainDelta(row.stream, row.seq, row.index, row.text, row.ids, row.n, row.finish, row.logprobs))


def packed(count: int, deltas: bytes | bytearray) -> tuple[Delta, ...]:
    """So many deltas, encoded one behind the other, as the rows of a message that is only to be encoded.

    A token is encoded once, and its bytes are what frame and record hold.
    """
    return cast("tuple[Delta, ...]", msgspec.Raw(_array(count, deltas)))


def unpacked(count: int, deltas: bytes | bytearray) -> tuple[Delta, ...]:
    """The deltas again."""
    return _DELTAS.decode(_array(count, deltas))


def _array(count: int, items: bytes | bytearray) -> bytes:
    return b"".join((_ARRAY_32, count.to_bytes(4, "big"), items))


def decode_reply(data: bytes) -> Reply:
    """Raises NewerMessage, DecodeError."""
    reply: Reply = _decode_tagged(_REPLY, data)
    return reply


def decode_control(data: bytes) -> Control:
    """Raises NewerMessage, DecodeError."""
    control: Control = _decode_tagged(_CONTROL, data)
    return control


def decode_job(data: bytes) -> Job:
    """Raises NewerMessage, DecodeError."""
    try:
        return _decode(_JOB, data)
    except DecodeError as error:
        if _job_version(data) > JOB_VERSION:
            raise NewerMessage(data) from error
        raise


def _job_version(data: bytes) -> int:
    try:
        return _JOB_VERSION.decode(data).v
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return 0  # not a job of any version


def decode_terminal(data: bytes) -> Terminal:
    """Raises NewerMessage, DecodeError."""
    return _decode_tagged(_TERMINAL, data)


def is_terminal(data: bytes) -> bool:
    """Whether a reply that can be read is one, by its tag alone."""
    return data[1:3] == _TERMINAL_TAG


def decode_rowless(data: bytes) -> Terminal:
    """A terminal without its rows, a tenth of the work. Raises NewerMessage, DecodeError."""
    return _plain(_decode_tagged(_HEADED, data), ())


def decode_in_slices(data: bytes, rows_at_once: int) -> Generator[None, None, Terminal]:
    """As `decode_terminal`, of which each slice decodes so many rows. Raises NewerMessage, DecodeError."""
    parted = _decode_tagged(_PARTED, data)
    rows: list[Delta] = []
    for first in range(0, len(parted.rows), rows_at_once):
        yield
        part: Any = parted.rows[first : first + rows_at_once]
        deltas: tuple[Delta, ...] = _decode(_DELTAS, _array(len(part), b"".join(part)))
        rows += deltas
    yield
    return _plain(parted, tuple(rows))


def _plain(terminal: Terminal, rows: tuple[Delta, ...]) -> Terminal:
    """The terminal with these rows."""
    fields: list[Any] = [rows if name == "rows" else getattr(terminal, name) for name in Terminal.__struct_fields__]
    return Terminal(*fields)


def encode_metadata(metadata: dict[str, str]) -> bytes:
    """As it stands beside a job's body, for lists; b"" where there is none."""
    return _ENCODER.encode(metadata) if metadata else b""


def decode_metadata(data: bytes) -> dict[str, str]:
    """Raises DecodeError."""
    return _decode(_METADATA, data) if data else {}


def decode_delivered(data: bytes) -> Delivered:
    """Raises DecodeError."""
    return _decode(_DELIVERED, data)


def decode_file(data: bytes) -> StoredFile:
    """Raises DecodeError."""
    return _decode(_FILE, data)


def decode_batch(data: bytes) -> Batch:
    """Raises DecodeError."""
    return _decode(_BATCH, data)


def decode_progress(data: bytes) -> BatchProgress:
    """Of a batch nobody has worked on yet it is empty. Raises DecodeError."""
    return _decode(_PROGRESS, data) if data else BatchProgress()


def _decode_tagged(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return _decode(decoder, data)
    except DecodeError as error:
        if _is_newer(data):
            raise NewerMessage(data) from error
        raise


def _is_newer(data: bytes) -> bool:
    """Whether this is a whole array with a tag as ours are, but of a version or kind not known here."""
    try:
        match msgspec.msgpack.decode(data):
            case [str(tag), *_]:
                return tag not in TAGS and TAG.fullmatch(tag) is not None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    return False


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DecodeError(data, error) from error
