"""`python -m bench.abuse.server PORT`: an upstream server that lies: it streams without end, as fast as it is read, to
whoever asks it to, and 4 tokens at the pace of an engine to others."""

from __future__ import annotations

import asyncio
import re
import sys

import msgspec

from bench.http import HOST, STREAM, chunk

MODEL, FLOOD = "bench", "flood me"
STEP_S = 0.005
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"


def _event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "text": text, "finish_reason": finish}
    return chunk(b"data: " + msgspec.json.encode({"id": "x", "choices": [choice]}) + b"\n\n")


FLOODED = _event("words " * 2000) + chunk(b": " + b"x" * 60_000 + b"\n\n") + b"".join([_event("a ")] * 500)
"""Large deltas, comments, and many small deltas."""


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = LENGTH.search(head)
            body = await reader.readexactly(int(length[1]) if length else 0)
            if b"completions" not in head.split(b"\r\n", 1)[0]:
                page = msgspec.json.encode({"data": [{"id": MODEL, "max_model_len": 8192}]})
                writer.write(PAGE % (len(page), page))
                continue
            writer.write(STREAM)
            while FLOOD.encode() in body:
                writer.write(FLOODED)
                await writer.drain()
            for number in range(4):
                await asyncio.sleep(STEP_S)
                writer.write(_event(f"{number} ", "stop" if number == 3 else None))
            writer.write(chunk(b"data: [DONE]\n\n") + chunk(b""))
    except (OSError, EOFError):
        pass  # the client has left
    finally:
        writer.close()


async def serve(port: int) -> None:
    """Until the process is ended."""
    server = await asyncio.start_server(_answer, HOST, port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
