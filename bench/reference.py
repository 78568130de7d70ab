"""Tables of docs/api.md, made from the route table, the request schemas and the OpenAPI document; of docs/metrics.md.

The document says what a field may hold and what it does; here is only how a table shows it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from api.auth.access import Access
from api.openai.refused_fields import CHAT_ONLY, COMPLETION_ONLY, CONSTRAINTS, REMEDIES, UNSUPPORTED
from api.openai.responses import request as responses
from api.openapi import document
from api.routes import ROUTES
from telemetry.catalogue import GROUPS, LABELS, MetricSpec

Schema = Mapping[str, Any]

CALLERS = {
    Access.CALLER: "caller",
    Access.ADMIN: "admin",
    Access.METRICS: "metrics",
    Access.ANYONE: "anyone",
}
"""Name of each table of endpoints, by who may call them."""

ANCHORS = {
    "QueueOptions": "queue",
    "ResponseFormat": "response_format",
    "JsonSchema": "json_schema",
    "StreamOptions": "stream_options",
    "ChatMessage": "messages",
    "TextPart": "messages",
    "MessageCall": "messages",
    "CalledFunction": "messages",
    "ChatTool": "tools",
    "Function": "tools",
    "NamedChoice": "tools",
    "AllowedChoice": "tools",
    "FlatTool": "tools-of-a-response",
    "FlatNamed": "tools-of-a-response",
    "FlatAllowed": "tools-of-a-response",
    "FunctionCall": "items-of-input",
    "FunctionCallOutput": "items-of-input",
    "OutputExpiry": "output_expires_after",
    "Job": "the-job-object",
    "ChatCompletion": "a-chat-completion",
    "Batch": "the-batch-object",
    "Message": "items-of-input",
    "ItemReference": "items-of-input",
    "Part": "items-of-input",
    "TextOptions": "text-of-a-response",
    "Format": "text-of-a-response",
    "Reasoning": "fields-of-a-response",
    "ResponseStreamOptions": "fields-of-a-response",
    "Response": "a-response",
    "TextDocument": "fields-of-a-ranking",
    "EmbeddingList": "a-list-of-vectors",
    "Ranking": "a-ranking",
    "TokenIds": "token-ids",
}
"""The headings under which the page describes objects of requests and answers."""

KINDS = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false", "null": "null"}


@cache
def _document() -> dict[str, Any]:
    return document("")


def _schemas() -> dict[str, Any]:
    found: dict[str, Any] = _document()["components"]["schemas"]
    return found


def _table(*rows: tuple[str, ...]) -> str:
    head, *body = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *body))


def _code(value: object) -> str:
    return f"`{value}`"


def endpoints(who: str) -> str:
    """The routes that some kinds of callers may use: names of CALLERS, with `/` between them."""
    rows = []
    for route in ROUTES:
        if CALLERS[route.access] not in who.split("/") or not route.summary:
            continue
        answer = f"[{route.answer}](#{ANCHORS[route.answer]})" if route.answer in ANCHORS else route.answer
        params = ", ".join(_code(_parameter(name)["name"]) for name in route.params)
        rows.append((f"`{route.method} {route.described_path}`", route.summary, params, f"{route.status} {answer}"))
    return _table(("endpoint", "what it does", "parameters", "answer"), *rows)


def _parameter(name: str) -> Schema:
    found: Schema = _document()["components"]["parameters"][name]
    return found


def parameters(where: str) -> str:
    """The parameters in the `query`, or those that are a `header`."""
    known = _document()["components"]["parameters"]
    rows = [
        (
            _code(each["name"]) + (f" of {key.partition('_')[0]}s" if key != each["name"] else ""),
            values(each["schema"]),
            each["description"],
        )
        for key, each in known.items()
        if each["in"] == where
    ]
    return _table((where if where == "header" else "parameter", "values", "meaning"), *rows)


def fields(name: str) -> str:
    """The fields of a request body, or of an object in it, that are honoured. `A/B`: only those that two bodies share;
    `A-B`: only those of A that B does not have, or not in this form."""
    first, apart, second = next((name.partition(sign) for sign in "/-" if sign in name), (name, "", ""))
    schema = _schemas()[first]
    others = _schemas()[second]["properties"] if second else {}
    rows = [
        (_code(field), values(each), _default(each, required=field in schema.get("required", ())), each["description"])
        for field, each in schema["properties"].items()
        if not apart or (others.get(field) == each) is (apart == "/")
    ]
    return _table(("field", "values", "default", "what it does"), *rows)


def _default(schema: Schema, *, required: bool) -> str:
    if required:
        return "required"
    value = schema.get("default")
    if isinstance(value, dict) or value is None:  # an object of defaults
        return "null"
    return _code(str(value).lower() if isinstance(value, bool) else value)


def values(schema: Schema) -> str:
    """In words, what a value may be. A null is left out: every field that is not required may be null."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[object](#{ANCHORS[name]})" if name in ANCHORS else f"{name} object"
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        return ", or ".join(values(each) for each in alternatives if each.get("type") != "null")
    if words := schema.get("enum") or [schema[name] for name in ("const",) if name in schema]:
        return ", ".join(_code(each) for each in words)
    if schema.get("type") == "array":
        most = f" (at most {schema['maxItems']:,})" if "maxItems" in schema else ""
        return f"list{most} of {values(schema['items'])}"
    if schema.get("type") == "object":
        return _object(schema)
    return KINDS[schema["type"]] + _bounds(schema) if "type" in schema else "anything"


def _object(schema: Schema) -> str:
    most = f" (at most {schema['maxProperties']})" if "maxProperties" in schema else ""
    inner = schema.get("additionalProperties")
    return f"object{most} of {values(inner)}" if isinstance(inner, dict) and inner else "object"


def _bounds(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and "exclusiveMaximum" in schema:
        return f" ({_number(low)} to {_number(schema['exclusiveMaximum'])} - 1)"
    if low is not None and high is not None:
        return f" ({_number(low)} to {_number(high)})"
    return f" (at most {schema['maxLength']} characters)" if "maxLength" in schema else ""


def _number(value: float) -> str:
    power = next((power for power in (31, 63) if abs(value) == 2**power), None)
    return f"{value:,}" if power is None else f"{'-' if value < 0 else ''}2^{power}"


def refused(name: str) -> str:
    """The fields that are known and refused: with the values that are accepted all the same, and with what to use."""
    if name == "responses":
        rows = [(_code(name), _values(neutral), fix) for name, (neutral, fix) in responses.UNSUPPORTED.items()]
    else:
        known = {**UNSUPPORTED, **COMPLETION_ONLY}
        rows = [(_code(name), _values(neutral), REMEDIES.get(name, "")) for name, neutral in known.items()]
        alone = "Completions have no tools: use `/v1/chat/completions`."
        rows += [(_code(name), _values(neutral), alone) for name, neutral in CHAT_ONLY.items()]
        rows += [(_code(name), "", fix) for name, fix in CONSTRAINTS.items()]
    return _table(("field", "accepted, beside null", "what to do instead"), *rows)


def _values(neutral: Sequence[Any]) -> str:
    return ", ".join(_code(json.dumps(value)) for value in neutral)


def answer(name: str) -> str:
    """The fields of an answer, those of the objects in it behind a point."""
    return _table(("field", "value", ""), *_rows(_schemas()[name], ""))


def _rows(schema: Schema, path: str) -> Iterator[tuple[str, str, str]]:
    for name, each in schema["properties"].items():
        inner, suffix, null = _unwrapped(each)
        shown = f"{path}{name}{suffix}"
        if "properties" in inner:
            yield _code(shown), "object" + null, inner.get("description", "")
            yield from _rows(inner, f"{shown}.")
        else:
            yield _code(shown), values(each) + null, inner.get("description", "")


def _unwrapped(schema: Schema) -> tuple[Schema, str, str]:
    """What a field holds when it is not null, `[]` if it is a list of that, and whether it may be null."""
    parts = schema.get("anyOf", ())
    null = " or null" if any(each.get("type") == "null" for each in parts) else ""
    inner: Schema = parts[0] if null and len(parts) == 2 else schema
    return (inner["items"], "[]", null) if inner.get("type") == "array" else (inner, "", null)


def headers(_: str) -> str:
    """The headers of answers, with the statuses that may have them."""
    everywhere = {status for operation in _operations() for status in operation["responses"]}
    rows = []
    for name, each in _document()["components"]["headers"].items():
        found = {
            status
            for operation in _operations()
            for status, response in operation["responses"].items()
            if name in _resolved(response).get("headers", {})
        }
        where = "all" if found == everywhere else ", ".join(sorted(found))
        rows.append((_code(name), each["description"], where))
    return _table(("header", "meaning", "statuses"), *rows)


def _operations() -> list[Schema]:
    return [operation for methods in _document()["paths"].values() for operation in methods.values()]


def _resolved(response: Schema) -> Schema:
    if "$ref" not in response:
        return response
    found: Schema = _document()["components"]["responses"][response["$ref"].rpartition("/")[2]]
    return found


def metrics(group: str) -> str:
    """The metrics of a group of the catalogue ("requests" for "Requests"), or all of their labels ("labels")."""
    if group == "labels":
        return _table(("label", "values"), *((_code(name), said) for name, said in LABELS.items()))
    (specs,) = (specs for name, specs in GROUPS.items() if name.lower().replace(",", "").replace(" ", "-") == group)
    rows = []
    for spec in specs:
        labels = ", ".join(map(_code, spec.labels))
        said = _with_values(spec) + (f" **Watch**: {spec.watch}." if spec.watch else "")
        rows.append((_code(spec.name), spec.kind, _code(spec.unit), labels, spec.role, said.replace("|", r"\|")))
    return _table(("metric", "type", "unit", "labels", "from", ""), *rows)


def _with_values(spec: MetricSpec) -> str:
    """What a metric means; with the values of its last label, if its meaning does not name them."""
    if not spec.values or all(value in spec.meaning for value in spec.values):
        return spec.meaning
    return f"{spec.meaning} `{spec.labels[-1]}`: {', '.join(spec.values)}."


WRITERS: Mapping[str, Callable[[str], str]] = {
    "endpoints": endpoints,
    "parameters": parameters,
    "fields": fields,
    "refused": refused,
    "answer": answer,
    "headers": headers,
    "metrics": metrics,
}
"""By the kind of a mark; each takes the name behind it."""
