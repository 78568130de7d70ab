"""Callers with tokens of an issuer: what a token opens, what is refused, and how the issuer's keys are kept."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import jwt
import pytest
from api_in_process import LocalApi, api_in_process, key_of
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flow import until
from issuer import AUDIENCE, LocalIssuer, issuing, private_key
from msgspec.structs import replace

from api.auth import oidc
from api.auth.keys import Keyring, check_exposure
from api.auth.oidc import Issuer
from api.openai.errors import ApiError
from api.settings import OidcSettings
from penstock.config import ConfigError, build
from streaming.jobs.settings import QuotaSettings
from streaming.keys import fleet_key
from streaming.order import Priority
from streaming.redis.client import RedisClient

pytestmark = pytest.mark.slow

CHAT = {"model": "sim", "messages": [{"role": "user", "content": "hi"}]}
KEYS = {"root": key_of("sk-root", "ops", admin=True), "red": key_of("sk-red", "red", quotas=QuotaSettings(jobs=2))}


@pytest.fixture
def issuer() -> Iterator[LocalIssuer]:
    with issuing() as issuer:
        yield issuer


@pytest.fixture
async def api(wire: RedisClient, issuer: LocalIssuer) -> AsyncIterator[LocalApi]:
    async with api_in_process(wire, KEYS, oidc=issuer.settings) as api:
        yield api


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are read again as soon as one is unknown."""
    monkeypatch.setattr(oidc, "RETRY_S", 0.0)


@asynccontextmanager
async def knowing(settings: OidcSettings) -> AsyncIterator[Keyring]:
    """A keyring without keys, with an issuer whose keys are read in the background."""
    keyring = Keyring({}, issuer=Issuer(settings))
    assert keyring.issuer is not None
    reading = asyncio.create_task(keyring.issuer.keep_reading())
    try:
        yield keyring
    finally:
        reading.cancel()


async def told(keyring: Keyring, token: str) -> tuple[int, str]:
    """Status and message of a refusal; (200, "") if there is none."""
    assert keyring.issuer is not None
    await keyring.issuer.ready(f"Bearer {token}")
    try:
        keyring.caller(f"Bearer {token}")
    except ApiError as error:
        assert not token or token not in error.message
        return error.status, error.message
    return 200, ""


async def asked(api: LocalApi, token: str, path: str = "/v1/jobs", **body: Any) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {token}"}
    answer = await api.client.post(path, json=CHAT | body, headers=headers)
    return answer.status_code, answer.json().get("error", {}).get("code", "") if answer.status_code >= 400 else ""


async def until_open(api: LocalApi) -> None:
    """An answer waits for its job."""

    async def is_open() -> bool:
        return bool(api.services.open_answers._tasks)

    await until(is_open)


def unsigned(token: str, header: dict[str, Any], signature: str = "") -> str:
    """The same claims behind another header."""
    head = base64.urlsafe_b64encode(json.dumps(header).encode()).rstrip(b"=").decode()
    return f"{head}.{token.split('.')[1]}.{signature}"


# --- the issuer's key set --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"kty": "RSA", "alg": "none", "kid": "x"},
        {"kty": "RSA", "n": "AQAB" * 1_000, "e": "AQAB", "d": "AQAB" * 1_000, "kid": "x"},
        {"kty": "oct", "k": "AAAA", "kid": "x"},
        {"kid": 7}, {}, {"kty": None, "kid": "x"},
    ],
)  # fmt: skip
async def test_a_row_that_is_no_key_keeps_no_other_from_counting(issuer: LocalIssuer, row: dict[str, Any]) -> None:
    issuer.listed = [row]
    async with knowing(issuer.settings) as keyring:
        assert await told(keyring, issuer.token()) == (200, "")


async def test_only_public_keys_for_signatures_with_an_id_count(issuer: LocalIssuer, quick: None) -> None:
    """A private part is not looked at; a key for something else, or without an id, opens nothing."""
    numbers = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(private_key("RSA", 1)))  # type: ignore[arg-type]
    public = {name: numbers[name] for name in ("kty", "n", "e")}
    issuer.listed = [numbers | {"kid": "whole", "key_ops": ["sign", "verify"]}, public | {"kid": "", "alg": "RS256"}]
    issuer.listed.append(public | {"kid": "other", "key_ops": ["encrypt"]})
    issuer.private |= dict.fromkeys(("whole", "other"), private_key("RSA", 1))
    tokens = {kid: issuer.token(kid) for kid in ("whole", "other")}
    del issuer.private["whole"], issuer.private["other"]
    async with knowing(issuer.settings) as keyring:
        assert await told(keyring, tokens["whole"]) == (200, "")
        assert (await told(keyring, tokens["other"]))[0] == 401
        assert (await told(keyring, issuer.token("", key=private_key("RSA", 1))))[0] == 401


async def test_an_answer_without_keys_changes_nothing(issuer: LocalIssuer, quick: None) -> None:
    async with knowing(issuer.settings) as keyring:
        assert await told(keyring, issuer.token()) == (200, "")
        issuer.broken, before = True, issuer.read
        assert (await told(keyring, issuer.token("new", key=private_key("RSA", 2))))[0] == 401
        assert issuer.read > before and await told(keyring, issuer.token()) == (200, "")


async def test_a_subject_that_no_log_could_show_is_refused(issuer: LocalIssuer) -> None:
    async with knowing(issuer.settings) as keyring:
        for subject in ("a\nb", "\x1b[2J", "\ud800"):
            status, message = await told(keyring, issuer.token(sub=subject))
            assert status == 401 and "sub" in message


# --- what a token opens ----------------------------------------------------------------------------------------------


async def test_a_token_opens_what_it_grants_beside_keys(api: LocalApi, issuer: LocalIssuer) -> None:
    """Tenant, lane, endpoints, models, administration; quotas are those of its tenant's keys."""
    assert await asked(api, "sk-red") == (202, "")
    answer = await api.client.post(
        "/v1/jobs",
        json=CHAT | {"queue": {"priority": "interactive"}},
        headers={"Authorization": f"Bearer {issuer.token(scope='openid penstock:lane:batch penstock:endpoint:jobs')}"},
    )
    assert (answer.status_code, answer.json()["priority"]) == (202, "batch")
    assert await asked(api, "sk-red") == (429, "quota_exceeded")
    assert await asked(api, issuer.token()) == (429, "quota_exceeded")
    narrow = issuer.token(tenant="blue", scope=["penstock:endpoint:jobs", "penstock:model:elsewhere"])
    assert await asked(api, narrow, "/v1/chat/completions") == (403, "permission_denied")
    assert await asked(api, narrow) == (403, "permission_denied")
    admin, plain = issuer.token(scope="penstock:admin"), issuer.token(tenant="blue")
    for token, status in ((admin, 200), (plain, 403)):
        answer = await api.client.get("/admin/tenants", headers={"Authorization": f"Bearer {token}"})
        assert answer.status_code == status
    answer = await api.client.get("/admin/tenants", headers={"Authorization": f"Bearer {admin}"})
    assert [each["tenant"] for each in answer.json()["data"]] == ["blue", "ops", "red"]
    redis = api.services.store_client.redis
    assert not await redis.exists(fleet_key("api_keys")) and not api.services.used_keys


async def test_a_token_is_the_callers_whom_it_names(issuer: LocalIssuer) -> None:
    async with knowing(replace(issuer.settings, tenant_claim="org", scope_claim="roles")) as keyring:
        token = issuer.token(org="Team-1/a", tenant="red", roles=["penstock:lane:batch", "penstock:lane:standard"])
        assert await told(keyring, token) == (200, "")
        caller = keyring.caller(f"bearer   {token} ")
        assert (caller.tenant, caller.ceiling, caller.name) == ("Team-1/a", Priority.STANDARD, "oidc:ann")
        assert not caller.admin and not keyring.open


@pytest.mark.parametrize(
    ("claims", "word"),
    [
        ({"exp": 1}, "expired"),
        ({"exp": None}, "exp"),
        ({"exp": "soon"}, "exp"),
        ({"exp": float("inf")}, "exp"),
        ({"nbf": 1 << 40}, "nbf"),
        ({"iat": 1 << 40}, "iat"),
        ({"iss": "https://elsewhere.example"}, "issuer"),
        ({"iss": None}, "iss"),
        ({"aud": "another"}, "udience"),
        ({"aud": ["another"]}, "udience"),
        ({"aud": None}, "aud"),
        ({"aud": []}, "aud"),
        ({"sub": None}, "sub"),
        ({"sub": 7}, "ubject"),
        ({"tenant": None}, "'tenant'"),
        ({"tenant": "a b"}, "'tenant'"),
        ({"tenant": "x" * 129}, "'tenant'"),
        ({"tenant": ["red"]}, "'tenant'"),
        ({"scope": 7}, "array"),
        ({"scope": [7]}, "str"),
        ({"scope": {"penstock:admin": True}}, "array"),
        ({"scope": "penstock:lane:fast"}, "fast"),
        ({"scope": "penstock:endpoint:nowhere"}, "'scope'"),
        ({"scope": "penstock:everything"}, "'scope'"),
        ({"scope": "penstock:admin penstock:model:sim"}, "'scope'"),
        ({"scope": "penstock:"}, "'scope'"),
    ],
)
async def test_a_token_with_other_claims_opens_nothing(issuer: LocalIssuer, claims: dict[str, Any], word: str) -> None:
    """401, which names the claim. What is not understood of its rights is refused, and not left out."""
    async with knowing(issuer.settings) as keyring:
        assert await told(keyring, issuer.token()) == (200, "")
        status, message = await told(keyring, issuer.token(**claims))
        assert status == 401 and word in message, message


async def test_no_word_makes_an_admin_but_the_whole_one(issuer: LocalIssuer) -> None:
    async with knowing(issuer.settings) as keyring:
        for scope in ("penstock:admin:no", "penstock:ADMIN", "admin", "openid", "xpenstock:admin"):
            token = issuer.token(scope=scope)
            if (await told(keyring, token))[0] == 200:
                assert not keyring.caller(f"Bearer {token}").admin


async def test_a_forged_token_opens_nothing(issuer: LocalIssuer) -> None:
    """No signature, one by the public key taken for a secret, another key, another algorithm, more than fits."""
    issuer.private["ec"] = private_key("EC")
    secret = base64.urlsafe_b64encode(b"s" * 64).decode()
    issuer.listed += [
        {"kty": "oct", "kid": "oct", "k": secret, "alg": "HS256"},
        {**issuer.key_set()["keys"][0], "kid": "enc", "use": "enc"},
        {"kty": "RSA", "kid": "broken"},
        {"kid": "nothing"},
    ]
    good = issuer.token()
    public = issuer.private["k1"].public_key()
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[union-attr]
    signed = unsigned(good, {"alg": "HS256", "kid": "k1"})[:-1]
    by_hmac = base64.urlsafe_b64encode(
        jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256).sign(signed.encode(), pem)
    )
    forged = {
        "none": unsigned(good, {"alg": "none", "kid": "k1"}),
        "no alg": unsigned(good, {"kid": "k1"}, good.split(".")[2]),
        "confused": f"{signed}.{by_hmac.rstrip(b'=').decode()}",
        "oct": issuer.token("oct", "HS256", b"s" * 64),
        "another key": issuer.token("k1", key=private_key("RSA", 1)),
        "of another kind": issuer.token("ec", key=private_key("RSA")),
        "not allowed": issuer.token("k1", "RS512"),
        "for encryption": issuer.token("enc", key=issuer.private["k1"]),
        "no kid": issuer.token("", key=issuer.private["k1"]),
        "changed": good[:-20] + ("A" if good[-20] != "A" else "B") + good[-19:],
        "cut": good.rpartition(".")[0] + ".",
        "large": issuer.token(more="x" * 8192),
        "deep": base64.urlsafe_b64encode(b'{"a":' + b"[" * 3000 + b"}").decode().rstrip("=") + ".e30.AAAA",
    }
    async with knowing(issuer.settings) as keyring:
        assert await told(keyring, good) == await told(keyring, issuer.token("ec", "ES256")) == (200, "")
        for name, token in forged.items():
            assert (await told(keyring, token))[0] == 401, name


async def test_what_looks_like_no_token_goes_the_keys_way(issuer: LocalIssuer) -> None:
    """And nothing is read for it."""
    async with knowing(issuer.settings) as keyring:
        assert await told(keyring, issuer.token()) == (200, "")
        for text in ("sk-a.b.c", "e.y", "a.b.c", "e.b.c.d", "x" * 9000):
            assert "not known here" in (await told(keyring, text))[1]
        assert issuer.read == 1


# --- the end of a token ----------------------------------------------------------------------------------------------


async def test_an_answer_ends_with_its_token(
    api: LocalApi, issuer: LocalIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with that of a key that expires; a token whose time was over is refused even if the issuer's clock differs."""
    waiting = asyncio.create_task(asked(api, (token := issuer.token()), "/v1/chat/completions"))
    await until_open(api)
    later = time.time() + 605
    monkeypatch.setattr("api.auth.keys.time", Mock(time=lambda: later))
    assert api.services.keyring.issuer is not None and api.services.keyring.issuer.has("k1")
    assert await waiting == (401, "invalid_api_key")
    assert await asked(api, token) == (401, "invalid_api_key")


@pytest.mark.usefixtures("quick")
async def test_an_answer_ends_with_the_key_that_signed_its_token(api: LocalApi, issuer: LocalIssuer) -> None:
    waiting = asyncio.create_task(asked(api, issuer.token(), "/v1/chat/completions"))
    await until_open(api)
    issuer.private = {"k2": private_key("RSA", 2)}
    assert await asked(api, issuer.token("k2")) == (202, "")
    assert await waiting == (401, "invalid_api_key")
    assert await asked(api, issuer.token(key=private_key("RSA"), kid="k1")) == (401, "invalid_api_key")


async def test_an_admin_with_a_token_makes_nothing_that_outlives_it(api: LocalApi, issuer: LocalIssuer) -> None:
    """No key, no link and no session of the console, and the audit log has its name."""
    headers = {"Authorization": f"Bearer {(admin := issuer.token(scope='penstock:admin'))}"}
    for body, status in (({}, 403), ({"expires_in_s": 3600}, 403), ({"expires_in_s": 60}, 201)):
        answer = await api.client.post("/admin/keys", json={"tenant": "web", **body}, headers=headers)
        assert answer.status_code == status, answer.text
    assert answer.json()["created_by"] == "oidc:ann"
    link = await api.client.post("/admin/console/links", headers=headers)
    session = await api.client.post("/console/session", json={"key": admin})
    assert [(each.status_code, each.json()["error"]["code"]) for each in (link, session)] == [
        *[(403, "permission_denied")] * 2
    ]

    await api.services.audit.store()
    found = (await api.client.get("/admin/audit", headers={"Authorization": "Bearer sk-root"})).json()["data"]
    names = sorted(str(each["who"]) for each in found)
    assert names == ["None", *["oidc:ann"] * 4] and admin not in str(found)


# --- the issuer's keys -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
async def test_keys_may_change_at_any_time(issuer: LocalIssuer) -> None:
    """A new one counts at once, one that the issuer does not name any more no longer."""
    async with knowing(issuer.settings) as keyring:
        old = issuer.token()
        assert await told(keyring, old) == (200, "")
        issuer.private = {"k2": private_key("EC")}
        assert await told(keyring, old) == (200, "")  # not asked again yet
        assert await told(keyring, issuer.token("k2", "ES256")) == (200, "")
        assert (await told(keyring, old))[0] == 401


async def test_unknown_keys_are_asked_for_once(issuer: LocalIssuer, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are named, and none of them waits for it."""
    monkeypatch.setattr(oidc, "TIMEOUT_S", 600.0)
    async with knowing(issuer.settings) as keyring, asyncio.timeout(120):
        assert await told(keyring, issuer.token()) == (200, "")
        floods = [issuer.token(f"unknown-{number}", key=private_key("RSA")) for number in range(200)]
        assert {status for status, _ in await asyncio.gather(*(told(keyring, each) for each in floods))} == {401}
        assert issuer.read == 1


@pytest.mark.usefixtures("quick")
async def test_known_keys_count_for_a_while_without_their_issuer(issuer: LocalIssuer) -> None:
    """Then nobody can be told from another: 503, until the issuer is back. It is 503 also where it was never there."""
    issuer.status = 500
    settings = replace(issuer.settings, refresh_s=0.05, max_age_s=1.0)
    async with knowing(settings) as keyring:
        assert (await told(keyring, issuer.token()))[0] == 503
        issuer.status = 200

        async def is_served() -> bool:
            return await told(keyring, issuer.token()) == (200, "")

        await until(is_served)
        issuer.status = 302  # nothing is followed
        assert await told(keyring, issuer.token()) == (200, "")

        async def is_stale() -> bool:
            return (await told(keyring, issuer.token()))[0] == 503

        await until(is_stale)
        issuer.status = 200
        await until(is_served)


@pytest.mark.parametrize("field", ["claimed", "keys_at"])
async def test_the_configuration_must_be_the_issuers(
    issuer: LocalIssuer, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its keys may be elsewhere, where nobody on the way changes them."""
    setattr(issuer, field, "http://elsewhere.example")
    async with knowing(issuer.settings) as keyring:
        assert (await told(keyring, issuer.token()))[0] == 503
        assert issuer.read == 0 and "elsewhere.example" in caplog.text
    async with knowing(replace(issuer.settings, jwks_url=f"{issuer.url}/keys")) as keyring:
        assert await told(keyring, issuer.token()) == (200, "")


async def test_keys_wait_for_no_issuer(wire: RedisClient, issuer: LocalIssuer) -> None:
    """Callers with keys are served while it does not answer at all."""

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(hold, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    async with api_in_process(wire, KEYS, oidc=OidcSettings(issuer=url, audience=AUDIENCE)) as api:
        waiting = asyncio.create_task(asked(api, issuer.token()))
        assert await asked(api, "sk-red") == (202, "")
        assert not waiting.done()
        assert await waiting == (503, "issuer_unavailable")
    silent.close()
    await silent.wait_closed()


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"issuer": "https://login.example"}, "audience"),
        ({"issuer": "http://login.example", "audience": "a"}, "https://"),
        ({"issuer": "https://login.example", "audience": "a", "jwks_url": "http://10.0.0.1/keys"}, "https://"),
        ({"issuer": "https://login.example", "audience": "a", "algorithms": ["HS256"]}, "HS256"),
        ({"issuer": "https://login.example", "audience": "a", "algorithms": ["none"]}, "none"),
    ],
)
def test_settings_that_would_open_the_door_are_refused(raw: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build(OidcSettings, raw, "oidc")


async def test_tokens_may_be_of_many_tenants(wire: RedisClient, issuer: LocalIssuer) -> None:
    """None of them gets more than half of the store, however few have keys."""
    async with api_in_process(wire, {"root": KEYS["root"]}, oidc=issuer.settings) as api:
        answer = await api.client.get("/admin/tenants/ops", headers={"Authorization": "Bearer sk-root"})
        assert answer.json()["quotas"]["store_share"] == 0.5


def test_an_issuer_closes_the_door() -> None:
    """A server without keys serves nobody without a token, and may be reached from elsewhere."""
    keyring = Keyring({}, issuer=Issuer(OidcSettings(issuer="https://login.example", audience="a")))
    assert not keyring.open
    check_exposure("0.0.0.0", keyring)  # noqa: S104 - not listened on
    with pytest.raises(ApiError, match="No API key was given"):
        keyring.caller(None)
