"""Exceptions of the store and the queue."""

from __future__ import annotations

from penstock.text import counted


class StreamingError(Exception):
    """Base class of the errors of `streaming`."""


class DecodeError(StreamingError):
    """Raised when bytes from Redis are not a message of Penstock."""

    def __init__(self, data: bytes, cause: Exception) -> None:
        super().__init__(f"{len(data)} bytes are not a message: {cause}")


class NewerMessage(DecodeError):
    """Raised when bytes are a valid message of a newer version of Penstock, which this process cannot decode."""

    def __init__(self, data: bytes) -> None:
        StreamingError.__init__(self, f"{len(data)} bytes are a message of a newer version of Penstock")


class MalformedJob(StreamingError):
    """Raised when the record of a job is malformed (the reader then fails the job), or when a dead letter is replayed
    whose job has no body."""


class Unavailable(StreamingError):
    """Raised when Redis does not answer, or refuses to write."""


class Loading(Unavailable):
    """Raised when Redis answers that it still reads its data: it will be available soon."""


class Fenced(StreamingError):
    """Raised when a worker's lease has lapsed and was fenced: the store refuses its writes and it must stop."""


class Rewound(StreamingError):
    """Raised when the store has lost frames that a worker wrote."""

    def __init__(self, partitions: set[int]) -> None:
        super().__init__(f"the store lost frames of partitions {sorted(partitions)}")


class LaneFull(StreamingError):
    """Raised when a lane has reached its limit of waiting jobs. `own`: those of the tenant."""

    def __init__(self, waiting: int, own: int) -> None:
        super().__init__(f"{counted(waiting, 'job is', 'jobs are')} waiting in this lane already, {own} of this tenant")
        self.waiting, self.own = waiting, own


class StoreFull(StreamingError):
    """Raised when the bytes a job may write do not fit into the store's memory beside those reserved for other jobs.
    `needed`: bytes of its request and its reservation; 0 if they were not counted."""

    def __init__(self, reason: str, needed: int = 0) -> None:
        super().__init__(reason)
        self.needed = needed


class NeverFits(StoreFull):
    """Raised when a job needs more memory than an empty store gives to one job: a retry cannot succeed. `needed` and
    `most` in bytes."""

    def __init__(self, needed: int, most: int) -> None:
        super().__init__(f"the job needs {needed} bytes of the store, which never gives more than {most}", needed)
        self.most = most


class QuotaExceeded(StoreFull):
    """Raised when a tenant has reached a quota. `name`: its field in streaming.jobs.settings.QuotaSettings; of
    `store_share`, `used` has the bytes that the ends of jobs will give back."""

    def __init__(self, name: str, used: int, limit: int) -> None:
        super().__init__(f"{used} of {limit} are kept already ({name})")
        self.name, self.used, self.limit = name, used, limit


class LimitReached(StoreFull):
    """Raised when a job would exceed a limit of its key or its tenant.

    `account`: which of them, as `put` names it; `name`: the limit's field in streaming.jobs.settings.LimitSettings;
    `used`: of a sum, what is used or reserved of its limit; `retry_ms`: until it may hold, 0 if that is not known, -1:
    never; `rates`: as streaming.jobs.queue.Accepted has them.
    """

    def __init__(
        self, account: str, name: str, limit: float, used: float, retry_ms: int, rates: tuple[int, ...]
    ) -> None:
        super().__init__(f"{name} of {account} is reached: {limit:g}")
        self.account, self.name, self.limit, self.used = account, name, limit, used
        self.retry_ms, self.rates = retry_ms, rates


class NoCapacity(StreamingError):
    """Raised when a job with `do_not_queue` finds no idle worker."""


class KeyReused(StreamingError):
    """Raised when an idempotency key was used before with another body."""


class Abandoned(StreamingError):
    """Raised when the job of an idempotency key was cancelled meanwhile, because its client disconnected."""


class UnknownJob(StreamingError):
    """Raised when no job of that id is kept."""


class UnknownFile(StreamingError):
    """Raised when no file of that id is kept."""


class UnknownBatch(StreamingError):
    """Raised when no batch of that id is kept."""


class UnknownConversation(StreamingError):
    """Raised when the store has no such conversation of this tenant."""


class ConversationChanged(StreamingError):
    """Raised when a conversation is no longer as the caller has read it, or another turn has begun."""


class UnknownMessage(StreamingError):
    """Raised when no webhook message of that id is kept."""


class Superseded(StreamingError):
    """Raised when a newer notice of a batch, or another process's lease of it, supersedes this one."""
