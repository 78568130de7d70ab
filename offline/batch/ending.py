"""Ending notes: files on disk that record how each batch ended, in case the store is restored from an older backup.

Once a batch has ended, its work folder is removed and only the store knows the outcome. A restored store may list the
batch as unfinished; the note then gives it the outcome again. These functions block: call them from a thread.
"""

from __future__ import annotations

import logging

import msgspec

from streaming.batches.batch import BatchProgress, BatchState
from streaming.batches.file_store import FileStore
from streaming.batches.files import StoredFile

log = logging.getLogger(__name__)


class Ending(msgspec.Struct, frozen=True):
    """Final state of a batch, with its counts and its output files."""

    state: BatchState
    progress: BatchProgress
    files: tuple[StoredFile, ...] = ()


def note_ending(file_store: FileStore, batch_id: str, epoch: int, ending: Ending) -> None:
    """Write the note; call this before the store gets the outcome. Raises OSError.

    Each epoch has a note of its own, so a turn that lost its lease cannot overwrite the note of the next one.
    """
    file_store.note(batch_id, epoch, msgspec.json.encode(ending))


def noted_ending(file_store: FileStore, batch_id: str) -> Ending | None:
    """Return the newest ending whose files exist, and bring them back from quarantine if needed. Raises OSError."""
    for data in file_store.notes(batch_id):
        try:
            ending = msgspec.json.decode(data, type=Ending)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("the note of a batch's end cannot be read: %s", error, extra={"batch": batch_id})
            continue
        if all(file_store.bring_back(file.id) for file in ending.files):
            return ending
    return None
