"""Redis client of one process: commands, scripts and subscriptions.

It never retries, because a repeated write may write twice. Callers decide whether a call is safe to retry.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

from redis.exceptions import BusyLoadingError, MovedError, RedisClusterException, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from penstock.loops import ExpectedErrors, Rounds, Turns, coalesced, run_periodically, wait
from streaming.errors import Fenced, Loading, StreamingError, Unavailable
from streaming.ids import partition_of
from streaming.keys import channel, partition_key, prefix
from streaming.redis.connection import Command, Subscription, Topology, open_topology
from streaming.redis.scripts import LIBRARIES, load_library
from streaming.redis.settings import RedisSettings

log = logging.getLogger(__name__)

REFUSALS = frozenset(
    {
        *("OOM", "MISCONF", "READONLY", "NOREPLICAS", "LOADING", "MASTERDOWN", "UNBLOCKED"),
        *("NOAUTH", "WRONGPASS", "NOPERM"),
        *("CLUSTERDOWN", "MOVED", "ASK", "TRYAGAIN"),
    }
)
"""Answers that mean "this server cannot keep a write now", whatever the command was."""
DENIED_IN_SCRIPT = "ACL failure"
"""Part of an error answer without its own code: the user may not run a command that a script contains."""


def checked(answers: list[Any]) -> list[Any]:
    """The same answers, if there is no error among them; raises the first."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


class translated:  # noqa: N801 - used like a function
    """Translates the client library's errors into ours: Unavailable if a later retry may help.

    Also passes a cancellation on: the client writes under `asyncio.wait_for`, which on Python 3.11 swallows a
    cancellation that arrives as the write ends. Without this, a caller that waits for this task would wait for ever.
    """

    __slots__ = ("_cancels", "_task")

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._cancels = self._task.cancelling() if self._task else 0

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._task and self._task.cancelling() > self._cancels:
            raise asyncio.CancelledError
        if error is not None and (ours := _translated(error)) is not error:
            raise ours from error


def _translated(error: BaseException) -> BaseException:
    """Return Unavailable or Loading for an error of the client library that means it, any other error unchanged."""
    match error:
        case BusyLoadingError():
            return Loading(f"Redis does not answer: {error}")
        case RedisConnectionError() | RedisTimeoutError() | OSError():
            return Unavailable(f"Redis does not answer: {error}")
        case ResponseError():
            code, words = _refusal(error)
            if DENIED_IN_SCRIPT in words:
                return Unavailable(f"Redis refuses: {words} (the user's rights must be those of `penstock store acl`)")
            if code in REFUSALS or _lacks_function(error):
                return (Loading if code == "LOADING" else Unavailable)(f"Redis refuses: {code} {words}")
        case RedisError() | RedisClusterException():
            return Unavailable(f"Redis: {error}")
    return error


def _lacks_function(answer: Any) -> bool:
    return isinstance(answer, ResponseError) and NO_FUNCTION in str(answer)


def _refusal(error: ResponseError) -> tuple[str, str]:
    """Code and words of an error answer."""
    if error.status_code:  # already taken off the text
        return error.status_code, str(error)
    code, _, words = str(error).partition(" ")
    return code, words


NO_FUNCTION = "Function not found"
"""The error of a server that does not have our library: it is new, was emptied, or another version removed it."""
OURS = re.compile(rb"%b[0-9a-f]{8}" % LIBRARIES.encode())
"""Names of the libraries of all versions."""
MAX_LIBRARIES = 8
"""Most libraries on one server."""

MAX_CALLS = 16
"""Maximum calls in one command, because the server runs nothing else meanwhile."""

SCAN_SLICE = 1000
"""Keys looked at by one SCAN."""

Call = tuple[str, int, Sequence[str | bytes | int]]
"""A script by name, or a command of Redis in capitals; the partition it runs in, its arguments."""
Then = Callable[[list[Any] | None], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Query(Generic[T]):
    """Calls, and the value that their answers mean: several queries can share a round trip."""

    calls: Sequence[Call]
    parse: Callable[[list[Any]], T]


def _microseconds(time_answer: Sequence[bytes]) -> int:
    seconds, micros = map(int, time_answer)
    return seconds * 1_000_000 + micros


NOW = Query([("TIME", 0, ())], lambda answers: _microseconds(answers[0]) // 1000)
"""Redis time in milliseconds, the only clock of the protocol."""


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Memory of one server, in bytes."""

    used: int
    allowed: int
    """0: no limit."""
    owed: Mapping[int, int] = field(default_factory=dict)
    """By partition: bytes that unfinished jobs may still write."""
    at_start: int = 0
    """Memory that the server used when it started, which jobs can never use."""


class RedisClient:
    """Each process opens one and shares it among all its clients of the store."""

    def __init__(self, settings: RedisSettings, topology: Topology) -> None:
        self.settings = settings
        self.redis = topology.client
        """The library's client, for long answers, which would hold up others on the shared connection; on a cluster, it
        finds the node of each key."""
        self.turns = Turns()
        """Runs long decoding and encoding in slices."""
        self._topology = topology
        self._library = load_library()

    @classmethod
    def open(cls, settings: RedisSettings) -> RedisClient:
        """Create a client without connecting: if the server is down, the first call fails."""
        return cls(settings, open_topology(settings.url, settings.timeout_s))

    @property
    def partitions(self) -> range:
        return range(self.settings.partitions)

    def partition_of(self, name: str, start: str, unknown: type[StreamingError]) -> int:
        """The partition that an id with this start names. Raises `unknown` if it is none of this store."""
        partition = partition_of(name, start)
        if partition is None or partition not in self.partitions:
            raise unknown(name)
        return partition

    async def close(self) -> None:
        """Close every connection."""
        await self._topology.close()

    async def call(self, script: str, partition: int, *args: str | bytes | int) -> Any:
        """Run one script or command. Raises Unavailable, Fenced; redis-py's ResponseError if the key is of another
        type."""
        (answer,) = await self.calls([(script, partition, args)])
        return answer

    async def ask(self, query: Query[T]) -> T:
        """Run the calls of one query. Raises like `calls`, and what parsing raises."""
        return query.parse(await self.calls(query.calls))

    async def ask_all(self, *queries: Query[Any]) -> list[Any]:
        """Run these queries in one round trip per server, like `ask`."""
        answers = iter(await self.calls([call for query in queries for call in query.calls]))
        return [query.parse(list(islice(answers, len(query.calls)))) for query in queries]

    async def calls(self, calls: Sequence[Call]) -> list[Any]:
        """Run scripts and commands in one round trip per server, in order within a partition; each is atomic.

        If there are several calls, each must be safe to repeat. At D3, an answer that is a promise waits for a replica.
        Raises Unavailable (some of them may have run), Fenced.
        """
        answers = checked(await self.outcomes(calls))
        if b"fenced" in answers:
            raise Fenced("the lease of this worker was taken from it")
        return answers

    async def outcomes(self, calls: Sequence[Call]) -> list[Any]:
        """Like `calls`, for independent calls: returns an error answer, as the exception that `calls` raises, in the
        place of its call. Raises Unavailable."""
        with translated():
            answers = await self._run(calls)
            if moved := _moved(answers):
                for error in moved:
                    await self._topology.note_moved(error)
                answers = await self._run(calls)
        return [_translated(answer) if isinstance(answer, Exception) else answer for answer in answers]

    def send_nowait(self, calls: Sequence[Call], on_done: Then) -> bool:
        """Send calls before this returns, and wake no task for their answers. Callers decide whether a call may be sent
        again; this method never repeats one.

        Args:
            on_done: called with the answers (the error for each call if the connection was lost), or with None if the
                caller should send the calls once more with `outcomes`.

        Returns: False if nothing was sent, because no connection is open or the calls need a replica's answer.
        """
        if self._is_promise(calls):
            return False
        groups = _grouped(calls)
        if (sent := self._topology.send_scripts([self._command(each) for each in groups])) is None:
            return False
        sent.add_done_callback(lambda sent: on_done(_begun(sent, groups)))
        return True

    async def _run(self, calls: Sequence[Call]) -> list[Any]:
        """Run the calls on all their servers concurrently. Returns answers and error answers."""
        servers = {p: await self._topology.server_of(prefix(p)) for p in {partition for _, partition, _ in calls}}
        parts: dict[str, list[int]] = {server: [] for server in servers.values()}
        if len(parts) == 1:
            return await self._run_at(next(iter(parts)), calls)
        for number, (_, partition, _) in enumerate(calls):
            parts[servers[partition]].append(number)
        done = await asyncio.gather(
            *(self._run_at(server, [calls[number] for number in part]) for server, part in parts.items()),
            return_exceptions=True,
        )
        answers: list[Any] = [None] * len(calls)
        for part, got in zip(parts.values(), done, strict=True):
            if isinstance(got, BaseException):
                raise got
            for number, answer in zip(part, got, strict=True):
                answers[number] = answer
        return answers

    async def _run_at(self, server: str, calls: Sequence[Call]) -> list[Any]:
        groups = _grouped(calls)
        commands = [self._command(group) for group in groups]
        run = self._topology.run_scripts
        if promised := self._is_promise(calls):
            # WAIT counts only what its own connection wrote, and a repeated script writes nothing.
            commands.append(self._command([("mark", calls[0][1], ())]))
            commands.append(("WAIT", 1, int(self.settings.timeout_s * 500)))
            run = self._topology.run
        answers = await run(server, commands)
        if lacking := [number for number, answer in enumerate(answers) if _lacks_function(answer)]:
            await self._load(server)
            lacking = list(range(len(commands))) if promised else lacking  # WAIT belongs to all of them
            again = await run(server, [commands[number] for number in lacking])
            for number, answer in zip(lacking, again, strict=True):
                answers[number] = answer
        if promised and not _moved(answers) and checked(answers)[-1] < 1:
            raise Unavailable("no replica has it yet, which redis.durability D3 asks for")
        return _by_call(groups, answers)

    async def _load(self, server: str) -> None:
        """Load our library on a server, and delete those of other versions beyond a few. Which of them are in use is
        unknown, so the choice is random: a process that needs a deleted one loads it again."""
        name = self._library.name
        commands = [("FUNCTION", "LOAD", self._library.text), ("FUNCTION", "LIST", "LIBRARYNAME", f"{LIBRARIES}*")]
        loaded, listed = await self._topology.run_scripts(server, commands)
        if isinstance(loaded, ResponseError) and _refusal(loaded)[0] == "NOPERM":
            raise Unavailable(
                "the store does not have the functions of this version, and this process may not load them: "
                "start another process of this version (api, scheduler or offline)"
            )
        # Another process may have loaded it meanwhile.
        checked([listed] if "already exists" in str(loaded) else [loaded, listed])
        others = [each for _, each, *_ in listed if OURS.fullmatch(each) and each != name.encode()]
        if (surplus := len(others) - MAX_LIBRARIES + 1) > 0:
            doomed = random.sample(others, surplus)
            await self._topology.run_scripts(server, [("FUNCTION", "DELETE", each) for each in doomed])

    def _is_promise(self, calls: Sequence[Call]) -> bool:
        return self.settings.durability == "D3" and any(script in self._library.promises for script, _, _ in calls)

    def _command(self, calls: Sequence[Call]) -> Command:
        """One command for calls of the same script and partition: several commands would cost more."""
        script, partition, arguments = calls[0]
        if script.isupper():
            return (script, *arguments)
        words: list[str | bytes | int] = ["FCALL", f"{self._library.name}_{script}", 1, prefix(partition)]
        for _, _, args in calls:
            words.append(len(args))
            words += args
        return tuple(words)

    async def ping(self) -> None:
        """Raises Unavailable."""
        await self.call("PING", 0)

    async def now_ms(self) -> int:
        """Redis time, the only clock of the protocol. Raises Unavailable."""
        return await self.ask(NOW)

    async def homes(self) -> dict[str, list[int]]:
        """The partitions by the server that holds them now. Raises Unavailable."""
        homes: dict[str, list[int]] = {}
        with translated():
            for partition in self.partitions:
                homes.setdefault(await self._topology.server_of(prefix(partition)), []).append(partition)
        return homes

    async def time_us(self, server: str) -> int:
        """The clock of one server, in microseconds. Raises Unavailable."""
        return _microseconds((await self.run_at(server, [("TIME",)]))[0])

    @asynccontextmanager
    async def subscribe(self, channel: str) -> AsyncIterator[Subscription]:
        """Subscribe to one channel. Raises Unavailable, also while the subscription is read."""
        with translated():
            async with self._topology.lent() as connection:
                subscription = Subscription(connection, channel)
                async with asyncio.timeout(self.settings.timeout_s):
                    await subscription.begun()
                try:
                    yield subscription
                finally:
                    subscription.end(RedisConnectionError("the subscription was given up"))

    async def scan(self, pattern: str) -> AsyncIterator[tuple[str, list[str]]]:
        """Iterate over the names of keys in slices, with the server of each slice; a name may come twice. Raises
        Unavailable."""
        for server in await self._server_names():
            cursor = b"0"
            while True:
                command = ("SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_SLICE)
                ((cursor, names),) = await self.run_at(server, [command])
                yield server, [name.decode() for name in names]
                if cursor == b"0":
                    break

    async def _server_names(self) -> list[str]:
        with translated():
            return await self._topology.servers()

    async def run_at(self, server: str, commands: Sequence[Command]) -> list[Any]:
        """Run plain commands on keys of one server, together. Raises Unavailable."""
        if not commands:
            return []
        with translated():
            return checked(await self._topology.run_scripts(server, commands))

    async def memory(self) -> list[ServerMemory]:
        """Read the memory of every primary that holds a partition. Raises Unavailable."""
        found = []
        for server, partitions in (await self.homes()).items():
            owed = [("HVALS", partition_key(partition, "owed")) for partition in partitions]
            info, *answers = await self.run_at(server, [("INFO", "memory"), *owed])
            sums = {p: sum(max(0, int(each)) for each in values) for p, values in zip(partitions, answers, strict=True)}
            names = (b"used_memory", b"maxmemory", b"used_memory_startup")
            used, allowed, at_start = (int(_info(info, name) or 0) for name in names)
            found.append(ServerMemory(used, allowed, sums, at_start))
        return found

    async def run_ids(self) -> dict[str, str]:
        """Read each primary's run id, by its name. A new run id means a new server process. Raises Unavailable."""
        names = await self._server_names()
        return {name: _info((await self.run_at(name, [("INFO", "server")]))[0], b"run_id") for name in names}

    async def servers(self) -> list[dict[str, str]]:
        """Read version, settings and replicas of every primary. Raises Unavailable."""
        return [await self._facts(server) for server in await self._server_names()]

    async def _facts(self, server: str) -> dict[str, str]:
        started = time.time()
        info, now = await self.run_at(server, [("INFO",), ("TIME",)])
        offset_ms = round(_microseconds(now) / 1000 - (started + time.time()) * 500)
        settings = [("CONFIG", "GET", name) for name in ("appendfsync", "min-replicas-to-write")]
        with translated():
            fsync, replicas = await self._topology.run_scripts(server, settings)
        numbers = ("maxmemory", "used_memory", "connected_clients", "maxclients")
        return {name: _info(info, name.encode()) or "0" for name in numbers} | {
            "address": server,
            "server": _info(info, b"server_name") or "redis",
            "version": _info(info, b"valkey_version") or _info(info, b"redis_version"),
            "redis_version": _info(info, b"redis_version"),
            "appendonly": "yes" if _info(info, b"aof_enabled") == "1" else "no",
            "appendfsync": _setting(fsync),
            "maxmemory-policy": _info(info, b"maxmemory_policy"),
            "min-replicas-to-write": _setting(replicas),
            "replicas": str(len(re.findall(rb"^slave\d+:.*\bstate=online\b", info, re.MULTILINE))),
            "offset_ms": str(offset_ms),
        }


def _setting(answer: Any) -> str:
    """The value in the answer to CONFIG GET, or "" if CONFIG is forbidden."""
    return answer[1].decode() if isinstance(answer, list) and answer else ""


class ClientUser:
    """Base of the classes whose calls need nothing but a client. They hold no state: many may share one client."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client


def _info(info: bytes, name: bytes) -> str:
    """One field of INFO's lines as they come (these are asked several times a second); "" where it is left out."""
    found = re.search(rb"^%b:([^\r\n]*)" % name, info, re.MULTILINE)
    return found[1].decode() if found else ""


def _grouped(calls: Sequence[Call]) -> list[list[Call]]:
    """Group consecutive calls of the same script and partition, in order, at most MAX_CALLS each; commands stay
    alone."""
    groups: list[list[Call]] = []
    before: tuple[str, int] | None = None
    for call in calls:
        kind = call[0], call[1]
        if kind == before and len(groups[-1]) < MAX_CALLS and not call[0].isupper():
            groups[-1].append(call)
        else:
            groups.append([call])
        before = kind
    return groups


def _begun(sent: asyncio.Future[list[Any]], groups: Sequence[Sequence[Call]]) -> list[Any] | None:
    """The answer or error of each call; the connection's error if that was lost. None: send the calls once more."""
    if error := sent.exception():
        return [_translated(error)] * sum(map(len, groups))
    answers = sent.result()
    if [answer for answer in answers if isinstance(answer, Exception)]:
        return None
    return [_translated(each) if isinstance(each, Exception) else each for each in _by_call(groups, answers)]


def _by_call(groups: Sequence[Sequence[Call]], answers: Sequence[Any]) -> list[Any]:
    """The answer of each call; the error of a command is the answer of each of its calls."""
    found: list[Any] = []
    for group, answer in zip(groups, answers, strict=False):
        is_shared = isinstance(answer, Exception) or group[0][0].isupper()
        found += [answer] * len(group) if is_shared else answer
    return found


def _moved(answers: list[Any]) -> list[MovedError]:
    return [answer for answer in answers if isinstance(answer, MovedError)]


def whole(text: str) -> int:
    """A number of a record without its decimals; 0 if it is missing or malformed."""
    try:
        return int(float(text or 0))
    except (ValueError, OverflowError):
        return 0


async def page(
    client: RedisClient,
    partition: int,
    key: str,
    after: tuple[int, str] | None,
    limit: int,
    *,
    newest_first: bool = True,
) -> list[tuple[str, int]]:
    """Read up to `limit` members with their scores, after the cursor `after` (score, member). Members of the same
    score are ordered by name, so no page skips one. Raises Unavailable."""
    found: list[tuple[str, int]] = []
    command, first, last = ("ZREVRANGEBYSCORE", "+inf", "-inf") if newest_first else ("ZRANGEBYSCORE", "-inf", "+inf")
    skip, start = 0, after[0] if after else first
    while len(found) < limit:
        rows = await client.call(command, partition, key, start, last, "WITHSCORES", "LIMIT", skip, limit)
        for member, score in zip(rows[::2], rows[1::2], strict=True):
            place = int(float(score)), member.decode(errors="replace")
            if after is None or (place != after and (place < after) is newest_first):
                found.append(place[::-1])
        skip += limit
        if len(rows) < 2 * limit:
            break
    return found[:limit]


async def place_of(client: RedisClient, partition: int, name: str, tenant: str) -> int | None:
    """Return the place that a deleted member had in its list. None if it is not known: it never was there, was deleted
    more than a day ago, or a thousand others of the tenant since. Raises Unavailable."""
    kept = await client.call("LRANGE", partition, partition_key(partition, "places", tenant), 0, -1)
    beginning = f"{name} ".encode()
    found = next((each for each in kept if each.startswith(beginning)), None)
    return None if found is None else int(float(found.rpartition(b" ")[2]))


EAGER_CALLS = 8
"""So many waiting calls are sent in the middle of a loop iteration."""
MAX_BATCHED_CALLS = 64
"""In one batch: a script blocks the server for all other clients."""


class ScriptBatcher:
    """Batcher of one script. The script must be idempotent: a failed batch may be sent again. Its calls run in any
    order.

    A command of its own costs the client some 140 us and the server a loop iteration; a call in a batch costs a tenth
    of it. A single call is sent at once; calls that arrive while a batch is under way form the next one.
    """

    def __init__(self, client: RedisClient, script: str) -> None:
        def rounds() -> Rounds[Call, Any]:
            run, start = client.outcomes, client.send_nowait
            return Rounds(run, max_items=MAX_BATCHED_CALLS, eager_items=EAGER_CALLS, start_now=start)

        self._script, self._rounds = script, defaultdict[int, Rounds[Call, Any]](rounds)
        """By partition, so that a slow or unavailable one delays no other."""

    def call(self, partition: int, *args: str | bytes | int) -> asyncio.Future[Any]:
        """Call the script with these arguments. The future gets the answer to this call alone, or raises
        Unavailable."""
        return self._rounds[partition].ask((self._script, partition, args))


async def news(client: RedisClient, kind: str, name: str, every_s: float) -> AsyncGenerator[None]:
    """Yield when the store should be read again: at once, after each message of a channel, and at least every
    `every_s`, because messages may be lost. Never ends."""
    changed = asyncio.Event()

    async def listen() -> None:
        async for _ in messages(client, kind, name):
            changed.set()

    expected = ExpectedErrors(Unavailable, log.debug, "no news until Redis answers: %s")
    listening = asyncio.create_task(run_periodically(listen, every_s, expected))
    try:
        while True:
            changed.clear()
            yield
            await wait(changed, coalesced(every_s))
    finally:
        listening.cancel()


async def messages(client: RedisClient, kind: str, name: str) -> AsyncIterator[None]:
    """Yield once subscribed to a channel, and after each of its messages. Never ends; raises Unavailable."""
    async with client.subscribe(channel(kind, name)) as subscription:
        yield
        while True:
            await subscription.message()
            yield
