"""GGUF converter: rewrites a file's quantised weights in another number format, a few MB at a time."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from workers.engines.llamacpp.gguf import BLOCKS, F16, F32, Q4_1, Gguf, GgufError, Tensor, aligned, mapped

FILE_TYPE_F16 = 1
"""`general.file_type` of a file that is mostly F16."""

_ROWS_AT_ONCE = 4096


def rewrite(
    source: Gguf,
    target: Path,
    *,
    kind: int,
    file_type: int,
    encode: Callable[[NDArray[np.float32]], bytes],
    on_progress: Callable[[int, int], None],
) -> None:
    """Write `source` again with its quantised tensors in another `kind`; `encode` turns rows of weights into bytes.

    `on_progress` gets (tensors done, tensors in all). Raises GgufError for a kind this file cannot decode, OSError.
    """
    unknown = {tensor.kind for tensor in source.tensors} - set(BLOCKS)
    if unknown:
        raise GgufError(source.path, f"tensors of kind {min(unknown)} cannot be converted", "Serve the file as it is.")
    planned = _plan(source, kind)
    with mapped(source.path) as data, target.open("wb") as out:
        out.write(_new_header(source, planned, data, file_type))
        base = aligned(out.tell(), source.alignment)
        for done, (old, new) in enumerate(zip(source.tensors, planned, strict=True), start=1):
            out.write(bytes(base + new.offset - out.tell()))  # padding
            if old.kind == new.kind:
                out.write(data[old.offset : old.offset + (old.nbytes or 0)])
            else:
                out.writelines(encode(rows) for rows in _decoded(data, old))
            on_progress(done, len(planned))
        out.write(bytes(aligned(out.tell(), source.alignment) - out.tell()))
        out.flush()
        os.fsync(out.fileno())


def to_f16(source: Gguf, target: Path, on_progress: Callable[[int, int], None]) -> None:
    """Convert to half-precision weights: larger, but computed without rounding activations to 8 bits."""
    rewrite(source, target, kind=F16, file_type=FILE_TYPE_F16, encode=_as_f16, on_progress=on_progress)


def _as_f16(rows: NDArray[np.float32]) -> bytes:
    return rows.astype("<f2").tobytes()


def _plan(source: Gguf, kind: int) -> list[Tensor]:
    """The new tensor table. Its `offset` counts from the start of the weights, as the file stores it."""
    planned, offset = [], 0
    for tensor in source.tensors:
        new = Tensor(tensor.name, tensor.shape, tensor.kind if tensor.kind in (F32, F16) else kind, offset)
        planned.append(new)
        offset = aligned(offset + (new.nbytes or 0), source.alignment)
    return planned


def _new_header(source: Gguf, planned: list[Tensor], data: mmap.mmap, file_type: int) -> bytes:
    header = bytearray(data[: source.metadata_end])
    if source.file_type_at:
        struct.pack_into("<I", header, source.file_type_at, file_type)
    for tensor in planned:
        name = tensor.name.encode()
        dimensions = len(tensor.shape)
        header += struct.pack("<Q", len(name)) + name
        header += struct.pack(f"<I{dimensions}QIQ", dimensions, *tensor.shape, tensor.kind, tensor.offset)
    return bytes(header)


def _decoded(data: mmap.mmap, tensor: Tensor) -> Iterator[NDArray[np.float32]]:
    """Decode a quantised tensor's weights, _ROWS_AT_ONCE rows at a time."""
    per_block, size = BLOCKS[tensor.kind]
    width = tensor.shape[0] // per_block * size
    stored = data[tensor.offset : tensor.offset + (tensor.nbytes or 0)]  # a copy: an array over the map would pin it
    table = np.frombuffer(stored, np.uint8).reshape(-1, width)
    decode = _decode_q4_1 if tensor.kind == Q4_1 else _decode_q8_0
    for first in range(0, len(table), _ROWS_AT_ONCE):
        blocks = table[first : first + _ROWS_AT_ONCE].reshape(-1, size)
        yield decode(blocks).reshape(-1, tensor.shape[0])


def _decode_q4_1(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Blocks of (scale f16, minimum f16, 16 bytes): byte i holds weight i (low half) and weight i + 16 (high half)."""
    scale, minimum = (blocks[:, at : at + 2].copy().view("<f2").astype(np.float32) for at in (0, 2))
    packed = blocks[:, 4:]
    steps = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)
    weights: NDArray[np.float32] = steps * scale + minimum
    return weights


def _decode_q8_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Blocks of (scale f16, 32 signed bytes)."""
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    weights: NDArray[np.float32] = blocks[:, 2:].copy().view(np.int8).astype(np.float32) * scale
    return weights
