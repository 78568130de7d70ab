"""The kills in short form: every reader has every token once, and what was seen becomes figures."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from bench.processes import Processes
from bench.recovery import restart
from bench.recovery.probe import GOOD, Watch, longest_ms, own_ms
from bench.recovery.restart import RecoveryRound, of_rounds, one_round
from bench.recovery.shows import (
    QUICK,
    Reader,
    RecoverySample,
    RecoverySize,
    Stall,
    TooSlow,
    _kill,
    of_api,
    of_worker,
    worker_killed,
)
from bench.report import as_json
from penstock.engine import ChatTurn
from workers.engines.sim.answers import prompt_text, token_text

pytestmark = pytest.mark.slow

QUIET = Stall(10.0, 4.0, 6.0)


def a_reader(*came: float, tokens: int = 3) -> Reader:
    prompt = prompt_text((ChatTurn("user", "hello"),))
    text = "".join(token_text(prompt, index) for index in range(tokens))
    return Reader("hello", tokens, text=text, came=list(came), ended="completed")


def test_the_longest_silence_across_the_kill_is_judged() -> None:
    """Beyond the lease; what lay before the kill does not count; a reader who heard nothing more misses the goal."""
    seen = of_worker([a_reader(0, 9, 10, 13), a_reader(8, 9.5, 14.5)], 9.2, 2.0, QUIET)
    silence, stall, resets, ends, exact = seen.goals
    assert (silence.value, silence.verdict) == (3.0, "reached")
    assert (stall.value, stall.verdict) == (6.0, "reached") and {resets.verdict, ends.verdict, exact.verdict} == {
        "reached"
    }
    assert of_worker([a_reader(0, 9), a_reader(8, 12)], 9.2, 2.0, QUIET).goals[0].verdict == "missed"


def test_all_must_have_gone_on_and_lack_nothing() -> None:
    """The last one counts; a missing, doubled or foreign token is a goal that was missed."""
    good = of_api([a_reader(0, 4), a_reader(0, 2, 3)], 1.0, QUIET)
    assert [(goal.value, goal.verdict) for goal in good.goals] == [(3.0, "reached"), (6.0, ""), *[(0, "reached")] * 3]
    wrong = a_reader(0, 4)
    wrong.text += wrong.text[-4:]
    found = of_api([wrong, a_reader(0)], 1.0, QUIET)
    assert [goal.verdict for goal in found.goals] == ["missed", "", "reached", "reached", "missed"]


def test_a_reset_and_an_answer_that_failed_are_goals_that_were_missed() -> None:
    """Of both shows, also where every reader has every token."""
    again, failed = a_reader(0, 4), a_reader(0, 4)
    again.resets, failed.ended = 1, "failed"
    for seen in (of_worker([again, failed], 1.0, 9.0, QUIET), of_api([again, failed], 1.0, QUIET)):
        assert [(goal.value, goal.verdict) for goal in seen.goals[-3:]] == [
            (1, "missed"),
            (1, "missed"),
            (0, "reached"),
        ]


def test_an_answer_that_did_not_come_is_a_stall_without_an_end() -> None:
    """It misses the goal where there is one, and no figure is told of it."""
    hung = Stall(math.inf, 4.0, math.inf)
    seen = of_worker([a_reader(0, 4)], 1.0, 9.0, hung)
    assert (seen.goals[1].value, seen.goals[1].verdict) == (None, "missed")
    assert [row["value"] for row in seen.rows if row["what"] == "longest answer of the API process, ms"] == [None]
    as_json({"rows": seen.rows})


def test_a_stall_is_compared_with_the_same_moment() -> None:
    """A second in which both stood still is the machine's; one of the control's at another time explains nothing."""
    control = [(0.0, 1.0), (1.0, 1.01), (5.0, 5.01)]
    assert own_ms([(0.1, 1.05), (1.2, 1.3)], control) == pytest.approx(100.0)
    assert own_ms([(5.0, 6.0)], control) == pytest.approx(990.0)
    assert longest_ms([(5.0, 6.0), (6.0, 6.5)]) == pytest.approx(1000.0)
    assert own_ms([(5.0, math.inf)], control) == own_ms([], control) == longest_ms([]) == math.inf


def test_a_server_that_answers_no_more_is_seen() -> None:
    """One that hangs, with the wait so far; one that closes, one that refuses and one that is not there, for ever."""
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        watch = Watch(hangs.getsockname()[1])
        line, _ = hangs.accept()
        time.sleep(0.05)
        assert 40 < longest_ms(watch.waits()) < 60_000, "the question that is open"
        line.recv(1000)
        line.sendall(GOOD + b"\r\nContent-Length: 0\r\n\r\n")
        line.recv(1000)  # the next question: the first wait is over
        assert 40 < longest_ms(watch.waits()) < 60_000
        line.close()
        _becomes_infinite(watch)
        assert longest_ms(watch.waits()) == math.inf, "and stays so"
        gone = hangs.getsockname()[1]
    _becomes_infinite(Watch(gone))
    with socket.create_server(("127.0.0.1", 0)) as refuses:
        watch = Watch(refuses.getsockname()[1])
        line, _ = refuses.accept()
        with line:
            line.recv(1000)
            line.sendall(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
            _becomes_infinite(watch)


def _becomes_infinite(watch: Watch) -> None:
    over = time.monotonic() + 10
    while longest_ms(watch.waits()) < math.inf:
        assert time.monotonic() < over
        time.sleep(0.01)


async def shown(
    show: Callable[[Path, RecoverySize], Awaitable[RecoverySample]], folder: Path, size: RecoverySize
) -> RecoverySample:
    """The show, with answers of twice the length each time the machine was too slow to kill within them."""
    for doubled in range(5):
        inner = folder / str(doubled)
        inner.mkdir()
        with suppress(TooSlow):
            return await show(inner, size)
        size = replace(size, tokens=2 * size.tokens, reader_tokens=2 * size.reader_tokens)
    raise AssertionError(f"readers end before they can be killed, with {size}")


async def test_a_machine_that_is_too_slow_is_given_longer_answers(tmp_path: Path) -> None:
    """A show that refuses the first two sizes is given twice and four times the tokens."""
    sizes: list[RecoverySize] = []
    seen = of_api([a_reader(0, 2)], 1.0, QUIET)

    async def show(_: Path, size: RecoverySize) -> RecoverySample:
        sizes.append(size)
        if len(sizes) < 3:
            raise TooSlow("readers had ended")
        return seen

    assert await shown(show, tmp_path, QUICK) is seen
    assert [size.reader_tokens // QUICK.reader_tokens for size in sizes] == [1, 2, 4]


def test_a_kill_behind_the_end_of_a_reader_is_not_made() -> None:
    """It would show nothing: the caller is told that the answers are too short."""
    with pytest.raises(TooSlow, match="1 of 2 readers"):
        _kill(cast(Processes, None), "api-doomed", [a_reader(0, 1), Reader("hello", 3)])


async def test_readers_go_on_with_every_token_once(tmp_path: Path) -> None:
    """Real processes, of which a worker is killed; times are the full form's."""
    seen = await shown(worker_killed, tmp_path, QUICK)
    assert seen.goals[-1].value == 0
    assert {row["what"]: row["value"] for row in seen.rows}["answers that did not complete"] == 0
    assert all(row["value"] is not None for row in seen.rows)


def a_round(start_s: float, silence_s: float | None, *, attempts: int = 1, restarts: int = 1) -> RecoveryRound:
    return RecoveryRound(start_s, silence_s, a_reader(0, 1), a_reader(0, 1), attempts, restarts)


def test_the_silence_of_a_restart_is_judged_beside_a_bare_start() -> None:
    """By the median of the rounds' differences; one reader who heard nothing more misses the goal."""
    good = of_rounds([a_round(1.0, 1.5), a_round(2.0, 3.25), a_round(1.0, 9.0)])
    beyond, *others = good.goals
    assert (beyond.value, beyond.rounds, beyond.verdict) == (1.25, (0.5, 1.25, 8.0), "missed")
    assert {goal.verdict for goal in others} == {"reached"} and len(others) == 4
    assert of_rounds([a_round(1.0, 1.5)]).goals[0].verdict == "reached"
    silent = of_rounds([a_round(1.0, 1.5), a_round(1.0, None)])
    assert (silent.goals[0].value, silent.goals[0].verdict) == (None, "missed")
    as_json({"rows": silent.rows})


@pytest.mark.parametrize("fault", ["reset", "lost", "doubled", "cut", "taken", "killed"])
def test_what_must_not_be_after_a_restart_is_a_goal_that_was_missed(fault: str) -> None:
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


async def test_a_round_of_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes at default settings: nothing is lost, doubled or taken; times are the full form's."""
    monkeypatch.setattr(restart, "STOPPED_S", 0.5)
    seen = of_rounds([await one_round(tmp_path)])
    assert [goal.value for goal in seen.goals[1:]] == [0, 0, 0, 0]
    assert all(row["value"] is not None for row in seen.rows)
