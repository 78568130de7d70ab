"""Script loader: makes one Redis function library of the Lua scripts and the functions that they share.

The server creates the library's functions once, when a process loads it. Functions are global on a server, so the names
carry a digest of the text: processes of several versions use one store, each with its own library.

Each script is atomic within one partition and documented at its head. Those from `identify` on run in the
fleet's hash slot, which all processes share.

Scripts with the flag `allow-oom` also run while the store is full: they finish accepted work, free memory
or renew a worker's lease. Scripts that bring new work (put, put_file, put_batch, put_conversation, amend_conversation,
reserve, redeliver) are refused then. Admission reserves the memory that the others need (`streaming/store/monitor.py`).

| script         | run by                 | what it does in one step                                            |
|----------------|------------------------|---------------------------------------------------------------------|
| put            | api, offline           | accept a job: idempotency, limits, record, lane entry, wake-up      |
| join           | api                    | find the job of an idempotency key without accepting a new one      |
| cancel         | api, offline           | end a waiting job; mark a running one and notify its worker         |
| record         | api, worker, offline   | read a job's record                                                 |
| recent         | api                    | read a page of a tenant's jobs, without bodies and answers          |
| usage          | api, offline           | read a tenant's usage, count the states of a slice of its jobs      |
| stand          | api                    | read a job's state and place, without its body                      |
| waiting        | api                    | list the first waiting jobs of a lane                               |
| lanes          | api, scheduler         | count waiting and running jobs by lane, list the nearest deadlines  |
| ages           | api                    | read since when the next job of each tenant waits, by lane          |
| follow         | api                    | send a job's tokens to one more address                             |
| unfollow       | worker                 | fenced: stop sending jobs' tokens to an address without subscriber  |
| register       | worker                 | take a lease                                                        |
| claim          | worker                 | read lanes, expire overdue jobs, count the attempt, record the run  |
| append         | worker                 | fenced: log one engine step, publish its frames                     |
| finish         | worker                 | fenced: terminal record, acknowledgement, last message              |
| checkpoint     | worker                 | fenced: record the frame from which a run's deltas are read         |
| beat           | worker                 | fenced: renew the lease                                             |
| release        | worker                 | fenced: requeue an unfinished job                                   |
| restart        | worker                 | fenced: restart a job under a new epoch                             |
| decline        | worker                 | fenced: put a job back that only a newer version can read           |
| leave          | worker                 | give up the lease of a worker without jobs                          |
| reap           | api, worker, scheduler | fence lapsed workers, requeue their jobs, expire waiting jobs       |
| fail_malformed | any                    | fail a job whose record cannot be decoded                           |
| salvage        | api, worker, offline   | store the logged tokens of a job that a script ended                |
| rewound        | api, worker, scheduler | begin a new epoch after the store lost data                         |
| reset          | api                    | begin a new epoch of one job's events after deltas were lost        |
| deliver        | api                    | record when answers were delivered, for their timing                |
| ended          | offline                | filter ids: which of these jobs have ended                          |
| put_file       | api                    | store the record of a file                                          |
| put_batch      | api                    | accept a batch, due at once                                         |
| put_conversation | api                  | store a new conversation                                            |
| amend_conversation | api                | add and delete items of a conversation, end its turn                |
| drop_conversation | api                 | delete a conversation                                               |
| steer          | api                    | cancel, pause or resume a batch                                     |
| due            | offline                | list due batches, each with a new notice                            |
| hold           | offline                | take the lease of a batch                                           |
| reserve        | offline                | fenced: reserve a batch's tokens in its tenant's quota              |
| save           | offline                | fenced: save a batch's progress, or its end and its files           |
| forget         | api, offline           | delete the record of a file or a batch                              |
| collect        | offline                | take undelivered events from an outbox                              |
| posted         | offline                | acknowledge delivered events                                        |
| dispatch       | offline                | create a webhook message for each endpoint of an event              |
| outgoing       | offline                | take webhook messages that are due                                  |
| settle         | offline                | fenced: record the outcome of a webhook attempt                     |
| redeliver      | api                    | schedule a webhook message once more                                |
| identify       | any                    | read the store's identity, or write it if there is none             |
| lead           | api, scheduler         | leader election: acquire or renew the lead, with its epoch          |
| plan           | scheduler              | fenced: publish the leader's decisions to workers and pools         |
| act            | scheduler              | fenced: record an action that is about to be taken                  |
| share          | pools                  | fenced: assign one machine its share of a pool's workers            |
| override       | api                    | set or end a manual override of a pool; wake the scheduler          |
| console        | api                    | store or take out a session of the console, or a link to one        |
| mark           | api, worker, offline   | write something, which a replica then confirms with all before it   |
| report         | any                    | heartbeat of a process, with its description                        |
| card           | worker                 | store the model card of a loaded model                              |
| lengths        | worker                 | store the output lengths of a model, unless newer ones are there    |
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from streaming.keys import ROOT, lua_prelude
from streaming.order import lua_constants

SHARED = ("values", "waiting", "endings", "file_costs", "malformed", "claims")
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
    while at <= #arguments do
      local last = at + tonumber(arguments[at])
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


HEAD = re.compile(r"^#!lua name=(\w+)(?: flags=([\w-]+))?\n", re.MULTILINE)
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
    """Build the library. `texts`: the text of every Lua file by its name, with its suffix. In a file of scripts, the
    line `#!lua name=... flags=...` begins each, as in a library of its own."""
    shared = _definitions(lua_prelude() + lua_constants() + "".join(texts[f"{name}.lua"] for name in SHARED))
    scripts = {file: HEAD.split(texts[file])[1:] for file in sorted(texts) if file.removesuffix(".lua") not in SHARED}
    used = {file: _used("".join(parts[2::3]), shared) for file, parts in scripts.items()}
    # Lua allows 200 local names at a time: those that one file alone uses end with its block.
    users = Counter(name for names in (*used.values(), 2 * _used(REGISTER, shared)) for name in names)
    text = _joined(shared, (name for name in shared if users[name] > 1)) + REGISTER
    sources = {}
    for file, parts in scripts.items():
        text += "do\n" + _joined(shared, (name for name in used[file] if users[name] == 1))
        for name, flag, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            flags = f"'{flag}'" if flag else ""
            script = f"register('{name}', {{{flags}}}, function(ARGV)\n{body}\nend)\n"
            text += script
            sources[name] = _joined(shared, _used(body, shared)) + script
        text += "end\n"
    name = LIBRARIES + hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:8]
    return Library(name, f"#!lua name={name}\nlocal LIBRARY = '{name}'\n{text}", sources)


@cache
def _definitions(shared: str) -> Mapping[str, str]:
    """Split the shared text into its definitions by name, in order; each uses only those before it."""
    _, *parts = DEFINITION.split(shared)
    return dict(zip(parts[::2], parts[1::2], strict=True))


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
