"""What was seen of kills becomes goals that are reached or missed."""

from __future__ import annotations

import pytest

from bench.recovery import Reader, RecoveryRound, of_rounds
from penstock.engine import ChatTurn
from workers.engines.sim.answers import prompt_text, token_text


def a_reader(*came: float, tokens: int = 3) -> Reader:
    prompt = prompt_text((ChatTurn("user", "hello"),))
    text = "".join(token_text(prompt, index) for index in range(tokens))
    return Reader("hello", tokens, text=text, came=list(came), ended="completed")


def a_round(start_s: float, silence_s: float | None, *, attempts: int = 1, restarts: int = 1) -> RecoveryRound:
    return RecoveryRound(start_s, silence_s, a_reader(0, 1), a_reader(0, 1), attempts, restarts)


def test_the_silence_of_a_restart_is_judged_beside_a_bare_start() -> None:
    """By the median of the rounds' differences; one reader who heard nothing more misses the goal."""
    beyond, *others = of_rounds([a_round(1.0, 1.5), a_round(2.0, 3.25), a_round(1.0, 9.0)])[1]
    assert (beyond.value, beyond.rounds, beyond.verdict) == (1.25, (0.5, 1.25, 8.0), "missed")
    assert {goal.verdict for goal in others} == {"reached"} and len(others) == 5
    assert of_rounds([a_round(1.0, 1.5)])[1][0].verdict == "reached"
    silent = of_rounds([a_round(1.0, 1.5), a_round(1.0, None)])[1][0]
    assert (silent.value, silent.verdict) == (None, "missed")


@pytest.mark.parametrize("fault", ["reset", "lost", "doubled", "cut", "taken", "killed"])
def test_what_must_not_be_after_a_kill_is_a_goal_that_was_missed(fault: str) -> None:
    """Of both readers: of the killed worker's stream, and of the stopped one's job."""
    for name in ("killed", "stopped"):
        seen = a_round(1.0, 1.0, attempts=1 + (fault == "taken"), restarts=1 + (fault == "killed"))
        reader = getattr(seen, name)
        reader.resets += fault == "reset"
        if fault == "lost":
            reader.text = reader.text[:-4]
        elif fault == "doubled":
            reader.text += reader.text[-4:]
        elif fault == "cut":
            reader.ended = ""
        assert [goal.verdict for goal in of_rounds([seen])[1]].count("missed") == 1
