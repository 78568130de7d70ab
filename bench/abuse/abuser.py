"""`python -m bench.abuse.abuser NAME PORT`: one tenant does one abuse until it is ended by SIGTERM; it then prints what
it was answered, by status. Another process than the one that measures, and nothing but this machine is reached."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from bench.abuse.server import FLOOD
from bench.http import HOST, MAX_LINE_BYTES, fetch, request
from bench.penstock import MODEL

KEY = "bench-abuser"
MINE = {"Authorization": f"Bearer {KEY}"}


class Abuse(NamedTuple):
    """One kind of it."""

    words: str
    connections: int
    pause_s: float
    """Between an answer and the next request of its connection; a pace, so that the sender does not take the cores."""
    engine: str = "sim"


ABUSES = {
    "reservations": Abuse("2 kB of requests reserve the store", 2, 0.02),
    "upstream": Abuse("an upstream server streams without end", 2, 0.1, "upstream"),
    "slots": Abuse("2 requests of 8 choices, 16 slots", 2, 0.1),
    "references": Abuse("requests of 1,000 references to one response", 4, 0.05),
    "refusals": Abuse("a flood of refused requests (401, 404, 413)", 8, 0.02),
}


def _chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


def _requests(name: str, port: int) -> Iterator[bytes]:
    """What is sent, in turn. Raises OSError, HTTPException, KeyError."""
    chats = "/v1/chat/completions"
    match name:
        case "reservations":
            sent = [request("POST", "/v1/jobs", _chat("x", n=8, max_tokens=90_000), MINE)]
        case "upstream":
            sent = [request("POST", chats, _chat(FLOOD, stream=True), MINE)]
        case "slots":
            sent = [request("POST", chats, _chat("x", n=8, max_tokens=20_000, stream=True), MINE)]
        case "references":
            asked = {"model": MODEL, "input": "x" * 300_000, "max_output_tokens": 48}
            made = fetch(port, "POST", "/v1/responses", json.dumps(asked).encode(), {**MINE, **JSON})[2]
            refers = [{"type": "item_reference", "id": json.loads(made)["output"][0]["id"]}] * 1000
            sent = [request("POST", "/v1/responses", asked | {"input": refers, "max_output_tokens": 1}, MINE)]
        case _:
            none = {"Authorization": "Bearer sk-none"}
            sent = [
                request("POST", chats, _chat("x" * 1000), none),
                request("POST", "/console/session", {"key": "sk-none"}),
                request("POST", chats, _chat("x" * (3 << 20)), MINE),
                request("GET", "/v1/nowhere", None, MINE),
            ]
    return itertools.cycle(sent)


JSON = {"Content-Type": "application/json"}


async def _send(abuse: Abuse, requests: Iterator[bytes], answered: Counter[str]) -> None:
    """Send one after the other; an answer is read to its end."""
    for sent in requests:
        try:
            reader, writer = await asyncio.open_connection(HOST, int(sys.argv[2]), limit=MAX_LINE_BYTES)
            try:
                writer.write(sent.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
                answered[(await reader.readline()).decode().split(" ")[1]] += 1
                while await reader.read(1 << 20):
                    pass
            finally:
                writer.close()
        except (OSError, IndexError):
            answered["cut"] += 1
        await asyncio.sleep(abuse.pause_s)


async def _until_ended(name: str) -> Counter[str]:
    abuse, answered = ABUSES[name], Counter[str]()
    requests = _requests(name, int(sys.argv[2]))
    tasks = [asyncio.create_task(_send(abuse, requests, answered)) for _ in range(abuse.connections)]
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    print(flush=True)
    await ended.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return answered


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_until_ended(sys.argv[1]))))
