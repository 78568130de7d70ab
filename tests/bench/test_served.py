"""`bench gpu`: the server's slots and words, what its readers have, and the figures of a measurement."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from random import Random

import msgspec
import pytest

from bench.gpu.served import DIRECT, PENSTOCK, TURNS, ServedLevel, ratios, rows, served_level
from bench.gpu.server import PROMPT_ROWS, serve, shape_of, text_of, tokens_of
from bench.gpu.slots import SlotTable, SlotText
from bench.http import fetch
from bench.load.target import ConcurrencyLevel, TargetServer, TimedAnswer
from bench.ports import free_port

pytestmark = pytest.mark.slow

VOCAB, SLOTS, CONTEXT = 4000, 4, 1024


class ChainedSteps:
    """Steps of a model that knows only the token and its place, but looks whether the cache has all before it."""

    def __init__(self, step_s: float = 0.0) -> None:
        self._step_s, self.most = step_s, 0
        self._cache: dict[tuple[int, int], int] = {}

    def run(self, tokens: Sequence[int], slots: Sequence[int], places: Sequence[int]) -> list[int]:
        time.sleep(self._step_s)
        self.most = max(self.most, len(tokens))
        rows = list(zip(tokens, slots, places, strict=True))
        assert len({(slot, place) for _, slot, place in rows}) == len(rows)
        for token, slot, place in rows:
            if place == 0:
                for key in [key for key in self._cache if key[0] == slot]:
                    del self._cache[key]
            self._cache[slot, place] = token
        for _, slot, place in rows:
            assert all((slot, at) in self._cache for at in range(place)), "a token before this one is missing"
        return [chained(token, place) for token, _, place in rows]


def chained(token: int, place: int) -> int:
    return (31 * token + place) % VOCAB


def answer_of(prompt: Sequence[int], tokens: int) -> list[int]:
    found, token = [], prompt[-1]
    for place in range(len(prompt) - 1, len(prompt) - 1 + tokens):
        token = chained(token, place)
        found.append(token)
    return found


# --- slots and words --------------------------------------------------------------------------------------------------


def test_every_text_has_its_answer_whatever_runs_beside_it() -> None:
    """More texts than slots, with prompts longer than a step, some of which are left."""
    random, table, steps = Random(3), SlotTable(SLOTS, 40, 32), ChainedSteps()
    texts = [SlotText([random.randrange(VOCAB) for _ in range(random.randint(1, 90))], random.randint(1, 30))
             for _ in range(40)]  # fmt: skip
    answers: dict[SlotText, list[int]] = {text: [] for text in texts}
    coming = iter(texts)
    for number in count():
        for text in [next(coming, None) for _ in range(number % 3)]:
            if text is not None:
                table.submit(text)
        step = table.next_step()
        if step is None and number > 60:
            break
        if step is not None:
            for text, token, is_last in table.took(step, steps.run(step.tokens, step.slots, step.places)):
                answers[text].append(token)
                assert is_last == (len(answers[text]) == text.limit)
        texts[7].has_left = number > 12
    for text in texts[:7] + texts[8:]:
        assert answers[text] == answer_of(text.prompt, text.limit)
    assert len(answers[texts[7]]) < texts[7].limit and texts[7].slot == -1


def test_a_step_gives_every_running_text_its_token_before_prompts_have_the_rest() -> None:
    table = SlotTable(SLOTS, 12, 10)
    first, second = SlotText(range(5), 9), SlotText(range(30), 9)
    table.submit(first)
    step = table.next_step()
    assert step is not None and step.places == [0, 1, 2, 3, 4]
    table.took(step, [7] * 5)
    table.submit(second)
    step = table.next_step()
    assert step is not None and step.tokens == [7, *range(10)] and step.places == [5, *range(10)]
    assert [text for _, text in step.heard] == [first]
    assert len({step.slots[0], step.slots[1]}) == 2


def test_a_text_continues_where_it_was_cut() -> None:
    """The answer so far behind the prompt is read as the tokens that it was written of."""
    prompt, answer = "7 2b3c river 99999 ² stone", [0, 5, VOCAB - 1]
    begun = prompt + "".join(map(text_of, answer))
    assert tokens_of(begun, VOCAB) == [*tokens_of(prompt, VOCAB), *answer]
    assert tokens_of(prompt, VOCAB)[0] == 7 and max(tokens_of(prompt, VOCAB)) < VOCAB


# --- the server -------------------------------------------------------------------------------------------------------


@contextmanager
def engine(steps: ChainedSteps) -> Iterator[TargetServer]:
    """The server with an engine that needs no GPU."""
    shape, port, loop = shape_of("tiny"), free_port(), asyncio.new_event_loop()
    serving = loop.create_task(serve(port, shape, CONTEXT, SlotTable(SLOTS, 128, PROMPT_ROWS), steps))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                assert fetch(port, "GET", "/health")[0] == 200
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        yield TargetServer.at(f"http://127.0.0.1:{port}/v1", shape.name, name=DIRECT)
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(asyncio.gather(serving, return_exceptions=True))
        loop.close()


def test_the_server_streams_a_text_and_a_chat_with_their_usage() -> None:
    with engine(ChainedSteps()) as server:
        for body, path in (
            ({"prompt": "1 2 3", "max_tokens": 5}, "/v1/completions"),
            ({"messages": [{"role": "user", "content": "1 2 3"}], "max_tokens": 5}, "/v1/chat/completions"),
        ):
            asked = msgspec.json.encode({**body, "stream": True, "stream_options": {"include_usage": True}})
            status, _, data = fetch(server.port, "POST", path, asked)
            *chunks, done = [line[6:] for line in data.decode().split("\n") if line.startswith("data: ")]
            said = [json.loads(each) for each in chunks]
            texts = [each["choices"][0].get("text") or each["choices"][0]["delta"]["content"] for each in said[:-1]]
            assert status == 200 and done == "[DONE]"
            assert [int(text) for text in texts] == answer_of([1, 2, 3], 5)
            assert said[-2]["choices"][0]["finish_reason"] == "length" and said[-1]["choices"] == []
            assert said[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


# --- figures ----------------------------------------------------------------------------------------------------------

LEVELS = (1, 16)


def load(way: str, clients: int, slower: float) -> ServedLevel:
    """Two requests of each client, of 11 tokens each; what Penstock is in front of comes 2 ms later."""
    path_s = 0.002 if way == PENSTOCK else 0.0
    answers = []
    for number in range(2 * clients):
        first = 5.0 * (number >= clients) + path_s + 0.01 * slower
        sent = 5.0 * (number >= clients)
        answers.append(TimedAnswer(sent, [first + 0.1 * slower * piece for piece in range(11)], 11))
    tokens = 22 * clients
    return served_level(way, ConcurrencyLevel(clients, len(answers), answers, 6.0, 0.1), 30e-6 * tokens, 1e-5 * tokens)


TURNS_SEEN = [[load(way, clients, 1.0 + 0.1 * (way == PENSTOCK)) for clients in LEVELS] for way in TURNS]


def test_figures_are_those_of_the_requests() -> None:
    found = {(row["clients"], row["way"]): row for row in rows(TURNS_SEEN)}
    assert len(found) == 2 * len(LEVELS)
    through, direct = found[16, PENSTOCK], found[16, DIRECT]
    assert 0.9 < through["share"] < 1 and "share" not in direct and "penstock_us" not in direct
    assert direct["ttft_p50_ms"] == pytest.approx(10.0) and through["added_ms"] == pytest.approx(3.0)
    assert direct["itl_p50_ms"] == pytest.approx(100.0) and through["penstock_us"] == pytest.approx(30.0)
    held = {ratio.what: ratio for ratio in ratios(TURNS_SEEN)}
    added = held["TTFT p50 through Penstock - direct, ms, at its worst level"]
    assert added.value == pytest.approx(3.0) and (added.at_most, added.verdict) == (5, "reached")
    least = min(through["share"], found[1, PENSTOCK]["share"])
    assert held["the same at its worst level"].value == pytest.approx(least)


def test_a_table_that_could_not_give_every_slot_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="no room for prompts"):
        SlotTable(SLOTS, SLOTS, 8)


@pytest.mark.parametrize(
    "body", [b"{", b'{"prompt":"","stream":true}', b'{"prompt":"1","max_tokens":1024,"stream":true}', b'{"prompt":"1"}']
)
def test_the_server_refuses_what_it_cannot_answer(body: bytes) -> None:
    with engine(ChainedSteps()) as server:
        status, _, said = fetch(server.port, "POST", "/v1/completions", body)
        assert status == 400 and json.loads(said)["error"]["message"]
        assert fetch(server.port, "GET", "/v1/nothing")[0] == 404
