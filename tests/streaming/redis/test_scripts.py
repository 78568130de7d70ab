"""How scripts are assembled: common functions are created with every call, rare ones at their first call."""

from __future__ import annotations

import re

import pytest

from streaming.redis.client import RedisClient
from streaming.redis.scripts import RARE_FUNCTIONS, _script, load_scripts

SHARED = """
local P = KEYS[1]
local function shared(x) return P .. x end
local counted = 0
local function helper(x) counted = counted + 1 return shared(x) .. counted end
local function fail_malformed(x) return helper(x) end
local function usual(x) return x == 'bad' and fail_malformed(x) or shared(x) end
"""


@pytest.mark.parametrize("name", ["put", "claim", "finish"])
def test_what_few_calls_need_is_not_made_with_every_call(name: str) -> None:
    """In the three scripts that every job runs."""
    usual, _, rest = load_scripts()[name].source.partition("call_rare = function")
    made = re.findall(r"^local function (\w+)\(([^)]*)\)", usual, re.MULTILINE)
    assert {"pending_entries", "model_streams"}.isdisjoint(name for name, _ in made)
    assert {name for name, arguments in made if arguments == "..."} <= set(RARE_FUNCTIONS)
    assert "local function pending_entries(" in rest and "local function fail_malformed(id" in rest


async def test_what_few_calls_need_is_made_once_and_keeps_its_state(wire: RedisClient) -> None:
    """It uses what the usual way uses, and what is its own; its answers pass through."""
    script = _script("test", "return usual(ARGV[1])", SHARED)
    assert "helper" not in script.source.partition("call_rare = function")[0]
    calls = ["1", "good", "1", "bad", "1", "bad"]
    assert await wire.redis.eval(script.source, 1, "p:", *calls) == [b"p:good", b"p:bad1", b"p:bad2"]
    unused = _script("test", "return shared(ARGV[1])", SHARED)
    assert "call_rare" not in unused.source and await wire.redis.eval(unused.source, 1, "p:", "1", "x") == [b"p:x"]


def test_a_word_in_a_comment_takes_no_function_along() -> None:
    """Neither in the script nor in a function that it uses."""
    shared = "local function helper(x) return x end\n-- helper, unusual\nlocal function unusual(x) return x end\n"
    source = _script("test", "return helper(ARGV[1]) -- not unusual(x)", shared).source
    assert "local function helper" in source and "local function unusual" not in source
