"""An authority of a test's own, certificates it has signed, made by the openssl command, and TLS before a server that
speaks none."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
AUTHORITY = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign")
SERVER = ("basicConstraints=critical,CA:FALSE", "extendedKeyUsage=serverAuth")


class Authority:
    """`file` is what one who believes it is given."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder, self.file, self._key = folder, folder / "ca.pem", folder / "ca.key"
        _openssl(self.file, self._key, "An authority of a test", AUTHORITY)

    def pair(self, name: str) -> tuple[Path, Path]:
        """The certificate of a server of this name, and its key."""
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        extensions = (*SERVER, f"subjectAltName=DNS:{name}")
        _openssl(certificate, key, "A server of a test", extensions, "-CA", self.file, "-CAkey", self._key)
        return certificate, key

    def server(self, name: str) -> ssl.SSLContext:
        """What a server of this name shows."""
        certificate, key = self.pair(name)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        return context


@asynccontextmanager
async def secured(context: ssl.SSLContext, port: int) -> AsyncIterator[int]:
    """A port behind which there is TLS, and behind that the server at this port of the machine."""
    ways: list[asyncio.Task[None]] = []
    ends: list[asyncio.StreamWriter] = []

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends.append(writer)
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", port)
        ways.extend(asyncio.create_task(way) for way in (forward(reader, ours), forward(theirs, writer)))

    server = await asyncio.start_server(meet, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for end in ends:
            end.transport.abort()  # without a word to whoever has not closed it: that would be waited for
        await asyncio.gather(*(end.wait_closed() for end in ends), return_exceptions=True)


def _openssl(certificate: Path, key: Path, name: str, extensions: tuple[str, ...], *more: str | Path) -> None:
    words = ["openssl", "req", "-x509", *KEY, "-subj", f"/CN={name}", "-keyout", key, "-out", certificate, *more]
    words += [word for extension in extensions for word in ("-addext", extension)]
    subprocess.run(words, check=True, capture_output=True, timeout=30)
