"""`python -m bench.abuse`: a 4-token chat of one tenant beside the largest requests that another tenant may send.

Each round measures the chat's time to first token alone, then as the large requests arrive, and then beside them, once
as many of their choices run as will. These ask for the most choices and prompts that are accepted; each prompt and its
answer fill the context. The simulated engine charges each prompt token and each text of a step. Beside one large
request there is a goal. Arrival is only shown, and so is what happens beside several: jobs are claimed in the order of
arrival, so one tenant can still fill all slots with many requests. `--base REF` also measures the tree of another
commit, without a goal.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from dataclasses import asdict
from pathlib import Path

from bench.abuse.ask import (
    COLUMNS,
    LLAMACPP,
    AbuseRound,
    Case,
    LargeRequest,
    RunningRequest,
    TenantClient,
    first_token_s,
    goals_of,
    row_of,
)
from bench.gateway.base import Tree, export
from bench.http import RequestRefused
from bench.penstock import MODEL, Penstock, key_rows
from bench.processes import Died
from bench.program import OUT, BenchProgram, Option, ProgramRun, Testbed, count

NAME = "abuse"
THIS = "this tree"
DEFAULT_CHOICES = 64
CHAT_KEY, LARGE_KEY = "bench-chat", "bench-large"
KEYS = key_rows("chat", CHAT_KEY) + key_rows("large", LARGE_KEY)

CASES = (
    Case(slots=64, choices=64),
    Case(slots=256, choices=1024),
    Case(slots=256, choices=64, kv_tokens=262_144),
    Case(slots=4, choices=64, engine=LLAMACPP),
    Case(slots=256, choices=64, bodies=8),
    Case(slots=4, choices=64, bodies=2, engine=LLAMACPP),
    Case(slots=4, choices=64, bodies=3, engine=LLAMACPP),
    Case(slots=4, choices=64, bodies=3, lane="standard", engine=LLAMACPP),
)
"""64 choices are the most without a setting, 1,024 the most that a body can ask for. 4 slots are llama.cpp's. One
request asks for more choices than half of the slots, or of the cache, would hold."""
QUICK = (Case(slots=16, choices=64, kv_tokens=65_536), Case(slots=4, choices=64, engine=LLAMACPP))
BEGIN_TIMEOUT_S = 120.0
"""For the prompts of all choices that run at the same time."""
SETTLE_S = 0.5
"""Between the first tokens of the large requests and the first chat beside them."""


def _run(run: ProgramRun) -> int:
    args = run.args
    cases = QUICK if args.quick else CASES
    rows, goals = [], []
    with Testbed(run.console, "starting", len(cases) * (2 if args.base else 1)) as stage:
        trees: list[Tree | None] = [None, *([export(args.base, stage.folder / "base")] if args.base else [])]
        for case in cases:
            for tree in trees:
                name = tree.version if tree else THIS
                stage.say(f"{name}: {case.words}")
                folder = stage.room(name, case.slots, case.choices, case.bodies, case.lane, case.kv_tokens)
                rounds = _measured(folder, case, tree, args)
                rows.append(row_of(name, case, rounds, args.limit))
                if tree is None:
                    goals += goals_of(case, rounds, args.limit)
                stage.done()
    found = run.result(
        NAME,
        "A chat of 4 tokens beside another tenant's large requests",
        COLUMNS,
        rows,
        goals,
        (
            "Several large requests are shown and not judged: jobs are claimed in the order of arrival, whoever sent "
            "them.",
            "A chat whose first token does not come within the limit counts as that late, and ends its round.",
            "As they arrive: one chat in each round, sent once the large requests are accepted; their prompts are "
            "computed before its own. Beside: once as many choices have begun as one request may have running.",
            "The engine of 4 slots charges what llama.cpp was measured to take, the others what a GPU is assumed to "
            "take; an older tree's engine charges only what that tree's settings know.",
        ),
        rounds=args.rounds,
        chats=args.chats,
        limit_s=args.limit,
        context=args.context,
        cases=[asdict(case) for case in cases],
    )
    return int(run.keep(found).missed)


def _measured(folder: Path, case: Case, tree: Tree | None, args: argparse.Namespace) -> list[AbuseRound]:
    """A deployment of its own, with a key for each tenant. Raises Died, RequestRefused, OSError."""
    sim = {**asdict(case.engine), "slots": case.slots, "kv_tokens": case.kv_tokens, "context": args.context}
    known = (tree.path / "workers/settings.py").read_text(encoding="utf-8") if tree else None
    settings: dict[str, object] = {
        f"sim.{name}": value for name, value in sim.items() if known is None or f" {name}:" in known
    }
    if tree is None:
        settings |= {"api.max_choices_per_request": max(DEFAULT_CHOICES, case.choices)}
    with Penstock(folder, settings=settings, tree=tree.path if tree else None, config=KEYS) as penstock:
        return asyncio.run(_rounds(penstock.port, case, args))


async def _rounds(port: int, case: Case, args: argparse.Namespace) -> list[AbuseRound]:
    chat, large = TenantClient(port, CHAT_KEY, MODEL), TenantClient(port, LARGE_KEY, MODEL)
    request = LargeRequest(case.choices, args.context // 8, args.context - args.context // 8, case.lane)
    running = case.running(args.context) if case.bodies == 1 else 1
    await first_token_s(chat, 0, args.limit)  # whatever is done once
    rounds = []
    for number in range(args.rounds):
        alone = await _chats(chat, args)
        async with contextlib.AsyncExitStack() as stack:
            bodies = [
                await stack.enter_async_context(RunningRequest(large, request, number * case.bodies + at, running))
                for at in range(case.bodies)
            ]
            async with asyncio.timeout(BEGIN_TIMEOUT_S):
                for body in bodies:
                    await body.accepted.wait()
                arrival = await first_token_s(chat, args.chats, args.limit)
                await bodies[0].begun.wait()
            begun = bodies[0].choices_begun
            await asyncio.sleep(SETTLE_S)
            beside = await _chats(chat, args)
            for body in bodies:
                body.check()
        rounds.append(AbuseRound(alone, beside, arrival, begun))
    return rounds


async def _chats(client: TenantClient, args: argparse.Namespace) -> list[float | None]:
    """One after the other; one that is late is the last."""
    times: list[float | None] = []
    while len(times) < args.chats and None not in times:
        times.append(await first_token_s(client, len(times), args.limit))
    return times


main = BenchProgram("penstock bench abuse", __doc__, _run, Died, RequestRefused, OSError, TimeoutError).taking(
    Option("--rounds", type=count, default=5, help="of each case (default 5)"),
    Option("--chats", type=count, default=15, help="alone and beside, in each round (default 15)"),
    Option("--limit", type=float, default=10.0, help="seconds to wait for a first token (default 10)"),
    Option("--context", type=count, default=8192, help="of the simulated engine, in tokens (default 8192)"),
    Option("--base", metavar="REF", help="a git commit whose tree is measured too"),
    Option("--quick", action="store_true", help="few slots, few cases"),
    OUT,
)

if __name__ == "__main__":
    main.exit()
