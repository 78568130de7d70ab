"""An engine that breaks the protocol ends its worker with a reason; one that fails a request fails that one alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from penstock.engine import (
    RETURNED,
    Capabilities,
    Engine,
    EngineDead,
    EngineHealth,
    Failure,
    Logprob,
    ModelCard,
    Piece,
    Refused,
    Request,
    Sampling,
    Stats,
    Step,
    task_health,
)
from workers.engines import checked_engine
from workers.engines.checked_engine import CheckedEngine

CARD = ModelCard(name="m", engine="?", context=64, max_output=32, capabilities=Capabilities(), created=0)


class Played:
    """An engine whose methods do what the test has put in their place."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        self.card: Any = CARD
        self.load: Any = Stats(slots=2)
        self.well: Any = EngineHealth(True)
        self.cancels: list[str] = []
        self._methods = methods

    async def start(self, on_step: Step, on_phase: Callable[[str], None]) -> ModelCard:
        self.on_step = on_step
        self._play("start")
        return cast(ModelCard, self.card)

    async def check(self, request: Request) -> None:
        self._play("check")

    def submit(self, request: Request) -> None:
        self._play("submit")

    def cancel(self, request_id: str) -> None:
        self.cancels.append(request_id)
        self._play("cancel")

    def stats(self) -> Stats:
        self._play("stats")
        return cast(Stats, self.load)

    def health(self) -> EngineHealth:
        self._play("health")
        return cast(EngineHealth, self.well)

    async def stop(self) -> None:
        self._play("stop")

    def _play(self, name: str) -> None:
        self._methods.get(name, lambda: None)()


def boom() -> None:
    raise KeyError("boom")


def request(name: str = "r", **sampling: Any) -> Request:
    return Request(name, "hello", Sampling(**sampling))


async def running(engine: Played | None = None, *requests: Request) -> tuple[Played, CheckedEngine, list[Piece]]:
    engine, given = engine or Played(), list[Piece]()
    checked = CheckedEngine(cast(Engine, engine), "mine:Engine", "m")
    await checked.start(given.extend, lambda _: None)
    for each in requests or (request(),):
        checked.submit(each)
    return engine, checked, given


class Judging(Played):
    """An engine that cannot continue."""

    def restart_reason(self, request: Request) -> str:
        return "it has forgotten"


async def test_an_engine_may_give_requests_back_and_refuse_to_continue() -> None:
    engine, checked, given = await running()
    engine.on_step([Piece("r", finish=RETURNED)])
    assert given == [Piece("r", finish=RETURNED)] and checked.health().ok
    assert checked.restart_reason(request()) == ""
    _, judging, _ = await running(Judging())
    assert judging.restart_reason(request()) == "it has forgotten"


async def test_what_keeps_to_the_protocol_passes() -> None:
    """Every kind of piece, also with logprobs of minus infinity; the card has the name that the settings give."""
    engine, checked, given = await running(None, request("a"), request("b", max_tokens=1), request("c"))
    assert await checked.start(given.extend, lambda _: None) == replace(CARD, engine="mine:Engine")
    never = Logprob("x", float("-inf"))
    pieces = [
        Piece("a", "x", (1,), 1, prompt_tokens=3, logprobs=(never,)),
        Piece("b", "y", n=1, finish="length"),
        Piece("c", failure=Failure("x", "y")),
    ]
    engine.on_step(pieces)
    engine.on_step([])
    engine.on_step([Piece("a", finish="stop")])
    assert given == [*pieces, Piece("a", finish="stop")]
    assert checked.stats() == engine.load and checked.health().ok


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        ([Piece("nobody", "x", n=1)], "a piece for request 'nobody', which does not run"),
        ([Piece("r", finish="stop"), Piece("r", "x", n=1)], "which does not run: unknown, or it has ended"),
        ([Piece("r", finish="done")], "a piece with finish 'done'"),
        ([Piece("r", "x", n=-1)], "a piece with finish '' and counts -1, 0"),
        ([Piece("r", cast(str, 5))], "a step is no list of Piece: Expected `str`, got `int`"),
        ([Piece("r", "\ud800")], "a step is no list of Piece: "),
        (["text"], "a step is no list of Piece: it holds str"),
        ("text", "a step is no list of Piece: a str"),
        (None, "a step is no list of Piece: a NoneType"),
    ],
)
async def test_nonsense_ends_the_worker(pieces: Any, problem: str) -> None:
    """Nothing of the step is passed on, the engine is told, and from then on it is not well."""
    engine, checked, given = await running()
    with pytest.raises(EngineDead, match="mine:Engine: "):
        engine.on_step(pieces)
    health = checked.health()
    assert not health.ok and health.reason.startswith("mine:Engine: ") and problem in health.reason
    with pytest.raises(EngineDead):
        engine.on_step([])
    assert given == []


@pytest.mark.parametrize(
    ("sampling", "past", "most"), [({}, 0, 32), ({"max_tokens": 5}, 0, 5), ({"max_tokens": 5}, 3, 2)]
)
async def test_too_many_tokens_fail_that_request_alone(sampling: dict[str, int], past: int, most: int) -> None:
    """The limit counts from the beginning of the answer, with what earlier attempts generated. What the engine yields
    until it has obeyed the cancel is dropped; the other request goes on, and the worker too."""
    earlier = (("before ", (), past),) if past else ()
    engine, checked, given = await running(None, replace(request(**sampling), past=earlier), request("other"))
    for _ in range(most):
        engine.on_step([Piece("r", "x", n=1)])
    assert (len(given), engine.cancels) == (most, [])
    engine.on_step([Piece("r", "x", n=1), Piece("other", "y", n=1)])
    engine.on_step([Piece("r", "x", n=1), Piece("other", "y", n=1)])
    engine.on_step([Piece("r", finish="cancelled"), Piece("other", finish="stop")])
    excess = [piece for piece in given[most:] if piece.id == "r"]
    assert [piece.failure and piece.failure.code for piece in excess] == ["engine_error"] and not excess[0].text
    assert given[-1] == Piece("other", finish="stop") and len(given) == most + 4
    assert engine.cancels == ["r"] and checked.health().ok
    checked.submit(request())  # the same name is free again
    engine.on_step([Piece("r", "x", n=1, finish="stop")])
    assert given[-1] == Piece("r", "x", n=1, finish="stop")


async def test_a_step_from_another_thread_ends_the_worker() -> None:
    engine, checked, given = await running()
    errors: list[Exception] = []

    def step() -> None:
        try:
            engine.on_step([Piece("r", "x", n=1)])
        except EngineDead as error:
            errors.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert "use loop.call_soon_threadsafe" in str(errors[0]) == checked.health().reason
    assert given == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"card": None}, "start() returned no ModelCard: a NoneType"),
        ({"card": replace(CARD, context=cast(int, "64"))}, "start() returned no ModelCard: Expected `int`"),
        ({"card": replace(CARD, name="other")}, "its card is for the model 'other', not 'm'"),
        ({"card": replace(CARD, max_output=0)}, "its card has a context or a max_output below 1"),
        ({"load": Stats(slots=0)}, "stats() has no slots"),
        ({"load": Stats(slots=1, kv_pinned=-1)}, "stats() has a negative kv_pinned"),
        ({"load": Stats(slots=1, evictions=-1)}, "stats() has a negative evictions"),
        ({"load": {"slots": 1}}, "stats() returned no Stats: a dict"),
    ],
)
async def test_a_start_that_yields_nonsense_is_refused(change: dict[str, Any], problem: str) -> None:
    engine = Played()
    vars(engine).update(change)
    with pytest.raises(EngineDead) as dead:
        await running(engine)
    assert str(dead.value).startswith("mine:Engine: ") and problem in str(dead.value)


@pytest.mark.parametrize("method", ["start", "cancel", "stats", "health"])
async def test_an_error_of_the_engine_ends_the_worker(method: str) -> None:
    """By its name and cause, whichever method raises it."""
    calls: dict[str, Callable[[CheckedEngine], object]] = {
        "cancel": lambda checked: checked.cancel("r"),
        "stats": lambda checked: checked.stats(),
        "health": lambda checked: checked.health(),
    }
    engine = Played(**({method: boom} if method == "start" else {}))
    with pytest.raises(EngineDead, match=rf"mine:Engine: {method}\(\) raised KeyError: 'boom'"):
        _, checked, _ = await running(engine)
        engine._methods = {method: boom}
        calls[method](checked)


@pytest.mark.parametrize("method", ["check", "submit"])
async def test_an_error_for_one_request_fails_that_one(method: str) -> None:
    """Refused with a 500 that tells the client nothing of the inside; the engine is well, and the request is gone."""
    engine, checked, _ = await running()
    engine._methods = {method: boom}
    with pytest.raises(Refused) as refused:
        await checked.check(request("bad"))
        checked.submit(request("bad"))
    assert (refused.value.failure.code, refused.value.failure.status) == ("engine_error", 500)
    assert "boom" not in refused.value.failure.message
    assert checked.health().ok
    engine._methods = {}
    checked.submit(request("bad"))


async def test_a_refusal_and_a_death_are_passed_on() -> None:
    """As the engine words them."""
    engine, checked, _ = await running()
    refusal, death = Refused(Failure("too_long", "no", 400)), EngineDead("out of memory")
    engine._methods = {"check": Mock(side_effect=refusal), "submit": Mock(side_effect=death)}
    with pytest.raises(Refused, match="no"):
        await checked.check(request("x"))
    with pytest.raises(EngineDead, match=r"^out of memory$"):
        checked.submit(request("x"))


async def test_a_cancel_is_passed_on_for_a_running_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that has no last piece long after its cancel is a reason to end."""
    engine, checked, _ = await running(None, request("a"), request("b"))
    engine.on_step([Piece("a", finish="stop")])
    for name in ("a", "b", "nobody"):
        checked.cancel(name)
    assert engine.cancels == ["b"] and checked.health().ok
    monkeypatch.setattr(checked_engine, "CANCEL_TIMEOUT_S", -1.0)
    assert "request 'b' was cancelled" in checked.health().reason


async def test_an_engine_without_any_piece_does_not_hold_its_jobs_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own health may say what it likes; with nothing to do it may be silent."""
    engine, checked, _ = await running()
    assert checked.health().ok
    ended, idle, _ = await running()
    ended.on_step([Piece("r", finish="stop")])
    monkeypatch.setattr(checked_engine, "STALL_TIMEOUT_S", -1.0)
    assert idle.health().ok
    assert "no piece for" in checked.health().reason and engine.well.ok


async def test_a_health_that_is_none_ends_the_worker() -> None:
    engine, checked, _ = await running()
    engine.well = True
    assert checked.health().reason == "mine:Engine: health() returned a bool, no EngineHealth"


async def test_a_stop_that_raises_or_hangs_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker ends whatever the engine does."""
    _, checked, _ = await running(Played(stop=boom))
    await checked.stop()

    class Hangs(Played):
        async def stop(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(checked_engine, "STOP_TIMEOUT_S", 0.01)
    _, checked, _ = await running(Hangs())
    await asyncio.wait_for(checked.stop(), 20)


async def test_the_health_of_a_task() -> None:
    """Well until it ends; then with its error, if it has one."""

    async def breaks() -> None:
        raise OSError("no device")

    task = asyncio.create_task(breaks())
    assert task_health(task).ok
    await asyncio.wait({task})
    assert task_health(task) == EngineHealth(False, "its task ended: OSError: no device")
    cancelled = asyncio.create_task(asyncio.sleep(60))
    cancelled.cancel()
    await asyncio.wait({cancelled})
    assert task_health(cancelled) == EngineHealth(False, "its task ended")
