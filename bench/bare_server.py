"""Bare server: answers every request at once and does nothing else, which shows what an answer costs on this machine.

`python -m bench.bare_server PORT` answers 200 on connections that stay; with `refuse` behind it, 429 and the end of the
connection.
"""

from __future__ import annotations

import asyncio
import re
import sys
from functools import partial

BACKLOG = 4096
"""Connections that may wait to be accepted: with fewer, some of a thousand that come at once are open on their side
alone, and one of these that says nothing stays so."""
BODY = b'{"error":{"code":"queue_full"}}'
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
REFUSAL = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: %d\r\nRetry-After: 1\r\n\r\n%b" % (len(BODY), BODY)
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


async def _answer(refuses: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The requests of one connection, each read to its end; only the first one where it refuses."""
    try:
        while True:
            found = LENGTH.search(await reader.readuntil(b"\r\n\r\n"))
            await reader.readexactly(int(found[1]) if found else 0)
            writer.write(REFUSAL if refuses else OK)
            await writer.drain()
            if refuses:
                return
    except (OSError, EOFError):
        pass  # the client left
    finally:
        writer.close()


async def serve(port: int, *, refuses: bool) -> None:
    """Until the process is ended."""
    server = await asyncio.start_server(partial(_answer, refuses), "127.0.0.1", port, backlog=BACKLOG)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), refuses="refuse" in sys.argv[2:]))
