"""Finished answers held against the tools that were offered."""

from __future__ import annotations

import pytest

from penstock.engine import Failure
from penstock.tools import Tool, Tools, opened
from workers.engines.calls import FoundCalls, check_calls, of_tool
from workers.engines.constraint import unusable

STRICT, LOOSE = Tool("strict", "", {"type": "object"}, strict=True), Tool("loose")
AUTO = Tools(offered=(STRICT, LOOSE))
FORCED = Tools(offered=(STRICT, LOOSE), choice="required")


def test_calls_are_found_by_choice_and_strict_arguments_kept() -> None:
    texts = ["hello", opened("loose") + "{}" + opened("strict") + '{"a": 1}', opened("strict") + "{}"]
    assert check_calls(texts, ["stop"] * 3, AUTO) == FoundCalls(frozenset({1, 2}), {"strict": ['{"a": 1}', "{}"]})


@pytest.mark.parametrize(
    ("text", "finish", "tools", "problem"),
    [
        ("hello", "stop", FORCED, "calls no function"),
        (opened("other") + "{}", "stop", AUTO, "not offered"),
        (opened("") + "f(1)", "stop", AUTO, "not offered"),
        (opened("loose") + "{}", "stop", Tools(offered=AUTO.offered, choice="required", named="strict"), "not offered"),
        (opened("loose") + '{"a": ', "stop", AUTO, "no JSON object"),
        (opened("loose") + "[]", "stop", AUTO, "no JSON object"),
        (opened("loose") + '{"a": NaN}', "stop", AUTO, "no JSON object"),
        (opened("loose") + '{"a": }', "length", AUTO, "no JSON object"),
        (opened("loose") + '{"a"' + opened("loose") + "{}", "length", AUTO, "no JSON object"),
        (2 * (opened("loose") + "{}"), "stop", Tools(offered=AUTO.offered, parallel=False), "several calls"),
    ],
)
def test_calls_that_nobody_can_use_fail_the_job(text: str, finish: str, tools: Tools, problem: str) -> None:
    failure = check_calls([text], [finish], tools)
    assert isinstance(failure, Failure) and problem in failure.message
    assert (failure.code, failure.param) == ("constraint_violated", "tools")


@pytest.mark.parametrize("text", ["", "hel", opened("strict") + '{"a"', opened("strict") + "{}" + opened("loose")])
def test_a_cut_answer_is_the_begin_of_one(text: str) -> None:
    """Its finish reason says that it was cut; only what is complete is checked against a schema."""
    found = check_calls([text], ["length"], FORCED)
    assert isinstance(found, FoundCalls) and found.arguments in ({}, {"strict": ["{}"]})


def test_the_failure_of_arguments_names_the_function() -> None:
    failure = of_tool(unusable("it is none"), "f")
    assert failure.param == "tools" and "the function f in tools" in failure.message
    assert "response_format" not in failure.message
