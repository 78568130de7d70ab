"""The program about slow and abusive connections: its figures, its clients, and its shows in short form."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.connections import shows
from bench.connections.__main__ import main
from bench.connections.abuse import ABUSES, Cost
from bench.connections.figures import ALONE, AT_BARE, AT_PENSTOCK, abuse_goals, slow_goals, slow_rows
from bench.connections.shows import QUICK, turns
from bench.connections.slow import BEGINNINGS, Crowd
from bench.load.plan import Reading
from bench.load.stats import Spread
from bench.report import load


def reading(ttft: float, e2e: float, wrong: int = 0) -> Reading:
    return Reading(
        requests=10,
        wrong={"cut off": wrong} if wrong else {},
        tokens=1,
        seconds=1,
        ttft=Spread(p99=ttft),
        itl=Spread(),
        e2e=Spread(p99=e2e),
        own_cpu=0,
    )


def test_rounds_are_compared_one_by_one() -> None:
    """Each turn beside slow connections with its round's turn without them; what fails is counted."""
    readings = {
        ALONE: [reading(10, 100), reading(20, 200)],
        AT_PENSTOCK: [reading(11, 120), reading(22, 240, wrong=3)],
        AT_BARE: [reading(10, 100), reading(20, 200)],
    }
    ttft, request, control, _, failed = slow_goals(readings)
    assert (ttft.value, ttft.holds) == (pytest.approx(1.1), True)
    assert (request.value, request.holds) == (pytest.approx(1.2), False)
    assert (control.value, control.holds) == (1.0, None)
    assert (failed.value, failed.holds) == (3, False)
    assert [row["errors"] for row in slow_rows(readings)] == [0, 0, 0, 3, 0, 0]


def test_an_abuse_that_is_taken_or_costs_much_misses_its_goal() -> None:
    good = Cost("a", 431, 4.9, 0.1)
    assert [goal.holds for goal in abuse_goals([good])] == [True, True]
    for bad, held in ((Cost("b", 200, 0, 0), [False, True]), (Cost("c", 0, 0, 0), [False, True]),
                      (Cost("d", 413, 5.1, 0), [True, False])):  # fmt: skip
        assert [goal.holds for goal in abuse_goals([good, bad])] == held


def test_every_arm_has_a_turn_in_every_round() -> None:
    assert turns(0) == tuple(reversed(turns(1))) and set(turns(0)) == {ALONE, AT_PENSTOCK, AT_BARE}


async def test_slow_clients_come_back_when_they_are_closed() -> None:
    """All kinds connect; one whose connection ends connects again."""
    begun: list[bytes] = []

    async def close_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(0.1):
                begun.append(await reader.read(65536))
        except TimeoutError:
            begun.append(b"")
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(close_at_once, "127.0.0.1", 0)
    async with server, asyncio.timeout(30):
        crowd = Crowd(server.sockets[0].getsockname()[1], 6)
        holding = asyncio.create_task(crowd.hold())
        await crowd.wait_connected()
        while len(begun) < 18 or set(begun) != set(BEGINNINGS):
            await asyncio.sleep(0.01)
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        while len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.01)


def test_the_whole_program_in_short_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real processes; every abusive request is refused, and nothing fails beside slow connections."""
    monkeypatch.setattr(shows, "ABUSES", ABUSES[:3:2])
    main(["--quick", "--out", str(tmp_path)])
    assert "TTFT p99" in capsys.readouterr().out
    found = load(tmp_path / "connections-quick.json")
    goals = {goal.what: goal for goal in found.ratios}
    assert goals["abusive requests that were not answered with a 4xx"].value == 0
    assert goals["requests beside slow connections that failed"].value == 0
    assert found.settings["slow"] == QUICK.slow
    assert main(["--shows", "nothing"]) == 2
