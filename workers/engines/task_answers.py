"""Task answers: the texts in which engines give vectors, scores and token ids (`penstock.engine.Task`)."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Iterable, Sequence

import msgspec

from penstock.engine import Input, Task


class _Told(msgspec.Struct):
    tokens: list[int]
    max_model_len: int


_TOKENS = msgspec.json.Decoder(_Told)
_SCORES = msgspec.json.Decoder(list[float])


MIN_TOLD_BYTES, MAX_TOLD_BYTES, TOLD_BYTES_PER_TOKEN = 256 << 10, 1 << 20, 8
"""Of a text whose token ids are told: enough for any text that fits into the context, between the first two."""


def max_told_bytes(context: int) -> int:
    """Bytes of a text whose token ids are told, for a model with a context of so many tokens."""
    return min(MAX_TOLD_BYTES, max(MIN_TOLD_BYTES, TOLD_BYTES_PER_TOKEN * context))


def joined_vectors(vectors: Iterable[Iterable[float]]) -> str:
    """The text of an `embed`: each vector as base64 of little-endian float32. Raises OverflowError, TypeError."""
    return ",".join([_encoded(vector) for vector in vectors])


def _encoded(vector: Iterable[float]) -> str:
    numbers = vector if isinstance(vector, array) and vector.typecode == "f" else array("f", vector)
    if sys.byteorder == "big":
        numbers = array("f", numbers)
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


def reported_tokens(ids: Sequence[int], context: int) -> str:
    """The text of a `tokenize`."""
    return msgspec.json.encode({"tokens": ids, "max_model_len": context}).decode()


def reported_scores(scores: Sequence[float]) -> str:
    """The text of a `rerank`."""
    return msgspec.json.encode(scores).decode()


def check_task_answer(task: Task, inputs: Sequence[Input], text: str, size: int = 0) -> None:
    """Raises ValueError if the text does not answer the task, so that no reader could use it. `size`: numbers of the
    vectors that the engine makes, if it is known."""
    match task.kind:
        case "embed":
            _check_vectors(text.split(","), len(inputs), task.dimensions or size)
        case "rerank":
            scores = _SCORES.decode(text)
            if len(scores) != len(inputs) - 1 or not math.isfinite(sum(scores)):
                raise ValueError(f"{len(scores)} scores for {len(inputs) - 1} documents, or one without end")
        case "tokenize":
            _TOKENS.decode(text)
        case _:
            pass


def _check_vectors(vectors: Sequence[str], wanted: int, size: int) -> None:
    if len(vectors) != wanted:
        raise ValueError(f"{len(vectors)} vectors for {wanted} inputs")
    numbers = [array("f", base64.b64decode(each, validate=True)) for each in vectors]
    sizes = {len(each) for each in numbers}
    if len(sizes) > 1 or 0 in sizes or (size and sizes != {size}):
        raise ValueError(f"vectors of {sorted(sizes)[:4]} numbers")
    if sys.byteorder == "little" and not all(math.isfinite(sum(each)) for each in numbers):
        raise ValueError("the embedding contains NaN or infinity")
