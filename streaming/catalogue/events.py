"""Keys of events: what is still to be told to brokers and webhooks."""

from __future__ import annotations

from streaming.catalogue.key import Key

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
