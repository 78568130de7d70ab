"""The OpenAPI document holds together and describes what is really rendered and really refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema_rs
import pytest
from house import House
from openapi_document import DOCUMENT, SCHEMAS, conforms, lookup
from starlette.datastructures import QueryParams

from api import batches, files
from api.admin import letters as admin
from api.openai.errors import ApiError
from api.query import PARAMS, value_of
from api.routes import ROUTES
from streaming.batches.store import Batch, BatchProgress, BatchRecord, BatchState, LineFault, StoredFile
from streaming.events import WebhookMessage
from streaming.jobs.dead_letters import DeadLetter
from streaming.order import Priority


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def test_no_reference_dangles() -> None:
    """Every $ref leads somewhere, and nearly everything declared is used."""
    used = set(references(DOCUMENT))
    assert len(used) > 30
    for reference in used:
        assert lookup(reference) is not None
    for section in ("schemas", "responses", "headers", "parameters"):
        declared = {f"#/components/{section}/{name}" for name in DOCUMENT["components"][section]}
        assert declared <= used


def test_each_schema_is_one() -> None:
    """Of JSON Schema 2020-12, as OpenAPI 3.1 has it."""
    for schema in SCHEMAS.values():
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema)


def test_every_route_is_there_once() -> None:
    """What the application serves is what is described, and operation ids are unique names."""
    served = {
        (route.method.lower(), route.described_path)
        for route in ROUTES
        if route.path != "/" and not route.path.startswith("/console")  # for people
    }
    assert {(method, path) for method, path, _ in operations()} == served
    names = [operation["operationId"] for _, _, operation in operations()]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)
    assert "get_batches_batch_id_errors" in names, "clients are generated from them: they stay as they are"


def test_each_operation_has_a_summary_of_its_own() -> None:
    """One line, without a method or a path."""
    summaries = [operation["summary"] for _, path, operation in operations() if not path.startswith("/admin")]
    assert all(summaries) and len(set(summaries)) == len(summaries) and not any("/" in each for each in summaries)


def test_each_operation_says_how_it_may_be_refused() -> None:
    """By what it takes: a body, an idempotency key, values in its query, the name of something that may not exist."""
    for method, path, operation in operations():
        said = operation["responses"].keys()
        params = [lookup(each["$ref"]) for each in operation.get("parameters", [])]
        if path.startswith(("/v1/", "/admin/")):
            assert "503" in said
        if "{" in path:
            assert "404" in said
        if "requestBody" in operation:
            assert {"400", "413", "415"} <= said
        if any(each["in"] == "query" for each in params):
            assert "400" in said
        if any(each["name"] == "Idempotency-Key" for each in params):
            assert {"422", "429"} <= said
        accepted = {"$ref": "#/components/responses/Accepted"}
        or_accepted = method == "post" and operation["responses"].get("202") == accepted
        if or_accepted and path != "/v1/jobs":  # that one answers 200 with the job, however it ended
            assert {"408", "409", "500", "504"} <= said


@pytest.mark.parametrize(
    ("key", "taken", "refused"),
    [
        ("limit", {"1": 1, "100": 100, "7.0": 7}, ["", "0", "101", "-1", "x", "1.5", "9" * 5000]),
        ("wait", {"0": 0.0, "0.5": 0.5, "600": 600.0}, ["-1", "600.1", "nan", "inf", "x"]),
        ("since", {"1700000000.5": 1_700_000_000.5, "": None}, ["-1", "1e12", "nan", "today"]),
        ("status", {"queued": "queued", "": None}, ["Queued", "gone"]),
        ("order", {"asc": "asc"}, ["", "ASC"]),
        ("starting_after", {"0": 0}, ["", "-1"]),
        ("cursor", {"17-job_" + "0" * 32: "17-job_" + "0" * 32}, ["", "17", "17-job_" + "0" * 32 + "\n"]),
        ("search", {"x" * 64: "x" * 64}, ["x" * 65]),
        ("file_limit", {"10000": 10_000}, ["10001"]),
    ],
)
def test_parameters_are_read_as_they_are_described(key: str, taken: dict[str, Any], refused: list[str]) -> None:
    """A value within the bounds is read; any other is a 400 that names the parameter."""
    name = PARAMS[key].name
    for text, value in taken.items():
        assert value_of(QueryParams({name: text}), key) == value
    assert value_of(QueryParams(), key) is None
    for text in refused:
        with pytest.raises(ApiError) as error:
            value_of(QueryParams({name: text}), key)
        assert (error.value.status, error.value.param) == (400, name)


TIMES = {"created_ms": 1_000, "expires_ms": 2_000}
FILE = StoredFile(id="file-1", tenant="t", name="in.jsonl", size=9, purpose="batch", **TIMES)
BATCH = Batch(id="batch_1", tenant="t", ceiling=Priority.BATCH, endpoint="/v1/completions", input_file="file-1",
              window="24h", output_keep_ms=1, metadata={"a": "b"})  # fmt: skip
FAR = BatchProgress(total=9, model="m", lane="batch", lane_reason="r", faults=(LineFault(1, "c", "m", "p"),),
               output_file="file-2", error_file="file-3", began_ms=1_000, finalizing_ms=2_000, ended_ms=3)  # fmt: skip
NEW = BatchRecord(batch=BATCH, state=BatchState.VALIDATING, progress=BatchProgress(), **TIMES)
MESSAGE = WebhookMessage("whm_1", "evt_1", "job.completed", "job_1", "t", "mine", "pending", "", "", 1_000, 0, 0, 0, 0)
TRIED = WebhookMessage("whm_1", "evt_1", "job.completed", "job_1", "t", "mine", "pending", "x", "", 1_000, 1, 2, 3, 503)


@pytest.mark.parametrize(
    ("shown", "name"),
    [
        (files.file_object(FILE), "File"),
        (batches.batch_object(NEW), "Batch"),
        *((batches.batch_object(replace(NEW, state=state, progress=FAR)), "Batch") for state in BatchState),
        (admin._message_object(MESSAGE), "WebhookMessage"),
        (admin._message_object(TRIED), "WebhookMessage"),
        (admin._object(DeadLetter("0-1-1", "poison", 1, job="job_1")), "DeadLetter"),
        (admin._object(DeadLetter("0-1-1", "no entry", 1, lane="l", entry="1-1")), "DeadLetter"),
    ],
)
def test_every_object_is_as_described(shown: dict[str, Any], name: str) -> None:
    """With all that may be known, and with as little; as JSON, and of each field that has a value here its type."""
    assert conforms(json.loads(json.dumps(shown)), SCHEMAS[name])
    assert not conforms(shown | {"extra": 1}, SCHEMAS[name])


def test_every_answer_is_as_described(house: House) -> None:
    """Status, media type, body and the headers that say where a job is, of what real processes answer."""
    served = json.loads(house.get("/openapi.json")[1])

    def answered(method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """An answer, which is one that the document knows."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        status, got, data = house.request(method, path, body, sent or None)
        template = (
            path if path in DOCUMENT["paths"] else next(each for each in DOCUMENT["paths"] if matches(each, path))
        )
        operation = served["paths"][template][method.lower()]
        described = operation["responses"][str(status)]
        described = lookup(described["$ref"]) if "$ref" in described else described
        kind = got["content-type"].partition(";")[0]
        assert kind in described["content"]
        names = {name.lower() for name in described["headers"]}
        assert {"x-request-id", "openai-processing-ms"} <= names & got.keys()
        assert names & {"location", "x-job-id"} <= got.keys()
        if kind == "application/json":
            assert conforms(json.loads(data), described["content"][kind]["schema"]), data
            return status, json.loads(data)
        return status, data

    def ask(method: str, path: str, body: Any = None, **headers: str) -> Any:
        status, answer = answered(method, path, body, **headers)
        assert status in (200, 202), answer
        return answer

    def refused(status: int, method: str, path: str, body: Any = None) -> None:
        assert answered(method, path, body)[0] == status

    chat = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    text = {"model": "sim", "prompt": "x", "max_tokens": 2}
    for path in ["health", "healthz", "readyz", "version", "metrics", "openapi.json", "v1/models", "v1/models/sim"]:
        ask("GET", f"/{path}")
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", text)):
        ask("POST", path, body)
        ask("POST", path, body | {"stream": True})
        ask("POST", path, body, Prefer="respond-async")
        refused(400, "POST", path, body | {"n": 99})
    refused(415, "POST", "/v1/completions", body=None)
    asked = {"model": "sim", "input": "x", "max_output_tokens": 90, "reasoning": {"effort": "low"}}
    assert "reasoning" in {item["type"] for item in ask("POST", "/v1/responses", asked)["output"]}
    job = ask("POST", "/v1/jobs", chat)["id"]
    assert ask("GET", f"/v1/jobs/{job}?wait=30")["status"] == "completed"
    for path in ("/result", "/events", "/timing"):
        ask("GET", f"/v1/jobs/{job}{path}")
    ask("POST", f"/v1/jobs/{job}/cancel")
    form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\nContent-Disposition: '
    form += b'form-data; name="file"; filename="in.jsonl"\r\n\r\n{}\r\n--b--\r\n'
    file = ask("POST", "/v1/files", form, Content_Type="multipart/form-data; boundary=b")["id"]
    wanted = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = f"/v1/batches/{ask('POST', '/v1/batches', wanted)['id']}"
    for path in (batch, f"{batch}/output", f"{batch}/errors", f"/v1/files/{file}", f"/v1/files/{file}/content"):
        ask("GET", path)
    for path in ("pause", "resume", "cancel"):
        ask("POST", f"{batch}/{path}")
    ask("DELETE", f"/v1/files/{file}")
    refused(409, "POST", f"{batch}/pause")
    ask("PUT", "/admin/pools/sim", {"want": 1, "for_s": 60})
    assert ask("DELETE", "/admin/pools/sim")["override"] is None
    refused(400, "PUT", "/admin/pools/sim", {"want": -1})
    for path in ("v1/jobs", "v1/files", "v1/batches", "admin/dlq", "admin/webhooks", "admin/tenants", "admin/pools"):
        ask("GET", f"/{path}")
        refused(404, "GET", f"/{path}/gone")


def matches(template: str, path: str) -> bool:
    return re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), path.partition("?")[0]) is not None
