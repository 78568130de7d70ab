"""The Lua scripts of the wire: each atomic within one partition, each documented at the head of its file.
The last four run in the slot all processes share.

| script   | run by          | what it does in one step                                               |
|----------|-----------------|------------------------------------------------------------------------|
| put      | api             | idempotency, room, record, lane entry, wake a worker                   |
| cancel   | api             | end a waiting job; mark a running one and tell its worker              |
| record   | any             | read what is written about a job                                       |
| follow   | api             | send a job's tokens to one more address                                |
| register | worker          | take a lease                                                           |
| claim    | worker          | read lanes, drop expired, attempt + 1, record who runs it              |
| append   | worker          | fenced: log one engine step, publish its frames                        |
| finish   | worker          | fenced: terminal record, acknowledgement, last message                 |
| beat     | worker          | fenced: renew the lease                                                |
| release  | worker          | fenced: hand a job back                                                |
| leave    | worker          | give the lease up, when nothing is held                                |
| reap     | any             | fence lapsed workers, put their jobs back, expire waiting jobs         |
| rewound  | any             | a new epoch, when the store was found to have lost data                |
| deliver  | api             | note when answers were handed on, for their timing                     |
| ended    | offline         | which of these jobs have ended                                         |
| put_file | api             | the record of a file                                                   |
| put_batch| api             | the record of a batch, due at once                                     |
| steer    | api             | cancel, pause or resume a batch                                        |
| due      | offline         | the batches somebody must be told to work on, each told once           |
| hold     | offline         | take a batch to work on it, unless another does                        |
| reserve  | offline         | fenced: count a batch's tokens against its tenant's quota              |
| save     | offline         | fenced: how far a batch is, its end and the files it leaves            |
| forget   | api, offline    | drop the record of a file or a batch                                   |
| collect  | offline         | take events that nobody has passed on yet                              |
| posted   | offline         | these events are passed on                                             |
| dispatch | offline         | an event becomes a webhook message for each endpoint                   |
| outgoing | offline         | take webhook messages whose time has come                              |
| settle   | offline         | fenced: what came of an attempt to deliver one                         |
| redeliver| api             | a webhook message is sent once more                                    |
| lead     | scheduler       | take or keep the lead, with its epoch                                  |
| plan     | scheduler       | fenced: publish what the leader has decided, tell workers and pools    |
| act      | pools           | fenced: note what is about to be done                                  |
| override | api             | a human's decision about a pool; wake the scheduler                    |
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files

from streaming.keys import lua_prelude

NAMES = (
    "put",
    "cancel",
    "record",
    "follow",
    "register",
    "claim",
    "append",
    "finish",
    "beat",
    "release",
    "leave",
    "reap",
    "rewound",
    "deliver",
    "ended",
    "put_file",
    "put_batch",
    "steer",
    "due",
    "hold",
    "reserve",
    "save",
    "forget",
    "collect",
    "posted",
    "dispatch",
    "outgoing",
    "settle",
    "redeliver",
    "lead",
    "plan",
    "act",
    "override",
)

EACH = """
local answers, at = {}, 1
while at <= #ARGV do
  local last, arguments = at + tonumber(ARGV[at]), {}
  for place = at + 1, last do arguments[place - at] = ARGV[place] end
  local ran, answer = pcall(run, arguments)
  if not ran and type(answer) ~= 'table' then answer = redis.error_reply(answer) end
  answers[#answers + 1], at = answer, last + 1
end
%s
return answers
"""
"""Behind every script: it is given the arguments of one call after the other, each after their number, and answers each
call as if it had come alone."""


@dataclass(frozen=True, slots=True)
class Script:
    """One script as the server runs it."""

    name: str
    source: str
    sha: str


DEFINITION = re.compile(r"^(?=local (?:function )?(\w+))", re.MULTILINE)


def load_scripts() -> dict[str, Script]:
    """Read every script and put in front of it what it uses of the key catalogue and the shared functions."""
    folder = files("streaming") / "lua"
    shared = lua_prelude() + (folder / "prelude.lua").read_text(encoding="utf-8")
    return {name: _script(name, (folder / f"{name}.lua").read_text(encoding="utf-8"), shared) for name in NAMES}


def _script(name: str, text: str, shared: str) -> Script:
    used = _used(text, shared)
    each = EACH % ("do_gathered()" if "function do_gathered" in used else "")
    first, _, rest = text.partition("\n")
    flags, body = (f"{first}\n", rest) if first.startswith("#!") else ("", text)
    source = f"{flags}{used}local function run(ARGV)\n{body}\nend\n{each}"
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


def _used(text: str, shared: str) -> str:
    """The shared definitions that a script names, and what these name. Each runs anew with every call: all of them
    cost as much as a short script does."""
    _, *parts = DEFINITION.split(shared)
    names, used = set(re.findall(r"\w+", text)), []
    for name, definition in zip(parts[-2::-2], parts[-1::-2], strict=True):
        if name in names:
            used.append(definition)
            names.update(re.findall(r"\w+", definition))
    return "".join(reversed(used))
