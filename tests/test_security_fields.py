"""Field x boundary: every field of every JSON body, at its bounds, beyond them and of any other type, over HTTP.

What the document's schema refuses is a 400 that names the field; what it takes is never refused for a bound; nothing is
a 5xx. Fields and bounds come from the models' own schemas: a new one is tried without a change here.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jsonschema_rs
import pytest
from house import House, serving
from matrices import RAW, TYPES, Fields, Place

from api.openapi import document

KEY = "sk-fields-0123456789"
DOCUMENT = document("0")
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
KNOWN = {"model": "sim", "max_tokens": 1, "endpoint": "/v1/completions", "want": 1}
"""So that what may be accepted is, and costs little."""
MARK = "@raw@"
A_BOUND = re.compile(r"must be (at least|at most|less than)|may have at most|must not be empty")


class Case(NamedTuple):
    """A field of a body of a route."""

    method: str
    path: str
    fields: Fields
    place: Place


def cases() -> Iterator[Case]:
    """Every field of every JSON body in the document."""
    for path, operations in DOCUMENT["paths"].items():
        for method, operation in operations.items():
            schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            for ref in (schema, *schema.get("anyOf", ())):
                if name := ref.get("$ref", "").rpartition("/")[2]:
                    base = Fields(name, SCHEMAS, {}).example(SCHEMAS[name])
                    known = SCHEMAS[name]["properties"]
                    base |= {
                        each: value for each, value in KNOWN.items() if each in known and "const" not in known[each]
                    }
                    fields = Fields(name, SCHEMAS, base)
                    yield from (Case(method.upper(), path, fields, place) for place in fields.places())


CASES = list(cases())


class Door:
    """A connection that stays open: thousands of requests come through it."""

    def __init__(self, house: House) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", house.port, timeout=60)

    def ask(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        self._connection.request(method, path, body, headers)
        response = self._connection.getresponse()
        data = response.read()
        kind = response.getheader("content-type", "")
        return response.status, json.loads(data) if kind.startswith("application/json") else None

    def close(self) -> None:
        self._connection.close()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """An API process and a worker with the simulated engine, behind a key that may do everything."""
    folder = tmp_path_factory.mktemp("house")
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    (folder / "penstock.toml").write_text(f'[keys.all]\nsha256 = "{digest}"\ntenant = "t"\nadmin = true\n')
    with serving(folder, "workers", PENSTOCK_SIM_STEP_MS="0", PENSTOCK_SIM_PREFILL_MS="0") as house:
        yield house


@pytest.fixture
def door(house: House) -> Iterator[Door]:
    door = Door(house)
    yield door
    door.close()


def name_of(case: Case) -> str:
    return f"{case.method} {case.path} {case.fields.name} {case.place.name}"


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


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_field_is_bounded_and_named(door: Door, case: Case) -> None:
    """A value of the wrong size or type is a 400 with the field's name; none is a fault of ours."""
    takes = jsonschema_rs.validator_for(case.fields.schema).is_valid
    path = case.path.replace("{model}", "sim")
    for value in (*case.place.values, *TYPES):
        body = case.place.body(value)
        status, answer = door.ask(case.method, path, json.dumps(body).encode())
        said = f"{value!r:.80}: {status} {answer}"
        error = (answer or {}).get("error") or {}
        if not takes(body):
            assert status == 400, said
            assert case.place.root in error["message"] and error["param"] in error["message"], said
        elif status >= 500:
            assert case.place.path == ("queue", "do_not_queue") and error["code"] == "no_capacity", said
        elif status == 400:
            of_all_choices = "api.max_choices_per_request" in error["message"]  # a bound of n and prompts together
            assert of_all_choices or not A_BOUND.search(error["message"]), said
    for raw in RAW:
        text = json.dumps(case.place.body(MARK)).replace(json.dumps(MARK), raw)
        status, answer = door.ask(case.method, path, text.encode())
        assert status < 500, f"{raw[:80]}: {status} {answer}"
        if not raw.startswith(('"', "[")):  # a number that JSON does not have, or nobody can hold
            assert status == 400 or case.place.name.endswith(".schema"), f"{raw[:80]}: {status} {answer}"
