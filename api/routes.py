"""Route table: each route's endpoint, who may call it, and what the OpenAPI document says about it.

The guard (api/auth/guard.py), which refuses every route that is not in it, and the document (api/openapi.py) read this
table, so a route without an access right cannot be written down.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

from starlette.routing import compile_path

from api import (
    batches,
    chat,
    conversations,
    durable,
    events,
    files,
    forms,
    health,
    jobs,
    message_batches,
    messages,
    moderations,
    responses,
    timing,
)
from api import usage as used
from api.admin import audit, keys, letters, overview, pools, tenants
from api.admin import jobs as all_jobs
from api.console import pages

CONSOLE = "/console/"
"""Every address below it is the console's page."""
CLOSE = 0.85
"""Likeness of a path that is spelt wrongly; 1 is the same."""
MAX_MEANT = 256
"""Characters of a path for which the right one is searched."""
MAX_EXTRA_WORDS = 4


class Access(Enum):
    """Who may call a route."""

    ANYONE = "anyone"
    CALLER = "caller"
    """The holder of any API key; without keys, anyone on this machine."""
    ADMIN = "admin"
    """The holder of an admin key; without keys, of the admin token."""
    METRICS = "metrics"
    """Anyone or an admin, as `[api] metrics` says."""


ANYONE, CALLER, ADMIN = Access.ANYONE, Access.CALLER, Access.ADMIN


class Route(NamedTuple):
    """A method on a path."""

    method: str
    path: str
    endpoint: Callable[..., Any]
    access: Access
    answer: str = ""
    """Name of the schema of a 2xx body, or a media type; the OpenAPI document leaves out a route without it."""
    status: int = 200
    action: str = ""
    """Name of the action in the audit log; "" for a call that is not audited."""
    bodies: tuple[str, ...] = ()
    """Names of the alternative schemas of the request body."""
    params: tuple[str, ...] = ()
    """Names of the parameters that are not in the path."""
    errors: tuple[int, ...] = ()
    """Statuses of errors besides those that api/openapi.py derives from the other fields."""
    headers: tuple[str, ...] = ()
    or_job: bool = False
    """May answer 202 with the job instead, while it has not ended."""
    events: bool = False
    """May also answer with server-sent events."""
    form: bool = False
    """The body is a multipart upload of a file."""
    empty: tuple[int, ...] = ()
    """Statuses of answers without a body, which have the same headers."""
    summary: str = ""
    """Of an endpoint without a docstring that begins with it."""

    @property
    def described(self) -> str:
        """What it does, in the OpenAPI document: the row's summary, or the first line of its endpoint's docstring."""
        return self.summary or (self.endpoint.__doc__ or "").partition("\n")[0].rstrip(".")

    @property
    def described_path(self) -> str:
        """The path as OpenAPI writes it."""
        return self.path.replace(":path}", "}")


class RouteMatch(NamedTuple):
    """The row that applies to a request, and the parameters in its path."""

    route: Route
    params: Mapping[str, str]


class AccessTable:
    """Finds the row of a request by its method and `scope["path"]` alone, and with it the endpoint: no header changes
    which row applies, and no path is one route to the guard and another behind it."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._methods = {route.method for route in routes}
        self._fixed: dict[str, dict[str, RouteMatch]] = {}
        """Paths without parameters, which nearly all requests have."""
        patterns: dict[str, dict[str, Route]] = {}
        for route in routes:
            if "{" in route.path:
                patterns.setdefault(route.path, {})[route.method] = route
            else:
                self._fixed.setdefault(route.path, {})[route.method] = RouteMatch(route, {})
        self._patterns = [(compile_path(path)[0], rows) for path, rows in patterns.items()]

    def find(self, method: str, path: str) -> RouteMatch | None:
        """Return the row of a request; None if there is none. HEAD has the row of GET."""
        method = "GET" if method == "HEAD" else method
        if (fixed := self._fixed.get(path)) is not None:
            return fixed.get(method)
        for pattern, rows in self._patterns:
            if (match := pattern.match(path)) and ("" not in match.groups() or path.startswith(CONSOLE)):
                return RouteMatch(rows[method], match.groupdict()) if method in rows else None
        return None

    def methods(self, path: str) -> Collection[str]:
        """Return the methods of a path; none for an unknown path."""
        return [method for method in self._methods if self.find(method, path) is not None]

    def meant(self, method: str, path: str) -> str:
        """Return the path, with this method, that a path without a route probably means: without repeated or other
        words at its front, with /v1, in lower case, or spelt a little otherwise; "" if there is none."""
        if len(path) > MAX_MEANT or self.methods(re.sub("(?<=/)(?=/[^/])", "-", path)):
            return ""  # too long, or an id was left out: no slash was written twice
        words = posixpath.normpath(f"/{path.strip()}").strip("/").split("/")
        for start in range(min(len(words), MAX_EXTRA_WORDS + 1)):
            rest = "/".join(words[start:])
            for found in (f"/{rest}", f"/v1/{rest}", f"/{rest}".lower(), f"/v1/{rest}".lower()):
                if self.find(method, found) is not None:
                    return found
        known = [each for each in self._fixed if self.find(method, each) is not None]
        return next(iter(get_close_matches(f"/{'/'.join(words)}".lower(), known, 1, CLOSE)), "")


JOB_HEADERS = ("X-Job-Id", "X-Queue-Position", "X-Queue-ETA-Ms", "X-Ignored-Fields")
STREAM_HEADERS = ("Stream-Next-Offset", "Stream-Up-To-Date", "Stream-Closed", "Stream-Cursor", "ETag")
_IGNORED = ("X-Ignored-Fields",)
_KEY = ("Idempotency-Key",)
_PAGE = ("limit",)
_JOBS = ("status", "job_model", "lane", "since", "until")
_USAGE = ("from", "to", "by", "usage_format")
_ACCEPT = (404, 408, 409)
_TASK: dict[str, Any] = {
    "params": (*_KEY, "Prefer"), "errors": (*_ACCEPT, 500, 504), "headers": JOB_HEADERS, "or_job": True
}  # fmt: skip
_COMPLETION: dict[str, Any] = _TASK | {"headers": (*JOB_HEADERS, "Stream-Url"), "events": True}

# Paths without parameters are looked up first, whatever their place. The others are tried in this order: a row with
# `{name:path}`, which takes slashes too, takes every path below it from the rows behind it, whatever their method.
ROUTES = (
    Route("POST", "/v1/chat/completions", chat.JobEndpoint("chat"), CALLER, "ChatCompletion",
          summary="Answer a conversation", bodies=("ChatRequest",), **_COMPLETION),
    Route("POST", "/v1/completions", chat.JobEndpoint("completion"), CALLER, "Completion", summary="Continue a text",
          bodies=("CompletionRequest",), **_COMPLETION),
    Route("POST", "/v1/messages", messages.Messages("message"), CALLER, "MessageAnswer",
          summary="Answer a conversation, by Anthropic's API", bodies=("MessagesRequest",), **_COMPLETION),
    Route("POST", "/v1/messages/count_tokens", messages.TokenCounts("message_count"), CALLER, "TokenCount",
          summary="Count the input tokens of a message", bodies=("MessageCountRequest",), **_TASK),
    Route("POST", "/v1/messages/batches", message_batches.create, CALLER, "MessageBatch",
          summary="Compute many messages", params=_KEY, bodies=("MessageBatchRequest",), errors=(408, 429)),
    Route("GET", "/v1/messages/batches", message_batches.listing, CALLER, "MessageBatchList",
          summary="List your batches of messages", params=("batch_limit", "before_id", "after_id")),
    Route("GET", "/v1/messages/batches/{message_batch_id}", message_batches.show, CALLER, "MessageBatch",
          summary="Show a batch of messages"),
    Route("GET", "/v1/messages/batches/{message_batch_id}/results", message_batches.result_lines, CALLER,
          "application/x-jsonl", summary="Read the results of a batch of messages", errors=(400,)),
    Route("POST", "/v1/messages/batches/{message_batch_id}/cancel", message_batches.cancel, CALLER, "MessageBatch",
          summary="Cancel a batch of messages; finished ones are kept", errors=(409,)),
    Route("DELETE", "/v1/messages/batches/{message_batch_id}", message_batches.delete, CALLER, "MessageBatchDeleted",
          summary="Delete a batch of messages that has ended", errors=(409,)),
    Route("GET", "/v1/messages/{message_id}", messages.retrieve, CALLER, "MessageAnswer",
          summary="Show a message, or stream its events after one", params=("stream", "starting_after"),
          headers=("X-Job-Id", "Stream-Url"), or_job=True, events=True, errors=(409,)),
    Route("POST", "/v1/responses", responses.Responses("response"), CALLER, "Response", summary="Create a response",
          params=_KEY, errors=(*_ACCEPT, 500, 504), bodies=("ResponseRequest",), headers=(*JOB_HEADERS, "Stream-Url"),
          events=True),
    Route("POST", "/v1/responses/input_tokens", responses.Responses("count"), CALLER, "InputTokens",
          summary="Count the input tokens of a response", params=_KEY, errors=(*_ACCEPT, 500, 504),
          bodies=("CountRequest",), headers=JOB_HEADERS),
    Route("GET", "/v1/responses/{response_id}", responses.retrieve, CALLER, "Response",
          params=("stream", "starting_after", "response_include"), headers=("X-Job-Id", "Stream-Url"), events=True,
          errors=(409,)),
    Route("DELETE", "/v1/responses/{response_id}", responses.delete, CALLER, "Deleted", errors=(409,)),
    Route("POST", "/v1/responses/{response_id}/cancel", responses.cancel, CALLER, "Response", headers=("X-Job-Id",),
          errors=(400,)),
    Route("GET", "/v1/responses/{response_id}/input_items", responses.listing, CALLER, "InputItemList",
          params=("limit", "order", "after", "response_include")),
    Route("POST", "/v1/conversations", conversations.create, CALLER, "Conversation", bodies=("ConversationRequest",),
          errors=(408, 429), headers=_IGNORED),
    Route("GET", "/v1/conversations/{conversation_id}", conversations.show, CALLER, "Conversation"),
    Route("POST", "/v1/conversations/{conversation_id}", conversations.update, CALLER, "Conversation",
          bodies=("ConversationUpdate",), errors=(408, 429), headers=_IGNORED),
    Route("DELETE", "/v1/conversations/{conversation_id}", conversations.delete, CALLER, "Deleted"),
    Route("POST", "/v1/conversations/{conversation_id}/items", conversations.add_items, CALLER, "ConversationItemList",
          params=(*_KEY, "response_include"), bodies=("ItemsRequest",), errors=(408, 429), headers=_IGNORED),
    Route("GET", "/v1/conversations/{conversation_id}/items", conversations.list_items, CALLER, "ConversationItemList",
          params=("limit", "order", "after", "response_include")),
    Route("GET", "/v1/conversations/{conversation_id}/items/{item_id}", conversations.show_item, CALLER,
          "ConversationItem", params=("response_include",)),
    Route("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}", conversations.delete_item, CALLER,
          "Conversation"),
    Route("POST", "/v1/embeddings", chat.JobEndpoint("embedding"), CALLER, "EmbeddingList",
          summary="Make vectors of texts", bodies=("EmbeddingRequest",), **_TASK),
    Route("POST", "/v1/rerank", chat.JobEndpoint("rerank"), CALLER, "Ranking", summary="Rank documents by a query",
          bodies=("RerankRequest",), **_TASK),
    Route("POST", "/v1/audio/transcriptions", forms.FormEndpoint("transcription"), CALLER, "Transcript",
          summary="Write down a recording", bodies=("TranscriptionForm",), form=True, **_TASK),
    Route("POST", "/v1/audio/translations", forms.FormEndpoint("translation"), CALLER, "Transcript",
          summary="Write down a recording in English", bodies=("TranslationForm",), form=True, **_TASK),
    Route("POST", "/v1/images/generations", chat.JobEndpoint("image"), CALLER, "ImageList", summary="Draw images",
          bodies=("ImageRequest",), **_TASK),
    Route("POST", "/v1/images/edits", forms.FormEndpoint("image_edit"), CALLER, "ImageList",
          summary="Draw images from images", bodies=("EditForm",), form=True, **_TASK),
    Route("POST", "/v1/moderations", moderations.create, CALLER, "Moderation", bodies=("ModerationRequest",),
          errors=(404, 408, 429, 500, 504), headers=_IGNORED),
    Route("POST", "/tokenize", chat.JobEndpoint("tokenize"), CALLER, "TokenIds", summary="Turn a prompt into token ids",
          bodies=("TokenizeRequest",), **_TASK),
    Route("GET", "/tokenizer_info", chat.tokenizer_info, CALLER, "TokenizerInfo", params=("named_model",)),
    Route("POST", "/detokenize", chat.JobEndpoint("detokenize"), CALLER, "TokenText",
          summary="Turn token ids into a text", bodies=("DetokenizeRequest",), **_TASK),
    Route("GET", "/v1/models", chat.listing, CALLER, "ModelList"),
    Route("GET", "/v1/models/{model:path}", chat.show, CALLER, "Model"),
    Route("POST", "/v1/jobs", jobs.create, CALLER, "Job", params=(*_KEY, "wait"), errors=_ACCEPT, or_job=True,
          headers=JOB_HEADERS,
          bodies=("ChatJobRequest", "CompletionJobRequest", "EmbeddingJobRequest", "RerankJobRequest",
                  "ImageJobRequest")),
    Route("GET", "/v1/jobs", jobs.listing, CALLER, "JobList", params=(*_JOBS, "cursor", "limit")),
    Route("GET", "/v1/jobs/{job_id}", jobs.show, CALLER, "Job", params=("wait", "include"), errors=(410,)),
    Route("GET", "/v1/jobs/{job_id}/result", jobs.result, CALLER, "Answer", errors=(400, 408, 409, 410, 500),
          or_job=True),
    Route("GET", "/v1/jobs/{job_id}/events", events.events, CALLER, "text/event-stream",
          params=("Last-Event-ID", "after"), errors=(410,), headers=("Stream-Url",), events=True),
    Route("GET", "/v1/jobs/{job_id}/stream", durable.stream, CALLER, "StreamMessages", errors=(410,), empty=(204, 304),
          params=("offset", "live", "stream_cursor", "If-None-Match"), headers=STREAM_HEADERS, events=True),
    Route("GET", "/v1/jobs/{job_id}/timing", timing.show, CALLER, "JobTiming", errors=(410,)),
    Route("POST", "/v1/jobs/{job_id}/cancel", jobs.cancel, CALLER, "Job", errors=(410,)),
    Route("POST", "/v1/files", files.create, CALLER, "File", errors=(408, 429), form=True),
    Route("GET", "/v1/files", files.listing, CALLER, "FileList", params=("purpose", "file_limit", "order", "after")),
    Route("GET", "/v1/files/{file_id}", files.show, CALLER, "File"),
    Route("DELETE", "/v1/files/{file_id}", files.delete, CALLER, "Deleted"),
    Route("GET", "/v1/files/{file_id}/content", files.content, CALLER, "application/octet-stream"),
    Route("POST", "/v1/batches", batches.create, CALLER, "Batch", bodies=("BatchRequest",), params=_KEY,
          headers=_IGNORED),
    Route("GET", "/v1/batches", batches.listing, CALLER, "BatchList", params=("limit", "after")),
    Route("GET", "/v1/batches/{batch_id}", batches.show, CALLER, "Batch"),
    Route("GET", "/v1/batches/{batch_id}/output", batches.output, CALLER, "application/jsonl"),
    Route("GET", "/v1/batches/{batch_id}/errors", batches.failures, CALLER, "application/jsonl"),
    Route("POST", "/v1/batches/{batch_id}/cancel", batches.cancel, CALLER, "Batch", errors=(409,)),
    Route("POST", "/v1/batches/{batch_id}/pause", batches.pause, CALLER, "Batch", errors=(409,)),
    Route("POST", "/v1/batches/{batch_id}/resume", batches.resume, CALLER, "Batch", errors=(409,)),
    Route("GET", "/v1/usage", used.own, CALLER, "UsageReport", params=_USAGE),
    Route("GET", "/admin/dlq", letters.listing, ADMIN, "DeadLetterList", params=_PAGE),
    Route("GET", "/admin/dlq/{letter_id}", letters.show, ADMIN, "DeadLetter"),
    Route("DELETE", "/admin/dlq/{letter_id}", letters.drop, ADMIN, "application/json", action="dead_letter.drop"),
    Route("POST", "/admin/dlq/{letter_id}/replay", letters.replay, ADMIN, "Job", 202, "dead_letter.replay",
          errors=(400, 410, 429), headers=("Location", "X-Job-Id")),
    Route("GET", "/admin/overview", overview.show, ADMIN, "Overview"),
    Route("GET", "/admin/jobs", all_jobs.listing, ADMIN, "AdminJobList",
          params=("job_tenant", *_JOBS, "search", "cursor", "limit")),
    Route("GET", "/admin/jobs/{job_id}", all_jobs.show, ADMIN, "AdminJob", errors=(410,)),
    Route("POST", "/admin/jobs/{job_id}/cancel", all_jobs.cancel, ADMIN, "AdminJob", action="job.cancel",
          errors=(410,)),
    Route("GET", "/admin/audit", audit.listing, ADMIN, "AuditEntryList",
          params=("limit", "audit_after", "audit_since")),
    Route("GET", "/admin/keys", keys.listing, ADMIN, "KeyList"),
    Route("POST", "/admin/keys", keys.create, ADMIN, "NewKey", 201, "key.create", bodies=("KeyRequest",),
          errors=(404,)),
    Route("GET", "/admin/keys/{key_id}", keys.show, ADMIN, "CreatedKey"),
    Route("POST", "/admin/keys/{key_id}", keys.update, ADMIN, "CreatedKey", action="key.update", bodies=("KeyUpdate",),
          errors=(409,)),
    Route("POST", "/admin/keys/{key_id}/rotate", keys.rotate, ADMIN, "NewKey", action="key.rotate", errors=(409,)),
    Route("DELETE", "/admin/keys/{key_id}", keys.revoke, ADMIN, "CreatedKey", action="key.revoke"),
    Route("GET", "/admin/webhooks", letters.list_messages, ADMIN, "WebhookMessageList", params=_PAGE),
    Route("GET", "/admin/webhooks/{message_id}", letters.show_message, ADMIN, "WebhookMessage"),
    Route("POST", "/admin/webhooks/{message_id}/replay", letters.resend, ADMIN, "WebhookMessage", 202,
          "webhook.replay"),
    Route("GET", "/admin/tenants", tenants.listing, ADMIN, "TenantList"),
    Route("GET", "/admin/tenants/{tenant:path}", tenants.show, ADMIN, "Tenant", errors=(400,)),
    Route("GET", "/admin/usage", used.every, ADMIN, "UsageReport", params=("usage_tenant", *_USAGE)),
    Route("GET", "/admin/pools", pools.listing, ADMIN, "PoolList"),
    Route("GET", "/admin/pools/{model:path}", pools.show, ADMIN, "Pool"),
    Route("PUT", "/admin/pools/{model:path}", pools.override, ADMIN, "Pool", action="pool.override",
          bodies=("PoolOverride",)),
    Route("DELETE", "/admin/pools/{model:path}", pools.resume, ADMIN, "Pool", action="pool.resume"),
    Route("GET", "/admin/console/session", pages.show, ADMIN, "ConsoleSession"),
    Route("POST", "/admin/console/links", pages.link, ADMIN, "ConsoleLink", 201, "console.link"),
    Route("DELETE", "/admin/console/session", pages.logout, ADMIN, "application/json", action="console.logout"),
    Route("POST", "/console/session", pages.login, ANYONE),
    Route("GET", "/console/assets/{build}/{name}", pages.asset, ANYONE),
    Route("GET", "/console/{page:path}", pages.page, ANYONE),
    Route("GET", "/console", pages.page, ANYONE),
    Route("GET", "/healthz", health.healthz, ANYONE, "application/json"),
    Route("GET", "/readyz", health.readyz, ANYONE, "application/json", errors=(503,)),
    Route("GET", "/health", health.readyz, ANYONE, "application/json",
          summary="The same, by the name that other servers have", errors=(503,)),
    Route("GET", "/version", health.version, ANYONE, "application/json"),
    Route("GET", "/metrics", health.metrics, Access.METRICS, "text/plain", errors=(401,)),
    Route("GET", "/openapi.json", health.openapi, ANYONE, "application/json"),
    Route("GET", "/", health.root, ANYONE),
)  # fmt: skip

TABLE = AccessTable(ROUTES)


@cache
def endpoint_of(path: str) -> str:
    """Return the endpoint that a path of the table belongs to, as keys name it: the word behind /v1/, or the first."""
    words = path.strip("/").split("/")
    return words[1] if words[0] == "v1" else words[0]
