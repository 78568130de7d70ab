"""Who leaves: chosen with care, drained, and only then taken away."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.pools.base import LeavingStep, Member, next_step


def member(name: str, running: int = 0, *, ready: bool = True, drained: bool = False, since: float = 0.0) -> Member:
    return Member(name, ready, since, running, drained)


def test_enough_is_left_alone() -> None:
    """As many as wanted: nobody leaves."""
    assert next_step([member("a"), member("b")], 2, ()) == LeavingStep((), 2)


def test_more_are_asked_for_at_once() -> None:
    assert next_step([member("a")], 3, ()) == LeavingStep((), 3)


def test_the_one_with_the_least_work_leaves_and_is_waited_for() -> None:
    """What is not ready goes first, then who has the fewest jobs, then the youngest; the scale stays meanwhile."""
    pods = [member("busy", 9), member("light", 2), member("starting", ready=False)]
    assert next_step(pods, 2, ()).leaving == ("starting",)
    assert next_step(pods, 1, ()) == LeavingStep(("starting", "light"), 3)
    twins = [member("old", 1, since=1.0), member("young", 1, since=2.0)]
    assert next_step(twins, 1, ()).leaving == ("young",)


def test_a_drained_one_is_made_the_cheapest_and_the_scale_lowered() -> None:
    pods = [member("a", 3), member("b", 0, drained=True), member("c", 1)]
    assert next_step(pods, 1, ("b", "c")) == LeavingStep(("b", "c"), 2, cheapest=("b",))


def test_a_drained_one_is_removed_by_name_while_others_start() -> None:
    """A lowering would take the starting one instead."""
    pods = [member("a"), member("new", ready=False), member("b", drained=True)]
    assert next_step(pods, 2, ("b",)) == LeavingStep(("b",), 2, remove=("b",))


def test_a_drained_one_makes_room_when_more_are_wanted_again() -> None:
    """It cannot come back: it is removed and another takes its place."""
    assert next_step([member("a"), member("b", drained=True)], 2, ("b",)) == LeavingStep(("b",), 2, remove=("b",))


def test_a_cordoned_one_is_replaced_before_it_goes() -> None:
    """One more than wanted for as long as it drains."""
    pods = [member("a"), member("slow", 4)]
    assert next_step(pods, 2, (), ("slow",)) == LeavingStep(("slow",), 3)
    pods = [member("a"), member("slow", drained=True), member("new")]
    assert next_step(pods, 2, ("slow",)) == LeavingStep(("slow",), 2, cheapest=("slow",))


def test_whoever_is_gone_is_forgotten() -> None:
    assert next_step([member("a")], 1, ("b",)) == LeavingStep((), 1)


MEMBERS = st.lists(
    st.builds(Member, st.uuids().map(str), st.booleans(), st.floats(0, 9), st.integers(0, 3), st.booleans()), max_size=9
)


@given(MEMBERS, st.integers(0, 9), st.data())
def test_nobody_with_work_is_ever_taken(members: list[Member], want: int, data: st.DataObject) -> None:
    """Only chosen and drained ones are made cheap or removed; the scale never falls below who stays or still works."""
    names = [each.name for each in members]
    leaving = data.draw(st.sets(st.sampled_from(names))) if names else set()
    step = next_step(members, want, leaving)
    by_name = {each.name: each for each in members}
    taken = {*step.cheapest, *step.remove}
    assert taken <= set(step.leaving) and all(by_name[name].drained for name in taken)
    assert leaving <= set(step.leaving)
    staying = [each for each in members if each.name not in step.leaving]
    working = [name for name in step.leaving if not by_name[name].drained]
    assert len(staying) <= want
    assert step.replicas == want + len(working)
    if step.cheapest:
        assert len(members) - step.replicas == len(step.cheapest), "a lowering takes just those"
