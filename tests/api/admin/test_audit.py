"""/admin/audit: each admin action leaves one entry, at whichever API process, and nothing that a sender chose but its
request's id."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from api_in_process import LocalApi, api_in_process, key_of
from openapi_document import conforms
from starlette.types import Scope

from api.auth import audit
from api.auth.audit import MAX_AT_ONCE, MAX_ENTRY_BYTES, MAX_WAITING, Audit
from api.auth.keys import Caller
from api.openai import errors
from api.openapi import ANSWERS
from api.routes import ROUTES, TABLE, Access
from streaming.errors import Unavailable
from streaming.fleet.audit import KEPT, AuditLog
from streaming.keys import fleet_key
from streaming.order import Priority
from streaming.redis.client import RedisClient

pytestmark = pytest.mark.slow

ROOT, PLAIN, STRANGE = "sk-canary-root-0123456789", "sk-canary-plain-0123456789", "sk-canary-strange-0123456789"
ADMIN = Caller("ops", Priority.INTERACTIVE, "root", admin=True)
KEYS = {"root": key_of(ROOT, "ops", admin=True), "plain": key_of(PLAIN, "b")}
SECRETS = [*(ROOT, PLAIN, STRANGE), *(hashlib.sha256(key.encode()).hexdigest() for key in (ROOT, PLAIN, STRANGE))]
CHANGES = [route for route in ROUTES if route.access is Access.ADMIN and route.method != "GET"]
UNKNOWN_BY_PATH = {"{model:path}": "sim", "{key_id}": "key_0", "{letter_id}": "0-1-0", "{job_id}": "job_00" + "0" * 30}


@pytest.fixture
async def api(wire: RedisClient) -> AsyncIterator[LocalApi]:
    async with api_in_process(wire, KEYS) as api:
        yield api


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


async def entries(api: LocalApi, **query: Any) -> list[dict[str, Any]]:
    answer = await api.client.get("/admin/audit", params={"limit": 100, **query}, headers=bearer(ROOT))
    assert answer.status_code == 200, answer.text
    page = answer.json()
    assert conforms(page, ANSWERS["AuditEntryList"])
    found: list[dict[str, Any]] = page["data"]
    return found


async def stored(api: LocalApi, count: int, at: LocalApi | None = None) -> list[dict[str, Any]]:
    """The entries of a process, newest first, which are so many; `at`: the one that is asked for them."""
    await api.services.audit.store()
    found = await entries(at or api)
    assert len(found) == count, found
    return found


@pytest.mark.parametrize("key", [ROOT, PLAIN, STRANGE])
async def test_every_change_leaves_one_entry(api: LocalApi, wire: RedisClient, key: str) -> None:
    """Whoever tries it and however it ends: of each route of the table, sent to one process and read at another."""
    async with api_in_process(RedisClient.open(wire.settings), KEYS) as other:
        for number, route in enumerate(CHANGES, 1):
            path = re.sub(r"\{[^}]+\}", lambda found: UNKNOWN_BY_PATH.get(found[0], "x-1"), route.path)
            answer = await api.client.request(route.method, path, json={}, headers=bearer(key))
            newest = (await stored(api, number, other))[0]
            said = [newest[name] for name in ("action", "status", "address", "request_id")]
            assert said == [route.action, answer.status_code, "127.0.0.1", answer.headers["x-request-id"]]
            refused = answer.status_code in (401, 403)
            assert refused == (key != ROOT) == (newest["outcome"] == "refused")
            assert newest["who"] == {ROOT: "root", PLAIN: "plain", STRANGE: None}[key]
            assert newest["tenant"] == {ROOT: "ops", PLAIN: "b", STRANGE: None}[key]
    assert len(CHANGES) >= 9


async def test_an_entry_names_what_was_done_to_what_and_no_secret(api: LocalApi) -> None:
    """Created and new keys, links, sessions; keys in a label or a request's id are hidden."""
    make = {"tenant": "web", "label": f"replaces {STRANGE}"}
    headers = bearer(ROOT) | {"X-Request-Id": STRANGE}
    made = (await api.client.post("/admin/keys", json=make, headers=headers)).json()
    new = (await api.client.post(f"/admin/keys/{made['id']}/rotate", headers=bearer(ROOT))).json()
    link = (await api.client.post("/admin/console/links", headers=bearer(ROOT))).json()["path"].partition("=")[2]
    session = (await api.client.post("/console/session", json={"link": link})).json()["token"]
    assert (await api.client.post("/console/session", json={"link": link})).status_code == 401
    assert (await api.client.post("/console/session", json={"key": 1, "link": 1})).status_code == 400
    await api.client.put("/admin/pools/sim", json={"want": 1}, headers=bearer(ROOT))
    found = sorted(await stored(api, 7), key=lambda each: float(each["at"]))
    assert [(each["action"], each["target"], each["outcome"]) for each in found] == [
        ("key.create", made["id"], "done"),
        ("key.rotate", made["id"], "done"),
        ("console.link", "", "done"),
        ("console.login", "", "done"),
        ("console.login", "", "refused"),
        ("console.login", "", "failed"),
        ("pool.override", "sim", "done"),
    ]
    assert (found[-1]["detail"]["want"], found[0]["detail"]["tenant"]) == (1, "web")
    redis = api.services.store_client.redis
    acts, refusals = [await redis.xrange(fleet_key("audit", kind)) for kind in KEPT]
    assert (len(acts), len(refusals)) == (5, 2)  # who was not let in fills no place of an admin's
    written = str((acts, refusals))
    for secret in (*SECRETS, made["key"], new["key"], link, session):
        assert secret not in written
        assert hashlib.sha256(secret.encode()).hexdigest() not in written


async def test_pages_show_each_entry_once(wire: RedisClient) -> None:
    """Newest first, also where entries of both kinds have the same place."""
    log, keys = AuditLog(wire), [fleet_key("audit", kind) for kind in KEPT]
    for place in (*("1-0", "2-0", "2-1", "3-0"), "9-0"):
        for key in keys:
            await wire.redis.xadd(key, {"entry": json.dumps({"action": place})}, id=place)
    await wire.redis.xadd(keys[0], {"entry": "no JSON"}, id="10-0")
    for size in (1, 2, 3, 4):
        shown: list[str] = []
        while page := await log.recent(size, shown[-1] if shown else "", 2):
            shown += [each["id"] for each in page]
        assert shown == [*("0-10-0", "0-9-0", "1-9-0", "0-3-0", "1-3-0", "0-2-1", "1-2-1", "0-2-0", "1-2-0")]


async def test_the_list_is_read_by_pages_and_from_a_time_on(api: LocalApi) -> None:
    for number in range(3):
        await api.client.delete("/admin/dlq/0-1-0", headers=bearer(PLAIN if number == 1 else ROOT))
    found = await stored(api, 3)
    answer = await api.client.get("/admin/audit?limit=2", headers=bearer(ROOT))
    page = answer.json()
    assert page["data"] == found[:2] and page["has_more"]
    assert await entries(api, after=page["last_id"]) == found[2:]
    assert await entries(api, since=found[0]["at"] + 3600) == []
    assert await entries(api, since=found[2]["at"] - 3600) == found
    assert await entries(api, after="1-0-0") == []
    for wrong in ("after=1", "after=2-1-1", "limit=0", "since=x"):
        assert (await api.client.get(f"/admin/audit?{wrong}", headers=bearer(ROOT))).status_code == 400
    assert (await api.client.get("/admin/audit", headers=bearer(PLAIN))).status_code == 403


async def test_a_flood_of_refusals_keeps_no_call_going(wire: RedisClient) -> None:
    """Each call stores what it found, in one round trip; what came meanwhile is for the next one."""
    found, trips = TABLE.find("GET", "/admin/keys"), list[int]()

    class Flooded(AuditLog):
        async def add(self, entries: Sequence[tuple[str, bytes]]) -> None:
            trips.append(len(entries))
            for _ in range(3 * len(entries) + 1):
                noted.refused(scope_of(), found, errors.permission_denied())
            await super().add(entries)

    noted = Audit(Flooded(wire))
    for calls in range(1, 5):
        await noted.store()
        assert len(trips) == calls
    assert sum(trips) == await wire.redis.xlen(fleet_key("audit", "refusals")) > 10


async def test_what_an_admin_was_refused_is_among_the_acts(api: LocalApi) -> None:
    """With what was asked for, also how long a key was to live."""
    short = {"tenant": "web", "admin": True, "expires_in_s": 600}
    own = (await api.client.post("/admin/keys", json=short, headers=bearer(ROOT))).json()
    longer = {"tenant": "web", "expires_in_s": 6_000}
    answer = await api.client.post("/admin/keys", json=longer, headers=bearer(own["key"]))
    assert answer.status_code == 403
    refused, made = await stored(api, 2)
    assert refused["outcome"] == "refused" and refused["detail"]["tenant"] == "web"
    assert refused["detail"]["expires_at"] > made["detail"]["expires_at"] == own["expires_at"]
    assert await api.services.store_client.redis.xlen(fleet_key("audit", "refusals")) == 0


async def test_refusals_push_out_no_acts(wire: RedisClient) -> None:
    """However many there are; and both kinds are bounded."""
    log = AuditLog(wire)
    await log.add([("acts", b'{"action": "key.create"}')])
    keys = {kind: fleet_key("audit", kind) for kind in KEPT}
    for kind, key in keys.items():
        await wire.redis.eval(
            "for i = 1, ARGV[1] do redis.call('XADD', KEYS[1], '*', 'entry', '{}') end", 1, key, KEPT["refusals"] + 1000
        )
        await log.add([(kind, b'{"action": "last"}')])
    assert await wire.redis.xlen(keys["refusals"]) <= KEPT["refusals"] + 500
    first = await wire.redis.xrange(keys["acts"], count=1)
    assert first[0][1][b"entry"] == b'{"action": "key.create"}'
    await wire.redis.eval(
        "for i = 1, ARGV[1] do redis.call('XADD', KEYS[1], '*', 'entry', '{}') end", 1, keys["acts"], KEPT["acts"]
    )
    await log.add([("acts", b'{"action": "after all"}')])
    assert await wire.redis.xlen(keys["acts"]) <= KEPT["acts"] + 500


class Store(AuditLog):
    """A store that is away at first; what was sent then may have come through."""

    away, came_through = True, False

    async def add(self, entries: Sequence[tuple[str, bytes]]) -> None:
        if not self.away or self.came_through:
            await super().add(entries)
        if self.away:
            raise Unavailable("the test says so")


def scope_of(caller: object = None) -> Scope:
    state = {"address": "10.0.0.1", "request_id": "req_1", "caller": caller, "status": 200}
    return {"type": "http", "method": "DELETE", "path": "/admin/pools/sim", "state": state}


@pytest.mark.parametrize("came_through", [True, False])
async def test_entries_wait_for_a_store_that_is_away(wire: RedisClient, *, came_through: bool) -> None:
    """Each is stored once, also if only the store's answer was lost. Too many refusals push out others that wait."""
    store = Store(wire)
    store.came_through = came_through
    noted, found = Audit(store), TABLE.find("DELETE", "/admin/pools/sim")
    assert found is not None
    noted.acted(scope_of(ADMIN), found)
    for _ in range(MAX_WAITING + 10):
        noted.refused(scope_of(), found, errors.permission_denied())
    for _ in range(2):
        with pytest.raises(Unavailable):
            await noted.store()
    store.away = False
    for _ in range(MAX_WAITING // MAX_AT_ONCE + 1):
        await asyncio.gather(noted.store(), noted.store())
    lengths = [await wire.redis.xlen(fleet_key("audit", kind)) for kind in ("acts", "refusals")]
    assert lengths == [1, MAX_WAITING]


def test_an_entry_is_bounded_and_its_line_has_all(caplog: pytest.LogCaptureFixture) -> None:
    noted, found = Audit(Store(None)), TABLE.find("DELETE", "/admin/pools/sim")  # type: ignore[arg-type]
    assert found is not None
    scope = scope_of(ADMIN)
    audit.detail(scope, label="x" * 5000)
    with caplog.at_level(logging.INFO, logger=audit.AUDIT):
        noted.acted(scope, found)
    (kept,) = noted._waiting["acts"]
    assert len(kept) < MAX_ENTRY_BYTES and b"left_out" in kept
    (line,) = [vars(record) for record in caplog.records if record.name == audit.AUDIT]
    assert line["label"] == "x" * 5000
