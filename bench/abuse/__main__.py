"""`python -m bench.abuse`: short chats of one tenant while another one does its worst, beside the same chats in quiet.

Each round of each abuse has processes of its own: a store of 256 MB, an API process, and a worker with 16 slots. The
chats come one after the other, first in quiet, then beside the abuse. Their ratio counts: other loads of this machine
are in both. A chat counts as accepted if its first token comes within 10 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

from bench.abuse.abuser import ABUSES, KEY, Abuse
from bench.http import RequestRefused, answer_to, request
from bench.penstock import MODEL, Penstock, key_rows, start_redis
from bench.processes import Died
from bench.program import OUT, BenchProgram, Option, ProgramRun, Testbed, check_names, count
from bench.report import Ratio, columns

NAME = "abuse"
OTHERS_KEY = "bench-others"
STORE = "maxmemory 256mb"
LIMIT_S = 10.0
"""Of a first token."""
SETTLE_S = 1.5
"""Between the begin of the abuse and the first chat beside it."""
ENGINE = {"sim.slots": 16, "sim.step_ms": 5, "sim.context": 100_000}


class AbuseRound(NamedTuple):
    """Seconds to the first token; None: refused, or too late."""

    quiet: list[float | None]
    beside: list[float | None]
    answered: Counter[str]
    """What the abuser was answered, by status."""


async def first_token_s(port: int, number: int) -> float | None:
    """Seconds from sending a chat of 4 tokens to its first token."""
    messages = [{"role": "user", "content": f"hello {number}"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 4, "stream": True}
    sent = request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {OTHERS_KEY}"})
    began, first = time.monotonic(), None
    with contextlib.suppress(TimeoutError, RequestRefused, OSError):
        async with asyncio.timeout(LIMIT_S), answer_to(port, sent) as (reader, _):
            while (line := await reader.readline()) and not line.startswith(b"data: [DONE]"):
                if first is None and line.startswith(b"data: {") and _has_text(line):
                    first = time.monotonic() - began
    return first


def _has_text(line: bytes) -> bool:
    choices = json.loads(line[6:]).get("choices")
    return bool(choices and choices[0].get("delta", {}).get("content"))


async def _chats(port: int, chats: int) -> list[float | None]:
    return [await first_token_s(port, number) for number in range(chats)]


@contextlib.contextmanager
def _abused(name: str, port: int) -> Iterator[Counter[str]]:
    """The abuse goes on inside; behind it, what it was answered is there. Raises Died."""
    answered, argv = Counter[str](), [sys.executable, "-m", "bench.abuse.abuser", name, str(port)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as abuser:
        assert abuser.stdout is not None
        try:
            if not abuser.stdout.readline():
                raise Died(f"the abuser ({name}) has ended")
            yield answered
        finally:
            abuser.terminate()
            answered.update(json.loads(abuser.communicate()[0] or b"{}"))


def _measured(stage: Testbed, name: str, abuse: Abuse, number: int, chats: int) -> AbuseRound:
    """One round. Raises Died, OSError."""
    penstock = Penstock(stage.room(name, number), engine=abuse.engine, settings=ENGINE, config=KEYS)
    with contextlib.ExitStack() as stack:
        stack.callback(penstock.close)
        penstock.redis_url = start_redis(penstock.processes, STORE)
        if abuse.engine == "upstream":
            server = penstock.processes.serve("server", "bench.abuse.server")
            penstock.settings["upstream.urls"] = f"http://127.0.0.1:{server}/v1"
        stack.enter_context(penstock)
        asyncio.run(_chats(penstock.port, 3))  # whatever is done once
        quiet = asyncio.run(_chats(penstock.port, chats))
        with _abused(name, penstock.port) as answered:
            time.sleep(SETTLE_S)
            beside = asyncio.run(_chats(penstock.port, chats))
        return AbuseRound(quiet, beside, answered)


KEYS = key_rows("others", OTHERS_KEY) + key_rows("abuser", KEY)


def _ms(times: list[float | None]) -> float:
    """The median; one that never came counts as the limit."""
    return 1000 * median(LIMIT_S if each is None else each for each in times)


def row_of(abuse: Abuse, rounds: list[AbuseRound]) -> dict[str, Any]:
    """All rounds of one abuse."""
    beside = [each for one in rounds for each in one.beside]
    answered = sum((one.answered for one in rounds), Counter[str]())
    return {
        "abuse": abuse.words,
        "accepted": 100 * sum(each is not None for each in beside) / len(beside),
        "quiet_ms": median(_ms(one.quiet) for one in rounds),
        "beside_ms": median(_ms(one.beside) for one in rounds),
        "worst_ms": 1000 * max(LIMIT_S if each is None else each for each in beside),
        "answered": ", ".join(f"{status}: {number}" for status, number in sorted(answered.items())),
    }


def goals_of(abuse: Abuse, rounds: list[AbuseRound]) -> list[Ratio]:
    """Others' acceptance, and the median of the rounds' ratios of their first tokens."""
    ratios = [_ms(one.beside) / _ms(one.quiet) for one in rounds]
    accepted = row_of(abuse, rounds)["accepted"]
    return [
        Ratio.held("abuse.accepted", f"{abuse.words}: others' chats accepted, per cent", accepted, digits=0),
        Ratio.held("abuse.first_token", f"{abuse.words}: TTFT over quiet", median(ratios), rounds=ratios),
    ]


def _run(run: ProgramRun) -> int:
    args, rows, goals = run.args, list[dict[str, Any]](), list[Ratio]()
    names = args.only.split(",") if args.only else [*ABUSES]
    check_names("abuse", names, ABUSES)
    found: dict[str, list[AbuseRound]] = {name: [] for name in names}
    with Testbed(run.console, "starting", len(names) * args.rounds) as stage:
        for number in range(args.rounds):
            for name in names if number % 2 == 0 else reversed(names):
                stage.say(f"{ABUSES[name].words}, round {number + 1}")
                found[name].append(_measured(stage, name, ABUSES[name], number, args.chats))
                stage.done()
    for name, rounds in found.items():
        rows.append(row_of(ABUSES[name], rounds))
        goals += goals_of(ABUSES[name], rounds)
    title = "Short chats of one tenant beside the abuse of another"
    return run.keep(run.result(NAME, title, COLUMNS, rows, goals, rounds=args.rounds, chats=args.chats))


COLUMNS = columns("""
    abuse: the other tenant; accepted: chats accepted, % .0; quiet_ms: TTFT in quiet, p50, ms; beside_ms: beside, p50;
    worst_ms: longest .0; answered: what the abuser got
""")

main = BenchProgram("penstock bench abuse", __doc__, _run, Died, RequestRefused, OSError).taking(
    Option("--rounds", type=count, default=3, help="of each abuse (default 3)"),
    Option("--chats", type=count, default=15, help="in quiet and beside, in each round (default 15)"),
    Option("--only", metavar="NAMES", help=f"of {', '.join(ABUSES)}, with commas between"),
    OUT,
)

if __name__ == "__main__":
    main.exit()
