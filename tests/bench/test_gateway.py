"""The gateway comparison: its arithmetic, its goals, and that nothing is left out or left behind."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from bench import program
from bench.environments import CACHE, PINS, Absent, Environment, Say
from bench.gateway.__main__ import main
from bench.gateway.figures import Goals, rows
from bench.gateway.sweep import GatewayReadings, notes, play
from bench.gateway.systems import ServingGateway
from bench.load.plan import LoadPlan, StreamReading
from bench.load.scripted import ClockError
from bench.report import load
from bench.stats import Spread
from workers.engines.sim.settings import SimSettings

pytestmark = pytest.mark.slow

SMALL = ("--levels", "2", "--tokens", "8", "--step-ms", "2", "--prefill-ms", "2", "--requests-per-stream", "2")


def reading(
    cpu_s: float, *, e2e: float = 2000.0, itl: float = 15.1, ttft: float = 30.0, errors: int = 0
) -> StreamReading:
    """Of a million tokens."""
    return StreamReading(
        requests=100,
        wrong={"cut off": errors} if errors else {},
        tokens=1_000_000,
        seconds=10.0,
        ttft=Spread(p50=ttft, p99=2 * ttft, most=3 * ttft),
        itl=Spread(p50=15.0, p99=itl, most=itl + 5),
        e2e=Spread(mean=e2e),
        cpu={"api": cpu_s, "redis": 1.0},
        own_cpu=0.2,
    )


def judged(found: list[dict[str, object]], *asked: str) -> dict[str, tuple[float | None, str]]:
    goals = Goals(found, asked)
    return {ratio.what: (ratio.value, ratio.verdict) for ratio in goals.of_sweep(15.0)}


def test_goals_compare_with_the_others_of_the_same_run() -> None:
    names = ["floor", "penstock", "router", "dynamo"]
    readings = {
        ("floor", 64): [reading(5)],
        ("penstock", 64): [reading(9, e2e=2020, ttft=35)],
        ("floor", 256): [reading(5)],
        ("penstock", 256): [reading(9, e2e=2100, itl=15.6)],
        ("router", 256): [reading(14)],
        ("dynamo", 256): [reading(39)],
    }
    found = judged(rows(readings, names), *names)
    assert found["c=256: Penstock's CPU per token / Dynamo's"] == (pytest.approx(0.25), "reached")
    assert found["c=256: Penstock's CPU per token / SGLang router + engine server"] == (pytest.approx(2 / 3), "reached")
    assert found["c=256: Penstock's CPU per token / the floor's"] == (pytest.approx(10 / 6), "reached")
    assert found["Penstock's ITL p99 / a 15 ms step, worst of all c"] == (pytest.approx(1.04), "missed")
    worst, verdict = found["Penstock's share of end-to-end time, %, worst of c >= 64"]
    assert worst == pytest.approx(100 * 100 / 2100) and verdict == "missed"
    growth, flat = found["Penstock's share, growth from c=64 to 256, points"]
    assert growth == pytest.approx(100 * 100 / 2100 - 100 * 20 / 2020) and flat == "missed"
    assert found["Penstock's errors"] == (0, "reached")


def test_a_goal_whose_rival_failed_is_not_reached_and_one_nobody_asked_for_is_not_shown() -> None:
    readings = {("penstock", 256): [reading(9)]}
    found = judged(rows(readings, ["penstock", "dynamo"]), "penstock", "dynamo")
    assert found["c=256: Penstock's CPU per token / Dynamo's"] == (None, "missed")
    assert not any("router" in what or "floor" in what for what in found)


class Counted:
    """A system that notes what is done with it."""

    title = "a system of this test"

    def __init__(self, name: str, log: list[str], fault: str = "") -> None:
        self.name, self._log, self._fault = name, log, fault

    def prepare(self, say: Say) -> None:
        if self._fault == "absent":
            raise Absent("no such package")

    @contextmanager
    def serve(self, folder: Path, engine: SimSettings) -> Iterator[ServingGateway]:
        if self._fault == "broken":
            raise OSError("it will not start")
        self._log.append(f"+{self.name}")
        yield ServingGateway(1, [])
        self._log.append(f"-{self.name}")


def test_systems_take_turns_and_what_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    measured: list[LoadPlan] = []
    monkeypatch.setattr("bench.gateway.sweep.measure", lambda plan: measured.append(plan) or reading(1))
    monkeypatch.setattr("bench.gateway.sweep.SETTLE_S", 0.0)
    systems = [Counted("a", log), Counted("b", log), Counted("broken", log, "broken"), Counted("c", log, "absent")]
    played = GatewayReadings()
    ready = played.prepared(systems, lambda _: None)

    def plan(serving: ServingGateway, streams: int) -> LoadPlan:
        return LoadPlan(port=serving.port, model="m", streams=streams, requests=streams, tokens=1)

    with program.Testbed(Console(quiet=True), "", 8) as stage:
        play(ready, 2, [1, 4], plan, SimSettings(), stage, played)
    assert log == ["+a", "-a", "+b", "-b", "+b", "-b", "+a", "-a"]
    assert [each.streams for each in measured] == [1, 4] * 4
    assert {at: len(each) for at, each in played.readings.items()} == dict.fromkeys(
        [("a", 1), ("a", 4), ("b", 1), ("b", 4)], 2
    )
    said = notes(systems, played, [])
    assert "c FAILED: cannot be installed: no such package" in said and "broken FAILED: it will not start" in said


def test_an_environment_is_made_once_for_its_pins_and_says_why_it_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    said: list[str] = []
    environ = {CACHE: str(tmp_path)}
    empty = Environment(name="one", packages=())
    python = empty.prepare(said.append, environ)
    assert empty.prepare(said.append, environ) == python and len(said) == 1
    assert subprocess.run([python, "-c", "print(1)"], capture_output=True, check=True).stdout == b"1\n"
    with pytest.raises(Absent, match="penstock-bench-no-such-package"):
        Environment(name="two", packages=("penstock-bench-no-such-package==1",)).prepare(said.append, environ)
    assert not (tmp_path / "two" / PINS).exists()


def test_the_whole_of_it_on_a_small_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--systems", "penstock,floor", *SMALL, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    report = load(tmp_path / "gateway-quick.json")
    assert [(row["system"], row["streams"], row["requests"], row["errors"]) for row in report.rows] == [
        ("floor", 2, 4, 0),
        ("penstock", 2, 4, 0),
    ]
    floor, penstock = report.rows
    assert 0 < floor["cpu_us_per_token"] < penstock["cpu_us_per_token"]
    assert {part.split()[0] for part in penstock["parts"].split(", ")} == {
        "api-1",
        "worker-1",
        "redis",
        "scheduler-1",
        "offline-1",
    }
    assert report.command.startswith("penstock bench gateway --quick") and "penstock" in shown and "ratio" in shown
    assert (report.settings["rounds"], report.settings["tokens"], report.settings["levels"]) == (1, 8, [2])
    assert report.settings["systems"]["floor"] == "engine behind a bare asyncio socket server"


def test_a_path_in_front_of_a_server_on_a_small_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request is answered, and the table names each process that it cost."""
    monkeypatch.setattr("bench.gateway.sweep.clock_error", lambda _: ClockError(ttft=0.0, itl=0.0, itl_p99=0.0))
    assert main(["--quick", "--upstream", "--systems", "floor,penstock-upstream", *SMALL, "--out", str(tmp_path)]) == 0
    report = load(tmp_path / "gateway-upstream-quick.json")
    assert [(row["system"], row["streams"], row["errors"]) for row in report.rows] == [
        (name, 2, 0) for name in ("floor", "penstock-upstream")
    ]
    assert {part.split()[0] for part in report.rows[-1]["parts"].split(", ")} > {"engine", "worker-1", "api-1", "redis"}


def test_an_unknown_system_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--systems", "floor,nginx"]) == 2
    assert "no system 'nginx'; there are floor, penstock," in capsys.readouterr().out
