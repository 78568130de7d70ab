"""The past of a job's texts, as engines and servers get it."""

from __future__ import annotations

from streaming.jobs.codec import Delta, Run, Section
from streaming.jobs.job import Job, Text
from streaming.order import Priority
from workers.attempt import PastTexts, echoes_left

PLAIN = Job(id="j", model="m", tenant="t", priority=Priority.BATCH, prompt=Text(("one", "three")))
ECHO = Job(id="j", model="m", tenant="t", priority=Priority.BATCH, prompt=Text(("one", "three")), echo=True)
OWN, FIRST, SECOND = Run("c", 9), Run("a", 4), Run("b", 4)
SECTIONS = (Section(1, FIRST), Section(3, SECOND))
ROWS = [
    Delta(1, 1, 0, "one x", (7,), 1),
    Delta(1, 2, 0, "one", (8,), 1),
    Delta(1, 3, 0, " z", (9,), 1),
]


def test_an_engine_does_not_see_an_echo() -> None:
    """Which is in front of the first delta of a choice alone."""
    assert PastTexts(ECHO, ROWS, SECTIONS, OWN).of(0) == [(" x", (7,), 1), ("one", (8,), 1), (" z", (9,), 1)]
    assert PastTexts(PLAIN, ROWS, SECTIONS, OWN).of(0)[0] == ("one x", (7,), 1)
    assert echoes_left(ECHO, ROWS) == {1: "three"} and echoes_left(PLAIN, ROWS) == echoes_left(PLAIN, ()) == {}
    assert echoes_left(ECHO, ()) == {0: "one", 1: "three"}


def test_an_answer_has_the_name_of_the_run_that_began_it() -> None:
    """Runs of two workers may have the same number. What nobody has begun is begun by this run."""
    texts = PastTexts(PLAIN, [*ROWS, Delta(1, 4, 1, "a", (1,), 1)], SECTIONS, OWN)
    assert (texts.begun_by(0), texts.begun_by(1)) == ("a/4", "b/4")
    assert PastTexts(PLAIN, ROWS, SECTIONS, OWN).begun_by(1) == PastTexts(PLAIN, (), (), OWN).begun_by(0) == "c/9"
