"""Who may come in, and when the door refuses to open."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from api_in_process import key_of, keyless

from api.auth.hosts import is_loopback, is_loopback_name
from api.auth.keys import LOCAL_CALLER, Caller, Keyring, check_exposure
from api.openai.errors import ApiError
from api.settings import KeySettings
from penstock.config import ConfigError, build
from streaming.events import EventSettings, WebhookSettings
from streaming.jobs.settings import QuotaSettings
from streaming.order import Priority

KEY, OTHER = "sk-one-0123456789", "sk-two-0123456789"

EXPOSED = ["0.0.0.0", "::", "", "192.168.1.5", "example.org", "::ffff:10.0.0.1", "localhost.example"]  # noqa: S104


@pytest.fixture
def keyring() -> Keyring:
    return Keyring({"one": key_of(KEY, "red"), "two": key_of(OTHER, "blue", priority=Priority.BATCH)})


def test_a_key_names_its_tenant_and_ceiling(keyring: Keyring) -> None:
    """Each key finds its own row."""
    assert keyring.caller(f"Bearer {KEY}") == Caller("red", Priority.INTERACTIVE, "one")
    assert keyring.caller(f"bearer  {OTHER} ") == Caller("blue", Priority.BATCH, "two")


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", KEY, f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}",
     f"Bearer {KEY} {OTHER}", "Bearer " + hashlib.sha256(KEY.encode()).hexdigest(), "Bearer \xff\xfe",
     "Bearer " + "x" * 100_000],
)  # fmt: skip
def test_anything_else_is_refused(keyring: Keyring, authorization: str | None) -> None:
    """No prefix, no other scheme, not the stored hash itself: 401, and the key is not repeated."""
    with pytest.raises(ApiError) as raised:
        keyring.caller(authorization)
    assert (raised.value.status, raised.value.code) == (401, "invalid_api_key")
    assert raised.value.headers == {"WWW-Authenticate": "Bearer"}
    assert KEY not in raised.value.message


def test_of_several_keys_of_a_tenant_the_first_that_says_something_counts() -> None:
    """Of each quota by itself; other tenants' keys say nothing."""
    keyring = Keyring(
        {
            name: msgspec.structs.replace(key_of(f"sk-{name}", tenant), quotas=quotas)
            for name, tenant, quotas in (
                ("silent", "red", QuotaSettings()),
                ("other", "blue", QuotaSettings(jobs=1, file_bytes=1)),
                ("first", "red", QuotaSettings(jobs=10)),
                ("second", "red", QuotaSettings(jobs=20, job_bytes=200)),
                ("third", "red", QuotaSettings(job_bytes=300, result_bytes=3)),
            )
        }
    )
    assert keyring.quotas_of("red") == QuotaSettings(jobs=10, job_bytes=200, result_bytes=3)
    assert keyring.quotas_of("nobody") == QuotaSettings()


def test_without_keys_the_door_is_open() -> None:
    """A local server takes any caller, also one that sends a key."""
    keyring = keyless()
    assert keyring.open
    assert keyring.caller(None) == keyring.caller("Bearer anything") == LOCAL_CALLER


def test_only_the_admin_token_administers_a_server_without_keys() -> None:
    """The answer says where the token is, and does not repeat what was sent."""
    keyring = keyless(hashlib.sha256(b"token").hexdigest())
    assert keyring.admin("Bearer token").admin
    for sent in ("", "Bearer old-token"):
        with pytest.raises(ApiError, match="run/admin-token") as raised:
            keyring.admin(sent)
        assert (raised.value.status, raised.value.code) == (401, "admin_token_required")
        assert "old-token" not in raised.value.message


def test_the_same_key_twice_is_a_mistake() -> None:
    """Two tenants cannot share one key."""
    with pytest.raises(ConfigError, match=r"keys\.b.*same key as keys\.a"):
        Keyring({"a": key_of(KEY, "red"), "b": key_of(KEY, "blue")})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "[::1]", "localhost"])
def test_an_open_door_may_stand_on_loopback(host: str) -> None:
    """Loopback needs no key."""
    check_exposure(host, Keyring({}))


@pytest.mark.parametrize("host", EXPOSED)
def test_an_open_door_may_not_stand_anywhere_else(host: str, keyring: Keyring) -> None:
    """Any other address refuses to start without a key and says what to do; with a key it starts."""
    with pytest.raises(ConfigError, match=r"api\.host.*\[keys\.<name>\].*docs/operations\.md, Keys.*127\.0\.0\.1"):
        check_exposure(host, Keyring({}))
    check_exposure(host, keyring)


@pytest.mark.parametrize("name", ["", "a:b", "a b", "-a", "ä", "a\nb", "a\0", "x" * 129, "{a}"])
@pytest.mark.parametrize(
    ("table", "kind", "field", "rest"),
    [
        ("keys", KeySettings, "tenant", {"sha256": "0" * 64}),
        ("webhooks", WebhookSettings, "tenant", {"url": "https://a.example/", "secret": "whsec_" + "A" * 32}),
        ("events", EventSettings, "take_tenant", {}),
    ],
)
def test_a_tenants_name_is_checked_wherever_it_is_set(
    name: str, table: str, kind: type[msgspec.Struct], field: str, rest: dict[str, str]
) -> None:
    """It stands in keys of the store: the process refuses to start and names the setting and the rule."""
    for tenant in ("local", "Team-1/a.b_c@example.org"):
        build(kind, {**rest, field: tenant}, table)
    with pytest.raises(ConfigError, match=rf"^{table}: {field} .*cannot be a tenant's name.*rename it$"):
        build(kind, {**rest, field: name}, table)


@pytest.mark.parametrize(
    ("host", "address", "name"),
    [
        ("127.0.0.1", True, True), ("127.8.9.10", True, True), ("::1", True, True), ("[::1]", True, True),
        ("::ffff:127.0.0.1", True, True), ("localhost", True, True), ("LOCALHOST", True, True),
        ("app.localhost", False, True), ("localhost.", False, True),
        ("", False, False), ("0.0.0.0", False, False),  # noqa: S104 - not listened on
        ("::", False, False), ("10.0.0.1", False, False),
        ("fe80::1%lo", False, False), ("::ffff:10.0.0.1", False, False), ("2130706433", False, False),
        ("evil.example", False, False), ("evillocalhost", False, False), ("localhost.evil.example", False, False),
        (".localhost", False, False), ("evil_.localhost", False, False),
    ],
)  # fmt: skip
def test_what_is_this_machine(host: str, address: bool, name: bool) -> None:
    """Names below localhost only where a browser asks for them: elsewhere a resolver decides what they are."""
    assert (is_loopback(host), is_loopback_name(host)) == (address, name)
