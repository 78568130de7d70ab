"""The in-flight budget of one server."""

from __future__ import annotations

from workers.engines.upstream.places.budget import START, InFlightBudget


def test_a_budget_grows_by_one_a_window_and_halves_when_the_server_is_busy() -> None:
    budget = InFlightBudget(100)
    assert budget.limit == START
    for _ in range(START):
        budget.note_success()
    assert budget.limit == START + 1
    budget.note_busy(10.0)
    assert budget.limit == (START + 1) // 2
    budget.note_busy(10.5)
    assert budget.limit == (START + 1) // 2, "one cut for what was sent before it"


def test_a_budget_follows_the_servers_slots_and_the_cap() -> None:
    assert InFlightBudget(100, slots=4).limit == 4
    assert InFlightBudget(3, slots=40).limit == 3


def test_waiting_requests_and_a_full_cache_hold_a_budget_back() -> None:
    budget = InFlightBudget(100, slots=40)
    budget.note_gauges(0, 0.9, 0.0)
    assert not budget.has_room(5) and budget.has_room(0) and budget.limit == 40
    budget.note_gauges(3, 0.1, 10.0)
    assert budget.limit == 36 and not budget.has_room(5)
    budget.note_gauges(0, 0.1, 20.0)
    assert budget.has_room(5) and not budget.has_room(36)


def test_workers_share_a_budget() -> None:
    budget = InFlightBudget(100, slots=40)
    budget.share(3)
    assert budget.limit == 13
    budget.share(100)
    assert budget.limit == 1
