"""OpenAPI schemas of the answers that operators and the console read."""

from __future__ import annotations

from api.openai.answers import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    STRING,
    Schema,
    action_schema,
    job_schema,
    list_named,
    list_of,
    maybe,
    object_of,
    schema,
    word_of,
)
from streaming.jobs.settings import QuotaSettings
from streaming.order import Priority

LANE = word_of(*(priority.value for priority in Priority))


def console_schemas() -> dict[str, Schema]:
    """Build the schemas, by name."""
    readable = BOOLEAN | {"description": "Whether your key may read its request and answer, at /v1/jobs."}
    return {
        "Overview": _overview(),
        "AdminJob": _job_with(
            tenant=STRING, readable=readable, timing=schema("JobTiming"), finish_reasons=list_of(maybe(STRING))
        ),
        "AdminJobList": list_named("ListedJob", has_more=BOOLEAN, next_cursor=maybe(STRING)),
        "ListedJob": _job_with(tenant=STRING),
        "KeyList": object_of(object=word_of("list"), data=list_of(_key())),
        "ConsoleSession": object_of(
            object=word_of("console.session"),
            name=maybe(STRING | {"description": "Name of the admin key; null: the admin token."}),
            tenant=STRING,
            highest_lane=LANE,
            has_keys=BOOLEAN,
            version=STRING,
        ),
        "ConsoleLink": object_of(object=word_of("console.link"), path=STRING, expires_at=INTEGER),
    }


def _job_with(**properties: Schema) -> Schema:
    """The schema of a job, with more properties."""
    job = job_schema()
    return job | {"properties": job["properties"] | properties, "required": [*job["required"], *properties]}


def _key() -> Schema:
    limit = maybe(INTEGER | {"description": "null: as [quotas] says."})
    return object_of(
        object=word_of("key"),
        name=STRING,
        tenant=STRING,
        highest_lane=LANE,
        admin=BOOLEAN,
        batch_tokens=maybe(INTEGER),
        quotas=object_of(**dict.fromkeys(QuotaSettings.__struct_fields__, limit)),
    )


def _overview() -> Schema:
    problem = object_of(
        severity=word_of("error", "warning", "note"),
        **dict.fromkeys(("title", "cause", "next_step", "page"), STRING),
        delays=BOOLEAN | {"description": "Whether jobs wait longer for it than they should."},
    )
    percentiles = maybe(object_of(p50=NUMBER, p95=NUMBER))
    window = maybe(NUMBER | {"description": "Seconds that the latencies cover; null: since the processes started."})
    return object_of(
        object=word_of("overview"),
        at=NUMBER,
        verdict=object_of(flow=word_of("flowing", "behind", "stopped"), title=STRING, problems=list_of(problem)),
        rates=object_of(
            window_s=window,
            first_token_ms=percentiles,
            per_token_ms=percentiles,
            tokens_per_s=NUMBER | {"description": "Written by all workers in the last seconds."},
            jobs_per_s=maybe(NUMBER),
            failed=INTEGER,
            open_streams=INTEGER,
        ),
        pools=list_of(schema("Pool")),
        leader=maybe(object_of(id=STRING, epoch=INTEGER)),
        actions=list_of(action_schema()),
        processes=list_of(_process()),
        store=object_of(used_bytes=INTEGER, reserved_bytes=INTEGER, allowed_bytes=maybe(INTEGER), share=maybe(NUMBER)),
        dead_letters=object_of(count=INTEGER, more=BOOLEAN),
        history=list_of(_point()),
    )


def _process() -> Schema:
    numbers = dict.fromkeys(("slots", "running", "waiting", "kv_tokens", "kv_used"), maybe(INTEGER))
    numbers["running"] = numbers["running"] | {"description": "Slots in use: texts that the worker's engine runs."}
    numbers["waiting"] = numbers["waiting"] | {"description": "Texts that the engine has and does not run yet."}
    numbers["tokens_per_s"] = maybe(NUMBER)
    return object_of(
        role=STRING, id=STRING, host=STRING, pid=INTEGER, state=STRING, since=NUMBER, model=maybe(STRING), **numbers
    )


def _point() -> Schema:
    return object_of(
        at=NUMBER,
        tokens_per_s=maybe(NUMBER),
        first_token_ms=maybe(NUMBER),
        per_token_ms=maybe(NUMBER),
        waiting=INTEGER,
        running=INTEGER,
    )
