"""A kill in short form: every reader has every token once; what was seen becomes goals that are reached or missed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from bench.processes import Processes
from bench.recovery.restart import RecoveryRound, of_rounds
from bench.recovery.shows import QUICK, Reader, TooSlow, _kill, of_api, of_worker, worker_killed
from penstock.engine import ChatTurn
from workers.engines.sim.answers import prompt_text, token_text


def a_reader(*came: float, tokens: int = 3) -> Reader:
    prompt = prompt_text((ChatTurn("user", "hello"),))
    text = "".join(token_text(prompt, index) for index in range(tokens))
    return Reader("hello", tokens, text=text, came=list(came), ended="completed")


def test_the_longest_silence_across_the_kill_is_judged() -> None:
    """Beyond the lease; what lay before the kill does not count; a reader who heard nothing more misses the goal."""
    silence, *wrong = of_worker([a_reader(0, 9, 10, 13), a_reader(8, 9.5, 14.5)], 9.2, 2.0).goals
    assert (silence.value, silence.verdict) == (3.0, "reached") and {each.verdict for each in wrong} == {"reached"}
    assert of_worker([a_reader(0, 9), a_reader(8, 12)], 9.2, 2.0).goals[0].verdict == "missed"


def test_all_must_have_gone_on() -> None:
    """The last one counts."""
    good = of_api([a_reader(0, 4), a_reader(0, 2, 3)], 1.0)
    assert [(goal.value, goal.verdict) for goal in good.goals] == [(3.0, "reached"), *[(0, "reached")] * 3]
    assert of_api([a_reader(0, 4), a_reader(0)], 1.0).goals[0].verdict == "missed"


def test_a_kill_behind_the_end_of_a_reader_is_not_made() -> None:
    """It would show nothing: the caller is told that the answers are too short."""
    with pytest.raises(TooSlow, match="1 of 2 readers"):
        _kill(cast(Processes, None), "api-doomed", [a_reader(0, 1), Reader("hello", 3)])


@pytest.mark.slow
async def test_readers_go_on_with_every_token_once(tmp_path: Path) -> None:
    """Real processes, of which a worker is killed; times are the full form's. On a slow machine answers are longer."""
    for doubled in range(5):
        (tmp_path / str(doubled)).mkdir()
        with suppress(TooSlow):
            seen = await worker_killed(tmp_path / str(doubled), replace(QUICK, tokens=QUICK.tokens << doubled))
            assert [goal.value for goal in seen.goals[1:]] == [0, 0, 0]
            assert all(row["value"] is not None for row in seen.rows)
            return
    raise AssertionError("readers end before they can be killed")


def a_round(start_s: float, silence_s: float | None, *, attempts: int = 1, restarts: int = 1) -> RecoveryRound:
    return RecoveryRound(start_s, silence_s, a_reader(0, 1), a_reader(0, 1), attempts, restarts)


def test_the_silence_of_a_restart_is_judged_beside_a_bare_start() -> None:
    """By the median of the rounds' differences; one reader who heard nothing more misses the goal."""
    beyond, *others = of_rounds([a_round(1.0, 1.5), a_round(2.0, 3.25), a_round(1.0, 9.0)]).goals
    assert (beyond.value, beyond.rounds, beyond.verdict) == (1.25, (0.5, 1.25, 8.0), "missed")
    assert {goal.verdict for goal in others} == {"reached"} and len(others) == 5
    assert of_rounds([a_round(1.0, 1.5)]).goals[0].verdict == "reached"
    silent = of_rounds([a_round(1.0, 1.5), a_round(1.0, None)])
    assert (silent.goals[0].value, silent.goals[0].verdict) == (None, "missed")


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
        assert [goal.verdict for goal in of_rounds([seen]).goals].count("missed") == 1
