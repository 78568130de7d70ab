"""Who leaves: chosen with care, drained, and only then taken away."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.pools.base import LeavingStep, Member, next_step


def member(name: str, running: int = 0, *, ready: bool = True, drained: bool = False, since: float = 0.0) -> Member:
    return Member(name, ready, since, running, drained)


A, NEW = member("a"), member("new", ready=False)
LIGHT = member("light", 2)


@pytest.mark.parametrize(("pods", "want", "leaving", "step"), [
    ([A, member("b")], 2, (), LeavingStep((), 2)),
    ([A], 3, (), LeavingStep((), 3)),
    # What is not ready goes first, then who has the fewest jobs, then the youngest; the scale stays meanwhile.
    ([member("busy", 9), LIGHT, NEW], 2, (), LeavingStep(("new",), 3)),
    ([member("busy", 9), LIGHT, NEW], 1, (), LeavingStep(("new", "light"), 3)),
    ([member("old", 1, since=1.0), member("young", 1, since=2.0)], 1, (), LeavingStep(("young",), 2)),
    # A drained one is made the cheapest and the scale lowered; while others start, that would take one of them.
    ([member("a", 3), member("b", drained=True), LIGHT], 1, ("b", "light"),
     LeavingStep(("b", "light"), 2, cheapest=("b",))),
    ([A, NEW, member("b", drained=True)], 2, ("b",), LeavingStep(("b",), 2, remove=("b",))),
    # One that has drained cannot come back when more are wanted again: another takes its place.
    ([A, member("b", drained=True)], 2, ("b",), LeavingStep(("b",), 2, remove=("b",))),
    ([A], 1, ("b",), LeavingStep((), 1)),
])  # fmt: skip
def test_who_leaves(pods: list[Member], want: int, leaving: tuple[str, ...], step: LeavingStep) -> None:
    assert next_step(pods, want, leaving) == step


def test_a_cordoned_one_is_replaced_before_it_goes() -> None:
    """One more than wanted for as long as it drains."""
    assert next_step([A, member("slow", 4)], 2, (), ("slow",)) == LeavingStep(("slow",), 3)
    pods = [A, member("slow", drained=True), member("new")]
    assert next_step(pods, 2, ("slow",)) == LeavingStep(("slow",), 2, cheapest=("slow",))


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
