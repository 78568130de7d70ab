"""The in-flight budget of one server."""

from __future__ import annotations

from workers.engines.upstream.places import START, InFlightBudget


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
    budget.note_gauges(0, 0.9, 5, 0.0)
    assert not budget.has_room(5) and budget.has_room(0) and budget.limit == 40
    budget.note_gauges(3, 0.1, 40, 10.0)
    assert budget.limit == 36 and not budget.has_room(5)
    budget.note_gauges(0, 0.1, 36, 20.0)
    assert budget.has_room(5) and not budget.has_room(36)


def test_workers_share_a_budget() -> None:
    budget = InFlightBudget(100, slots=40)
    budget.share(3)
    assert budget.limit == 13
    budget.share(100)
    assert budget.limit == 1


def test_a_server_that_lets_none_wait_is_tried_with_twice_as_many() -> None:
    """Only while all that may run there does; once requests wait there, as many as ran, and one more a round."""
    budget = InFlightBudget(200)
    budget.note_gauges(0, 0.1, START - 1, 0.0)
    assert budget.limit == START, "nobody asked for more"
    budget.note_gauges(0, 0.9, START, 1.0)
    assert budget.limit == START, "its cache is nearly full"
    for second, limit in enumerate((2 * START, 4 * START, 8 * START, 200, 200), 2):
        budget.note_gauges(0, 0.1, budget.limit, second)
        assert budget.limit == limit
    budget.note_gauges(72, 0.1, 200, 20.0)
    assert budget.limit == 128 and not budget.has_room(127)
    budget.note_gauges(0, 0.1, 128, 21.0)
    assert budget.limit == 128 and budget.has_room(127)
    for _ in range(128):
        budget.note_success()
    assert budget.limit == 129


def test_a_server_in_which_others_requests_wait_keeps_half_of_ours() -> None:
    budget = InFlightBudget(200, slots=100)
    budget.note_gauges(500, 0.1, 100, 10.0)
    assert budget.limit == 50
    budget.note_gauges(0, 0.1, 50, 20.0)
    assert budget.limit == 50, "how many it runs is known"


def test_a_refusal_ends_the_search_for_more() -> None:
    budget = InFlightBudget(200)
    budget.note_busy(0.0)
    budget.note_gauges(0, 0.1, 8, 10.0)
    assert budget.limit == START // 2
