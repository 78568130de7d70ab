"""OpenAPI 3.1 document: request schemas come from the pydantic models, routes and answers from the tables below."""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic.json_schema import models_json_schema

from api.auth.access import RULES, Access
from api.openai.answers import INTEGER, NUMBER, STRING, Schema, answer_schemas, any_of, ref, schema
from api.openai.batch_schemas import BatchRequest
from api.openai.schemas import ChatJobRequest, ChatRequest, CompletionJobRequest, CompletionRequest
from streaming.jobs.job import JobState


class Route(NamedTuple):
    """One row of the route table: a method on a path, and its answers."""

    method: str
    path: str
    summary: str
    answer: str
    """Name of the schema of a 2xx body, or a media type."""
    status: int = 200
    bodies: tuple[str, ...] = ()
    """Names of the alternative schemas of the request body."""
    params: tuple[str, ...] = ()
    errors: tuple[int, ...] = ()
    headers: tuple[str, ...] = ()
    or_job: bool = False
    """May answer 202 with the job instead, while it has not ended."""
    events: bool = False
    """May also answer with server-sent events."""
    form: bool = False
    """The body is a multipart upload of a file."""


CURSOR = "^[0-9]{1,15}-job_[0-9a-f]{32}$"
"""The syntax that api/jobs.py accepts."""

PLAIN: dict[str, Schema] = {
    "application/json": {"type": "object"},
    "text/event-stream": {
        "type": "object",
        "description": "One event of the stream.",
        "properties": {"event": STRING, "id": STRING, "data": STRING},
        "required": ["data"],
    },
}
"""Schemas of answers by media type; any other media type is a string."""

_ACCEPT = (400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 503)
_READ = (401, 404, 503)
_JOB_HEADERS = ("X-Job-Id", "X-Queue-Position", "X-Queue-ETA-Ms", "X-Ignored-Fields")
_CHAT, _TEXT = "ChatRequest", "CompletionRequest"
_JOBS = ("ChatJobRequest", "CompletionJobRequest")
_KEY = ("Idempotency-Key",)
_WAITING = (*_KEY, "Prefer")
_ALWAYS = ("x-request-id", "openai-processing-ms")
_ANYWHERE = (403, 421)
"""Errors that every route may answer (api/auth/hosts.py, api/auth/origins.py)."""
_ACCESS = {
    (path.replace(":path}", "}"), method): rule.access for path, rows in RULES.items() for method, rule in rows.items()
}
_SECURITY: dict[Access, list[dict[str, list[str]]]] = {Access.ANYONE: [], Access.METRICS: [{}, {"key": []}]}
"""Security of routes that differ from the document's default."""

ROUTES = (
    Route("post", "/v1/chat/completions", "Answer a conversation", "ChatCompletion", bodies=(_CHAT,), params=_WAITING,
          errors=(*_ACCEPT, 500, 504), headers=_JOB_HEADERS, or_job=True, events=True),
    Route("post", "/v1/completions", "Continue a text", "Completion", bodies=(_TEXT,), params=_WAITING,
          errors=(*_ACCEPT, 500, 504), headers=_JOB_HEADERS, or_job=True, events=True),
    Route("get", "/v1/models", "List the models", "ModelList", errors=(401, 503)),
    Route("get", "/v1/models/{model}", "Describe a model", "Model", params=("model",), errors=_READ),
    Route("post", "/v1/jobs", "Queue a job", "Job", status=202, bodies=_JOBS, params=_KEY,
          errors=_ACCEPT, headers=(*_JOB_HEADERS, "Location")),
    Route("get", "/v1/jobs", "List your jobs", "JobList", params=("status", "cursor", "limit"), errors=(400, 401, 503)),
    Route("get", "/v1/jobs/{job_id}", "Show a job", "Job", params=("job_id", "wait"), errors=(400, *_READ, 410),
          headers=("X-Job-Id",)),
    Route("get", "/v1/jobs/{job_id}/result", "Get a job's answer", "Answer", params=("job_id",),
          errors=(401, 404, 408, 409, 410, 500, 503), headers=("X-Job-Id",), or_job=True),
    Route("get", "/v1/jobs/{job_id}/events", "Follow a job, from its start or after an event", "text/event-stream",
          params=("job_id", "Last-Event-ID", "after"), errors=(400, *_READ, 410), headers=("X-Job-Id",), events=True),
    Route("get", "/v1/jobs/{job_id}/timing", "See where a job's time went", "JobTiming", params=("job_id",),
          errors=(*_READ, 410), headers=("X-Job-Id",)),
    Route("post", "/v1/jobs/{job_id}/cancel", "Cancel a job", "Job", params=("job_id",), errors=(*_READ, 410),
          headers=("X-Job-Id",)),
    Route("post", "/v1/files", "Upload a file", "File", form=True,
          errors=(400, 401, 408, 413, 415, 429, 503)),
    Route("get", "/v1/files", "List your files", "FileList", params=("purpose", "file_limit", "order", "after"),
          errors=(400, 401, 503)),
    Route("get", "/v1/files/{file_id}", "Show a file", "File", params=("file_id",), errors=_READ),
    Route("delete", "/v1/files/{file_id}", "Delete a file", "Deleted", params=("file_id",), errors=_READ),
    Route("get", "/v1/files/{file_id}/content", "Read a file", "application/octet-stream", params=("file_id",),
          errors=_READ),
    Route("post", "/v1/batches", "Compute every line of a file", "Batch", bodies=("BatchRequest",), params=_KEY,
          errors=(400, 401, 413, 415, 422, 429, 503)),
    Route("get", "/v1/batches", "List your batches", "BatchList", params=("limit", "after"), errors=(400, 401, 503)),
    Route("get", "/v1/batches/{batch_id}", "Show a batch", "Batch", params=("batch_id",), errors=_READ),
    Route("get", "/v1/batches/{batch_id}/output", "Read the answers so far", "application/jsonl",
          params=("batch_id",), errors=_READ),
    Route("get", "/v1/batches/{batch_id}/errors", "Read the lines that failed", "application/jsonl",
          params=("batch_id",), errors=_READ),
    Route("post", "/v1/batches/{batch_id}/cancel", "Cancel a batch; finished lines are kept", "Batch",
          params=("batch_id",), errors=(*_READ, 409)),
    Route("post", "/v1/batches/{batch_id}/pause", "Pause a batch: start no more lines", "Batch", params=("batch_id",),
          errors=(*_READ, 409)),
    Route("post", "/v1/batches/{batch_id}/resume", "Resume a paused batch", "Batch", params=("batch_id",),
          errors=(*_READ, 409)),
    Route("get", "/admin/dlq", "List dead letters", "DeadLetterList", params=("limit",), errors=(400, 401, 403, 503)),
    Route("get", "/admin/dlq/{letter_id}", "Show a dead letter", "DeadLetter", params=("letter_id",),
          errors=(401, 403, 404, 503)),
    Route("delete", "/admin/dlq/{letter_id}", "Drop a dead letter", "application/json", params=("letter_id",),
          errors=(401, 403, 404, 503)),
    Route("post", "/admin/dlq/{letter_id}/replay", "Replay a dead letter's job", "Job", status=202,
          params=("letter_id",), errors=(400, 401, 403, 404, 410, 429, 503), headers=("Location", "X-Job-Id")),
    Route("get", "/admin/webhooks", "List webhook messages", "WebhookMessageList", params=("limit",),
          errors=(400, 401, 403, 503)),
    Route("get", "/admin/webhooks/{message_id}", "Show a webhook message", "WebhookMessage", params=("message_id",),
          errors=(401, 403, 404, 503)),
    Route("post", "/admin/webhooks/{message_id}/replay", "Send a webhook message once more", "WebhookMessage",
          status=202, params=("message_id",), errors=(401, 403, 404, 503)),
    Route("get", "/admin/tenants", "List the storage usage of tenants", "TenantList", errors=(401, 403, 503)),
    Route("get", "/admin/tenants/{tenant}", "Show the storage usage of a tenant", "Tenant", params=("tenant",),
          errors=(400, 401, 403, 404, 503)),
    Route("get", "/admin/pools", "List worker pools, the leading scheduler and its actions", "PoolList",
          errors=(401, 403, 503)),
    Route("get", "/admin/pools/{model}", "Show a model's pool", "Pool", params=("model",), errors=(401, 403, 404, 503)),
    Route("put", "/admin/pools/{model}", "Set a number of workers by hand, or pause", "Pool", bodies=("PoolOverride",),
          params=("model",), errors=(400, 401, 403, 404, 413, 415, 503)),
    Route("delete", "/admin/pools/{model}", "Let the scheduler decide again", "Pool", params=("model",),
          errors=(401, 403, 404, 503)),
    Route("get", "/healthz", "Whether this process is alive", "application/json"),
    Route("get", "/readyz", "Whether requests can be accepted", "application/json", errors=(503,)),
    Route("get", "/version", "Which version this is", "application/json"),
    Route("get", "/metrics", "Counters for Prometheus", "text/plain", errors=(401,)),
    Route("get", "/openapi.json", "This document", "application/json"),
)  # fmt: skip

ERRORS = {
    400: "invalid_request_error, context_length_exceeded, too_large_for_store: `param` names it. body_too_complex.",
    401: "invalid_api_key: no key, or an unknown one. admin_token_required: under /admin of a server without keys.",
    403: "permission_denied: the key has no such right. foreign_origin: sent by a page of a refused origin.",
    404: "model_not_found; job_not_found, file_not_found, batch_not_found, also for those of another tenant.",
    408: "deadline_exceeded_in_queue or deadline_exceeded: its deadline passed. request_timeout: sent too slowly.",
    409: "idempotency_in_progress: repeat it in a second. job_cancelled: there is no result. batch_not_steerable.",
    410: "result_expired: the retention time is over.",
    413: "payload_too_large: the body is above the limit.",
    415: "unsupported_media_type: the body must be application/json.",
    421: "misdirected_request: sent to a Host name that this server does not answer to.",
    422: "idempotency_key_reused: an earlier request had the same key and another body.",
    429: "queue_full: the lane holds no more waiting jobs. quota_exceeded: your tenant's storage quota is used up.",
    500: "The job failed (its own code), or internal_error.",
    503: "no_capacity, draining, store_unavailable or too_many_connections: try again after Retry-After.",
    504: "wait_timeout: the answer took too long; the job goes on and X-Job-Id names it.",
}

_ERROR_HEADERS = {
    401: ("WWW-Authenticate",),
    408: ("x-should-retry",),
    409: ("Retry-After", "retry-after-ms", "x-should-retry"),
    429: ("Retry-After", "retry-after-ms", "x-should-retry"),
    500: ("x-should-retry",),
    503: ("Retry-After", "retry-after-ms"),
    504: ("X-Job-Id", "Location", "x-should-retry"),
}

HEADERS = {
    "x-request-id": "The id of this request in the logs: the one you sent, or a new one.",
    "openai-processing-ms": "Milliseconds until the answer began.",
    "X-Job-Id": "The job that serves this request; /v1/jobs/{job_id}/events resumes its stream.",
    "X-Queue-Position": "Jobs ahead of this one in its lane when it was accepted.",
    "X-Queue-ETA-Ms": "Estimated milliseconds until the job starts, with a cold start if needed; absent if unknown.",
    "X-Ignored-Fields": "Fields of the body that had no effect.",
    "Location": "Where the job can be read.",
    "Retry-After": "Seconds to wait, at most 120.",
    "retry-after-ms": "Milliseconds to wait.",
    "x-should-retry": "`false`: a retry would not help, or would do the work twice.",
    "WWW-Authenticate": "Bearer",
}


def document(version: str) -> dict[str, Any]:
    """Build the document; `version` is Penstock's."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": version, "description": "A durable queue in front of LLM engines."},
        "paths": paths,
        "components": {
            "schemas": _request_schemas() | answer_schemas(),
            "parameters": _parameters(),
            "headers": {name: {"description": words, "schema": STRING} for name, words in HEADERS.items()},
            "responses": {f"Error{status}": _error(status) for status in ERRORS} | {"Accepted": _accepted()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _operation(route: Route) -> dict[str, Any]:
    answer = {
        "description": route.summary,
        "headers": _headers((*_ALWAYS, *route.headers)),
        "content": _content(route),
    }
    answers = {str(route.status): answer}
    if route.or_job:
        answers["202"] = ref("responses", "Accepted")
    errors = {str(status): ref("responses", f"Error{status}") for status in sorted({*route.errors, *_ANYWHERE})}
    operation: dict[str, Any] = {
        "operationId": _operation_id(route),
        "summary": route.summary,
        "responses": answers | errors,
    }
    if route.params:
        operation["parameters"] = [ref("parameters", name) for name in route.params]
    if route.bodies:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": any_of(*route.bodies)}},
        }
    if route.form:
        content = {"multipart/form-data": {"schema": schema("Upload")}}
        operation["requestBody"] = {"required": True, "content": content}
    access = _ACCESS[route.path, route.method.upper()]
    if access in _SECURITY:
        operation["security"] = _SECURITY[access]
    return operation


def _operation_id(route: Route) -> str:
    words = route.path.removeprefix("/v1").replace("{", "").replace("}", "").replace(".", "_")
    return route.method + words.replace("/", "_")


def _content(route: Route) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if "/" in route.answer:
        content[route.answer] = {"schema": PLAIN.get(route.answer, STRING)}
    else:
        content["application/json"] = {"schema": schema(route.answer)}
    if route.events:
        content["text/event-stream"] = {"schema": PLAIN["text/event-stream"]}
    return content


def _accepted() -> dict[str, Any]:
    return {
        "description": "The job, which has not ended yet.",
        "headers": _headers((*_ALWAYS, *_JOB_HEADERS, "Location")),
        "content": {"application/json": {"schema": schema("Job")}},
    }


def _error(status: int) -> dict[str, Any]:
    return {
        "description": ERRORS[status],
        "headers": _headers((*_ALWAYS, *_ERROR_HEADERS.get(status, ()))),
        "content": {"application/json": {"schema": schema("Error")}},
    }


def _headers(names: tuple[str, ...]) -> dict[str, Any]:
    return {name: ref("headers", name) for name in names}


def _parameters() -> dict[str, Any]:
    def param(name: str, where: str, kind: Schema, words: str) -> Schema:
        return {"name": name, "in": where, "required": where == "path", "schema": kind, "description": words}

    params = (
        param("model", "path", STRING, "The name of a model."),
        param("job_id", "path", STRING, "The id of a job."),
        param("tenant", "path", STRING, "The name of a tenant."),
        param("message_id", "path", STRING, "The id of a webhook message."),
        param("letter_id", "path", STRING, "The id of a dead letter."),
        param("file_id", "path", STRING, "The id of a file."),
        param("batch_id", "path", STRING, "The id of a batch."),
        param("purpose", "query", STRING, "Only files of this purpose: batch or batch_output."),
        param("order", "query", {"enum": ["asc", "desc"]}, "By the time of creation."),
        param(
            "status",
            "query",
            {"enum": [state.value for state in JobState]},
            "Only jobs in this state. A page reads some 1,000 jobs: it may be short, or empty, with has_more true.",
        ),
        param("cursor", "query", STRING | {"pattern": CURSOR}, "`next_cursor` of the page before."),
        param("limit", "query", INTEGER | {"minimum": 1, "maximum": 100}, "Rows on a page."),
        param("wait", "query", NUMBER | {"minimum": 0, "maximum": 600}, "Seconds to wait for the job's end."),
        param("after", "query", STRING, "Continue after this: events as Last-Event-ID, lists after this id."),
        param("Last-Event-ID", "header", STRING, "Resume after this event."),
        param("Prefer", "header", STRING, "`respond-async`: answer 202 with the job at once."),
        param("Idempotency-Key", "header", STRING, "The same key and body give the same job, however often sent."),
    )
    file_limit = param("limit", "query", INTEGER | {"minimum": 1, "maximum": 10_000}, "Rows on a page.")
    return {each["name"]: each for each in params} | {"file_limit": file_limit}


def _request_schemas() -> dict[str, Schema]:
    """Render all models in one call, so that they share their definitions."""
    models = (ChatRequest, CompletionRequest, ChatJobRequest, CompletionJobRequest, BatchRequest)
    _, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    defs: dict[str, Schema] = schemas["$defs"]
    return defs
