"""TLS on real sockets: which certificate a client sees and when, and what one may do that never agrees on TLS."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import uvicorn
import uvloop
from certificates import Authority
from connections import PATIENCE_S, Served, serving, soon
from starlette.types import Receive, Scope, Send

from api import tls
from api.settings import ApiSettings
from api.stream import connection_guard
from api.stream.connection_guard import ConnectionGuard, DrainingServer
from api.stream.handshake import Handshake
from api.tls import Certificate, trusting
from penstock.config import ConfigError

pytestmark = pytest.mark.slow

ASK = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
LARGE_BYTES = 16 * 1024 * 1024


class App:
    """Answers with the scheme; `/hold` ends when `go_on` is set, `/large` is more than a reader takes by itself."""

    def __init__(self) -> None:
        self.go_on, self.asked = asyncio.Event(), 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked += 1
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        if scope["path"] == "/hold":
            await send({"type": "http.response.body", "body": b"<", "more_body": True})
            await self.go_on.wait()
        body = b"x" * LARGE_BYTES if scope["path"] == "/large" else scope["scheme"].encode()
        await send({"type": "http.response.body", "body": body})


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_guard, "SWEEP_INTERVAL_S", 0.02)
    monkeypatch.setattr(connection_guard, "LINGER_TIMEOUT_S", 0.2)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("tls") / "authority")
    made.pair("one"), made.pair("two")
    return made


@pytest.fixture
def pair(authority: Authority, tmp_path: Path) -> tuple[Path, Path]:
    """Files that a test may replace."""
    files = tmp_path / "server.pem", tmp_path / "server.key"
    replace(files, authority, "one", "one")
    return files


def replace(files: tuple[Path, Path], authority: Authority, certificate: str, key: str, mode: int = 0o600) -> None:
    for file, name in zip(files, (f"{certificate}.pem", f"{key}.key"), strict=True):
        fresh = file.with_suffix(".fresh")
        fresh.write_bytes((authority.file.parent / name).read_bytes())
        fresh.chmod(mode)
        fresh.replace(file)


@asynccontextmanager
async def opened(pair: tuple[Path, Path], **settings: Any) -> AsyncIterator[Served[App]]:
    async with serving(App(), tls_certificate=pair[0], tls_key=pair[1], **settings) as served:
        yield served
        served.app.go_on.set()


async def connect(door: Served[App], authority: Authority, name: str = "one") -> Any:
    """A reader and a writer. Raises ssl.SSLError for a certificate of another name."""
    context = ssl.create_default_context(cafile=str(authority.file))
    return await asyncio.open_connection("127.0.0.1", door.port, ssl=context, server_hostname=name)


async def ask(door: Served[App], authority: Authority, name: str = "one", path: str = "/") -> bytes:
    """The whole answer to one request."""
    reader, writer = await connect(door, authority, name)
    writer.write(ASK.replace(b"/", path.encode(), 1))
    async with asyncio.timeout(PATIENCE_S):
        said = await reader.read()
    writer.close()
    return bytes(said)


async def closed(client: socket.socket) -> bool:
    """Whether the server ends this connection without a byte."""
    client.setblocking(False)
    async with asyncio.timeout(PATIENCE_S):
        try:
            return await asyncio.get_running_loop().sock_recv(client, 1) == b""
        except ConnectionResetError:
            return True


async def test_a_request_is_answered_over_tls(pair: tuple[Path, Path], authority: Authority) -> None:
    async with opened(pair) as door:
        assert (await ask(door, authority)).endswith(b"https\r\n0\r\n\r\n")
        with pytest.raises(ssl.SSLError):
            await connect(door, authority, "two")
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port, ssl=trusting(pair[0]))
        writer.write(ASK)
        assert (await reader.read()).endswith(b"https\r\n0\r\n\r\n"), "to whoever trusts just this certificate"
        writer.close()
        await soon(lambda: not door.open)
        assert not door.guard.handshakes


async def test_a_request_may_come_with_the_last_word_of_the_handshake(
    pair: tuple[Path, Path], authority: Authority
) -> None:
    """Some clients send both in one packet."""
    context = ssl.create_default_context(cafile=str(authority.file))
    received, to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(received, to_send, server_hostname="one")
    async with opened(pair) as door:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(to_send.read())
                received.write(await reader.read(65536))
        tls.write(ASK)
        writer.write(to_send.read())
        said = b""
        while b"https" not in said:
            received.write(await reader.read(65536))
            try:
                said += tls.read(65536)
            except ssl.SSLWantReadError:
                continue
        writer.close()


@pytest.mark.parametrize("sends", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["nothing", "half a hello"])
async def test_a_handshake_has_a_deadline(pair: tuple[Path, Path], sends: bytes) -> None:
    async with opened(pair, header_timeout_s=0.1) as door:
        with socket.create_connection(("127.0.0.1", door.port)) as client:
            client.sendall(sends)
            assert await closed(client)
        await soon(lambda: not door.guard.handshakes)
        assert not door.open


async def test_what_is_no_tls_ends_at_once(pair: tuple[Path, Path]) -> None:
    async with opened(pair) as door:
        with socket.create_connection(("127.0.0.1", door.port)) as client:
            client.sendall(ASK)
            client.setblocking(False)
            async with asyncio.timeout(PATIENCE_S):
                while await asyncio.get_running_loop().sock_recv(client, 4096):
                    pass  # an alert
        await soon(lambda: not door.guard.handshakes)


async def test_handshakes_count_as_connections(
    pair: tuple[Path, Path], authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one takes the only place, requests are refused, probes are answered; beyond the limits the oldest goes."""
    monkeypatch.setattr(connection_guard, "MAX_SURPLUS", 2)
    async with opened(pair, max_connections=1) as door:
        silent = [socket.create_connection(("127.0.0.1", door.port)) for _ in range(2)]
        await soon(lambda: len(door.guard.handshakes) == 2)
        assert b"too_many_connections" in await ask(door, authority)
        assert b" 200 OK" in await ask(door, authority, path="/healthz")
        for _ in range(2):
            silent.append(socket.create_connection(("127.0.0.1", door.port)))
        assert await closed(silent[1])
        silent[0].close()
        await soon(lambda: len(door.guard.handshakes) == 2)
        for each in silent:
            each.close()
        await soon(lambda: not door.guard.handshakes)
        assert b" 200 OK" in await ask(door, authority), "the place is free again"


async def test_new_files_are_for_new_connections(
    pair: tuple[Path, Path], authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that are open go on; files that do not fit each other change nothing, and are told once."""
    async with opened(pair) as door:
        assert door.certificate is not None
        reader, writer = await connect(door, authority)
        writer.write(ASK.replace(b"/", b"/hold", 1))
        await reader.readuntil(b"<")
        replace(pair, authority, "two", "one")
        with caplog.at_level(logging.WARNING):
            door.certificate.refresh()
            door.certificate.refresh()
        assert len(caplog.records) == 1
        await ask(door, authority, "one")
        pair[1].unlink()
        door.certificate.refresh()
        await ask(door, authority, "one")
        replace(pair, authority, "two", "two")
        door.certificate.refresh()
        await ask(door, authority, "two")
        door.app.go_on.set()
        assert (await reader.read()).endswith(b"https\r\n0\r\n\r\n")
        writer.close()


async def test_files_are_looked_at_for_ever(
    pair: tuple[Path, Path], authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind ones that could not be used."""
    monkeypatch.setattr(tls, "coalesced", lambda seconds: seconds / 100)
    async with opened(pair) as door:
        assert door.certificate is not None
        before = door.certificate.context
        looking = asyncio.create_task(door.certificate.keep_fresh())
        replace(pair, authority, "two", "one")
        await asyncio.sleep(0.05)
        replace(pair, authority, "two", "two")
        await soon(lambda: door.certificate and door.certificate.context is not before)
        await ask(door, authority, "two")
        looking.cancel()


async def test_a_reader_that_takes_nothing_is_disconnected(pair: tuple[Path, Path], authority: Authority) -> None:
    async with opened(pair, send_timeout_s=0.2) as door:
        with socket.create_connection(("127.0.0.1", door.port)) as plain:
            context = ssl.create_default_context(cafile=str(authority.file))
            client = await asyncio.to_thread(context.wrap_socket, plain, server_hostname="one")
            client.sendall(ASK.replace(b"/", b"/large", 1))
            await soon(lambda: door.open)
            await soon(lambda: not door.open)
            client.close()


def read_large(door: Served[App], authority: Authority, pause_s: Callable[[int], float]) -> int:
    """Read `/large` to its end, with a pause behind each piece; returns the bytes. `pause_s`: gets those so far."""
    context, size = ssl.create_default_context(cafile=str(authority.file)), 0
    with socket.create_connection(("127.0.0.1", door.port)) as plain, context.wrap_socket(
        plain, server_hostname="one"
    ) as client:  # fmt: skip
        client.settimeout(PATIENCE_S)
        client.sendall(ASK.replace(b"/", b"/large", 1))
        while piece := client.recv(4096):
            size += len(piece)
            time.sleep(pause_s(size))
    return size


def every_2_mib(size: int) -> float:
    return 0.1 if size % (2 << 20) < 4096 else 0


def late(size: int) -> float:
    return 0.001 if size > LARGE_BYTES // 2 else 0


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_slow_reader_gets_the_whole_answer(
    pair: tuple[Path, Path], authority: Authority, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """It reads for several times as long as one that takes nothing may stay."""

    async def main() -> None:
        async with opened(pair, send_timeout_s=0.3) as door:
            assert await asyncio.to_thread(read_large, door, authority, every_2_mib) > LARGE_BYTES
            await soon(lambda: not door.open)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


async def test_the_end_of_an_answer_has_as_long_as_the_rest(
    pair: tuple[Path, Path], authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS still has some of it when the server closes: longer than one that sends may linger."""
    monkeypatch.setattr(connection_guard, "LINGER_TIMEOUT_S", 0.005)

    async with opened(pair) as door:
        assert await asyncio.to_thread(read_large, door, authority, late) > LARGE_BYTES
        await soon(lambda: not door.open)


async def test_what_comes_behind_the_last_request_is_not_answered(
    pair: tuple[Path, Path], authority: Authority
) -> None:
    async with opened(pair) as door:
        reader, writer = await connect(door, authority)
        writer.write(ASK.replace(b"/", b"/large", 1))
        assert await reader.read(1)
        writer.write(ASK)
        said = await reader.read()
        assert len(said) > LARGE_BYTES and said.count(b"HTTP/1.1") == 0 and door.app.asked == 1
        writer.close()


async def test_a_key_that_others_could_read_is_used_once_they_cannot(
    pair: tuple[Path, Path], authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """And one whose rights are opened is told."""
    async with opened(pair) as door:
        assert door.certificate is not None
        replace(pair, authority, "two", "two", mode=0o644)
        with caplog.at_level(logging.WARNING):
            door.certificate.refresh()
            door.certificate.refresh()
        assert len(caplog.records) == 1 and "chmod o=" in caplog.text
        pair[1].chmod(0o600)
        door.certificate.refresh()
        await ask(door, authority, "two")
        pair[1].chmod(0o644)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            door.certificate.refresh()
        assert "chmod o=" in caplog.text
        await ask(door, authority, "two")


def test_files_that_cannot_be_used_are_named_with_the_fix(pair: tuple[Path, Path], authority: Authority) -> None:
    for certificate, key in (("two", "one"), ("one", "two")):
        replace(pair, authority, certificate, key)
        with pytest.raises(ConfigError, match=r"server\.pem and .*server\.key cannot be used.*its own first"):
            Certificate(*pair)
    replace(pair, authority, "one", "one")
    for mode in (0o644, 0o602, 0o601):
        pair[1].chmod(mode)
        with pytest.raises(ConfigError, match="chmod o="):
            Certificate(*pair)
    pair[1].chmod(0o640)
    Certificate(*pair)
    locked = pair[1].with_suffix(".locked")
    words = ["openssl", "pkey", "-in", pair[1], "-aes256", "-passout", "pass:word", "-out", locked]
    subprocess.run(words, check=True, capture_output=True)
    code = (
        "import sys; from pathlib import Path; from api.tls import Certificate; Certificate(*map(Path, sys.argv[1:]))"
    )
    told: dict[str, Any] = {"input": "word\n", "capture_output": True, "text": True, "start_new_session": True}
    ends = subprocess.run([sys.executable, "-c", code, pair[0], locked], check=False, timeout=PATIENCE_S, **told)
    assert ends.returncode == 1 and "without a password" in ends.stderr, "it would ask at the terminal"
    pair[1].unlink()
    with pytest.raises(ConfigError, match="cannot be used"):
        Certificate(*pair)
    with pytest.raises(ValueError, match="set both"):
        ApiSettings(tls_certificate=pair[0])


async def test_a_handshake_that_is_under_way_when_the_server_stops_is_finished(
    pair: tuple[Path, Path], authority: Authority
) -> None:
    """And the request behind it is answered: its client could not know."""
    guard = ConnectionGuard(ApiSettings())
    http = cast(type[asyncio.Protocol], partial(Handshake, guard=guard, certificate=Certificate(*pair)))
    config = uvicorn.Config(cast(Any, App()), http=http, log_config=None, lifespan="off", timeout_graceful_shutdown=30)
    config.load()
    server = DrainingServer(config, guard.handshakes)
    server.lifespan = config.lifespan_class(config)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as plain:
        await server.startup(sockets=[listener])
        await asyncio.to_thread(plain.connect, listener.getsockname())
        await soon(lambda: guard.handshakes)
        stopping = asyncio.create_task(server.shutdown())
        await asyncio.sleep(0.3)  # longer than a server without connections takes to stop
        assert not stopping.done()

        def ask_now() -> bytes:
            context = ssl.create_default_context(cafile=str(authority.file))
            with context.wrap_socket(plain, server_hostname="one") as client:
                client.sendall(ASK)
                return client.recv(4096)

        assert (await asyncio.to_thread(ask_now)).startswith(b"HTTP/1.1 200")
        await stopping
