"""Catalogue: every kind of key and channel that Penstock has in Redis, who writes it, how long it lives, its use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Key:
    """One kind of key. `pattern` is what follows the partition's prefix, `{}` standing for each argument."""

    name: str
    pattern: str
    kind: str
    owner: str
    lifetime: str
    meaning: str


JOBS = (
    Key(
        "job",
        "job:{}",
        "hash",
        "put; claim, restart, checkpoint, finish, cancel, reap, salvage, reset, deliver, follow, unfollow",
        "until retention after its end",
        "the record of one job: state, body, attempt, worker, its name, run, earlier attempts (past), lane, entry, "
        "times (ms, with decimals where they divide its timing), reply addresses, runs, resets (epoch), record, when "
        "its answer was delivered, its idempotency key, whether a request that did not wait was told its id (pinned); "
        "for lists its metadata, and a summary: the record without its rows; the bytes of its request with the span "
        "they are counted in (size); what it costs, its tenant's weight and its patience (order); the texts of a "
        "response that were given up (draft:<epoch>), and the epoch of the partition when it was accepted (born); the "
        "letter of its endpoint, and the conversation whose turn it is",
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
        "tenants",
        "tenants:{}:{}",
        "zset",
        "put, decline; claim, finish, cancel, reap",
        "an entry while its tenant has waiting jobs",
        "by model and priority: tenants with jobs that wait in the lane, by their virtual counter (units of work)",
    ),
    Key(
        "line",
        "line:{}:{}:{}:{}",
        "zset",
        "put, decline; claim, cancel, reap",
        "an entry while its job waits in the lane",
        "by length of the model's name, model, priority and tenant: entries and ids of waiting jobs by their latest "
        "start (ms)",
    ),
    Key(
        "arrivals",
        "arrivals:{}:{}",
        "zset",
        "put, decline; claim, cancel, reap",
        "an entry while its job waits in the lane",
        "by model and priority: entries of waiting jobs, by the Redis time (ms) when they were accepted",
    ),
    Key(
        "served",
        "served:{}:{}",
        "zset",
        "claim, cancel, reap, finish",
        "an hour after the last one was noted; an entry until the virtual time has passed it",
        "by model and priority: virtual counters of tenants without waiting jobs, and the virtual time of an empty "
        "lane under the empty name",
    ),
    Key(
        "credit",
        "credit:{}",
        "hash",
        "claim; put, decline",
        "an hour after the last claim that changed it",
        "by model: the credit of each lower lane toward its floor, in parts of a unit of work",
    ),
    Key(
        "repairs",
        "repairs",
        "hash",
        "reap",
        "an hour; a field until the lane has been read to its end",
        "by model and priority: the entry of a lane up to which its index has been repaired",
    ),
    Key(
        "worker",
        "worker:{}",
        "hash",
        "register; append",
        "an hour after its end",
        "one worker's lease: state (live, dead, left), model, name, number of its last frame, the end it was spared "
        "until, and for whom the places are not that its last claim has left",
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
        "parked",
        "parked:{}",
        "stream",
        "release; finish, salvage, restart",
        "until a minute after its job's end",
        "by job: frames with everything that its runs generated before a worker put it back, in the form of a worker's "
        "log; the record names frame 0 for a run whose deltas are here",
    ),
    Key(
        "heirs",
        "heirs:{}",
        "set",
        "reap, release; finish, cancel, claim",
        "until the last of these jobs has ended, a day at most",
        "by worker: jobs that were lost with it, whose tokens its log has",
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
        "yielding",
        "yielding:{}",
        "zset",
        "claim; put",
        "ten seconds after its newest entry",
        "by model: workers that would preempt a batch job for one of lane interactive, as in idle",
    ),
    Key(
        "prefetching",
        "prefetching:{}",
        "zset",
        "claim; put",
        "ten seconds after its newest entry",
        "by model: workers without a free place that would hold one more job, as in idle; put wakes them last",
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
        "RedisClient, at D3",
        "for ever",
        "written before each WAIT for a replica, which counts only what its own connection wrote",
    ),
    Key(
        "cut",
        "cut",
        "zset",
        "reap, release, cancel, claim, decline; salvage",
        "an entry until the job's tokens are stored, seconds",
        "jobs that a script ended after a worker had begun them, whose tokens are only in logs, by the Redis time (ms) "
        "from which on a sweeping process may store them",
    ),
    Key(
        "script_ends",
        "script_ends",
        "list",
        "reap, release, cancel, claim, decline; reap",
        "a day after the last one; an entry until a sweeping process takes it, seconds; the newest ten thousand",
        "ids of jobs that a script ended, oldest first: the process that takes one writes the record of the request",
    ),
    Key(
        "dead",
        "dead",
        "stream",
        "claim, reap",
        "for ever",
        "dead letters: entries nobody could read and jobs given up, with the reason",
    ),
)


CONVERSATIONS = (
    Key(
        "conversation",
        "conversation:{}",
        "hash",
        "put_conversation; amend_conversation, put, finish, cancel, claim, reap; drop_conversation",
        "until retention after its last change; in a turn until retention after the end of its job, 31 days at most",
        "one conversation: tenant, when it was created, metadata, its items by number (i1, i2...), their last number, "
        "the version that grows with each change of items, the job of its turn, its bytes with the span that they are "
        "counted in (size)",
    ),
)


BATCHES = (
    Key(
        "batch",
        "batch:{}",
        "hash",
        "put_batch; steer, due, hold, save, reserve",
        "until retention after its end",
        "one batch of lines: what was asked, status, progress, due notices (turn, heard), its lease (epoch, lease)",
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
        "places",
        "places:{}",
        "list",
        "forget, amend_conversation",
        "a day after the last deletion",
        "by tenant: its last thousand deleted files, batches and conversation items, and the place of each in its list",
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
)


EVENTS = (
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
    Key(
        "lengths",
        "lengths:{}",
        "hash",
        "a worker, every few seconds while answers end",
        "a week after its newest write",
        "by model: the newest output lengths of its answers by lane and tenant (lengths), and the version of that "
        "message",
    ),
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
    Key(
        "console",
        "console:{}",
        "string",
        "console",
        "a minute for a link, twelve hours for a session",
        "by digest: a session of the console, or a link that opens one once: whose it is, and a seal by the key",
    ),
)
"""Keys of the one slot all processes share: functions of the Lua scripts that run there."""


ROOT = "penstock:"
"""What every name of ours begins with."""
CATALOGUE = (*JOBS, *CONVERSATIONS, *BATCHES, *EVENTS)
"""Keys of a partition. Each name becomes a function of the Lua scripts: job_key(id), lane_key(model, priority)..."""
CHANNELS = {
    "api": "penstock:api:{}: frames and terminals for the responses one API process holds open",
    "worker": "penstock:worker:{}: wake, cancel, follow, cordon and hold messages for one worker",
    "scheduler": "penstock:scheduler:wake: a job waits and no worker was there to be woken, or an override has changed",
    "pools": "penstock:pools:plan: the plan has changed",
}
