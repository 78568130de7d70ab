"""Error answers: HTTP status, code and message of each refusal, and whether client libraries should retry.

The errors of connections are in api/stream/connection_guard.py.

OpenAI's libraries choose the exception class by the HTTP status alone, and retry 408, 409, 429 and 5xx automatically.
So an answer has `x-should-retry: false` if a retry cannot help.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from penstock.engine import Failure
from penstock.text import counted
from streaming.errors import LimitReached, QuotaExceeded
from streaming.jobs.codec import Terminal
from streaming.jobs.job import TASKS, CancelledBy, Job, JobState, prompt_count
from streaming.order import Priority


class Wait(NamedTuple):
    """Expected time from now until a worker starts a job, in milliseconds."""

    eta_ms: int
    low_ms: int | None = None
    """Nine of ten jobs with this estimate wait at least so long; None: too few waits were measured."""
    high_ms: int | None = None
    """Nine of ten wait at most so long."""


def wait_fields(wait: Wait | None) -> dict[str, int | None]:
    """Return the fields of a wait in a job object or an event; all null if it is unknown."""
    known = wait or (None, None, None)
    return dict(zip(("eta_ms", "eta_low_ms", "eta_high_ms"), known, strict=True))


MAX_RETRY_S = 120
"""Told to wait any longer, OpenAI's libraries give up at once."""

FINAL = {"x-should-retry": "false"}
BEARER = {"WWW-Authenticate": "Bearer"}

_MIB = 1 << 20

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """Raised when a request is answered with an error. `type` follows from the status, if it is not given.

    `eta_ms`, in a refusal for load: milliseconds until a job put now would start. `cancelled_by`: as CancelledBy.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        eta_ms: int | None = None,
        type: str = "",  # noqa: A002
        cancelled_by: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.eta_ms, self.cancelled_by = eta_ms, cancelled_by
        self.type = type or _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body, and the data of an error frame in a stream."""
        error: dict[str, Any] = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        if self.eta_ms is not None:
            error["eta_ms"] = self.eta_ms
        if self.cancelled_by is not None:
            error["cancelled_by"] = self.cancelled_by
        return {"error": error}


class ErrorKind(NamedTuple):
    """What all errors of one kind share."""

    status: int
    code: str
    param: str | None = None
    headers: Mapping[str, str] = {}

    def says(self, text: str) -> partial[ApiError]:
        """Return the function that makes errors of this kind, all with this text."""
        return partial(ApiError, self.status, self.code, text, param=self.param, headers=self.headers)


def retry_after(seconds: float) -> dict[str, str]:
    """Headers that ask for a retry in `seconds`, at least one and never more than a client library accepts."""
    wait_s = min(max(seconds, 1.0), MAX_RETRY_S)
    return {"Retry-After": str(math.ceil(wait_s)), "retry-after-ms": str(math.ceil(wait_s * 1000))}


SOON = retry_after(1)


# --- the request itself --------------------------------------------------------------------------------------------


def invalid_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, "invalid_request_error", message, param=param)


def refuse_if(condition: object, param: str, what: str) -> None:
    """Raise ApiError (400) about a field if the condition holds; `what` begins with a verb."""
    if condition:
        raise invalid_request(f"{param} {what}.", param)


def content_filter(rule: str, param: str) -> ApiError:
    return ApiError(400, "content_filter", f'The content rule "{rule}" of this server refuses the request: {param} has '
                    "something that may not be sent. Take it out.", param=param)  # fmt: skip


def too_large_for_store(job: Job, needed: int) -> ApiError:
    """`needed`: bytes that the job brings and may write."""
    param = "prompt" if prompt_count(job.prompt) > 1 else "n" if job.sampling.n > 1 else "max_tokens"
    remedy = "Lower max_tokens or n, send the prompts in several requests, or leave logprobs out."
    if job.task is not None:
        param = TASKS[job.task.kind].field if job.response is None else "input"
        remedy = f"Send {param} in several requests."
    message = (
        f"The request and its answer may need {needed / _MIB:,.1f} MiB of the store, more than one request may have, "
        f"however long it waits. {remedy}"
    )
    return ApiError(400, "too_large_for_store", message, param=param)


def unknown_route(base_path: str = "", meant: str = "") -> ApiError:
    """`meant`: the path below the base path that was probably meant."""
    hint = f"Did you mean {base_path}{meant[:256]}?" if meant else f"GET {base_path}/openapi.json lists what there is."
    return ApiError(404, "not_found", f"There is nothing at this address. {hint}")


def method_not_allowed(allowed: Iterable[str]) -> ApiError:
    methods = ", ".join(sorted(allowed))
    return ApiError(405, "method_not_allowed", f"This address answers to {methods} only.", headers={"Allow": methods})


def payload_too_large(limit: int, setting: str = "[api] body_limit") -> ApiError:
    """`limit` in bytes, and the setting that says so. The connection ends with this answer, for most of the body is
    still to come."""
    message = f"The body is larger than the {limit} bytes accepted here ({setting})."
    return ApiError(413, "payload_too_large", message, headers={"Connection": "close"})


def body_too_complex(limit: int) -> ApiError:
    """`limit` as in api/openai/json_body.py."""
    message = (
        f"The body has too many values: its weight is more than {limit} (8 for each list and object, 4 for each key, "
        "1 for each comma). Send fewer messages, parts or prompts, or text instead of token ids."
    )
    return ApiError(400, "body_too_complex", message)


unsupported_media_type = ErrorKind(415, "unsupported_media_type").says("The body must be JSON: application/json.")
unsupported_upload = ErrorKind(415, "unsupported_media_type").says("The body must be multipart/form-data.")


def unsupported_coding(known: Iterable[str]) -> ApiError:
    names = ", ".join(known)
    message = f"The body has a Content-Encoding that is not supported here. Send it as {names}, or without one."
    return ApiError(415, "unsupported_content_encoding", message, headers={"Accept-Encoding": names})


def coding_mismatch(name: str) -> ApiError:
    message = f"The body is not what its Content-Encoding says: it is not valid {name} data, or not whole."
    return ApiError(400, "invalid_content_encoding", message)


def encoded_part(field: str) -> ApiError:
    message = f"A part of the body has a {field}. Encode the whole body instead, and send it with a Content-Encoding."
    return ApiError(415, "unsupported_content_encoding", message)


def upload_stalled(silence_s: float) -> ApiError:
    return ApiError(408, "upload_stalled", f"Nothing came for {silence_s:g} s. Nothing was kept; send it again.")


# --- who sent it ---------------------------------------------------------------------------------------------------


def foreign_host(host: str) -> ApiError:
    """The Host header is none of this server's names; without keys, these are loopback names and those listed."""
    message = (
        f"The request's Host {host[:128]!r} is not one of this server's names. Use http://127.0.0.1 or "
        "http://localhost with its port, or add the name to [api] hosts. Without an API key ([keys.<name>]) there are "
        "no other names."
    )
    return ApiError(421, "misdirected_request", message)


def foreign_origin(origin: str) -> ApiError:
    """A page may not use this server: without keys, pages of other origins are refused. `origin` is its Origin header,
    or what else its browser says of it."""
    fix = "Add the origin, such as https://app.example, to [api] cors_origins and restart."
    return ApiError(403, "foreign_origin", f"Pages of {origin[:128]!r} may not use this server. {fix}")


proxy_without_keys = ErrorKind(403, "proxy_without_keys").says(
    "A proxy forwards to this server, which has no API keys. Configure a key ([keys.<name>])."
)
"""A server without keys cannot tell a proxy's clients from programs of this machine, so it refuses them."""


def invalid_api_key(message: str) -> ApiError:
    return ApiError(401, "invalid_api_key", message, headers=BEARER)


admin_token_required = ErrorKind(401, "admin_token_required", headers=BEARER).says(
    "Without API keys /admin needs the admin token of this server. `penstock up` writes a new one at each start to "
    "run/admin-token in its data folder, and the penstock command sends it by itself. Send it as 'Authorization: "
    "Bearer <token>'."
)
admin_not_configured = ErrorKind(403, "admin_not_configured").says(
    "Neither an API key nor an admin token is configured, so nobody may administer this server. Add a key with "
    "admin = true ([keys.<name>]), or set [api] admin_token_sha256 to the SHA-256 of a token of yours."
)
permission_denied = ErrorKind(403, "permission_denied").says(
    "This key may not administer the queue (admin = true in its [keys] row)."
)
key_not_found = ErrorKind(404, "key_not_found").says("There is no created key with this id.")
key_revoked = ErrorKind(409, "key_revoked", headers=FINAL).says("This key was revoked for good. Create another one.")
key_ended = ErrorKind(401, "invalid_api_key", headers=BEARER).says(
    "The API key of this request was revoked, or has expired, while it was answered."
)


session_by_token = ErrorKind(403, "permission_denied").says(
    "A token opens no session of the console, which would outlive it. Use an admin key."
)
issuer_unavailable = ErrorKind(503, "issuer_unavailable", headers=SOON).says(
    "This token cannot be checked now, because its issuer does not answer ([oidc]). Try again."
)


def beyond_own_key(field: str) -> ApiError:
    """An admin with a created key would make or change one that may more than its own."""
    message = f"Your key cannot make, change or rotate one with more than it has itself ({field})."
    return ApiError(403, "permission_denied", message, param=field)


def outside_of_key(field: str, name: str) -> ApiError:
    """A key is for some `models` or `endpoints`, and this is none of them."""
    return ApiError(403, "permission_denied", f"This API key is not for {name!r} (`{field}` of the key).")


# --- what is asked for ---------------------------------------------------------------------------------------------


def model_not_found(model: str, known: Iterable[str]) -> ApiError:
    names = ", ".join(sorted(known)) or "none"
    message = f"The model {model[:128]!r} does not exist here. Models served: {names}."
    return ApiError(404, "model_not_found", message, param="model")


job_not_found = ErrorKind(404, "job_not_found").says("There is no such job.")
"""As below, the same words whether it never was, was deleted, or belongs to another tenant."""
file_not_found = ErrorKind(404, "file_not_found").says("There is no such file.")
batch_not_found = ErrorKind(404, "batch_not_found").says("There is no such batch.")
response_not_found = ErrorKind(404, "response_not_found").says("There is no such response, or no longer.")
conversation_not_found = ErrorKind(404, "conversation_not_found").says("There is no such conversation.")
conversation_item_not_found = ErrorKind(404, "item_not_found").says("The conversation has no such item.")
tenant_not_found = ErrorKind(404, "tenant_not_found").says("No key names this tenant, and it keeps nothing here.")
dead_letter_not_found = ErrorKind(404, "dead_letter_not_found").says("There is no such dead letter, or no longer.")
webhook_not_found = ErrorKind(404, "webhook_not_found").says("There is no such webhook message, or no longer.")


def previous_response_not_found(response_id: str) -> ApiError:
    message = f"There is no response {response_id[:80]!r}: it is unknown, deleted, not stored, or no longer kept."
    return ApiError(400, "previous_response_not_found", message, param="previous_response_id")


conversation_unreadable = ErrorKind(500, "malformed_conversation", headers=FINAL).says(
    "What the store holds of this conversation cannot be read. Delete it, and begin another."
)
conversation_locked = ErrorKind(400, "conversation_locked", param="conversation").says(
    "Another response of this conversation has not ended, or its items have just changed. Try again later."
)
"""OpenAI answers so, too. Client libraries do not try again by themselves."""
mutually_exclusive = ErrorKind(400, "mutually_exclusive_parameters", param="conversation").says(
    "Send previous_response_id or conversation, but not both: each says what stands before the input."
)
response_still_ends = ErrorKind(409, "response_still_ends", headers=SOON).says(
    "The response is cancelled, and its worker has not stopped yet. Delete it again in a moment."
)
"""A cancelled response whose worker has not confirmed its end cannot be deleted yet."""
offset_gone = ErrorKind(410, "offset_gone", param="offset").says(
    "The stream has no such offset. Read it again from its beginning: offset=-1."
)
"""The store was restored from an older copy, or the offset was made up."""
cursor_lost = ErrorKind(409, "stream_reset", param="starting_after", headers=FINAL).says(
    "This answer has no such event, or no longer. Read it again from its first event, without starting_after."
)
"""A number of an event may name another event now."""


def batch_not_commanded(command: str, status: str) -> ApiError:
    message = f"A batch with status {status!r} cannot be told to {command}."
    return ApiError(409, "batch_not_steerable", message, headers=FINAL)


def nothing_to_replay(job_id: str, fault: str) -> ApiError:
    message = f"The body of {job_id} cannot be read ({fault}), so there is nothing to replay. Drop the dead letter."
    return ApiError(409, "malformed_job", message, headers=FINAL)


def result_expired(job_id: str) -> ApiError:
    return ApiError(410, "result_expired", f"The result of {job_id} was kept for the retention time and is gone.")


idempotency_key_reused = ErrorKind(422, "idempotency_key_reused").says(
    "This Idempotency-Key came with another body before. Use a new key for a new request."
)


# --- not now -------------------------------------------------------------------------------------------------------


def queue_full(waiting: int, own: int, retry_s: float, eta_ms: int | None = None) -> ApiError:
    """The lane holds no more jobs. `own`: those of the tenant."""
    jobs = counted(waiting, "job is", "jobs are")
    message = f"{jobs} waiting in this lane, {own:,} of them yours, and it holds no more of yours. Try again later."
    return ApiError(429, "queue_full", message, headers=retry_after(retry_s), eta_ms=eta_ms)


def deadline_unreachable(field: str, limit_ms: int, lane: Priority, wait: Wait) -> ApiError:
    """The request would not start in the time that it allows, so it is not queued. Retry-After: the time until it would
    start within its limit if no new work came."""
    retry = retry_after((wait.eta_ms - limit_ms) / 1000)
    higher = "" if lane is Priority.INTERACTIVE else " choose a higher lane,"
    least = "" if wait.low_ms is None else f" (nine of ten wait at least {wait.low_ms:,} ms)"
    message = (
        f"{field} is {limit_ms:,} ms, but a request in the {lane} lane waits about {wait.eta_ms:,} ms now{least}, so "
        f"nothing was queued. Allow more time,{higher} or try again in {retry['Retry-After']} s."
    )
    return ApiError(429, "deadline_unreachable", message, param=field, headers=retry, eta_ms=wait.eta_ms)


SHARE_RETRY_S = 5
"""Retry-After for a tenant that has its share of the store: an end of one of its jobs makes room."""
_RETENTION = "Jobs are forgotten [redis] retention_s after their end, which makes room."
_QUOTAS = {
    "jobs": ("jobs", _RETENTION),
    "job_bytes": ("bytes of requests", _RETENTION),
    "result_bytes": ("bytes of results", _RETENTION),
    "file_bytes": ("bytes of files", "Delete files that you do not need (DELETE /v1/files/{id})."),
}
"""What each quota counts, and what makes room."""


def quota_exceeded(quota: QuotaExceeded, param: str | None = None) -> ApiError:
    """The tenant keeps as much as it may. A client library's next tries would be refused as well."""
    if quota.name == "store_share":
        message = (
            "Your requests, their results, and what your unfinished requests may still write take your share of the "
            "store. Wait until some have ended or are forgotten ([redis] retention_s), or lower max_tokens, n and "
            "logprobs. The limit is store_share of [quotas], or of quotas in the row of your key in [keys]."
        )
        headers = retry_after(SHARE_RETRY_S) if quota.used else FINAL
        return ApiError(429, "quota_exceeded", message, param=quota.name, headers=headers)
    what, fix = _QUOTAS[quota.name]
    setting = f"The limit is {quota.name} of [quotas], or of quotas in the row of your key in [keys]."
    message = f"You keep {quota.used} {what} and may keep {quota.limit}. {fix} {setting}"
    return ApiError(429, "quota_exceeded", message, param=param or quota.name, headers=FINAL)


_RATES = ("limit-requests", "remaining-requests", "reset-requests", "limit-tokens", "remaining-tokens", "reset-tokens")
RATE_HEADERS = tuple([f"x-ratelimit-{name}" for name in _RATES])


def rate_headers(rates: Sequence[int]) -> dict[str, str]:
    """What a key and its tenant have left of their rates, as OpenAI names it. `rates`: as streaming.jobs.queue.Accepted
    has them."""
    shown: dict[str, str] = {}
    for at in (0, 3):
        if rates[at]:
            values = (str(rates[at]), str(rates[at + 1]), f"{rates[at + 2] / 1000:g}s")
            shown |= zip(RATE_HEADERS[at : at + 3], values, strict=True)
    return shown


def limit_reached(reached: LimitReached) -> ApiError:
    """A key or a tenant would use more than it may: a rate and a number of unfinished requests come back soon, a day's
    or a month's budget does not, and a request that is greater than the whole limit never fits."""
    kind, _, name = reached.account.partition(":")
    whose = "this API key" if kind == "key" else f"tenant {name!r}"
    limit = f"{reached.name} of {whose} is {reached.limit:,g}"
    headers, wait_s = rate_headers(reached.rates), math.ceil(reached.retry_ms / 1000)
    if reached.retry_ms < 0:
        message = f"{limit}, and this request alone may need more: its prompt and max_tokens, for each of n choices."
        fix = "Lower max_tokens or n, or shorten the prompt."
        return ApiError(400, "request_exceeds_limit", f"{message} {fix}", param=reached.name, headers=headers)
    if not reached.name.endswith(("_day", "_month")):
        used = "" if reached.name.endswith("_minute") else f", and {reached.used:,g} have not ended"
        headers |= retry_after(wait_s)
        message = f"{limit}{used}. Try again in {headers['Retry-After']} s."
        return ApiError(429, "rate_limit_exceeded", message, param=reached.name, headers=headers)
    message = f"{limit}, and {reached.used:,g} is used or reserved. It begins anew in {wait_s:,} s (at midnight UTC)."
    headers |= FINAL | {"Retry-After": str(wait_s)}
    return ApiError(429, "budget_exceeded", message, param=reached.name, headers=headers)


def no_capacity(retry_s: float, eta_ms: int | None = None) -> ApiError:
    message = "No worker is free, and the request said not to queue (queue.do_not_queue)."
    return ApiError(503, "no_capacity", message, headers=retry_after(retry_s), eta_ms=eta_ms)


def links_in_the_way(retry_s: float) -> ApiError:
    message = f"Other links were being followed for {retry_s:g} s. Send bytes, or try again later."
    return ApiError(503, "no_capacity", message, headers=retry_after(retry_s))


def no_verdict(model: str) -> ApiError:
    message = f"The moderation model {model!r} gave no verdict in time, or none that can be read. Try again later."
    return ApiError(503, "no_verdict", message, headers=retry_after(5))


def store_full(reason: str) -> ApiError:
    """Admission ends before the store is full, so that what was accepted can be finished."""
    return ApiError(503, "no_capacity", f"Nothing more is accepted now: {reason}.", headers=retry_after(5))


draining = ErrorKind(503, "draining", headers=SOON).says("This server is shutting down. Try again.")
put_cut_off = ErrorKind(503, "draining", headers=SOON).says(
    "This server is shutting down, and it is not known whether the request was accepted. Send it again; with an "
    "Idempotency-Key, it is computed once."
)
"""The process stops while a put is not answered."""
not_accepted = ErrorKind(503, "store_unavailable", headers=SOON).says(
    "The queue does not answer, so the request was not accepted; should it arrive late, it is cancelled there. Try "
    "again; with an Idempotency-Key, the request is computed once."
)
"""The put of a request without an idempotency key was not answered. The caller withdraws it."""
acceptance_unknown = ErrorKind(503, "store_unavailable", headers=SOON).says(
    "The queue does not answer, so it is not known whether the request was accepted. Send it again with the same "
    "Idempotency-Key: it is computed once."
)
"""The put of a request with an idempotency key was not answered: it may have arrived, or not."""


def store_unavailable(*, read: bool = False) -> ApiError:
    """`read`: the request would have changed nothing, or was not begun."""
    outcome = "A change may have been made: look at what exists before you try again."
    message = f"The queue does not answer{', and nothing was changed. Try again.' if read else f'. {outcome}'}"
    return ApiError(503, "store_unavailable", message, headers=SOON)


def internal_error(request_id: str) -> ApiError:
    message = f"The server failed on this request. Its log has the cause under request id {request_id}."
    return ApiError(500, "internal_error", message)


# --- of a job ------------------------------------------------------------------------------------------------------


def read_at(job: Job) -> str:
    """The path of a job's answer, in the form of the API that its client speaks."""
    if job.message is not None:
        return f"/v1/messages/msg_{job.id}"
    if job.response is not None and job.response.store:
        return f"/v1/responses/resp_{job.id}"
    return f"/v1/jobs/{job.id}"


def _events_at(job: Job) -> str:
    at = read_at(job)
    return f"{at}/events" if at.startswith("/v1/jobs/") else f"{at}?stream=true"


def _job_at(job: Job) -> dict[str, str]:
    return {"X-Job-Id": job.id, "Location": read_at(job)}


def job_unreadable(job: Job) -> ApiError:
    """The request was accepted before, under its idempotency key, and its job cannot be read now."""
    fix = f"Send it again with the same Idempotency-Key, or read it at {read_at(job)}."
    message = f"The request was accepted before as {job.id}, and the queue does not answer now. {fix}"
    return ApiError(503, "store_unavailable", message, headers=SOON | _job_at(job))


def wait_timeout(job: Job, waited_s: float) -> ApiError:
    """The job continues, so a retry would compute it twice."""
    fix = f"read it at {read_at(job)}, or ask with stream: true, which has no such limit."
    message = f"No result after {waited_s:g} s. The job goes on: {fix}"
    return ApiError(504, "wait_timeout", message, headers=FINAL | _job_at(job))


def wait_cut_off(job: Job, *, repeatable: bool) -> ApiError:
    """The process stops before the job's end. `repeatable`: another try leads to the same job, and computes nothing
    twice."""
    message = f"This server is shutting down. The job goes on: read it at {read_at(job)}."
    return ApiError(503, "draining", message, headers=(SOON if repeatable else FINAL) | _job_at(job))


def stream_reset(job: Job) -> ApiError:
    """The store lost tokens that were already sent, and others replaced them: the two texts must not be joined."""
    message = f"The store lost part of this stream. Read it again from its start at {_events_at(job)}."
    return ApiError(500, "stream_reset", message, headers=FINAL | {"X-Job-Id": job.id})


def resume_impossible(job: Job) -> ApiError:
    """The worker was lost in the middle of JSON or of tool calls, and the answer is computed anew."""
    message = (
        "The worker was lost while it generated JSON or tool calls, which its engine cannot continue, so the answer is "
        f"computed again from its beginning. Read it at {read_at(job)}, or as it comes at {_events_at(job)}."
    )
    return ApiError(500, "resume_impossible", message, headers=FINAL | {"X-Job-Id": job.id})


deadline_exceeded = ErrorKind(408, "deadline_exceeded", headers=FINAL).says(
    "The job's deadline passed before its last token."
)


CANCELLED: Mapping[str, str] = {
    CancelledBy.READER: "The job was cancelled because its reader left. queue.on_disconnect can let a job go on.",
    CancelledBy.SLOW_READER: "The job was cancelled because its reader took nothing for too long.",
    CancelledBy.OWNER: "The job was cancelled by its owner.",
    CancelledBy.ADMIN: "The job was cancelled by an administrator.",
    CancelledBy.BATCH: "The job was cancelled with its batch.",
    CancelledBy.NOT_ACCEPTED: "The job was cancelled because the queue answered too late to accept it.",
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
    if terminal.state is JobState.EXPIRED:
        return deadline_exceeded()
    return ApiError(500, "job_failed", "The job failed and left no reason.", headers=FINAL)
