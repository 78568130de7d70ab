"""Webhooks over TLS: the receiver's certificate is checked against the name, by whom it was signed, and said if it is
neither; the connection goes to the one address that was checked."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from house import House, eventually
from openai import OpenAI
from receiver import Receiver, due_now, receiving

from offline.webhooks import WebhookEndpoint
from penstock.config import ConfigError, build
from streaming.events import DeliveryAttempt, WebhookSettings

pytestmark = pytest.mark.slow

SECRET = "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="
NAME = "hooks.test"
ERRAND = DeliveryAttempt(
    id="msg_00" + "a" * 30, attempt=1, tries=1, age_ms=0, now_ms=1_700_000_000_000,
    event="evt_1", type="job.completed", subject="job_1", at_ms=1_700_000_000_000,
)  # fmt: skip


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "authority")


@contextmanager
def secure(context: ssl.SSLContext) -> Iterator[tuple[Receiver, list[str | None]]]:
    """A receiver behind this certificate, and the names it was called by in each handshake."""
    called: list[str | None] = []

    def hear(_socket: ssl.SSLObject, name: str | None, _context: ssl.SSLContext) -> None:
        called.append(name)

    context.sni_callback = hear
    with receiving(Receiver(), context) as receiver:
        yield receiver, called


@pytest.fixture
async def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is looked up: the first time it is here, and ever after somewhere this test cannot reach."""
    names: list[str] = []

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        names.append(host)
        return [(2, 1, 6, "", ("127.0.0.1" if len(names) == 1 else "192.0.2.1", port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    return names


async def sent(receiver: Receiver, host: str = NAME, **more: Any) -> tuple[int, str]:
    """What one attempt comes to."""
    row = {"url": f"https://{host}:{receiver.port}/hook", "secret": SECRET, "networks": ["127.0.0.0/8"], "timeout_s": 5}
    endpoint = WebhookEndpoint("test", build(WebhookSettings, row | more, "webhooks.test"))
    try:
        return await endpoint.send(ERRAND)
    finally:
        await endpoint.close()


# --- one attempt -----------------------------------------------------------------------------------------------------


async def test_the_name_is_shown_and_the_checked_address_connected_to(authority: Authority, asked: list[str]) -> None:
    """SNI and Host are the name's, though the connection is made by address; and there is one look-up for it all."""
    with secure(authority.server(NAME)) as (receiver, called):
        assert await sent(receiver, ca_file=str(authority.file)) == (204, "")
    assert asked == [NAME] == called
    ((headers, _),) = receiver.got
    assert headers["host"] == f"{NAME}:{receiver.port}"


async def test_a_certificate_nobody_vouches_for_is_refused(authority: Authority, asked: list[str]) -> None:
    """By the authorities of this machine; what it would have been sent is not."""
    with secure(authority.server(NAME)) as (receiver, called):
        status, problem = await sent(receiver)
    assert status == 0 and "CERTIFICATE_VERIFY_FAILED" in problem and "unable to get local issuer" in problem
    assert asked == [NAME] == called and receiver.got == []


async def test_another_authority_of_the_same_name_is_refused(
    authority: Authority, asked: list[str], tmp_path: Path
) -> None:
    """It is its key that counts."""
    other = Authority(tmp_path / "other")
    with secure(other.server(NAME)) as (receiver, _):
        status, problem = await sent(receiver, ca_file=str(authority.file))
    assert status == 0 and "CERTIFICATE_VERIFY_FAILED" in problem and asked == [NAME] and receiver.got == []


@pytest.mark.parametrize("host", ["other.test", "127.0.0.1"])
async def test_a_certificate_of_another_name_is_refused(authority: Authority, asked: list[str], host: str) -> None:
    """Whoever signed it, and although the address is the right one."""
    with secure(authority.server(NAME)) as (receiver, _):
        status, problem = await sent(receiver, host, ca_file=str(authority.file))
    assert status == 0 and re.search("Hostname mismatch|IP address mismatch", problem)
    assert asked == [host] and receiver.got == []


async def test_who_speaks_no_tls_is_told_nothing(authority: Authority, asked: list[str]) -> None:
    with receiving(Receiver()) as receiver:
        status, problem = await sent(receiver, ca_file=str(authority.file))
    assert status == 0 and "SSL" in problem and asked == [NAME] and receiver.got == []


async def test_an_endpoints_own_authority_takes_the_machines_place(
    authority: Authority, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ca_file` alone counts, whatever SSL_CERT_FILE names for the others."""
    other = Authority(tmp_path / "other")
    monkeypatch.setenv("SSL_CERT_FILE", str(other.file))
    with secure(other.server(NAME)) as (receiver, _):
        assert (await sent(receiver, ca_file=str(authority.file)))[0] == 0
        asked.clear()
        assert await sent(receiver) == (204, "")


@pytest.mark.parametrize("text", [None, "", "no certificate\n"])
def test_a_file_without_certificates_is_refused_at_the_start(tmp_path: Path, text: str | None) -> None:
    """By the setting's name, not at the first webhook."""
    path = tmp_path / "ca.pem"
    if text is not None:
        path.write_text(text)
    row = {"url": "https://example.com", "secret": SECRET, "ca_file": str(path)}
    with pytest.raises(ConfigError, match=r"webhooks\.test\.ca_file: .*ca\.pem cannot be used"):
        WebhookEndpoint("test", build(WebhookSettings, row, "webhooks.test"))


# --- the whole way ---------------------------------------------------------------------------------------------------


def configure(house: House, receiver: Receiver, **more: str) -> None:
    row = {"url": f"https://localhost:{receiver.port}/hook", "secret": SECRET, "networks": ["127.0.0.0/8", "::1"]}
    lines = [f"{key} = {json.dumps(value)}" for key, value in (row | more).items()]
    (house.folder / "penstock.toml").write_text("\n".join(["[webhooks.test]", *lines, ""]))


def message(house: House) -> dict[str, Any]:
    """The only one there is. Raises IndexError."""
    return dict(json.loads(house.get("/admin/webhooks")[1])["data"][0])


def test_refused_said_tried_again_and_delivered_when_it_is_believed(empty_house: House, authority: Authority) -> None:
    """An offline process that does not believe the certificate says so in the record, and sends nothing. Another that
    was told whom to believe delivers the same message at its next attempt."""
    job = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    with secure(authority.server("localhost")) as (receiver, called):
        configure(empty_house, receiver)
        empty_house.start_api()
        empty_house.start("workers")
        doubting = empty_house.start("offline")
        empty_house.wait_ready()
        assert empty_house.post("/v1/jobs", job)[0] == 202
        eventually(lambda: message(empty_house)["attempts"] == 1 and message(empty_house)["last_error"], IndexError)
        refused = message(empty_house)
        assert refused["status"] == "pending" and refused["next_attempt_at"] > refused["last_attempt_at"]
        assert "CERTIFICATE_VERIFY_FAILED" in refused["last_error"] and refused["last_status_code"] is None
        said = "webhook not delivered: ConnectError: [SSL: CERTIFICATE_VERIFY_FAILED]"
        eventually(lambda: said in empty_house.log("offline"))
        assert set(called) == {"localhost"} and receiver.got == []
        doubting.terminate()
        assert doubting.wait(20) == 0
        due_now(empty_house, message(empty_house))
        configure(empty_house, receiver, ca_file=str(authority.file))
        empty_house.start("offline", "--id", "offline-2")
        eventually(lambda: message(empty_house)["status"] == "delivered")
    ((headers, body),) = receiver.got
    assert headers["webhook-id"] == refused["id"] == message(empty_house)["id"]
    assert message(empty_house)["attempts"] >= 2 and message(empty_house)["last_error"] is None
    assert headers["host"] == f"localhost:{receiver.port}"
    OpenAI(api_key="none", webhook_secret=SECRET).webhooks.verify_signature(body, headers)


def test_a_process_is_not_started_with_a_file_it_cannot_read(empty_house: House) -> None:
    """It says which setting, and ends with 2."""
    with receiving(Receiver()) as receiver:
        configure(empty_house, receiver, ca_file="/nowhere/ca.pem")
        assert empty_house.start("offline").wait(30) == 2
    assert "error: webhooks.test.ca_file: /nowhere/ca.pem cannot be used" in empty_house.log("offline")
