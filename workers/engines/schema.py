"""Plain form of a JSON schema: one document of draft 2020-12, whose references lead to its own `$defs`. Pure.

Engines and the checker read this form alone, so that they agree on what a schema of any draft means, and none of them
meets an `$id`, an anchor, a chain of references or one that leads back to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple
from urllib.parse import unquote, urljoin

MAX_SUBSCHEMAS = 200_000
"""In the plain form. A place that references lead to is written once more than it stands in the schema."""

MAX_CHAIN = 100
"""References that are followed one after the other for one value: libraries do it by recursion."""

MAX_LEVELS = 1000
"""Levels of schemas in each other, through references: llama.cpp reads them by recursion."""

DRAFTS = {
    "schema": 2020,
    "draft-04/schema": 4,
    "draft-06/schema": 6,
    "draft-07/schema": 7,
    "draft/2019-09/schema": 2019,
    "draft/2020-12/schema": 2020,
}

_ONE = ("not", "if", "then", "else")
_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems")
_BELOW = ("contains", "propertyNames", "additionalProperties", "unevaluatedItems", "unevaluatedProperties")
_ITEMS = ("items", "additionalItems")
_NESTED = frozenset((*_ONE, *_SEVERAL, *_BELOW, *_ITEMS))
_NAMED = frozenset(("properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions"))
_ASSERTIONS = frozenset(
    "type enum const multipleOf maximum exclusiveMaximum minimum exclusiveMinimum maxLength minLength pattern maxItems "  # noqa: SIM905
    "minItems uniqueItems maxContains minContains maxProperties minProperties required dependentRequired format".split()
)
_REFERENCES = ("$ref", "$recursiveRef", "$dynamicRef")
_KNOWN = _ASSERTIONS | _NESTED | (_NAMED - {"$defs", "definitions"}) | {*_REFERENCES}


class UnusableSchemaError(ValueError):
    """What is wrong with a schema, as a clause that names the keyword and its place."""


class _Place(NamedTuple):
    schema: Any
    at: str
    """Its JSON pointer in the whole schema, such as `#/properties/a`."""
    base: str
    """The `$id` of the document that it is in."""
    draft: int


def plain(schema: Mapping[str, Any], before: int = 0) -> dict[str, Any]:
    """The plain form of a schema. Each of its definitions has the place that it stood at as its `$comment`.

    Args:
        before: the number of its first definition.

    Raises UnusableSchemaError.
    """
    return _Plain(schema, before).whole()


def mapped(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A plain schema with each schema in it changed, the innermost first."""
    if not isinstance(schema, Mapping):
        return schema
    new = dict(schema)
    for name, value in schema.items():
        if name in _NESTED and isinstance(value, list):
            new[name] = [mapped(each, change) for each in value]
        elif name in _NESTED:
            new[name] = mapped(value, change)
        elif name in _NAMED and isinstance(value, Mapping):
            new[name] = {key: mapped(each, change) for key, each in value.items()}
    return change(new)


class _Plain:
    """The work on one schema."""

    def __init__(self, schema: Mapping[str, Any], before: int) -> None:
        self._left, self._before = MAX_SUBSCHEMAS, before
        self._places: dict[int, _Place] = {}
        """All places of schemas, by the identity of the object."""
        self._documents: dict[str, _Place] = {}
        self._anchors: dict[tuple[str, str], _Place] = {}
        self._targets: dict[int, _Place] = {}
        """Where a schema that is nothing but a reference leads, by its identity."""
        self._numbers: dict[str, int] = {}
        """The definitions, by the place that each is written from."""
        self._waiting: list[_Place] = []
        self._root = _Place(schema, "#", "", 2020)
        self._documents[""] = self._root
        self._index(self._root)

    def whole(self) -> dict[str, Any]:
        whole: dict[str, Any] = self._written(self._place(self._root))
        defs: dict[str, dict[str, Any]] = {}
        while self._waiting:
            place = self._waiting.pop()
            written = self._written(place)
            written = written if isinstance(written, dict) else {} if written else {"enum": []}
            defs[str(self._numbers[place.at])] = {"$comment": place.at} | written
        _check_chains(whole, defs)
        return whole | ({"$defs": defs} if defs else {})

    # --- what stands where ---------------------------------------------------------------------------------------

    def _index(self, place: _Place) -> None:
        schema, at, base, draft = place
        if not isinstance(schema, Mapping):
            return
        draft = _draft(schema, at, draft)
        own = schema.get("id" if draft == 4 else "$id")
        uri, _, fragment = own.partition("#") if isinstance(own, str) else ("", "", "")
        base = _joined(base, uri, at) if uri else base
        place = _Place(schema, at, base, draft)
        self._places[id(schema)] = place
        if uri:
            self._documents.setdefault(base, place)
        if at == "#":
            self._documents[""] = place
        for anchor in (fragment, schema.get("$anchor"), schema.get("$dynamicAnchor")):
            if isinstance(anchor, str) and anchor:
                self._anchors.setdefault((base, anchor), place)
        for step, inner in _inner(schema):
            self._index(_Place(inner, at + step, base, draft))

    def _place(self, place: _Place) -> _Place:
        """The place with its own document and draft."""
        return self._places.get(id(place.schema), place)

    def _found(self, reference: Any, keyword: str, source: _Place) -> _Place:
        """The schema that a reference leads to."""
        where = f"`{keyword}` at {source.at}"
        if not isinstance(reference, str):
            raise UnusableSchemaError(f"{where} must be a string")
        uri, _, fragment = reference.partition("#")
        base = _joined(source.base, uri, source.at) if uri else source.base
        document = self._documents.get(base)
        if document is None:
            raise UnusableSchemaError(f"{where} leads to another document, which is not fetched")
        if keyword == "$dynamicRef":  # the outermost document with this anchor counts
            anchored = self._anchors.get((self._documents[""].base, fragment)) or self._anchors.get((base, fragment))
        else:
            anchored = self._anchors.get((base, fragment)) or self._anchors.get((base, unquote(fragment)))
        if anchored is not None:
            return anchored
        found = _at_pointer(document, fragment) if not fragment or fragment.startswith("/") else None
        if found is None or not isinstance(found.schema, Mapping | bool):
            raise UnusableSchemaError(f"{where} leads to no schema in it")
        if isinstance(found.schema, Mapping) and id(found.schema) not in self._places:
            self._index(found)  # it stands where no keyword has schemas
        return self._place(found)

    def _target(self, reference: Any, keyword: str, source: _Place) -> _Place:
        """The schema at the end of a chain of references."""
        place, passed = self._found(reference, keyword, source), dict[int, None]()
        while (alone := _reference_alone(place)) is not None:
            if id(place.schema) in self._targets:
                place = self._targets[id(place.schema)]
                break
            if id(place.schema) in passed:
                raise UnusableSchemaError(f"`{keyword}` at {source.at} leads back to itself")
            passed[id(place.schema)] = None
            place = self._found(place.schema[alone], alone, place)
        self._targets |= dict.fromkeys(passed, place)
        return place

    # --- what is written -----------------------------------------------------------------------------------------

    def _written(self, place: _Place) -> Any:
        schema, at, _, draft = place
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise UnusableSchemaError(f"{at} must be a schema: an object, true or false")
        self._left -= 1
        if self._left < 0:
            raise UnusableSchemaError(f"it has more than {MAX_SUBSCHEMAS:,} schemas once its references are followed")
        references = [self._link(schema[name], name, place) for name in _REFERENCES if name in schema]
        if draft <= 7 and "$ref" in schema:  # what stands beside it does not count
            return references[0]
        new = {name: value for name, value in schema.items() if name in _ASSERTIONS}
        if isinstance(schema.get("examples"), list):
            new["examples"] = schema["examples"]
        for name, value in schema.items():
            if name in _NESTED:
                new[name] = self._nested(name, value, place)
            elif name in _NAMED and name not in ("$defs", "definitions", "dependencies"):
                new[name] = self._named(value, f"{at}/{name}", place)
        self._add_old_words(new, schema, place)
        if references:
            new |= references[0]
        if len(references) > 1:
            new["allOf"] = [*new.get("allOf", ()), *references[1:]]
        return new

    def _nested(self, name: str, value: Any, place: _Place) -> Any:
        at = f"{place.at}/{name}"
        if isinstance(value, list) != (name in _SEVERAL or (name == "items" and isinstance(value, list))):
            raise UnusableSchemaError(f"{at} must be {'a list of schemas' if name in _SEVERAL else 'a schema'}")
        if isinstance(value, list):
            return [self._inline(each, f"{at}/{number}", place) for number, each in enumerate(value)]
        return self._inline(value, at, place)

    def _named(self, value: Any, at: str, place: _Place) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise UnusableSchemaError(f"{at} must be an object")
        return {name: self._inline(each, f"{at}/{_escaped(name)}", place) for name, each in value.items()}

    def _inline(self, schema: Any, at: str, place: _Place) -> Any:
        return self._written(self._place(place._replace(schema=schema, at=at)))

    def _link(self, reference: Any, keyword: str, source: _Place) -> dict[str, str]:
        target = self._target(reference, keyword, source)
        if target.at not in self._numbers:
            self._numbers[target.at] = self._before + len(self._numbers)
            self._waiting.append(target)
        return {"$ref": f"#/$defs/{self._numbers[target.at]}"}

    def _add_old_words(self, new: dict[str, Any], schema: Mapping[str, Any], place: _Place) -> None:
        """Put what older drafts say in the words of 2020-12."""
        rest = new.pop("additionalItems", None)
        if isinstance(new.get("items"), list):
            new["prefixItems"] = new.pop("items")
            new |= {} if rest is None else {"items": rest}
        for exclusive, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(new.get(exclusive), bool) and new.pop(exclusive) and limit in new:
                new[exclusive] = new.pop(limit)
        if isinstance(old := schema.get("dependencies"), Mapping):
            lists = {name: each for name, each in old.items() if isinstance(each, list)}
            others = {name: each for name, each in old.items() if not isinstance(each, list)}
            schemas = self._named(others, f"{place.at}/dependencies", place)
            for name, found in (("dependentRequired", lists), ("dependentSchemas", schemas)):
                new |= {name: {**new.get(name, {}), **found}} if found else {}


def _draft(schema: Mapping[str, Any], at: str, outer: int) -> int:
    named = schema.get("$schema")
    if not isinstance(named, str):
        return outer
    draft = DRAFTS.get(named.partition("://json-schema.org/")[2].removesuffix("#"))
    if draft is None:
        raise UnusableSchemaError(f"`$schema` at {at} names a dialect that is not known here: draft 4 to 2020-12 are")
    return draft


def _joined(base: str, uri: str, at: str) -> str:
    try:
        return urljoin(base, uri)
    except ValueError:
        raise UnusableSchemaError(f"{at} has a URI that is none") from None


def _inner(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas in a schema, by the pointer from it."""
    for name, value in schema.items():
        if name in _NESTED and isinstance(value, list):
            yield from ((f"/{name}/{number}", each) for number, each in enumerate(value))
        elif name in _NESTED:
            yield f"/{name}", value
        elif name in _NAMED and isinstance(value, Mapping):
            yield from ((f"/{name}/{_escaped(key)}", each) for key, each in value.items())


def _reference_alone(place: _Place) -> str | None:
    """The keyword of a schema that is nothing but one reference."""
    schema = place.schema
    if not isinstance(schema, Mapping):
        return None
    if place.draft <= 7 and "$ref" in schema:
        return "$ref"
    known = [name for name in schema if name in _KNOWN]
    return known[0] if len(known) == 1 and known[0] in _REFERENCES else None


def _at_pointer(document: _Place, pointer: str) -> _Place | None:
    found, at = document.schema, document.at
    for word in pointer.split("/")[1:]:
        plain_word = word.replace("~1", "/").replace("~0", "~")
        step = unquote(word).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            step = step if step in found else plain_word
            if step not in found:
                return None
            found = found[step]
        elif isinstance(found, list) and step.isdecimal() and len(step) < 9 and int(step) < len(found):
            found = found[int(step)]
        else:
            return None
        at += f"/{_escaped(step)}"
    return document._replace(schema=found, at=at)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _check_chains(root: Any, defs: Mapping[str, Any]) -> None:
    """Refuse references that lead back to themselves without a step into the value, and too many in a row."""
    schemas = {"#": root, **defs}
    longest, circles = _longest({name: dict.fromkeys(_same_value(each), 1) for name, each in schemas.items()})
    if circles:
        at = defs[next(name for name in circles if name != "#")]["$comment"]
        raise UnusableSchemaError(f"the reference to {at} leads back to itself")
    if longest > MAX_CHAIN:
        raise UnusableSchemaError(f"more than {MAX_CHAIN} `$ref` follow one after the other")
    edges = {name: dict(_reached(each)) for name, each in schemas.items()}
    longest, circles = _longest(edges)
    if longest + sum(max(edges[name].values()) for name in circles) > MAX_LEVELS:
        raise UnusableSchemaError(f"its `$ref` lead through more than {MAX_LEVELS:,} levels of schemas")


def _longest(edges: Mapping[str, Mapping[str, int]]) -> tuple[int, list[str]]:
    """The longest way through a graph, and the nodes that lead into a circle, which are left out of it."""
    sorter, lengths = TopologicalSorter(edges), dict[str, int]()
    with suppress(CycleError):  # what does not lead into a circle is sorted all the same
        sorter.prepare()
    while ready := sorter.get_ready():
        for name in ready:
            lengths[name] = max((length + lengths[each] for each, length in edges[name].items()), default=0)
        sorter.done(*ready)
    return max(lengths.values(), default=0), [name for name in edges if name not in lengths]


def _reached(schema: Any, levels: int = 1) -> Iterator[tuple[str, int]]:
    """The definitions that a schema refers to, with the levels above each reference."""
    if isinstance(schema, Mapping):
        if "$ref" in schema:
            yield schema["$ref"].rpartition("/")[2], levels
        for _, inner in _inner(schema):
            yield from _reached(inner, levels + 1)


def _same_value(schema: Any) -> Iterator[str]:
    """The definitions that a schema holds its own value against."""
    if not isinstance(schema, Mapping):
        return
    if "$ref" in schema:
        yield schema["$ref"].rpartition("/")[2]
    for name in _ONE:
        yield from _same_value(schema.get(name))
    for name in ("allOf", "anyOf", "oneOf"):
        for each in schema.get(name, ()):
            yield from _same_value(each)
    for each in schema.get("dependentSchemas", {}).values():
        yield from _same_value(each)
