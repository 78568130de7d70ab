"""The Lua scripts of the wire: each atomic within one partition, each documented at the head of its file.
The last nine run in the slot all processes share.

Scripts that begin with `#!lua flags=allow-oom` run while the store is full too. They are those that finish what was
accepted, give room back or keep a worker's hold on its jobs; what brings new work (put, put_file, put_batch, reserve,
redeliver) is refused then. Admission leaves room for what the others write (`streaming/store/memory.py`).

| script         | run by                 | what it does in one step                                            |
|----------------|------------------------|---------------------------------------------------------------------|
| put            | api, offline           | idempotency, room, record, lane entry, wake a worker                |
| join           | api                    | the job an idempotency key leads to, where nothing new is accepted  |
| cancel         | api, offline           | end a waiting job; mark a running one and tell its worker           |
| record         | api, worker, offline   | read what is written about a job                                    |
| recent         | api                    | a page of a tenant's jobs, without their bodies and answers         |
| usage          | api, offline           | what a tenant keeps, and how a slice of its jobs stands             |
| stand          | api                    | where a job stands, without its body                                |
| waiting        | api                    | the first jobs of a lane that wait                                  |
| lanes          | api, scheduler         | what waits and runs in every lane, and the nearest deadlines        |
| follow         | api                    | send a job's tokens to one more address                             |
| unfollow       | worker                 | fenced: send jobs' tokens no more to an address nobody listens at   |
| register       | worker                 | take a lease                                                        |
| claim          | worker                 | read lanes, drop expired, attempt + 1, record who runs it           |
| append         | worker                 | fenced: log one engine step, publish its frames                     |
| finish         | worker                 | fenced: terminal record, acknowledgement, last message              |
| checkpoint     | worker                 | fenced: the frame from which a run's deltas are read                |
| beat           | worker                 | fenced: renew the lease                                             |
| release        | worker                 | fenced: hand a job back                                             |
| restart        | worker                 | fenced: begin a job anew, under a new epoch                         |
| decline        | worker                 | fenced: put a job back that only a newer version can read           |
| leave          | worker                 | give the lease up, when nothing is held                             |
| reap           | api, worker, scheduler | fence lapsed workers, put their jobs back, expire waiting jobs      |
| fail_malformed | any                    | fail a job whose record cannot be read                              |
| rewound        | api, worker, scheduler | a new epoch, when the store was found to have lost data             |
| reset          | api                    | a new epoch of one job's events, when a reader saw what is lost     |
| deliver        | api                    | note when answers were handed on, for their timing                  |
| ended          | offline                | which of these jobs have ended                                      |
| put_file       | api                    | the record of a file                                                |
| put_batch      | api                    | the record of a batch, due at once                                  |
| steer          | api                    | cancel, pause or resume a batch                                     |
| due            | offline                | the batches somebody must be told to work on, each told once        |
| hold           | offline                | take a batch to work on it, unless another does                     |
| reserve        | offline                | fenced: count a batch's tokens against its tenant's quota           |
| save           | offline                | fenced: how far a batch is, its end and the files it leaves         |
| forget         | api, offline           | drop the record of a file or a batch                                |
| collect        | offline                | take events that nobody has passed on yet                           |
| posted         | offline                | these events are passed on                                          |
| dispatch       | offline                | an event becomes a webhook message for each endpoint                |
| outgoing       | offline                | take webhook messages whose time has come                           |
| settle         | offline                | fenced: what came of an attempt to deliver one                      |
| redeliver      | api                    | a webhook message is sent once more                                 |
| identify       | any                    | read what this store is, or write it if nobody has yet              |
| condemn        | cli                    | mark a store as one nobody may use, before it is emptied            |
| lead           | api, scheduler         | take or keep the lead, with its epoch                               |
| plan           | scheduler              | fenced: publish what the leader has decided, tell workers and pools |
| act            | scheduler              | fenced: note what is about to be done                               |
| share          | pools                  | fenced: how many workers of a pool one machine is to have           |
| override       | api                    | a human's decision about a pool; wake the scheduler                 |
| report         | any                    | what a process says of itself                                       |
| card           | worker                 | what a worker found when it loaded a model                          |
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from importlib.resources import files

from streaming.keys import lua_prelude

NAMES = (
    "put",
    "join",
    "cancel",
    "record",
    "recent",
    "usage",
    "stand",
    "waiting",
    "lanes",
    "follow",
    "unfollow",
    "register",
    "claim",
    "append",
    "finish",
    "checkpoint",
    "beat",
    "release",
    "restart",
    "decline",
    "leave",
    "reap",
    "rewound",
    "reset",
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
    "fail_malformed",
    "identify",
    "condemn",
    "lead",
    "plan",
    "act",
    "share",
    "override",
    "report",
    "card",
)

SHARED = "prelude"
"""The file of the functions that scripts share."""

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


RARE = (
    "post",
    "emit",
    "dead_letter",
    "disown",
    "end_job",
    "free_key",
    "given_to",
    "fail_malformed",
    "job_of_key",
    "kept_by",
    "fault_of",
)
"""Shared functions that most calls never reach. A call that makes all shared functions anew takes about a tenth longer
than one that makes only those it needs, so these, and what only they use, are made when one of them is called."""
STUB = "local function %s(...) return rarely('%s', ...) end\n"
RARELY = """local rare = nil
rarely = function(name, ...)
  if not rare then
%s
  rare = {%s}
  end
  return rare[name](...)
end
"""
COMMENT = re.compile(r"--.*")
WORD = re.compile(r"\w+")
DEFINITION = re.compile(r"^(?=local (?:function )?(\w+))", re.MULTILINE)


def load_scripts() -> dict[str, Script]:
    """Read every script and put in front of it what it uses of the key catalogue and the shared functions."""
    folder = files("streaming") / "lua"
    return assemble({f"{name}.lua": (folder / f"{name}.lua").read_text(encoding="utf-8") for name in (*NAMES, SHARED)})


def assemble(texts: Mapping[str, str]) -> dict[str, Script]:
    """The scripts from the texts of all files, by the file's name."""
    shared = lua_prelude() + texts[f"{SHARED}.lua"]
    return {name: _script(name, texts[f"{name}.lua"], shared) for name in NAMES}


def _script(name: str, text: str, shared: str) -> Script:
    definitions = _definitions(shared)
    used = _used(text, definitions)
    gathers = "do_gathered" in used
    each = EACH % ("do_gathered()" if gathers else "")
    core = _used(text + each, definitions, beyond=frozenset(RARE))
    front = _front(core, used, definitions)
    first, _, rest = text.partition("\n")
    flags, body = (f"{first}\n", rest) if first.startswith("#!") else ("", text)
    source = f"{flags}{front}local function run(ARGV)\n{body}\nend\n{each}"
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


def _definitions(shared: str) -> dict[str, str]:
    """The shared definitions by name, in order; each uses only those before it."""
    _, *parts = DEFINITION.split(shared)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _used(text: str, definitions: Mapping[str, str], beyond: Set[str] = frozenset()) -> list[str]:
    """Names of the definitions that a script names, and that these name, in order; but not what those `beyond` name."""
    names, used = _words(text), []
    for name in reversed(list(definitions)):
        if name in names:
            used.append(name)
            if name not in beyond:
                names |= _words(definitions[name])
    return used[::-1]


def _words(text: str) -> set[str]:
    """What a piece of Lua may name. Its comments do not: a word of theirs may be a function's name by chance."""
    return set(WORD.findall(COMMENT.sub("", text)))


def _front(core: Sequence[str], used: Sequence[str], definitions: Mapping[str, str]) -> str:
    """The shared definitions of a script: those of its usual way, and behind them, made when the first is called, RARE
    ones with what only they use."""
    later = [name for name in used if name not in core or name in RARE]
    stubs = {name: STUB % (name, name) for name in core if name in RARE}
    front = "".join(stubs.get(name, definitions[name]) for name in core)
    if not stubs:
        return front
    bundle = "".join(definitions[name] for name in later)
    return "local rarely = nil\n" + front + RARELY % (bundle, ", ".join(f"{name} = {name}" for name in stubs))
