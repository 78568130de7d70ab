"""The function library: what is in it, how it comes to a server, and that calls leave nothing behind."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from importlib.resources import files

import pytest
from redis.exceptions import ResponseError

from streaming.keys import lua_prelude, partition_key, prefix
from streaming.order import lua_constants
from streaming.redis.client import MAX_LIBRARIES, RedisClient
from streaming.redis.scripts import LIBRARIES, Library, assemble, load_library

LUA = files("streaming") / "lua"
SHARED = {path.name: path.read_text("utf-8") for path in (LUA / "shared").iterdir()}


def library(text: str, shared: str = "") -> Library:
    """The shared functions and further ones, with these scripts alone."""
    own = f"-- A file.\n\n{text}\n"
    return assemble(SHARED | {"claims.lua": SHARED["claims.lua"] + shared, "own.lua": own})


def test_a_script_has_the_shared_functions_it_uses_and_what_these_use() -> None:
    """A word in a comment takes no function along, neither in the script nor in a function that it uses."""
    shared = (
        "local function helper(x) return to_member(x) end\n-- helper, unusual\nlocal function unusual(x) return x end\n"
    )
    source = library("#!lua name=test\nreturn helper(ARGV[1]) -- not unusual(x)", shared).sources["test"]
    assert "local function helper" in source and "local function to_member" in source
    assert "local function unusual" not in source and "local function exact_ms" not in source


def test_functions_keep_no_state_but_that_of_their_round() -> None:
    """Of the variables outside functions, only two are ever assigned or filled; every round begins with new ones."""
    shared = "".join((lua_prelude(), lua_constants(), *SHARED.values()))
    outer = set(re.findall(r"^local (?!function)(\w+)", shared, re.MULTILINE))
    text = re.sub(r"--.*", "", load_library().text)
    assert {"P", "round", "STATES", "PRIORITIES"} < outer
    for name in outer - {"P", "round"}:
        assert name.isupper(), name
        assert not re.search(rf"(?<!local )\b{name}(\[[^\]]*\]|\.\w+)? = ", text), name
        assert not re.search(rf"table\.\w+\({name}\b", text), name
    assert len(re.findall(r"\b(?:P|round) = ", text)) == 3  # declared, and set for each round


async def test_a_round_that_fails_leaves_nothing_to_the_next(wire: RedisClient) -> None:
    """Neither what it was to write nor what it has read."""
    scripts = "#!lua name=spoil\nbuffer_sum('usage', ARGV[1], '9999999999', 5)\nround.reserved_total = 7\n"
    own = library(
        f"{scripts}return 1\n#!lua name=look\nreturn {{total_reserved_bytes(), redis.call('EXISTS', kept_key('t'))}}"
    )
    await wire.redis.function_load(own.text)
    try:
        kept = partition_key(0, "kept", "t")
        await wire.redis.set(kept, "not a hash")
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            await wire.redis.fcall(f"{own.name}_spoil", 1, prefix(0), 1, "t")
        await wire.redis.delete(kept)
        assert await wire.redis.fcall(f"{own.name}_look", 1, prefix(0), 0) == [[0, 0]]
        assert await wire.redis.fcall(f"{own.name}_spoil", 1, prefix(0), 1, "t", 1, "t") == [1, 1]
        assert await wire.redis.hvals(kept) == [b"10"]
    finally:
        await wire.redis.function_delete(own.name)


async def libraries(wire: RedisClient) -> set[str]:
    return {each[1].decode() for each in await wire.redis.function_list(f"{LIBRARIES}*")}


async def test_versions_run_beside_each_other_and_old_ones_do_not_pile_up(wire: RedisClient) -> None:
    """A process loads its library where that is missing, and removes some of the others if there are many. One whose
    library was removed loads it again."""
    await wire.redis.function_flush()
    older = RedisClient.open(wire.settings)
    text = load_library().text.replace(load_library().name, f"{LIBRARIES}{0:08x}")
    older._library = replace(load_library(), name=f"{LIBRARIES}{0:08x}", text=text)
    try:
        for _ in range(3):
            await asyncio.gather(*(each.call("lead", -1, "x", 1000) for each in (wire, older) for _ in range(5)))
            assert await libraries(wire) == {load_library().name, f"{LIBRARIES}{0:08x}"}
            await wire.redis.flushall()
        for number in range(1, 2 * MAX_LIBRARIES):
            name = f"{LIBRARIES}{number:08x}"
            await wire.redis.function_load(f"#!lua name={name}\nredis.register_function('{name}', function() end)")
        foreign = f"{LIBRARIES}of_another_program"
        await wire.redis.function_load(f"#!lua name={foreign}\nredis.register_function('{foreign}', function() end)")
        await wire.redis.function_delete(load_library().name)
        await wire.call("record", 0, "none")
        left = await libraries(wire)
        assert {load_library().name, foreign} <= left and len(left) == MAX_LIBRARIES + 1
        await older.call("record", 0, "none")
    finally:
        await older.close()
        await wire.redis.function_flush()
