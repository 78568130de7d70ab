"""Keys of conversations."""

from __future__ import annotations

from streaming.catalogue.key import Key

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
