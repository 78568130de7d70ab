"""OpenAPI 3.1 document: routes come from api/routes.py, request schemas from the pydantic models. The schemas of
answers are written by hand, because the answers are plain dicts without a model class."""

from __future__ import annotations

import re
from enum import Enum
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from api.admin.keys import KeyRequest, KeyUpdate
from api.admin.pools import PoolOverride
from api.files import PURPOSES
from api.moderations import ModerationRequest
from api.openai.batch_lines import BatchRequest
from api.openai.errors import RATE_HEADERS
from api.openai.responses.items import ConversationRequest, ConversationUpdate, ItemsRequest
from api.openai.schemas import JOB_MODELS, MODELS
from api.query import INTEGER, NUMBER, PARAMS, STRING, Schema
from api.routes import JOB_HEADERS, ROUTES, Access, Route
from api.timing import LATENCIES
from api.usage import AMOUNTS
from streaming.batches.store import BatchState
from streaming.fleet.plans import ActionKind, PoolKind
from streaming.jobs.job import CancelledBy, Endpoint, JobState
from streaming.jobs.settings import QuotaSettings
from streaming.order import Priority
from telemetry.latency import EGRESS_FIRST, GROUPS, PARTS, STAMPS

# --- the schemas of answers ------------------------------------------------------------------------------------------


def ref(section: str, name: str) -> Schema:
    return {"$ref": f"#/components/{section}/{name}"}


def schema(name: str) -> Schema:
    return ref("schemas", name)


def any_of(*names: str) -> Schema:
    return {"anyOf": [schema(name) for name in names]} if len(names) > 1 else schema(names[0])


def object_of(**properties: Schema) -> Schema:
    """Build the schema of an object whose properties are all required."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def closed(**properties: Schema) -> Schema:
    """Build the schema of an object that has these properties and no others."""
    return object_of(**properties) | {"additionalProperties": False}


def extended(base: Schema, **properties: Schema) -> Schema:
    """Build the schema of an object that may have these properties, too."""
    return base | {"properties": base["properties"] | properties}


def each(kind: Schema, *names: str) -> dict[str, Schema]:
    """Build properties that have the same schema."""
    return dict.fromkeys(names, kind)


def list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def map_of(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def maybe(kind: Schema) -> Schema:
    return {"anyOf": [kind, {"type": "null"}]}


def word_of(*words: str) -> Schema:
    return {"type": "string", "enum": list(words)}


def words_of(kind: type[Enum]) -> Schema:
    return word_of(*(member.value for member in kind))


def list_named(name: str, **more: Schema) -> Schema:
    return object_of(object=word_of("list"), data=list_of(schema(name)), **more)


def page_of(name: str) -> Schema:
    return list_named(name, has_more=BOOLEAN, first_id=maybe(STRING), last_id=maybe(STRING))


def told(kind: Schema, description: str) -> Schema:
    """Build a schema with a description."""
    return kind | {"description": description}


BOOLEAN: Schema = {"type": "boolean"}
FREE: Schema = {"type": "object"}
LABELS = map_of(STRING)
FOUND_BY_RULE = {"categories": map_of(BOOLEAN), "category_scores": map_of(NUMBER)}
UNIX_S = maybe(told(NUMBER, "Unix seconds"))
REDIS_S = told(NUMBER, "Unix seconds of Redis time")

TIER = word_of("priority", "default", "flex")
CANCELLED_BY = told(words_of(CancelledBy), "Who cancelled it, if that is known.")
ITEM_STATUS = word_of("in_progress", "completed", "incomplete")
LEADER = maybe(object_of(id=STRING, epoch=INTEGER))

FAULT = extended(
    object_of(**each(STRING, "message", "type", "code"), param=maybe(STRING)),
    cancelled_by=CANCELLED_BY,  # in the error of a cancelled job
)
USAGE = extended(
    object_of(
        **each(INTEGER, "prompt_tokens", "completion_tokens", "total_tokens"),
        prompt_tokens_details=object_of(cached_tokens=INTEGER),
    ),
    completion_tokens_details=object_of(reasoning_tokens=INTEGER),  # if there are any
)
RESPONSE_USAGE = object_of(
    **each(INTEGER, "input_tokens", "output_tokens", "total_tokens"),
    input_tokens_details=object_of(cached_tokens=INTEGER),
    output_tokens_details=object_of(reasoning_tokens=INTEGER),
)
"""Token counts as responses and batches have them."""
BLOCKS = [
    object_of(type=word_of("text"), text=STRING),
    object_of(type=word_of("thinking"), **each(STRING, "thinking", "signature")),
    object_of(type=word_of("tool_use"), **each(STRING, "id", "name"), input=FREE),
]
MESSAGE_USAGE = object_of(
    **each(INTEGER, "input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens"),
    service_tier=word_of("priority", "standard", "batch"),
)
TASK_USAGE = object_of(prompt_tokens=INTEGER, total_tokens=INTEGER)


# --- answers of models -----------------------------------------------------------------------------------------------


def _completion(kind: str, **said: Schema) -> Schema:
    reason = word_of("stop", "length", "tool_calls", "content_filter")
    choice = object_of(index=INTEGER, **said, logprobs=maybe(FREE), finish_reason=reason)
    answer = object_of(
        **each(STRING, "id", "model"),
        object=word_of(kind),
        created=INTEGER,
        service_tier=TIER,
        system_fingerprint=maybe(STRING),
        choices=list_of(extended(choice, stop_reason=told(STRING, "The stop text that ended it, if one did."))),
        usage=schema("Usage"),
    )
    return extended(answer, served_by=told(STRING, "If other models gave it than `model`: their names."))


FUNCTION = object_of(name=STRING, arguments=told(STRING, "JSON"))
CHAT_MESSAGE = extended(
    object_of(role=word_of("assistant"), content=maybe(STRING), refusal=maybe(STRING)),
    reasoning_content=told(STRING, "Only if the model has reasoned."),
    tool_calls=list_of(object_of(id=STRING, type=word_of("function"), function=FUNCTION)),  # if it calls tools
)
VECTOR: Schema = {"anyOf": [list_of(NUMBER), told(STRING, "With encoding_format base64.")]}
RANKED = extended(
    object_of(index=told(INTEGER, "Of the document in the request."), relevance_score=NUMBER),
    document=told(object_of(text=STRING), "With return_documents."),
)


def _message_item(*kinds: str, role: Schema) -> Schema:
    part = extended(object_of(type=word_of(*kinds), text=STRING), **each(list_of(FREE), "annotations", "logprobs"))
    refused = object_of(type=word_of("refusal"), refusal=STRING)
    content = list_of({"anyOf": [part, refused]} if "output_text" in kinds else part)
    return object_of(id=STRING, type=word_of("message"), status=ITEM_STATUS, role=role, content=content)


def _call_item(kind: str, **fields: Schema) -> Schema:
    return object_of(**each(STRING, "id", "call_id"), type=word_of(kind), status=ITEM_STATUS, **fields)


RESPONSE = extended(
    object_of(
        object=word_of("response"),
        **each(STRING, "id", "model"),
        **each(INTEGER, "created_at", "top_logprobs"),
        **each(maybe(INTEGER), "completed_at", "max_output_tokens", "max_tool_calls"),
        **each(maybe(STRING), "instructions", "previous_response_id"),
        **each(maybe(STRING), "prompt_cache_key", "safety_identifier", "user"),
        **each(BOOLEAN, "background", "parallel_tool_calls", "store"),
        **each(NUMBER, "presence_penalty", "frequency_penalty", "temperature", "top_p"),
        **each(FREE, "reasoning", "text"),
        conversation=maybe(object_of(id=STRING)),
        status=word_of("queued", "in_progress", "completed", "failed", "cancelled", "incomplete"),
        error=maybe(object_of(code=word_of("server_error", "invalid_prompt"), message=STRING)),
        incomplete_details=maybe(object_of(reason=word_of("max_output_tokens", "content_filter"))),
        output=list_of(schema("OutputItem")),
        service_tier=TIER,
        tool_choice={"anyOf": [STRING, FREE]},
        tools=list_of(FREE),
        truncation=word_of("disabled"),
        usage=maybe(schema("ResponseUsage")),
        metadata=LABELS,
    ),
    served_by=STRING,  # if another model gave the answer than `model`
    cancelled_by=CANCELLED_BY,  # if it was cancelled
)


# --- jobs ------------------------------------------------------------------------------------------------------------


ENDS = [state.value for state in JobState if state.final]
ATTEMPT = object_of(
    worker=told(STRING, "As `penstock ps` names it."),
    **each(UNIX_S, "started_at", "ended_at"),
    tokens=maybe(told(INTEGER, "Tokens that it generated; null while the job runs, and if it began anew since.")),
    outcome=maybe(word_of("lost", "handed_back", "returned", "preempted", *ENDS)),
)
JOB = extended(
    object_of(
        **each(STRING, "id", "model"),
        object=word_of("job"),
        status=words_of(JobState),
        **each(UNIX_S, "created_at", "not_before", "started_at", "first_token_at", "completed_at", "expires_at"),
        endpoint=word_of(*(endpoint.path for endpoint in Endpoint)),
        served_by=maybe(told(STRING, "The models that gave the answer; null before its end.")),
        priority=words_of(Priority),
        queue_position=maybe(told(INTEGER, "Jobs that are expected to start before it.")),
        queue_reason=maybe(told(STRING, "Why it waits there, in words for its owner.")),
        eta_ms=maybe(told(INTEGER, "Expected time until it starts.")),
        eta_low_ms=maybe(told(INTEGER, "Nine of ten such jobs wait at least so long.")),
        eta_high_ms=maybe(told(INTEGER, "Nine of ten wait at most so long.")),
        attempts=INTEGER,
        attempt_log=maybe(list_of(ATTEMPT)),
        last_event_id=maybe(told(STRING, "Id of the newest event; null while the job runs.")),
        usage=maybe(schema("Usage")),
        result=maybe(schema("Answer")),
        error=maybe(FAULT),
        cancelled_by=maybe(CANCELLED_BY),
        metadata=LABELS,
    ),
    input=maybe(told(FREE, "The request, with `include=input`; null if it cannot be read.")),
    already_ended=told(BOOLEAN, "In the answer to a cancel: whether the job had ended before."),
    preview=maybe(told(STRING, "In a list: the first words of its prompt, if your key may read it.")),
)


def _job_with(**properties: Schema) -> Schema:
    """The schema of a job, with more properties."""
    return extended(JOB, **properties) | {"required": [*JOB["required"], *properties]}


TIMING = object_of(
    id=STRING,
    object=word_of("job.timing"),
    status=words_of(JobState),
    attempts=INTEGER,
    parts_ms=object_of(**{part.name: maybe(told(NUMBER, part.meaning)) for part in (*PARTS, EGRESS_FIRST)}),
    reasons=told(LABELS, "Why a part has no time."),
    groups_ms=object_of(**{name: told(NUMBER, f"The sum of {', '.join(parts)}.") for name, parts in GROUPS.items()}),
    sum_ms=told(NUMBER, "Sum of all parts except egress_first, which overlaps decode."),
    until=maybe(told(STRING, "The stamp at which end_to_end_ms ends.")),
    **each(maybe(NUMBER), "end_to_end_ms", *LATENCIES),
    clock_error_ms=told(object_of(api=NUMBER, worker=NUMBER), "A part that spans both may be wrong by the sum."),
    stamps=object_of(**each(maybe(REDIS_S), *STAMPS)),
)

BATCH_TIMES = ("in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
BATCH_FAULT = object_of(**each(STRING, "code", "message"), line=maybe(INTEGER), param=maybe(STRING))
BATCH = object_of(
    object=word_of("batch"),
    **each(STRING, "id", "endpoint", "input_file_id", "completion_window"),
    **each(maybe(STRING), "model", "output_file_id", "error_file_id", "lane", "lane_reason"),
    errors=maybe(object_of(object=word_of("list"), data=list_of(BATCH_FAULT))),
    status=words_of(BatchState),
    created_at=INTEGER,
    **{f"{name}_at": maybe(INTEGER) for name in BATCH_TIMES},
    request_counts=object_of(**each(INTEGER, "total", "completed", "failed")),
    usage=RESPONSE_USAGE,
    metadata=maybe(LABELS),
    paused=BOOLEAN,
    **each(INTEGER, "lines_distinct", "lines_in_queue", "lines_retried"),
    lines_per_second=told(NUMBER, "Lines that ended a second, lately."),
    schedule=maybe(object_of(**each(STRING, "cron", "timezone"))),
    next_run_at=maybe(told(INTEGER, "When the schedule begins its next batch.")),
    last_batch_id=maybe(STRING),
)


# --- what operators and the console read -----------------------------------------------------------------------------


WORKER = object_of(
    **each(STRING, "id", "host", "phase"),
    state=word_of("starting", "ready", "draining", "drained"),
    **each(maybe(STRING), "shape", "cordon"),
    since=REDIS_S,
    **each(INTEGER, "slots", "running"),
    step_ms=maybe(NUMBER),
    away=told(list_of(STRING), "The servers that it waits for, each with the reason; none while one is there."),
    away_s=NUMBER,
)
COUNTS = {"want": maybe(INTEGER), **each(INTEGER, "ready", "starting", "draining", "min", "max")}
SHAPE = object_of(**COUNTS, takes=told(BOOLEAN, "Whether new jobs go to this shape."))
LANE = object_of(waiting=INTEGER, running=INTEGER, oldest_s=NUMBER, wait_s=maybe(NUMBER))
POOL = object_of(
    object=word_of("pool"),
    **each(STRING, "model", "engine"),
    reason=maybe(STRING),
    **COUNTS,
    pool=maybe(word_of(*get_args(PoolKind))),
    epoch=maybe(INTEGER),
    decided_at=maybe(REDIS_S),
    **each(maybe(NUMBER), "wake_s", "cold_start_s"),
    override=maybe(object_of(want=maybe(INTEGER), paused=BOOLEAN, by=STRING, at=REDIS_S, until=maybe(REDIS_S))),
    stalled=maybe(object_of(cause=STRING, fix=STRING)),
    lanes=object_of(**each(LANE, *Priority)),
    workers=list_of(WORKER),
    leaving=list_of(STRING),
    shapes=map_of(SHAPE),
)
ACTION = object_of(
    at=NUMBER,
    epoch=INTEGER,
    action=word_of(*get_args(ActionKind)),
    **each(maybe(STRING), "model", "worker", "shape"),
    **each(maybe(INTEGER), "was", "want"),
    **each(STRING, "reason", "by"),
)
OVERVIEW = object_of(
    object=word_of("overview"),
    at=NUMBER,
    **each(FREE, "verdict", "rates", "store", "dead_letters"),
    **each(list_of(FREE), "processes", "history"),
    pools=list_of(schema("Pool")),
    leader=LEADER,
    actions=list_of(ACTION),
)
READABLE = told(BOOLEAN, "Whether your key may read its request and answer, at /v1/jobs.")
KEY_LIMIT = maybe(told(NUMBER, "null: as [quotas] says."))
KEY_LIMITS = told(FREE, "Those that are set, by name: [keys.<name>] limits has them.")
CONFIGURED_KEY = object_of(
    object=word_of("key"),
    **each(STRING, "name", "tenant"),
    highest_lane=words_of(Priority),
    admin=BOOLEAN,
    batch_tokens=maybe(INTEGER),
    quotas=object_of(**each(KEY_LIMIT, *QuotaSettings.__struct_fields__)),
    **each(list_of(STRING), "models", "endpoints"),
    limits=KEY_LIMITS,
)
CREATED_KEY = object_of(
    object=word_of("key"),
    **each(STRING, "id", "name", "tenant", "label", "created_by"),
    highest_lane=words_of(Priority),
    admin=BOOLEAN,
    **each(list_of(STRING), "models", "endpoints"),
    limits=KEY_LIMITS,
    state=word_of("valid", "expired", "revoked"),
    created_at=INTEGER,
    **each(maybe(INTEGER), "expires_at", "revoked_at", "last_used_at"),
)


USED = extended(object_of(**each(INTEGER, *AMOUNTS)), cost=told(NUMBER, "Only if models have prices."))


ANSWERS: dict[str, Schema] = {
    "Error": object_of(error=FAULT),
    "Usage": USAGE,
    "ChatCompletion": _completion("chat.completion", message=CHAT_MESSAGE),
    "Completion": _completion("text_completion", text=STRING),
    "Answer": any_of(
        "ChatCompletion", "Completion", "Response", "EmbeddingList", "Ranking", "TokenIds", "TokenText", "MessageAnswer"
    ),
    "EmbeddingList": object_of(
        object=word_of("list"),
        data=list_of(object_of(object=word_of("embedding"), index=INTEGER, embedding=VECTOR)),
        model=STRING,
        usage=TASK_USAGE,
    ),
    "Ranking": object_of(
        **each(STRING, "id", "model"),
        object=word_of("list"),
        results=told(list_of(RANKED), "The best first."),
        usage=TASK_USAGE,
    ),
    "Moderation": object_of(
        **each(STRING, "id", "model"),
        results=list_of(
            object_of(flagged=BOOLEAN, category_applied_input_types=map_of(list_of(STRING)), **FOUND_BY_RULE)
        ),
    ),
    "TokenIds": object_of(count=INTEGER, tokens=list_of(INTEGER), max_model_len=told(INTEGER, "The model's context.")),
    "TokenText": object_of(prompt=STRING),
    "Response": RESPONSE,
    "ResponseUsage": RESPONSE_USAGE,
    "OutputMessage": _message_item("output_text", role=word_of("assistant")),
    "InputMessage": _message_item(
        "input_text", "output_text", role=word_of("system", "developer", "user", "assistant", "tool")
    ),
    "CallItem": _call_item("function_call", name=STRING, arguments=told(STRING, "JSON")),
    "CallOutputItem": _call_item("function_call_output", output=STRING),
    "ReasoningOutput": object_of(
        id=STRING,
        type=word_of("reasoning"),
        status=ITEM_STATUS,
        summary=list_of(FREE),
        content=list_of(object_of(type=word_of("reasoning_text"), text=STRING)),
    ),
    "OutputItem": any_of("OutputMessage", "CallItem", "ReasoningOutput"),
    "InputItem": any_of("InputMessage", "CallItem", "CallOutputItem"),
    "InputItemList": page_of("InputItem"),
    "InputTokens": object_of(object=word_of("response.input_tokens"), input_tokens=INTEGER),
    "MessageAnswer": object_of(
        **each(STRING, "id", "model"),
        type=word_of("message"),
        role=word_of("assistant"),
        content=list_of({"anyOf": BLOCKS}),
        stop_reason=word_of("end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"),
        stop_sequence=maybe(told(STRING, "Which one ended the text.")),
        usage=MESSAGE_USAGE,
    ),
    "TokenCount": object_of(input_tokens=INTEGER),
    "Conversation": object_of(id=STRING, object=word_of("conversation"), created_at=INTEGER, metadata=LABELS),
    "ConversationItem": any_of("InputMessage", "CallItem", "CallOutputItem", "ReasoningOutput"),
    "ConversationItemList": page_of("ConversationItem"),
    "Model": extended(  # context length and capabilities are absent until a worker has loaded the model
        object_of(**each(STRING, "id", "owned_by"), object=word_of("model"), created=INTEGER),
        alias_of=told(STRING, "If `id` is an alias: the model that it means."),
        parent=told(STRING, "If it is an adapter: its model."),
        root=STRING,  # the same
        context_length=INTEGER,
        capabilities=FREE,
    ),
    "ModelList": list_named("Model"),
    "TokenizerInfo": object_of(**each(maybe(STRING), "bos_token", "eos_token")),
    "Job": JOB,
    "JobList": list_named("Job", has_more=BOOLEAN, next_cursor=maybe(STRING)),
    "JobTiming": TIMING,
    "StreamMessages": list_of(object_of(event=STRING, id=STRING, data=FREE)),
    "File": object_of(
        object=word_of("file"),
        **each(STRING, "id", "filename"),
        **each(INTEGER, "bytes", "created_at", "expires_at"),
        purpose=word_of("batch_output", *PURPOSES),
        status=word_of("processed"),
        status_details=maybe(STRING),
    ),
    "FileList": page_of("File"),
    "Upload": object_of(file=STRING | {"format": "binary"}, purpose=word_of(*PURPOSES)),
    **{
        f"{name}Form": {"allOf": [schema(f"{name}Request"), object_of(**{file: STRING | {"format": "binary"}})]}
        for name, file in (("Transcription", "file"), ("Translation", "file"), ("Edit", "image"))
    },
    "Transcript": object_of(text=STRING),
    "ImageList": object_of(created=INTEGER, data=list_of(FREE)),
    "Deleted": object_of(**each(STRING, "id", "object"), deleted=BOOLEAN),
    "Batch": BATCH,
    "BatchList": page_of("Batch"),
    "MessageBatchRequest": closed(
        requests=list_of(closed(custom_id=STRING | {"minLength": 1, "maxLength": 64}, params=FREE))
    ),
    "MessageBatch": object_of(
        type=word_of("message_batch"),
        processing_status=word_of("in_progress", "canceling", "ended"),
        request_counts=object_of(**each(INTEGER, "processing", "succeeded", "errored", "canceled", "expired")),
        **each(STRING, "id", "created_at"),
        **each(maybe(STRING), "expires_at", "ended_at", "cancel_initiated_at", "archived_at", "results_url"),
    ),
    "MessageBatchList": object_of(
        data=list_of(schema("MessageBatch")), has_more=BOOLEAN, **each(maybe(STRING), "first_id", "last_id")
    ),
    "MessageBatchDeleted": object_of(id=STRING, type=word_of("message_batch_deleted")),
    "Overview": OVERVIEW,
    "AdminJob": _job_with(
        tenant=STRING, readable=READABLE, timing=schema("JobTiming"), finish_reasons=list_of(maybe(STRING))
    ),
    "AdminJobList": list_named("ListedJob", has_more=BOOLEAN, next_cursor=maybe(STRING)),
    "ListedJob": _job_with(tenant=STRING),
    "Pool": POOL,
    "PoolList": list_named("Pool", leader=LEADER, actions=list_of(ACTION)),
    "DeadLetter": object_of(
        **each(STRING, "id", "reason"),
        object=word_of("dead_letter"),
        at=NUMBER,
        **each(maybe(STRING), "job_id", "entry"),
        lane=maybe(told(STRING, "Of the job or entry, as model:priority.")),
    ),
    "DeadLetterList": list_named("DeadLetter"),
    "WebhookMessage": object_of(
        object=word_of("webhook_message"),
        **each(STRING, "id", "endpoint", "event", "type", "subject", "tenant", "status"),
        url=maybe(told(STRING, "The URL that the request names, without its query; null: the endpoint's.")),
        at=NUMBER,
        attempts=INTEGER,
        **each(maybe(NUMBER), "last_attempt_at", "next_attempt_at"),
        last_status_code=maybe(INTEGER),
        last_error=maybe(STRING),
    ),
    "WebhookMessageList": list_named("WebhookMessage"),
    "AuditEntry": object_of(
        object=word_of("audit.entry"),
        **each(STRING, "id", "action", "target", "address", "request_id"),
        at=NUMBER,
        outcome=word_of("done", "failed", "refused"),
        status=told(INTEGER, "Of the answer."),
        **each(maybe(STRING), "who", "tenant"),
        detail=FREE,
    ),
    "AuditEntryList": page_of("AuditEntry"),
    "Tenant": object_of(
        object=word_of("tenant"),
        tenant=STRING,
        **each(INTEGER, "jobs", "waiting", "running", "job_bytes", "result_bytes", "files", "file_bytes"),
        quotas=object_of(**each(maybe(told(NUMBER, "null: no quota.")), *QuotaSettings.__struct_fields__)),
        limits=told(FREE, "Those that are set, by name: [tenants.<name>] limits has them."),
    ),
    "TenantList": list_named("Tenant"),
    "UsageReport": object_of(
        object=word_of("usage"),
        **{name: told(STRING, "A day, in UTC.") for name in ("from", "to")},
        by=list_of(word_of("day", "tenant", "key", "model")),
        data=list_of(extended(USED, **dict.fromkeys(("day", "tenant", "key", "model"), STRING))),
        total=USED,
    ),
    "ConfiguredKey": CONFIGURED_KEY,
    "CreatedKey": CREATED_KEY,
    "NewKey": extended(CREATED_KEY, key=told(STRING, "The key, which no other answer shows."))
    | {"required": [*CREATED_KEY["required"], "key"]},
    "KeyList": object_of(object=word_of("list"), data=list_of(any_of("ConfiguredKey", "CreatedKey"))),
    "ConsoleSession": object_of(
        object=word_of("console.session"),
        name=maybe(told(STRING, "Name of the admin key; null: the admin token.")),
        **each(STRING, "tenant", "version"),
        highest_lane=words_of(Priority),
        has_keys=BOOLEAN,
    ),
    "ConsoleLink": object_of(object=word_of("console.link"), path=STRING, expires_at=INTEGER),
}
"""By the name that a route gives its answer."""


# --- the document ----------------------------------------------------------------------------------------------------


PATH_PARAM = re.compile(r"\{(\w+)")
EVENT = told(extended(object_of(data=STRING), **each(STRING, "event", "id")), "One event of the stream.")
PLAIN = {"application/json": FREE, "text/event-stream": EVENT}
"""Schemas of answers by media type; any other media type is a string."""

_ALWAYS = ("x-request-id", "openai-processing-ms")
_ANYWHERE = (403, 421, 429)
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
    429: "queue_full, deadline_unreachable: the wait is too long. rate_limit_exceeded, budget_exceeded, quota_exceeded:"
    " `param` is the limit. too_many_refusals: slow down.",
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
    409: _RETRY,
    429: (*_RETRY, *RATE_HEADERS),
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
    "Retry-After": "Seconds to wait, at most 120, or until a budget begins anew.",
    **dict.fromkeys(RATE_HEADERS, "What the key has left of its limits a minute, if it has any."),
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
        if route.answer:
            paths.setdefault(route.described_path, {})[route.method.lower()] = _operation(route)
    shared = {
        f"Error{status}": _shared_answer(words, _ERROR_HEADERS.get(status, ()), "Error")
        for status, words in ERRORS.items()
    }
    shared["Accepted"] = _shared_answer("The job, which has not ended yet.", (*JOB_HEADERS, "Location"), "Job")
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": version, "description": "A durable queue in front of LLM engines."},
        **({"servers": [{"url": base_path}]} if base_path else {}),
        "paths": paths,
        "components": {
            "schemas": _request_schemas() | ANSWERS,
            "parameters": _parameters(),
            "headers": {name: {"description": words, "schema": STRING} for name, words in HEADERS.items()},
            "responses": shared,
            "securitySchemes": {"key": told({"type": "http", "scheme": "bearer"}, "A key, or a token of [oidc].")},
        },
        "security": [{"key": []}],
    }


def _operation(route: Route) -> dict[str, Any]:
    named = tuple(PATH_PARAM.findall(route.path))
    headers = (*_ALWAYS, *route.headers, *(("X-Job-Id",) if "job_id" in named else ()))
    answer = {"description": route.described, "headers": _headers(headers), "content": _content(route)}
    answers = {str(route.status): answer}
    if route.or_job:
        answers["202"] = ref("responses", "Accepted")
    answers |= {str(each): {"description": EMPTY[each], "headers": _headers(headers)} for each in route.empty}
    answers |= {str(status): ref("responses", f"Error{status}") for status in sorted(_statuses(route))}
    words = route.described_path.removeprefix("/v1").replace("{", "").replace("}", "").replace(".", "_")
    operation: dict[str, Any] = {
        "operationId": route.method.lower() + words.replace("/", "_"),
        "summary": route.described,
        "responses": answers,
    }
    if params := (*named, *route.params):
        operation["parameters"] = [ref("parameters", name) for name in params]
    if bodies := route.bodies or (("Upload",) if route.form else ()):
        kind = "multipart/form-data" if route.form else "application/json"
        operation["requestBody"] = {"required": True, "content": {kind: {"schema": any_of(*bodies)}}}
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
    if "/" in route.answer:
        found = {route.answer: {"schema": PLAIN.get(route.answer, STRING)}}
    else:
        found = {"application/json": {"schema": schema(route.answer)}}
    return found | ({"text/event-stream": {"schema": EVENT}} if route.events else {})


def _shared_answer(words: str, headers: tuple[str, ...], name: str) -> dict[str, Any]:
    """An answer that many routes have; `name`: of the schema of its body."""
    content = {"application/json": {"schema": schema(name)}}
    return {"description": words, "headers": _headers((*_ALWAYS, *headers)), "content": content}


def _headers(names: tuple[str, ...]) -> dict[str, Any]:
    return {name: ref("headers", name) for name in names}


def _parameters() -> dict[str, Schema]:
    def param(name: str, where: str, kind: Schema, words: str) -> Schema:
        return {"name": name, "in": where, "required": where == "path", "schema": kind, "description": words}

    named = {name for route in ROUTES if route.answer for name in PATH_PARAM.findall(route.path)}
    paths = {name: param(name, "path", STRING, f"Which {name.removesuffix('_id')}.") for name in sorted(named)}
    headers = {name: param(name, "header", STRING, words) for name, words in HEADER_PARAMS.items()}
    queries = {key: param(name, "query", kind, words) for key, (name, kind, words) in PARAMS.items()}
    return paths | headers | queries


def _request_schemas() -> dict[str, Schema]:
    """Render all models in one call, so that they share their definitions."""
    others = (ModerationRequest, BatchRequest, PoolOverride, KeyRequest, KeyUpdate)
    models = (*MODELS.values(), *JOB_MODELS.values(), ConversationRequest, ConversationUpdate, ItemsRequest, *others)
    described: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "validation") for model in models]
    found: dict[str, Schema] = models_json_schema(described, ref_template="#/components/schemas/{model}")[1]["$defs"]
    return found
