"""Call checks: whether the calls in finished answers are of offered functions, and their arguments JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pydantic_core
from msgspec.structs import replace

from penstock.engine import Failure
from penstock.tools import Call, Tools, read_answer
from workers.engines.constraint import FILTERED, begins_json


class FoundCalls(NamedTuple):
    """The calls of a job's answers."""

    choices: frozenset[int]
    """Choices whose answer holds a call."""
    arguments: dict[str, list[str]]
    """By name of a strict function: the arguments of its calls, which must follow its schema."""


def check_calls(texts: Sequence[str], finishes: Sequence[str], tools: Tools) -> FoundCalls | Failure:
    """Read the answers of a job that is over. `finishes`: the finish reason of each; FILTERED
    and "length" mean that it was cut."""
    strict = {tool.name for tool in tools.offered if tool.strict}
    found = FoundCalls(frozenset(), {})
    choices = set[int]()
    for index, (text, finish) in enumerate(zip(texts, finishes, strict=True)):
        calls = read_answer((text,)).calls
        cut = finish in ("length", FILTERED)
        if problem := _problem(calls, tools, cut=cut):
            return violated(problem)
        if calls:
            choices.add(index)
        for call in calls[:-1] if cut else calls:
            if call.name in strict:
                found.arguments.setdefault(call.name, []).append(call.arguments)
    return FoundCalls(frozenset(choices), found.arguments)


def _problem(calls: Sequence[Call], tools: Tools, *, cut: bool) -> str:
    """What is wrong with the calls of one answer; "" if nothing is."""
    if not calls and tools.forced and not cut:
        return "the answer calls no function"
    if len(calls) > 1 and not tools.parallel:
        return "the answer holds several calls"
    names = {tool.name for tool in tools.callable}
    for call in calls:
        if call.name not in names:
            return "the answer calls a function that was not offered"
        last_cut = cut and call is calls[-1]
        if not (begins_json(call.arguments) if last_cut else _is_object(call.arguments)):
            return f"the arguments of a call of {call.name} are no JSON object"
    return ""


def _is_object(text: str) -> bool:
    try:
        return isinstance(pydantic_core.from_json(text, allow_inf_nan=False), dict)
    except ValueError:
        return False


def violated(problem: str) -> Failure:
    """The failure of a job whose calls cannot be used."""
    message = f"The model did not call a tool as it was asked to: {problem}. Send the request again, or simplify tools."
    return Failure("constraint_violated", message, 500, "tools")


def of_tool(failure: Failure, name: str) -> Failure:
    """The failure of the arguments of a function, from that of a text: it names the field of the tool."""
    message = failure.message.replace("response_format", f"the function {name} in tools")
    return replace(failure, message=message, param="tools")
