"""/admin/keys: created keys open what they are for, until they are rotated, revoked or expired."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from api_in_process import LocalApi, api_in_process, key_of
from msgspec.structs import replace

from api.routes import ROUTES, Access, endpoint_of
from api.settings import ENDPOINTS
from streaming.jobs.settings import QuotaSettings
from streaming.keys import fleet_key
from streaming.redis.client import RedisClient

pytestmark = pytest.mark.slow

ROOT, TOKEN = "sk-root", "the-admin-token"
KEYS = {"root": key_of(ROOT, "ops", admin=True), "other": key_of("sk-other", "b")}
CHAT = {"model": "sim", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def api(wire: RedisClient) -> AsyncIterator[LocalApi]:
    async with api_in_process(wire, KEYS) as api:
        yield api


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


async def created(api: LocalApi, by: str = ROOT, **asked: Any) -> dict[str, Any]:
    answer = await api.client.post("/admin/keys", json={"tenant": "web", **asked}, headers=bearer(by))
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def asked(api: LocalApi, key: str, path: str = "/v1/jobs", **body: Any) -> tuple[int, str]:
    """The status of a request for a job, and the code of its error."""
    answer = await api.client.post(path, json=CHAT | body, headers=bearer(key))
    return answer.status_code, answer.json().get("error", {}).get("code", "") if answer.status_code >= 400 else ""


async def lane_of(api: LocalApi, key: str) -> str:
    """The lane in which a job for the highest one waits."""
    answer = await api.client.post("/v1/jobs", json=CHAT | {"queue": {"priority": "interactive"}}, headers=bearer(key))
    return str(answer.json()["priority"])


async def test_a_created_key_opens_the_door_and_is_nowhere_else(api: LocalApi) -> None:
    made = await created(api, label="of the web team")
    assert await asked(api, made["key"]) == (202, "")
    rows = await api.services.store_client.redis.hgetall(fleet_key("api_keys"))  # type: ignore[misc]
    assert list(rows) == [made["id"].encode()] and made["key"].encode() not in rows[made["id"].encode()]
    listed = (await api.client.get("/admin/keys", headers=bearer(ROOT))).json()["data"]
    assert [each["name"] for each in listed] == ["other", "root", made["id"]]
    shown = (await api.client.get(f"/admin/keys/{made['id']}", headers=bearer(ROOT))).json()
    assert "key" not in shown and (shown["label"], shown["tenant"]) == ("of the web team", "web")
    assert (shown["state"], shown["created_by"]) == ("valid", "root")
    assert made["key"] not in str(listed)


async def test_a_created_key_is_for_what_it_names(api: LocalApi) -> None:
    """Lane, endpoints, models, administration. What it may changes with it."""
    made = await created(api, highest_lane="batch", endpoints=["jobs"])
    assert await asked(api, made["key"]) == (202, "")
    assert await lane_of(api, made["key"]) == "batch"
    assert await asked(api, made["key"], "/v1/chat/completions") == (403, "permission_denied")
    assert (await api.client.get("/admin/keys", headers=bearer(made["key"]))).status_code == 403
    change = {"endpoints": [], "models": ["sim"], "highest_lane": "interactive"}
    path = f"/admin/keys/{made['id']}"
    assert (await api.client.post(path, json=change, headers=bearer(ROOT))).json()["models"] == ["sim"]
    assert await lane_of(api, made["key"]) == "interactive"
    assert (await api.client.get("/v1/models", headers=bearer(made["key"]))).json()["data"][0]["id"] == "sim"
    batch = {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    answer = await api.client.post("/v1/batches", json=batch, headers=bearer(made["key"]))
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
    await api.client.post(path, json={"admin": True, "models": []}, headers=bearer(ROOT))
    assert (await api.client.get("/admin/keys", headers=bearer(made["key"]))).status_code == 200


async def test_a_key_for_another_model_is_refused_also_behind_the_same_options(wire: RedisClient) -> None:
    """What was prepared for one key of a tenant is not taken for another."""
    keys = {"all": key_of("sk-all", "t"), "some": key_of("sk-some", "t", models=("elsewhere",))}
    async with api_in_process(wire, keys) as api:
        assert await asked(api, "sk-all") == (202, "")
        assert await asked(api, "sk-some") == (403, "permission_denied")
        assert (await api.client.get("/v1/models", headers=bearer("sk-some"))).json()["data"] == []
        assert (await api.client.get("/v1/models/sim", headers=bearer("sk-some"))).status_code == 403


async def test_rotation_and_revocation_void_a_key(api: LocalApi) -> None:
    made = await created(api)
    path = f"/admin/keys/{made['id']}"
    rotated = (await api.client.post(f"{path}/rotate", json={}, headers=bearer(ROOT))).json()
    assert rotated["id"] == made["id"] and rotated["key"] != made["key"]
    assert await asked(api, made["key"]) == (401, "invalid_api_key")
    assert await asked(api, rotated["key"]) == (202, "")
    for _ in range(2):
        revoked = await api.client.delete(path, headers=bearer(ROOT))
        assert (revoked.status_code, revoked.json()["state"]) == (200, "revoked")
    assert await asked(api, rotated["key"]) == (401, "invalid_api_key")
    for change in (f"{path}/rotate", path):
        again = await api.client.post(change, json={}, headers=bearer(ROOT))
        assert (again.status_code, again.json()["error"]["code"]) == (409, "key_revoked")


async def test_an_admin_may_rotate_and_revoke_its_own_key(api: LocalApi) -> None:
    """The answer, which alone has the new key, is not among those that end with the old one."""
    by = await created(api, admin=True)
    path = f"/admin/keys/{by['id']}"
    answer = await api.client.post(f"{path}/rotate", json={}, headers=bearer(by["key"]))
    assert answer.status_code == 200
    new = answer.json()["key"]
    answer = await api.client.delete(path, headers=bearer(new))
    assert (answer.status_code, answer.json()["state"]) == (200, "revoked")


async def test_a_key_ends_with_its_time(api: LocalApi) -> None:
    made = await created(api, expires_in_s=3600)
    assert await asked(api, made["key"]) == (202, "")
    services = api.services
    await services.api_keys.change(made["id"], lambda key: replace(key, expires_ms=1))
    await services.read_keys()
    assert await asked(api, made["key"]) == (401, "invalid_api_key")
    shown = (await api.client.get(f"/admin/keys/{made['id']}", headers=bearer(ROOT))).json()
    assert shown["state"] == "expired"


async def test_a_created_key_has_the_quotas_of_its_tenant(wire: RedisClient) -> None:
    keys = {"root": key_of(ROOT, "ops", admin=True), "web": key_of("sk-web", "web", quotas=QuotaSettings(jobs=1))}
    async with api_in_process(wire, keys) as api:
        made = await created(api)
        assert await asked(api, made["key"]) == (202, "")
        assert await asked(api, made["key"]) == (429, "quota_exceeded")


async def test_an_admin_grants_no_more_than_its_own_key_has(api: LocalApi) -> None:
    """Not to itself either; a row of the settings has no such end."""
    by = await created(api, admin=True, highest_lane="batch", expires_in_s=3600)
    for path in ("/admin/keys", f"/admin/keys/{by['id']}"):
        for more in ({"expires_in_s": 7200}, {"highest_lane": "interactive", "expires_in_s": 60}):
            body = more | ({"tenant": "web"} if path == "/admin/keys" else {})
            answer = await api.client.post(path, json=body, headers=bearer(by["key"]))
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
    other = await created(api, admin=True)
    answer = await api.client.post(f"/admin/keys/{other['id']}/rotate", json={}, headers=bearer(by["key"]))
    assert answer.status_code == 403
    assert (await created(api, by["key"], highest_lane="batch", expires_in_s=60))["state"] == "valid"
    narrow = {"tenant": "web", "admin": True, "models": ["sim"]}
    assert (await api.client.post("/admin/keys", json=narrow, headers=bearer(ROOT))).status_code == 400


async def test_a_session_of_the_console_dies_with_its_key(api: LocalApi) -> None:
    made = await created(api, admin=True)
    answer = await api.client.post("/console/session", json={"key": made["key"]})
    api.client.cookies.clear()
    cookie, token = answer.headers["set-cookie"].partition(";")[0], answer.json()["token"]
    session = {"Cookie": cookie, "X-Penstock-Console": token}
    assert (await api.client.get("/admin/tenants", headers=session)).status_code == 200
    await api.client.delete(f"/admin/keys/{made['id']}", headers=bearer(ROOT))
    assert (await api.client.get("/admin/tenants", headers=session)).status_code == 401


async def test_the_first_key_closes_the_door_for_good(wire: RedisClient, redis_url: str) -> None:
    """The admin token stays valid, so that nobody is locked out; the end of the last key opens nothing, nor does a new
    process, even before it has read the keys."""
    async with api_in_process(wire, admin_token=TOKEN) as api:
        assert (await api.client.post("/v1/jobs", json=CHAT)).status_code == 202
        made = await created(api, TOKEN)
        assert (await api.client.post("/v1/jobs", json=CHAT)).status_code == 401
        assert await asked(api, made["key"]) == (202, "")
        assert (await api.client.delete(f"/admin/keys/{made['id']}", headers=bearer(TOKEN))).status_code == 200
        assert (await api.client.post("/v1/jobs", json=CHAT)).status_code == 401
    async with api_in_process(RedisClient.open(wire.settings), admin_token=TOKEN) as again:
        assert (await again.client.post("/v1/jobs", json=CHAT)).status_code == 401
        again.services.keyring.known = False
        assert (await again.client.post("/v1/jobs", json=CHAT)).status_code == 503
        await again.services.store_client.redis.delete(fleet_key("api_keys"))
        await again.services.read_keys()
        assert (await again.client.post("/v1/jobs", json=CHAT)).status_code == 401


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"tenant": "a b"}, 400),
        ({"tenant": "a", "endpoints": ["nowhere"]}, 400),
        ({"tenant": "a", "models": ["nowhere"]}, 404),
        ({"tenant": "a", "highest_lane": "fast"}, 400),
        ({"tenant": "a", "expires_in_s": 0}, 400),
        ({"tenant": "a", "quota": 1}, 400),
    ],
)
async def test_a_wrong_request_creates_nothing(api: LocalApi, body: dict[str, Any], status: int) -> None:
    answer = await api.client.post("/admin/keys", json=body, headers=bearer(ROOT))
    assert answer.status_code == status and await api.services.api_keys.read() == {}


async def test_an_unknown_key_is_404(api: LocalApi) -> None:
    for method, path in (("GET", ""), ("POST", ""), ("POST", "/rotate"), ("DELETE", "")):
        answer = await api.client.request(method, f"/admin/keys/key_0{path}", json={}, headers=bearer(ROOT))
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "key_not_found")


def test_the_endpoints_that_keys_name_are_those_that_there_are() -> None:
    assert {endpoint_of(route.path) for route in ROUTES if route.access is Access.CALLER} == ENDPOINTS
