"""The judge of histories: what is right passes, and every kind of violation is found where it was planted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.chaos.checker import DOUBLED, LOST, WRONG_END, check
from bench.chaos.history import Event, History, load
from bench.chaos.stalls import percentile, stalls_ms
from streaming.messages import Turn
from workers.sim import prompt_text, token_text

N = 6
JOB = "job_1"


def said(prompt: str = "p", count: int = N) -> list[str]:
    text = prompt_text((Turn("user", prompt),))
    return [token_text(text, index) for index in range(count)]


def asked(req: int = 1, prompt: str = "p", **changes: Any) -> Event:
    ask = {"event": "ask", "req": req, "prompt": prompt, "tokens": N, "may": ["completed"], "key": "", "reads": True}
    return {"t": 0.0, **ask, **changes}


def accepted(req: int = 1, job: str = JOB) -> Event:
    return {"t": 0.1, "event": "accepted", "req": req, "job": job, "status": 200, "ms": 1.0}


def token(text: str, at: float = 1.0, seq: int | None = None, req: int = 1) -> Event:
    return {"t": at, "event": "token", "req": req, "text": text, "seq": seq}


def ended(state: str = "completed", req: int = 1) -> Event:
    return {"t": 2.0, "event": "end", "req": req, "state": state, "code": ""}


def read(job: str = JOB, prompt: str = "p", **changes: Any) -> Event:
    replay = said(prompt)
    final = {"event": "final", "job": job, "status": 200, "state": "completed", "code": "", "text": "".join(replay)}
    return {"t": 3.0, **final, "tokens": N, "attempts": 1, "replay": replay, "ends": ["completed"], **changes}


def good() -> list[Event]:
    """One request, all well, with a break in the middle."""
    tokens = [token(text, 1 + index / 10) for index, text in enumerate(said())]
    middle = [
        {"t": 1.25, "event": "cut", "req": 1, "why": ""},
        {"t": 1.26, "event": "resume", "req": 1, "after": "1:3"},
    ]
    return [asked(), accepted(), *tokens[:3], *middle, *tokens[3:], ended(), read()]


def without(kind: str) -> list[Event]:
    return [event for event in good() if event["event"] != kind]


def with_tokens(*texts: str) -> list[Event]:
    return [asked(), accepted(), *map(token, texts), ended(), read()]


def kinds(events: list[Event]) -> set[str]:
    return {violation.kind for violation in check(events)}


def test_a_history_without_fault_passes() -> None:
    """Broken off and resumed, cancelled for a reason, refused, or never answered: none of these is a violation."""
    others = [
        asked(2, "q", may=["completed", "cancelled"]), accepted(2, "job_2"), token(said("q")[0], req=2),
        ended("cancelled", 2), {"t": 2.1, "event": "cancel", "job": "job_2", "status": 200, "state": "in_progress"},
        read("job_2", "q", state="cancelled", text="", tokens=1, replay=said("q")[:1], ends=["cancelled"]),
        asked(3, "r"), {"t": 1, "event": "refused", "req": 3, "status": 503, "code": "x", "ms": 1, "retry_after": "1"},
        asked(4, "s"), {"t": 1, "event": "unknown", "req": 4, "why": ""},
        {"t": 9, "event": "quiet", "what": "claims", "number": 0},
    ]  # fmt: skip
    assert check(good() + others) == []


PLANTED: list[tuple[str, Callable[[], list[Event]]]] = [
    ("lost", lambda: without("final")),
    ("lost", lambda: [*without("final"), read(state="in_progress", ends=[])]),
    ("lost", lambda: [*without("final"), read(state="", status=404, ends=[])]),
    ("untold", lambda: [*without("end"), {"t": 9, "event": "gave_up", "req": 1, "why": "no end"}]),
    ("two_ends", lambda: [*without("end"), ended("failed")]),
    ("two_ends", lambda: [*good(), read(state="failed")]),
    ("two_ends", lambda: [*good(), {"t": 4, "event": "cancel", "job": JOB, "status": 200, "state": "cancelled"}]),
    ("two_ends", lambda: [*without("final"), read(ends=["completed", "completed"])]),
    ("wrong_end", lambda: [*with_tokens()[:2], ended("cancelled"), read(state="cancelled", ends=["cancelled"])]),
    ("doubled", lambda: with_tokens(*said()[:3], said()[2], *said()[3:])),
    ("doubled", lambda: with_tokens(*said(), *said())),
    ("gap", lambda: with_tokens(*said()[:2], *said()[3:])),
    ("gap", lambda: with_tokens(*said()[:-1])),
    ("numbering", lambda: [asked(), accepted(), token(said()[0], seq=2), read()]),
    ("not_prefix", lambda: [*without("final"), read(text="".join(said()[:-1]))]),
    ("reset", lambda: [*good(), {"t": 4, "event": "reset", "req": 1, "epoch": 2}]),
    ("two_jobs", lambda: [asked(key="k"), accepted(), read(), asked(2, key="k"), accepted(2, "job_2"), read("job_2")]),
    ("foreign", lambda: with_tokens(*said()[:3], said("other")[3], *said()[3:])),
    ("foreign", lambda: with_tokens(*said()[:3], "\ufffd", *said()[3:])),
    ("leak", lambda: [*good(), {"t": 9, "event": "quiet", "what": "claims", "number": 1}]),
    ("accounting", lambda: [*without("final"), read(tokens=N + 1)]),
]


@pytest.mark.parametrize(("kind", "history"), PLANTED, ids=[f"{n}-{kind}" for n, (kind, _) in enumerate(PLANTED)])
def test_a_planted_violation_is_found(kind: str, history: Callable[[], list[Event]]) -> None:
    """Each history is right but for one thing."""
    assert kind in kinds(history())


def test_every_kind_is_planted_and_counted() -> None:
    """No kind that the table of results counts is without a history that shows it."""
    assert {kind for kind, _ in PLANTED} >= LOST | DOUBLED | WRONG_END


def test_after_a_reset_the_text_begins_anew() -> None:
    """Where the store may lose data, what was shown before stream.reset is not held against what follows."""
    before = [token(text) for text in said()[:4]]
    after = [token(text, seq=number) for number, text in enumerate(said(), 1)]
    reset = {"t": 1.5, "event": "reset", "req": 1, "epoch": 2}
    history = [asked(), accepted(), *before, reset, *after, ended(), read()]
    assert check(history, resets_allowed=True) == []
    assert "doubled" in kinds([event for event in history if event["event"] != "reset"])


def test_a_stall_is_the_longest_silence_across_a_fault() -> None:
    """Gaps before the fault and after the next one do not count; a reader who had ended is not asked."""
    times = (1.0, 1.5, 1.6, 4.0, 4.1, 6.1)
    events = [asked(), *(token("x", at) for at in times), asked(2), token("x", 1.0, req=2), token("x", 1.2, req=2)]
    faults = [{"t": at, "event": "fault", "trial": n, "what": ""} for n, at in enumerate((1.7, 4.05), 1)]
    assert [round(stall) for stall in stalls_ms(events + faults)] == [2000, 2400]
    assert stalls_ms(events) == []
    assert percentile([], 0.5) is None and percentile([1, 2, 3], 0.5) == 2 and percentile([1, 2, 3], 0.99) == 3


def test_a_history_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    """One event a line, in order."""
    history = History(tmp_path / "history.jsonl")
    history.add("ask", req=1, prompt="p")
    history.add("token", req=1, text="\u2028", seq=None)
    history.close()
    assert load(history.path) == history.events
    assert [event["event"] for event in history.events] == ["ask", "token"]
