"""Field x boundary: every field of every JSON body, at its bounds, beyond them and of any other type, over HTTP.

What the document's schema refuses is a 400 that names the field; what it takes is never refused for a bound; nothing is
a 5xx. Fields and bounds come from the models' own schemas: a new one is tried without a change here.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jsonschema_rs
import pytest
from house import LONG_LEASE, House, module_house
from matrices import RAW, TYPES, Fields, Place

from api.openapi import document

pytestmark = pytest.mark.slow

KEY = "sk-fields-0123456789"
DOCUMENT = document("0")
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
KNOWN = {"model": "sim", "max_tokens": 1, "endpoint": "/v1/completions", "want": 1}
"""So that what may be accepted is, and costs little."""
MARK = "@raw@"
PARAMETERS = (
    "", ";", "; boundary", "; boundary=", '; boundary=""', "; boundary=cut", '; boundary="cut"', '; boundary="cut',
    *(f"; boundary={'A' * length}" for length in (70, 71, 256, 257)), f'; boundary="{"A" * 257}"',
    "; boundary=a\tb", "; boundary=\x01\x7f", "; boundary=\xe9", '; boundary="\\"', "; boundary=a b", "; boundary=--",
    "; boundary=%0d%0a", "; boundary=a; boundary=b", "; boundary*=utf-8''%ff", "; boundary*0=a; boundary*1=b",
    "; charset=utf-8", "; charset=", "; charset=utf-16", "; charset=no-such", "; charset=\xff", "; charset=idna",
    ";" * 1000, "; a=b" * 500,
)  # fmt: skip
"""What may stand behind a content type."""
A_BOUND = re.compile(r"must be (at least|at most|less than)|may have at most|must not be empty")


class Case(NamedTuple):
    """A field of a body of a route."""

    method: str
    path: str
    fields: Fields
    place: Place
    takes: Callable[[Any], bool]
    """Whether the body's schema takes a body."""
    anything: bool
    """Whether values of every type are tried: no other route has this field of this model."""


INHERITS = {"CountRequest": "ResponseRequest", "MessageCountRequest": "MessagesRequest"}
"""Models whose fields are another one's; those of jobs inherit from the request that they are named after."""


def cases() -> Iterator[Case]:
    """Every field of every JSON body in the document; where a model inherits it, with values at its bounds alone."""
    tried: set[tuple[str, tuple[str, ...], str]] = set()
    for path, operations in DOCUMENT["paths"].items():
        for method, operation in operations.items():
            schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            for ref in (schema, *schema.get("anyOf", ())):
                if name := ref.get("$ref", "").rpartition("/")[2]:
                    base = Fields(name, SCHEMAS, {}).example(SCHEMAS[name])
                    known = SCHEMAS[name]["properties"]
                    base |= {
                        each: value
                        for each, value in KNOWN.items()
                        if each in known and "const" not in str(known[each])
                    }
                    fields = Fields(name, SCHEMAS, base)
                    takes = jsonschema_rs.validator_for(fields.schema).is_valid
                    model = INHERITS.get(name, name.replace("JobRequest", "Request"))
                    for place in fields.places():
                        key = (model, place.path, repr(place.values))
                        yield Case(method.upper(), path, fields, place, takes, key not in tried)
                        tried.add(key)


CASES = list(cases())


OPEN_OBJECTS = """
BatchRequest ChatJobRequest ChatRequest CompletionJobRequest CompletionRequest ConversationRequest ConversationUpdate
CountRequest DetokenizeRequest EditForm EmbeddingJobRequest EmbeddingRequest ItemsRequest ImageJobRequest ImageRequest
ModerationRequest RerankJobRequest TranscriptionForm TranslationForm input[].content[].input_audio
items[].content[].input_audio messages[].content[].file messages[].content[].source messages[].content[].image_url
messages[].content[].input_audio
RerankRequest ResponseRequest TokenizeRequest documents[] input[] input[].content[] input[].output[] items[]
items[].content[] items[].output[] messages[] messages[].content[] messages[].function_call messages[].tool_calls[]
messages[].tool_calls[].function output_expires_after reasoning response_format.json_schema stream_options text
tools[] tools[].function MessageCountRequest MessagesRequest messages[].content[].content[] output_config
output_config.format output_format system[] thinking tool_choice messages[].content[].content[].source
input[].output[].input_audio items[].output[].input_audio
"""
"""Unknown fields are ignored; the size and the weight of a body bound them."""
TEXTS = """
input[].content[].file_data input[].content[].file_url input[].content[].image_url input[].content[].input_audio.data
items[].content[].file_data items[].content[].file_url items[].content[].image_url items[].content[].input_audio.data
messages[].content[].file.file_data messages[].content[].source.data
messages[].content[].source.url messages[].content[].image_url.url messages[].content[].input_audio.data
documents[] documents[].text input input[] input[].arguments input[].content input[].content[].refusal
input[].content[].text input[].output input[].output[].refusal input[].output[].text input[].refusal input[].text
instructions items[].arguments items[].content items[].content[].refusal items[].content[].text items[].output
items[].output[].refusal items[].output[].text items[].refusal messages[].content messages[].content[].refusal
messages[].content[].text messages[].function_call.arguments messages[].tool_calls[].function.arguments prompt
prompt[] query messages[].content[].content messages[].content[].content[].text messages[].content[].signature
messages[].content[].thinking system system[].text tools[].description messages[].content[].content[].source.data
messages[].content[].content[].source.url
input[].output[].file_data input[].output[].file_url input[].output[].image_url input[].output[].input_audio.data
items[].output[].file_data items[].output[].file_url items[].output[].image_url items[].output[].input_audio.data
"""
"""As long as a body, or its media, may be, like the lists of 'input', 'prompt' and 'tokens'; what the model cannot hold
is refused."""
UNBOUNDED = {
    *(f"object {name}" for name in OPEN_OBJECTS.split()),
    *(f"string {name}" for name in TEXTS.split()),
    *(f"array {name}" for name in ("input", "input[]", "tokens", "prompt", "prompt[]")),
    "object Upload",  # parts are counted while they are read (api/files.py)
    "string Upload.file",  # [files] size_limit, while it is read
    *("string file", "string image"),  # [media] max_request_bytes, while they are read
    "array requests",  # [batch] max_lines, and [api] body_limit
    "object requests[].params",  # a body of /v1/messages, read as that before it is run
    "object response_format.json_schema.schema",  # its bytes and its depth are checked (api/openai/fields.py)
    "string response_format.json_schema.name",  # read and dropped
    "string response_format.json_schema.description",  # read and dropped
    "object tools[].function.parameters",  # its bytes and its depth are checked (api/openai/fields.py)
    "object tools[].parameters",  # its bytes and its depth are checked (api/openai/fields.py)
    "object messages[].content[].input",  # the arguments of an earlier call
    *(f"object {name}" for name in ("tools[].input_schema", "output_config.format.schema", "output_format.schema")),
    "object text.format.schema",  # its bytes and its depth are checked (api/openai/fields.py)
    "string queue.on_disconnect",  # its pattern has no room for more
    "string input_file_id",  # looked up; what is no id of ours is a 404 or 400
    "object limits",  # only the names of limits are taken
    "integer limits.*",  # at most 10**15 (streaming/jobs/settings.py)
    "number limits.*",  # the same
    "integer PoolOverride.want",  # compared with the pool's own bounds
}
"""What may be of any size by the schema, and why that is no harm."""
BOUNDS = {
    "string": ("maxLength",),
    "array": ("maxItems",),
    "object": ("maxProperties",),
    "integer": ("maximum", "exclusiveMaximum"),
    "number": ("maximum", "exclusiveMaximum"),
}


def sizes(schema: dict[str, Any], path: str) -> Iterator[tuple[str, bool]]:
    """Each form of each value that a schema takes, as its type and place, and whether its size is bounded."""
    while "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].rpartition("/")[2]]
    if "const" in schema or "enum" in schema:
        return
    for form in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from sizes(form, path)
    kind = schema.get("type", "")
    if kind in BOUNDS:
        closed = kind == "object" and schema.get("additionalProperties") is False
        yield f"{kind} {path}", closed or any(bound in schema for bound in BOUNDS[kind])
    for name, inner in schema.get("properties", {}).items():
        yield from sizes(inner, f"{path}.{name}")
    for key, behind in (("additionalProperties", ".*"), ("items", "[]")):
        if isinstance(inner := schema.get(key), dict):
            yield from sizes(inner, path + behind)


def bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every request body of the document, JSON or not, with its model's name."""
    for operations in DOCUMENT["paths"].values():
        for operation in operations.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                schema = content["schema"]
                for ref in schema.get("anyOf", (schema,)):
                    yield ref["$ref"].rpartition("/")[2], ref


def test_whatever_a_body_may_hold_is_bounded() -> None:
    """Or stands in the list above with a reason. The matrix below is made of the schema's bounds: one that is removed
    would take its own cases with it."""
    found: dict[str, bool] = {}
    for name, schema in bodies():
        for place, bounded in sizes(schema, name):
            inner = place.replace(f"{name}.", "", 1)
            key = place if place in UNBOUNDED else inner
            found[key] = bounded and found.get(key, True)
    assert len(found) > 50
    assert {place for place, bounded in found.items() if not bounded} == UNBOUNDED


class Door:
    """A connection that stays open: thousands of requests come through it."""

    def __init__(self, house: House) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", house.port, timeout=60)

    def ask(self, method: str, path: str, body: bytes, kind: str = "application/json") -> tuple[int, Any]:
        headers = {"Content-Type": kind, "Authorization": f"Bearer {KEY}"}
        self._connection.request(method, path, body, headers)
        response = self._connection.getresponse()
        data = response.read()
        is_json = response.getheader("content-type", "").startswith("application/json")
        return response.status, json.loads(data) if is_json else None

    def close(self) -> None:
        self._connection.close()


house = module_house(
    "workers",
    settings=f'[keys.all]\nsha256 = "{hashlib.sha256(KEY.encode()).hexdigest()}"\ntenant = "t"\nadmin = true\n',
    PENSTOCK_SIM_STEP_MS="0", PENSTOCK_SIM_PREFILL_MS="0", **LONG_LEASE,
)  # fmt: skip
"""An API process and a worker with the simulated engine, behind a key that may do everything."""


@pytest.fixture
def door(house: House) -> Iterator[Door]:
    door = Door(house)
    yield door
    door.close()


def body_of(case: Case) -> str:
    return f"{case.method} {case.path} {case.fields.name}"


def name_of(case: Case) -> str:
    return f"{body_of(case)} {case.place.name}"


@pytest.mark.parametrize("kind", ["multipart/form-data", "application/json", "text/plain", "*/*", ""])
def test_no_content_type_is_a_fault_of_ours(house: House, door: Door, kind: str) -> None:
    """Of any route with a body, with any parameters: 400, 408, 413 or 415 at most, and nothing in the log. Only a form
    is read as its parameters say."""
    contents = (b"--cut--\r\n", b"--" + b"A" * 257 + b"\r\n", b"{}", b"") if kind.startswith("multipart") else (b"{}",)
    bodies = [
        (method.upper(), path.replace("{model}", "sim"))
        for path, operations in DOCUMENT["paths"].items()
        for method, operation in operations.items()
        if "requestBody" in operation
    ]
    assert ("POST", "/v1/files") in bodies and ("POST", "/v1/batches") in bodies
    for method, path in bodies:
        for parameters in PARAMETERS:
            for body in contents:
                status, answer = door.ask(method, path, body, kind + parameters)
                taken = status == 200 and (path, body) == ("/v1/conversations", b"{}")
                assert taken or 400 <= status < 500, f"{method} {path} {kind}{parameters[:80]!r}: {status} {answer!r}"
    assert "Traceback" not in house.log("api")


def test_the_matrix_has_every_model_and_every_bound() -> None:
    """The generator finds what is known to be there: were it to find nothing, nothing would fail."""
    found = {name_of(case): case for case in CASES}
    assert len(found) > 150
    for name, values in {
        "POST /v1/chat/completions ChatRequest n": {0, 1, 8, 9},
        "POST /v1/chat/completions ChatRequest top_logprobs": {-1, 0, 20, 21},
        "POST /v1/completions CompletionRequest logprobs": {-1, 0, 5, 6},
        "POST /v1/completions CompletionRequest seed": {-(2**63) - 1, -(2**63), 2**63 - 1, 2**63},
        "POST /v1/jobs ChatJobRequest queue.deadline_ms": {0, 1, 604_800_000, 604_800_001},
        "POST /v1/batches BatchRequest output_expires_after.seconds": {3599, 3600, 2_592_000, 2_592_001},
    }.items():
        assert values == set(found[name].place.values), name
    assert sorted(map(len, found["POST /v1/jobs CompletionJobRequest stop"].place.values)) == [3, 4, 5, 255, 256, 257]


@pytest.mark.parametrize("body", sorted({body_of(case) for case in CASES}))
def test_a_field_is_bounded_and_named(door: Door, body: str) -> None:
    """A value of the wrong size or type is a 400 with the field's name; none is a fault of ours."""
    for case in CASES:
        if body_of(case) == body:
            is_bounded_and_named(door, case)


def is_bounded_and_named(door: Door, case: Case) -> None:
    path = case.path.replace("{model}", "sim")
    for value in (*case.place.values, *(TYPES if case.anything else ())):
        body = case.place.body(value)
        status, answer = door.ask(case.method, path, json.dumps(body).encode())
        said = f"{name_of(case)}: {value!r:.80}: {status} {answer}"
        error = (answer or {}).get("error") or {}
        if not case.takes(body):
            assert status == 400, said
            assert case.place.root in error["message"] and error["param"] in error["message"], said
        elif status >= 500:
            assert case.place.path == ("queue", "do_not_queue") and error["code"] == "no_capacity", said
        elif status == 400:
            of_all_choices = "api.max_choices_per_request" in error["message"]  # a bound of n and prompts together
            assert of_all_choices or not A_BOUND.search(error["message"]), said
    for raw in RAW if case.anything else ():
        text = json.dumps(case.place.body(MARK)).replace(json.dumps(MARK), raw)
        status, answer = door.ask(case.method, path, text.encode())
        said = f"{name_of(case)}: {raw[:80]}: {status} {answer}"
        assert status < 500, said
        if not raw.startswith(('"', "[")):  # a number that JSON does not have, or nobody can hold
            assert status == 400 or case.place.name.endswith(".schema"), (
                f"{name_of(case)}: {raw[:80]}: {status} {answer}"
            )
