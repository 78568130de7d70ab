"""The kills in short form: every reader has every token once, and what was seen becomes figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.recovery.figures import Stall, of_api, of_worker
from bench.recovery.readers import Reader
from bench.recovery.shows import QUICK, api_killed, worker_killed
from streaming.messages import Turn
from workers.sim import prompt_text, token_text

QUIET = Stall(10.0, 4.0, 1.0, 1.0)


def a_reader(*came: float, tokens: int = 3) -> Reader:
    prompt = prompt_text((Turn("user", "hello"),))
    text = "".join(token_text(prompt, index) for index in range(tokens))
    return Reader("hello", tokens, text=text, came=list(came), ended="completed")


def test_the_longest_silence_across_the_kill_is_judged() -> None:
    """Beyond the lease; what lay before the kill does not count; a reader who heard nothing more misses the goal."""
    seen = of_worker([a_reader(0, 9, 10, 13), a_reader(8, 9.5, 14.5)], 9.2, 2.0, QUIET)
    silence, stall, exact = seen.goals
    assert (silence.value, silence.holds) == (3.0, True)
    assert (stall.value, stall.holds) == (6.0, True) and exact.holds
    assert of_worker([a_reader(0, 9), a_reader(8, 12)], 9.2, 2.0, QUIET).goals[0].holds is False


def test_all_must_have_gone_on_and_lack_nothing() -> None:
    """The last one counts; a missing, doubled or foreign token is a goal that was missed."""
    good = of_api([a_reader(0, 4), a_reader(0, 2, 3)], 1.0, QUIET)
    assert [(goal.value, goal.holds) for goal in good.goals] == [(3.0, True), (0, True)]
    wrong = a_reader(0, 4)
    wrong.text += wrong.text[-4:]
    assert [goal.holds for goal in of_api([wrong, a_reader(0)], 1.0, QUIET).goals] == [False, False]


@pytest.mark.parametrize("show", [worker_killed, api_killed])
async def test_readers_go_on_with_every_token_once(tmp_path: Path, show: object) -> None:
    """Real processes; times are the full form's."""
    seen = await show(tmp_path, QUICK)  # type: ignore[operator]
    assert seen.goals[-1].value == 0
    assert {row["what"]: row["value"] for row in seen.rows}["answers that did not complete"] == 0
    assert all(row["value"] is not None for row in seen.rows)
