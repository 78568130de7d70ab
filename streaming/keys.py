"""Keys and channels in Redis: the use, writers and lifetime of every kind, and their names.

The Lua scripts get theirs from here too. Writers: the scripts that create a key or an entry; then those that change or
remove it, without those that fail a malformed job.

All keys of a partition share its hash tag, so one script may touch them all, on one server and on a cluster alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from streaming.order import Priority


@dataclass(frozen=True, slots=True)
class Key:
    """One kind of key. `pattern` is what follows the partition's prefix, `{}` standing for each argument."""

    pattern: str
    kind: str
    """Its type in Redis."""

    @property
    def name(self) -> str:
        return self.pattern.partition(":")[0].replace("-", "_")


ROOT = "penstock:"
"""What every name of ours begins with."""

CATALOGUE = (
    # --- jobs ---------------------------------------------------------------------------------------------------------
    # The record of one job: state, body, attempt, worker, its name, run, all runs, earlier attempts (past), losses,
    # alone, lane, entry, queue (it was put back to it), times (ms, with decimals where they divide its timing), reply
    # addresses, resets (epoch), cancel, abandoned, preview, record (how it ended), rows (what it generated), metadata,
    # its idempotency key, pinned (a request that did not wait was told its id), size (bytes of its request, and the
    # span they are counted in), owed (bytes reserved for it), shared (1: they count against its tenant's share of the
    # store), hold (what it reserved of limits), keep (its retention), order (its cost, its tenant's
    # weight, its patience), draft:<epoch> (texts of a response that were given up), born (the partition's epoch at its
    # acceptance), events and webhook (who is told), the letter of its endpoint, the conversation whose turn it is, its
    # tenant, the reason for which a script ended it, delivered (when its answer was sent), caller (its key's name),
    # media (it has some; keep: also after it has completed).
    # Writers: put, join; claim, decline, release, restart, checkpoint, finish, cancel, reap, salvage, reset, deliver,
    # follow. Lifetime: until retention after its end.
    Key("job:{}", "hash"),
    # By job: the bytes of the images, recordings and documents of its conversation, by their places. Writers: put;
    # finish, cancel, claim, reap, release. Lifetime: until its job's end; if the job failed, or a response may continue
    # it, as the job.
    Key("media:{}", "hash"),
    # By model and priority: ids of accepted jobs that have not ended. Writers: put; finish, cancel, claim, release,
    # decline, reap. Lifetime: for ever; an entry until its job's end.
    Key("lane:{}:{}", "stream"),
    # By model and priority: entries and ids of jobs that were put back, by the Redis time (ms) when they were; claimed
    # before those of the lane. Writers: reap, release; claim, cancel. Lifetime: an entry until its job's claim or end.
    Key("retry:{}:{}", "zset"),
    # By model and priority: tenants with jobs that wait in the lane, by their virtual counter (units of work).
    # Writers: put, decline; claim, finish, cancel, reap, salvage. Lifetime: an entry while its tenant has waiting jobs.
    Key("tenants:{}:{}", "zset"),
    # By length of the model's name, model, priority and tenant: entries and ids of waiting jobs by their latest start
    # (ms). Writers: put, decline; claim, cancel, reap. Lifetime: an entry while its job waits in the lane.
    Key("line:{}:{}:{}:{}", "zset"),
    # By model and priority: entries of waiting jobs, by the Redis time (ms) when they were accepted. Writers: put,
    # decline; claim, cancel, reap. Lifetime: an entry while its job waits in the lane.
    Key("arrivals:{}:{}", "zset"),
    # By model and priority: virtual counters of tenants without waiting jobs, and the virtual time of an empty lane
    # under the empty name. Writers: claim, cancel, reap, finish, salvage. Lifetime: an hour after the last one was
    # noted; an entry until the virtual time has passed it.
    Key("served:{}:{}", "zset"),
    # By model: the credit of each lower lane toward its floor, in parts of a unit of work. Writers: claim; put,
    # decline. Lifetime: an hour after the last claim that changed it.
    Key("credit:{}", "hash"),
    # One worker's lease: state (live, dead, left), model, name, number and time (at) of its last frame, the end it was
    # spared until, and who may not take the places that its last claim left (closed). Writers: register; append, claim,
    # leave, reap. Lifetime: an hour after its end.
    Key("worker:{}", "hash"),
    # Live workers by the Redis time (ms) at which their lease lapses. Writers: register, claim, append, beat; reap,
    # leave. Lifetime: for ever.
    Key("leases", "zset"),
    # The jobs a worker holds. Writers: claim; finish, release, decline, reap. Lifetime: until its worker's end.
    Key("claims:{}", "set"),
    # One entry per engine step of a worker, id <frame number>-0, a field per reply address: the token log. Writers:
    # append. Lifetime: trimmed behind its oldest running job; after its worker's end until the jobs it was lost with
    # have ended, a day at most.
    Key("log:{}", "stream"),
    # By job: frames with everything that its runs generated before a worker put it back, in the form of a worker's
    # log; the record names frame 0 for a run whose deltas are here. Writers: release; finish, salvage, restart.
    # Lifetime: until a minute after its job's end.
    Key("parked:{}", "stream"),
    # By worker: jobs that were lost with it, whose tokens its log has. Writers: reap, release; finish, cancel, claim,
    # salvage, restart. Lifetime: until the last of these jobs has ended, a day at most.
    Key("heirs:{}", "set"),
    # By model: workers with room, by the Redis time (ms) they last said so; put wakes the freshest. Writers: claim;
    # put, release, decline, reap, leave. Lifetime: an entry for a second or two.
    Key("idle:{}", "zset"),
    # By model: workers that would preempt a batch job for one of lane interactive. Writers: as of idle. Lifetime: ten
    # seconds after its newest entry.
    Key("yielding:{}", "zset"),
    # By model: workers without a free place that would hold one more job; put wakes them last. Writers: as of idle.
    # Lifetime: ten seconds after its newest entry.
    Key("prefetching:{}", "zset"),
    # Waiting jobs by the Redis time (ms) after which they expire. Writers: put, decline, release, reap; claim, cancel.
    # Lifetime: an entry until its job's claim or end.
    Key("timers", "zset"),
    # Jobs that wait for their time, by it (Redis ms): they have no place in their lane. Writers: put; reap, cancel.
    # Lifetime: an entry until its time, or the job's end before.
    Key("scheduled", "zset"),
    # By tenant: the same of its jobs, LATER_MS later. Writers: as of scheduled. Lifetime: 31 days after its newest one;
    # an entry as of scheduled, or until the tenant's next one.
    Key("scheduled_of:{}", "zset"),
    # By tenant: job ids by acceptance time (ms). Writers: put. Lifetime: twice the retention after its newest entry;
    # so is each entry.
    Key("jobs:{}", "zset"),
    # By tenant: bytes of the requests of its jobs and conversations (and, after an r, of results), by the second by
    # which they are gone. Writers: put, finish, cancel, claim, reap, salvage, put_conversation, amend_conversation,
    # drop_conversation. Lifetime: until the retention time after its newest entry; so is each field.
    Key("kept:{}", "hash"),
    # By day (UTC, since 1970), tenant, and `model key`, an API key's name: ended requests, tokens of their prompts and
    # answers, and cached ones of prompts, each in 64 bits. Writers: finish, cancel, claim, decline, reap, release,
    # salvage. Lifetime: a hundred days after its first job's end.
    Key("usage:{}:{}:{}", "string"),
    # By day and tenant: the rest of the names of `usage`. Writers: as of usage. Lifetime: a hundred days after its
    # newest entry.
    Key("usage_names:{}:{}", "set"),
    # By day: tenants that have used something. Writers and lifetime: as of usage_names.
    Key("usage_tenants:{}", "set"),
    # By digest of tenant and idempotency key: job id and digest of the body. Writers: put; finish, cancel, claim,
    # reap. Lifetime: as its job: while that waits or runs, then until retention after its end.
    Key("idem:{}", "string"),
    # By model and priority: bytes that unfinished jobs may still write, so that admission leaves room for them.
    # Writers: put; finish, cancel, claim, reap, release. Lifetime: a field while a job of its lane is unfinished.
    Key("owed", "hash"),
    # By tenant: the same of its jobs that count against its share of the store. Writers: put; finish, cancel, claim,
    # reap, release. Lifetime: a field while such a job is unfinished.
    Key("tenant_owed", "hash"),
    # By API key or tenant: what it has used of its limits, and what its unfinished jobs reserve. Writers: put; finish,
    # cancel, claim, reap, release, salvage. Lifetime: forty days after its last change.
    Key("account:{}", "string"),
    # By API key or tenant: ids of the unfinished jobs that its limits count, by whether their clients wait (1). Writers
    # as of account. Lifetime: forty days after its newest entry; an entry until its job's end.
    Key("open:{}", "zset"),
    # By model and priority: as in retry, jobs that lost all but their last worker; each is run alone. Writers: reap,
    # release, decline; claim, cancel. Lifetime: an entry until its job's claim or end.
    Key("suspects:{}:{}", "zset"),
    # By model: the worker that runs suspects now, one at a time and nothing beside them. Writers: claim; beat,
    # decline, leave, reap. Lifetime: a few leases.
    Key("alone:{}", "string"),
    # Grows with every sweep: who sees it smaller than before knows that the store has lost data. Writers: reap,
    # rewound. Lifetime: for ever.
    Key("tick", "string"),
    # Redis time (ms) of the last sweep: after a long gap leases are judged by when they could be renewed. Writers:
    # reap. Lifetime: for ever.
    Key("swept", "string"),
    # Grows when the store was found to have lost data; part of every event id. Writers: rewound. Lifetime: for ever.
    Key("epoch", "string"),
    # Written before each WAIT for a replica, which counts only what its own connection wrote. Writers: mark, at D3.
    # Lifetime: for ever.
    Key("mark", "string"),
    # Jobs that a script ended after a worker had begun them, whose tokens are only in logs, by the Redis time (ms)
    # from which on a sweeping process may store them. Writers: reap, release, cancel, claim, decline; salvage.
    # Lifetime: an entry until the job's tokens are stored, seconds.
    Key("cut", "zset"),
    # Ids of jobs that a script ended, oldest first: the process that takes one writes the record of the request.
    # Writers: reap, release, cancel, claim, decline; reap. Lifetime: a day after the last one; an entry until a
    # sweeping process takes it, seconds; the newest ten thousand.
    Key("script_ends", "list"),
    # Dead letters: entries nobody could read and jobs given up, with the reason. Writers: claim, finish, reap,
    # collect. Lifetime: for ever.
    Key("dead", "stream"),
    # --- conversations ------------------------------------------------------------------------------------------------
    # One conversation: tenant, when it was created, metadata, its items by number (i1, i2...), their last number, the
    # version that grows with each change of items, the job of its turn, its bytes with the span that they are counted
    # in (size). Writers: put_conversation; amend_conversation, put, finish, cancel, claim, reap; drop_conversation.
    # Lifetime: until retention after its last change; in a turn until retention after the end of its job, 62 days at
    # most.
    Key("conversation:{}", "hash"),
    # --- files and batches --------------------------------------------------------------------------------------------
    # One batch of lines: what was asked, its input file, recipients of its events, status, times, progress, due notices
    # (turn, heard), its lease (epoch, lease). Writers: put_batch; steer, due, hold, save, forget. Lifetime: until
    # retention after its end.
    Key("batch:{}", "hash"),
    # By tenant: batch ids by creation time (ms). Writers: put_batch; forget. Lifetime: an entry until its batch is
    # forgotten.
    Key("batches:{}", "zset"),
    # Unfinished batches by the Redis time (ms) at which somebody must be told to work on them. Writers: put_batch,
    # steer, due, hold, save. Lifetime: an entry until its batch's end.
    Key("due", "zset"),
    # By tenant: tokens still to be computed, by batch id. Writers: reserve; save. Lifetime: a field until its batch's
    # end.
    Key("enqueued:{}", "hash"),
    # What a file is. Writers: put_file, save; forget. Lifetime: until it is deleted or expires.
    Key("file:{}", "string"),
    # By tenant: file ids by creation time (ms). Writers: put_file, save; forget. Lifetime: an entry until its file is
    # forgotten.
    Key("files:{}", "zset"),
    # By tenant: its last thousand deleted files, batches and conversation items, and the place of each in its list.
    # Writers: forget, amend_conversation. Lifetime: a day after the last deletion.
    Key("places:{}", "list"),
    # By tenant: bytes that each of its files counts as, by id, also of those that are gone and that batches still work
    # on, and their sum (total). Writers: put_file, put_batch, save; forget. Lifetime: a field until its file is
    # forgotten and the batches made of it have ended.
    Key("sizes:{}", "hash"),
    # By file: batches made of it that have not ended. Writers: put_batch; save, forget. Lifetime: an entry until its
    # batch has ended.
    Key("readers:{}", "set"),
    # Files and ended batches, each with its tenant, by the Redis time (ms) at which they are forgotten; files that are
    # held, by the time at which they are looked at again. Writers: put_file, put_batch, save; forget. Lifetime: an
    # entry until it is forgotten.
    Key("expiring", "zset"),
    # --- events -------------------------------------------------------------------------------------------------------
    # By whom it is for (broker, webhooks): what happened to which job or batch, read through the group. Writers: put,
    # claim, finish, cancel, reap, release, save; dispatch, posted, collect. Lifetime: a week after its newest entry; an
    # entry until it is passed on, a week at most.
    Key("outbox:{}", "stream"),
    # One webhook message for one endpoint: the event, state, attempts, the last answer. Writers: dispatch; outgoing,
    # settle, redeliver. Lifetime: until retention after its end; 31 days after its last attempt at most.
    Key("hook:{}", "hash"),
    # By endpoint: messages by the Redis time (ms) of their next attempt. Writers: dispatch, outgoing, settle,
    # redeliver. Lifetime: 31 days after its newest entry; an entry until its message's end.
    Key("hook_due:{}", "zset"),
    # Webhook messages by the time (ms) of their event. Writers: dispatch. Lifetime: twice the retention after its
    # newest entry; so is each entry.
    Key("hooks", "zset"),
    # By digest of a queue and a message id: how often the message was taken up again without an outcome. Writers:
    # offline processes that take jobs from a broker. Lifetime: until the message has an outcome; a day at most.
    Key("redelivery:{}", "string"),
)
"""Keys of a partition. Each name becomes a function of the Lua scripts: job_key(id), lane_key(model, priority)..."""

FLEET = (
    # What this store is: format, partitions, deployment (a random id), created (Redis time, ms). Writers: identify.
    # Lifetime: for ever.
    Key("store", "hash"),
    # Processes, each as <role>:<its life>, by the Redis time (s) at which they count as gone. Writers: report.
    # Lifetime: for ever; an entry until an hour after its process's end.
    Key("procs", "zset"),
    # By role and life: what a process says of itself; a life is a random id that no other process has, and no other
    # start of the same process. Writers: report. Lifetime: 10 s.
    Key("proc:{}", "string"),
    # Created API keys by id: hash, tenant, rights. Writers: keep_api_key. Lifetime: for ever; revoked ones stay, so
    # that a store that has had keys is not taken for one without.
    Key("api-keys", "hash"),
    # Grows with every change of them. Writers: keep_api_key. Lifetime: for ever.
    Key("api-keys-version", "string"),
    # When each was last used (ms), to a few seconds. Writers: API processes. Lifetime: for ever.
    Key("api-keys-used", "hash"),
    # By kind (acts, refusals): entries of the audit log. Writers: note_audit. Lifetime: for ever; the newest thousands.
    Key("audit:{}", "stream"),
    # Model cards by model name. Writers: card, by a worker that has loaded. Lifetime: for ever.
    Key("card", "hash"),
    # The scheduler that acts, by the name it leads under. Writers: lead. Lifetime: a few seconds.
    Key("leader", "string"),
    # Grows with every new leader; what was decided under an older one is not done any more. Writers: lead. Lifetime:
    # for ever.
    Key("leader-epoch", "string"),
    # By model name: workers wanted, the reason, what to expect. Writers: plan. Lifetime: for ever.
    Key("plan", "hash"),
    # By model (model#shape): seconds from an order to a worker. Writers: plan. Lifetime: for ever.
    Key("cold", "hash"),
    # What was done to the pools, and why. Writers: plan, act, override. Lifetime: the newest thousand.
    Key("actions", "stream"),
    # By pool: how many of its workers each machine is to have, and until when that holds. Writers: share. Lifetime:
    # until no machine follows the pool any more.
    Key("shares:{}", "hash"),
    # By model: a human's decision. Writers: override. Lifetime: until it is ended or its time is over.
    Key("override:{}", "string"),
    # By digest: a session of the console, or a link that opens one once: whose it is, and a seal by the key. Writers:
    # console. Lifetime: an hour for a link, twelve hours for a session.
    Key("console:{}", "string"),
)
"""Keys of the one slot all processes share: functions of the Lua scripts that run there."""

CHANNELS = {
    # Frames and terminals for the responses that one API process holds open.
    "api": "penstock:api:{}",
    # Wake, cancel, follow, cordon and hold messages for one worker.
    "worker": "penstock:worker:{}",
    # A job waits and no worker was there to be woken, or an override has changed.
    "scheduler": "penstock:scheduler:wake",
    # A batch is due now: it is new, its owner has steered it, or a turn at it has ended.
    "offline": "penstock:offline:due",
    # The plan has changed.
    "pools": "penstock:pools:plan",
}


REQUEUED = ("retry", "suspects")
"""The kinds of key in which jobs wait that were put back."""
GROUP = "workers"
"""The consumer group of every outbox."""
FLEET_SLOT = -1
"""The number of the fleet's slot, in the place of a partition's number."""
BROKER = f"{ROOT}celery:"
"""Prefix of all keys of Celery's broker. They hold only reminders, so losing them loses no work."""

_PATTERNS = {key.name: key.pattern for key in (*CATALOGUE, *FLEET)}


@cache
def prefix(partition: int) -> str:
    """Prefix of all keys of a partition, or of the fleet's slot."""
    return f"{ROOT}{{{'fleet' if partition == FLEET_SLOT else partition}}}:"


def partition_key(partition: int, name: str, *args: str) -> str:
    """A key of the catalogue."""
    return prefix(partition) + _PATTERNS[name].format(*args)


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
    return partition_key(FLEET_SLOT, name, *args)


def channel(kind: str, name: str) -> str:
    """A channel of CHANNELS."""
    assert kind in CHANNELS
    return f"{ROOT}{kind}:{name}"


def lua_prelude() -> str:
    """The catalogue as Lua functions. `P` is the prefix of a script's slot, and set before it runs."""
    lines = ["local P = nil", f"local GROUP = '{GROUP}'", f"local CHANNEL = '{ROOT}'"]
    lines.append("local PRIORITIES = {" + ", ".join(f"'{priority}'" for priority in Priority) + "}")
    for key in (*CATALOGUE, *FLEET):
        parts = key.pattern.split("{}")
        args = [f"a{number}" for number in range(len(parts) - 1)]
        body = "P"
        for part, arg in zip(parts, [*args, ""], strict=True):
            body += (f" .. '{part}'" if part else "") + (f" .. {arg}" if arg else "")
        lines.append(f"local function {key.name}_key({', '.join(args)}) return {body} end")
    return "\n".join(lines) + "\n"
