"""The chat beside large requests in short form, and what becomes a figure."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from api.openai.schemas import check_choices, parse
from api.settings import ApiSettings
from bench.abuse import __main__ as program
from bench.abuse.__main__ import CASES, CHAT_KEY, LARGE_KEY, main
from bench.abuse.ask import LLAMACPP, AbuseRound, Case, LargeRequest, goals_of, row_of
from bench.http import RequestRefused
from bench.report import goals, load
from workers.engines.sim.text import count_tokens

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("choices", "prompts", "n"), [(1, 1, 1), (64, 64, 1), (128, 128, 1), (1024, 128, 8)])
def test_a_large_request_is_one_that_is_accepted(choices: int, prompts: int, n: int) -> None:
    """The most prompts, then the most choices of each, and every token of the context."""
    body = LargeRequest(choices, 100, 900, "standard").body("m", 3)
    request = parse("completion", json.dumps(body).encode())
    check_choices(request, choices)
    assert (request.prompts, request.n, request.max_tokens) == (prompts, n, 900)
    assert request.queue.priority == "standard"
    assert {count_tokens(prompt) for prompt in body["prompt"]} == {100} and len(set(body["prompt"])) == prompts
    with pytest.raises(ValueError, match="1025 choices"):
        LargeRequest(1025, 1, 1).body("m", 0)


def test_the_goal_is_the_one_that_was_set() -> None:
    """Three times as late as alone, beside what the default settings accept."""
    assert goals()["abuse.chat"].at_most == 3
    assert program.DEFAULT_CHOICES == ApiSettings().max_choices_per_request == 64


@pytest.mark.parametrize("case", [case for case in CASES if case.bodies == 1], ids=lambda case: case.words)
def test_one_large_request_reaches_its_share(case: Case) -> None:
    """It asks for more than half of the slots or of the cache would hold, so that the limit is what is measured."""
    assert 1 < case.running(8192) < case.choices and case.running(8192) <= case.slots // 2


def test_both_limits_of_a_share_are_measured() -> None:
    """By slots with llama.cpp's four and with many; by the cache."""
    assert Case(256, 1024).running(8192) == 128
    assert Case(256, 64, kv_tokens=262_144).running(8192) == 16
    assert Case(4, 64, engine=LLAMACPP) in CASES and any(case.kv_tokens for case in CASES)


def test_the_median_of_the_rounds_is_judged() -> None:
    """A first token that did not come in time is as late as the limit, and is counted. The latest chat and the one at
    the requests' arrival are shown beside the goal."""
    rounds = [
        AbuseRound([0.1, 0.1], [0.2, 0.3, 0.2], 0.4, 8),
        AbuseRound([0.1], [0.2, None], 0.6, 7),
        AbuseRound([0.1], [None], None, 8),
    ]
    row = row_of("this tree", Case(4, 64), rounds, 5.0)
    assert row["ratios"] == pytest.approx([2.0, 26.0, 50.0]) and row["ratio"] == pytest.approx(26.0)
    assert (row["late"], row["worst_ms"], row["arrival_ms"], row["running"]) == (3, 5000.0, 600.0, 7)
    judged, latest, arrival = goals_of(Case(4, 64), rounds, 5.0)
    assert (judged.verdict, latest.verdict, arrival.verdict) == ("missed", "", "")
    assert (latest.value, arrival.value) == pytest.approx((50.0, 6.0))
    judged, latest, _ = goals_of(Case(4, 64), rounds[:1], 5.0)
    assert judged.verdict == "reached" and latest.value == pytest.approx(3.0)
    assert goals_of(Case(4, 64, bodies=2), rounds, 5.0)[0].verdict == ""


# --- who asks for what, and when -------------------------------------------------------------------------------------


class Server:
    """Notes who asks for what; the large request's choices begin one after the other once a chat has come beside it."""

    def __init__(self, *, ends: bool = False) -> None:
        self._ends = ends
        self.large: list[tuple[str, dict[str, object]]] = []
        self.chats: list[tuple[str, bool, int]] = []
        """Of each: its key, whether a large request was open, and how many of its choices had begun."""
        self._open, self._begun = False, 0
        self._arrived = asyncio.Event()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[int]:
        """Gives the port."""
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0, limit=1 << 20)
        async with server:
            yield server.sockets[0].getsockname()[1]

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(reader, writer)
        except OSError:
            pass
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = json.loads(await reader.readexactly(int(fields["content-length"])) or b"{}")
        key = fields["authorization"].removeprefix("bearer ")
        if head[0].startswith("GET /v1/jobs/"):
            answer = b'{"status": "cancelled"}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
            return
        writer.write(b"HTTP/1.1 200 OK\r\nX-Job-Id: j\r\n\r\n")
        if "messages" in body:
            self.chats.append((key, self._open, self._begun))
            if self._open:
                self._arrived.set()
            writer.write(said(0))
            return
        self.large.append((key, body))
        self._open, self._begun = True, 0
        self._arrived.clear()
        await self._begin_choices(reader, writer)
        self._open = False

    async def _begin_choices(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._arrived.wait()
        for index in range(8):
            await asyncio.sleep(0.05)
            self._begun = index + 1
            writer.write(said(index))
            await writer.drain()
        if not self._ends:
            await reader.read()  # until the client closes it


def said(index: int) -> bytes:
    return b'data: {"choices": [{"index": %d, "text": "a"}]}\n\n' % index


async def played(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[AbuseRound]:
    monkeypatch.setattr(program, "SETTLE_S", 0.05)
    args = argparse.Namespace(rounds=2, chats=3, limit=5.0, context=800)
    async with server.serving() as port:
        return await program._rounds(port, Case(16, 64), args)


async def test_the_chat_is_measured_beside_another_tenants_large_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """With keys of different tenants; alone, as the request arrives, and once its whole share runs."""
    server = Server()
    rounds = await played(server, monkeypatch)
    of_a_round = [(CHAT_KEY, False, 0)] * 3 + [(CHAT_KEY, True, 0)] + [(CHAT_KEY, True, 8)] * 3
    assert [(key, is_open, begun if is_open else 0) for key, is_open, begun in server.chats[1:]] == of_a_round * 2
    assert [each.running for each in rounds] == [8, 8] and None not in [each.arrival for each in rounds]
    for key, body in server.large:
        prompts = body["prompt"]
        assert key == LARGE_KEY and isinstance(prompts, list)
        assert (len(prompts), body["n"], body["max_tokens"]) == (64, 1, 700)
        assert {count_tokens(prompt) for prompt in prompts} == {100}
    keys = tomllib.loads(program.KEYS)["keys"]
    tenants = {row["sha256"]: row["tenant"] for row in keys.values()}
    assert {tenants[hashlib.sha256(key.encode()).hexdigest()] for key in (CHAT_KEY, LARGE_KEY)} == {"chat", "large"}


async def test_a_large_request_that_ends_spoils_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was beside the chat then."""
    with pytest.raises(RequestRefused, match="ended before"):
        await played(Server(ends=True), monkeypatch)


def test_a_short_run(tmp_path: Path) -> None:
    """Real processes and two tenants; every chat came, beside a request that held its share and did not end."""
    words = ["--quick", "--rounds", "1", "--chats", "2", "--out", str(tmp_path), "--limit", "30"]
    assert main(words) in (0, 1)  # how long it took is the full form's
    found = load(tmp_path / "abuse-quick.json")
    assert [(row["slots"], row["running"]) for row in found.rows] == [(16, 4), (4, 2)]
    assert all(row["late"] == 0 and row["alone_ms"] > 0 and row["beside_ms"] > 0 for row in found.rows)
