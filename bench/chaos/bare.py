"""A server that refuses every request at once and does nothing else: what a refusal costs on this machine just now.

python -m bench.chaos.bare PORT
"""

from __future__ import annotations

import asyncio
import re
import sys

from bench.chaos.http import HOST

BODY = b'{"error":{"code":"queue_full"}}'
ANSWER = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: %d\r\nRetry-After: 1\r\n\r\n%b" % (len(BODY), BODY)
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request of one connection, read to its end."""
    try:
        found = LENGTH.search(await reader.readuntil(b"\r\n\r\n"))
        await reader.readexactly(int(found[1]) if found else 0)
        writer.write(ANSWER)
        await writer.drain()
    except (OSError, EOFError):
        pass  # the client left
    finally:
        writer.close()


async def serve(port: int) -> None:
    """Until the process is ended."""
    server = await asyncio.start_server(_refuse, HOST, port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
