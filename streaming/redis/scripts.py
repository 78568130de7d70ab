"""Script loader: reads the Lua scripts that Redis runs, and puts before each the shared functions it uses.

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
| condemn        | cli                    | mark a store as unusable, before it is emptied                      |
| lead           | api, scheduler         | leader election: acquire or renew the lead, with its epoch          |
| plan           | scheduler              | fenced: publish the leader's decisions to workers and pools         |
| act            | scheduler              | fenced: record an action that is about to be taken                  |
| share          | pools                  | fenced: assign one machine its share of a pool's workers            |
| override       | api                    | set or end a manual override of a pool; wake the scheduler          |
| console        | api                    | store or take out a session of the console, or a link to one        |
| report         | any                    | heartbeat of a process, with its description                        |
| card           | worker                 | store the model card of a loaded model                              |
| lengths        | worker                 | store the output lengths of a model, unless newer ones are there    |
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from streaming.keys import lua_prelude
from streaming.order import lua_constants

SHARED = ("values", "waiting", "endings", "file_costs", "malformed", "claims")
"""The files of the functions that scripts share, in `streaming/lua/shared`, without their suffix, in order: each uses
only those before it."""

CALL_LOOP = """
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
"""Appended to every script: runs it once per call of a batch. ARGV holds the number of a call's arguments, then these,
for one call after the other; the answer is a list of one answer, or error, per call."""


@dataclass(frozen=True, slots=True)
class Script:
    """One script as the server runs it."""

    name: str
    source: str
    sha: str


RARE = (
    "begin_turn",
    "count_waiting",
    "dead_letter",
    "end_job",
    "end_turn",
    "fail_malformed",
    "find_by_idempotency_key",
    "has_consumer",
    "is_queued_elsewhere",
    "leave_line",
    "pending_entries",
    "record_fault",
    "release_logs",
    "requeue",
    "tenant_usage",
)
"""Functions that few calls need: a call that does not is spared to create them, and those that they alone use."""

RARE_CALL = """local function {name}(...)
  rare = rare or create_rare()
  return rare.{name}(...)
end

"""

HEAD = re.compile(r"^#!lua name=(\w+)(.*)\n", re.MULTILINE)
COMMENT = re.compile(r"--.*")
WORD = re.compile(r"\w+")
DEFINITION = re.compile(r"^(?=local (?:function )?(\w+))", re.MULTILINE)


@cache
def load_scripts() -> Mapping[str, Script]:
    """Read every script and put in front of it what it uses of the key catalogue and the shared functions."""
    folder = files("streaming") / "lua"
    paths = [*folder.iterdir(), *(folder / "shared").iterdir()]
    return assemble({path.name: path.read_text(encoding="utf-8") for path in paths if path.name.endswith(".lua")})


def assemble(texts: Mapping[str, str]) -> dict[str, Script]:
    """Build the scripts. `texts`: the text of every Lua file by its name, with its suffix. In a file of scripts, the
    line `#!lua name=... flags=...` begins each, as in a Redis function library."""
    shared = "".join(texts[f"{name}.lua"] for name in SHARED)
    scripts = {}
    for file in sorted({file.removesuffix(".lua") for file in texts}.difference(SHARED)):
        _, *parts = HEAD.split(texts[f"{file}.lua"])
        for name, flags, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            scripts[name] = _script(name, flags, text, shared)
    return scripts


def _script(name: str, flags: str, text: str, shared: str) -> Script:
    """Put together a script: the names of keys and constants, and a function with the shared functions and the script's
    own text. Lua creates every function at each call, and finds a variable of the surrounding function fast only if
    that is not the one that is running: so the names have a level of their own."""
    functions, names = _definitions(shared), _definitions(lua_prelude() + lua_constants())
    loop = CALL_LOOP % ("flush_writes()" if "flush_writes" in _used(text, functions) else "")
    run = f"local function run(ARGV)\n{text}\nend\n{loop}"
    script = f"local function script()\n{_functions(run, functions)}{run}end\nreturn script()\n"
    first = f"#!lua{flags}\n" if flags else ""
    source = f"{first}{''.join(names[each] for each in _used(script, names))}{script}"
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


@cache
def _definitions(shared: str) -> Mapping[str, str]:
    """Split the shared text into its definitions by name, in order; each uses only those before it."""
    _, *parts = DEFINITION.split(shared)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _used(text: str, definitions: Mapping[str, str], apart: Collection[str] = ()) -> list[str]:
    """Names of the definitions that a script uses, directly or through others, in order. `apart`: what these use is
    left out.

    Each call creates them: all of them before every script would cost 1.107 times the CPU per token at 16 streams
    (1.012 to 1.173). And a role's rights are read off the scripts (streaming/store/acl.py): every role would get those
    of all functions.
    """
    names, used = set(_words(text)), []
    for name in reversed(list(definitions)):
        if name in names:
            used.append(name)
            names |= _words(definitions[name]) if name not in apart else set()
    return used[::-1]


def _functions(text: str, shared: Mapping[str, str]) -> str:
    """The shared definitions that a script uses. The rare functions, and those that they alone use, are created at the
    first call of one of them; variables are created before, so that there is one of each."""
    used = _used(text, shared)
    variables = "".join(shared[name] for name in used if not shared[name].startswith("local function"))
    common = _used(text + variables, shared, apart=RARE)
    if not (rare := [name for name in common if name in RARE]):
        return "".join(shared[name] for name in common)
    calls = {name: RARE_CALL.format(name=name) for name in rare}
    outer = "".join(calls.get(name) or shared[name] for name in common)
    inner = "".join(shared[name] for name in used if name in rare or name not in common)
    table = ", ".join(f"{name} = {name}" for name in rare)
    return f"local rare, create_rare = nil, nil\n{outer}function create_rare()\n{inner}return {{{table}}}\nend\n"


@cache
def _words(text: str) -> frozenset[str]:
    """Every identifier of a piece of Lua, without its comments, whose words may be a function's name by chance."""
    return frozenset(WORD.findall(COMMENT.sub("", text)))
