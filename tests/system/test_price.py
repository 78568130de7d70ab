"""A streamed chat makes as many function calls and store commands as price.json says.

Counts the function calls of the API process and of the worker (Python 3.11), and the store's commands, for one streamed
chat of eight tokens. Counts depend less on the machine's load than times do, but include periodic work, more of it the
longer a chat takes: so no other test runs meanwhile. A change that lowers a count lowers price.json, or the test fails
once it is under FLOOR; one that must raise it says why in its commit.
"""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from house import House, eventually
from redis import Redis

pytestmark = [pytest.mark.slow, pytest.mark.alone]

TREE = Path(__file__).parents[2]
COUNTED = TREE / "tests/support/counted"
EXPECTED = json.loads(Path(__file__).with_name("price.json").read_text(encoding="utf-8"))
ROUNDS, CHATS = 6, 8
"""The cheapest round counts: a slower round contains more periodic work."""
FLOOR, BOUND = 0.9, 1.05
STEADY = {"PENSTOCK_REDIS_LEASE_MS": "60000", "PENSTOCK_SIM_STEP_MS": "8"}
"""Few heartbeats, and steps far enough apart that each is a write of its own."""


def calls_of(process: subprocess.Popen[bytes], path: Path) -> int:
    """The calls of a process so far."""
    path.unlink(missing_ok=True)
    process.send_signal(signal.SIGUSR2)
    eventually(path.exists)
    return int(path.read_text())


def test_a_streamed_chat_costs_what_it_did(empty_house: House, tmp_path: Path) -> None:
    house, counts = empty_house, {role: tmp_path / role for role in ("api", "workers")}

    def environ(role: str) -> dict[str, str]:
        return {"PYTHONPATH": f"{COUNTED}:{TREE}", "COUNTED_CALLS": str(counts[role]), **STEADY}

    processes = {"api": house.start_api(**environ("api")), "workers": house.start("workers", **environ("workers"))}
    house.wait_ready()
    store = Redis.from_url(house.redis_url)
    connection = http.client.HTTPConnection("127.0.0.1", house.port, timeout=60)
    look: dict[str, Callable[[], int]] = {
        "api": lambda: calls_of(processes["api"], counts["api"]),
        "workers": lambda: calls_of(processes["workers"], counts["workers"]),
        "store": lambda: sum(each["calls"] for each in store.info("commandstats").values()),
    }

    def chat(number: int) -> None:
        messages = [{"role": "user", "content": f"hello {number}"}]
        body = json.dumps({"model": "sim", "stream": True, "max_tokens": 8, "messages": messages})
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        with connection.getresponse() as answer:
            assert answer.status == 200 and answer.read().count(b'"content":"') >= 8

    cheapest: dict[str, float] = {}
    try:
        for number in range((1 + ROUNDS) * CHATS):
            if number % CHATS == 0:
                before = {name: count() for name, count in look.items()}
            chat(number)
            if number % CHATS == CHATS - 1 and number > CHATS:  # the first round fills caches
                found = {name: (count() - before[name]) / CHATS for name, count in look.items()}
                cheapest = {name: min(cheapest.get(name, price), price) for name, price in found.items()}
    finally:
        connection.close()
        store.close()
    prices = {name: round(price, 1) for name, price in cheapest.items()}
    within = [FLOOR <= price / EXPECTED[name] <= BOUND for name, price in prices.items()]
    assert all(within), f"{prices}, expected: {EXPECTED}"
