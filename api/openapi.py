"""OpenAPI 3.1 document: routes come from api/routes.py, request schemas from the pydantic models."""

from __future__ import annotations

import re
from typing import Any

from pydantic.json_schema import models_json_schema

from api.admin.pools import PoolOverride
from api.openai.answers import ANSWERS, STRING, Schema, any_of, ref, schema
from api.openai.batch_lines import BatchRequest
from api.openai.responses.conversation import ConversationRequest, ConversationUpdate, ItemsRequest
from api.openai.schemas import JOB_MODELS, MODELS
from api.query import PARAMS
from api.routes import JOB_HEADERS, ROUTES, Access, Route

PATH_PARAM = re.compile(r"\{(\w+)")
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

_ALWAYS = ("x-request-id", "openai-processing-ms")
_ANYWHERE = (403, 421)
"""Errors that every route may answer (api/auth/hosts.py, api/auth/guard.py)."""
_SECURITY: dict[Access, list[dict[str, list[str]]]] = {Access.ANYONE: [], Access.METRICS: [{}, {"key": []}]}
"""Security of routes that differ from the document's default."""

ERRORS = {
    400: "invalid_request_error, context_length_exceeded, too_large_for_store and others: `param` names the field.",
    401: "invalid_api_key: no key, or an unknown one. admin_token_required: under /admin of a server without keys.",
    403: "permission_denied: the key has no such right. foreign_origin: sent by a page of a refused origin.",
    404: "model_not_found, job_not_found and others: it does not exist, or belongs to another tenant.",
    408: "deadline_exceeded_in_queue or deadline_exceeded: its deadline passed. request_timeout: sent too slowly.",
    409: "job_cancelled: there is no result. batch_not_steerable, response_still_ends, stream_reset.",
    410: "result_expired: the retention time is over. offset_gone: read the stream from its beginning.",
    413: "payload_too_large: the body is above the limit.",
    415: "unsupported_media_type: the body must be application/json.",
    421: "misdirected_request: sent to a Host name that this server does not answer to.",
    422: "idempotency_key_reused: an earlier request had the same key and another body.",
    429: "queue_full, deadline_unreachable: the wait is too long. quota_exceeded: your tenant's quota is used up.",
    500: "The job failed (its own code), or internal_error.",
    503: "no_capacity, draining, store_unavailable or too_many_connections: try again after Retry-After.",
    504: "wait_timeout: the answer took too long; the job goes on and X-Job-Id names it.",
}

EMPTY = {204: "Nothing came in time, or nothing will come any more.", 304: "Your copy is still what there is."}
"""Answers without a body."""

_RETRY = ("Retry-After", "retry-after-ms", "x-should-retry")
_ERROR_HEADERS = {
    401: ("WWW-Authenticate",),
    **dict.fromkeys((408, 500), ("x-should-retry",)),
    **dict.fromkeys((409, 429), _RETRY),
    503: (*_RETRY, "X-Job-Id", "Location"),
    504: ("X-Job-Id", "Location", "x-should-retry"),
}

HEADERS = {
    "x-request-id": "The id of this request in the logs: the one you sent, or a new one.",
    "openai-processing-ms": "Milliseconds until the answer began.",
    "X-Job-Id": "The job that serves this request; /v1/jobs/{job_id}/events resumes its stream.",
    "X-Queue-Position": "Jobs that were expected to start before this one when it was accepted.",
    "X-Queue-ETA-Ms": "Estimated milliseconds until the job starts, with a cold start if needed; absent if unknown.",
    "X-Ignored-Fields": "Fields of the body that had no effect.",
    "Stream-Url": "Of a streamed answer: where its messages can be read and resumed, by the Durable Streams protocol.",
    "Stream-Next-Offset": "The offset to read on from.",
    "Stream-Up-To-Date": "`true`: there are no more messages yet.",
    "Stream-Closed": "`true`: there will be no more messages.",
    "Stream-Cursor": "Of a live read: send it back as `cursor`.",
    "ETag": "Send it back as If-None-Match.",
    "Location": "Where the job can be read.",
    "Retry-After": "Seconds to wait, at most 120.",
    "retry-after-ms": "Milliseconds to wait.",
    "x-should-retry": "`false`: a retry would not help, or would do the work twice.",
    "WWW-Authenticate": "Bearer",
}


HEADER_PARAMS = {
    "If-None-Match": "304 without a body if the answer has this ETag.",
    "Last-Event-ID": "Resume after this event.",
    "Prefer": "`respond-async`: answer 202 with the job at once.",
    "Idempotency-Key": "The same key and body give the same job, however often sent.",
}


def document(version: str, base_path: str = "") -> dict[str, Any]:
    """Build the document; `version` is Penstock's, and `base_path` the path below which a proxy serves the API."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        if route.summary:
            paths.setdefault(route.described_path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": version, "description": "A durable queue in front of LLM engines."},
        **({"servers": [{"url": base_path}]} if base_path else {}),
        "paths": paths,
        "components": {
            "schemas": _request_schemas() | ANSWERS,
            "parameters": _parameters(),
            "headers": {name: {"description": words, "schema": STRING} for name, words in HEADERS.items()},
            "responses": {
                "Accepted": _shared_answer("The job, which has not ended yet.", (*JOB_HEADERS, "Location"), "Job"),
                **{
                    f"Error{status}": _shared_answer(words, _ERROR_HEADERS.get(status, ()), "Error")
                    for status, words in ERRORS.items()
                },
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _operation(route: Route) -> dict[str, Any]:
    named = tuple(PATH_PARAM.findall(route.path))
    headers = (*_ALWAYS, *route.headers, *(("X-Job-Id",) if "job_id" in named else ()))
    answer = {"description": route.summary, "headers": _headers(headers), "content": _content(route)}
    answers = {str(route.status): answer}
    if route.or_job:
        answers["202"] = ref("responses", "Accepted")
    answers |= {str(each): {"description": EMPTY[each], "headers": _headers(headers)} for each in route.empty}
    answers |= {str(status): ref("responses", f"Error{status}") for status in sorted(_statuses(route))}
    words = route.described_path.removeprefix("/v1").replace("{", "").replace("}", "").replace(".", "_")
    operation: dict[str, Any] = {
        "operationId": route.method.lower() + words.replace("/", "_"),
        "summary": route.summary,
        "responses": answers,
    }
    if params := (*named, *route.params):
        operation["parameters"] = [ref("parameters", name) for name in params]
    if route.bodies or route.form:
        kind, body = ("multipart/form-data", ("Upload",)) if route.form else ("application/json", route.bodies)
        operation["requestBody"] = {"required": True, "content": {kind: {"schema": any_of(*body)}}}
    if route.access in _SECURITY:
        operation["security"] = _SECURITY[route.access]
    return operation


def _statuses(route: Route) -> set[int]:
    """Return the statuses of a route's errors: those of its row, and those that follow from what it takes."""
    found = {*_ANYWHERE, *route.errors}
    if route.access in (Access.CALLER, Access.ADMIN):
        found |= {401, 503}
    if "{" in route.path:
        found.add(404)
    if route.bodies or route.form:
        found |= {400, 413, 415}
    if "Idempotency-Key" in route.params:
        found |= {422, 429}
    if not PARAMS.keys().isdisjoint(route.params):
        found.add(400)
    return found


def _content(route: Route) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if "/" in route.answer:
        content[route.answer] = {"schema": PLAIN.get(route.answer, STRING)}
    else:
        content["application/json"] = {"schema": schema(route.answer)}
    if route.events:
        content["text/event-stream"] = {"schema": PLAIN["text/event-stream"]}
    return content


def _shared_answer(words: str, headers: tuple[str, ...], name: str) -> dict[str, Any]:
    """An answer that many routes have; `name`: of the schema of its body."""
    content = {"application/json": {"schema": schema(name)}}
    return {"description": words, "headers": _headers((*_ALWAYS, *headers)), "content": content}


def _headers(names: tuple[str, ...]) -> dict[str, Any]:
    return {name: ref("headers", name) for name in names}


def _parameters() -> dict[str, Schema]:
    def param(name: str, where: str, kind: Schema, words: str) -> Schema:
        return {"name": name, "in": where, "required": where == "path", "schema": kind, "description": words}

    named = {name for route in ROUTES if route.summary for name in PATH_PARAM.findall(route.path)}
    paths = {name: param(name, "path", STRING, f"Which {name.removesuffix('_id')}.") for name in sorted(named)}
    headers = {name: param(name, "header", STRING, words) for name, words in HEADER_PARAMS.items()}
    queries = {key: param(name, "query", kind, words) for key, (name, kind, words) in PARAMS.items()}
    return paths | headers | queries


def _request_schemas() -> dict[str, Schema]:
    """Render all models in one call, so that they share their definitions."""
    models = (
        *(*MODELS.values(), *JOB_MODELS.values(), BatchRequest),
        *(ConversationRequest, ConversationUpdate, ItemsRequest, PoolOverride),
    )
    _, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    defs: dict[str, Schema] = schemas["$defs"]
    return defs
