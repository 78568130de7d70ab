"""Clients that hold connections and send next to nothing, in a process of their own.

python -m bench.connections.slow PORT COUNT     prints a line once all are connected; ends with its input

A third sends nothing, a third sends a head at a byte a second, a third a body at that pace. A client whose connection
is closed connects again, so that their number stays the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from itertools import cycle, islice

HOST = "127.0.0.1"
BYTE_INTERVAL_S = 1.0
RETRY_DELAY_S = 0.2
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BEGINNINGS = (b"", HEAD + b"X-Slow: ", HEAD + b"Content-Length: 100000\r\n\r\n{")
"""What each kind of client sends at once; the first one sends nothing more."""


class SlowClients:
    """All clients of one server."""

    def __init__(self, port: int, count: int) -> None:
        self._port, self._count = port, count
        self._connected = 0
        self._all_connected = asyncio.Event()

    async def hold(self) -> None:
        """Hold them until the task is cancelled."""
        async with asyncio.TaskGroup() as group:
            for beginning in islice(cycle(BEGINNINGS), self._count):
                group.create_task(self._client(beginning))

    async def wait_connected(self) -> None:
        """Until each has connected once."""
        await self._all_connected.wait()

    async def _client(self, beginning: bytes) -> None:
        first = True
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(HOST, self._port)
                if first:
                    first = False
                    self._connected += 1
                    if self._connected == self._count:
                        self._all_connected.set()
                try:
                    await self._send_slowly(reader, writer, beginning)
                finally:
                    writer.close()
            await asyncio.sleep(RETRY_DELAY_S)

    async def _send_slowly(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, beginning: bytes) -> None:
        """Until the server closes the connection. Raises OSError."""
        writer.write(beginning)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BYTE_INTERVAL_S if beginning else None):
                    if not await reader.read(65536):
                        return
            if beginning:
                writer.write(b"x")


async def main(port: int, count: int) -> None:
    """Until the input ends."""
    clients = SlowClients(port, count)
    holding = asyncio.create_task(clients.hold())
    await clients.wait_connected()
    print("connected", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    holding.cancel()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
