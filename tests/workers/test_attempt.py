"""An attempt's record: every delta once, in order, whatever earlier attempts logged, as the frames have them; and
whether a job goes on after their tokens, or begins again."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from sim_worker import a_claim

from penstock.engine import Capabilities, ChatTurn, EngineTimes, Logprob, Piece, Sampling
from streaming.jobs.codec import Delta, Generated, Opening, Run, Section, Usage, decode_terminal, encode, encode_delta
from streaming.jobs.history import History
from streaming.jobs.job import Chat, Job, JobState, MessageForm, PastAttempt, ResponseForm, Text
from streaming.order import Priority
from streaming.redis.client import RedisClient
from streaming.redis.clock import Clock
from workers.attempt import Attempt, AttemptStamps
from workers.claimer import job_restart_reason
from workers.engines.constraint import unchecked, unusable, violated

STREAM = 7
EARLIER = Run("v", 3)
LOGPROB = Logprob("a", -0.5, (("b", -1.5),))

texts = st.text(max_size=6)
ids = st.lists(st.integers(0, 2**31), max_size=3).map(tuple)
pieces = st.builds(
    Piece, id=st.just("j/0"), text=texts, ids=ids, n=st.integers(1, 3), logprobs=st.sampled_from([(), (LOGPROB,)])
)


@st.composite
def histories(draw: st.DrawFn) -> list[Delta]:
    """What earlier attempts logged, under other numbers."""
    return [
        Delta(draw(st.integers(0, 2**40)), seq, draw(texts), draw(ids), 0, draw(st.integers(0, 3)))
        for seq in range(1, draw(st.integers(1, 20)))
    ]


CHAT, PLAIN = Chat((ChatTurn("user", "hello"),)), Sampling()


def attempt_with(
    history: list[Delta], prompt: Chat | Text = CHAT, sampling: Sampling = PLAIN, priority: Priority = Priority.STANDARD
) -> Attempt:
    job = Job(id="0-job", model="m", tenant="t", priority=priority, prompt=prompt, sampling=sampling, stream=True)
    claim = a_claim(job, STREAM, attempt=2, created_ms=1, claimed_ms=2, reply=("penstock:api:a",))
    attempt = Attempt(claim, History(history, (Section(1, EARLIER),) if history else ()))
    attempt.requests()
    return attempt


@pytest.mark.parametrize("echo", [False, True])
def test_each_text_goes_on_behind_its_own_prompt(echo: bool) -> None:
    """Of two prompts with two texts each. An echo that was logged is no part of what the engine generated."""
    prompts = ("one", "of two")
    echoes = [prompts[place // 2] if echo else "" for place in range(4)]
    history = [Delta(1, place + 1, f"{echoes[place]} {place}", (7,), index=place) for place in range(4)]
    job = Job(id="0-job", model="m", tenant="t", priority=Priority.STANDARD, prompt=Text(prompts),
              sampling=Sampling(n=2), echo=echo)  # fmt: skip
    found = Attempt(a_claim(job, STREAM, attempt=2), History(history, (Section(1, EARLIER),))).requests()
    asked = [(found[place].prompt, "".join(text for text, _, _ in found[place].past)) for place in range(4)]
    assert asked == [("one", " 0"), ("one", " 1"), ("of two", " 2"), ("of two", " 3")]


@pytest.mark.parametrize(
    ("stream", "reply_to", "given", "readers"),
    [
        (True, "api", ("api",), ("api",)),
        (False, "api", ("api",), ("-",)),
        (False, "api", ("api", "other"), ("other",)),
        (False, "api", ("api", "other", "api"), ("api", "other")),
        (True, "api", ("api", "api"), ("api",)),
        (False, "", ("other",), ("other",)),
        (False, "", (), ("-",)),
    ],
)
def test_whoever_follows_an_answer_in_one_piece_gets_its_deltas(
    stream: bool, reply_to: str, given: tuple[str, ...], readers: tuple[str, ...]
) -> None:
    """Its own client gets the end alone; a reader of its events may have come while it waited in the queue."""
    job = replace(attempt_with([]).job, stream=stream, reply_to=reply_to)
    assert tuple(Attempt(a_claim(job, STREAM, reply=given)).addresses) == readers


@pytest.mark.slow
@given(histories(), st.lists(pieces, max_size=20))
def test_the_record_holds_what_was_logged_before_and_what_was_given_out(
    history: list[Delta], given_out: list[Piece]
) -> None:
    attempt = attempt_with(history)
    taken = [attempt.take(0, piece, 1.0) for piece in given_out]
    last = history[-1].seq if history else 0
    expected = [replace(row, run_number=STREAM) for row in history] + [
        Delta(STREAM, last + number, piece.text, piece.ids, 0, piece.n, "", piece.logprobs)
        for number, piece in enumerate(given_out, 1)
    ]
    end = decode_terminal(encode(attempt.terminal("w", Generated())))
    assert list(end.rows) == expected
    assert (end.seq, end.usage.completion) == (last + len(given_out), sum(row.n for row in expected))
    copied = [replace(row, run_number=-STREAM) for row in history] + expected[len(history) :]
    assert attempt.logged() == [encode_delta(row) for row in copied]
    assert attempt.opening == Opening("0-job", len(history) + 1, EARLIER if history else None)
    sections = (Section(1, EARLIER),) if history else ()
    assert end.sections == (*sections, Section(len(history) + 1, Run("w", STREAM)))
    assert [row for row in taken if row is not None] == [encode_delta(row) for row in expected[len(history) :]]


def test_an_answer_without_tokens_is_whole_with_its_row() -> None:
    """A prompt alone, which another attempt showed and had no time to end: no engine is asked again."""
    nothing = replace(PLAIN, max_tokens=0)
    assert list(attempt_with([], Text(("hello",)), nothing).requests()) == [0]
    assert attempt_with([Delta(1, 0, "hello", (), 0, 1)], Text(("hello",)), nothing).requests() == {}


def test_a_text_that_begins_again_leaves_the_first_token_of_the_job_as_it_was() -> None:
    """Its readers have seen that one; nothing of the earlier text was kept, in this run and for the next one."""
    lost = PastAttempt("worker-1", 1_000, 5_000, None, "lost", 4_000)
    claim = replace(attempt_with([]).claim, earlier_attempts=(lost,), started_us=1_000_000)
    again = Attempt(claim, History(first_ms=2_000))
    made = decode_terminal(encode(again.terminal("w", Generated(first=7_000_000, last=9_000_000)))).generated
    assert (made.shown, made.shown_claimed, made.kept, made.first) == (2_000_000, 1_000_000, 0, 7_000_000)
    assert (again.opening.begun_ms, again.opening.kept_ms) == (2_000, 0)


def test_what_earlier_attempts_wrote_of_the_text_was_kept() -> None:
    """From the first token of each to its last write, which is before its worker was found lost."""
    rows, lost = [Delta(1, 1, "a", (1,), 0, 1)], PastAttempt("worker-2", 6_000, 9_000, None, "lost", 8_500)
    first = PastAttempt("worker-1", 1_000, 5_000, None, "lost", 4_000)
    claim = replace(attempt_with([]).claim, earlier_attempts=(first, lost), started_us=1_000_000)
    heir = Attempt(claim, History(rows, (Section(1, EARLIER),), first_ms=2_000, at_ms=7_000, kept_ms=2_000))
    assert (heir.opening.begun_ms, heir.opening.kept_ms) == (2_000, 2_000 + 1_500)


TWO = Text(("one", "another"))


def run(attempt: Attempt, *given: tuple[int, Piece]) -> None:
    for index, piece in given:
        attempt.take(index, piece, 1.0)


def log_of(attempt: Attempt) -> list[Delta]:
    """What the next attempt finds, through a log that was written anew."""
    return [msgspec.msgpack.decode(row, type=Delta) for row in attempt.logged()]


def usage(attempt: Attempt) -> Usage:
    return decode_terminal(encode(attempt.terminal("w", Generated()))).usage


def began(size: int, cached: int = 0, **more: Any) -> Piece:
    return Piece("x", "a", (1,), 1, prompt_tokens=size, cached_tokens=cached, **more)


TOKEN, LAST = Piece("x", "a", (1,), 1), Piece("x", "a", (1,), 1, "stop", 77, 7)


def test_a_prompt_is_counted_once_whatever_ran_it() -> None:
    """The first choice ended, the second was under way: the next attempt, and the one after it, count both as the
    first engine did, also what it had cached."""
    first = attempt_with([], TWO)
    run(first, (0, began(5, 2)), (1, began(11, 8)), (0, Piece("x", "a", (1,), 1, "stop", 5, 2)), (1, TOKEN))
    second = attempt_with(log_of(first), TWO)
    assert list(second.requests()) == [1]
    run(second, (1, began(12, 12)))
    third = attempt_with(log_of(second), TWO)
    run(third, (1, began(13)), (1, LAST))
    assert third.over and usage(third) == Usage(16, 7, 10)


def test_a_choice_that_had_all_its_tokens_is_counted() -> None:
    """Its worker was lost between its last token and the word that it was the last: nothing is left to run."""
    sampling = Sampling(max_tokens=2)
    first = attempt_with([], CHAT, sampling)
    run(first, (0, began(6, 1)), (0, TOKEN))
    second = attempt_with(log_of(first), CHAT, sampling)
    assert second.over and usage(second) == Usage(6, 2, 1)


def test_a_size_told_with_nothing_to_show_is_in_the_next_delta() -> None:
    """A stop string may hold the first token back."""
    first = attempt_with([])
    run(first, (0, Piece("x", prompt_tokens=6)), (0, TOKEN))
    assert log_of(first)[0].prompt == (6, 0)
    assert usage(attempt_with(log_of(first))).prompt == 6


def test_copies_of_one_prompt_have_seeds_of_their_own() -> None:
    """Equal seeds would make equal texts. Equal copies of different prompts may share one."""
    seeds = [request.sampling.seed for request in attempt_with([], TWO, Sampling(n=2, seed=7)).requests().values()]
    assert seeds == [7, 8, 7, 8]
    assert all(request.sampling.seed is None for request in attempt_with([], TWO, Sampling(n=2)).requests().values())
    assert [request.sampling.seed for request in attempt_with([], TWO, Sampling(seed=7)).requests().values()] == [7, 7]


async def test_a_job_without_a_first_token_has_no_last_one(wire: RedisClient) -> None:
    """It was refused or cancelled before; and no time is known before the clocks were compared."""
    clock, now = Clock(wire), time.monotonic()
    stamps = AttemptStamps()
    stamps.finish(None, now)
    assert stamps.generated(clock, 0).last == 0
    await clock.renew()
    empty = stamps.generated(clock, 0)
    assert (empty.first, empty.last) == (0, 0)
    stamps.first = now
    stamps.finish(None, now + 1)
    generated = stamps.generated(clock, 0)
    assert generated.last - generated.first == 1_000_000


def test_the_engines_own_times_come_first() -> None:
    """A job of several texts begins with the first to begin and ends with the last to end."""
    stamps = AttemptStamps()
    stamps.first = 5.0
    stamps.finish(EngineTimes(3.0, 4.0, 8.0), 9.0)
    stamps.finish(EngineTimes(2.0, 4.5, 7.0), 9.5)
    assert (stamps.scheduled, stamps.first, stamps.last) == (2.0, 4.0, 8.0)


CANNOT = Capabilities(json_schema=True)
CAN = Capabilities(json_schema=True, json_resume=True)


def a_job(prompts: int = 0, **sampling: Any) -> Job:
    prompt = Text(("a",) * prompts) if prompts else Chat((ChatTurn("user", "hi"),))
    return Job(id="j", model="m", tenant="t", priority=Priority.STANDARD, prompt=prompt, sampling=Sampling(**sampling))


def rows(*parts: tuple[int, str]) -> list[Delta]:
    """One token each: (choice, how it ended)."""
    return [Delta(1, seq, "x", (seq,), index, 1, finish) for seq, (index, finish) in enumerate(parts, 1)]


@pytest.mark.parametrize("schema", [{}, {"type": "object"}])
def test_json_that_was_begun_is_computed_again(schema: dict[str, Any]) -> None:
    """An engine that cannot restore its grammar would put a second JSON text into the first one."""
    assert job_restart_reason(a_job(json_schema=schema), CANNOT, rows((0, "")))
    assert not job_restart_reason(a_job(json_schema=schema), CAN, rows((0, "")))


def test_what_was_not_begun_or_is_not_constrained_goes_on() -> None:
    """Nothing is logged, or nothing is asked of the text."""
    assert not job_restart_reason(a_job(json_schema={}), CANNOT, [])
    assert not job_restart_reason(a_job(), CANNOT, rows((0, "")))


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({}, "response_format"),
        ({"message": MessageForm()}, "output_config.format"),
        ({"response": ResponseForm()}, "text.format"),
    ],
)
def test_a_failure_names_the_field_of_its_jobs_endpoint(form: dict[str, Any], field: str) -> None:
    """At its beginning; what it quotes stays as it is."""
    for told in (violated("response_format: is no key"), unusable("response_format: is no key"), unchecked()):
        attempt = Attempt(a_claim(replace(a_job(), **form), 1))
        attempt.stop(JobState.FAILED, told)
        failure = attempt.terminal("w", Generated()).failure
        assert failure is not None and failure.param == field
        assert failure.message == f"{field}: {told.message.removeprefix('response_format: ')}"
        assert told.message != failure.message or field == "response_format"
