"""The judge of histories: what is right passes, and every kind of violation is found where it was planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bench.chaos import oracle
from bench.chaos.asks import Budget, Other
from bench.chaos.checker import DOUBLED, LOST, SPLICED, WRONG_ANSWER, WRONG_END, check
from bench.chaos.history import Event, stalls_ms
from bench.chaos.rows import ROWS
from bench.stats import percentile
from penstock.engine import ChatTurn
from workers.engines.sim.answers import prompt_text, token_text

N = 6
JOB = "job_1"
ALICE, BOB = "ALIC", "BOBS"
"""Two runs of an engine."""


def said(prompt: str = "p", count: int = N, author: str = ALICE, first: int = 0) -> list[str]:
    return [oracle.plain(oracle.chat(prompt), number) + author for number in range(first, count)]


def asked(req: int = 1, prompt: str = "p", **changes: Any) -> Event:
    ask = {"event": "ask", "req": req, "prompt": prompt, "tokens": N, "may": ["completed"], "key": "", "reads": True}
    return {"t": 0.0, **ask, "tenant": "first", **changes}


def accepted(req: int = 1, job: str = JOB, at: float = 0.1) -> Event:
    return {"t": at, "event": "accepted", "req": req, "job": job, "status": 200, "ms": 1.0}


def token(text: str, at: float = 1.0, event_id: str = "", req: int = 1) -> Event:
    return {"t": at, "event": "token", "req": req, "text": text, "id": event_id}


def reasons(state: str) -> list[str]:
    """Why the text of a job ended."""
    return ["length"] if state == "completed" else []


def ended(state: str = "completed", req: int = 1, at: float = 2.0) -> Event:
    usage = [1, N] if state == "completed" else []
    return {"t": at, "event": "end", "req": req, "state": state, "code": "", "usage": usage, "finish": reasons(state)}


def read(job: str = JOB, prompt: str = "p", **changes: Any) -> Event:
    replay = changes.get("replay", said(prompt))
    final = {"event": "final", "job": job, "status": 200, "state": "completed", "code": "", "text": "".join(replay)}
    usage = [oracle.prompt_tokens(oracle.chat(prompt)), N]
    more = {"usage": usage, "attempts": 1, "replay": replay, "before": [], "ends": ["completed"]}
    whole = {"t": 3.0, **final, **more, "finish": reasons(changes.get("state", "completed")), **changes}
    return {"log": log_of(len(replay), whole["ends"]), **whole}


RUN = "worker-1.1"


def log_of(deltas: int, ends: list[str]) -> list[list[str]]:
    """Names and ids of a log with one run."""
    names = ["queued", "started", *["delta"] * deltas, *ends]
    return [[name, f"1:{number}:{RUN if number > 1 else '-'}"] for number, name in enumerate(names, 1)]


def happened(name: str, event_id: str, at: float = 1.0) -> Event:
    return {"t": at, "event": "event", "req": 1, "name": name, "id": event_id}


def resumed(after: str, at: float = 1.26) -> Event:
    return {"t": at, "event": "resume", "req": 1, "after": after}


def reset(at: float = 1.5) -> Event:
    return {"t": at, "event": "reset", "req": 1, "code": "stream.reset"}


def rollback(since: float, at: float) -> Event:
    return {"t": at, "event": "rollback", "since": since}


FAULT: Event = {"t": 0.1, "event": "fault", "trial": 1, "what": ""}


def refused(status: int, code: str, req: int = 1, after: str | None = "1") -> Event:
    return {"t": 0.1, "event": "refused", "req": req, "status": status, "code": code, "ms": 1.0, "retry_after": after}


def gave_up(req: int) -> Event:
    return {"t": 9, "event": "gave_up", "req": req, "why": "no answer"}


def answered(status: int, code: str, after: str | None = "1") -> Event:
    return {"t": 1, "event": "answered", "what": "", "status": status, "code": code, "retry_after": after}


def good() -> list[Event]:
    """One request, all well, with a break in the middle."""
    tokens = [token(text, 1 + number / 10) for number, text in enumerate(said())]
    cut = {"t": 1.25, "event": "cut", "req": 1, "why": ""}
    return [asked(), accepted(), *tokens[:3], cut, resumed("1:3"), *tokens[3:], ended(), read()]


def followed(*, start: int = 0, cut_after: int = 0, **ids: str) -> list[Event]:
    """One job, all well, and its reader follows the events, by one connection or two; `ids` changes some, by number."""
    shown: list[Event] = []
    for (name, event_id), text in zip(log_of(N, ["completed"]), ["", "", *said(), ""], strict=True):
        number = event_id.split(":")[1]
        told = ids.get(f"n{number}", event_id)
        shown.append(token(text, event_id=told) if text else happened(name, told))
        if int(number) == cut_after:
            shown += [{"t": 1.0, "event": "cut", "req": 1, "why": ""}, resumed(told, 1.0)]
    return [asked(), accepted(), resumed("", 0.2), *shown[start:], ended(), read()]


def with_log(log: list[list[str]]) -> list[Event]:
    """One job whose reader was told the log of its record, such as it is."""
    texts = iter(said())
    shown = [token(next(texts), event_id=i) if name == "delta" else happened(name, i) for name, i in log]
    return [asked(), accepted(), resumed("", 0.2), *shown, ended(), read(log=log)]


def without(kind: str) -> list[Event]:
    return [event for event in good() if event["event"] != kind]


def cancelled(**final: Any) -> list[Event]:
    """One request that its client cancelled after two tokens."""
    how = {"state": "cancelled", "text": "", "usage": [1, 2], "replay": said(count=2), "ends": ["cancelled"]}
    shown = [token(text) for text in said(count=2)]
    return [asked(may=["cancelled"]), accepted(), *shown, ended("cancelled"), read(**how | final)]


def followed_to(state: str, *, end: Event, final: Event | None = None) -> list[Event]:
    """One job that did not complete; its reader was shown all that is kept. Right, but for these fields."""
    kept = {"state": state, "text": "", "usage": [1, 2], "replay": said(count=2), "ends": [state]}
    shown = [token(text) for text in said(count=2)]
    return [asked(may=[state]), accepted(), *shown, ended(state) | end, read(**kept | (final or {}))]


def expiring(*, after_s: float, limits: dict[str, int]) -> list[Event]:
    """One job that expired before it was begun."""
    final = read(
        state="expired", text="", usage=[], replay=[], ends=["expired"], log=[["queued", "1:1:-"], ["expired", "1:2:-"]]
    )
    return [asked(may=["expired"], limits=limits), accepted(at=0.001), ended("expired", at=after_s), final]


def with_tokens(*texts: str, **final: Any) -> list[Event]:
    return [asked(), accepted(), *map(token, texts), ended(), read(**final)]


def kinds(events: list[Event], **how: Any) -> set[str]:
    return {violation.kind for violation in check(events, **how)}


def test_a_history_without_fault_passes() -> None:
    """Broken off and resumed, cancelled for a reason, refused, or never answered: none of these is a violation."""
    others = [
        asked(2, "q", may=["completed", "cancelled"]), accepted(2, "job_2"), token(said("q")[0], req=2),
        ended("cancelled", 2), {"t": 2.1, "event": "cancel", "job": "job_2", "status": 200, "state": "in_progress"},
        read("job_2", "q", state="cancelled", text="", usage=[1, 1], replay=said("q")[:1], ends=["cancelled"]),
        asked(3, "r"), refused(503, "store_unavailable", 3),
        asked(4, "s"), {"t": 1, "event": "unknown", "req": 4, "why": ""},
        {"t": 9, "event": "quiet", "what": "claims", "number": 0},
    ]  # fmt: skip
    assert check(good() + others) == []
    assert check(good() + others, budget=Budget(refused=1, unanswered=1, broken=1)) == []


def test_a_text_of_two_runs_passes_if_it_is_the_stored_one() -> None:
    """A second run goes on behind the last logged token of the first: nothing is spliced."""
    text = [*said(count=3), *said(first=3, author=BOB)]
    assert check(with_tokens(*text, replay=text)) == []


def numbered(*names: str, run: str = RUN) -> list[list[str]]:
    """A log of these events, numbered as it must be; `run` wrote the deltas."""
    runs = {"queued": "-", "delta": run}
    return [[name, f"1:{number}:{runs.get(name, RUN)}"] for number, name in enumerate(names, 1)]


WRONG_LOGS = [
    numbered("queued", "started", *["delta"] * (N - 1), "completed", "delta"),  # a delta behind the end
    numbered("queued", "started", "completed", *["delta"] * N),  # the end before its deltas
    numbered("queued", *["delta"] * N, "completed"),  # begun by nobody
    numbered("queued", "started", *["delta"] * N, "completed", run="worker-2.1"),  # begun by another one
    numbered("queued", *["delta"] * N, "started", "completed"),
    numbered(*["delta"] * N, "completed"),  # neither queued nor started
    numbered("started", "queued", *["delta"] * N, "completed"),
    numbered("queued", "queued", "started", *["delta"] * N, "completed"),
    numbered("queued", "started", *["delta"] * (N - 1), "completed"),  # fewer than were read
    numbered("queued", "started", *["delta"] * N),  # it ends not at all
    numbered("queued", "started", *["delta"] * N, "cancelled"),
    [],
]
"""Of a job that completed: each is numbered rightly."""


PLANTED: list[tuple[str, Callable[[], list[Event]]]] = [
    ("lost", lambda: without("final")),
    ("lost", lambda: [*without("final"), read(state="in_progress", ends=[])]),
    ("lost", lambda: [*without("final"), read(state="", status=404, ends=[])]),
    ("lost", lambda: [*without("end"), ended("forgotten")]),
    ("untold", lambda: [*without("end"), gave_up(1)]),
    ("two_ends", lambda: [*without("end"), ended("failed")]),
    ("two_ends", lambda: [*good(), read(state="failed")]),
    ("two_ends", lambda: [*good(), {"t": 4, "event": "cancel", "job": JOB, "status": 200, "state": "cancelled"}]),
    ("two_ends", lambda: [*without("final"), read(ends=["completed", "completed"])]),
    ("wrong_end", lambda: [*with_tokens()[:2], ended("cancelled"), read(state="cancelled", ends=["cancelled"])]),
    ("doubled", lambda: with_tokens(*said()[:3], said()[2], *said()[3:])),
    ("doubled", lambda: with_tokens(*said(), *said())),
    ("gap", lambda: with_tokens(*said()[:2], *said()[3:])),
    ("gap", lambda: with_tokens(*said()[:-1])),
    ("numbering", lambda: followed(n4=f"1:3:{RUN}")),
    ("numbering", lambda: followed(n9=f"1:8:{RUN}")),  # the end repeats the id of the last delta
    ("numbering", lambda: followed(n9=f"1:10:{RUN}")),  # an id is left out
    ("numbering", lambda: followed(n9="none")),
    ("numbering", lambda: followed(n5=f"1:5:{RUN}-2")),  # of a run that the log does not know
    ("numbering", lambda: followed(start=1)),  # nobody said queued
    ("numbering", lambda: followed(n6=f"2:6:{RUN}", n7=f"2:7:{RUN}", n8=f"2:8:{RUN}", n9=f"2:9:{RUN}")),
    ("numbering", lambda: [*followed()[:5], happened("started", f"1:3:{RUN}"), *followed()[5:]]),  # begun twice
    ("numbering", lambda: [*without("final"), read(log=[*log_of(N, ["completed"])[:-1], ["completed", "1:12:-"]])]),
    ("numbering", lambda: [*without("final"), read(log=[*log_of(N, ["completed"]), ["started", ""]])]),
    *(("numbering", lambda log=log: [*without("final"), read(log=log)]) for log in WRONG_LOGS),
    ("numbering", lambda: with_log(WRONG_LOGS[1])),
    ("numbering", lambda: with_log(WRONG_LOGS[5])),
    ("not_prefix", lambda: [*without("final"), read(text="".join(said()[:-1]))]),
    ("not_prefix", lambda: [*without("final"), read(replay=[*said(), said(count=N + 1)[-1]])]),
    ("reset", lambda: [*good(), reset(4)]),
    ("reset", lambda: [*without("final"), read(before=[said()])]),
    ("doubled", lambda: [*without("final"), read(replay=[*said(), *said()], text="".join(said()))]),
    ("two_jobs", lambda: [asked(key="k"), accepted(), read(), asked(2, key="k"), accepted(2, "job_2"), read("job_2")]),
    ("foreign", lambda: with_tokens(*said()[:3], said("other")[3], *said()[3:])),
    ("foreign", lambda: with_tokens(*said()[:3], "\ufffd", *said()[3:])),
    ("foreign", lambda: with_tokens(*said(count=N + 1))),
    ("crossed", lambda: [*good(), {"t": 4, "event": "crossed", "job": JOB, "status": 200, "path": "/v1/jobs/x"}]),
    ("spliced", lambda: with_tokens(*said(count=4), *said(first=4, author=BOB))),
    ("spliced", lambda: with_tokens(*said(count=4), *said(first=4, author=BOB), replay=said(author=BOB))),
    ("spliced", lambda: with_tokens(*said(), replay=said(author=BOB))),
    ("leak", lambda: [*good(), {"t": 9, "event": "quiet", "what": "claims", "number": 1}]),
    ("accounting", lambda: [*without("final"), read(usage=[1, N + 1])]),
    ("accounting", lambda: [*without("final"), read(usage=[2, N])]),  # the prompt was counted twice
    ("accounting", lambda: [*without("final"), read(usage=[])]),
    ("accounting", lambda: [*without("end"), ended() | {"usage": [1, N + 1]}]),
    ("accounting", lambda: [*without("end"), ended() | {"usage": []}]),  # the stream did not say
    ("accounting", lambda: cancelled(usage=[1, 10**9])),
    ("accounting", lambda: cancelled(usage=[7, 1])),
    ("accounting", lambda: cancelled(usage=[1, 1])),  # fewer than were shown
    ("accounting", lambda: [*cancelled()[:-2], ended("cancelled") | {"usage": [1, 1]}, cancelled()[-1]]),
    ("accounting", lambda: followed_to("cancelled", end={"usage": [1, 2]}, final={"usage": [1, 5]})),
    ("accounting", lambda: followed_to("cancelled", end={"usage": [1, 2]}, final={"usage": []})),
    ("wrong_end", lambda: followed_to("failed", end={"code": "engine_error"}, final={"code": "internal_error"})),
    ("wrong_end", lambda: followed_to("failed", end={"code": "engine_error"})),
    ("not_prefix", lambda: cancelled(text="".join(said(count=5)), usage=[1, 5])),
    ("wrong_end", lambda: expiring(after_s=0.01, limits={"deadline_ms": 900_000})),
    ("wrong_end", lambda: expiring(after_s=0.01, limits={"deadline_ms": 900_000, "max_queue_ms": 300})),
    ("wrong_end", lambda: expiring(after_s=0.01, limits={})),
    *(
        ("wrong_end", lambda finish=finish: [*without("end"), ended() | {"finish": finish}])
        for finish in (["stop"], [], ["length", "length"])
    ),
    ("wrong_end", lambda: [*without("final"), read(finish=["stop"])]),
    ("foreign", lambda: cancelled(text=said("other")[0])),
    ("spliced", lambda: cancelled(replay=said(count=2, author=BOB))),
    ("spliced", lambda: cancelled(replay=said(count=1))),
    ("spliced", lambda: cancelled(state="failed", ends=["failed"], replay=[])),
    ("two_ends", lambda: [*without("final"), ended(), read()]),
    ("lost", lambda: [*good(), {"t": 1.1, "event": "cancel", "job": JOB, "status": 404, "state": ""}]),
    ("error", lambda: [*good(), asked(2), refused(500, "internal_error", 2)]),
    ("error", lambda: [*good(), asked(2), refused(503, "store_unavailable", 2, after=None)]),
    *(
        ("error", lambda after=after: [*good(), asked(2), refused(503, "draining", 2, after)])
        for after in ("", "0", "-1", "1.5", "01", "121", "soon", "Wed, 21 Oct 2026 07:28:00 GMT")
    ),
    ("error", lambda: [*good(), asked(2), refused(503, "something_new", 2)]),
    ("error", lambda: [*good(), {"t": 1, "event": "error", "req": 1, "code": "internal_error"}]),
    ("error", lambda: [*good(), answered(502, "", None)]),
    ("unanswered", lambda: [*good(), asked(2, "q")]),
    ("unanswered", lambda: [*good(), asked(2, "q", reads=False)]),
    ("unanswered", lambda: [*good(), asked(2, "q"), gave_up(2)]),
    ("unanswered", lambda: [*good(), asked(2), refused(503, "draining", 2), gave_up(2)]),  # not the last it heard
    ("untold", lambda: without("end")),
    ("unserved", lambda: [asked(), refused(503, "store_unavailable"), asked(2), refused(429, "queue_full", 2)]),
]


@pytest.mark.parametrize(("kind", "history"), PLANTED, ids=[f"{n}-{kind}" for n, (kind, _) in enumerate(PLANTED)])
def test_a_planted_violation_is_found(kind: str, history: Callable[[], list[Event]]) -> None:
    """Each history is right but for one thing."""
    assert kind in kinds(history())


def test_a_job_that_no_worker_ended_may_be_kept_in_part() -> None:
    """Its log may be trimmed; what is kept is still what was shown."""

    def ended_by_nobody(kept: list[str]) -> list[Event]:
        log = [*log_of(len(kept), []), ["cancelled", "1:1000000000000:-"]]
        return cancelled(replay=kept, log=log, usage=[0, 0])

    assert check(ended_by_nobody(said(count=1))) == check(ended_by_nobody([])) == []
    assert kinds(ended_by_nobody(said(count=1, author=BOB))) == {"spliced"}


@pytest.mark.parametrize("after", ["1", "120"])
def test_a_refusal_says_in_whole_seconds_when_to_come_back(after: str) -> None:
    """From one to as many as the documentation allows."""
    assert check([*good(), asked(2), refused(503, "draining", 2, after)]) == []


def test_every_house_says_in_the_end_what_it_holds() -> None:
    """And all of it: I7 would hold by itself where nothing is said."""
    quiet = [{"t": 9, "event": "quiet", "what": what, "number": 0} for what in ("claims", "lane")]
    assert check([*good(), *quiet], clusters=1) == check([*good(), *quiet * 2], clusters=2) == []
    assert kinds(good(), clusters=1) == {"leak"}
    assert kinds([*good(), *quiet], clusters=2) == {"leak"}
    assert kinds([*good(), *quiet, quiet[0]], clusters=2) == {"leak"}


def test_a_client_that_left_or_reads_nothing_is_owed_no_end() -> None:
    """Before or after its request was accepted."""
    left = {"t": 0.2, "event": "left", "req": 2}
    assert check([*good(), asked(2, "q"), left]) == []
    assert check([*good(), asked(2, "q"), accepted(2, "job_2"), left, read("job_2", "q")]) == []
    assert check([*good(), asked(2, "q", reads=False), accepted(2, "job_2"), read("job_2", "q")]) == []


def test_an_end_is_told_as_it_is_kept() -> None:
    """With its reason and its count, which may be none where it ended without a worker; where a chat ends with an
    error, only with its reason."""
    assert check(cancelled()) == check(cancelled(usage=[])) == check(cancelled(usage=[0, 0])) == []
    assert check(followed_to("cancelled", end={"usage": [1, 2]})) == []
    assert check(followed_to("cancelled", end={"usage": []})) == []
    why = {"code": "engine_error"}
    assert check(followed_to("failed", end=why, final=why)) == []
    assert check(cancelled(text="".join(said(count=2)))) == []


@pytest.mark.parametrize(
    "limits", [{"deadline_ms": 1000}, {"max_queue_ms": 300}, {"deadline_ms": 9000, "max_queue_ms": 1000}]
)
def test_a_job_may_expire_when_its_time_is_over(limits: dict[str, int]) -> None:
    """And not before."""
    assert check(expiring(after_s=1.0, limits=limits)) == []
    assert kinds(expiring(after_s=0.2, limits=limits)) == {"wrong_end"}


def test_an_author_that_had_lost_the_job_may_not_come_back() -> None:
    """Also where shown and stored agree: a zombie wrote."""
    text = [*said(count=2), *said(count=4, first=2, author=BOB), *said(first=4)]
    assert kinds(with_tokens(*text, replay=text)) == {"spliced"}


@pytest.mark.parametrize(("kind", "extra"), [
    ("refused", [asked(2, "q"), refused(503, "draining", 2)]),
    ("refused", [answered(503, "draining")]),
    ("unanswered", [asked(2, "q"), {"t": 1, "event": "unknown", "req": 2, "why": ""}]),
    ("broken", [{"t": 1, "event": "cut", "req": 1, "why": ""}]),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_what_a_row_does_not_allow_is_found(kind: str, extra: list[Event]) -> None:
    """Refusals, lost answers and broken streams are counted over all clients of a trial: what one has too many is not
    made up for by others that have none."""
    none, one = Budget(broken=1), Budget(refused=1, unanswered=1, broken=2)
    assert kinds(good() + extra, budget=none) == {kind}
    assert kinds(good() + extra, budget=one) == set()
    assert kinds(good() + extra * 2, budget=one) >= {kind}
    assert kinds(good() + extra, budget=replace(none, **{kind: getattr(none, kind) + 1})) == set()
    assert kinds([FAULT, *good(), *extra, FAULT, *extra, FAULT], budget=one) == set()
    assert kinds([FAULT, FAULT, *good(), *extra * 2, FAULT], budget=one) >= {kind}


def test_answers_that_a_row_asks_for_are_no_errors() -> None:
    """Such as the 408 of a job that expired in its queue, by its code, and as many as the row asks for."""
    expired = [asked(2), refused(408, "deadline_exceeded_in_queue", 2, after=None)]
    one = Budget(broken=1, others=(Other(408, "deadline_exceeded_in_queue", 1),))
    assert kinds([*good(), *expired], budget=Budget(broken=1)) == {"error"}
    assert kinds([*good(), *expired], budget=one) == set()
    assert kinds([*good(), *expired * 2], budget=one) == {"error"}
    assert kinds([*good(), FAULT, *expired, FAULT, *expired], budget=one) == set()
    assert kinds([*good(), asked(2), refused(408, "upload_stalled", 2, after=None)], budget=one) == {"error"}


def test_one_request_served_excuses_no_errors_of_the_others() -> None:
    """Neither with the budget of F33, whose touched job may be unreadable, nor with that of F34."""
    rows = {row.id: row for row in ROWS}
    wrong = [event for req in range(2, 52) for event in (asked(req), refused(500, "internal_error", req, None))]
    unreadable = [event for req in range(2, 52) for event in (asked(req), refused(500, "malformed_job", req, None))]
    for row, errors in (("F33", wrong), ("F34", wrong), ("F33", unreadable), ("F34", unreadable)):
        history = [event for event in good() if event["event"] != "cut"] + errors
        assert kinds(history, budget=rows[row].budget) == {"error"}, row


def test_nothing_but_errors_is_no_passed_row() -> None:
    """A history in which every answer is a 500, and one in which nobody is served."""
    errors = [event for req in range(50) for event in (asked(req), refused(500, "internal_error", req, None))]
    assert kinds(errors, budget=Budget(refused=99)) == {"error", "unserved"}
    refusals = [event for req in range(50) for event in (asked(req), refused(503, "draining", req))]
    assert kinds(refusals, budget=Budget(refused=99)) == {"unserved"}


def after_a_loss(*middle: Event) -> list[Event]:
    """Four tokens of one run were shown; the store forgot two of them, and another run began behind the second."""
    stored = [*said(count=2), *said(first=2, author=BOB)]
    shown = [token(text, 1 + number / 10) for number, text in enumerate(said(count=4))]
    return [asked(), accepted(), *shown, rollback(1.15, 1.4), *middle, ended(), read(replay=stored)]


def test_a_lossy_store_must_be_told_and_never_spliced() -> None:
    """What the reader has is not what is stored: it begins anew after stream.reset, or the row fails."""
    stored = [*said(count=2), *said(first=2, author=BOB)]
    told = after_a_loss(reset(), *(token(text, 1.6) for text in stored))
    assert check(told, resets_allowed=True) == []
    spliced = after_a_loss(*(token(text, 1.6) for text in stored[4:]))
    assert kinds(spliced, resets_allowed=True) == {"spliced"}
    reread = after_a_loss(resumed(""), *(token(text, 1.6) for text in stored))
    assert kinds(reread, resets_allowed=True) == {"spliced"}, "begun anew, and nobody said why"


def test_a_reset_needs_a_loss_while_its_reader_read() -> None:
    """Before the loss, or where the row loses nothing, nobody may be told to begin anew."""
    again = [token(text, 1.6) for text in said()]
    early = [asked(), accepted(), token(said()[0]), reset(1.2), *again, rollback(1.3, 1.4), ended(), read()]
    assert kinds(early, resets_allowed=True) == {"reset"}
    assert kinds(after_a_loss(reset(), *(token(t, 1.6) for t in [*said(count=2), *said(first=2, author=BOB)]))) == {
        "reset"
    }


def test_one_loss_is_one_reset_for_each_reader() -> None:
    """A second one needs a second loss; another reader may be told of the same one."""
    again = [token(text, 1.6) for text in said()]
    lossy = [asked(), accepted(), token(said()[0]), rollback(0.9, 1.4)]
    rest = [*again, ended(), read()]
    assert kinds([*lossy, reset(), *rest], resets_allowed=True) == set()
    assert kinds([*lossy, reset(), again[0], reset(1.6), *rest], resets_allowed=True) == {"reset"}
    assert kinds([*lossy, reset(), again[0], rollback(1.5, 1.6), reset(1.6), *rest], resets_allowed=True) == set()
    assert kinds([*lossy, *[reset()] * 30, *rest], resets_allowed=True) == {"reset"}
    twice = read(before=[said(count=1), said(count=2)])
    assert kinds([*lossy, reset(), *again, ended(), twice], resets_allowed=True) == {"reset"}


def test_the_events_of_a_reader_are_the_log_of_its_job() -> None:
    """Over two connections as over one; a reader that is told to begin anew begins at 1 in another epoch."""
    assert check(followed()) == []
    assert check(followed(cut_after=4), budget=Budget(broken=1)) == []
    ends = ("cancelled", "1:1000000000000:-")
    early = [*followed()[:5], happened(*ends), ended("cancelled")]
    final = read(state="cancelled", text="", ends=["cancelled"], log=[*log_of(N, []), [*ends]])
    assert check([asked(may=["cancelled"]), *early[1:], final]) == [], "an end that no worker wrote"
    anew = [event | {"id": "2" + event["id"][1:]} if event.get("id") else event for event in followed()[3:-1]]
    told = [*followed()[:6], rollback(0.5, 1.0), happened("stream.reset", "2:0:-"), reset(1.0)]
    final = read(log=[[name, f"2{event_id[1:]}"] for name, event_id in log_of(N, ["completed"])])
    assert check([*told, *anew, final], resets_allowed=True) == []
    same = [*told[:-2], happened("stream.reset", "1:0:-"), reset(1.0), *anew, final]
    assert kinds(same, resets_allowed=True) == {"numbering"}
    later = [*followed()[:-1], rollback(2.1, 2.5), final]
    assert check(later, resets_allowed=True) == [], "another job's loss gave this log a new epoch"
    assert kinds([*followed()[:-1], final], resets_allowed=True) == {"numbering"}


def test_a_replay_may_begin_anew_after_a_loss() -> None:
    """What it showed before counts no more, and was right all the same."""
    served = [asked(), accepted(), *(token(text, 1.2) for text in said()), ended(), rollback(2.1, 2.5)]
    assert check([*served, read(before=[said(count=2)])], resets_allowed=True) == []
    assert kinds([*served, read(before=[said("other")])], resets_allowed=True) == {"foreign"}
    assert kinds([*served, read(before=[said()])]) == {"reset"}


def test_only_what_came_since_the_copy_may_be_forgotten() -> None:
    """A job that was accepted before the moment to which the store went back is still owed. A cancel may not find one
    that was accepted later."""
    gone = [ended("forgotten"), read(state="", status=404, ends=[], replay=[])]
    served = [asked(9, "q"), accepted(9, "job_9"), *(token(t, req=9) for t in said("q")), ended(req=9)]
    served.append(read("job_9", "q"))
    cancel = {"t": 1.1, "event": "cancel", "job": JOB, "status": 404, "state": ""}
    for told in (gone, [cancel, *gone]):
        assert check([*served, asked(), accepted(at=0.5), rollback(0.4, 1.0), *told], resets_allowed=True) == []
    assert kinds([*served, asked(), accepted(at=0.3), rollback(0.4, 1.0), *gone], resets_allowed=True) == {"lost"}


def test_an_end_that_was_forgotten_may_come_again() -> None:
    """Its reader was told it and has left; what is computed anew may be another text."""
    told = [asked(), accepted(), *map(token, said()), ended()]
    again = read(replay=said(author=BOB))
    assert check([*told, rollback(1.9, 2.5), again], resets_allowed=True) == []
    assert kinds([*told, rollback(2.1, 2.5), again], resets_allowed=True) == {"spliced"}


def test_the_oracle_says_what_the_engine_says() -> None:
    """It is written anew from the documentation, and agrees with the engine."""
    prompt = prompt_text((ChatTurn("user", "Grüße"),))
    assert oracle.chat("Grüße") == prompt
    assert [oracle.plain(prompt, n) for n in range(300)] == [token_text(prompt, n) for n in range(300)]
    found = list(oracle.tokens(["amber0ABCD brook1ABCD", " cedar2"]))
    assert [(each.number, each.author) for each in found] == [(0, "ABCD"), (1, "ABCD"), (2, "")]
    assert [each.number for each in oracle.tokens([" cedar"])] == [-1]


def test_a_stall_is_the_longest_silence_across_a_fault() -> None:
    """Gaps before the fault and after the next one do not count; a reader who had ended is not asked."""
    times = (1.0, 1.5, 1.6, 4.0, 4.1, 6.1)
    events = [asked(), *(token("x", at) for at in times), asked(2), token("x", 1.0, req=2), token("x", 1.2, req=2)]
    faults = [{"t": at, "event": "fault", "trial": n, "what": ""} for n, at in enumerate((1.7, 4.05), 1)]
    assert [round(stall) for stall in stalls_ms(events + faults)] == [2000, 2400]
    assert stalls_ms(events) == []
    assert percentile([], 0.5) is None and percentile([1, 2, 3], 0.5) == 2 and percentile([1, 2, 3], 0.99) == 3


def test_every_kind_is_planted_and_counted() -> None:
    """No kind that the table of results counts is without a history that shows it."""
    counted = LOST | DOUBLED | SPLICED | WRONG_END | WRONG_ANSWER
    assert {kind for kind, _ in PLANTED} | {"refused", "unanswered", "broken"} >= counted
