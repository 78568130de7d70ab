"""A server that answers every request at once and does nothing else: what a look at this machine costs just now.

python -m bench.recovery.control PORT
"""

from __future__ import annotations

import asyncio
import sys

BACKLOG = 4096
"""Connections that may wait to be accepted: with fewer, some of a thousand that come at once are open on their side
alone, and one of these that says nothing stays so."""
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The requests of one connection, which have no bodies."""
    try:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ANSWER)
            await writer.drain()
    except (OSError, EOFError):
        writer.close()


async def serve(port: int) -> None:
    """Until the process is ended."""
    server = await asyncio.start_server(_answer, "127.0.0.1", port, backlog=BACKLOG)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
