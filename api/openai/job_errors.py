"""Errors of accepted jobs: why there is no result, or not yet, and whether a retry helps."""

from __future__ import annotations

from collections.abc import Mapping

from api.openai.errors import FINAL, ApiError, retry_after
from penstock.engine import Failure
from streaming.jobs.codec import Terminal
from streaming.jobs.job import CancelledBy, JobState


def job_unreadable(job_id: str, retry_s: float = 1) -> ApiError:
    """The request was accepted before, under its idempotency key, and its job cannot be read now."""
    message = (
        f"The request was accepted before as {job_id}, and the queue does not answer now. Send it again with the "
        f"same Idempotency-Key, or read it at /v1/jobs/{job_id}."
    )
    headers = {"X-Job-Id": job_id, "Location": f"/v1/jobs/{job_id}"}
    return ApiError(503, "store_unavailable", message, headers=retry_after(retry_s) | headers)


def wait_timeout(job_id: str, waited_s: float) -> ApiError:
    """The job continues, so a retry would compute it twice."""
    message = (
        f"No result after {waited_s:g} s. The job goes on: read it at /v1/jobs/{job_id}, "
        "or ask with stream: true, which has no such limit."
    )
    headers = {"X-Job-Id": job_id, "Location": f"/v1/jobs/{job_id}"}
    return ApiError(504, "wait_timeout", message, headers=FINAL | headers)


def wait_cut_off(job_id: str, *, repeatable: bool) -> ApiError:
    """The process stops before the job's end. `repeatable`: another try leads to the same job, and computes nothing
    twice."""
    message = f"This server is shutting down. The job goes on: read it at /v1/jobs/{job_id}."
    headers = {"X-Job-Id": job_id, "Location": f"/v1/jobs/{job_id}"}
    return ApiError(503, "draining", message, headers=(retry_after(1) if repeatable else FINAL) | headers)


def stream_reset(job_id: str) -> ApiError:
    """The store lost tokens that were already sent, and others replaced them: the two texts must not be joined."""
    message = f"The store lost part of this stream. Read it again from its start at /v1/jobs/{job_id}/events."
    return ApiError(500, "stream_reset", message, headers=FINAL | {"X-Job-Id": job_id})


def resume_impossible(job_id: str) -> ApiError:
    """The worker was lost in the middle of JSON or of tool calls, and the answer is computed anew."""
    message = (
        "The worker was lost while it generated JSON or tool calls, which its engine cannot continue, so the answer is "
        f"computed again from its beginning. Read it at /v1/jobs/{job_id}, or as it comes at /v1/jobs/{job_id}/events."
    )
    return ApiError(500, "resume_impossible", message, headers=FINAL | {"X-Job-Id": job_id})


def deadline_exceeded() -> ApiError:
    return ApiError(408, "deadline_exceeded", "The job's deadline passed before its last token.", headers=FINAL)


CANCELLED: Mapping[str, str] = {
    CancelledBy.READER: "The job was cancelled because its reader left. queue.on_disconnect can let a job go on.",
    CancelledBy.SLOW_READER: (
        "The job was cancelled because its reader took nothing for too long, so its connection was closed. "
        "queue.on_disconnect can let a job go on."
    ),
    CancelledBy.OWNER: "The job was cancelled by its owner.",
    CancelledBy.ADMIN: "The job was cancelled by an administrator.",
    CancelledBy.BATCH: "The job was cancelled with its batch.",
    CancelledBy.NOT_ACCEPTED: (
        "The job was cancelled because the queue answered too late: its client was told that it was not accepted."
    ),
    CancelledBy.ENGINE: "The job was cancelled by its engine.",
}
"""Who cancelled a job and why, by CancelledBy."""


def job_cancelled(by: str = "") -> ApiError:
    """`by`: who cancelled it, as CancelledBy; "": not known."""
    message = CANCELLED.get(by, "The job was cancelled.")
    return ApiError(409, "job_cancelled", message, headers=FINAL, type="cancelled_error", cancelled_by=by or None)


def from_failure(failure: Failure) -> ApiError:
    """A failed job's error. The queue has tried already as often as it may, so libraries must not try again."""
    retried = failure.status in (408, 409, 429) or failure.status >= 500
    headers = FINAL if retried else {}
    return ApiError(failure.status, failure.code, failure.message, param=failure.param, headers=headers)


def from_terminal(terminal: Terminal) -> ApiError:
    """The error for a job that ended in any state but completed."""
    if terminal.state is JobState.CANCELLED:
        return job_cancelled(terminal.cancelled_by)
    if terminal.failure is not None:
        return from_failure(terminal.failure)
    match terminal.state:
        case JobState.EXPIRED:
            return deadline_exceeded()
        case _:
            return ApiError(500, "job_failed", "The job failed and left no reason.", headers=FINAL)
