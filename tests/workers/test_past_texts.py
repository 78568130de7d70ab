"""The past of a job's texts, as engines and servers get it."""

from __future__ import annotations

from sim_worker import a_claim

from streaming.jobs.codec import Delta, Run, Section
from streaming.jobs.history import History
from streaming.jobs.job import Job, Text
from streaming.order import Priority
from workers.attempt import Attempt, echoes_left, past_of

PLAIN = Job(id="j", model="m", tenant="t", priority=Priority.BATCH, prompt=Text(("one", "three")))
ECHO = Job(id="j", model="m", tenant="t", priority=Priority.BATCH, prompt=Text(("one", "three")), echo=True)
SECTIONS = (Section(1, Run("a", 4)), Section(3, Run("b", 4)))
ROWS = [
    Delta(1, 1, 0, "one x", (7,), 1),
    Delta(1, 2, 0, "one", (8,), 1),
    Delta(1, 3, 0, " z", (9,), 1),
]


def test_an_engine_does_not_see_an_echo() -> None:
    """Which is in front of the first delta of a choice alone."""
    assert past_of(ECHO, ROWS) == [(" x", (7,), 1), ("one", (8,), 1), (" z", (9,), 1)]
    assert past_of(PLAIN, ROWS)[0] == ("one x", (7,), 1) and past_of(ECHO, ()) == []
    assert echoes_left(ECHO, ROWS) == {1: "three"} and echoes_left(PLAIN, ROWS) == echoes_left(PLAIN, ()) == {}
    assert echoes_left(ECHO, ()) == {0: "one", 1: "three"}


def test_an_answer_has_the_name_of_the_run_that_began_it() -> None:
    """Runs of two workers may have the same number. What nobody has begun is begun by this run."""

    def begun_by(*rows: Delta) -> list[str]:
        history = History(rows=list(rows), sections=SECTIONS if rows else ())
        requests = Attempt(a_claim(PLAIN, 9, worker="c"), history).requests()
        return [requests[index].begun_by for index in range(2)]

    assert begun_by(*ROWS, Delta(1, 4, 1, "a", (1,), 1)) == ["a/4", "b/4"]
    assert begun_by(*ROWS)[1] == "c/9" and begun_by() == ["c/9", "c/9"]
