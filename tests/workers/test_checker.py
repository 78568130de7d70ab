"""Finished answers held against the JSON they were to be: which are checked, and the child process that checks them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from flow import until

from penstock.engine import Failure
from penstock.tools import opened
from workers.checker import MAX_EXHAUSTING, Checker
from workers.engines.constraint import begins_json, complete_texts

pytestmark = pytest.mark.slow

PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.fixture
async def checker() -> AsyncIterator[Checker]:
    checker = Checker()
    yield checker
    await checker.stop()


def code(failure: Failure | None) -> str:
    return failure.code if failure else ""


@pytest.mark.parametrize(
    "text", ["", " ", "{", '{"a', '{"a": tr', "[1, -", '"\\u12', '{"a": 1}', "[" * 500, "7" * 5000]
)
def test_a_text_that_was_cut_may_still_be_json(text: str) -> None:
    """More text could complete it, as far as a parser with limits can say."""
    assert begins_json(text)


@pytest.mark.parametrize("text", ["{The", "John", '{"a" "b"', '{"a": 1} and', "[1,,", '{"a": NaN', "{'a'"])
def test_a_text_that_never_was_json_is_known(text: str) -> None:
    """Nothing that follows could make it JSON."""
    assert not begins_json(text)


def test_only_what_is_complete_is_checked_against_the_schema() -> None:
    """A limit or a stop string may have cut the rest."""
    whole, half = '{"age": 1}', '{"age": '
    assert complete_texts([whole, half], ["stop", "length"], stops=False) == [whole]
    assert complete_texts([half], ["stop"], stops=False) == [half]
    assert complete_texts([half, whole], ["stop", "stop"], stops=True) == [whole]
    assert complete_texts([whole, "1"], ["length", "length"], stops=False) == [whole]
    called = opened("f") + "{}"
    assert complete_texts([called, whole], ["tool_calls", "stop"], stops=False, parted=True) == [whole]
    assert complete_texts([whole + called, half], ["tool_calls", "stop"], stops=False, parted=True) == [half]
    failed = complete_texts([whole, "Hello"], ["stop", "length"], stops=False)
    assert isinstance(failed, Failure) and failed.code == "constraint_violated"


CIRCLE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}


CHECKED: list[tuple[dict[str, Any], str, str]] = [
    ({}, '{"a": 1}', ""),
    ({}, "[1]", "constraint_violated"),
    ({}, '{"name":{"name":"John"', "constraint_violated"),
    ({}, '{"a": NaN}', "constraint_violated"),
    ({}, "[" * 100_000, "constraint_violated"),
    (PERSON, '{ "age": 3 }\n', ""),
    (PERSON, '{"age": "3"}', "constraint_violated"),
    (PERSON, '{"age": 3} {"age": 4}', "constraint_violated"),
    ({"type": "string", "pattern": "^(a+)+$"}, json.dumps("a" * 50_000 + "b"), "constraint_violated"),
    ({"type": "string", "pattern": "^(?=a)"}, '"a"', ""),
    ({"type": "string", "pattern": "^(?=a)"}, '"b"', "constraint_violated"),
    ({"type": "string", "pattern": r"^(?:(a+)+)+\1b$"}, json.dumps("a" * 5000), "constraint_violated"),
    ({"type": "string", "pattern": "^(?=a"}, '"a"', "invalid_request_error"),
    ({"type": "string", "format": "phone"}, '"a"', ""),
    (CIRCLE, "1", "invalid_request_error"),
    ({"const": 1, "$defs": {"unused": {"$ref": "#/$defs/none"}}}, "1", ""),
]
NAMED: list[tuple[dict[str, Any], str, str]] = [
    ({"properties": {"a/b": {"type": "strng"}}}, "1", "#/properties/a~1b/type is not valid"),
    ({"$ref": "#/x", "x": {"allOf": [{"required": ["a", "a"]}]}}, "1", "#/x/allOf/0/required is not valid"),
    ({"pattern": "["}, "1", "#/pattern is not valid"),
    ({"$ref": "#"}, "1", "`$ref` at # leads back to itself"),
    ({"properties": {"a": {"$ref": "#/x"}}, "x": {"contains": False}}, '{"a": [1]}', "['a'], #/x/contains of the"),
    ({"if": {"const": 1}, "then": {"const": 2}}, "1", "at its root, #/then/const of the schema is not kept"),
    ({"dependentRequired": {"a": ["b"]}}, '{"a": 1}', "at its root, #/dependentRequired of the schema is not kept"),
]


async def test_a_text_is_held_against_its_schema(checker: Checker) -> None:
    """Whatever schema and text are. Only look-around and back-references may take more than linear time. (One child
    checks them all: it takes longer to start than to check.)"""
    for schema, text, expected in CHECKED:
        assert code(await checker.failure(schema, [text])) == expected, (schema, text[:50])


async def test_a_failure_names_the_keyword(checker: Checker) -> None:
    """As its client wrote it, whether the schema cannot be used or the answer does not follow it."""
    for schema, text, message in NAMED:
        failure = await checker.failure(schema, [text])
        assert failure is not None and message in failure.message, schema


async def test_a_schema_fetches_nothing(checker: Checker, tmp_path: Path) -> None:
    """References to schemas that are there, on a server that listens and in a file, are refused without a look."""
    hits: list[bytes] = []
    schema = json.dumps({"type": "integer"}).encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hits.append(await reader.readline())
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(schema)}\r\n\r\n"
        writer.write(head.encode() + schema)
        writer.close()

    file = tmp_path / "schema.json"
    file.write_bytes(schema)
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    assert (await reader.read()).endswith(schema) and len(hits) == 1, "the server serves"
    writer.close()
    async with server:
        for reference in (f"http://127.0.0.1:{port}/schema", file.as_uri()):
            for text in ("1", '"no integer"'):
                failure = await checker.failure({"$ref": reference}, [text])
                assert code(failure) == "invalid_request_error", reference
    assert len(hits) == 1


def endless(levels: int) -> dict[str, Any]:
    """A schema that takes twice as long to check with each level."""
    rules: dict[str, Any] = {
        f"a{level}": {"anyOf": [{"$ref": f"#/$defs/a{level + 1}"}, {"allOf": [{"$ref": f"#/$defs/a{level + 1}"}]}]}
        for level in range(levels)
    }
    return {"$defs": rules | {f"a{levels}": {"type": "string"}}, "$ref": "#/$defs/a0"}


async def test_a_check_without_an_end_is_ended_and_its_schema_is_not_tried_again(checker: Checker) -> None:
    """The job fails, the loop is not held up meanwhile, and the next check is served. One tenant that sends the schema
    again and again holds up nobody's checks: the child never sees it twice, in whatever order its keys stand. The
    memory of such schemas is bounded."""
    schema, ticks = endless(60), 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    checker._exhausting.update({str(number).encode(): None for number in range(MAX_EXHAUSTING)})
    ticking = asyncio.create_task(tick())
    assert code(await checker.failure(schema, ["1"])) == "constraint_unchecked"
    ticking.cancel()
    assert ticks > 20
    turned = {"$ref": schema["$ref"], "$defs": schema["$defs"]}
    assert await checker.failure(PERSON, ['{"age": 1}']) is None
    (child,) = children()
    for _ in range(50):
        assert code(await checker.failure(turned, ["1"])) == "constraint_unchecked"
        assert await checker.failure(PERSON, ['{"age": 1}']) is None
        assert children() == [child], "a check of this schema ends the child"
    assert len(checker._exhausting) == MAX_EXHAUSTING


async def test_a_child_that_somebody_killed_condemns_no_schema(checker: Checker) -> None:
    """The kernel short of memory, say: the check that finds it gone says that it was none, and the next check of the
    same schema is served."""
    assert await checker.failure(PERSON, ['{"age": 1}']) is None
    (child,) = children()
    os.kill(child, signal.SIGKILL)
    await until(lambda: not children())
    assert code(await checker.failure(PERSON, ['{"age": 1}'])) == "constraint_unchecked"
    assert await checker.failure(PERSON, ['{"age": 1}']) is None


def children() -> list[int]:
    """Processes of the checker's program."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(stat[1]) == os.getpid() and b"json_check.py" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the environment is read from /proc")
async def test_the_child_is_given_no_secrets(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    """It works on what strangers send: it has neither the password of Redis nor the worker's folder."""
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://:secret@127.0.0.1:1")
    assert await checker.failure(PERSON, ['{"age": 1}']) is None
    (child,) = children()
    names = {line.partition(b"=")[0] for line in Path(f"/proc/{child}/environ").read_bytes().split(b"\0")}
    assert b"PENSTOCK_REDIS_URL" not in names, "the child has it"  # a failure shows names, and no value
    assert Path(f"/proc/{child}/cwd").readlink() == Path("/")


async def test_a_child_that_stands_still_is_ended() -> None:
    """A check takes at most so long, whoever is at fault; and one that was given up leaves no answer for the next."""
    checker = Checker(timeout_s=0)
    assert code(await checker.failure({}, ["{}"])) == "constraint_unchecked"
    await checker.stop()
    checker = Checker()
    given_up = asyncio.create_task(checker.failure({}, ["1"]))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    assert await checker.failure({}, ["{}"]) is None
    await checker.stop()
    await checker.stop()
