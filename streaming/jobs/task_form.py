"""Task form: what the answer to a task shows of what the engine computed."""

from __future__ import annotations

import msgspec


class TaskForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields of a request for embeddings or for a ranking that no engine needs."""

    base64: bool = False
    """Embeddings as base64 of little-endian float32, not as lists of numbers."""
    top_n: int | None = None
    """Only so many documents, the best first; None: all."""
    documents: bool = False
    """The ranking repeats the texts of its documents."""
