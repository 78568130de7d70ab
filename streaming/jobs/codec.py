"""Codec: encodes every message between processes as msgpack, and decodes and validates it.

Messages are frozen structs, nearly all encoded as arrays, so that a Lua script can write the small ones with cmsgpack.

Versions. Processes of version N and N+1 run side by side during an upgrade, so every message says its version:

- A message written as an array begins with its tag: a letter for its kind, followed by its version from 2 on ("f" is
  version 1 of a frame, "f2" version 2). A version costs a frame at most one byte, and a token nothing.
- A job's body is a map whose field "v" holds its version: the lowest whose readers read all of it (`job_class`), at
  most JOB_VERSION.
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
from collections.abc import Callable, Generator
from typing import Any, TypeAlias, TypeVar, cast, get_args

import msgspec

from streaming.errors import DecodeError, NewerMessage
from streaming.jobs.control import Control
from streaming.jobs.drafts import Draft
from streaming.jobs.frames import CountedDelta, Delta, Frame, PlainDelta
from streaming.jobs.job import JOB_VERSION, PLAIN_VERSION, EchoJob, ExtendedJob, Job, PassingJob, TaskJob, ToolJob
from streaming.jobs.terminal import Ended, Terminal

T = TypeVar("T")

Reply: TypeAlias = Frame | Terminal | Ended
"""What workers and scripts send to an API process."""

TAG = re.compile(r"[a-z][0-9]{0,3}")
"""A message's kind and its version; no number: version 1."""


class _Parted(Terminal, frozen=True, array_like=True, tag="t"):
    """A terminal message whose rows are separated but not decoded."""

    rows: tuple[msgspec.Raw, ...] = ()  # type: ignore[assignment]


class _Headed(Terminal, frozen=True, array_like=True, tag="t"):
    """A terminal message whose rows are skipped as one value."""

    rows: msgspec.Raw = msgspec.Raw()  # type: ignore[assignment]


class _JobVersion(msgspec.Struct):
    """The version of a job's body; all other fields are ignored."""

    v: int = 1


_REPLY = msgspec.msgpack.Decoder(Reply)
_CONTROL = msgspec.msgpack.Decoder(Control)
_JOB = msgspec.msgpack.Decoder(Job | ToolJob | ExtendedJob | TaskJob | EchoJob | PassingJob)
_PLAIN_JOB = msgspec.msgpack.Decoder(Job)
_JOB_VERSION = msgspec.msgpack.Decoder(_JobVersion)
_TERMINAL = msgspec.msgpack.Decoder(Terminal)
_PARTED = msgspec.msgpack.Decoder(_Parted)
_HEADED = msgspec.msgpack.Decoder(_Headed)
_DELTAS = msgspec.msgpack.Decoder(tuple[Delta, ...])
_DRAFT = msgspec.msgpack.Decoder(Draft)
_METADATA = msgspec.msgpack.Decoder(dict[str, str])
_ENCODER = msgspec.msgpack.Encoder()

_ARRAY_32 = b"\xdd"
"""First byte of a msgpack array whose length is in the next four bytes."""
_TERMINAL_TAG = b"\xa1t"
"""Tag of a terminal message, which follows the byte with the length of the array."""

TAGS = frozenset(kind.__struct_config__.tag for kind in (Draft, *get_args(Reply), *get_args(Control)))
"""The tags that this version knows."""


def encode(message: msgspec.Struct) -> bytes:
    """Any message as msgpack."""
    return _ENCODER.encode(message)


encode_plain: Callable[[PlainDelta], bytes] = _ENCODER.encode
"""The encoder itself: it runs once per token, and a function around it would cost one more call."""


def encode_delta(delta: Delta) -> bytes:
    """A delta in its shortest form."""
    if delta.served_by or delta.extras:
        return _ENCODER.encode(delta)
    row, prompt = delta, delta.prompt
    if prompt is not None:
        fields = (row.stream, row.seq, row.index, row.text, row.ids, row.n, row.finish, row.logprobs, prompt)
        return _ENCODER.encode(CountedDelta(*fields))
    return encode_plain(PlainDelta(row.stream, row.seq, row.index, row.text, row.ids, row.n, row.finish, row.logprobs))


def packed(count: int, deltas: bytes | bytearray) -> tuple[Delta, ...]:
    """Wrap `count` encoded deltas, joined in `deltas`, as the rows of a message. Such a message can only be encoded.

    So each token is encoded once, and the frame and the record hold the same bytes.
    """
    return cast("tuple[Delta, ...]", msgspec.Raw(_array(count, deltas)))


def unpacked(count: int, deltas: bytes | bytearray) -> tuple[Delta, ...]:
    """Decode deltas that `packed` could wrap."""
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
        job: Job = decode(_JOB, data)
        return job
    except DecodeError as error:
        version = _job_version(data)
        if version > JOB_VERSION:
            raise NewerMessage(data) from error
        if version == PLAIN_VERSION:  # the first jobs did not say their version
            return decode(_PLAIN_JOB, data)
        raise


def _job_version(data: bytes) -> int:
    try:
        return _JOB_VERSION.decode(data).v
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return 0  # not a job of any version


def decode_terminal(data: bytes) -> Terminal:
    """Raises NewerMessage, DecodeError."""
    return _decode_tagged(_TERMINAL, data)


def decode_draft(data: bytes) -> Draft:
    """Raises NewerMessage, DecodeError."""
    return _decode_tagged(_DRAFT, data)


def is_terminal(data: bytes) -> bool:
    """Whether a valid reply is a terminal message; reads only its tag."""
    return data[1:3] == _TERMINAL_TAG


def decode_rowless(data: bytes) -> Terminal:
    """Decode a terminal message without its rows, which takes a tenth of the time. Raises NewerMessage, DecodeError."""
    return _plain(_decode_tagged(_HEADED, data), ())


def decode_in_slices(data: bytes, rows_at_once: int) -> Generator[None, None, Terminal]:
    """Like `decode_terminal`, but yields after every `rows_at_once` rows. Raises NewerMessage, DecodeError."""
    parted = _decode_tagged(_PARTED, data)
    rows: list[Delta] = []
    for first in range(0, len(parted.rows), rows_at_once):
        yield
        part: Any = parted.rows[first : first + rows_at_once]
        deltas: tuple[Delta, ...] = decode(_DELTAS, _array(len(part), b"".join(part)))
        rows += deltas
    yield
    return _plain(parted, tuple(rows))


def _plain(terminal: Terminal, rows: tuple[Delta, ...]) -> Terminal:
    """The terminal with these rows."""
    fields: list[Any] = [rows if name == "rows" else getattr(terminal, name) for name in Terminal.__struct_fields__]
    return Terminal(*fields)


def encode_metadata(metadata: dict[str, str]) -> bytes:
    """Encode the copy of a job's metadata that is stored beside its body, for lists; b"" if there is none."""
    return _ENCODER.encode(metadata) if metadata else b""


def decode_metadata(data: bytes) -> dict[str, str]:
    """Raises DecodeError."""
    return decode(_METADATA, data) if data else {}


def _decode_tagged(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decode(decoder, data)
    except DecodeError as error:
        if _is_newer(data):
            raise NewerMessage(data) from error
        raise


def _is_newer(data: bytes) -> bool:
    """Whether this is a complete array with a well-formed tag of an unknown version or kind."""
    try:
        match msgspec.msgpack.decode(data):
            case [str(tag), *_]:
                return tag not in TAGS and TAG.fullmatch(tag) is not None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    return False


def decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    """Raises DecodeError."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DecodeError(data, error) from error
