"""Bounds of an engine's output: fails a job alone if the engine gave a value for it that cannot be stored.

msgpack holds integers of 64 bits and text of valid Unicode, the store's scripts count in doubles. Output beyond that
would otherwise stay in the worker's writer, and no later job of the partition would ever end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from penstock.engine import Failure, Piece
from streaming.jobs.codec import encode
from streaming.jobs.job import JobState
from streaming.jobs.terminal import Terminal, without_rows
from streaming.redis.clock import Clock
from workers.attempt import Attempt

MAX_TOTAL = 2**53 - 1
"""The largest token count of a job: the store's scripts count exactly up to it."""

log = logging.getLogger(__name__)


def unusable_piece(
    attempt: Attempt, index: int, piece: Piece, error: Exception, stop: Callable[[Attempt], None]
) -> Piece:
    """Fail the job of a piece that `Attempt.take` raised on, and call `stop` if its choice has not ended. Returns the
    piece without its content."""
    failure = _failure(attempt, error)
    if not attempt.stopped:
        log.error("%s", failure.message, extra={"job": attempt.job.id})
        attempt.stop(JobState.FAILED, failure)
        if not piece.last:
            stop(attempt)
    if not piece.last:
        return Piece(piece.id)
    attempt.refuse(index, failure)
    return Piece(piece.id, failure=failure)


def terminal_of(attempt: Attempt, worker: str, clock: Clock) -> Terminal:
    """The terminal record of a job that is over: failed, without counts and times, if those cannot be stored."""
    try:
        end = attempt.terminal(worker, attempt.stamps.generated(clock, attempt.partition))
        _check(end)
    except Exception as error:  # noqa: BLE001 - boundary: whatever the engine gave fails its own job, and no other
        failure = _failure(attempt, error)
        log.error("%s", failure.message, extra={"job": attempt.job.id})
        return attempt.failed_terminal(worker, failure)
    return end


def _check(end: Terminal) -> None:
    """Raises OverflowError, ValueError or TypeError if a terminal cannot be stored. Its rows are encoded already."""
    encode(without_rows(end))
    encode(end.generated)
    if max(end.usage.prompt, end.usage.completion, end.usage.cached) > MAX_TOTAL:
        raise OverflowError(f"a token count above {MAX_TOTAL}")


def _failure(attempt: Attempt, error: Exception) -> Failure:
    cause = f"{type(error).__name__}: {ascii(str(error))[1:-1][:200]}"
    message = f"The engine of {attempt.job.model} gave a value that cannot be stored ({cause})."
    return Failure("engine_error", message, 500)
