"""Codec: writes every message that crosses a process as msgpack, and reads and validates it.

Messages are frozen structs, nearly all of them arrays, so that a Lua script can write the small ones with cmsgpack.

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
from collections.abc import Callable, Generator
from typing import Any, TypeAlias, TypeVar, cast, get_args

import msgspec

from streaming.errors import DecodeError, NewerMessage
from streaming.jobs.control import Control
from streaming.jobs.frames import Delta, Frame, PlainDelta
from streaming.jobs.job import JOB_VERSION, Job
from streaming.jobs.terminal import Ended, Terminal

T = TypeVar("T")

Reply: TypeAlias = Frame | Terminal | Ended
"""What workers and scripts send to an API process."""

TAG = re.compile(r"[a-z][0-9]{0,3}")
"""A message's kind and its version; no number: version 1."""


class _Parted(Terminal, frozen=True, array_like=True, tag="t"):
    """A terminal whose rows are only told apart."""

    rows: tuple[msgspec.Raw, ...] = ()  # type: ignore[assignment]


class _Headed(Terminal, frozen=True, array_like=True, tag="t"):
    """A terminal whose rows are only passed over."""

    rows: msgspec.Raw = msgspec.Raw()  # type: ignore[assignment]


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
    """Any message as msgpack."""
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
        return decode(_JOB, data)
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
        deltas: tuple[Delta, ...] = decode(_DELTAS, _array(len(part), b"".join(part)))
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
    return decode(_METADATA, data) if data else {}


def _decode_tagged(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decode(decoder, data)
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


def decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    """Raises DecodeError."""
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DecodeError(data, error) from error
