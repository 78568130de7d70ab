"""Script loader: makes one Redis function library of the Lua scripts and the functions that they share.

The server creates the library's functions once, when a process loads it. Functions are global on a server, so the names
carry a digest of the text: processes of several versions use one store, each with its own library.

Each script is atomic within one partition and documented at its head, whose first line is
`#!lua name=NAME flags=FLAG roles=ROLE,ROLE promise`. `roles` are those that run it (streaming/store/acl.py): `any` is
all of them; `pools` only `penstock up`, whose user may run every script. `promise`: its answer is one, so at D3 it
waits until a replica has the writes. Those of fleet.lua run in the fleet's hash slot, which all processes share.

Scripts with the flag `allow-oom` also run while the store is full: they finish accepted work, free memory
or renew a worker's lease. Scripts that bring new work (put, put_file, put_batch, put_conversation, amend_conversation,
reserve, redeliver) are refused then. Admission reserves the memory that the others need (`streaming/store/monitor.py`).
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from streaming.keys import ROOT, lua_prelude
from streaming.order import lua_constants

SHARED = ("values", "waiting", "limits", "endings", "file_costs", "malformed", "claims")
"""The files of the functions that scripts share, in `streaming/lua/shared`, without their suffix, in order: each uses
only those before it."""

LIBRARIES = ROOT.rstrip(":") + "_"
"""The beginning of the name of every version's library."""

REGISTER = """
local function part(list, first, last)
  if last - first < 1000 then return {unpack(list, first, last)} end -- faster, but Lua bounds how many values it takes
  local own = {}
  for at = first, last do own[#own + 1] = list[at] end
  return own
end

local function register(name, flags, run)
  local function run_calls(keys, arguments)
    P, round = keys[1], {}
    local answers, at = {}, 1
    while arguments[at] do
      local last = at + arguments[at]
      local ran, answer = pcall(run, part(arguments, at + 1, last))
      if not ran and type(answer) ~= 'table' then answer = redis.error_reply(answer) end
      answers[#answers + 1], at = answer, last + 1
    end
    flush_writes()
    return answers
  end
  redis.register_function({function_name = LIBRARY .. '_' .. name, callback = run_calls, flags = flags})
end
"""
"""Registers a script: a function that runs it once per call of a round. Its arguments are the number of a call's
arguments, then these, for one call after the other; it answers a list of one answer, or error, per call."""


@dataclass(frozen=True, slots=True)
class Library:
    """The function library as the server loads it."""

    name: str
    text: str
    sources: Mapping[str, str]
    """By script: its text, behind the shared definitions that it uses. A role's rights are read off these
    (streaming/store/acl.py)."""
    roles: Mapping[str, frozenset[str]]
    """By script: who runs it."""
    promises: frozenset[str]
    """Scripts whose answer is a promise."""


class Script(NamedTuple):
    """A section of a file of scripts; what its first line leaves out is None."""

    name: str
    flags: str | None
    roles: str | None
    promise: str | None
    body: str


HEAD = re.compile(r"^#!lua name=(\w+)(?: flags=([\w-]+))?(?: roles=([\w,]+))?( promise)?\n", re.MULTILINE)
COMMENT = re.compile(r"--.*")
WORD = re.compile(r"\w+")
DEFINITION = re.compile(r"^(?=local (?:function )?(\w+))", re.MULTILINE)


@cache
def load_library() -> Library:
    """Read every script and the functions that they share."""
    folder = files("streaming") / "lua"
    paths = [*folder.iterdir(), *(folder / "shared").iterdir()]
    return assemble({path.name: path.read_text(encoding="utf-8") for path in paths if path.name.endswith(".lua")})


def assemble(texts: Mapping[str, str]) -> Library:
    """Build the library. `texts`: the text of every Lua file by its name, with its suffix."""
    _, *parts_of = DEFINITION.split(lua_prelude() + lua_constants() + "".join(texts[f"{name}.lua"] for name in SHARED))
    shared = dict(zip(parts_of[::2], parts_of[1::2], strict=True))
    files_of_scripts = [name for name in sorted(texts) if name.removesuffix(".lua") not in SHARED]
    scripts = {name: _scripts(texts[name]) for name in files_of_scripts}
    used = {file: _used("".join(script.body for script in parts), shared) for file, parts in scripts.items()}
    # Lua allows 200 local names at a time: those that one file alone uses end with its block.
    users = Counter(name for names in (*used.values(), 2 * _used(REGISTER, shared)) for name in names)
    text = _joined(shared, (name for name in shared if users[name] > 1)) + REGISTER
    sources = {}
    for file, parts in scripts.items():
        text += "do\n" + _joined(shared, (name for name in used[file] if users[name] == 1))
        for script in parts:
            flags = f"'{script.flags}'" if script.flags else ""
            registered = f"register('{script.name}', {{{flags}}}, function(ARGV)\n{script.body}\nend)\n"
            text += registered
            # What a script has buffered is written behind it.
            flushes = "\nflush_writes" if "buffer_of" in _used(script.body, shared) else ""
            sources[script.name] = _joined(shared, _used(script.body + flushes, shared)) + registered
        text += "end\n"
    every = [script for parts in scripts.values() for script in parts]
    roles = {script.name: frozenset((script.roles or "").split(",")) for script in every}
    promises = frozenset(script.name for script in every if script.promise)
    name = LIBRARIES + hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:8]
    return Library(name, f"#!lua name={name}\nlocal LIBRARY = '{name}'\n{text}", sources, roles, promises)


def _scripts(text: str) -> list[Script]:
    """The scripts of a file."""
    parts = HEAD.split(text)[1:]
    size = HEAD.groups + 1  # and the body
    return [Script(*parts[at : at + size]) for at in range(0, len(parts), size)]


def _joined(definitions: Mapping[str, str], names: Iterable[str]) -> str:
    return "".join(definitions[name] for name in names)


def _used(text: str, definitions: Mapping[str, str]) -> list[str]:
    """Names of the definitions that a text uses, directly or through others, in order."""
    names, used = set(_words(text)), []
    for name in reversed(list(definitions)):
        if name in names:
            used.append(name)
            names |= _words(definitions[name])
    return used[::-1]


@cache
def _words(text: str) -> frozenset[str]:
    """Every identifier of a piece of Lua, without its comments, whose words may be a function's name by chance."""
    return frozenset(WORD.findall(COMMENT.sub("", text)))
