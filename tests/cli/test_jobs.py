"""Columns of `penstock jobs ls`, bars of `penstock jobs timing`, texts of answers."""

from __future__ import annotations

from typing import Any

import pytest

from cli.jobs import COLUMNS, _timing_rows, answer_of, attempts_in_words, columns_of, interruption
from penstock.client import StreamEvent


def test_parts_stand_in_the_order_of_their_bars() -> None:
    """As the server has them: a loss after the first token behind prefill."""
    parts = {"ingress": 10, "queue": 10, "gate": 0, "engine_wait": 0, "prefill": 10, "retries": 50, "decode": 20}
    parts |= {"egress_tail": 0, "egress_first": 1}
    keys = ("end_to_end_ms", "time_to_first_token_ms", "gateway_time_to_first_token_ms", "time_per_output_token_ms")
    timing = {"parts_ms": parts, "sum_ms": 100, "reasons": {}, "groups_ms": {}, "stamps": {"last_sent": None}}
    timing |= dict.fromkeys(keys)
    rows = {name: bar for name, _, bar, _ in _timing_rows(timing)}
    assert list(rows)[: len(parts)] == list(parts)
    offsets = {name: len(bar) - len(bar.lstrip()) for name, bar in rows.items()}
    assert offsets["egress_first"] == offsets["retries"] == 12 and offsets["decode"] == 32
    assert max(map(len, rows.values())) == 40 and rows["gate"] == "", "no bar leaves the chart, and none is of nothing"


CALL = {"name": "weather", "arguments": '{"city": "Oslo"}'}
CHOICE = {"message": {"content": None, "tool_calls": [{"type": "function", "function": CALL}]}}
SHOWN = 'weather({"city": "Oslo"})'


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ({"choices": [{"message": {"content": "a"}}, {"message": {"content": ""}}, {"text": "b"}]}, "a\n\n\n\nb"),
        ({"choices": [CHOICE, {"message": {"content": "a"}}]}, f"{SHOWN}\n\na"),
        (
            {
                "object": "response",
                "output": [{"type": "message", "content": [{"text": "a"}]}, {"type": "function_call"} | CALL],
            },
            f"a\n{SHOWN}",
        ),
        ({"object": "list", "data": [{"embedding": "ü=="}]}, '{"object": "list", "data": [{"embedding": "ü=="}]}'),
    ],
)
def test_an_answer_shows_its_texts_and_its_calls(result: dict[str, Any], shown: str) -> None:
    """A call has no text, and still says something."""
    assert answer_of(result) == shown


def test_endpoints_have_a_column_where_jobs_came_by_several() -> None:
    chats, vectors = [{"endpoint": "/v1/chat/completions"}] * 3, {"endpoint": "/v1/embeddings"}
    assert columns_of([]) == columns_of(chats) == COLUMNS[:-1]
    assert columns_of([*chats, vectors, {"tenant": "a", "preview": "Name a river."}]) == (
        "id", "status", "lane", "model", "endpoint", "tenant", "created_at", "took", "tokens", "prompt",
    )  # fmt: skip


def test_attempts_whose_server_was_away_count_as_none() -> None:
    log = [{"outcome": "returned"}, {"outcome": "returned"}, {"outcome": "lost"}, {"outcome": None}]
    assert attempts_in_words({"attempts": 4, "attempt_log": log}) == "4, of which 2 count as none: the server was away"
    assert attempts_in_words({"attempts": 2, "attempt_log": log[2:]}) == "2"
    assert attempts_in_words({"attempts": 1, "attempt_log": None}) == "1"


@pytest.mark.parametrize(
    ("worker", "outcome", "said"),
    [
        ("w2", "lost", "w1 was lost; continued by w2 after"),
        ("w1", "lost", "w1 was lost and started again; continued after"),
        ("w1", "handed_back", "w1 was stopped and started again; continued after"),
        ("w1", "returned", "the server of w1 was away; continued after"),
    ],
)
def test_who_goes_on_with_an_answer(worker: str, outcome: str, said: str) -> None:
    """A worker that goes on with its own has started again, if it was the one that was away."""
    previous = {"worker": "w1", "outcome": outcome, "pause_ms": 600}
    event = StreamEvent("started", "1-0", {"worker": worker, "attempt": 2, "previous": previous})
    assert interruption(event).startswith(said)
