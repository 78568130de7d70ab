"""What can go wrong on the wire, one class each."""

from __future__ import annotations


class StreamingError(Exception):
    """Raised when the wire cannot do what was asked; the root of this tree."""


class DecodeError(StreamingError):
    """Raised when bytes from the wire are not a message of ours."""

    def __init__(self, data: bytes, cause: Exception) -> None:
        super().__init__(f"{len(data)} bytes are not a message: {cause}")
        self.data = data


class NewerMessage(DecodeError):
    """Raised when bytes are a message of a newer version of Penstock: sound, but this process cannot read it."""

    def __init__(self, data: bytes) -> None:
        StreamingError.__init__(self, f"{len(data)} bytes are a message of a newer version of Penstock")
        self.data = data


class MalformedJob(StreamingError):
    """Raised when the record of a job cannot be read: whoever reads it fails the job. Also when a dead letter is
    replayed whose job has no body."""


class Unavailable(StreamingError):
    """Raised when Redis does not answer, or refuses to write."""


class Fenced(StreamingError):
    """Raised when a worker's lease was taken from it: what it writes is refused and it must stop."""


class Rewound(StreamingError):
    """Raised when the store turns out to have lost what a worker wrote."""

    def __init__(self, partitions: set[int]) -> None:
        super().__init__(f"the store lost frames of partitions {sorted(partitions)}")
        self.partitions = partitions


class LaneFull(StreamingError):
    """Raised when a lane holds as many waiting jobs as it may."""

    def __init__(self, waiting: int) -> None:
        super().__init__(f"{waiting} jobs are waiting in this lane already")
        self.waiting = waiting


class StoreFull(StreamingError):
    """Raised when what a job may write, beside what is owed to others, does not fit into the store's memory. `needed`:
    bytes it brings and may write; 0 if that was not counted."""

    def __init__(self, reason: str, needed: int = 0) -> None:
        super().__init__(reason)
        self.needed = needed


class NeverFits(StoreFull):
    """Raised when a job needs more memory than the store gives to new jobs while it holds no other: waiting is no use.
    `needed` and `most` in bytes."""

    def __init__(self, needed: int, most: int) -> None:
        super().__init__(f"the job needs {needed} bytes of the store, which never gives more than {most}", needed)
        self.most = most


class QuotaExceeded(StoreFull):
    """Raised when a tenant keeps as much as it may. `name` is the quota's (streaming.settings.QuotaSettings)."""

    def __init__(self, name: str, used: int, limit: int) -> None:
        super().__init__(f"{used} of {limit} are kept already ({name})")
        self.name, self.used, self.limit = name, used, limit


class NoCapacity(StreamingError):
    """Raised when a job that must not queue would have to."""


class KeyReused(StreamingError):
    """Raised when an idempotency key comes back with another body."""


class Abandoned(StreamingError):
    """Raised when the job an idempotency key led to was cancelled since, because its client's connection was lost."""


class UnknownJob(StreamingError):
    """Raised when no job of that id is kept."""


class UnknownFile(StreamingError):
    """Raised when no file of that id is kept."""


class UnknownBatch(StreamingError):
    """Raised when no batch of that id is kept."""


class UnknownMessage(StreamingError):
    """Raised when no webhook message of that id is kept."""


class Superseded(StreamingError):
    """Raised when a batch need not be worked on: it was told of anew since, or another works on it."""
