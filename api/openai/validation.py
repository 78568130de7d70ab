"""Validation messages: turns a pydantic error into one sentence that names the field and what was expected.

It never quotes the value, which may be a prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from api.openai.errors import ApiError, invalid_request
from api.openai.fields import QueueOptions
from penstock.config import nearest

_WORDS = {
    "missing": "is required",
    "string_type": "must be a string",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "literal_error": "must be {expected}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "too_short": "must not be empty",
    "too_long": "may have at most {max_length} entries",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "string_too_long": "may have at most {max_length} characters",
    "string_unicode": "must be text without lone surrogates",
    "model_attributes_type": "must be an object",
    "none_required": "must be null",
    "greater_than": "must be greater than {gt}",
    "finite_number": "must be a finite number",
    "union_tag_invalid": "has a form that is not known here",
    "union_tag_not_found": "has a form that is not known here",
}
_OURS = ("refused", "shape")
"""Kinds of errors whose text is ours. Any other kind without words above is said to be a value of the wrong kind."""


_INTEGER_EXPECTED = ("int_type", "shape")

Body = TypeVar("Body", bound=BaseModel)


def validated(model: type[Body], fields: dict[str, Any]) -> Body:
    """Validate a body. JSON has one type of number, so whole floats (8.0) pass for integers. Raises ApiError (400)."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        if not any(each["type"] in _INTEGER_EXPECTED for each in error.errors(include_input=False, include_url=False)):
            raise explained(error) from None
    try:
        return model.model_validate(with_integers(fields))
    except ValidationError as error:
        raise explained(error) from None


def with_integers(value: Any) -> Any:
    """Return the value with its whole floats as integers."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: with_integers(each) for name, each in value.items()}
    return [with_integers(each) for each in value] if isinstance(value, list) else value


def explained(error: ValidationError) -> ApiError:
    """Return the first error as a 400 with the path of the field."""
    first = error.errors(include_input=False, include_url=False)[0]
    *above, last = loc = first["loc"]
    pattern = _WORDS.get(first["type"], "has a value of the wrong kind")
    words = first["msg"] if first["type"] in _OURS else pattern.format_map(first.get("ctx", {}))
    if first["type"] == "extra_forbidden" and above == ["response_format"]:
        words = "is not supported here: use type 'json_schema' with the schema in json_schema.schema"
    elif first["type"] == "extra_forbidden":
        hint = f" ({nearest(str(last)[:64], QueueOptions.model_fields)})" if above == ["queue"] else ""
        words = f"is no known field{hint}"
    elif last == "[key]" and len(above) > 1:  # pydantic's marker for an object's key, here of metadata
        param = _path(above[:-1])
        return invalid_request(f"{param}: a key {words}.", param)
    param = _path(loc)
    return invalid_request(f"{param} {words}.", param)


def _path(loc: Iterable[int | str]) -> str:
    """Render a path such as messages[0].content, without the internal tags of unions."""
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("<"):
            name = step.removesuffix("_")  # of a field whose name would hide one of the library's
            path += f".{name}" if path else name
    return path[:128]
