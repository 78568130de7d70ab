"""Keys of batches: batches and the files that they read and write."""

from __future__ import annotations

from streaming.catalogue.key import Key

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
