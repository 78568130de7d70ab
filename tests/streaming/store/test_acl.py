"""Access rules of the store: what a role needs is allowed, on real processes, and nothing else is."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from batching import answers_are_right, begin, client, content, ended, line
from flow import a_job
from guarded import PASSWORD, GuardedHouse, as_user, guarded
from house import eventually, free_port
from receiver import Receiver, receiving
from redis import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from cli.__main__ import main
from streaming.batches.store import Batches, Files
from streaming.errors import Unavailable, UnknownBatch, UnknownConversation, UnknownFile, UnknownJob
from streaming.events import Redeliveries, Webhooks
from streaming.fleet.api_keys import VERSION, ApiKeys
from streaming.fleet.audit import AuditLog
from streaming.fleet.plans import LEADER, Overrides, Plans
from streaming.fleet.processes import ConsoleSessions, Fleet
from streaming.jobs.conversations import Conversations
from streaming.jobs.dead_letters import DeadLetters
from streaming.jobs.history import LogName, read_log
from streaming.jobs.media import MediaLost, MediaStore
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.jobs.settings import QuotaSettings
from streaming.jobs.usage import UsageCounts
from streaming.keys import BROKER, CATALOGUE, FLEET, FLEET_SLOT, fleet_key, partition_key, prefix
from streaming.redis import scripts
from streaming.redis.client import RedisClient, ScriptBatcher
from streaming.redis.settings import RedisSettings
from streaming.store.acl import (
    BROKER_COMMANDS,
    COMMANDS,
    COMMON_COMMANDS,
    CONNECTION,
    SCRIPTS,
    acl_file,
    script_channels,
    script_commands,
    script_kinds,
)
from streaming.store.identity import enter_store, read_identity
from streaming.store.monitor import Headroom

pytestmark = pytest.mark.slow

Opened = Callable[..., RedisClient]
ROLES = [*SCRIPTS]
CHAT = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
SECRET = "whsec_" + "QUJDRA" * 6 + "QUJDRA=="[:4]

REFUSED = "ACL failure in script|no permissions"
LOADING = ("FUNCTION LOAD x", "FUNCTION LIST", "FUNCTION DELETE x")
"""What no worker may: others run what is loaded with their own rights."""

FORBIDDEN = (
    "FLUSHALL", "FLUSHDB", "KEYS *", "SCAN 0", "RANDOMKEY", "DBSIZE", "SWAPDB 0 1", "MOVE k 1", "COPY k l",
    "RENAME k l", "DUMP k", "RESTORE k 0 x", "MIGRATE h 1 k 0 1", "SORT k", "OBJECT ENCODING k",
    "CONFIG GET requirepass", "CONFIG SET dir /tmp", "CONFIG REWRITE", "ACL LIST", "ACL SETUSER api on nopass",
    "ACL LOAD", "ACL LOG", "CLIENT LIST", "CLIENT KILL 127.0.0.1:1", "CLIENT PAUSE 1000", "MONITOR",
    "SHUTDOWN NOSAVE", "SAVE", "BGSAVE", "BGREWRITEAOF", "REPLICAOF h 1", "PSYNC ? -1", "FAILOVER", "MODULE LIST",
    "EVAL x 0", "FUNCTION FLUSH", "FUNCTION RESTORE x", "SCRIPT FLUSH", "SCRIPT KILL", "SLOWLOG GET", "LATENCY RESET",
    "MEMORY DOCTOR", "PSUBSCRIBE *", "SPUBLISH c x", "APPEND k x", "GETDEL k", "UNLINK k",
)  # fmt: skip
"""What would read, change or end more than a role has to do with."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedHouse]:
    """A server with the users, and no process."""
    with guarded(tmp_path_factory.mktemp("guarded")) as house:
        yield house


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving(Receiver()) as each:
        yield each


def user(store: GuardedHouse, name: str) -> Redis:
    return Redis.from_url(as_user(store.redis_url, name), decode_responses=True)


# --- the file --------------------------------------------------------------------------------------------------------


def test_the_file_is_what_the_catalogue_gives(capsys: pytest.CaptureFixture[str]) -> None:
    """The one that deployments use, and the one that is printed. After a change of scripts or keys:
    `penstock store acl > docker/redis/users.acl`."""
    assert main(["store", "acl"]) == 0
    committed = Path(__file__).parents[3] / "docker" / "redis" / "users.acl"
    assert capsys.readouterr().out == acl_file() == committed.read_text(encoding="utf-8")


def test_every_script_is_somebodys() -> None:
    """`penstock` runs one: `share` for its pools."""
    for name, roles in scripts.load_library().roles.items():
        assert roles and roles <= {*ROLES, "any", "pools"}, name
    assert frozenset().union(*SCRIPTS.values()) | {"share"} == set(scripts.load_library().sources)


def test_what_a_script_needs_is_read_off_it() -> None:
    """Some by hand: keys by their functions, from a record, as an argument; subcommands, a chosen command; channels."""
    assert script_kinds("register") == {"worker", "leases"}
    assert {"lane", "retry", "suspects", "idem"} < script_kinds("cancel")
    assert script_kinds("waiting") == {"lane", "retry", "suspects", "arrivals", "line", "tenants", "served"}
    assert {"xgroup|create", "xreadgroup"} < script_commands("collect") and "xgroup" not in script_commands("collect")
    assert {"hkeys", "hgetall", "hmget", "hget", "hstrlen", "get"} == script_commands("record")
    assert script_channels("put") == {"api", "worker", "scheduler"} and script_channels("plan") == {"pools", "worker"}


def test_nobody_is_let_in_by_the_file_alone() -> None:
    """No password is in it, and all are off but the one that may ping."""
    lines = [each.split() for each in acl_file().splitlines()]
    assert [words[1] for words in lines] == ["default", "probe", *ROLES, "operator"]
    assert [words[1] for words in lines if "on" in words] == ["probe"]
    assert [words[1] for words in lines if "nopass" in words] == ["probe"]
    assert not any(re.search(r" [#>]", each) for each in acl_file().splitlines())
    assert not any("+@" in word or word in ("~*", "&*", "allkeys") for words in lines for word in words)
    assert [words[6:] for words in lines if words[1] == "probe"] == [["-@all", "+ping"]]


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_nothing_beyond_its_own(store: GuardedHouse, role: str) -> None:
    """Forty commands and more, each refused for what it is and before anything is done; and none by a way round."""
    assert len(FORBIDDEN) >= 40
    with user(store, role) as client:
        assert client.ping()
        for words in (*FORBIDDEN, *(LOADING if role == "worker" else ())):
            with pytest.raises(NoPermissionError, match="no permissions"):
                client.execute_command(*words.split())
        for words in (["SCAN", "0"], ["FLUSHALL"], ["DBSIZE"], ["SET", "foreign", "x"]):
            with pytest.raises(ResponseError, match=REFUSED):
                client.execute_command("EVAL", f"return redis.call({str(words)[1:-1]})", "0")
    with user(store, "root") as root:
        assert root.ping() and not root.exists("foreign")


@pytest.mark.parametrize("role", ROLES)
def test_keys_and_channels_of_others_are_closed(store: GuardedHouse, role: str) -> None:
    """Those of other programs on the same server, and of Penstock what the role has nothing to do with."""
    others = {
        "api": [partition_key(0, "redelivery", "x"), f"{BROKER}x", fleet_key("shares", "x")],
        "worker": [partition_key(0, "file", "x"), partition_key(0, "batch", "x"), partition_key(0, "hook", "x")],
        "scheduler": [partition_key(0, "file", "x"), partition_key(0, "batch", "x"), f"{BROKER}x"],
        "offline": [partition_key(0, "leases"), partition_key(0, "alone", "m"), partition_key(0, "swept")],
    }[role]
    with user(store, role) as client:
        for key in ("session:1", "penstock", "penstock:{0}:nothing", *others):
            with pytest.raises(NoPermissionError):
                client.hget(key, "field")
            with pytest.raises(ResponseError, match=REFUSED):
                client.eval("return redis.call('HGET', ARGV[1], 'field')", 0, key)
        for channel in ("news", "penstock:", "penstock:other:x"):
            with pytest.raises(NoPermissionError):
                client.publish(channel, "x")
            with pytest.raises(NoPermissionError), client.pubsub() as listening:
                listening.subscribe(channel)
                listening.get_message(timeout=10)
        for command in sorted(BROKER_COMMANDS & {"lpush", "brpop"}):  # Celery's keys are the offline processes'
            if role != "offline":
                with pytest.raises(NoPermissionError):
                    client.execute_command(command, f"{BROKER}x", "1")
    if role == "offline":
        with user(store, role) as client:
            assert client.rpush(f"{BROKER}x", "1") == client.llen(f"{BROKER}x") == 1
            with pytest.raises(NoPermissionError):
                client.llen(partition_key(0, "job", "x"))


def test_without_a_login_there_is_nothing(store: GuardedHouse) -> None:
    """And who may ping may only ping."""
    address = f"redis://{store.redis_url.rpartition('@')[2]}"
    with Redis.from_url(address) as nobody, pytest.raises(AuthenticationError):
        nobody.ping()
    with Redis.from_url(address.replace("//", "//probe:any@")) as probe:
        assert probe.ping()
        for words in ("INFO", "TIME", "GET penstock:{fleet}:store", "PUBLISH penstock:pools:plan x"):
            with pytest.raises(NoPermissionError):
                probe.execute_command(*words.split())
    guess = Redis.from_url(as_user(store.redis_url, "api").replace(PASSWORD, "wrong"))
    with guess, pytest.raises(AuthenticationError):
        guess.ping()


async def test_a_worker_has_others_load_the_functions(store: GuardedHouse, opened: Opened) -> None:
    """What it loads would run with the rights of whoever calls it. It goes on once another process has done so."""
    worker, api = (opened(as_user(store.redis_url, role)) for role in ("worker", "api"))
    with user(store, "root") as root:
        root.function_flush()
    with pytest.raises(Unavailable, match="start another process of this version"):
        await worker.call("record", 0, "job_x")
    await api.call("record", 0, "job_x")
    await worker.call("record", 0, "job_x")


# --- what is allowed -------------------------------------------------------------------------------------------------


def test_the_roles_do_their_work(tmp_path: Path, receiver: Receiver) -> None:
    """Chats, jobs, events, a lost worker, a batch, webhooks, pools and dead letters by real processes, each as its own
    user: all of it works, also with quotas, which ask the other partition, and the server has refused nothing."""
    lines = ["[webhooks.test]", f'url = "{receiver.url}"', f'secret = "{SECRET}"', "allow_http = true"]
    lines += ['networks = ["127.0.0.0/8"]', "[quotas]", "jobs = 1000", "job_bytes = 100_000_000"]
    lines += ["result_bytes = 100_000_000", "file_bytes = 100_000_000"]
    with guarded(tmp_path) as house:
        (tmp_path / "penstock.toml").write_text("\n".join([*lines, ""]))
        house.environ |= {"PENSTOCK_SIM_FAULTS": "true", "PENSTOCK_SCHEDULER_TICK_S": "0.1"}
        house.environ |= {"PENSTOCK_REDIS_PARTITIONS": "2"}
        for role in ("scheduler", "workers", "offline"):
            house.start(role)
        house.start_api()
        house.wait_ready()
        assert house.post("/v1/chat/completions", CHAT)[0] == 200
        status, _, stream = house.post("/v1/chat/completions", {**CHAT, "stream": True, "n": 2})
        assert status == 200 and stream.rstrip().endswith(b"data: [DONE]")
        jobs(house)
        lost_worker(house)
        openai = client(house)
        batch_lines = [line(number) for number in range(5)]
        done = ended(openai, begin(openai, batch_lines))
        assert done.status == "completed"
        answers_are_right(content(openai, done.output_file_id), batch_lines)
        assert openai.batches.list().data and openai.files.list().data and openai.files.delete(done.input_file_id)
        looked_after(house)
        eventually(lambda: {body["type"] for body in receiver.bodies()} >= {"job.completed", "batch.completed"})
        assert house.denied() == []


def jobs(house: GuardedHouse) -> None:
    """Put, put again by its key, listed, read, followed, cancelled, waited for."""
    key = {"Idempotency-Key": "one"}
    first, again = (json.loads(house.post("/v1/jobs", CHAT, key)[2])["id"] for _ in range(2))
    assert first == again
    assert json.loads(house.get(f"/v1/jobs/{first}?wait=30")[1])["status"] == "completed"
    assert house.get(f"/v1/jobs/{first}/result")[0] == house.get(f"/v1/jobs/{first}/events")[0] == 200
    assert len(json.loads(house.get("/v1/jobs?limit=5")[1])["data"]) >= 2
    long = json.loads(house.post("/v1/jobs", {**CHAT, "max_tokens": 3000})[2])["id"]
    assert house.post(f"/v1/jobs/{long}/cancel", {})[0] in (200, 202)
    eventually(lambda: json.loads(house.get(f"/v1/jobs/{long}")[1])["status"] == "cancelled")
    behind = json.loads(house.post("/v1/jobs", {**CHAT, "queue": {"deadline_ms": 60_000}})[2])["id"]
    assert house.get(f"/v1/jobs/{behind}/events")[0] == 200


def lost_worker(house: GuardedHouse) -> None:
    """A request that kills its workers is given up, is a dead letter, and is dropped; what ran beside it goes on."""
    poison = json.loads(house.post("/v1/jobs", {**CHAT, "messages": [{"role": "user", "content": "[[crash@4]]"}]})[2])
    mate = json.loads(house.post("/v1/jobs", {**CHAT, "max_tokens": 40})[2])["id"]
    for _ in range(3):
        worker = house.start("workers")
        eventually(lambda w=worker: w.poll() is not None or status_of(house, poison["id"]) == "failed")
    house.start("workers")
    eventually(lambda: status_of(house, poison["id"]) == "failed")
    eventually(lambda: status_of(house, mate) == "completed")
    (letter,) = json.loads(house.get("/admin/dlq")[1])["data"]
    assert house.get(f"/admin/dlq/{letter['id']}")[0] == 200
    assert house.request("DELETE", f"/admin/dlq/{letter['id']}")[0] in (200, 204)


def status_of(house: GuardedHouse, job: str) -> str:
    return str(json.loads(house.get(f"/v1/jobs/{job}")[1])["status"])


def looked_after(house: GuardedHouse) -> None:
    """Pools, their overrides, webhooks and metrics; and by the operator's commands, fleet and store."""
    assert house.get("/admin/pools")[0] == house.get("/admin/webhooks")[0] == house.get("/metrics")[0] == 200
    assert house.request("PUT", "/admin/pools/sim", {"paused": True, "for_s": 600})[0] == 200
    eventually(lambda: "paused" in json.loads(house.get("/admin/pools/sim")[1])["reason"])
    assert house.request("DELETE", "/admin/pools/sim")[0] == 200
    (message, *_) = json.loads(house.get("/admin/webhooks")[1])["data"]
    assert house.post(f"/admin/webhooks/{message['id']}/replay", {})[0] == 202
    environ = {**house.environ, "PENSTOCK_REDIS_URL": as_user(house.redis_url, "operator")}
    environ["PENSTOCK_API_PORT"] = str(free_port())  # doctor complains of one that is taken
    for code, *words in ((0, "ps"), (0, "store", "show"), (2, "store", "reset"), (0, "doctor")):
        command = [sys.executable, "-m", "cli", *words]
        done = subprocess.run(command, env=environ, cwd=house.folder, capture_output=True, text=True, check=False)
        assert done.returncode == code and "permission" not in done.stdout + done.stderr, (words, done)


@pytest.mark.parametrize("role", ROLES)
async def test_an_empty_store_may_be_entered(store: GuardedHouse, opened: Opened, role: str) -> None:
    """As a process does on a server on which an API process has loaded the functions. What else a role sends without a
    script is at the end of this file."""
    store.denied()
    api = opened(as_user(store.redis_url, "api"))
    await api.call("record", 0, "job_x")  # it loads the functions
    with user(store, "root") as root:
        root.flushall()
    await enter_store(opened(as_user(store.redis_url, role)))
    assert store.denied() == []


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("role", ["api", "offline"])
async def test_jobs_are_put_under_a_quota(store: GuardedHouse, opened: Opened, role: str, partitions: int) -> None:
    """By the door and by the intake of a broker's messages: with several partitions each asks what the others hold."""
    with user(store, "root") as root:
        root.flushall()
    store.denied()
    queue = Queue(opened(as_user(store.redis_url, role), partitions=partitions))
    quota = QuotaSettings(jobs=100, job_bytes=100_000, result_bytes=100_000)
    for _ in range(4):
        await queue.put(a_job(queue), quota=quota)
    assert store.denied() == []


async def test_a_right_that_lacks_is_the_stores_refusal(store: GuardedHouse, opened: Opened) -> None:
    """In a script too: whoever brings a job keeps it and tries again, and is told what to look at."""
    wire = opened(as_user(store.redis_url, "scheduler"))
    with pytest.raises(Unavailable, match=r"no permissions to run the 'z\w+' command.*penstock store acl"):
        await wire.call("usage", 0, "t", 60, 0, 0)
    with pytest.raises(Unavailable, match="penstock store acl"):
        await ScriptBatcher(wire, "usage").call(0, "t", 60, 0, 0)
    store.denied()


@pytest.mark.parametrize("role", ["api", "worker", "offline"])
async def test_a_promise_of_a_replica_may_be_asked_for(store: GuardedHouse, opened: Opened, role: str) -> None:
    """At D3 a mark is written and waited for: refused for want of a replica, not of a right."""
    script, *args = {
        "api": ["cancel", "job_00" + "0" * 30],
        "worker": ["finish", "w", "job_00" + "0" * 30, "1", "", "", ""],
        "offline": ["cancel", "job_00" + "0" * 30],
    }[role]
    store.denied()
    wire = opened(as_user(store.redis_url, role), durability="D3", timeout_s=0.5)
    with pytest.raises(Unavailable, match="no replica has it yet"):
        await wire.call(script, 0, *args)
    assert store.denied() == []


# --- Access rules of the store: a role may send what it sends and nothing besides, by what the server was ---

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
        Queue(wire, Headroom(wire)).shorten_retention([JOB], 5, [JOB]), MediaStore(wire).read(JOB, [0]),
        ConsoleSessions(wire).find("x"), ConsoleSessions(wire).take("link", "x"),
        Conversations(wire).read(CONVERSATION, TENANT), wire.ask(LEADER),
        wire.ask(VERSION), ApiKeys(wire).read(), ApiKeys(wire).used(), ApiKeys(wire).note_used({"key_1": 1}),
        ApiKeys(wire).change("key_1", lambda key: key), drained(UsageCounts(wire).read([date(1970, 1, 1)])),
        AuditLog(wire).recent(5),
    ],
    "worker": lambda wire: [
        Fleet(wire).cards(), drained(read_log(wire, 0, LOG, 1)),
        wire.run_ids(), wire.time_us(""), read_identity(wire), MediaStore(wire).read(JOB, [0]),
    ],
    "scheduler": lambda wire: [
        Plans(wire).cold_starts(), Plans(wire).read(), Overrides(wire).of(["m"]), Fleet(wire).processes(),
        read_identity(wire),
    ],
    "offline": lambda wire: [
        Redeliveries(wire).begin("q", "m"), Redeliveries(wire).settle("q", "m"), Files(wire).known([FILE]),
        Files(wire).expired(5), Queue(wire, Headroom(wire)).known([JOB]),
        Queue(wire, Headroom(wire)).shorten_retention([JOB], 5, [JOB]), Files(wire).get(FILE, TENANT),
        Batches(wire).forget_expired(5), Batches(wire).states([BATCH]), wire.memory(), Fleet(wire).processes(),
        Fleet(wire).cards(), read_identity(wire), drained(read_log(wire, 0, LOG, 1)),
    ],
}  # fmt: skip
"""What processes of a role ask without a script: the methods that api/, workers/, scheduler/ and offline/ call."""


async def drained(frames: AsyncGenerator[Any, None]) -> None:
    async for _ in frames:
        pass


def fill(root: Redis) -> None:
    """So much that lists are no shorter than one: what is listed is read."""
    for index, name in (("files", FILE), ("batches", BATCH)):
        root.zadd(partition_key(0, index, TENANT), {name: 1})
    root.zadd(partition_key(0, "hooks"), {MESSAGE: 1})
    root.zadd(partition_key(0, "expiring"), {FILE: 1, BATCH: 1})
    root.zadd(fleet_key("procs"), {"p": 1})
    root.sadd(partition_key(0, "usage_tenants", "0"), TENANT)
    root.sadd(partition_key(0, "usage_names", "0", TENANT), "sim key")


def kind_of(word: str) -> str | None:
    """The kind of key that a word is; None if it is none."""
    for keys, start in ((FLEET, re.escape(prefix(FLEET_SLOT))), (CATALOGUE, re.escape(prefix(7)).replace("7", r"\d+"))):
        for key in keys:
            if re.fullmatch(start + re.escape(key.pattern).replace(r"\{\}", "[^ ]+"), word):
                return key.name
    return None


def rows(table: Mapping[str, set[str]]) -> set[tuple[str, str]]:
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
                with contextlib.suppress(MediaLost, UnknownBatch, UnknownConversation, UnknownFile, UnknownJob):
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
