"""Codec: encodes every message between processes as msgpack, and decodes and validates it.

Messages are frozen structs, nearly all encoded as arrays, so that a Lua script can write the small ones with cmsgpack.

Versions. Processes of version N and N+1 run side by side during an upgrade, so every message says its version:

- A message written as an array begins with its tag: a letter for its kind, followed by its version from 2 on ("f" is
  version 1 of a frame, "f2" version 2). A version costs a frame at most one byte, and a token nothing.
- A job's body is a map whose field "v" holds its version: the lowest whose readers lose nothing of it, at most
  JOB_VERSION; without it, 1.
- A field may be added without a new version if it is the last one and has a default: older readers skip it, newer
  readers of an older message take the default. Any other change of a message needs a new tag, or JOB_VERSION + 1. The
  version that introduces it must also read the previous one (as a union of both structs).
- A tag or JOB_VERSION that a process does not know decodes to NewerMessage, a subclass of DecodeError. Its
  reader sets it aside: a worker puts the job back for a newer worker and ignores a control message, and an API process
  ends its reader with `newer_version`. The job does not fail, and no loop ends.
- Records of files and batches, and the JSON under the fleet's keys, are maps. A version may only add fields with
  defaults; any other change of a key or a record raises the format number of the store.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar, get_args

import msgspec
from msgspec.structs import astuple

from penstock.engine import Failure, Logprob
from penstock.extras import Extras
from penstock.loops import ROWS_PER_SLICE
from streaming.errors import DecodeError, NewerMessage
from streaming.jobs.job import JOB_VERSION, Job, JobState


class Wake(msgspec.Struct, frozen=True, array_like=True, tag="w"):
    """A lane of the worker's model has a new job."""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Stop this job and end it as cancelled."""

    job: str
    by: str = ""
    """Who cancelled it, as CancelledBy; "": an older version did not say."""


class AddAddress(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """Send this job's deltas to this address as well."""

    job: str
    address: str


class Cordon(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """Claim nothing more, finish the held jobs, and wait to be replaced."""

    reason: str


class Hold(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """Leave new jobs to the workers of another shape for `for_ms`; 0: claim again. The scheduler repeats it while it
    applies, so a worker that receives none claims jobs."""

    for_ms: int


Control: TypeAlias = Wake | Cancel | AddAddress | Cordon | Hold


MAX_ROWS_PER_FRAME = 1000
"""Deltas of steps that were joined, or that are logged again by a checkpoint or in a parked log, in one frame: a reader
decodes it in a few milliseconds."""
MAX_FRAME_BYTES = 1 << 20
"""Of the same, unless one delta has more: a reader gets many frames in one read of a log."""


def in_frames(rows: list[bytes]) -> Iterator[list[bytes]]:
    """Encoded deltas by frames."""
    first = size = 0
    for place, row in enumerate(rows):
        if place - first == MAX_ROWS_PER_FRAME or (place > first and size + len(row) > MAX_FRAME_BYTES):
            yield rows[first:place]
            first, size = place, 0
        size += len(row)
    if rows:
        yield rows[first:]


class Run(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One run of a job, from its claim by a worker until that worker ends, loses or puts back the job. Deltas name it
    as their author. No two are equal: a worker gets a random id at each start, and never uses a number twice."""

    worker: str
    number: int

    def __str__(self) -> str:
        return f"{self.worker}-{self.number}"


class Section(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The consecutive deltas of a job that one run wrote: from `first` up to the next section. If a run wrote nothing,
    its section has the same `first` as the next one."""

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
    """Header of a run, which the worker sends in the first frame with deltas of the run: the job, the number of the
    run's first delta, and the run that wrote the delta before it. Readers compare it with the text that they have, and
    never join a run that continues another text."""

    job: str
    first: int = 1
    parent: Run | None = None
    copied: tuple[Section, ...] = ()
    """Not empty: deltas under this run number, negated, are copies of these runs' deltas, logged again after a loss."""
    at_ms: int = 0
    """Redis time of the run's first token; 0: not known."""
    begun_ms: int = 0
    """Redis time of the job's first token, if an earlier run generated it, also in a text that was given up."""
    kept_ms: int = 0
    """For how long earlier runs generated the text that this run continues."""


def openings_of(job: str, sections: Sequence[Section]) -> list[tuple[Run, Opening]]:
    """The openings that the runs of these sections had when they began."""
    return [(run, Opening(job, first, author(sections, first - 1))) for first, run in map(astuple, sections)]


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A few tokens of one choice of one job. `seq` counts 1, 2, 3... over the whole job, across attempts."""

    run_number: int
    """The number of the run that wrote it; minus that number for a copy (`Opening.copied`). Meaningless in a record,
    whose sections name the runs."""
    seq: int
    text: str
    ids: tuple[int, ...]
    """The token ids, as far as the engine knows them; enough to continue after a loss. A record has them only in
    deltas that it stores whole (Kept)."""
    index: int = 0
    n: int = 1
    """How many tokens these are (may exceed len(ids))."""
    finish: str = ""
    """"stop", "length" or "content_filter" when this delta ends its choice."""
    logprobs: tuple[Logprob, ...] = ()
    prompt: tuple[int, int] | None = None
    """Tokens of the choice's prompt, and how many of them were cached; only in the first delta of a choice."""
    served_by: str = ""
    """The model that gave the choice, if it is another one than asked for; only in the first delta of the choice."""
    extras: Extras | None = None
    """As in penstock.engine.Piece."""


class Frame(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """The deltas of one write for the jobs of one API process, as one log field and as one pub/sub message: of an
    engine's step, of several steps if the store was away, or of a log that is written again.

    The first frame of a run that an address gets contains the run's opening. Later frames name the run only by its
    number, because the job's id would be most of a token's size.
    """

    worker: str
    number: int
    rows: tuple[Delta, ...]
    openings: dict[int, Opening] = {}
    """Openings of runs, by the numbers that name the runs in this and later frames of the worker."""


class Draft(msgspec.Struct, frozen=True, array_like=True, tag="g"):
    """The deltas of one text that was given up, as far as the log has them without a gap.

    Readers of the response have seen it, so its deltas stay in the job's record: every later replay shows them, too.
    """

    rows: tuple[Delta, ...]


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Token counts of a job, each token counted once whatever the number of attempts."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0
    """Those of `completion` that are reasoning."""


def total_usage(prompts: Mapping[int, tuple[int, int]], completion: int, choices: int, n: int) -> Usage:
    """Compute a job's usage. Each prompt counts once, with the largest count among its `n` choices.

    Args:
        prompts: By choice: tokens of its prompt, and how many of them were cached.
        completion: Tokens of all attempts.
    """
    prompt = cached = 0
    for first in range(0, choices, n):
        copies = [prompts.get(index, (0, 0)) for index in range(first, first + n)]
        most, hits = map(max, zip(*copies, strict=True))
        prompt, cached = prompt + most, cached + hits
    return Usage(prompt, completion, cached)


def served_by(choices: int, found: Mapping[int, str], job: Job) -> tuple[str, ...]:
    """Build `Terminal.served_by`. `found`: by choice, the model that gave it, if it is another one than the job's."""
    return tuple([found.get(index, job.full_model) for index in range(choices)]) if found else ()


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
    shown: int = 0
    """The job's first token, if an earlier attempt generated it, also in a text that was given up."""
    shown_claimed: int = 0
    """The claim of that attempt."""
    kept: int = 0
    """For how many microseconds earlier attempts generated the text that the last one continued."""


class Terminal(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """The end of a job. A record has its rows apart (`encode_record_rows`); the published form leaves them out when the
    reader has already had them."""

    job: str
    state: JobState
    seq: int
    """The last delta's number: a reader that has fewer has missed some."""
    finishes: tuple[str, ...] = ()
    usage: Usage = Usage()
    failure: Failure | None = None
    worker: str = ""
    first_ms: int = 0
    """Redis time of the first token, whichever attempt gave it, or 0."""
    sections: tuple[Section, ...] = ()
    """Which run wrote which deltas, in order, runs that wrote none included; empty where a script ended the job."""
    rows: tuple[Delta, ...] = ()
    generated: Generated = Generated()
    tokens: tuple[int, ...] = ()
    """Tokens of each section; empty if there is only one."""
    last_ms: int = 0
    """Redis time of the last token; of a job without tokens, when the engine had it; 0: not known."""
    served_by: tuple[str, ...] = ()
    """By choice, the model that gave it; empty if all were given by the model that was asked for."""
    cancelled_by: str = ""
    """Who cancelled it, as CancelledBy; "" if it ended otherwise, or a version that did not note it cancelled it."""


def without_rows(end: Terminal) -> Terminal:
    """Copy a terminal without its rows: for records, and for readers that have received the rows."""
    copy: Terminal = msgspec.structs.replace(end, rows=())
    return copy


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """This job has ended; its record says how. Scripts end jobs so, and workers those with long results."""

    job: str


T = TypeVar("T")

Reply: TypeAlias = Frame | Terminal | Ended
"""What workers and scripts send to an API process."""

TAG = re.compile(r"[a-z][0-9]{0,3}")
"""A message's kind and its version; no number: version 1."""


_JOB = msgspec.msgpack.Decoder(Job)
_DELTAS = msgspec.msgpack.Decoder(tuple[Delta, ...])
_PARTS = msgspec.msgpack.Decoder(tuple[msgspec.Raw, ...])
_KEPT = msgspec.msgpack.Decoder(tuple[str | Delta, ...])
_METADATA = msgspec.msgpack.Decoder(dict[str, str])
_ENCODER = msgspec.msgpack.Encoder()

_PLAIN_REST = astuple(Delta(1, 1, "", ()))[4:]
"""The other fields of what is written as a PlainDelta."""
_ARRAY_32 = b"\xdd"
"""First byte of a msgpack array whose length is in the next four bytes."""

TAGS = frozenset(kind.__struct_config__.tag for kind in (Draft, *get_args(Reply), *get_args(Control)))
"""The tags that this version knows."""


PlainDelta: TypeAlias = tuple[int, int, str, tuple[int, ...]]
"""The fields of a Delta before `index`: nearly all are one token of the first choice, and written so."""
LongDelta: TypeAlias = tuple[int, int, str, tuple[int, ...], int, int, str, tuple[Logprob, ...]]
"""The fields of a Delta before `prompt`."""
LONG_FIELDS = 8
encode: Callable[[msgspec.Struct | PlainDelta | LongDelta], bytes] = _ENCODER.encode
"""Any message as msgpack. The encoder's own method: it runs once per token, and a wrapper would cost one more call."""


def encode_delta(delta: Delta) -> bytes:
    """A delta in its shortest form."""
    fields = astuple(delta)
    if fields[4:] == _PLAIN_REST:
        return _ENCODER.encode(fields[:4])
    if delta.served_by or delta.extras:
        return encode(delta)
    return _ENCODER.encode(fields[: LONG_FIELDS + (delta.prompt is not None)])


def packed(count: int, deltas: bytes | bytearray) -> tuple[Delta, ...]:
    """Wrap `count` encoded deltas, joined in `deltas`, as the rows of a message. Such a message can only be encoded.

    So each token is encoded once, and the frame and the record hold the same bytes.
    """
    return msgspec.Raw(_array(count, deltas))  # type: ignore[return-value]


def unpacked(count: int, deltas: bytes | bytearray) -> tuple[Delta, ...]:
    """Decode deltas that `packed` could wrap."""
    return _DELTAS.decode(_array(count, deltas))


Kept: TypeAlias = str | msgspec.Raw
"""A delta as the record of an ended job keeps it: one token of the first choice, which nearly all are, as its text
alone; others whole, encoded. Nothing continues the job, so the token's id is not needed any more."""


def kept_form(delta: Delta) -> Kept:
    """The delta as a record keeps it."""
    return delta.text if astuple(delta)[4:] == _PLAIN_REST else msgspec.Raw(encode_delta(delta))


LONG_BYTES = 16 * 1024
"""A result of at least this size is decoded in slices of a few ms, and only for callers who want its rows: it is not
published, its readers fetch it."""
MIN_DEFLATED_BYTES, MAX_DEFLATED_BYTES = 512, 64 * 1024
"""Only rows of such a size are compressed, and no more than one slice of them: all are decompressed at once."""
MAX_DEFLATED_ROW_BYTES = 64
"""Rows of more bytes than this, on average, are mostly vectors or log probabilities, which compress badly."""
_DEFLATED = b"\x48"
"""First byte of what zlib has compressed with the window below; no msgpack array begins so."""


def encode_record_rows(kept: Sequence[Kept]) -> bytes:
    """Encode the deltas of a job that has ended for its record."""
    rows = _ENCODER.encode(kept)
    most = min(MAX_DEFLATED_BYTES, MAX_DEFLATED_ROW_BYTES * len(kept))
    if len(kept) > ROWS_PER_SLICE or not MIN_DEFLATED_BYTES <= len(rows) <= most:
        return rows
    deflate = zlib.compressobj(1, wbits=12, memLevel=4)  # two thirds of the time of zlib's own choice
    return deflate.compress(rows) + deflate.flush()


def record_rows(end: Terminal) -> bytes:
    """Encode the deltas of a terminal for its job's record."""
    return encode_record_rows([kept_form(row) for row in end.rows])


def decode_record_rows(data: bytes, rows_at_once: int) -> Generator[None, None, tuple[Delta, ...]]:
    """Decode deltas that `encode_record_rows` has encoded; yields after every `rows_at_once`. Raises DecodeError."""
    if data.startswith(_DEFLATED):
        try:
            data = zlib.decompressobj().decompress(data, MAX_DEFLATED_BYTES)
        except zlib.error as error:
            raise DecodeError(data, error) from error
    parts, rows = decode(_PARTS, data), list[Delta]()
    for first in range(0, len(parts), rows_at_once):
        yield
        part = parts[first : first + rows_at_once]
        kept: tuple[str | Delta, ...] = decode(_KEPT, _array(len(part), b"".join(part)))
        rows += [Delta(0, seq, row, ()) if isinstance(row, str) else row for seq, row in enumerate(kept, first + 1)]
    return tuple(rows)


def _array(count: int, items: bytes | bytearray) -> bytes:
    return b"".join((_ARRAY_32, count.to_bytes(4, "big"), items))


def decode_job(data: bytes) -> Job:
    """Raises NewerMessage, DecodeError."""
    try:
        job = decode(_JOB, data)
    except DecodeError as error:
        match _any_message(data):
            case {"v": int(version)} if version > JOB_VERSION:
                raise NewerMessage(data) from error
        raise
    if job.v > JOB_VERSION:
        raise NewerMessage(data)
    return job


def encode_metadata(metadata: dict[str, str]) -> bytes:
    """Encode the copy of a job's metadata that is stored beside its body, for lists; b"" if there is none."""
    return _ENCODER.encode(metadata) if metadata else b""


def decode_metadata(data: bytes) -> dict[str, str]:
    """Raises DecodeError."""
    return decode(_METADATA, data) if data else {}


def _decode_tagged(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        match _any_message(data):
            case [str(tag), *_] if tag not in TAGS and TAG.fullmatch(tag):  # of an unknown version or kind
                raise NewerMessage(data) from error
        raise DecodeError(data, error) from error


def _any_message(data: bytes) -> Any:
    """What the bytes hold, if they are msgpack; else None."""
    try:
        return msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


decode_reply: Callable[[bytes], Reply] = partial(_decode_tagged, msgspec.msgpack.Decoder(Reply))
decode_control: Callable[[bytes], Control] = partial(_decode_tagged, msgspec.msgpack.Decoder(Control))
decode_terminal: Callable[[bytes], Terminal] = partial(_decode_tagged, msgspec.msgpack.Decoder(Terminal))
decode_draft: Callable[[bytes], Draft] = partial(_decode_tagged, msgspec.msgpack.Decoder(Draft))
"""Raise NewerMessage, DecodeError."""


def decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    """Raises DecodeError."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DecodeError(data, error) from error
