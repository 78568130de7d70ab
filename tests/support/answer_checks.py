"""Checks of one value of an answer, for what a value or a type cannot say: sums, counts, order, JSON, whole streams.

Each takes the value at a path of the answer and returns whether it is as it should be. A check of a value of another
type is False: it never raises.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import jsonschema_rs

AnswerCheck = Callable[[Any], bool]


class NoField:
    """The field is not there, or null."""


def found_at(document: Any, path: str) -> Any:
    """The value at a path of names and numbers with dots between them, the whole document for ""; None if there is
    none."""
    for step in path.split(".") if path else ():
        try:
            document = document[int(step)] if isinstance(document, list) else document[step]
        except (LookupError, TypeError, ValueError):
            return None
    return document


def fits(value: Any, wanted: Any) -> bool:
    """Whether a value is what a row wants: nothing, of a type (a text is not empty), as a check says, or equal."""
    if wanted is NoField:
        return value is None
    if isinstance(wanted, type):
        return isinstance(value, wanted) and value != ""
    return bool(wanted(value) if callable(wanted) else value == wanted)


def _dicts(value: Any) -> Sequence[dict[str, Any]]:
    """The objects of a list; () for anything else, and for a list that has other things."""
    return value if isinstance(value, list) and all(isinstance(each, dict) for each in value) else ()


def adds_up(usage: Any) -> bool:
    """The total is the sum of prompt and answer, and a prompt has at least one token; in either API's names."""
    if not isinstance(usage, dict):
        return False
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    answer = usage.get("completion_tokens", usage.get("output_tokens", 0))
    total = usage.get("total_tokens")
    if not (isinstance(prompt, int) and isinstance(answer, int) and isinstance(total, int)):
        return False
    return prompt > 0 and prompt + answer == total


def counts_its_tokens(told: Any) -> bool:
    """The count of /tokenize is that of its ids, and within the model's length."""
    tokens = told.get("tokens") if isinstance(told, dict) else None
    return isinstance(tokens, list) and 0 < len(tokens) == told.get("count") <= told.get("max_model_len", 0)


def best_first(results: Any) -> bool:
    """At least two scores, each greater than the next."""
    scores = [each.get("relevance_score") for each in _dicts(results)]
    numbers = [score for score in scores if isinstance(score, float)]
    return len(scores) == len(numbers) > 1 and all(a > b for a, b in pairwise(numbers))


def json_object(text: Any) -> bool:
    """The text is a JSON object and nothing else."""
    return _fits_schema(text, {"type": "object"})


def of_schema(schema: dict[str, Any]) -> AnswerCheck:
    """The text is JSON that fits a JSON schema."""
    return lambda text: _fits_schema(text, schema)


def _fits_schema(text: Any, schema: dict[str, Any]) -> bool:
    try:
        return bool(jsonschema_rs.is_valid(schema, json.loads(text)))
    except (TypeError, ValueError):  # no text, or no JSON
        return False


def tokens_with_alternatives(tokens: int, alternatives: int) -> AnswerCheck:
    """A chat's log-probabilities: of so many tokens, each with exactly so many different alternatives."""

    def check(content: Any) -> bool:
        rows = _dicts(content)
        names = [{each.get("token") for each in _dicts(row.get("top_logprobs"))} for row in rows]
        counts = [len(row.get("top_logprobs") or ()) for row in rows]
        known = all(isinstance(row.get("logprob"), float) for row in rows)
        return known and counts == [len(each) for each in names] == [alternatives] * tokens

    return check


def columns_with_alternatives(tokens: int, alternatives: int) -> AnswerCheck:
    """A completion's log-probabilities: columns of so many tokens, each with exactly so many alternatives."""

    def check(logprobs: Any) -> bool:
        if not isinstance(logprobs, dict):
            return False
        columns = [logprobs.get(name) or () for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs")]
        lengths = [len(column) for column in columns]
        return lengths == [tokens] * 4 and [len(each) for each in columns[3]] == [alternatives] * tokens

    return check


def numbers_in_base64(count: int) -> AnswerCheck:
    """A text of so many float32 in base64."""

    def check(text: Any) -> bool:
        try:
            return len(base64.b64decode(text, validate=True)) == 4 * count
        except (TypeError, binascii.Error):
            return False

    return check


def of_length(count: int) -> AnswerCheck:
    """A list with so many entries."""
    return lambda value: isinstance(value, list) and len(value) == count


def other_than(text: str) -> AnswerCheck:
    """A text that is not empty and not this one."""
    return lambda value: isinstance(value, str) and value not in ("", text)


# --- streams ---------------------------------------------------------------------------------------------------------


def _choice(chunk: dict[str, Any]) -> dict[str, Any]:
    return next(iter(_dicts(chunk.get("choices"))), {})


def one_finish_reason(chunks: Any) -> bool:
    """One chunk has a finish reason, and no text comes after it."""
    reasons = [_choice(each).get("finish_reason") for each in _dicts(chunks)]
    said = [bool(_text(each)) for each in _dicts(chunks)]
    return len([each for each in reasons if each]) == 1 and not any(said[reasons.index(max(reasons, key=bool)) + 1 :])


def _text(chunk: dict[str, Any]) -> str:
    choice = _choice(chunk)
    return str(choice.get("text") or choice.get("delta", {}).get("content") or "")


def streams(text: str) -> AnswerCheck:
    """The chunks, put together, are this text."""
    return lambda chunks: "".join([_text(each) for each in _dicts(chunks)]) == text


def one_role(chunks: Any) -> bool:
    """The first chunk alone says whose text it is."""
    return ["role" in _choice(each).get("delta", {}) for each in _dicts(chunks)].count(True) == 1


def counts_at_the_end(chunks: Any) -> bool:
    """The last chunk alone has counts, and no choices."""
    counted = [bool(each.get("usage")) for each in _dicts(chunks)]
    return counted.count(True) == 1 and counted[-1] and chunks[-1].get("choices") == []
