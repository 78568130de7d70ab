"""The gate before a worker's choices: what may begin, how many jobs it lets the worker claim, and what it learns."""

from __future__ import annotations

from typing import Any, cast

import pytest
from sim_worker import a_claim

from penstock.engine import Capabilities, ModelCard, Piece, Request, Sampling, Stats
from streaming.fleet.settings import LaneTargets, LatencyTargets
from streaming.jobs.job import Job, Text, Tokens
from streaming.order import Priority
from workers.attempt import Attempt
from workers.choices import MAX_CLAIM, ChoiceStarter
from workers.gate import SAMPLE_INTERVAL_S
from workers.held_jobs import HeldJobs
from workers.preemption import Preemption
from workers.settings import WorkerSettings

CARD = ModelCard(name="m", engine="sim", context=4096, max_output=4000, capabilities=Capabilities(), created=0)
EVICTING = Stats(slots=8, kv_tokens=1000, evicts=True)


class Noted:
    """Stands for the recorder and for the engine."""

    def __init__(self, stats: Stats) -> None:
        self.load, self.reasons, self.gauges = stats, list[str](), list[tuple[int, float]]()

    def stats(self) -> Stats:
        return self.load

    def submit(self, request: Request) -> None:
        """It never runs."""

    def waits_at_gate(self, reason: str) -> None:
        self.reasons.append(reason)

    def gate(self, peak: int, reserve: float) -> None:
        self.gauges.append((peak, reserve))


class Bench:
    """A worker's choices, and texts for them."""

    def __init__(self, stats: Stats = EVICTING, targets: LatencyTargets | None = None, **settings: Any) -> None:
        self.noted = Noted(stats)
        lanes = LaneTargets(interactive=targets or LatencyTargets())
        whole = cast(Any, self.noted)
        self.starter = ChoiceStarter(
            whole, CARD, WorkerSettings(**settings), whole, on_stopped=lambda _: None, targets=lanes
        )
        self._count = 0

    def text(
        self, prompt: int | Text = 100, limit: int = 100, lane: Priority = Priority.STANDARD, n: int = 1
    ) -> Attempt:
        """A prompt of so many tokens, or one sent as text, with `n` choices."""
        self._count += 1
        sent = Tokens(((1,) * prompt,)) if isinstance(prompt, int) else prompt
        sampling = Sampling(max_tokens=limit, n=n)
        made = Job(id=f"0-{self._count}", model="m", tenant="t", priority=lane, sampling=sampling, prompt=sent)
        attempt = Attempt(a_claim(made, self._count, attempt=1))
        attempt.queue_choices()
        return attempt

    def begin(self, attempt: Attempt) -> bool:
        """Start its only choice if the gate lets it through; else it waits."""
        self.starter.waiting[attempt.job.id] = attempt
        if not self.starter._passes(attempt):
            return False
        self.starter._start(attempt)
        del self.starter.waiting[attempt.job.id]
        return True

    def give(self, attempt: Attempt, tokens: int = 1, finish: str = "", prompt: int = 0) -> None:
        """A piece of its only choice."""
        piece = Piece(f"{attempt.job.id}/{attempt.run_number}/0", "x", (), tokens, finish, prompt)
        attempt.take(0, piece, 1.0)
        if finish:
            self.starter.end(attempt, 0, piece)


@pytest.mark.parametrize("unlimited", [Bench(Stats(slots=8)), Bench(gate=False)], ids=["no cache", "switched off"])
def test_only_slots_limit_an_engine_whose_cache_does_not(unlimited: Bench) -> None:
    """And the gate follows no text."""
    assert unlimited.starter.room() == 9
    assert all(unlimited.begin(unlimited.text(900, 3000)) for _ in range(9))
    assert (unlimited.starter.room(), unlimited.starter.gate.held, unlimited.noted.reasons) == (0, {}, [])


def test_what_does_not_fit_waits_is_counted_once_and_begins_when_there_is_room() -> None:
    bench = Bench()
    texts = [bench.text() for _ in range(6)]
    assert [bench.begin(each) for each in texts] == [True] * 4 + [False] * 2
    assert bench.noted.reasons == ["kv", "kv"] and not bench.begin(texts[4]) and bench.noted.reasons == ["kv", "kv"]
    bench.give(texts[0], 100, "length")
    assert bench.begin(texts[4]) and not bench.begin(texts[5]) and bench.noted.reasons == ["kv", "kv"]


@pytest.mark.parametrize(
    ("evicts", "prompt", "limit"), [(True, 901, 10), (False, 500, 401)], ids=["its prompt", "all that it may hold"]
)
def test_what_the_cache_can_never_hold_is_left_to_the_engine(evicts: bool, prompt: int, limit: int) -> None:
    """It waits for nothing, and does not count in the size of a usual text. One token less may fit, and waits."""
    bench = Bench(Stats(slots=8, kv_tokens=1000, kv_pinned=100, evicts=evicts))
    assert bench.begin(bench.text(100, 100))
    assert not bench.begin(bench.text(prompt - 1, limit))
    usual = bench.starter._prompt.value, bench.starter._limit.value
    impossible = bench.text(prompt, limit)
    assert bench.starter._has_turn(impossible) and bench.begin(impossible)
    assert (bench.starter._prompt.value, bench.starter._limit.value) == usual
    assert not bench.starter._has_turn(bench.text(prompt - 1, limit))


def test_as_many_jobs_are_claimed_as_fit_and_one_to_be_at_hand() -> None:
    bench = Bench()
    assert bench.begin(bench.text(200, 200))
    assert bench.starter.room() == 2  # one more of that size, and the one
    assert bench.begin(bench.text(200, 200))
    assert bench.starter.room() == 1
    assert not bench.begin(bench.text(900, 900)) and bench.starter.room() == 0
    assert Bench(Stats(slots=99, kv_tokens=10**6, evicts=True)).starter.room() == MAX_CLAIM


def test_it_follows_what_texts_generate_and_how_long_their_prompts_are() -> None:
    """Of a prompt sent as text the engine counts the tokens; the ratio holds for the next ones."""
    bench = Bench(Stats(slots=8, kv_tokens=100_000, evicts=True))
    first = bench.text(Text(("x" * 400,)))
    assert bench.begin(first)
    (held,) = bench.starter.gate.held.values()
    assert (held.prompt, held.generated) == (100, 0)
    bench.give(first, 3, prompt=300)
    bench.starter.room()
    assert (held.prompt, held.generated) == (300, 3)
    assert bench.begin(bench.text(Text(("x" * 400,))))
    assert [each.prompt for each in bench.starter.gate.held.values()] == [300, 300]


def test_only_answers_that_ended_by_themselves_or_at_their_limit_are_learned() -> None:
    bench = Bench(Stats(slots=99, kv_tokens=10**6))
    for finish, tokens in (("stop", 5), ("length", 7), ("cancelled", 3)):
        attempt = bench.text(lane=Priority.BATCH)
        assert bench.begin(attempt)
        bench.give(attempt, tokens - 1)
        bench.give(attempt, 1, finish)
    assert len(bench.starter.gate.history.window("batch")) == 2
    assert bench.starter.gate.held == {}


def slow_steps(bench: Bench) -> None:
    """Steps of a millisecond a text, as the worker reports them."""
    now = 0.0
    for texts in (1, 2, 3, 4) * 10:
        bench.starter.note_step(texts, now)
        bench.starter.note_step(texts, now + texts / 1000)
        now += SAMPLE_INTERVAL_S + 1  # the engine pauses


def test_lines_of_a_batch_begin_only_while_a_chat_keeps_its_targets() -> None:
    """At three milliseconds between tokens three texts may run, if the third is a line; chats begin anyway."""
    bench = Bench(Stats(slots=8), LatencyTargets(itl_ms=3.2), reserved_slots=0)
    chat = bench.text(lane=Priority.INTERACTIVE)
    assert bench.begin(chat)
    bench.give(chat, 1)
    slow_steps(bench)
    assert bench.starter.batch_room() is None
    line, late = bench.text(lane=Priority.BATCH), bench.text(lane=Priority.BATCH)
    assert bench.begin(line) and bench.begin(bench.text(lane=Priority.INTERACTIVE))
    assert not bench.begin(late) and bench.noted.reasons == ["itl"]
    del bench.starter.waiting[late.job.id]
    assert bench.starter.batch_room() == 0
    assert bench.begin(bench.text(lane=Priority.STANDARD))
    for attempt, _ in list(bench.starter.running.values()):
        bench.give(attempt, 100, "length")
    assert bench.begin(late)


def test_who_has_had_a_place_preempts_nobody_for_the_next_one() -> None:
    """The first choice of a chat has ended and the second waits, beside a line of a batch."""
    bench = Bench(Stats(slots=1, kv_tokens=1000))
    chat, line = bench.text(lane=Priority.INTERACTIVE, n=2), bench.text(lane=Priority.BATCH)
    assert bench.begin(chat)
    bench.give(chat, 1, "length")
    assert bench.begin(line) and chat.waits and not chat.started
    bench.starter.waiting[chat.job.id] = chat
    held, lease, taken = HeldJobs(cast(Any, None)), cast(Any, None), cast(Any, bench.noted)
    held.attempts[line.job.id] = line
    preemption = Preemption(lease, held, bench.starter, taken, CARD.capabilities, lambda _: None)
    assert preemption.freeable_slots() == 1
    preemption.make_way(chat)
    assert list(held.attempts) == [line.job.id]
