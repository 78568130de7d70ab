"""The OpenAPI document holds together and describes what is really rendered and really refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from api import admin, batches, files, jobs
from api.app import ROUTES
from api.cursor import Cursor
from api.openapi import CURSOR, ERRORS, HEADERS, document
from api.render import Facts, JobView, completion, job_object
from streaming.messages import Delta, Failure, Priority, State, Terminal

DOCUMENT = document("1.2.3")
SCHEMAS = DOCUMENT["components"]["schemas"]


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def lookup(reference: str) -> Any:
    node: Any = DOCUMENT
    for step in reference.removeprefix("#/").split("/"):
        node = node[step]
    return node


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """The part of JSON Schema that our answers use."""
    if "$ref" in schema:
        return conforms(value, lookup(schema["$ref"]))
    if "anyOf" in schema:
        return any(conforms(value, each) for each in schema["anyOf"])
    kinds: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": int | float,
        "boolean": bool,
        "null": type(None),
    }
    if not isinstance(value, kinds[schema["type"]]) or value not in schema.get("enum", [value]):
        return False
    if "properties" in schema:
        known = schema["properties"]
        return value.keys() == known.keys() and all(conforms(value[key], known[key]) for key in known)
    return all(conforms(each, schema["items"]) for each in value) if "items" in schema else True


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


def test_every_route_is_there_once() -> None:
    """What the application serves is what is described, and operation ids are unique names."""
    served = {
        (method.lower(), route.path.replace(":path}", "}"))
        for route in ROUTES
        for method in (route.methods or set()) - {"HEAD"}
        if route.path != "/"  # a signpost for people
    }
    assert {(method, path) for method, path, _ in operations()} == served
    names = [operation["operationId"] for _, _, operation in operations()]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)


def test_path_parameters_are_declared() -> None:
    """Each {name} of a path has its parameter."""
    for _, path, operation in operations():
        wanted = {part[1:-1] for part in path.split("/") if part.startswith("{")}
        params = [lookup(each["$ref"]) for each in operation.get("parameters", [])]
        assert wanted == {each["name"] for each in params if each["in"] == "path"}


def test_only_the_operators_routes_need_no_key() -> None:
    """Everything under /v1 and /admin is behind the key, and says 401."""
    for _, path, operation in operations():
        if path.startswith(("/v1/", "/admin/")):
            assert "security" not in operation
            assert "401" in operation["responses"]
        elif path == "/metrics":  # as [api] metrics says
            assert operation["security"] == [{}, {"key": []}] and "401" in operation["responses"]
        else:
            assert operation["security"] == []
        assert {"403", "421"} <= operation["responses"].keys()
    assert DOCUMENT["security"] == [{"key": []}]


def test_errors_and_headers_are_described() -> None:
    """Each error answer has the error body; retry headers stand where we send them."""
    for status in ERRORS:
        answer = DOCUMENT["components"]["responses"][f"Error{status}"]
        assert answer["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Error"}
    assert {"Retry-After", "retry-after-ms"} <= DOCUMENT["components"]["responses"]["Error429"]["headers"].keys()
    assert DOCUMENT["components"]["headers"].keys() == HEADERS.keys()


def test_the_request_schemas_are_the_models_own() -> None:
    """Limits in the document come from the models, so they cannot drift apart."""
    assert SCHEMAS["ChatRequest"]["properties"]["messages"]["maxItems"] == 1024
    assert SCHEMAS["ChatRequest"]["required"] == ["model", "messages"]
    assert SCHEMAS["QueueOptions"]["additionalProperties"] is False
    assert SCHEMAS["CompletionJobRequest"]["properties"]["endpoint"]["const"] == "/v1/completions"


@pytest.mark.parametrize("chat", [True, False])
def test_what_is_rendered_is_what_is_described(chat: bool) -> None:
    """Answers and job objects in every state match their schemas, key by key."""
    facts = Facts("j1", "m", Priority.BATCH, chat, 1, False, 1_700_000_000_123, "fp_1")
    done = Terminal("j1", State.COMPLETED, 1, ("stop",), rows=(Delta(1, 1, 0, "hi", (1,), 1, "stop"),))
    failed = Terminal("j1", State.FAILED, 0, failure=Failure("poison", "Gave up.", 500))
    assert conforms(completion(facts, done, done.rows), SCHEMAS["ChatCompletion" if chat else "Completion"])
    for view in (
        JobView(facts, State.QUEUED, position=3, eta_ms=1200),
        JobView(
            facts,
            State.COMPLETED,
            1,
            2,
            3,
            4,
            attempts=1,
            latest=Cursor(1, 4, "w-1"),
            terminal=done,
            metadata={"a": "b"},
        ),
        JobView(facts, State.FAILED, 1, terminal=failed),
    ):
        assert conforms(job_object(view), SCHEMAS["Job"])
    assert not conforms(job_object(JobView(facts, State.QUEUED)) | {"extra": 1}, SCHEMAS["Job"])


def test_the_bounds_of_parameters_are_those_that_are_checked() -> None:
    """They are written twice: here for readers, there for the check."""
    bounds = {name: lookup(f"#/components/parameters/{name}")["schema"] for name in ("limit", "file_limit", "wait")}
    assert bounds["limit"]["maximum"] == jobs.MAX_PER_PAGE == batches.MAX_PER_PAGE == admin.MAX_PER_PAGE
    assert (bounds["file_limit"]["maximum"], bounds["wait"]["maximum"]) == (files.MAX_PER_PAGE, jobs.MAX_WAIT_S)
    assert CURSOR.strip("^$") == jobs.CURSOR.pattern.replace("(", "").replace(")", "")
