"""TCP proxy between a client and a server, which can be cut in one direction or in both.

A cut proxy keeps its connections open and accepts new ones, and swallows the bytes of the directions that are cut: a
black hole. When it is healed, connections that lost bytes are closed, for no network delivers a stream with a hole.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from bench.chaos.http import HOST
from bench.ports import free_port

CHUNK = 1 << 16


@dataclass(eq=False)
class _Pair:
    """One connection: the client's side and the server's."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    lost: bool = False

    def close(self) -> None:
        for writer in (self.client, self.server):
            writer.transport.abort()


class Proxy:
    """Listens on `port` and connects to `target`, which may be changed: new connections go to the new one."""

    def __init__(self, target: int) -> None:
        self.port = free_port()
        self.target = target
        self.swallowed = 0
        """Bytes lost in cuts."""
        self._to_server = self._to_client = True
        self._pairs: set[_Pair] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._accept, HOST, self.port)

    async def stop(self) -> None:
        """Close everything."""
        if self._server is not None:
            self._server.close()
        self.drop()
        await asyncio.sleep(0)

    def cut(self, *, to_server: bool = True, to_client: bool = True) -> None:
        """Swallow what goes to the server, to the client, or both."""
        self._to_server, self._to_client = not to_server, not to_client

    def heal(self) -> None:
        """Forward everything again."""
        self._to_server = self._to_client = True
        for pair in [pair for pair in self._pairs if pair.lost]:
            pair.close()

    def drop(self) -> None:
        """Close every connection."""
        for pair in list(self._pairs):
            pair.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection(HOST, self.target)
        except OSError:
            writer.transport.abort()
            return
        pair = _Pair(writer, server_writer)
        self._pairs.add(pair)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(pair, reader, server_writer, to_server=True))
                both.create_task(self._pump(pair, server_reader, writer, to_server=False))
        finally:
            self._pairs.discard(pair)
            pair.close()

    async def _pump(
        self, pair: _Pair, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, to_server: bool
    ) -> None:
        """One direction, until either side has closed."""
        try:
            while data := await reader.read(CHUNK):
                if self._to_server if to_server else self._to_client:
                    writer.write(data)
                    await writer.drain()
                else:
                    pair.lost = True
                    self.swallowed += len(data)
        except OSError:
            pass  # one side was closed or reset: so is the other one
        finally:
            pair.close()
