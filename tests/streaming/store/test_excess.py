"""Access rules of the store: a role may send what it sends and nothing besides, by what the server was really sent.

tests/streaming/store/test_acl.py shows that no right is missing; one that nobody uses would be missed by nobody.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from typing import Any

import pytest
from guarded import GuardedHouse, as_user, guarded
from redis import Redis

from streaming.batches.store import Batches, Files
from streaming.errors import UnknownBatch, UnknownConversation, UnknownFile, UnknownJob
from streaming.events import Redeliveries, Webhooks
from streaming.fleet.plans import Overrides, Plans
from streaming.fleet.processes import ConsoleSessions, Fleet, LengthStore
from streaming.jobs.conversations import Conversations
from streaming.jobs.dead_letters import DeadLetters
from streaming.jobs.history import LogName, read_log
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.keys import CATALOGUE, FLEET, FLEET_SLOT, fleet_key, partition_key, prefix
from streaming.redis.client import RedisClient
from streaming.redis.settings import RedisSettings
from streaming.store.acl import COMMANDS, COMMON_COMMANDS, CONNECTION, SCRIPTS
from streaming.store.identity import enter_store, read_identity
from streaming.store.monitor import Headroom

JOB, FILE, BATCH, MESSAGE, CONVERSATION = (name + "0" * 32 for name in ("job_", "file-", "batch_", "msg_", "conv_"))
TENANT, LETTER = "t", "0-1-0"
LOG = LogName("log", "w")
LIBRARY = {"hello", "auth", "client"}
"""What the client library sends to be let in; `client` with a subcommand is in CONNECTION."""

Calls = Callable[[RedisClient], list[Awaitable[Any]]]
SENT: Mapping[str, Calls] = {
    "api": lambda wire: [
        Files(wire).recent(TENANT, FILE, 5), Batches(wire).recent(TENANT, FILE, 5),
        Files(wire).recent(TENANT, None, 5, newest_first=False),
        Files(wire).get(FILE, TENANT), Batches(wire).recent(TENANT, None, 5), Batches(wire).totals([TENANT]),
        Webhooks(wire).recent(5), JobReader(wire).was_known(TENANT, JOB), drained(read_log(wire, 0, LOG, 1)),
        DeadLetters(wire).recent(5), DeadLetters(wire).get(LETTER), DeadLetters(wire).drop(LETTER),
        Plans(wire).actions(5), Plans(wire).read(), Overrides(wire).of(["m"]), Fleet(wire).processes(),
        Fleet(wire).cards(), wire.memory(), wire.run_ids(), wire.homes(), wire.now_ms(), read_identity(wire),
        Queue(wire, Headroom(wire)).shorten_retention([JOB], 5), ConsoleSessions(wire).find("x"),
        Conversations(wire).read(CONVERSATION, TENANT),
    ],
    "worker": lambda wire: [
        Fleet(wire).cards(), LengthStore(wire).read("m"), drained(read_log(wire, 0, LOG, 1)),
        wire.listeners(["penstock:api:x"]),
        wire.run_ids(), wire.time_us(""), read_identity(wire),
    ],
    "scheduler": lambda wire: [
        Plans(wire).cold_starts(), Plans(wire).read(), Overrides(wire).of(["m"]), Fleet(wire).processes(),
        read_identity(wire),
    ],
    "offline": lambda wire: [
        Redeliveries(wire).begin("q", "m"), Redeliveries(wire).settle("q", "m"), Files(wire).known([FILE]),
        Files(wire).expired(5), Queue(wire, Headroom(wire)).known([JOB]),
        Queue(wire, Headroom(wire)).shorten_retention([JOB], 5),
        Batches(wire).forget_expired(5), Batches(wire).states([BATCH]), wire.memory(), Fleet(wire).processes(),
        Fleet(wire).cards(), read_identity(wire), drained(read_log(wire, 0, LOG, 1)),
    ],
}  # fmt: skip
"""What processes of a role ask without a script: the methods that api/, workers/, scheduler/ and offline/ call."""


async def drained(frames: AsyncGenerator[Any, None]) -> None:
    async for _ in frames:
        pass


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedHouse]:
    """A server with the users, and no process."""
    with guarded(tmp_path_factory.mktemp("guarded")) as house:
        yield house


def fill(root: Redis) -> None:
    """So much that lists are no shorter than one: what is listed is read."""
    for index, name in (("files", FILE), ("batches", BATCH)):
        root.zadd(partition_key(0, index, TENANT), {name: 1})
    root.zadd(partition_key(0, "hooks"), {MESSAGE: 1})
    root.zadd(partition_key(0, "expiring"), {FILE: 1, BATCH: 1})
    root.zadd(fleet_key("procs"), {"p": 1})


def kind_of(word: str) -> str | None:
    """The kind of key that a word is; None if it is none."""
    for keys, start in ((FLEET, re.escape(prefix(FLEET_SLOT))), (CATALOGUE, re.escape(prefix(7)).replace("7", r"\d+"))):
        for key in keys:
            if re.fullmatch(start + re.escape(key.pattern).replace(r"\{\}", "[^ ]+"), word):
                return key.name
    return None


def rows(table: Mapping[str, frozenset[str]]) -> set[tuple[str, str]]:
    """Each command with each kind of key, "" for none."""
    return {(command, kind) for command, kinds in table.items() for kind in kinds or {""}}


async def heard(store: GuardedHouse, role: str) -> set[tuple[str, str]]:
    """The commands that a role sent outside of scripts, each with the kinds of key in it."""
    found: set[tuple[str, str]] = set()
    wire = RedisClient.open(RedisSettings(url=as_user(store.redis_url, role)))
    with Redis.from_url(store.redis_url, decode_responses=True) as root:
        root.flushall()
        await enter_store(wire)
        fill(root)
        with root.monitor() as monitor:
            for call in SENT[role](wire):
                with contextlib.suppress(UnknownBatch, UnknownConversation, UnknownFile, UnknownJob):
                    await call
            await wire.close()
            with Redis.from_url(store.redis_url) as other:
                other.echo("over")
            for each in monitor.listen():
                command, *words = each["command"].split()
                if command == "ECHO":
                    return found
                if each["client_type"] != "lua":
                    name = command.lower()
                    name = name if name in ALL else f"{name}|{words[0].lower()}"
                    kinds = {kind for word in words if (kind := kind_of(word))}
                    found |= {(name, kind) for kind in kinds or {""}}
    raise AssertionError("the server closed the connection")


ALL = {*CONNECTION, *COMMON_COMMANDS, *LIBRARY}.union(*COMMANDS.values())


@pytest.mark.parametrize("role", SCRIPTS)
async def test_each_row_of_the_table_is_sent_and_nothing_else(store: GuardedHouse, role: str) -> None:
    """A command, and the kind of key it is for. A row that no method has any more opens that kind of key for nothing;
    a method that sends something new has its row, and its place above."""
    found = {row for row in await heard(store, role) if row[0] not in CONNECTION | LIBRARY}
    assert found - rows(COMMON_COMMANDS) == rows(COMMANDS[role]) - rows(COMMON_COMMANDS)
