"""OpenAPI schemas of the API's answers, written by hand because the answers are plain dicts without a model class."""

from __future__ import annotations

from typing import Any, get_args

from streaming.batches.store import BatchState
from streaming.fleet.plans import ActionKind, PoolKind
from streaming.jobs.job import CancelledBy, Endpoint, JobState
from streaming.jobs.settings import QuotaSettings
from streaming.order import Priority
from telemetry.latency import EGRESS_FIRST, GROUPS, PARTS, STAMPS

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
FREE: Schema = {"type": "object"}

MAX_OVERRIDE_S = 30 * 86_400
"""Longest duration of a manual override."""


def ref(section: str, name: str) -> Schema:
    return {"$ref": f"#/components/{section}/{name}"}


def schema(name: str) -> Schema:
    return ref("schemas", name)


def any_of(*names: str) -> Schema:
    return {"anyOf": [schema(name) for name in names]} if len(names) > 1 else schema(names[0])


def object_of(**properties: Schema) -> Schema:
    """Build the schema of an object whose properties are all required."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def maybe(kind: Schema) -> Schema:
    return {"anyOf": [kind, {"type": "null"}]}


def word_of(*words: str) -> Schema:
    return {"type": "string", "enum": list(words)}


CANCELLED_BY = word_of(*(each.value for each in CancelledBy)) | {"description": "Who cancelled it, if that is known."}


def answer_schemas() -> dict[str, Schema]:
    return {
        "Error": object_of(error=_fault()),
        "Usage": _usage(),
        "ChatCompletion": _answer("chat.completion", message=_message()),
        "Completion": _answer("text_completion", text=STRING),
        "Answer": any_of(
            "ChatCompletion", "Completion", "Response", "EmbeddingList", "Ranking", "TokenIds", "TokenText"
        ),
        "Model": _model(),
        "ModelList": list_named("Model"),
        "DeadLetter": _dead_letter(),
        "DeadLetterList": list_named("DeadLetter"),
        "WebhookMessage": _webhook_message(),
        "WebhookMessageList": list_named("WebhookMessage"),
        "File": _file(),
        "FileList": page_of("File"),
        "Upload": object_of(file={"type": "string", "format": "binary"}, purpose=word_of("batch")),
        "Deleted": object_of(id=STRING, object=STRING, deleted=BOOLEAN),
        "Batch": _batch(),
        "BatchList": page_of("Batch"),
        "Tenant": _tenant(),
        "TenantList": list_named("Tenant"),
        "Pool": _pool(),
        "PoolList": list_named(
            "Pool", leader=maybe(object_of(id=STRING, epoch=INTEGER)), actions=list_of(action_schema())
        ),
        "PoolOverride": _override_body(),
        "Job": job_schema(),
        "JobTiming": _timing(),
        "StreamMessages": list_of(object_of(event=STRING, id=STRING, data=FREE)),
        "JobList": list_named("Job", has_more=BOOLEAN, next_cursor=maybe(STRING)),
    }


def list_named(name: str, **more: Schema) -> Schema:
    return object_of(object=word_of("list"), data=list_of(schema(name)), **more)


def page_of(name: str) -> Schema:
    return list_named(name, has_more=BOOLEAN, first_id=maybe(STRING), last_id=maybe(STRING))


def _file() -> Schema:
    return object_of(
        id=STRING,
        object=word_of("file"),
        bytes=INTEGER,
        created_at=INTEGER,
        expires_at=INTEGER,
        filename=STRING,
        purpose=word_of("batch", "batch_output"),
        status=word_of("processed"),
        status_details=maybe(STRING),
    )


def _batch() -> Schema:
    times = ("in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    fault = object_of(code=STRING, line=maybe(INTEGER), message=STRING, param=maybe(STRING))
    return object_of(
        id=STRING,
        object=word_of("batch"),
        endpoint=STRING,
        model=maybe(STRING),
        errors=maybe(object_of(object=word_of("list"), data=list_of(fault))),
        input_file_id=STRING,
        completion_window=STRING,
        status=word_of(*(state.value for state in BatchState)),
        output_file_id=maybe(STRING),
        error_file_id=maybe(STRING),
        created_at=INTEGER,
        **{f"{name}_at": maybe(INTEGER) for name in times},
        request_counts=object_of(total=INTEGER, completed=INTEGER, failed=INTEGER),
        usage=usage_of_responses(),
        metadata=maybe({"type": "object", "additionalProperties": STRING}),
        paused=BOOLEAN,
        lane=maybe(STRING),
        lane_reason=maybe(STRING),
        lines_distinct=INTEGER
        | {"description": "Lines that differ, which are computed; 0 until the file is read. The others get copies."},
        lines_in_queue=INTEGER | {"description": "Lines that wait in a lane or run."},
        lines_retried=INTEGER | {"description": "How often a line was sent again after a fault of the engine."},
        lines_per_second=NUMBER | {"description": "Lines that ended a second, lately."},
    )


def _webhook_message() -> Schema:
    words = ("id", "endpoint", "event", "type", "subject", "tenant", "status")
    return object_of(
        object=word_of("webhook_message"),
        **dict.fromkeys(words, STRING),
        url=maybe(STRING | {"description": "The URL that the request names, without its query; null: the endpoint's."}),
        at=NUMBER,
        attempts=INTEGER,
        last_attempt_at=maybe(NUMBER),
        next_attempt_at=maybe(NUMBER),
        last_status_code=maybe(INTEGER),
        last_error=maybe(STRING),
    )


def _dead_letter() -> Schema:
    lane = maybe(STRING | {"description": "Of the job or entry, as model:priority."})
    words = {"job_id": maybe(STRING), "lane": lane, "entry": maybe(STRING)}
    return object_of(id=STRING, object=word_of("dead_letter"), reason=STRING, at=NUMBER, **words)


def _tenant() -> Schema:
    limit = maybe(INTEGER | {"description": "null: no limit."})
    counts = ("jobs", "waiting", "running", "job_bytes", "result_bytes", "files", "file_bytes")
    return object_of(
        object=word_of("tenant"),
        tenant=STRING,
        **dict.fromkeys(counts, INTEGER),
        limits=object_of(**dict.fromkeys(QuotaSettings.__struct_fields__, limit)),
    )


def _pool() -> Schema:
    time = NUMBER | {"description": "Unix seconds of Redis time"}
    override = object_of(want=maybe(INTEGER), paused=BOOLEAN, by=STRING, at=time, until=maybe(time))
    lane = object_of(waiting=INTEGER, running=INTEGER, oldest_s=NUMBER, wait_s=maybe(NUMBER))
    worker = object_of(
        id=STRING,
        host=STRING,
        state=word_of("starting", "ready", "draining", "drained"),
        shape=maybe(STRING),
        since=time,
        slots=INTEGER,
        running=INTEGER,
        step_ms=maybe(NUMBER),
        cordon=maybe(STRING | {"description": "Why the worker takes no more jobs."}),
        phase=STRING | {"description": 'What it does while it starts; "" if that is not known.'},
        away={
            "type": "array",
            "items": STRING,
            "description": "The servers that it waits for, each with the reason; none while one is there.",
        },
        away_s=NUMBER | {"description": "For how long they have been away."},
    )
    counts = dict.fromkeys(("ready", "starting", "draining", "min", "max"), INTEGER)
    shape = object_of(
        want=maybe(INTEGER),
        **counts,
        takes=BOOLEAN | {"description": "Whether new jobs go to this shape."},
    )
    return object_of(
        object=word_of("pool"),
        model=STRING,
        engine=STRING,
        want=maybe(INTEGER),
        reason=maybe(STRING),
        **counts,
        pool=maybe(word_of(*get_args(PoolKind))),
        epoch=maybe(INTEGER | {"description": "Epoch of the scheduler that decided it."}),
        decided_at=maybe(time),
        wake_s=maybe(NUMBER | {"description": "Seconds until the first worker is ready."}),
        cold_start_s=maybe(NUMBER),
        override=maybe(override),
        stalled=maybe(object_of(cause=STRING, fix=STRING))
        | {"description": "Why no worker can ever run its jobs unless somebody changes something."},
        lanes=object_of(**{priority.value: lane for priority in Priority}),
        workers=list_of(worker),
        leaving=list_of(STRING),
        shapes={"type": "object", "additionalProperties": shape},
    )


def action_schema() -> Schema:
    return object_of(
        at=NUMBER,
        epoch=INTEGER,
        model=maybe(STRING),
        action=word_of(*get_args(ActionKind)),
        was=maybe(INTEGER),
        want=maybe(INTEGER),
        worker=maybe(STRING),
        shape=maybe(STRING),
        reason=STRING,
        by=STRING,
    )


def _override_body() -> Schema:
    hold = INTEGER | {"minimum": 1, "maximum": MAX_OVERRIDE_S}
    return {
        "type": "object",
        "properties": {
            "want": maybe(INTEGER | {"minimum": 0}),
            "paused": maybe(BOOLEAN | {"const": True}),
            "for_s": maybe(hold) | {"description": "Seconds it holds; without it, until it is deleted."},
        },
        "oneOf": [
            {"required": ["want"], "properties": {"want": INTEGER, "paused": {"type": "null"}}},
            {"required": ["paused"], "properties": {"paused": BOOLEAN, "want": {"type": "null"}}},
        ],
        "additionalProperties": False,
    }


def _answer(kind: str, **said: Schema) -> Schema:
    reason = word_of("stop", "length", "tool_calls", "content_filter")
    choice = object_of(index=INTEGER, **said, logprobs=maybe(FREE), finish_reason=reason)
    answer = object_of(
        id=STRING,
        object=word_of(kind),
        created=INTEGER,
        model=STRING,
        service_tier=word_of("priority", "default", "flex"),
        system_fingerprint=maybe(STRING),
        choices=list_of(choice),
        usage=schema("Usage"),
    )
    answer["properties"]["served_by"] = STRING | {"description": "If other models gave it than `model`: their names."}
    return answer


def usage_of_responses() -> Schema:
    """Schema of token counts as responses and batches have them."""
    return object_of(
        input_tokens=INTEGER,
        input_tokens_details=object_of(cached_tokens=INTEGER),
        output_tokens=INTEGER,
        output_tokens_details=object_of(reasoning_tokens=INTEGER),
        total_tokens=INTEGER,
    )


def _usage() -> Schema:
    """Schema of token counts; those of reasoning are there only if there are any."""
    usage = object_of(
        prompt_tokens=INTEGER,
        completion_tokens=INTEGER,
        total_tokens=INTEGER,
        prompt_tokens_details=object_of(cached_tokens=INTEGER),
    )
    usage["properties"]["completion_tokens_details"] = object_of(reasoning_tokens=INTEGER)
    return usage


def _message() -> Schema:
    """Schema of an answer's message; `tool_calls` is there only if it calls tools, and `reasoning_content` only if it
    holds reasoning."""
    function = object_of(name=STRING, arguments=STRING | {"description": "JSON"})
    call = object_of(id=STRING, type=word_of("function"), function=function)
    message = object_of(role=word_of("assistant"), content=maybe(STRING), refusal=maybe(STRING))
    message["properties"]["reasoning_content"] = STRING | {"description": "Only if the model has reasoned."}
    message["properties"]["tool_calls"] = list_of(call)
    return message


def _model() -> Schema:
    """Schema of a model; context length and capabilities are absent until a worker has loaded the model."""
    model = object_of(id=STRING, object=word_of("model"), created=INTEGER, owned_by=STRING)
    model["properties"] |= {"context_length": INTEGER, "capabilities": FREE}
    return model


def _fault() -> Schema:
    """Schema of an error; `cancelled_by` is there only in that of a cancelled job."""
    fault = object_of(message=STRING, type=STRING, param=maybe(STRING), code=STRING)
    fault["properties"]["cancelled_by"] = CANCELLED_BY
    return fault


def job_schema() -> Schema:
    """Build the schema of a job."""
    time = maybe(NUMBER | {"description": "Unix seconds"})
    job = object_of(
        id=STRING,
        object=word_of("job"),
        status=word_of(*(state.value for state in JobState)),
        created_at=time,
        started_at=time,
        first_token_at=time,
        completed_at=time,
        expires_at=time,
        endpoint=word_of(*(endpoint.path for endpoint in Endpoint)),
        model=STRING,
        served_by=maybe(STRING | {"description": "The models that gave the answer; null before its end."}),
        priority=word_of(*(priority.value for priority in Priority)),
        queue_position=maybe(INTEGER | {"description": "Jobs that are expected to start before it."}),
        queue_reason=maybe(STRING | {"description": "Why it waits there, in words for its owner."}),
        eta_ms=maybe(INTEGER | {"description": "Expected time until it starts."}),
        eta_low_ms=maybe(INTEGER | {"description": "Nine of ten such jobs wait at least so long."}),
        eta_high_ms=maybe(INTEGER | {"description": "Nine of ten wait at most so long."}),
        attempts=INTEGER,
        attempt_log=maybe(list_of(_attempt())),
        last_event_id=maybe(STRING | {"description": "Id of the newest event; null while the job runs."}),
        usage=maybe(schema("Usage")),
        result=maybe(schema("Answer")),
        error=maybe(_fault()),
        cancelled_by=maybe(CANCELLED_BY),
        metadata={"type": "object", "additionalProperties": STRING},
    )
    asked = {"type": "object", "description": "The request, with `include=input`; null if it cannot be read."}
    ended = {"description": "In the answer to a cancel: whether the job had ended before."}
    words = {"description": "In a list: the first words of its prompt, if your key may read it."}
    job["properties"] |= {"input": maybe(asked), "already_ended": BOOLEAN | ended, "preview": maybe(STRING | words)}
    return job


def _attempt() -> Schema:
    time = maybe(NUMBER | {"description": "Unix seconds"})
    outcome = word_of(
        "lost", "handed_back", "returned", "preempted", *(state.value for state in JobState if state.final)
    )
    return object_of(
        worker=STRING | {"description": "As `penstock ps` names it."},
        started_at=time,
        ended_at=time,
        tokens=maybe(
            INTEGER
            | {"description": "Tokens that it generated; null while the job runs, and if the job began anew since."}
        ),
        outcome=maybe(outcome | {"description": "null while it runs."}),
    )


def _timing() -> Schema:
    parts = {part.name: maybe(NUMBER | {"description": part.meaning}) for part in (*PARTS, EGRESS_FIRST)}
    stamp = maybe(NUMBER | {"description": "Unix seconds of Redis time"})
    return object_of(
        id=STRING,
        object=word_of("job.timing"),
        status=word_of(*(state.value for state in JobState)),
        attempts=INTEGER,
        parts_ms=object_of(**parts),
        reasons={"type": "object", "additionalProperties": STRING, "description": "Why a part has no time."},
        groups_ms=object_of(
            **{name: NUMBER | {"description": f"The sum of {', '.join(GROUPS[name])}."} for name in GROUPS}
        ),
        sum_ms=NUMBER | {"description": "Sum of all parts except egress_first, which overlaps decode."},
        end_to_end_ms=maybe(NUMBER),
        until=maybe(STRING | {"description": "The stamp at which end_to_end_ms ends."}),
        time_to_first_token_ms=maybe(NUMBER),
        gateway_time_to_first_token_ms=maybe(NUMBER),
        time_per_output_token_ms=maybe(NUMBER),
        clock_error_ms=object_of(api=NUMBER, worker=NUMBER)
        | {"description": "Clock error bound of each process; a part that spans both may be wrong by the sum."},
        stamps=object_of(**dict.fromkeys(STAMPS, stamp)),
    )
