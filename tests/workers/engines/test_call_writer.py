"""Calls as servers and models give them: what is written of them, however they are split, and how they are checked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.engine import Failure
from penstock.tools import Call, CallReader, Tool, Tools, opened, read_answer
from workers.engines.calls import DeltaWriter, FoundCalls, NamedWriter, ObjectWriter, TagWriter, check_calls
from workers.engines.constraint import unusable


def call(index: int | None, name: str | None = None, arguments: Any = None, **more: Any) -> dict[str, Any]:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {"function": function, **({} if index is None else {"index": index}), **more}


DELTAS: dict[str, tuple[list[list[dict[str, Any]]], list[Call]]] = {
    "fragments, as OpenAI": (
        [[call(0, "f", "", id="a")], [call(0, None, '{"x"')], [call(0, None, ":1}")], [call(1, "g", "", id="b")],
         [call(1, None, "{}")]],
        [Call("f", '{"x":1}'), Call("g", "{}")],
    ),
    "whole, all with index 0": (
        [[call(0, "f", '{"x":1}', id="a")], [call(0, "g", "{}", id="b")]],
        [Call("f", '{"x":1}'), Call("g", "{}")],
    ),
    "whole, in one chunk, without index": (
        [[call(None, "f", {"x": 1}, id="a"), call(None, "f", {"x": 2}, id="b")]],
        [Call("f", '{"x": 1}'), Call("f", '{"x": 2}')],
    ),
    "name and id repeated": (
        [[call(0, "f", '{"x"', id="a")], [call(0, "f", ":1}", id="a")]],
        [Call("f", '{"x":1}')],
    ),
    "without arguments": ([[call(0, "f", id="a")], [call(1, "g", "", id="b")]], [Call("f", "{}"), Call("g", "{}")]),
    "with our own marks": ([[call(0, "f\x1e", '{"x": "\x1f"}')]], [Call("f", '{"x": ""}')]),
}  # fmt: skip


@pytest.mark.parametrize("name", DELTAS)
def test_every_form_of_streamed_calls_is_read(name: str) -> None:
    chunks, calls = DELTAS[name]
    writer = DeltaWriter()
    text = writer.text("so:\x1e ") + "".join(writer.write(chunk) for chunk in chunks) + writer.end()
    assert read_answer((text,))[:2] == ("so: ", calls)


def test_text_behind_a_call_is_text() -> None:
    writer = DeltaWriter()
    text = writer.write([call(0, "f")]) + writer.text("then ") + writer.text("more") + writer.write([call(1, "g")])
    assert read_answer((text + writer.end(),))[:2] == ("then more", [Call("f", "{}"), Call("g", "{}")])


@pytest.mark.parametrize(
    "chunks",
    [
        [[call(0, None, "{}")]],
        [[call(0, "f", "{")], [call(1, "g", "{}")], [call(0, None, "}")]],
        ["no list"], [["no object"]], [[{"function": {"name": 5}}]], [[call(0, "f", 7)]],
    ],
)  # fmt: skip
def test_what_cannot_be_told_apart_is_no_answer(chunks: list[Any]) -> None:
    writer = DeltaWriter()
    with pytest.raises(ValueError, match="call"):
        [writer.write(chunk) for chunk in chunks]


def test_the_extras_of_a_call_have_few_levels() -> None:
    """Those who look through them may go into each; one with many more than anybody means is left out."""
    writer, deep = DeltaWriter(), list[Any]()
    for _ in range(600):
        deep = [deep]
    for number, value in enumerate(([[1]], deep)):
        begun = {"function": {"name": "f", "x": value}, "index": number, "id": f"c{number}", "y": value}
        writer.write([begun])
        extras = {"id": f"c{number}"} | ({"function": {"x": value}, "y": value} if value is not deep else {})
        assert writer.extras == {str(number): extras}


def split(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


TAGGED = (
    'Well. <tool_call>\n{"arguments": {"x": "</"}, "name": "f"}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>'
)


@pytest.mark.parametrize("size", range(1, len(TAGGED) + 1))
def test_tags_are_read_however_they_are_split(size: int) -> None:
    writer = TagWriter()
    text = "".join(writer.write(piece) for piece in split(TAGGED, size)) + writer.end(whole=True)
    said, calls, _ = read_answer(split(text, 1))
    assert said == "Well. " and [(name, json.loads(arguments)) for name, arguments in calls] == [
        ("f", {"x": "</"}),
        ("g", {}),
    ]


@pytest.mark.parametrize("text", ["a < b <tool", "no call <tool_cal", "\n"])
def test_text_without_a_call_is_unchanged(text: str) -> None:
    writer = TagWriter()
    assert "".join(map(writer.write, text)) + writer.end(whole=True) == text


def test_a_call_that_is_no_json_is_a_call_nobody_offered() -> None:
    """So the check of the answer fails the job."""
    writer = TagWriter()
    assert read_answer((writer.write("<tool_call>f(1)</tool_call>") + writer.end(whole=True),))[1] == [Call("", "f(1)")]


STRICT, LOOSE = Tool("strict", "", {"type": "object"}, strict=True), Tool("loose")
AUTO = Tools(offered=(STRICT, LOOSE))
FORCED = Tools(offered=(STRICT, LOOSE), choice="required")
OBJECT = ' {"name" : "f", "arguments": {"a": {"b": "}"}} }\n'


@pytest.mark.parametrize("size", range(1, len(OBJECT) + 1))
def test_the_arguments_of_an_object_come_as_they_are(size: int) -> None:
    writer = ObjectWriter()
    text = "".join(writer.write(piece) for piece in split(OBJECT, size)) + writer.end(whole=True)
    assert read_answer((text,))[1][0].name == "f"
    assert json.loads(read_answer((text,))[1][0].arguments) == {"a": {"b": "}"}}


def test_a_cut_object_keeps_what_came() -> None:
    writer = ObjectWriter()
    text = writer.write('{"name": "f", "arguments": {"a": {}') + writer.end(whole=False)
    assert read_answer((text,))[1] == [Call("f", '{"a": {}')]


TWO_CALLS = (
    'so <tool_call>{"name": "loose", "arguments": {"a": "}"}}</tool_call><tool_call>{"name": "strict"}</tool_call>'
)
ONE_CALL = '{"name": "loose", "arguments": {"a": {"b": "}"}, "c": [1]}}'


@pytest.mark.parametrize(
    ("writer", "text", "choice"), [(ObjectWriter, ONE_CALL, "required"), (TagWriter, TWO_CALLS, "auto")]
)
def test_wherever_an_answer_is_cut_its_calls_can_be_used(
    writer: type[ObjectWriter | TagWriter], text: str, choice: str
) -> None:
    """By a limit: its finish reason says so. By a stop string: then it did not end with the call."""
    tools = Tools(offered=AUTO.offered, choice=choice)
    for size in range(len(text)):
        own = writer()
        shown = own.write(text[:size]) + own.end(whole=False)
        calls = read_answer((shown,)).calls
        assert isinstance(check_calls([shown], ["length"], tools), FoundCalls), text[:size]
        stopped = check_calls([shown], ["stop"], tools, stops=True)
        assert isinstance(stopped, FoundCalls), text[:size]
        assert stopped.choices == frozenset({0} if calls and _is_whole(calls[-1].arguments) else ())


def _is_whole(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


def test_a_named_call_begins_with_its_first_token() -> None:
    writer = NamedWriter("f")
    text = writer.write("{") + writer.write("}") + writer.end(whole=True)
    assert read_answer((text,))[:2] == ("", [Call("f", "{}")])


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_a_reader_does_not_depend_on_the_pieces(size: int) -> None:
    """Number and name come with the first part of a call, the name once."""
    text = 'a\x1ename\x1f{"x": 1}\x1eg\x1f{}\x1db'
    reader = CallReader()
    parts = [part for piece in split(text, size) for part in reader.feed(piece)]
    assert [part.name for part in parts if part.name is not None] == ["name", "g"]
    assert "".join(part.text for part in parts if part.call == 0) == '{"x": 1}'
    assert "".join(part.text for part in parts if part.call == -1) == "ab" and reader.calls == 2


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
    failure = unusable("it is none").about("tools", "the function f in tools")
    assert failure.param == "tools" and "the function f in tools" in failure.message
    assert "response_format" not in failure.message
