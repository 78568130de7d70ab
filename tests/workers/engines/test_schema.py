"""The plain form of a JSON schema, and what it refuses."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from workers.engines.schema import MAX_LEVELS, UnusableSchemaError, plain
from workers.json_check import check


def of(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


ONE = of({"a": {"const": 1}})
SEVEN, FOUR = "http://json-schema.org/draft-07/schema#", "http://json-schema.org/draft-04/schema#"
GENERIC = {"x": {"$id": "https://a.example/z", "const": 1, "$defs": {"P<string>": {"const": 2}}}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"$schema": SEVEN, "$ref": "#/definitions/M", "definitions": {"M": ONE}}, {"a": 1}, {"a": 2}),
        ({"$schema": FOUR, "id": "x", "$ref": "x#/definitions/M", "definitions": {"M": ONE}}, {"a": 1}, {"a": 2}),
        ({"$schema": SEVEN, "$ref": "#/definitions/M", "type": "null", "definitions": {"M": ONE}}, {"a": 1}, None),
        ({"$schema": FOUR, "minimum": 1, "exclusiveMinimum": True}, 2, 1),
        ({"$id": "", "items": {"$ref": "#/$defs/A B"}, "$defs": {"A B": {"const": 1}}}, [1], [2]),
        ({"items": {"$ref": "#/$defs/Größe"}, "$defs": {"Größe": {"const": 1}}}, [1], [2]),
        ({"items": {"$ref": "#/$defs/a%20b~1c"}, "$defs": {"a b/c": {"const": 1}}}, [1], [2]),
        ({"items": {"$ref": "#/$defs/a%20b"}, "$defs": {"a%20b": {"const": 1}}}, [1], [2]),
        ({"$id": "https://a.example/y", "$defs": GENERIC, "items": {"$ref": "z"}}, [1], [2]),
        ({"$defs": GENERIC, "items": {"$ref": "https://a.example/z#/$defs/P<string>"}}, [2], [1]),
        ({"items": {"$ref": "#/x/0"}, "x": [{"items": {"$ref": "#/y"}}], "y": {"const": 1}}, [[1]], [[2]]),
        ({"$id": "#root", "items": {"$ref": "#root"}, "type": "array"}, [[[]]], [[1]]),
        ({"items": {"$ref": "#here"}, "$defs": {"N": {"$anchor": "here", "const": 1}}}, [1], [2]),
        ({"$dynamicAnchor": "n", "type": "array", "items": {"$dynamicRef": "#n"}}, [[]], [1]),
        ({"$recursiveAnchor": True, "type": "array", "items": {"$recursiveRef": "#"}}, [[]], [1]),
        ({"items": [{"const": 1}], "additionalItems": {"const": 2}}, [1, 2], [1, 1]),
        ({"dependencies": {"a": ["b"], "c": {"required": ["d"]}}}, {"a": 1, "b": 1}, {"c": 1}),
        ({"$ref": "#/x/0", "$recursiveRef": "#/x/1", "x": [{"minimum": 1}, {"maximum": 2}]}, 2, 3),
        ({"description": None, "title": 5, "const": 1, "$defs": {"T": {"type": "strng"}}}, 1, 2),
        ({"properties": {"$ref": {"const": 1}, "$id": {}, "const": {"$ref": "#"}}}, {"const": {}}, {"$ref": 2}),
        ({"const": {"$ref": "#/none"}}, {"$ref": "#/none"}, {}),
        ({"items": {"$ref": "#/$defs/T"}, "$defs": {"T": True, "F": False}}, [1], None),
        ({"type": "array", "items": {"$ref": "#/$defs/F"}, "$defs": {"F": False}}, [], [1]),
    ],
)  # fmt: skip
def test_a_schema_of_any_draft_means_what_it_did(schema: dict[str, Any], good: Any, bad: Any) -> None:
    """Whatever its references are written like."""
    read = plain(schema)
    assert check(read, [json.dumps(good)]) == {"violation": ""}
    if bad is not None:
        assert check(read, [json.dumps(bad)])["violation"]


@pytest.mark.parametrize(("schema", "named"), [
    (of({"a": {"$ref": "#/properties/a"}}), "`$ref` at #/properties/a leads back to itself"),
    (of({"a": {"$ref": "#/properties/b"}, "b": {"$ref": "#/properties/a"}}), "leads back to itself"),
    (of({"a": {"allOf": [{"$ref": "#/properties/a"}]}}), "the reference to #/properties/a leads back to itself"),
    ({"anyOf": [{"type": "null"}, {"$ref": "#"}]}, "the reference to # leads back to itself"),
    ({"if": {"not": {"$ref": "#"}}}, "leads back to itself"),
    (of({"a": {"$ref": 5}}), "`$ref` at #/properties/a must be a string"),
    (of({"a/b": {"$ref": "#/$defs/none"}}), "`$ref` at #/properties/a~1b leads to no schema in it"),
    (of({"a": {"$ref": "#none"}}), "`$ref` at #/properties/a leads to no schema in it"),
    ({"$ref": "https://a.example/x"}, "`$ref` at # leads to another document"),
    ({"$id": "http://[/x", "$ref": "y"}, "# has a URI that is none"),
    ({"$schema": "https://a.example/x"}, "`$schema` at # names a dialect"),
    ({"allOf": {}}, "#/allOf must be a list of schemas"),
    ({"not": [{}]}, "#/not must be a schema"),
    ({"properties": []}, "#/properties must be an object"),
    ({"properties": {"a": 5}}, "#/properties/a must be a schema"),
])  # fmt: skip
def test_what_cannot_be_used_is_named(schema: dict[str, Any], named: str) -> None:
    with pytest.raises(UnusableSchemaError) as caught:
        plain(schema)
    assert named in str(caught.value)


def chain(length: int, link: Any) -> dict[str, Any]:
    """Definitions of which each refers to the next one."""
    defs = {f"d{at}": link({"$ref": f"#/$defs/d{at + 1}"}) for at in range(length)}
    return of({"a": {"$ref": "#/$defs/d0"}}) | {"$defs": defs | {f"d{length}": {"const": 1}}}


def test_a_chain_of_references_is_one_reference() -> None:
    """Libraries follow them by recursion: native code has no stack for 5,000."""
    began = time.process_time()
    read = plain(chain(5000, lambda each: each))
    assert len(read["$defs"]) == 1 and check(read, ['{"a": 1}', '{"a": 1}']) == {"violation": ""}
    for link in (lambda each: {"allOf": [each]}, lambda each: of({"x": each}), lambda each: {"items": each}):
        with pytest.raises(UnusableSchemaError, match="`\\$ref`"):
            plain(chain(5000, link))
    circle = chain(2000, lambda each: {"items": each})
    circle["$defs"]["d2000"] = {"items": {"$ref": "#/$defs/d0"}}
    with pytest.raises(UnusableSchemaError, match=f"{MAX_LEVELS:,} levels"):
        plain(circle)
    assert time.process_time() - began < 10


def test_the_plain_form_is_bounded() -> None:
    """References to each level of a deep schema write it once for each."""
    deep: dict[str, Any] = {"enum": list(range(9))}
    for _ in range(60):
        deep = {"properties": {f"p{at}": {} for at in range(200)} | {"x": deep}}
    pointers = ["#" + "/properties/x" * depth for depth in range(1, 60)]
    with pytest.raises(UnusableSchemaError, match="200,000 schemas"):
        plain({**deep, "anyOf": [{"items": {"$ref": pointer}} for pointer in pointers]})
