"""What an answer must be whose job asked for JSON: which texts are checked, and how the job fails. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import pydantic_core

from streaming.jobs.terminal import Failure

_TRUNCATED = "EOF while parsing"
_UNDECIDED = ("recursion limit", "number out of range", "hex escape", "surrogate")
"""Errors of the parser about JSON that is beyond its limits, or beyond Unicode: they say nothing of the grammar."""


def begins_json(text: str) -> bool:
    """Whether more text could make it JSON, or it is JSON."""
    error = _error(text)
    return not error or error.startswith(_TRUNCATED) or any(word in error for word in _UNDECIDED)


def is_whole(text: str) -> bool:
    """Whether a text that may have been cut is a complete object or array. Of a number nobody knows."""
    return text.rstrip().endswith(("}", "]")) and not _error(text)


def _error(text: str) -> str:
    """Why it is not JSON, or ""."""
    try:
        pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError as error:
        return str(error)
    return ""


def complete_texts(texts: Sequence[str], finishes: Sequence[str], *, stops: bool) -> list[str] | Failure:
    """The texts to validate against the schema, or the failure if one was cut but never was JSON.

    A length limit cuts a text, and so may a stop string of the requester (`stops`): of such a text only what is there
    can be judged.
    """
    complete = []
    for text, finish in zip(texts, finishes, strict=True):
        if (finish == "stop" and not stops) or is_whole(text):
            complete.append(text)
        elif not begins_json(text):
            return violated("the text is not JSON")
    return complete


def violated(problem: str) -> Failure:
    """An answer that is not what its job asked for."""
    message = (
        f"The engine did not hold its output to the JSON that response_format asks for: {problem}. Simplify the "
        "schema, or send the request again."
    )
    return Failure("constraint_violated", message, 500, "response_format")


def unusable(problem: str) -> Failure:
    """A schema by which no answer can be judged."""
    message = f"response_format: this JSON schema cannot be used: {problem}. Correct or simplify it."
    return Failure("invalid_request_error", message, 400, "response_format")


def unchecked() -> Failure:
    """An answer that was not judged in time."""
    message = (
        "The output could not be checked against the schema of response_format: the check took too much time or "
        "memory. Simplify the schema."
    )
    return Failure("constraint_unchecked", message, 500, "response_format")
