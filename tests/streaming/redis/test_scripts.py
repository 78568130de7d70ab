"""How scripts are assembled: each with the shared functions that it uses."""

from __future__ import annotations

from streaming.redis.client import RedisClient
from streaming.redis.scripts import SHARED as FILES
from streaming.redis.scripts import Script, assemble

SHARED = """
local P = KEYS[1]
local function shared(x) return P .. x end
local function other(x) return x end
local counted = 0
local function helper(x) counted = counted + 1 return shared(x) .. counted end
"""


def linked(text: str, shared: str) -> Script:
    """A script with these shared functions alone."""
    files = dict.fromkeys((f"{name}.lua" for name in FILES), "")
    return assemble(files | {f"{FILES[0]}.lua": shared, "test.lua": f"-- A file.\n\n#!lua name=test\n{text}\n"})["test"]


async def test_a_script_has_the_shared_functions_it_uses_and_what_these_use(wire: RedisClient) -> None:
    """They keep their state over the calls of one batch."""
    script = linked("return helper(ARGV[1])", SHARED)
    assert "other" not in script.source
    assert await wire.redis.eval(script.source, 1, "p:", "1", "x", "1", "y") == [b"p:x1", b"p:y2"]


def test_a_word_in_a_comment_takes_no_function_along() -> None:
    """Neither in the script nor in a function that it uses."""
    shared = "local function helper(x) return x end\n-- helper, unusual\nlocal function unusual(x) return x end\n"
    source = linked("return helper(ARGV[1]) -- not unusual(x)", shared).source
    assert "local function helper" in source and "local function unusual" not in source


async def test_a_rare_function_is_created_when_it_is_called(wire: RedisClient) -> None:
    """With what it alone uses, and once; it shares the variables of the others."""
    shared = (
        SHARED
        + "local function twice(x) return x .. x end\nlocal function dead_letter(x) return helper(twice(x)) end\n"
    )
    script = linked("helper('') return ARGV[1] ~= '' and dead_letter(ARGV[1]) or 0", shared)
    before, _, created = script.source.partition("function create_rare()")
    assert "local function helper" in before and "local function twice" in created
    assert await wire.redis.eval(script.source, 1, "p:", "1", "", "1", "x", "1", "y") == [0, b"p:xx3", b"p:yy5"]
