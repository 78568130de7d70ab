"""The identity of a store: who writes it, who is refused, and what raises its format."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import re
from collections.abc import Callable, Iterator
from enum import Enum

import msgspec
import pytest
from house import House, redis_process
from redis import Redis

from penstock import engine
from penstock.config import ConfigError
from penstock.engine import Capabilities, ChatTurn, Failure, Logprob, ModelCard, Sampling
from streaming import keys, order
from streaming.batches import store as batches
from streaming.fleet import plans, process
from streaming.fleet.process import Process
from streaming.fleet.processes import Fleet
from streaming.ids import new_life
from streaming.jobs import codec, conversations, job, records
from streaming.jobs.reaper import Reaper
from streaming.redis import scripts
from streaming.redis.client import RedisClient
from streaming.store import identity
from streaming.store.identity import FORMAT, FORMAT_DIGEST, Identity, enter_store, identify, read_identity
from streaming.store.monitor import StoreMonitor

pytestmark = pytest.mark.slow

Opened = Callable[..., RedisClient]


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A starting process gives running ones half a second to write a lost identity again."""
    monkeypatch.setattr(identity, "RECOVERY_TIMEOUT_S", 0.5)


async def test_processes_that_start_at_once_agree(opened: Opened, redis_url: str) -> None:
    """Each over connections of its own; the reaper of those that are through writes keys meanwhile."""

    async def start() -> Identity:
        wire = opened(redis_url, timeout_s=30)
        found = await enter_store(wire)
        await Reaper(wire).sweep()
        return found

    found = await asyncio.gather(*(start() for _ in range(20)))
    assert len(set(found)) == 1 and (found[0].format, found[0].partitions) == (FORMAT, 1)
    assert found[0].deployment.startswith("dep_")


async def test_another_number_of_partitions_is_refused(wide: RedisClient, wire: RedisClient) -> None:
    await enter_store(wide)
    said = r"this store has 4 partitions, the settings say 1 \(set redis.partitions = 4"
    with pytest.raises(ConfigError, match=said):
        await enter_store(wire)
    assert (await enter_store(wide)).partitions == 4


async def test_a_store_of_an_earlier_version_is_refused(wire: RedisClient, short_wait: None) -> None:
    """It has keys and no format. What such a version writes first is its sweep, and that it is there."""
    await Reaper(wire).sweep()
    with pytest.raises(ConfigError, match=r"no format version: an earlier version of Penstock .*store reset --yes"):
        await enter_store(wire)
    assert await read_identity(wire) is None
    await wire.redis.flushall()
    process = Process(role="api", id="api-1", life=new_life(), pid=1, host="h", state="ready", since=0.0)
    await Fleet(wire).report(process)
    with pytest.raises(ConfigError, match="no format version"):
        await enter_store(wire)


async def test_a_store_of_a_later_version_is_refused(wire: RedisClient) -> None:
    await enter_store(wire)
    await wire.redis.hset(keys.fleet_key("store"), "format", FORMAT + 1)
    with pytest.raises(ConfigError, match=f"format {FORMAT + 1}: a later version"):
        await enter_store(wire)


async def test_keys_of_other_programs_are_not_ours(wire: RedisClient) -> None:
    await wire.redis.mset({"user:1": "x", "penstock-like": "y"})
    assert (await enter_store(wire)).format == FORMAT


async def test_an_emptied_store_has_another_deployment(
    wire: RedisClient, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that runs writes a new identity, and one that starts just then looks for it until it is there."""
    found: list[Identity | None] = []

    async def look(wire: RedisClient) -> Identity | None:
        found.append(await read_identity(wire))
        return found[-1]

    before = await enter_store(wire)
    monitor = StoreMonitor(wire)
    await monitor.require()
    await wire.redis.flushall()
    await Reaper(wire).sweep()
    monkeypatch.setattr(identity, "RECOVERY_TIMEOUT_S", 60.0)
    monkeypatch.setattr(identity, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(identity, "read_identity", look)
    late = asyncio.create_task(enter_store(opened(wire.settings.url, timeout_s=30)))
    while len(found) < 5 and not late.done():
        await asyncio.sleep(0.005)
    assert found[:5] == [None] * 5 and not late.done()
    await monitor.look()
    after = await late
    assert after == await identify(wire) and after.deployment == monitor.deployment != before.deployment
    assert monitor.reason == ""


# --- every role ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four_partitions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A store of four partitions, and settings that say one."""
    folder = tmp_path_factory.mktemp("four")
    with redis_process(folder, None, "--appendonly", "yes") as url:
        with Redis.from_url(url) as client:
            client.hset(keys.fleet_key("store"), mapping={"format": FORMAT, "partitions": 4, "deployment": "dep_other"})
        with House(url, folder) as house:
            yield house


@pytest.mark.parametrize("role", ["api", "workers", "scheduler", "offline"])
def test_every_role_refuses_to_start(four_partitions: House, role: str) -> None:
    """It ends before it has written anything, and says what to do."""
    process = four_partitions.start(role, PENSTOCK_API_PORT=str(four_partitions.port))
    assert process.wait(60) != 0
    assert "set redis.partitions = 4" in four_partitions.log(role)
    with Redis.from_url(four_partitions.redis_url) as client:
        assert client.keys("*") == [keys.fleet_key("store").encode()]


# --- what raises the format ------------------------------------------------------------------------------------------

CALL = re.compile(r"redis\.p?call\(")
WORD = re.compile(r"'([^']*)'|\b(\w+_key)\b")


def key_use(script: str) -> list[str]:
    """What a script asks of Redis: of each call the words in quotes and the keys, in order."""
    text = re.sub(r"--.*", "", script)
    return sorted(
        {
            " ".join(one or two for one, two in WORD.findall(text[at.end() : _closed(text, at.end())]))
            for at in CALL.finditer(text)
        }
    )


def _closed(text: str, start: int) -> int:
    """Where the bracket that was opened before `start` is closed; brackets in quotes do not count."""
    depth, quoted, at = 1, False, start
    while depth:
        quoted ^= text[at] == "'"
        depth += 0 if quoted else {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return at


JOBS = (job, conversations, engine, records, codec)
OTHERS = (batches, process, plans, order)


ENGINE_PARTS = (Capabilities, ChatTurn, Failure, Logprob, ModelCard, Sampling)
"""Parts of messages that engines see, and that are defined with their protocol therefore."""


def shapes() -> Iterator[str]:
    """Every struct and enumeration that is written into the store or sent through it, field by field."""
    for module in (*JOBS, *OTHERS):
        for name, kind in sorted(inspect.getmembers(module, inspect.isclass)):
            if kind.__module__ != module.__name__ or (module is engine and kind not in ENGINE_PARTS):
                continue
            if issubclass(kind, Enum):
                yield f"{name} {[each.value for each in kind]}"
            elif issubclass(kind, msgspec.Struct):
                config = kind.__struct_config__
                fields = [(field.name, field.encode_name) for field in msgspec.structs.fields(kind)]
                annotations = [kind.__annotations__.get(field) for field, _ in fields]
                yield f"{name} {config.tag} {config.array_like} {config.omit_defaults} {fields} {annotations}"


def digest() -> str:
    """Of all that another version would have to agree on."""
    parts = [
        *(f"{key.name} {key.pattern} {key.kind}" for key in (*keys.CATALOGUE, *keys.FLEET)),
        *(f"{kind} {pattern}" for kind, pattern in keys.CHANNELS.items()),
        keys.prefix(0),
        keys.prefix(keys.FLEET_SLOT),
        keys.GROUP,
        *sorted(shapes()),
        *(f"{name} {key_use(source)}" for name, source in sorted(scripts.load_library().sources.items())),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def test_every_change_of_the_store_raises_its_format() -> None:
    found = digest()
    assert found == FORMAT_DIGEST, (
        "Keys, messages or what the scripts read and write have changed: raise FORMAT in streaming/store/identity.py, "
        f'say in CHANGELOG.md that this version does not work beside earlier ones, and set FORMAT_DIGEST = "{found}". '
        "Only a change of a FORMAT that was never released leaves the number as it is."
    )
