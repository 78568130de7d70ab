"""`python -m bench.load.scripted PORT`: a server whose tokens leave at known times, to check our own clock.

It waits actively for the last two milliseconds before each token, so that only the machine itself can make it late.
"""

from __future__ import annotations

import asyncio
import sys
import time
from statistics import median

import msgspec
import uvloop

from bench.http import STREAM, chunk
from bench.load.plan import LoadFailed, LoadPlan, StreamReading, measure
from bench.processes import Processes

TTFT_MS, ITL_MS, TOKENS = 20.0, 10.0, 64
ACTIVE_S = 0.002
END = b"data: [DONE]\n\n"


class _Request(msgspec.Struct):
    max_tokens: int


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            size = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
            request = msgspec.json.decode(await reader.readexactly(size), type=_Request)
            began = time.monotonic()
            writer.write(STREAM)
            for number in range(request.max_tokens):
                await _until(began + (TTFT_MS + number * ITL_MS) / 1e3)
                writer.write(chunk(b'data: {"choices":[{"delta":{"content":" t%d"}}]}\n\n' % number))
            writer.write(chunk(END) + b"0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def _until(due: float) -> None:
    await asyncio.sleep(max(0.0, due - time.monotonic() - ACTIVE_S))
    while time.monotonic() < due:
        pass


async def _serve(port: int) -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", port)
    await server.serve_forever()


def clock_error(processes: Processes, requests: int = 4, trials: int = 3) -> float:
    """How far the load generator is off, in ms, by its medians of TTFT and ITL: the middle one of several trials.
    Raises Died, LoadFailed."""
    port = processes.serve("scripted", "bench.load.scripted")
    plan = LoadPlan(port=port, model="scripted", streams=1, requests=requests, tokens=TOKENS, limit_s=20)
    return median(_off(measure(plan)) for _ in range(trials))


def _off(reading: StreamReading) -> float:
    if reading.wrong:
        raise LoadFailed(f"it misread the scripted server: {reading.wrong}")
    return max(abs(reading.ttft.p50 - TTFT_MS), abs(reading.itl.p50 - ITL_MS))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(int(sys.argv[1])))
