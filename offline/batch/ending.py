"""Notes of how batches ended, on disk beside their files, for a store that is restored to an earlier moment.

When a batch has ended its work is removed, and only the store knows how it ended. A store that forgets that, and still
has the batch as one to be worked on, is told again by the note. Blocks: call it from a thread.
"""

from __future__ import annotations

import logging

import msgspec

from streaming.batches.batch import BatchProgress, BatchState
from streaming.batches.file_store import FileStore
from streaming.batches.files import StoredFile

log = logging.getLogger(__name__)


class Ending(msgspec.Struct, frozen=True):
    """What a turn said last of a batch."""

    state: BatchState
    progress: BatchProgress
    files: tuple[StoredFile, ...] = ()


def note_ending(shelf: FileStore, batch_id: str, epoch: int, ending: Ending) -> None:
    """Before the store is told. Each turn has a note of its own, so one that was overtaken spoils no other's. Raises
    OSError."""
    shelf.note(batch_id, epoch, msgspec.json.encode(ending))


def noted_ending(shelf: FileStore, batch_id: str) -> Ending | None:
    """The last one whose files are there, out of quarantine if need be. Raises OSError."""
    for data in shelf.notes(batch_id):
        try:
            ending = msgspec.json.decode(data, type=Ending)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("the note of a batch's end cannot be read: %s", error, extra={"batch": batch_id})
            continue
        if all(shelf.bring_back(file.id) for file in ending.files):
            return ending
    return None
