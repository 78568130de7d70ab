"""Sessions of the console: a link works once, cookie and token are needed together, from its own page only."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import AsyncIterator

import pytest
from api_in_process import LocalApi, api_in_process, key_of

from api.auth.console import ConsoleAccess, cookie_name, set_cookie
from api.auth.keys import Keyring
from streaming.fleet.processes import LINK_S, SESSION_S, ConsoleSessions
from streaming.redis.client import RedisClient

pytestmark = pytest.mark.slow

ROOT, PLAIN, OTHER = "sk-root", "sk-plain", "sk-other"


KEYS = {"root": key_of(ROOT, "ops", admin=True), "plain": key_of(PLAIN, "ops"), "other": key_of(OTHER, "b", admin=True)}


@pytest.fixture
async def api(wire: RedisClient) -> AsyncIterator[LocalApi]:
    async with api_in_process(wire, KEYS) as api:
        yield api


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


async def opened(api: LocalApi, **proof: str) -> dict[str, str]:
    """The headers of a session's requests."""
    answer = await api.client.post("/console/session", json=proof)
    api.client.cookies.clear()
    assert answer.status_code == 200, answer.text
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and f"Max-Age={SESSION_S}" in cookie
    return {"Cookie": cookie.partition(";")[0], "X-Penstock-Console": answer.json()["token"]}


async def link_of(api: LocalApi) -> str:
    answer = await api.client.post("/admin/console/links", headers=bearer(ROOT))
    assert answer.status_code == 201
    return str(answer.json()["path"]).removeprefix("/console#link=")


async def seen(api: LocalApi, headers: dict[str, str]) -> int:
    return (await api.client.get("/admin/keys", headers=headers)).status_code


async def test_a_key_opens_a_session_that_may_what_the_key_may(api: LocalApi) -> None:
    headers = await opened(api, key=ROOT)
    shown = (await api.client.get("/admin/console/session", headers=headers)).json()
    assert (shown["name"], shown["tenant"], shown["has_keys"]) == ("root", "ops", True)
    body = {"model": "sim", "messages": [{"role": "user", "content": "hi"}]}
    job = (await api.client.post("/v1/jobs", json=body, headers=headers)).json()
    assert (await api.client.get(f"/v1/jobs/{job['id']}", headers=bearer(PLAIN))).status_code == 200
    assert (await api.client.get(f"/v1/jobs/{job['id']}", headers=bearer(OTHER))).status_code == 404


async def test_what_names_a_key_is_judged_by_it(api: LocalApi) -> None:
    """Whatever session is open beside it."""
    headers = await opened(api, key=ROOT)
    for said in (bearer(PLAIN), {"X-Api-Key": PLAIN}):
        assert (await seen(api, headers), await seen(api, headers | said)) == (200, 403)


async def test_nothing_else_opens_one(api: LocalApi) -> None:
    proofs: tuple[tuple[dict[str, object], int], ...] = (
        ({"key": PLAIN}, 403), ({"key": "sk-none"}, 401), ({"key": ""}, 401), ({"link": "x" * 43}, 401),
        ({"link": "short"}, 401), ({}, 400), ({"key": ROOT, "link": "x"}, 400), ({"key": 5}, 400),
        ({"link": None}, 400), ({"key": ["a"]}, 400), ({"key": "x" * 5000}, 413),
    )  # fmt: skip
    for proof, status in proofs:
        answer = await api.client.post("/console/session", json=proof)
        assert answer.status_code == status and "set-cookie" not in answer.headers, answer.text


async def test_a_link_works_once(api: LocalApi) -> None:
    """And is no session, nor a session a link."""
    link = await link_of(api)
    assert await seen(api, await opened(api, link=link)) == 200
    again = await api.client.post("/console/session", json={"link": link})
    assert again.status_code == 401 and "penstock console" in again.json()["error"]["message"]
    link = await link_of(api)
    headers = await opened(api, key=ROOT)
    name, _, cookie = headers["Cookie"].partition("=")
    assert await seen(api, headers | {"Cookie": f"{name}={link}"}) == 401
    assert (await api.client.post("/console/session", json={"link": cookie})).status_code == 401
    assert (await api.client.post("/console/session", json={"link": link})).status_code == 200


async def test_a_request_needs_both_secrets_and_the_consoles_own_page(api: LocalApi) -> None:
    """The cookie goes to every port of the host, and also from pages of its other ports: it alone opens nothing.
    Its own page may read and write, until it logs out."""
    headers = await opened(api, key=ROOT)
    assert await seen(api, headers) == 200
    for change in (
        {"Cookie": ""}, {"X-Penstock-Console": ""}, {"X-Penstock-Console": "y" * 43},
        {"Cookie": "penstock-console=" + "y" * 43}, {"Sec-Fetch-Site": "same-site"}, {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "none"}, {"Origin": "http://127.0.0.1:1"}, {"Origin": "null"},
        {"Origin": "https://evil.example"},
    ):  # fmt: skip
        assert await seen(api, headers | change) == 401
        for method, path in (("POST", "/v1/jobs"), ("DELETE", "/admin/pools/sim"), ("GET", "/v1/jobs")):
            answer = await api.client.request(method, path, json={}, headers=headers | change)
            assert answer.status_code == 401, (method, path)
    origin = str(api.client.base_url).rstrip("/")
    own = headers | {"Sec-Fetch-Site": "same-origin", "Origin": origin}
    assert (await api.client.delete("/admin/pools/sim", headers=own)).status_code == 200
    answer = await api.client.delete("/admin/console/session", headers=headers)
    assert answer.status_code == 200 and "Max-Age=0" in answer.headers["set-cookie"]
    assert await seen(api, headers) == 401


async def test_it_ends_by_itself_and_the_store_holds_no_secret(api: LocalApi) -> None:
    headers = await opened(api, key=ROOT)
    link = await link_of(api)
    redis = api.services.store_client.redis
    names = [name async for name in redis.scan_iter(match="*console*")]
    assert sorted([round(await redis.ttl(name), -1) for name in names]) == [LINK_S, SESSION_S]
    kept = b"".join([name + await redis.get(name) for name in names])
    for secret in (link, headers["X-Penstock-Console"], headers["Cookie"].partition("=")[2], ROOT):
        assert secret.encode() not in kept
    assert hashlib.sha256(ROOT.encode()).hexdigest().encode() not in kept
    await redis.delete(*names)
    assert await seen(api, headers) == 401
    assert (await api.client.post("/console/session", json={"link": link})).status_code == 401


async def test_another_key_of_the_same_name_ends_it(wire: RedisClient) -> None:
    """A key was changed and the API started again, or what the store says was forged."""
    before, sessions = ConsoleAccess(Keyring(KEYS), ConsoleSessions(wire)), ConsoleSessions(wire)
    caller = Keyring(KEYS).caller(f"Bearer {ROOT}")
    cookie, token = await before.begin(caller)
    link = await before.link(caller)
    headers = {b"cookie": f"penstock-console={cookie}".encode(), b"x-penstock-console": token.encode()}
    assert await before.caller(headers) == caller
    for keys in (KEYS | {"root": key_of("sk-new", "ops", admin=True)}, KEYS | {"root": key_of(ROOT, "ops")}, {}):
        after = ConsoleAccess(Keyring(keys), sessions)
        assert await after.caller(headers) is None
    assert await ConsoleAccess(Keyring({}), sessions).redeem(link) is None


async def test_without_keys_the_admin_token_logs_in(wire: RedisClient) -> None:
    token = hashlib.sha256(b"the-token").hexdigest()
    access, ring = ConsoleAccess(Keyring({}, token), ConsoleSessions(wire)), Keyring({}, token)
    cookie, secret = await access.begin(ring.admin("Bearer the-token"))
    headers = {b"cookie": f"penstock-console={cookie}".encode(), b"x-penstock-console": secret.encode()}
    found = await access.caller(headers)
    assert found is not None and found.admin
    later = ConsoleAccess(Keyring({}, hashlib.sha256(b"next").hexdigest()), ConsoleSessions(wire))
    assert await later.caller(headers) is None


@pytest.mark.parametrize(("host", "name"), [
    (b"127.0.0.1:8000", "penstock-console-8000"), (b"console.example", "penstock-console"), (b"", "penstock-console"),
    (b"[::1]:9", "penstock-console-9"), (b"a b;c", "penstock-console"), (b"127.0.0.1:", "penstock-console"),
])  # fmt: skip
def test_servers_of_one_host_have_cookies_of_their_own(host: bytes, name: str) -> None:
    assert cookie_name({b"host": host}) == name
    assert re.fullmatch(
        r"[a-z0-9-]+=v; Path=/; Max-Age=1; HttpOnly; SameSite=Strict", set_cookie({b"host": host}, "v", 1)
    )


def test_behind_tls_the_cookie_never_goes_without_it() -> None:
    assert set_cookie({b"origin": b"https://console.example"}, "v").endswith("; Secure")


async def test_what_it_says_is_short_and_logged_without_secrets(
    api: LocalApi, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock.audit")
    headers = await opened(api, key=ROOT)
    await api.client.post("/console/session", json={"key": PLAIN})
    link = await link_of(api)
    await api.client.delete("/admin/console/session", headers=headers)
    lines = [vars(record) for record in caplog.records if record.name == "penstock.audit"]
    assert [(line["action"], line["outcome"]) for line in lines] == [
        ("console.login", "done"), ("console.login", "refused"), ("console.link", "done"), ("console.logout", "done"),
    ]  # fmt: skip
    written = json.dumps(lines, default=str)
    assert not [each for each in (ROOT, PLAIN, link, headers["X-Penstock-Console"]) if each in written]
