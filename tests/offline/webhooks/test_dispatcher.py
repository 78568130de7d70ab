"""Webhooks: signatures, forbidden addresses, when to try again, and deliveries by real processes that are killed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import re
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from batching import begin, client, ended, line, tools_of
from house import ADMIN_TOKEN, House, eventually
from openai import InvalidWebhookSignatureError, OpenAI
from receiver import Receiver, due_now, receiving

from cli.__main__ import main
from offline.webhooks import (
    MAX_IN_FLIGHT,
    WebhookDispatcher,
    WebhookEndpoint,
    after_failure,
    signed_headers,
    with_data,
)
from penstock.config import ConfigError, build
from penstock.guard import networks_of, refusal
from streaming.batches.store import Batches
from streaming.events import (
    DeliveryAttempt,
    Event,
    EventSettings,
    EventSubscriptions,
    Outbox,
    Webhooks,
    WebhookSettings,
    allows_url,
    endpoints_for,
)
from streaming.jobs.job import Chat, Job
from streaming.jobs.queue import Queue
from streaming.jobs.reader import JobReader
from streaming.keys import partition_key
from streaming.order import Priority
from streaming.redis.client import RedisClient

pytestmark = pytest.mark.slow

SECRET = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="
"""The 32 bytes 0123456789abcdef0123456789abcdef."""
JOB = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


def settings_of(**more: Any) -> WebhookSettings:
    return build(WebhookSettings, {"url": "https://example.com/hook", "secret": SECRET, **more}, "webhooks.test")


def an_errand(**more: Any) -> DeliveryAttempt:
    fields: dict[str, Any] = {
        "id": "msg_00" + "a" * 30, "attempt": 1, "tries": 1, "age_ms": 0, "now_ms": 1_700_000_000_000,
        "event": "evt_1", "type": "job.completed", "subject": "job_1", "at_ms": 1_700_000_000_000,
    }  # fmt: skip
    return DeliveryAttempt(**fields | more)


async def sent(times: int = 1, **row: Any) -> list[tuple[int, str]]:
    """What attempts at an endpoint with these settings come to."""
    endpoint = WebhookEndpoint("test", settings_of(**{"timeout_s": 5, "allow_http": True} | row))
    found = [await endpoint.send(an_errand()) for _ in range(times)]
    await endpoint.close()
    return found


LOCAL: dict[str, Any] = {"networks": ["127.0.0.0/8"]}


# --- signatures ------------------------------------------------------------------------------------------------------


def test_the_signature_is_what_openssl_makes_of_it() -> None:
    """By hand: printf 'msg_1.1700000000.{"a":1}' | openssl dgst -sha256 -hmac <the secret's bytes> -binary | base64"""
    headers = signed_headers(SECRET, "msg_1", 1_700_000_000, b'{"a":1}')
    assert headers == {
        "webhook-id": "msg_1",
        "webhook-timestamp": "1700000000",
        "webhook-signature": "v1,rkwp5YuvdrMkcu0ZhuMsXoTg44mHAr1Q0+FFgFpXsjY=",
    }


def test_the_five_lines_of_the_page_verify_it() -> None:
    """As they stand there."""
    page = (Path(__file__).parents[3] / "docs" / "events.md").read_text(encoding="utf-8")
    lines = next(block for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "hmac" in block)
    body = b'{"a":1}'
    headers = signed_headers(SECRET, "msg_1", int(time.time()), body)
    known = {"base64": base64, "hmac": hmac, "time": time, "secret": SECRET, "headers": headers}
    exec(lines, known | {"body": body})  # noqa: S102 - our own page
    with pytest.raises(AssertionError):
        exec(lines, known | {"body": body + b" "})  # noqa: S102


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_c2hvcnQ=", SECRET.removeprefix("whsec_"), "whsec_%"])
def test_what_is_no_secret_is_refused_without_saying_it(secret: str) -> None:
    """At the start, in plain words."""
    with pytest.raises(ConfigError, match="whsec_ and 24 to 64 bytes") as caught:
        settings_of(secret=secret)
    assert not secret or secret.removeprefix("whsec_") not in str(caught.value) or secret == "whsec_"


# --- where webhooks may go -------------------------------------------------------------------------------------------

INTERNAL = [
    "127.0.0.1", "127.8.9.1", "0.0.0.0", "0.1.2.3", "10.0.0.1",  # noqa: S104
    "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254", "169.254.0.1",
    "100.64.0.1", "100.127.255.254", "192.0.0.8", "192.0.2.1", "198.18.0.1",
    "198.51.100.7", "203.0.113.9", "192.88.99.1", "224.0.0.1", "239.255.255.250",
    "240.0.0.1", "255.255.255.255", "::", "::1", "::127.0.0.1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "fe80::1", "fe80::1%eth0",
    "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1", "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::", "2002:a00:1::", "2001::1",
    "2001:db8::1", "100::1",
]  # fmt: skip


@pytest.mark.parametrize("address", INTERNAL)
def test_internal_addresses_are_refused(address: str) -> None:
    assert "is not a public address" in refusal(address, ())


def test_public_addresses_and_a_network_that_is_named_are_allowed_and_no_other() -> None:
    for address in ("1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "::ffff:1.1.1.1"):
        assert refusal(address, ()) == ""
    allowed = networks_of(["10.1.0.0/16", "fd00::/8"])
    assert [bool(refusal(each, allowed)) for each in ("10.1.2.3", "::ffff:10.1.2.3", "fd00::1", "10.2.0.1")] == [
        False, False, False, True,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0", "[::1]", "[::ffff:127.0.0.1]"],
)
async def test_no_spelling_of_this_machine_is_connected_to(host: str) -> None:
    """The receiver is there, and hears nothing."""
    with receiving(Receiver()) as receiver:
        port = receiver.url.split(":")[2]
        ((status, problem),) = await sent(url=f"http://{host}:{port}")
    assert status == 0 and "is not a public address" in problem and receiver.got == []


async def test_a_name_that_is_looked_up_differently_each_time_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One look-up for a connection: its answer is checked, and connected to. A second answer is never asked for."""
    answers = [["127.0.0.1"], ["93.184.216.34", "127.0.0.1"]]
    asked: list[str] = []

    def getaddrinfo(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        return [(2, 1, 6, "", (address, port)) for address in answers[len(asked) - 1]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with receiving(Receiver()) as receiver:
        port = receiver.url.split(":")[2].split("/")[0]
        url = f"http://rebind.test:{port}"
        assert await sent(url=url, **LOCAL) == [(204, "")] and asked == ["rebind.test"]
        ((_, problem),) = await sent(url=url)
    assert "127.0.0.1 is not a public address" in problem
    assert len(receiver.got) == 1


async def test_no_more_than_64_kib_of_an_answer_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the piece that comes behind these it is enough."""
    endpoint, pieces = WebhookEndpoint("test", settings_of()), list[bytes]()

    async def body() -> AsyncIterator[bytes]:
        while True:
            pieces.append(b"x" * 1024)
            yield pieces[-1]

    @contextlib.asynccontextmanager
    async def answered(*_: object, **__: object) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(status=200, aiter_stream=body)

    monkeypatch.setattr(endpoint._pool, "stream", answered)
    assert await endpoint.send(an_errand()) == (200, "")
    assert len(pieces) == 64 + 1
    await endpoint.close()


async def test_redirects_are_not_followed_and_slow_answers_not_waited_for() -> None:
    given_up = threading.Event()

    def answer(number: int) -> tuple[int, dict[str, str]]:
        if number == 2:
            given_up.wait(60)
        return 302, {"location": receiver.url + "/elsewhere"}

    with receiving(Receiver(answer)) as receiver:
        found = await sent(times=2, url=receiver.url, **LOCAL | {"timeout_s": 3})
        given_up.set()
    assert found == [(302, "the endpoint answered 302"), (0, "TimeoutError")]
    assert len(receiver.got) == 2


async def test_an_endpoint_has_no_more_attempts_than_it_may_have_at_once(wire: RedisClient) -> None:
    """However many messages are due: those under way are counted, and while there is no room none is asked for."""
    endpoint = WebhookEndpoint("e", settings_of())
    dispatcher, asked = WebhookDispatcher(tools_of(wire), "p", [endpoint]), list[tuple[int, int]]()

    async def outgoing(_: str, most: int, lease_ms: int) -> list[DeliveryAttempt]:
        asked.append((most, lease_ms))
        return []

    dispatcher._webhooks.outgoing = outgoing  # type: ignore[method-assign]
    for under_way in (0, 3, MAX_IN_FLIGHT):
        tasks = {asyncio.create_task(asyncio.sleep(0)) for _ in range(under_way)}
        await dispatcher._start_attempts(endpoint, tasks)
        await asyncio.gather(*tasks)
    await endpoint.close()
    assert asked == [(MAX_IN_FLIGHT, endpoint.lease_ms), (MAX_IN_FLIGHT - 3, endpoint.lease_ms)]


async def test_a_message_is_nobody_elses_for_as_long_as_its_attempt_may_last(wire: RedisClient) -> None:
    """While the endpoint takes its time, no other process is given the message."""
    webhooks, endpoint = Webhooks(wire), WebhookEndpoint("test", settings_of())
    entry = await wire.redis.xadd(partition_key(0, "outbox", "webhooks"), {"id": "job_1"})
    event = Event("job_1", "t", "job.completed", await wire.now_ms(), 0, entry.decode())
    await webhooks.dispatch(event, ["test"])
    assert len(await webhooks.outgoing("test", 1, endpoint.lease_ms)) == 1
    assert await webhooks.outgoing("test", 1, endpoint.lease_ms) == []
    (message,) = await webhooks.recent(1)
    await endpoint.close()
    assert (message.state, message.attempts) == ("pending", 1)
    assert message.due_ms - message.tried_ms > 1000 * endpoint.settings.timeout_s


ALLOWED = ("https://hooks.example.com/penstock/", "https://other.example.com:8443/a", "https://all.example.com")


@pytest.mark.parametrize(
    "url",
    ["https://hooks.example.com/penstock/", "https://hooks.example.com/penstock/job?token=x", "https://all.example.com",
     "https://HOOKS.example.com:443/penstock/a", "https://other.example.com:8443/a", "https://all.example.com/x//y",
     "https://other.example.com:8443/a/b", "https://other.example.com:8443/a?b=..", "https://all.example.com:443/?x",
     "https://all.example.com/.well-known/a.b;c=1/x..y/~z/", "https://all.example.com/a%20b%3D%5B1%5D/%41%7e"],
)  # fmt: skip
def test_urls_below_an_allowed_one_are_allowed(url: str) -> None:
    assert allows_url(settings_of(urls=ALLOWED), url)


@pytest.mark.parametrize(
    "url",
    ["http://hooks.example.com/penstock/", "https://hooks.example.com/", "https://hooks.example.com/penstock",
     "https://hooks.example.com:444/penstock/", "https://hooks.example.com.evil.test/penstock/",
     "https://hooks.example.com@evil.test/penstock/", "https://user@hooks.example.com/penstock/", "https://evil.test",
     "https://hooks.example.com/penstock/../admin", "https://hooks.example.com/penstock/%2e%2E/admin",
     "https://hooks.example.com/penstock/..", "https://hooks.example.com/penstock/..;/admin",
     "https://hooks.example.com/penstock/%252e%252e/admin", "https://hooks.example.com/penstock/..%2fadmin",
     "https://hooks.example.com/penstock\\..\\admin", "https://evil.test\\@hooks.example.com/penstock/",
     "https://hooks.example.com/penstock/ a", "https://hooks.example.com/penstock/\r\nx: y",
     "//hooks.example.com/penstock/",
     "https://hooks.example.com./penstock/", "https://all.example.com#@evil.test", "https://all.example.com:x/",
     "https://other.example.com:8443/ab", "https://other.example.com/a", "https://example.com/hook/more",
     *[f"https://all.example.com/a/{each}" for each in (
         "%c0%ae%c0%ae/b", "%C0%AE./b", "%e0%80%ae", "%00", "..%00/b", "x%09y", "%0d%0a", "%1f", "%7f", "%2e", ".%2e/b",
         "%u002e%u002e/b", "%", "%2", "%zz", "%ff0e", "%ef%bc%8e%ef%bc%8e/b", "%c4%ae%c4%ae/b", "%5c..%5cb", "%2fb",
         ".", "./b", "..x", "...", "....//b", ".;/b", "..;a=b/c", "..%3b/b", "%20../b", "..%20/b", ".%20./b", "%23",
         "%3f", "%25", "{a}", "a|b", "<a>", "^", "`")],
     "https://all.example.com:0/", "https://all.example.com:00/",
     "https://[::1", "ftp://all.example.com/", "https://all.example.com/\u00e4", "https:all.example.com", ""],
)  # fmt: skip
def test_other_urls_are_not(url: str) -> None:
    """Scheme, host and port are equal, the path begins with whole segments, and nothing in it climbs."""
    assert not allows_url(settings_of(urls=ALLOWED), url)


@pytest.mark.parametrize(
    "url",
    ["https://a.test/x/../y", "https://a.test/?q=1", "https://a.test:0/", "http://a.test/", "https://\u00e4.test/"],
)
def test_a_url_that_cannot_be_compared_is_no_allowed_one(url: str) -> None:
    with pytest.raises(ConfigError, match="urls"):
        settings_of(urls=[url])


@pytest.mark.parametrize(
    ("url", "words"),
    [("http://example.com", "https://"), ("ftp://example.com", "https://"),
     ("https://u:p@example.com", "without a user"), ("https://", "https://host"), ("https://example.com:99999", "ort"),
     ("https://example.com:0", "port from 1"), ("https://b\u00fccher.example/", "xn--"),
     ("https://example.com/\u00e4", "must be ASCII"), ("https://ci:hidden-part/x@hooks.example/p", "url")],
)  # fmt: skip
def test_addresses_that_cannot_be_are_refused_at_the_start(url: str, words: str) -> None:
    """Without a part of their password."""
    with pytest.raises(ConfigError, match=words) as refused:
        settings_of(url=url)
    assert "hidden-part" not in str(refused.value)


# --- when to try again -----------------------------------------------------------------------------------------------


def test_waits_grow_to_their_longest_and_end() -> None:
    """8 attempts within a day at the middle of the jitter, which is a fifth; then it is given up with the reason."""
    waits, age_s, tries = [], 0.0, 0
    while (decision := after_failure(tries := tries + 1, age_s, 500, 86_400, 0.5))[0] is not None:
        waits.append(decision[0])
        age_s += decision[0]
    assert waits == [5, 30, 180, 1080, 6480, 21600, 21600, 21600]
    assert "9 attempts" in decision[1] and age_s < 86_400
    found = [after_failure(2, 0, 0, 86_400, chance)[0] for chance in (0.0, 0.5, 1.0)]
    assert found == pytest.approx([24, 30, 36])
    assert after_failure(1, 0, 410, 86_400, 0.5)[0] is None, "it is gone"


# --- the whole way ---------------------------------------------------------------------------------------------------


def configure(house: House, receiver: Receiver, **more: Any) -> None:
    """An endpoint in the settings of every process."""
    row = {"url": receiver.url, "secret": SECRET, "allow_http": True, "networks": ["127.0.0.0/8"], "timeout_s": 1.0}
    lines = [f"{key} = {json.dumps(value)}" for key, value in (row | more).items()]
    (house.folder / "penstock.toml").write_text("\n".join(["[webhooks.test]", *lines, ""]))


def start(house: House, receiver: Receiver, **more: Any) -> None:
    """All roles, with `test` for this tenant, which gets only what names it, and `others` for another one."""
    configure(house, receiver, **{"events": [], **more})
    others = f'[webhooks.others]\nurl = "{receiver.url}"\nsecret = "{SECRET}"\ntenant = "others"\nallow_http = true\n'
    with (house.folder / "penstock.toml").open("a") as settings:
        settings.write(others)
    house.start_all("workers", "offline")


def messages(house: House) -> list[dict[str, Any]]:
    return json.loads(house.get("/admin/webhooks")[1])["data"]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving(Receiver()) as each:
        yield each


def submit(house: House, **more: Any) -> str:
    status, _, body = house.post("/v1/jobs", JOB | more)
    assert status == 202, body
    return str(json.loads(body)["id"])


def test_a_job_and_a_batch_are_told_of_and_the_official_client_believes_it(
    empty_house: House, receiver: Receiver
) -> None:
    """First two answers are 500: the same message comes again under the same id, each time rightly signed."""
    receiver.answer = lambda number: (500 if number <= 2 else 200, {})
    configure(empty_house, receiver, events=["job.completed", "job.cancelled", "batch.completed"])
    empty_house.start_api()
    waiting = submit(empty_house)
    empty_house.post(f"/v1/jobs/{waiting}/cancel", {})
    empty_house.start("workers")
    empty_house.start("offline")
    empty_house.wait_ready()
    openai = client(empty_house)
    job = submit(empty_house)
    batch = ended(openai, begin(openai, [line(number) for number in range(3)]))
    empty_house.post("/v1/chat/completions", JOB)  # somebody waits for it: no webhook
    eventually(lambda: [bool(m["last_status_code"]) for m in messages(empty_house)] == [True] * 3)
    for message in messages(empty_house):
        if message["status"] == "pending":
            due_now(empty_house, message)
    eventually(lambda: [m["status"] for m in messages(empty_house)] == ["delivered"] * 3)
    told = {(body["type"], body["data"]["id"]) for body in receiver.bodies()}
    assert told == {("job.cancelled", waiting), ("job.completed", job), ("batch.completed", batch.id)}
    assert len(receiver.got) == 5 and len(set(receiver.ids())) == 3
    hooks = OpenAI(api_key="none", webhook_secret=SECRET).webhooks
    for headers, body in receiver.got:
        hooks.verify_signature(body, headers)
        with pytest.raises(InvalidWebhookSignatureError):
            hooks.verify_signature(body + b" ", headers)
    whole = next(each for each in receiver.got if b"batch.completed" in each[1])
    event = hooks.unwrap(whole[1], whole[0])
    assert event.type == "batch.completed" and event.data.id == batch.id
    assert SECRET.removeprefix("whsec_") not in "".join(empty_house.log(role) for role in ("api", "offline", "workers"))
    assert SECRET.encode() not in empty_house.get("/admin/webhooks")[1]


def test_the_commands_list_show_and_replay(
    empty_house: House, receiver: Receiver, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """410 ends it at once, and it says so; a replay brings the same id again."""
    receiver.answer = lambda _: (410, {})
    configure(empty_house, receiver)
    empty_house.start_all("workers", "offline")
    submit(empty_house)
    eventually(lambda: [m["status"] for m in messages(empty_house)] == ["failed"])
    eventually(lambda: "webhook given up: the endpoint answered 410" in empty_house.log("offline"))
    monkeypatch.chdir(empty_house.folder)
    monkeypatch.setenv("PENSTOCK_API_KEY", ADMIN_TOKEN)
    url = ("--url", empty_house.url)
    assert main(["webhooks", "ls", *url]) == 0 and "job.completed" in capsys.readouterr().out
    name = messages(empty_house)[0]["id"]
    assert main(["webhooks", "show", name, *url]) == 0 and "410" in capsys.readouterr().out
    heard = len(receiver.got)
    receiver.answer = lambda _: (200, {})
    assert main(["webhooks", "replay", name, *url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "pending"
    eventually(lambda: messages(empty_house)[0]["status"] == "delivered")
    assert receiver.ids() == [name] * (heard + 1) and messages(empty_house)[0]["attempts"] == heard + 1
    assert empty_house.get("/admin/webhooks/msg_00" + "0" * 30)[0] == 404


def test_killed_in_between_another_delivers(empty_house: House) -> None:
    """The receiver has heard it and not answered when its sender is killed: it hears it again, from another process."""
    killed: list[bool] = []

    def answer(number: int) -> tuple[int, dict[str, str]]:
        if number == 1:
            offline.send_signal(signal.SIGKILL)
            offline.wait()
            killed.append(True)
        return 200, {}

    empty_house.environ["PENSTOCK_REDIS_PARTITIONS"] = "3"
    with receiving(Receiver(answer)) as receiver:
        configure(empty_house, receiver)
        empty_house.start_api()
        empty_house.start("workers")
        offline = empty_house.start("offline")
        jobs = {submit(empty_house) for _ in range(5)}
        eventually(lambda: killed)
        empty_house.start("offline", "--id", "offline-2")
        eventually(lambda: len([m for m in messages(empty_house) if m["status"] == "delivered"]) == 5)
    assert {body["data"]["id"] for body in receiver.bodies()} == jobs
    assert len(set(receiver.ids())) == 5 and len(receiver.got) > 5


def test_the_end_of_a_turn_is_told_when_its_conversation_has_it(empty_house: House, receiver: Receiver) -> None:
    """Whoever gets the event can begin the next turn at once. Nothing else is told where only such ends are asked
    for."""
    configure(empty_house, receiver, events=["response.incomplete"])
    empty_house.start_all("workers", "offline")
    openai = client(empty_house)
    submit(empty_house)
    openai.responses.create(model="sim", input="x", background=True)
    conversation = openai.conversations.create().id
    asked: Any = {"model": "sim", "conversation": conversation, "background": True, "max_output_tokens": 3}
    first = openai.responses.create(input="one", **asked)
    eventually(lambda: receiver.got)
    second = openai.responses.create(input="two", **asked)
    eventually(lambda: len(receiver.got) == 2)
    assert [body["data"]["id"] for body in receiver.bodies()] == [first.id, second.id]
    items = list(openai.conversations.items.list(conversation, order="asc"))
    assert [getattr(item, "role", None) for item in items] == ["user", "assistant"] * 2


# --- a webhook for one request ---------------------------------------------------------------------------------------

NAMED = {"webhook": "test"}


def test_whoever_names_a_webhook_is_told_once_whatever_it_asks(empty_house: House, receiver: Receiver) -> None:
    """Chats whole and streamed, several choices, completions, responses, embeddings and jobs, and what is asked without
    naming it stays unheard."""
    empty_house.environ["PENSTOCK_REDIS_PARTITIONS"] = "3"
    start(empty_house, receiver)
    prompt, named = {"model": "sim", "prompt": ["a", "b"], "max_tokens": 3}, {"queue": NAMED}
    wanted: dict[str, dict[str, Any]] = {}

    def ask(path: str, body: dict[str, Any]) -> None:
        labels = {"order": f"{path} {len(wanted)}"}
        status, headers, answer = empty_house.post(path, body | named | {"metadata": labels})
        assert status in (200, 202), answer
        is_response = path == "/v1/responses"
        name = json.loads(answer)["id"] if is_response else headers["x-job-id"]
        wanted[name] = labels
        empty_house.post(path, body)

    ask("/v1/chat/completions", JOB)
    ask("/v1/chat/completions", JOB | {"stream": True, "n": 3})
    ask("/v1/completions", prompt | {"n": 2})
    ask("/v1/jobs", JOB)
    ask("/v1/responses", {"model": "sim", "input": "x"})
    ask("/v1/responses", {"model": "sim", "input": "x", "background": True, "max_output_tokens": 1})
    ask("/v1/embeddings", {"model": "sim", "input": ["x", "y"]})
    eventually(lambda: len(receiver.got) == len(wanted))
    bodies = {body["data"]["id"]: body for body in receiver.bodies()}
    assert {name: body["data"]["metadata"] for name, body in bodies.items()} == wanted
    for name, body in bodies.items():
        kind, _, status = body["type"].partition(".")
        assert (kind, status) == ("response" if name.startswith("resp_") else "job", body["data"]["status"])
        assert body["data"]["usage"]["prompt_tokens"] > 0 and body["data"]["model"] == "sim"
        assert empty_house.get(body["data"]["result_url"])[0] == 200
    assert sorted(body["data"]["status"] for body in bodies.values()) == ["completed"] * 6 + ["incomplete"]
    eventually(lambda: all(message["status"] == "delivered" for message in messages(empty_house)))
    assert len(messages(empty_house)) == len(wanted) == len(receiver.got)
    hooks = OpenAI(api_key="none", webhook_secret=SECRET).webhooks
    for headers, sent in receiver.got:
        hooks.unwrap(sent, headers)


def test_every_end_is_told_to_the_webhook_that_is_named(empty_house: House, receiver: Receiver) -> None:
    """Also those to which it does not subscribe, and a subscriber that is named too is told once."""
    start(empty_house, receiver, events=["job.completed", "response.completed"])
    done = submit(empty_house, queue=NAMED)
    failed = submit(empty_house, queue=NAMED, max_tokens=1_000_000)
    running = submit(empty_house, max_tokens=8000, queue=NAMED)
    late = submit(empty_house, max_tokens=8000, queue=NAMED | {"deadline_ms": 300})
    responses, asked = client(empty_house).responses, {"model": "sim", "input": "x", "background": True}
    broken, stopped = (
        responses.create(**asked, max_output_tokens=tokens, extra_body={"queue": NAMED}).id  # type: ignore[call-overload]
        for tokens in (1_000_000, 8000)
    )
    eventually(lambda: json.loads(empty_house.get(f"/v1/jobs/{running}")[1])["status"] == "in_progress")
    empty_house.post(f"/v1/jobs/{running}/cancel", {})
    responses.cancel(stopped)
    eventually(lambda: len(receiver.got) == 6)
    told = {body["data"]["id"]: body for body in receiver.bodies()}
    ends = {done: "completed", failed: "failed", running: "cancelled", late: "expired"}
    wanted = {name: f"job.{end}" for name, end in ends.items()}
    wanted |= {broken: "response.failed", stopped: "response.cancelled"}
    assert {name: body["type"] for name, body in told.items()} == wanted
    for name, end in ends.items():
        job, data = json.loads(empty_house.get(f"/v1/jobs/{name}")[1]), told[name]["data"]
        error = job["error"] and {field: value for field, value in job["error"].items() if field != "message"}
        assert (data["status"], data["error"], data["usage"]) == (end, error, job["usage"]), "a message may quote"


def test_a_url_of_the_settings_may_be_named(empty_house: House, receiver: Receiver) -> None:
    """Signed with the secret of its row, and retried; a secret in its query is in no log and no list."""
    receiver.answer = lambda number: (500 if number == 1 else 200, {})
    base = receiver.url.removesuffix("/hook")
    start(empty_house, receiver, urls=[f"{base}/more"], url=f"{base}/hook")
    url = f"{base}/more/here?token=hush"
    job = submit(empty_house, queue={"webhook": url})
    eventually(lambda: [bool(m["last_status_code"]) for m in messages(empty_house)] == [True])
    (message,) = messages(empty_house)
    assert message["url"] == f"{base}/more/here"
    due_now(empty_house, message)
    eventually(lambda: messages(empty_house)[0]["status"] == "delivered")
    assert [body["data"]["id"] for body in receiver.bodies()] == [job, job] and len(set(receiver.ids())) == 1
    assert receiver.bodies()[0] == receiver.bodies()[1] and receiver.paths == ["/more/here?token=hush"] * 2
    assert "hush" not in "".join(empty_house.log(role) for role in ("api", "offline", "workers"))
    assert b"hush" not in empty_house.get("/admin/webhooks")[1]


def test_a_webhook_that_nobody_may_name_is_refused(empty_house: House, receiver: Receiver) -> None:
    """At every door, with the field's name, before anything is queued; nothing tells what other tenants have."""
    start(empty_house, receiver, urls=[receiver.url + "/more"])
    doors: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", JOB),
        ("/v1/chat/completions", JOB | {"stream": True}),
        ("/v1/completions", {"model": "sim", "prompt": "x"}),
        ("/v1/responses", {"model": "sim", "input": "x"}),
        ("/v1/embeddings", {"model": "sim", "input": "x"}),
    ]
    refused: list[Any] = ["others", "nobody", "", "x" * 3000, 1, receiver.url + "/more/../x", "https://evil.test/?hush"]
    for path, body in [*doors, *[("/v1/jobs", JOB | {"queue": {"webhook": each}}) for each in refused]]:
        status, _, answer = empty_house.post(path, {"queue": {"webhook": "others"}} | body)
        assert status == 400 and json.loads(answer)["error"]["param"] == "queue.webhook"
        assert b"hush" not in answer
    unknown, foreign = (
        json.loads(empty_house.post("/v1/jobs", JOB | {"queue": {"webhook": each}})[2]) for each in ("nobody", "others")
    )
    assert unknown == foreign and "test" in unknown["error"]["message"]
    assert json.loads(empty_house.get("/v1/jobs")[1])["data"] == []
    openai = client(empty_house)
    for extra in ({"webhook": "test"}, {"queue": NAMED}):
        status, _, answer = empty_house.post("/v1/batches", {"input_file_id": "file-1", "endpoint": "x"} | extra)
        assert status == 400 and "webhook" in json.loads(answer)["error"]["param"]
    batch = ended(openai, begin(openai, [line(0, queue=NAMED), line(1)]))
    errors = openai.files.content(batch.error_file_id or "").text
    assert "queue.webhook" in errors and batch.request_counts is not None and batch.request_counts.completed == 1
    assert receiver.got == []


def test_a_repeated_request_is_told_once_and_may_not_name_another(empty_house: House, receiver: Receiver) -> None:
    start(empty_house, receiver)
    key = {"Idempotency-Key": "order-17"}
    first, again = (empty_house.post("/v1/jobs", JOB | {"queue": NAMED}, key) for _ in range(2))
    assert json.loads(first[2])["id"] == json.loads(again[2])["id"]
    status, _, answer = empty_house.post("/v1/jobs", JOB | {"queue": {"webhook": receiver.url}}, key)
    assert (status, json.loads(answer)["error"]["code"]) == (422, "idempotency_key_reused")
    last = submit(empty_house, queue={"webhook": receiver.url})  # the URL of `test`: the same endpoint
    eventually(lambda: len(messages(empty_house)) == 2 and len(receiver.got) == 2)
    assert {body["data"]["id"] for body in receiver.bodies()} == {json.loads(first[2])["id"], last}


async def test_the_end_of_a_job_is_told_to_the_webhook_that_it_names(wire: RedisClient) -> None:
    """Also once its record is gone."""
    rows = {"own": settings_of(tenant="t", events=[]), "all": settings_of(tenant="t")}
    rows["foreign"] = settings_of(tenant="x")
    queue, reader, box = Queue(wire), JobReader(wire), Outbox(wire, "webhooks")
    wanted = EventSubscriptions(EventSettings(), rows)

    async def end(webhook: str) -> str:
        job = Job(
            id=queue.new_id("t"), model="sim", tenant="t", priority=Priority.BATCH, prompt=Chat(()), events="wo",
            webhook=wanted.webhook("t", webhook), metadata={"a": "b"},
        )  # fmt: skip
        await queue.put(job)
        await queue.cancel(job.id)
        return job.id

    async def told() -> list[tuple[list[str], dict[str, Any]]]:
        found = await with_data(await box.collect("p", 10), reader, Batches(wire))
        return [(list(endpoints_for(event, rows)), json.loads(data)) for event, data in found]

    job = await end("own")
    ((whom, data),) = await told()
    assert whom == ["own"] and (data["id"], data["status"], data["metadata"]) == (job, "cancelled", {"a": "b"})
    deleted = await end("own")
    await wire.redis.delete(partition_key(int(deleted[4:6], 16), "job", deleted))
    assert await told() == [(["own"], {"id": deleted, "status": "cancelled"})]
    with pytest.raises(ValueError, match="Yours are own, all"):
        wanted.webhook("t", "foreign")


async def test_an_attempt_that_ends_in_a_defect_has_failed_like_others(
    wire: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the next one comes later and later, the message says why, and it is given up in the end."""

    async def send(*_: object) -> tuple[int, str]:
        raise TypeError("nobody thought of this")

    monkeypatch.setattr(WebhookEndpoint, "send", send)
    webhooks = Webhooks(wire)
    entry = await wire.redis.xadd(partition_key(0, "outbox", "webhooks"), {"id": "job_1"})
    event = Event("job_1", "t", "job.completed", await wire.now_ms(), 0, entry.decode())
    await webhooks.dispatch(event, ["test"])
    dispatcher = WebhookDispatcher(tools_of(wire), "p", [endpoint := WebhookEndpoint("test", settings_of())])
    (attempt,) = await webhooks.outgoing("test", 1, endpoint.lease_ms)
    await dispatcher._attempt_safely(endpoint, attempt)
    (message,) = await webhooks.recent(1)
    assert (message.state, message.problem) == ("pending", "TypeError: nobody thought of this")
    assert 3000 < message.due_ms - message.tried_ms < 7000
    await endpoint.close()
