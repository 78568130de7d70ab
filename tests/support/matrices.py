"""What the security matrices are made of: operations from the route table, values from the schemas of the models.

Pure: nothing is sent from here. A new route, role, field or bound is in the matrices as soon as it is in its table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from api.routes import ROUTES

Schema = dict[str, Any]


class Operation(NamedTuple):
    """A method on a path of the route table."""

    method: str
    path: str

    @property
    def params(self) -> list[str]:
        """The names in its path."""
        return re.findall(r"{(\w+)(?::path)?}", self.path)

    def at(self, **values: str) -> str:
        """Its path with these values."""
        return re.sub(r"{(\w+)(?::path)?}", lambda match: values[match[1]], self.path)

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"


OPERATIONS = sorted(
    {Operation(each, route.path) for route in ROUTES for each in (route.method, route.method.replace("GET", "HEAD"))}
)
"""All of them, HEAD as well."""

# --- values for one field of a body ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """One field, however deep, and how a body around a value for it is made."""

    path: tuple[str, ...]
    values: list[Any]
    """At each bound and just beyond it."""
    body: Callable[[Any], Any]

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def root(self) -> str:
        return self.path[0]


class Fields:
    """All fields of a model's schema, and values for them."""

    def __init__(self, name: str, schemas: dict[str, Schema], base: dict[str, Any]) -> None:
        self.schema: Schema = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}}
        self._schemas, self._base, self.name = schemas, base, name

    def places(self) -> list[Place]:
        """Every field, from the top to the leaves; a field of several forms is there once, with the bounds of all."""
        found: dict[tuple[str, ...], Place] = {}
        for place in self._places(self._schemas[self.name], (), lambda value: self._base | value):
            there = found.setdefault(place.path, place)
            if place is not there:
                there.values.extend(value for value in place.values if value not in there.values)
        return list(found.values())

    def _places(self, schema: Schema, path: tuple[str, ...], around: Callable[[Any], Any]) -> Iterator[Place]:
        schema = self._resolved(schema)
        if path:
            yield Place(path, list(bounds(schema, self.example)), around)
        for variant in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
            yield from self._places(variant, path, around)
        for name, inner in schema.get("properties", {}).items():
            yield from self._places(inner, (*path, name), self._within(schema, name, around, top=not path))
        if isinstance(inner := schema.get("additionalProperties"), dict):
            yield from self._places(inner, (*path, "*"), lambda value: around({"k": value}))
        if isinstance(inner := schema.get("items"), dict) and inner:
            yield from self._places(inner, (*path, "[]"), lambda value: around([value]))

    def _within(self, schema: Schema, name: str, around: Callable[[Any], Any], *, top: bool) -> Callable[[Any], Any]:
        siblings = {} if top else self.example(schema) | EXAMPLES.get(schema.get("title", ""), {})
        alternatives = {each for variant in schema.get("oneOf", ()) for each in variant.get("required", ())}
        if name in alternatives:
            return lambda value: {name: value}
        return lambda value: around(siblings | {name: value})

    def _resolved(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]] | {
                key: value for key, value in schema.items() if key != "$ref"
            }
        return schema

    def example(self, schema: Schema) -> Any:
        """The least that a schema takes."""
        if (known := schema.get("$ref", "").rpartition("/")[2]) in EXAMPLES:
            return EXAMPLES[known]
        schema = self._resolved(schema)
        chosen = [*schema.get("anyOf", ()), *schema.get("oneOf", ())][:1]
        if "properties" in schema:
            needed = [*schema.get("required", ()), *(chosen[0].get("required", ()) if chosen else ())]
            return {name: self.example(schema["properties"][name]) for name in needed}
        return self.example(chosen[0]) if chosen else self._plain(schema)

    def _plain(self, schema: Schema) -> Any:
        values = {
            "string": "x" * max(1, schema.get("minLength", 0)),
            "integer": schema.get("minimum", 1),
            "number": schema.get("minimum", 1),
            "boolean": False,
            "object": {},
        }
        if schema.get("type") == "array":
            return [self.example(schema.get("items", {}))] * max(1, schema.get("minItems", 0))
        return schema.get("const", schema.get("enum", [values.get(schema.get("type", ""))])[0])


TYPES: tuple[Any, ...] = (
    None, True, 0, -1, 2**63, -(10**30), 0.5, 1e308, "", "x", "\u0000", "0", "\U0001f600" * 2000, "\u202eevil\u2028",
    [], [[]], [None], [0], ["x"], [{}], {}, {"": {}}, {"x" * 70: 1},
)  # fmt: skip
"""Tried in every field, whatever its type."""

RAW = ("NaN", "-Infinity", "1e999", "1" + "0" * 5000, '"\\ud800"', "[" * 40 + "]" * 40)
"""What no encoder writes: put into the body as it is."""


EXAMPLES: dict[str, dict[str, Any]] = {"ChatMessage": {"role": "user", "content": "x"}}
"""Where the least that the schema takes is refused: by its name."""


def bounds(schema: Schema, example: Callable[[Schema], Any]) -> Iterator[Any]:
    """Values at each bound of a field and just beyond it."""
    step = 1 if schema.get("type") == "integer" else 0.001
    for key, beyond in (("minimum", -step), ("maximum", step), ("exclusiveMinimum", step), ("exclusiveMaximum", -step)):
        if key in schema:
            yield from (schema[key], schema[key] + beyond)
    item = example(schema.get("items", {}))
    lengths: tuple[tuple[str, Callable[[int], Any]], ...] = (
        ("Length", lambda length: "é" * length),
        ("Items", lambda length: [item] * length),
        ("Properties", lambda length: {f"k{number}": "v" for number in range(length)}),
    )
    for kind, made in lengths:
        for length in (schema.get(f"min{kind}"), schema.get(f"max{kind}")):
            if length is not None:
                yield from (made(each) for each in (length - 1, length, length + 1) if each >= 0)
    if "maxLength" in (names := schema.get("propertyNames", {})):
        yield from ({"é" * length: "v"} for length in (names["maxLength"], names["maxLength"] + 1))
