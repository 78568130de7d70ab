"""The protocol proven on its model: every state of it is sound, and each rule is shown to be needed by its absence."""

from __future__ import annotations

import pytest
import rollback_model
from protocol_model import Protocol, Rule
from protocol_search import Found, Search

pytestmark = pytest.mark.slow

LESSER = {
    "I1": [{Rule.DROP_NOT_FIRST}, {Rule.CLAIM_NOTED}, {Rule.LEAVE_WAITS}],
    "I2": [{Rule.FINISH_ONCE}, {Rule.CANCEL_ENDS}],
    "I3": [{Rule.APPEND_FENCED}, {Rule.APPEND_NUMBERED}, {Rule.STRAYS_ONLY}, {Rule.RELEASE_OF_ATTEMPT}],
    "I4": [{Rule.FINISH_FENCED, Rule.FINISH_OWNED}],
    "I7": [{Rule.DROP_NOT_LAST}, {Rule.CLAIM_TAKES}],
    "quarantine": [{Rule.RELEASE_QUARANTINED}],
}
"""The invariant that falls first when these rules are missing."""


def search(
    workers: int,
    jobs: int,
    *,
    tokens: int = 2,
    attempts: int = 2,
    without: set[Rule] | None = None,
    delays: bool = False,
    interruptions: bool = True,
) -> Found:
    return Search(Protocol(tokens, attempts, frozenset(without or ()), delays, interruptions), workers, jobs).run()


@pytest.mark.parametrize(
    ("workers", "jobs", "tokens", "attempts", "interruptions"),
    [(3, 2, 2, 2, False), (2, 2, 2, 2, True), (3, 1, 3, 3, True)],
    ids=[
        "3 workers, 2 requests, 2 tokens, given up after 2 losses",
        "2 workers, 2 requests, 2 tokens, 2 losses, claims interrupted",
        "3 workers, 1 request, 3 tokens, 3 losses, claims interrupted",
    ],
)
def test_no_state_of_the_protocol_breaks_an_invariant(
    workers: int, jobs: int, tokens: int, attempts: int, interruptions: bool
) -> None:
    """With crashes, zombies, lost answers, repetitions, cancels and drains at any point, all of them hold."""
    found = search(workers, jobs, tokens=tokens, attempts=attempts, interruptions=interruptions)
    print(f"{found.states} states, {found.steps} steps")
    assert found.violation is None, str(found.violation)
    assert found.states > 5_000 and found.ends == {"completed", "cancelled", "failed"}


def test_a_hand_back_may_arrive_at_any_time() -> None:
    """Also when its sender has repeated it, and has claimed the same job again."""
    found = search(2, 1, delays=True)
    assert found.violation is None, str(found.violation)
    assert found.states > search(2, 1).states and found.ends == {"completed", "cancelled", "failed"}


@pytest.mark.parametrize(
    ("invariant", "missing"),
    [(invariant, missing) for invariant, lesser in LESSER.items() for missing in lesser],
    ids=lambda value: value if isinstance(value, str) else " + ".join(sorted(rule.name for rule in value)),
)
def test_a_protocol_without_a_rule_breaks_an_invariant(invariant: str, missing: set[Rule]) -> None:
    """Whatever is left out, the search finds what goes wrong, and the shortest way there."""
    late = Rule.RELEASE_OF_ATTEMPT in missing
    found = search(2, 1 if late else 2, without=missing, delays=late)
    print(found.violation)
    assert found.violation is not None and found.violation.invariant == invariant
    assert 1 <= len(found.violation.trace) <= 9


def test_every_rule_is_shown_to_be_needed() -> None:
    """No rule of the model goes without a protocol that lacks it."""
    assert {rule for lesser in LESSER.values() for missing in lesser for rule in missing} == set(Rule)


@pytest.mark.parametrize("spare", [Rule.FINISH_FENCED, Rule.FINISH_OWNED], ids=lambda rule: rule.name)
def test_a_finish_is_guarded_twice(spare: Rule) -> None:
    """Fence and ownership each keep strangers from ending a job; only without both can one be ended wrongly."""
    assert search(2, 2, without={spare}, interruptions=False).violation is None


def test_the_shortest_way_to_a_lost_job_is_told_in_words() -> None:
    """A trace names each step, so that it can be replayed by hand."""
    violation = search(2, 1, without={Rule.LEAVE_WAITS}).violation
    assert str(violation).splitlines() == [
        "I1 is broken:",
        "  1. w0's claim of r0 is interrupted",
        "  2. w0 begins to drain",
        "  3. w0 leaves",
    ]


@pytest.mark.parametrize("begins", [2, 3])
def test_a_store_that_goes_back_never_splices(begins: int) -> None:
    """At any point the store may become what it was: a reader shows one run's text, or is told to begin anew."""
    found = rollback_model.search(rollback_model.Model(tokens=2, begins=begins))
    print(f"{found.states} states, {found.resets} resets")
    assert not found.violation, "\n".join(found.trace)
    assert found.states > 10_000 and found.resets > 1_000


MISSING: list[frozenset[rollback_model.Rule]] = [
    *(frozenset({rule}) for rule in rollback_model.Rule),
    frozenset({rollback_model.Rule.CURSOR, rollback_model.Rule.TERMINAL}),
    rollback_model.TODAY,
]


@pytest.mark.parametrize("missing", MISSING, ids=lambda missing: " + ".join(sorted(rule.name for rule in missing)))
def test_a_reader_without_a_rule_of_authorship_splices(missing: frozenset[rollback_model.Rule]) -> None:
    """Each rule alone, and among the others the older state: authors were workers, compared only in rows that a reader
    had already."""
    found = rollback_model.search(rollback_model.Model(tokens=3, without=missing))
    print("\n".join(found.trace))
    assert found.violation == "spliced" and "the store goes back" in found.trace
