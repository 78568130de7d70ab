"""Every name Penstock uses in Redis: the only file that spells one. The Lua scripts get theirs from here too.

All keys of a partition share its hash tag, so one script may touch them all, on one server and on a cluster alike.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from streaming.priority import Priority

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
        "put; claim, restart, checkpoint, finish, cancel, reap, reset, deliver, follow, unfollow",
        "until retention after its end",
        "the record of one job: state, body, attempt, worker, run, lane, entry, times (ms, with decimals where they "
        "divide its timing), reply addresses, runs, resets (epoch), record, when its answer was delivered, its "
        "idempotency key, whether a request that did not wait was told its id (pinned); for lists its metadata, and a "
        "summary: the record without its rows; the bytes of its request with the span they are counted in (size)",
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
        "trimmed behind its oldest running job; after its worker's end until the jobs it was lost with have ended, "
        "a day at most",
        "one entry per engine step of a worker, id <frame number>-0, a field per reply address: the token log",
    ),
    Key(
        "heirs",
        "heirs:{}",
        "set",
        "reap, release; finish, cancel, claim",
        "until the last of these jobs has ended, a day at most",
        "by worker: jobs that were put back while it held them, whose tokens its log has",
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
        "twice the retention after its newest entry; so is each entry",
        "by tenant: job ids by acceptance time (ms)",
    ),
    Key(
        "kept",
        "kept:{}",
        "hash",
        "put, finish, cancel, claim, reap",
        "until the retention time after its newest entry; so is each field",
        "by tenant: bytes of the requests (and, after an r, results) of its jobs, by the second by which they are gone",
    ),
    Key(
        "idem",
        "idem:{}",
        "string",
        "put; finish, cancel, reap",
        "as its job: while that waits or runs, then until retention after its end",
        "by digest of tenant and idempotency key: job id and digest of the body",
    ),
    Key(
        "owed",
        "owed",
        "hash",
        "put; finish, cancel, claim, reap, release",
        "a field while a job of its lane is unfinished",
        "by model and priority: bytes that unfinished jobs may still write, so that admission leaves room for them",
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
        "sizes",
        "sizes:{}",
        "hash",
        "put_file, save; forget",
        "a field until its file is forgotten",
        "by tenant: bytes that each of its files counts as, by id, and their sum (total)",
    ),
    Key(
        "readers",
        "readers:{}",
        "set",
        "put_batch; save, forget",
        "an entry until its batch has ended",
        "by file: batches made of it that have not ended",
    ),
    Key(
        "held",
        "held:{}",
        "hash",
        "put_batch, forget; save",
        "a field until the batches made of its file have ended",
        "by tenant: bytes that files count as that are gone and that batches still work on, and their sum (total)",
    ),
    Key(
        "expiring",
        "expiring",
        "zset",
        "put_file, put_batch, save; forget",
        "an entry until it is forgotten",
        "files and ended batches, each with its tenant, by the Redis time (ms) at which they are forgotten; files that "
        "are held, by the time at which they are looked at again",
    ),
    Key(
        "outbox",
        "outbox:{}",
        "stream",
        "put, claim, finish, cancel, reap, release, save; dispatch, posted",
        "a week after its newest entry; an entry until it is passed on, a week at most",
        "by whom it is for (broker, webhooks): what happened to which job or batch, read through the group",
    ),
    Key(
        "hook",
        "hook:{}",
        "hash",
        "dispatch; outgoing, settle, redeliver",
        "until retention after its end; 31 days after its last attempt at most",
        "one webhook message for one endpoint: the event, state, attempts, the last answer",
    ),
    Key(
        "hook_due",
        "hook_due:{}",
        "zset",
        "dispatch, outgoing, settle, redeliver",
        "31 days after its newest entry; an entry until its message's end",
        "by endpoint: messages by the Redis time (ms) of their next attempt",
    ),
    Key(
        "hooks",
        "hooks",
        "zset",
        "dispatch; list",
        "twice the retention after its newest entry; so is each entry",
        "webhook messages by the time (ms) of their event",
    ),
    Key(
        "redelivery",
        "redelivery:{}",
        "string",
        "whoever takes jobs from a broker",
        "until the message has an outcome; a day at most",
        "by digest of a queue and a message id: how often the message was taken up again without an outcome",
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
        "store",
        "store",
        "hash",
        "identify",
        "for ever",
        "what this store is: format, partitions, deployment (a random id), created (Redis time, ms)",
    ),
    Key(
        "procs",
        "procs",
        "zset",
        "report",
        "for ever; an entry until an hour after its process's end",
        "processes, each as <role>:<its life>, by the Redis time (s) at which they count as gone",
    ),
    Key(
        "proc",
        "proc:{}",
        "string",
        "report",
        "10 s",
        "by role and life: what a process says of itself; a life is a random id that no other process has, and no "
        "other start of the same process",
    ),
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
        "shares",
        "shares:{}",
        "hash",
        "share",
        "until no machine follows the pool any more",
        "by pool: how many of its workers each machine is to have, and until when that holds",
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


def fixed_keys(partition: int) -> list[str]:
    """The keys of a partition, or of the fleet's slot, whose names have no arguments."""
    catalogue = FLEET if partition == FLEET_SLOT else CATALOGUE
    return [prefix(partition) + key.pattern for key in catalogue if "{}" not in key.pattern]


def kind_of(key: str) -> str:
    """The kind of a key by its name, which need not be one of this version's; "" for a name of another form."""
    parts = key.split(":", 3)
    return parts[2] if len(parts) > 2 and parts[1].startswith("{") else ""


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


def joined(*names: str) -> str:
    """Several names as one, injectively: each stands behind its length, so different names never give the same text."""
    return "".join(f"{len(name)}:{name}" for name in names)


def idempotency_digest(tenant: str, key: str) -> str:
    """What a tenant's idempotency key is stored under (hexadecimal): no other tenant or key leads there."""
    return hashlib.sha256(joined(tenant, key).encode()).hexdigest()[:32]


def digest_partition(digest: str, partitions: int) -> int:
    """The partition of the job an idempotency key leads to: equal keys must meet in one place."""
    return int(digest[:8], 16) % partitions


def new_life() -> str:
    """Names one process from its start to its end. Two machines may run processes of the same name."""
    return secrets.token_hex(8)


def new_deployment_id() -> str:
    """Names one deployment: the store has it, and the folder of its files."""
    return f"dep_{secrets.token_hex(16)}"


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


def replay_job_id(letter_id: str, job_id: str) -> str:
    """The job that replaying a dead letter makes of `job_id`, in its partition: the same for every replay."""
    return f"{job_id[:6]}{hashlib.sha256(f'{letter_id}:{job_id}'.encode()).hexdigest()[:30]}"


def message_id(partition: int, event_id: str, endpoint: str) -> str:
    """A webhook message, the same whoever makes it: an event is made into one message for each endpoint."""
    return f"msg_{partition:02x}{hashlib.sha256(f'{event_id}:{endpoint}'.encode()).hexdigest()[:30]}"


def kept_partition(kept_id: str) -> int | None:
    """The partition the id of a file, a batch or a webhook message names, or None if it is none of these."""
    found = KEPT_ID.fullmatch(kept_id)
    return int(found[1], 16) if found else None


def lua_prelude() -> str:
    """The catalogue as Lua functions over `P`, the prefix of the slot a script runs in. They say KEYS[1] for it: each
    call of a script makes its functions anew, and one that uses no local of the script's is the cheapest to make."""
    lines = ["local P = KEYS[1]", f"local GROUP = '{GROUP}'", f"local CHANNEL = '{ROOT}'"]
    lines.append("local PRIORITIES = {" + ", ".join(f"'{priority}'" for priority in Priority) + "}")
    for key in (*CATALOGUE, *FLEET):
        parts = key.pattern.split("{}")
        args = [f"a{number}" for number in range(len(parts) - 1)]
        body = "KEYS[1]"
        for part, arg in zip(parts, [*args, ""], strict=True):
            body += (f" .. '{part}'" if part else "") + (f" .. {arg}" if arg else "")
        lines.append(f"local function {key.name}_key({', '.join(args)}) return {body} end")
    return "\n".join(lines) + "\n"
