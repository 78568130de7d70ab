"""GGUF files: reads the metadata and the tensor table of a model file, and converts its weights to half precision.

It reads version 3 of the format (and 2, which has the same layout), little-endian, and knows nothing of engines.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8
"""The format's numbers of the tensor types whose size this module knows."""

BLOCKS = {F32: (1, 4), F16: (1, 2), Q4_1: (32, 20), Q8_0: (32, 34)}
"""By tensor type: weights and bytes of one block."""

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""The format's numbers of token types."""

_MARK = re.compile("<[|\uff5c].*[|\uff5c]>", re.DOTALL)
"""A control token that a converter declared user-defined; other user-defined tokens are words, such as <think>."""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_ENTRIES = 1 << 20
"""More metadata keys or tensors than any model has: beyond it the file is corrupt and is rejected before the loop."""


class GgufError(Exception):
    """Raised when a file is missing or is not a sound GGUF file. The message names the cause and the next step."""

    def __init__(self, path: Path, cause: str, step: str) -> None:
        super().__init__(f"cannot use the model file {path}: {cause}. {step}")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One row of the tensor table. `shape` is innermost dimension first; `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def nbytes(self) -> int | None:
        """Size in bytes; None for an unknown tensor type."""
        if self.kind not in BLOCKS:
            return None
        per_block, size = BLOCKS[self.kind]
        return math.prod(self.shape) // per_block * size


@dataclass(frozen=True, slots=True)
class Gguf:
    """The header of a model file."""

    path: Path
    metadata: dict[str, Any]
    """Arrays as lists."""
    tensors: tuple[Tensor, ...]
    metadata_end: int
    """Offset in the file where the metadata ends and the tensor table begins."""
    file_type_at: int
    """Offset of the value of `general.file_type`, or 0."""
    alignment: int
    size: int
    """Size of the file in bytes."""

    def own(self, name: str, default: Any = None) -> Any:
        """A value that is kept under the name of the architecture, such as context_length, in tokens."""
        return self.metadata.get(f"{self.metadata.get('general.architecture', '')}.{name}", default)

    @property
    def chat_template(self) -> str:
        """The model's own Jinja template, or ""."""
        return str(self.metadata.get("tokenizer.chat_template", ""))

    @property
    def _tokens(self) -> list[Any]:
        """The texts of the vocabulary, by id."""
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        return tokens if isinstance(tokens, list) else []

    @property
    def vocabulary(self) -> int:
        """Number of tokens in the vocabulary; 0: unknown."""
        return len(self._tokens)

    def special_token(self, name: str) -> tuple[int, str] | None:
        """Id and text of a special token by its role ("bos", "eos"); None when the model has none."""
        number, tokens = self.metadata.get(f"tokenizer.ggml.{name}_token_id"), self._tokens
        return (number, tokens[number]) if isinstance(number, int) and 0 <= number < len(tokens) else None

    def control_tokens(self) -> dict[str, int]:
        """Ids of the control tokens, by their texts."""
        kinds = self.metadata.get("tokenizer.ggml.token_type")
        return {
            text: number
            for number, (text, kind) in enumerate(zip(self._tokens, kinds or (), strict=False))
            if kind in (UNKNOWN, CONTROL) or (kind == USER_DEFINED and _MARK.fullmatch(text))
        }


def _corrupt(path: Path, cause: str) -> GgufError:
    return GgufError(path, f"it is damaged or not a GGUF file ({cause})", "Delete it and get it again.")


class _Cursor:
    """A read position in the file, which each read advances."""

    def __init__(self, path: Path, data: mmap.mmap, at: int) -> None:
        self._path, self._data, self.at = path, data, at

    def number(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self._data, self.at)
        self.at += struct.calcsize(layout)
        return value

    def count(self, what: str) -> int:
        value = int(self.number("<Q"))
        if value > _MAX_ENTRIES:
            raise _corrupt(self._path, f"{value} {what}")
        return value

    def string(self) -> str:
        first = self.at + 8
        length = int.from_bytes(self._data[self.at : first], "little")
        if length > len(self._data) - first:
            raise _corrupt(self._path, f"a text of {length} bytes does not fit in it")
        self.at = first + length
        return self._data[first : self.at].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(self._layout(kind))
        kind, count = self.number("<I"), self.number("<Q")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        layout = f"<{count}{self._layout(kind)[1]}"
        values = struct.unpack_from(layout, self._data, self.at)
        self.at += struct.calcsize(layout)
        return list(values)

    def _layout(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise _corrupt(self._path, "an array of arrays" if kind == _ARRAY else f"unknown value kind {kind}")
        return _SCALARS[kind]

    def tensor(self) -> Tensor:
        """A row of the tensor table; its offset counts from the start of the weights."""
        name, dimensions = self.string(), self.number("<I")
        if dimensions > 8:
            raise _corrupt(self._path, f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self.number("<Q") for _ in range(dimensions))
        return Tensor(name, shape, self.number("<I"), self.number("<Q"))


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    """Map a file into memory, read-only. Raises GgufError."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise GgufError(path, error.strerror or str(error), "Check the path and its permissions.") from None
    with file:
        if os.fstat(file.fileno()).st_size == 0:
            raise _corrupt(path, "it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


def read(path: Path) -> Gguf:
    """Read the header of a GGUF file, without its weights. Raises GgufError."""
    with mapped(path) as data:
        if data[:4] != b"GGUF":
            raise _corrupt(path, "it does not begin with GGUF")
        try:
            found = _header(path, data)
        except struct.error as error:
            raise _corrupt(path, str(error)) from None
    for tensor in found.tensors:
        if tensor.offset + (tensor.nbytes or 0) > found.size:
            raise _corrupt(path, f"it ends at {found.size} bytes, before the weights of {tensor.name}")
    return found


def _header(path: Path, data: mmap.mmap) -> Gguf:
    """Raises GgufError, struct.error."""
    cursor = _Cursor(path, data, 4)
    version = cursor.number("<I")
    if version not in (2, 3):
        raise _corrupt(path, f"format version {version}, expected 2 or 3")
    tensor_count, key_count = cursor.count("tensors"), cursor.count("metadata keys")
    metadata: dict[str, Any] = {}
    file_type_at = 0
    for _ in range(key_count):
        key, kind = cursor.string(), cursor.number("<I")
        if key == "general.file_type":
            file_type_at = cursor.at
        metadata[key] = cursor.value(kind)
    metadata_end = cursor.at
    alignment = int(metadata.get("general.alignment", 32)) or 32
    rows = [cursor.tensor() for _ in range(tensor_count)]
    base = aligned(cursor.at, alignment)
    tensors = tuple(Tensor(row.name, row.shape, row.kind, base + row.offset) for row in rows)
    return Gguf(path, metadata, tensors, metadata_end, file_type_at, alignment, len(data))


def aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


FILE_TYPE_F16 = 1
"""`general.file_type` of a file that is mostly F16."""


def to_f16(source: Gguf, target: Path, on_progress: Callable[[int, int], None]) -> None:
    """Write `source` again with its quantised tensors as half-precision weights: larger, but computed without rounding
    activations to 8 bits.

    `on_progress` gets (tensors done, tensors in all). Raises GgufError for a kind this file cannot decode, OSError.
    """
    unknown = {tensor.kind for tensor in source.tensors} - set(BLOCKS)
    if unknown:
        raise GgufError(source.path, f"tensors of kind {min(unknown)} cannot be converted", "Serve the file as it is.")
    planned, offset = list[Tensor](), 0  # its offsets count from the start of the weights, as the file stores them
    for tensor in source.tensors:
        planned.append(Tensor(tensor.name, tensor.shape, F32 if tensor.kind == F32 else F16, offset))
        offset = aligned(offset + (planned[-1].nbytes or 0), source.alignment)
    with mapped(source.path) as data, target.open("wb") as out:
        out.write(_new_header(source, planned, data))
        base = aligned(out.tell(), source.alignment)
        for done, (old, new) in enumerate(zip(source.tensors, planned, strict=True), start=1):
            out.write(bytes(base + new.offset - out.tell()))  # padding
            if old.kind == new.kind:
                out.write(data[old.offset : old.offset + (old.nbytes or 0)])
            else:
                out.write(_decoded(data, old).astype("<f2").tobytes())
            on_progress(done, len(planned))
        out.write(bytes(aligned(out.tell(), source.alignment) - out.tell()))
        out.flush()
        os.fsync(out.fileno())


def _new_header(source: Gguf, planned: list[Tensor], data: mmap.mmap) -> bytes:
    header = bytearray(data[: source.metadata_end])
    if source.file_type_at:
        struct.pack_into("<I", header, source.file_type_at, FILE_TYPE_F16)
    for tensor in planned:
        name = tensor.name.encode()
        dimensions = len(tensor.shape)
        header += struct.pack("<Q", len(name)) + name
        header += struct.pack(f"<I{dimensions}QIQ", dimensions, *tensor.shape, tensor.kind, tensor.offset)
    return bytes(header)


def _decoded(data: mmap.mmap, tensor: Tensor) -> NDArray[np.float32]:
    """The weights of a quantised tensor. Blocks of Q8_0 are (scale f16, 32 signed bytes), those of Q4_1 are (scale f16,
    minimum f16, 16 bytes): byte i holds weight i (low half) and weight i + 16 (high half)."""
    stored = data[tensor.offset : tensor.offset + (tensor.nbytes or 0)]  # a copy: an array over the map would pin it
    blocks = np.frombuffer(stored, np.uint8).reshape(-1, BLOCKS[tensor.kind][1])
    scale, minimum = (blocks[:, at : at + 2].copy().view("<f2").astype(np.float32) for at in (0, 2))
    weights: NDArray[np.float32]
    if tensor.kind == Q8_0:
        weights = blocks[:, 2:].copy().view(np.int8).astype(np.float32) * scale
    else:
        packed = blocks[:, 4:]
        weights = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32) * scale + minimum
    return weights
