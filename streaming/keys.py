"""Every name Penstock uses in Redis: the only file that spells one. The Lua scripts get theirs from here too.

All keys of a partition share its hash tag, so one script may touch them all, on one server and on a cluster alike.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from streaming.messages import Priority

ROOT = "penstock:"
GROUP = "workers"
"""The consumer group of every lane; a consumer is a worker's lease id."""

KEPT_ID = re.compile(r"(?:file-|batch_|msg_)([0-9a-f]{2})[0-9a-f]{30}")


@dataclass(frozen=True, slots=True)
class Key:
    """One kind of key. `pattern` is what follows the partition's prefix, `{}` standing for each argument."""

    name: str
    pattern: str
    kind: str
    owner: str
    lifetime: str
    meaning: str


CATALOGUE = (
    Key(
        "job",
        "job:{}",
        "hash",
        "put; claim, finish, cancel, reap, deliver",
        "until retention after its end",
        "the record of one job: state, body, attempt, worker, lane, entry, times (ms, with decimals where they divide "
        "its timing), reply addresses, runs, record, when its answer was delivered",
    ),
    Key(
        "lane",
        "lane:{}:{}",
        "stream",
        "put",
        "for ever; an entry until its job's end",
        "by model and priority: ids of accepted jobs, read through the group",
    ),
    Key(
        "retry",
        "retry:{}:{}",
        "stream",
        "reap, release",
        "for ever; an entry until its job's end",
        "by model and priority: ids of jobs whose worker was lost; read before the lane",
    ),
    Key(
        "worker",
        "worker:{}",
        "hash",
        "register; append",
        "an hour after its end",
        "one worker's lease: state (live, dead, left), model, number of its last frame, the end it was spared until",
    ),
    Key(
        "leases",
        "leases",
        "zset",
        "register, append, beat; reap",
        "for ever",
        "live workers by the Redis time (ms) at which their lease lapses",
    ),
    Key("claims", "claims:{}", "set", "claim; finish, reap", "until its worker's end", "the jobs a worker holds"),
    Key(
        "log",
        "log:{}",
        "stream",
        "append",
        "trimmed behind its oldest running job; a day after its worker's end",
        "one entry per engine step of a worker, id <frame number>-0, a field per reply address: the token log",
    ),
    Key(
        "idle",
        "idle:{}",
        "zset",
        "claim; put",
        "an entry for a second or two",
        "by model: workers with room, by the Redis time (ms) they last said so; put wakes the freshest",
    ),
    Key(
        "timers",
        "timers",
        "zset",
        "put; claim, reap",
        "an entry until its job's claim or end",
        "waiting jobs by the Redis time (ms) after which they expire",
    ),
    Key(
        "jobs",
        "jobs:{}",
        "zset",
        "put; list",
        "an entry until its job is forgotten",
        "by tenant: job ids by acceptance time (ms)",
    ),
    Key(
        "idem",
        "idem:{}:{}",
        "string",
        "put",
        "retention",
        "by tenant and idempotency key: job id and digest of the body",
    ),
    Key(
        "suspects",
        "suspects:{}:{}",
        "stream",
        "reap",
        "for ever; an entry until its job's end",
        "by model and priority: ids of jobs that lost all but their last worker; each is run alone",
    ),
    Key(
        "alone",
        "alone:{}",
        "string",
        "claim",
        "a few leases",
        "by model: the worker that runs suspects now, one at a time and nothing beside them",
    ),
    Key(
        "tick",
        "tick",
        "string",
        "reap",
        "for ever",
        "grows with every sweep: who sees it smaller than before knows that the store has lost data",
    ),
    Key(
        "swept",
        "swept",
        "string",
        "reap",
        "for ever",
        "Redis time (ms) of the last sweep: after a long gap leases are judged by when they could be renewed",
    ),
    Key(
        "epoch",
        "epoch",
        "string",
        "rewound",
        "for ever",
        "grows when the store was found to have lost data; part of every event id",
    ),
    Key(
        "mark",
        "mark",
        "string",
        "the wire, at D3",
        "for ever",
        "written before each WAIT for a replica, which counts only what its own connection wrote",
    ),
    Key(
        "dead",
        "dead",
        "stream",
        "claim, reap",
        "for ever",
        "dead letters: entries nobody could read and jobs given up, with the reason",
    ),
    Key(
        "batch",
        "batch:{}",
        "hash",
        "put_batch; steer, due, hold, save, reserve",
        "until retention after its end",
        "one batch of lines: what was asked, status, progress, tellings (turn, heard), who works on it (epoch, lease)",
    ),
    Key(
        "batches",
        "batches:{}",
        "zset",
        "put_batch; forget",
        "an entry until its batch is forgotten",
        "by tenant: batch ids by creation time (ms)",
    ),
    Key(
        "due",
        "due",
        "zset",
        "put_batch, steer, due, hold, save",
        "an entry until its batch's end",
        "unfinished batches by the Redis time (ms) at which somebody must be told to work on them",
    ),
    Key(
        "enqueued",
        "enqueued:{}",
        "hash",
        "reserve; save",
        "a field until its batch's end",
        "by tenant: tokens still to be computed, by batch id",
    ),
    Key("file", "file:{}", "string", "put_file, save; forget", "until it is deleted or expires", "what a file is"),
    Key(
        "files",
        "files:{}",
        "zset",
        "put_file, save; forget",
        "an entry until its file is forgotten",
        "by tenant: file ids by creation time (ms)",
    ),
    Key(
        "expiring",
        "expiring",
        "zset",
        "put_file, save; forget",
        "an entry until it is forgotten",
        "files and ended batches by the Redis time (ms) at which they are forgotten",
    ),
    Key(
        "outbox",
        "outbox:{}",
        "stream",
        "put, claim, finish, cancel, reap, release, save; dispatch, posted",
        "for ever; an entry until it is passed on",
        "by whom it is for (broker, webhooks): what happened to which job or batch, read through the group",
    ),
    Key(
        "hook",
        "hook:{}",
        "hash",
        "dispatch; outgoing, settle, redeliver",
        "until retention after its end",
        "one webhook message for one endpoint: the event, state, attempts, the last answer",
    ),
    Key(
        "hook_due",
        "hook_due:{}",
        "zset",
        "dispatch, outgoing, settle, redeliver",
        "an entry until its message's end",
        "by endpoint: messages by the Redis time (ms) of their next attempt",
    ),
    Key(
        "hooks",
        "hooks",
        "zset",
        "dispatch; list",
        "an entry until its message is forgotten",
        "webhook messages by the time (ms) of their event",
    ),
)
"""Keys of a partition. Each name becomes a function of the Lua scripts: job_key(id), lane_key(model, priority)..."""

CHANNELS = {
    "api": "penstock:api:{}: frames and terminals for the responses one API process holds open",
    "worker": "penstock:worker:{}: wake, cancel, follow, cordon and hold messages for one worker",
    "scheduler": "penstock:scheduler:wake: a job waits and no worker was there to be woken, or an override has changed",
    "pools": "penstock:pools:plan: the plan has changed",
}

FLEET = (
    Key(
        "procs", "procs", "zset", "report", "for ever", "process ids by the Redis time (s) at which they count as gone"
    ),
    Key("proc", "proc:{}", "string", "report", "10 s", "by process id: what a process says of itself"),
    Key("card", "card", "hash", "a worker that has loaded", "for ever", "model cards by model name"),
    Key("leader", "leader", "string", "lead", "a few seconds", "the scheduler that acts, by the name it leads under"),
    Key(
        "leader_epoch",
        "leader-epoch",
        "string",
        "lead",
        "for ever",
        "grows with every new leader; what was decided under an older one is not done any more",
    ),
    Key("plan", "plan", "hash", "plan", "for ever", "by model name: workers wanted, the reason, what to expect"),
    Key(
        "cold",
        "cold",
        "hash",
        "plan",
        "for ever",
        "by model (model#shape): seconds from an order to a worker",
    ),
    Key(
        "actions",
        "actions",
        "stream",
        "plan, act, override",
        "the newest thousand",
        "what was done to the pools, and why",
    ),
    Key(
        "override",
        "override:{}",
        "string",
        "override",
        "until it is ended or its time is over",
        "by model: a human's decision",
    ),
)
"""Keys of the one slot all processes share: functions of the Lua scripts that run there."""

FLEET_SLOT = -1
"""Stands for that slot where otherwise a partition's number stands."""


BROKER = f"{ROOT}celery:"
"""What the names of all keys of Celery's broker begin with. They hold reminders, never work: all of it may be lost."""


def prefix(partition: int) -> str:
    """What all keys of a partition, or of the fleet's slot, begin with."""
    return f"{ROOT}{{{'fleet' if partition == FLEET_SLOT else partition}}}:"


def partition_key(partition: int, name: str, *args: str) -> str:
    """A key of the catalogue."""
    return prefix(partition) + _pattern(CATALOGUE, name).format(*args)


def parse_lane(key: str) -> tuple[str, Priority]:
    """The model and the priority of a lane, or of one its jobs were put back to, by its key."""
    model, _, priority = key.split(":", 3)[3].rpartition(":")
    return model, Priority(priority)


def fleet_key(name: str, *args: str) -> str:
    """A key of FLEET."""
    return prefix(FLEET_SLOT) + _pattern(FLEET, name).format(*args)


def _pattern(keys: Iterable[Key], name: str) -> str:
    return next(key.pattern for key in keys if key.name == name)


def channel(kind: str, name: str) -> str:
    """A channel of CHANNELS."""
    assert kind in CHANNELS
    return f"{ROOT}{kind}:{name}"


JOB_ID = re.compile(r"job_([0-9a-f]{2})[0-9a-f]{30}")


def new_job_id(partition: int) -> str:
    """128 bits nobody can guess but for the first byte, which is the partition: an id alone leads to its keys."""
    return f"job_{partition:02x}{secrets.token_hex(15)}"


def partition_of(job_id: str) -> int | None:
    """The partition an id names, or None if it is not an id of ours."""
    found = JOB_ID.fullmatch(job_id)
    return int(found[1], 16) if found else None


def tenant_partition(tenant: str, partitions: int) -> int:
    """Where a tenant's files and batches are, all in one partition: they are listed and counted together."""
    return int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:4]) % partitions


def new_file_id(partition: int) -> str:
    """As a job's."""
    return f"file-{partition:02x}{secrets.token_hex(15)}"


def new_batch_id(partition: int, seed: str = "") -> str:
    """As a job's; the same for the same seed, which nobody but its owner may know."""
    rest = hashlib.sha256(seed.encode()).hexdigest()[:30] if seed else secrets.token_hex(15)
    return f"batch_{partition:02x}{rest}"


def line_job_id(batch_id: str, line: int, attempt: int, partitions: int) -> str:
    """The job of one line of a batch, the same whoever asks: to put it again changes nothing. Nobody who does not
    know the batch's id can guess it."""
    digest = hashlib.sha256(f"{batch_id}:{line}:{attempt}".encode())
    return f"job_{digest.digest()[-1] % partitions:02x}{digest.hexdigest()[:30]}"


def message_id(partition: int, event_id: str, endpoint: str) -> str:
    """A webhook message, the same whoever makes it: an event is made into one message for each endpoint."""
    return f"msg_{partition:02x}{hashlib.sha256(f'{event_id}:{endpoint}'.encode()).hexdigest()[:30]}"


def kept_partition(kept_id: str) -> int | None:
    """The partition the id of a file, a batch or a webhook message names, or None if it is none of these."""
    found = KEPT_ID.fullmatch(kept_id)
    return int(found[1], 16) if found else None


def lua_prelude() -> str:
    """The catalogue as Lua functions over `P`, the prefix of the slot a script runs in."""
    lines = ["local P = KEYS[1]", f"local GROUP = '{GROUP}'", f"local CHANNEL = '{ROOT}'"]
    lines.append("local PRIORITIES = {" + ", ".join(f"'{priority}'" for priority in Priority) + "}")
    for key in (*CATALOGUE, *FLEET):
        parts = key.pattern.split("{}")
        args = [f"a{number}" for number in range(len(parts) - 1)]
        body = "P"
        for part, arg in zip(parts, [*args, ""], strict=True):
            body += (f" .. '{part}'" if part else "") + (f" .. {arg}" if arg else "")
        lines.append(f"local function {key.name}_key({', '.join(args)}) return {body} end")
    return "\n".join(lines) + "\n"
