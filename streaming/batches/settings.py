"""File and batch settings ([files], [batch]): the folder and retention of files, and the limits of batches."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from penstock.config import Positive


class FilesSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [files]."""

    dir: Path = Path(".penstock/files")
    """The files folder. API and offline processes need the same folder, on shared storage if they run on several
    machines; `penstock up` keeps it in its data folder."""
    size_limit: Annotated[int, msgspec.Meta(ge=1024)] = 200 * 1024 * 1024
    """The most bytes of one uploaded file."""
    retention_s: Annotated[int, msgspec.Meta(ge=60)] = 30 * 86_400
    """How long files, and batches that have ended, are kept by default."""
    quarantine_s: Annotated[int, msgspec.Meta(ge=86_400)] = 90 * 86_400
    """How long files without a record in the store are kept in the folder `quarantine` before they are deleted."""


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Section [batch]."""

    max_lines: Positive = 50_000
    """The most lines of one batch."""
    window: Positive = 1024
    """The most lines of one batch that are in the queue at the same time; the others wait in the file."""
    retries: Annotated[int, msgspec.Meta(ge=0, le=100)] = 2
    """How often a line is retried after an engine error."""
    enqueued_tokens: Positive | None = None
    """The most tokens of one tenant's unfinished batches together: for each choice of a line (n times prompts) its
    prompt, at about four characters a token, and max_tokens, or without it the engine's default. A key may have its own
    (`batch_tokens` in its [keys] row). None: no limit."""
