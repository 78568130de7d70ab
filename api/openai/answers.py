"""OpenAPI schemas of the API's answers, written by hand because the answers are plain dicts without a model class."""

from __future__ import annotations

from typing import Any, get_args

from streaming.batches.batch import BatchState
from streaming.fleet.plans import ActionKind, PoolKind
from streaming.jobs.job import JobState
from streaming.jobs.settings import QuotaSettings
from streaming.priority import Priority
from telemetry.latency import EGRESS_FIRST, GROUPS, PARTS, Stamps

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


def _object(**properties: Schema) -> Schema:
    """Build the schema of an object whose properties are all required."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _maybe(kind: Schema) -> Schema:
    return {"anyOf": [kind, {"type": "null"}]}


def _word(*words: str) -> Schema:
    return {"type": "string", "enum": list(words)}


def answer_schemas() -> dict[str, Schema]:
    fault = _object(message=STRING, type=STRING, param=_maybe(STRING), code=STRING)
    return {
        "Error": _object(error=fault),
        "Usage": _object(
            prompt_tokens=INTEGER,
            completion_tokens=INTEGER,
            total_tokens=INTEGER,
            prompt_tokens_details=_object(cached_tokens=INTEGER),
        ),
        "ChatCompletion": _answer(
            "chat.completion", message=_object(role=_word("assistant"), content=STRING, refusal=_maybe(STRING))
        ),
        "Completion": _answer("text_completion", text=STRING),
        "Answer": any_of("ChatCompletion", "Completion"),
        "Model": _model(),
        "ModelList": _object(object=_word("list"), data=_list(schema("Model"))),
        "DeadLetter": _dead_letter(),
        "DeadLetterList": _object(object=_word("list"), data=_list(schema("DeadLetter"))),
        "WebhookMessage": _webhook_message(),
        "WebhookMessageList": _object(object=_word("list"), data=_list(schema("WebhookMessage"))),
        "File": _file(),
        "FileList": _page("File"),
        "Upload": _object(file={"type": "string", "format": "binary"}, purpose=_word("batch")),
        "Deleted": _object(id=STRING, object=STRING, deleted=BOOLEAN),
        "Batch": _batch(),
        "BatchList": _page("Batch"),
        "Tenant": _tenant(),
        "TenantList": _object(object=_word("list"), data=_list(schema("Tenant"))),
        "Pool": _pool(),
        "PoolList": _object(
            object=_word("list"),
            data=_list(schema("Pool")),
            leader=_maybe(_object(id=STRING, epoch=INTEGER)),
            actions=_list(_action()),
        ),
        "PoolOverride": _override_body(),
        "Job": _job(fault),
        "JobTiming": _timing(),
        "JobList": _object(
            object=_word("list"), data=_list(schema("Job")), has_more=BOOLEAN, next_cursor=_maybe(STRING)
        ),
    }


def _page(name: str) -> Schema:
    ids = {name: _maybe(STRING) for name in ("first_id", "last_id")}
    return _object(object=_word("list"), data=_list(schema(name)), has_more=BOOLEAN, **ids)


def _file() -> Schema:
    return _object(
        id=STRING,
        object=_word("file"),
        bytes=INTEGER,
        created_at=INTEGER,
        expires_at=INTEGER,
        filename=STRING,
        purpose=_word("batch", "batch_output"),
        status=_word("processed"),
        status_details=_maybe(STRING),
    )


def _batch() -> Schema:
    times = ("in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    fault = _object(code=STRING, line=_maybe(INTEGER), message=STRING, param=_maybe(STRING))
    return _object(
        id=STRING,
        object=_word("batch"),
        endpoint=STRING,
        model=_maybe(STRING),
        errors=_maybe(_object(object=_word("list"), data=_list(fault))),
        input_file_id=STRING,
        completion_window=STRING,
        status=_word(*(state.value for state in BatchState)),
        output_file_id=_maybe(STRING),
        error_file_id=_maybe(STRING),
        created_at=INTEGER,
        **{f"{name}_at": _maybe(INTEGER) for name in times},
        request_counts=_object(total=INTEGER, completed=INTEGER, failed=INTEGER),
        usage=_object(
            input_tokens=INTEGER,
            input_tokens_details=_object(cached_tokens=INTEGER),
            output_tokens=INTEGER,
            output_tokens_details=_object(reasoning_tokens=INTEGER),
            total_tokens=INTEGER,
        ),
        metadata=_maybe({"type": "object", "additionalProperties": STRING}),
        paused=BOOLEAN,
        lane=_maybe(STRING),
        lane_reason=_maybe(STRING),
        lines_distinct=INTEGER
        | {"description": "Lines that differ, which are computed; 0 until the file is read. The others get copies."},
        lines_in_queue=INTEGER | {"description": "Lines that wait in a lane or run."},
        lines_retried=INTEGER | {"description": "How often a line was sent again after a fault of the engine."},
        lines_per_second=NUMBER | {"description": "Lines that ended a second, lately."},
    )


def _webhook_message() -> Schema:
    words = ("id", "endpoint", "event", "type", "subject", "tenant", "status")
    return _object(
        object=_word("webhook_message"),
        **dict.fromkeys(words, STRING),
        at=NUMBER,
        attempts=INTEGER,
        last_attempt_at=_maybe(NUMBER),
        next_attempt_at=_maybe(NUMBER),
        last_status_code=_maybe(INTEGER),
        last_error=_maybe(STRING),
    )


def _dead_letter() -> Schema:
    lane = _maybe(STRING | {"description": "Of the job or entry, as model:priority."})
    words = {"job_id": _maybe(STRING), "lane": lane, "entry": _maybe(STRING)}
    return _object(id=STRING, object=_word("dead_letter"), reason=STRING, at=NUMBER, **words)


def _tenant() -> Schema:
    limit = _maybe(INTEGER | {"description": "null: no limit."})
    counts = ("jobs", "waiting", "running", "job_bytes", "result_bytes", "files", "file_bytes")
    return _object(
        object=_word("tenant"),
        tenant=STRING,
        **dict.fromkeys(counts, INTEGER),
        limits=_object(**dict.fromkeys(QuotaSettings.__struct_fields__, limit)),
    )


def _pool() -> Schema:
    time = NUMBER | {"description": "Unix seconds of Redis time"}
    override = _object(want=_maybe(INTEGER), paused=BOOLEAN, by=STRING, at=time, until=_maybe(time))
    lane = _object(waiting=INTEGER, running=INTEGER, oldest_s=NUMBER, wait_s=_maybe(NUMBER))
    worker = _object(
        id=STRING,
        host=STRING,
        state=_word("starting", "ready", "draining", "drained"),
        shape=_maybe(STRING),
        since=time,
        slots=INTEGER,
        running=INTEGER,
        step_ms=_maybe(NUMBER),
        cordon=_maybe(STRING | {"description": "Why the worker takes no more jobs."}),
    )
    counts = dict.fromkeys(("ready", "starting", "draining", "min", "max"), INTEGER)
    shape = _object(
        want=_maybe(INTEGER),
        **counts,
        takes=BOOLEAN | {"description": "Whether new jobs go to this shape."},
    )
    return _object(
        object=_word("pool"),
        model=STRING,
        want=_maybe(INTEGER),
        reason=_maybe(STRING),
        **counts,
        pool=_maybe(_word(*get_args(PoolKind))),
        epoch=_maybe(INTEGER | {"description": "Epoch of the scheduler that decided it."}),
        decided_at=_maybe(time),
        wake_s=_maybe(NUMBER | {"description": "Seconds until the first worker is ready."}),
        cold_start_s=_maybe(NUMBER),
        override=_maybe(override),
        lanes=_object(**{priority.value: lane for priority in Priority}),
        workers=_list(worker),
        leaving=_list(STRING),
        shapes={"type": "object", "additionalProperties": shape},
    )


def _action() -> Schema:
    return _object(
        at=NUMBER,
        epoch=INTEGER,
        model=_maybe(STRING),
        action=_word(*get_args(ActionKind)),
        was=_maybe(INTEGER),
        want=_maybe(INTEGER),
        worker=_maybe(STRING),
        shape=_maybe(STRING),
        reason=STRING,
        by=STRING,
    )


def _override_body() -> Schema:
    hold = INTEGER | {"minimum": 1, "maximum": MAX_OVERRIDE_S}
    return {
        "type": "object",
        "properties": {
            "want": _maybe(INTEGER | {"minimum": 0}),
            "paused": _maybe(BOOLEAN | {"const": True}),
            "for_s": _maybe(hold) | {"description": "Seconds it holds; without it, until it is deleted."},
        },
        "oneOf": [
            {"required": ["want"], "properties": {"want": INTEGER, "paused": {"type": "null"}}},
            {"required": ["paused"], "properties": {"paused": BOOLEAN, "want": {"type": "null"}}},
        ],
        "additionalProperties": False,
    }


def _answer(kind: str, **said: Schema) -> Schema:
    choice = _object(index=INTEGER, **said, logprobs=_maybe(FREE), finish_reason=_word("stop", "length"))
    return _object(
        id=STRING,
        object=_word(kind),
        created=INTEGER,
        model=STRING,
        service_tier=_word("priority", "default", "flex"),
        system_fingerprint=_maybe(STRING),
        choices=_list(choice),
        usage=schema("Usage"),
    )


def _model() -> Schema:
    """Schema of a model; context length and capabilities are absent until a worker has loaded the model."""
    model = _object(id=STRING, object=_word("model"), created=INTEGER, owned_by=STRING)
    model["properties"] |= {"context_length": INTEGER, "capabilities": FREE}
    return model


def _job(fault: Schema) -> Schema:
    time = _maybe(NUMBER | {"description": "Unix seconds"})
    job = _object(
        id=STRING,
        object=_word("job"),
        status=_word(*(state.value for state in JobState)),
        created_at=time,
        started_at=time,
        first_token_at=time,
        completed_at=time,
        expires_at=time,
        model=STRING,
        priority=_word(*(priority.value for priority in Priority)),
        queue_position=_maybe(INTEGER | {"description": "Jobs that are expected to start before it."}),
        queue_reason=_maybe(STRING | {"description": "Why it stands there, in words for its owner."}),
        eta_ms=_maybe(INTEGER | {"description": "Expected time until it starts."}),
        eta_low_ms=_maybe(INTEGER | {"description": "Nine of ten such jobs wait at least so long."}),
        eta_high_ms=_maybe(INTEGER | {"description": "Nine of ten wait at most so long."}),
        attempts=INTEGER,
        attempt_log=_maybe(_list(_attempt())),
        last_event_id=_maybe(STRING | {"description": "Id of the newest event; null while the job runs."}),
        usage=_maybe(schema("Usage")),
        result=_maybe(schema("Answer")),
        error=_maybe(fault),
        metadata={"type": "object", "additionalProperties": STRING},
    )
    asked = {"type": "object", "description": "The request, with `include=input`; null if it cannot be read."}
    job["properties"]["input"] = _maybe(asked)
    return job


def _attempt() -> Schema:
    time = _maybe(NUMBER | {"description": "Unix seconds"})
    outcome = _word("lost", "handed_back", "preempted", *(state.value for state in JobState if state.final))
    return _object(
        worker=STRING | {"description": "As `penstock ps` names it."},
        started_at=time,
        ended_at=time,
        tokens=_maybe(
            INTEGER
            | {"description": "Tokens that it generated; null while the job runs, and if the job began anew since."}
        ),
        outcome=_maybe(outcome | {"description": "null while it runs."}),
    )


def _timing() -> Schema:
    parts = {part.name: _maybe(NUMBER | {"description": part.meaning}) for part in (*PARTS, EGRESS_FIRST)}
    stamp = _maybe(NUMBER | {"description": "Unix seconds of Redis time"})
    return _object(
        id=STRING,
        object=_word("job.timing"),
        status=_word(*(state.value for state in JobState)),
        attempts=INTEGER,
        parts_ms=_object(**parts),
        reasons={"type": "object", "additionalProperties": STRING, "description": "Why a part has no time."},
        groups_ms=_object(
            **{name: NUMBER | {"description": f"The sum of {', '.join(GROUPS[name])}."} for name in GROUPS}
        ),
        sum_ms=NUMBER | {"description": "Sum of all parts except egress_first, which overlaps decode."},
        end_to_end_ms=_maybe(NUMBER),
        until=_maybe(STRING | {"description": "The stamp at which end_to_end_ms ends."}),
        time_to_first_token_ms=_maybe(NUMBER),
        gateway_time_to_first_token_ms=_maybe(NUMBER),
        time_per_output_token_ms=_maybe(NUMBER),
        clock_error_ms=_object(api=NUMBER, worker=NUMBER)
        | {"description": "Clock error bound of each process; a part that spans both may be wrong by the sum."},
        stamps=_object(**dict.fromkeys(Stamps.__dataclass_fields__, stamp)),
    )
