"""Webhooks over TLS: the receiver's certificate is checked against the name, by whom it was signed, and said if it is
neither; the connection goes to the one address that was checked."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from house import House, eventually
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

    def getaddrinfo(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        names.append(host)
        return [(2, 1, 6, "", ("127.0.0.1" if len(names) == 1 else "192.0.2.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return names


async def sent(receiver: Receiver, host: str = NAME, **more: Any) -> tuple[int, str]:
    """What one attempt comes to."""
    row = {"url": f"https://{host}:{receiver.port}/hook", "secret": SECRET, "networks": ["127.0.0.0/8"], "timeout_s": 5}
    endpoint = WebhookEndpoint("test", build(WebhookSettings, row | more, "webhooks.test"))
    try:
        return await endpoint.send(ERRAND)
    finally:
        await endpoint.close()


async def test_the_name_is_shown_and_the_checked_address_connected_to(authority: Authority, asked: list[str]) -> None:
    """SNI and Host are the name's, though the connection is made by address; and there is one look-up for it all."""
    with secure(authority.server(NAME)) as (receiver, called):
        assert await sent(receiver, ca_file=str(authority.file)) == (204, "")
    assert asked == [NAME] == called
    ((headers, _),) = receiver.got
    assert headers["host"] == f"{NAME}:{receiver.port}"


@pytest.mark.parametrize(("signer", "host", "believed", "said"), [
    ("authority", NAME, False, "unable to get local issuer"),  # this machine's authorities do not know it
    ("other", NAME, True, "CERTIFICATE_VERIFY_FAILED"),  # of the same name: it is its key that counts
    ("authority", "other.test", True, "Hostname mismatch"),
    ("authority", "127.0.0.1", True, "IP address mismatch"),  # although the address is the right one
    ("", NAME, True, "SSL"),
], ids=["unknown", "other key", "other name", "address", "no TLS"])  # fmt: skip
async def test_a_receiver_that_cannot_be_believed_is_told_nothing(
    authority: Authority, asked: list[str], tmp_path: Path, signer: str, host: str, believed: bool, said: str
) -> None:
    signers = {"authority": lambda: authority, "other": lambda: Authority(tmp_path / "other")}
    with receiving(Receiver(), signers[signer]().server(NAME) if signer else None) as receiver:
        status, problem = await sent(receiver, host, **{"ca_file": str(authority.file)} if believed else {})
    assert status == 0 and said in problem and asked == [host] and receiver.got == []


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


def test_refused_said_tried_again_and_delivered_when_it_is_believed(empty_house: House, authority: Authority) -> None:
    """An offline process that does not believe the certificate says so in the record, and sends nothing. Another that
    was told whom to believe delivers the same message at its next attempt."""

    def message() -> dict[str, Any]:
        """The only one there is. Raises IndexError."""
        return dict(json.loads(empty_house.get("/admin/webhooks")[1])["data"][0])

    job = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    with secure(authority.server("localhost")) as (receiver, called):
        row = {"url": f"https://localhost:{receiver.port}/hook", "secret": SECRET, "networks": ["127.0.0.0/8", "::1"]}
        lines = ["[webhooks.test]", *(f"{key} = {json.dumps(value)}" for key, value in row.items()), ""]
        settings = empty_house.folder / "penstock.toml"
        settings.write_text("\n".join(lines))
        empty_house.start_api()
        empty_house.start("workers")
        doubting = empty_house.start("offline")
        empty_house.wait_ready()
        assert empty_house.post("/v1/jobs", job)[0] == 202
        eventually(lambda: message()["attempts"] == 1 and message()["last_error"], IndexError)
        refused = message()
        assert refused["status"] == "pending" and refused["next_attempt_at"] > refused["last_attempt_at"]
        assert "CERTIFICATE_VERIFY_FAILED" in refused["last_error"] and refused["last_status_code"] is None
        eventually(lambda: "webhook not delivered: ConnectError: [SSL: CERT" in empty_house.log("offline"))
        assert set(called) == {"localhost"} and receiver.got == []
        doubting.terminate()
        assert doubting.wait(20) == 0
        due_now(empty_house, message())
        settings.write_text("\n".join([*lines, f'ca_file = "{authority.file}"', ""]))
        empty_house.start("offline", "--id", "offline-2")
        eventually(lambda: message()["status"] == "delivered")
        assert [headers["webhook-id"] for headers, _ in receiver.got] == [refused["id"]] == [message()["id"]]
        assert message()["attempts"] >= 2 and message()["last_error"] is None
