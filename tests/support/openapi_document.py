"""The OpenAPI document of the API, and whether a value conforms to one of its schemas."""

from __future__ import annotations

from typing import Any

from api.openapi import document

DOCUMENT = document("1.2.3")
SCHEMAS = DOCUMENT["components"]["schemas"]


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
    if isinstance(value, dict):
        return has_fields(value, schema)
    return all(conforms(each, schema["items"]) for each in value) if "items" in schema else True


def has_fields(value: dict[str, Any], schema: dict[str, Any]) -> bool:
    """Those of the schema and, where it names any, no others."""
    known = schema.get("properties", {})
    rest = schema.get("additionalProperties", not known)
    return (
        set(schema.get("required", ())) <= value.keys()
        and all(conforms(value[key], known[key]) for key in value.keys() & known.keys())
        and all(rest if isinstance(rest, bool) else conforms(value[key], rest) for key in value.keys() - known.keys())
    )
