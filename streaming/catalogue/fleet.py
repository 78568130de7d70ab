"""Keys of the fleet: processes, the leading scheduler, its plans and actions, and model cards."""

from __future__ import annotations

from streaming.catalogue.key import Key

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
