"""JSON output constraint: selects the texts of a JSON job that must follow its schema, and names its failures. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import pydantic_core

from penstock.engine import Failure
from penstock.tools import read_answer

FILTERED = "content_filter"
"""Finish reason of an answer that a filter, or the model itself, has ended: no check is made of it."""
_TRUNCATED = "EOF while parsing"
_UNDECIDED = ("recursion limit", "number out of range", "hex escape", "surrogate")
"""Parser errors about limits or Unicode. They do not show whether the text follows the JSON grammar."""


def begins_json(text: str) -> bool:
    """Whether the text is JSON or a prefix of JSON."""
    error = _error(text)
    return not error or error.startswith(_TRUNCATED) or any(word in error for word in _UNDECIDED)


def is_whole(text: str) -> bool:
    """Whether a text that may have been cut is a complete object or array (a cut number looks complete)."""
    return text.rstrip().endswith(("}", "]")) and not _error(text)


def _error(text: str) -> str:
    """Why the text is not JSON; "" if it is."""
    try:
        pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError as error:
        return str(error)
    return ""


def complete_texts(
    texts: Sequence[str], finishes: Sequence[str], *, stops: bool, parted: bool = False
) -> list[str] | Failure:
    """The texts to validate against the schema; a failure if a cut text is not even a prefix of JSON.

    Args:
        finishes: the finish reason of each text; "length" means that the text was cut, and FILTERED that it is what the
            model or a filter says instead of an answer.
        stops: the request has stop strings, which may cut a text too.
        parted: the texts may have reasoning, or calls; those with calls need no other text.
    """
    answers = [read_answer((text,)) for text in texts] if parted else []
    said = [(each.text, finish) for each, finish in zip(answers, finishes, strict=False) if not each.calls]
    complete = []
    for text, finish in said if parted else zip(texts, finishes, strict=True):
        if finish == FILTERED:
            continue
        if (finish == "stop" and not stops) or is_whole(text):
            complete.append(text)
        elif not begins_json(text):
            return violated("the text is not JSON")
    return complete


def violated(problem: str) -> Failure:
    """The failure of a job whose answer does not follow its schema."""
    message = (
        f"response_format: the engine did not hold its output to the JSON that it asks for: {problem}. Simplify the "
        "schema, or send the request again."
    )
    return Failure("constraint_violated", message, 500, "response_format")


def unusable(problem: str) -> Failure:
    """The failure of a job whose schema cannot be used for validation."""
    message = f"response_format: this JSON schema cannot be used: {problem}. Correct or simplify it."
    return Failure("invalid_request_error", message, 400, "response_format")


def unchecked() -> Failure:
    """The failure of a job whose answer could not be validated within the limits."""
    message = (
        "response_format: the output could not be checked against its schema: the check took too much time or memory. "
        "Simplify the schema."
    )
    return Failure("constraint_unchecked", message, 500, "response_format")
