"""The judge: invariants I1-I8 held against a history. Pure: it sees what clients saw and knows what the model must say.

| invariant | violations                                                                          |
|-----------|-------------------------------------------------------------------------------------|
| I1        | `lost`: accepted, and no final state; `untold`: a reader was never told the end      |
| I2        | `two_ends`: two different final states; `wrong_end`: one that nobody asked for        |
| I3        | `doubled`, `gap`: a token twice or missing at a reader; `numbering`: a wrong event id |
| I4        | `not_prefix`: what was shown is not what is stored; `reset`: one nobody had a reason for |
| I5        | `two_jobs`: one idempotency key, several jobs                                         |
| I6        | `foreign`: text that is not of this request                                           |
| I7        | `leak`: something is still held after everything has ended                            |
| I8        | `accounting`: the tokens counted are not the tokens given                             |
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from bench.chaos.history import Event
from streaming.messages import Turn
from workers.sim import prompt_text, token_text

FINAL = ("completed", "failed", "cancelled", "expired")
TOKEN = re.compile(r" ?[a-z]+[0-9]+")

LOST = frozenset({"lost", "untold", "gap", "not_prefix"})
DOUBLED = frozenset({"doubled", "two_jobs", "numbering"})
WRONG_END = frozenset({"two_ends", "wrong_end"})


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise."""

    kind: str
    who: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.who}): {self.detail}"


@dataclass(slots=True)
class Life:
    """Everything that happened to one request, as its client saw it."""

    ask: Event
    job: str = ""
    events: list[Event] = field(default_factory=list)

    @property
    def expected(self) -> list[str]:
        """What the model must say, token by token."""
        prompt = prompt_text((Turn("user", self.ask["prompt"]),))
        return [token_text(prompt, index) for index in range(self.ask["tokens"])]

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event["event"] in kinds]


def check(events: Sequence[Event], *, resets_allowed: bool = False) -> list[Violation]:
    """Every violation in a history."""
    lives = lives_of(events)
    finals = _finals(events)
    found = [violation for life in lives.values() for violation in _check_life(life, finals, resets_allowed)]
    found += _keys(lives.values())
    found += [
        Violation("leak", event["what"], f"{event['number']} left after quiet")
        for event in events
        if event["event"] == "quiet" and event["number"]
    ]
    return found


def lives_of(events: Iterable[Event]) -> dict[int, Life]:
    """Requests by number."""
    lives: dict[int, Life] = {}
    for event in events:
        if event["event"] == "ask":
            lives[event["req"]] = Life(event)
        elif "req" in event:
            life = lives[event["req"]]
            life.events.append(event)
            if event["event"] == "accepted":
                life.job = life.job or event["job"]
    return lives


def _finals(events: Iterable[Event]) -> dict[str, list[Event]]:
    finals: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event["event"] in ("final", "cancel"):
            finals[event["job"]].append(event)
    return finals


def _check_life(life: Life, finals: dict[str, list[Event]], resets_allowed: bool) -> Iterator[Violation]:
    if life.job:
        told = finals.get(life.job, [])
        yield from _end(life, told)
        yield from _stored(life, [event for event in told if event["event"] == "final"])
    yield from _shown(life, resets_allowed)


def _end(life: Life, told: Sequence[Event]) -> Iterator[Violation]:
    """I1 and I2."""
    who = _name(life)
    reads = [event for event in told if event["event"] == "final"]
    if not reads:
        yield Violation("lost", who, "accepted, and never read again")
    for read in reads:
        if read["state"] not in FINAL:
            yield Violation("lost", who, f"accepted, and in the end {read['state'] or read['status']}")
    states = [event["state"] for event in (*life.of("end"), *reads) if event["state"] in FINAL]
    # The answer to a cancel may come before the end: only a final state in it is a word about the end.
    states += [event["state"] for event in told if event["event"] == "cancel" and event["state"] in FINAL]
    if len(set(states)) > 1:
        yield Violation("two_ends", who, f"told {sorted(set(states))}")
    for state in sorted(set(states) - set(life.ask["may"])):
        yield Violation("wrong_end", who, f"{state}, expected one of {list(life.ask['may'])}")
    for gave_up in life.of("gave_up"):
        yield Violation("untold", who, gave_up["why"])
    for read in reads:
        if len(read["ends"]) != 1 and read["state"] in FINAL:
            yield Violation("two_ends", who, f"its events end {len(read['ends'])} times: {read['ends']}")


def _stored(life: Life, reads: Sequence[Event]) -> Iterator[Violation]:
    """What is kept: exactly what the model says, counted exactly."""
    who, expected = _name(life), life.expected
    for read in reads:
        replay = read["replay"]
        yield from _tokens(replay, expected, f"{who}, replay")
        if read["state"] == "completed":
            whole = "".join(expected)
            if read["text"] != whole or "".join(replay) != whole:
                yield Violation("not_prefix", who, "the stored result is not what the model says")
            if read["tokens"] != len(expected):
                yield Violation("accounting", who, f"{read['tokens']} tokens counted, {len(expected)} given")


def _shown(life: Life, resets_allowed: bool) -> Iterator[Violation]:
    """I3, I4 and I6: every token a reader was shown, across all its connections."""
    who, expected = _name(life), life.expected
    shown: list[str] = []
    for event in life.of("token", "reset", "end"):
        match event["event"]:
            case "token":
                shown.append(event["text"])
                if event["seq"] is not None and event["seq"] != len(shown):
                    yield Violation("numbering", who, f"delta {len(shown)} has the id of {event['seq']}")
            case "reset":
                yield from _tokens(shown, expected, who)
                shown = []
                if not resets_allowed:
                    yield Violation("reset", who, "stream.reset without a loss of data")
            case "end" if event["state"] == "completed" and life.ask["reads"] and len(_split(shown)) < len(expected):
                yield Violation("gap", who, f"completed after {len(_split(shown))} of {len(expected)} tokens")
    yield from _tokens(shown, expected, who)


def _tokens(texts: Sequence[str], expected: Sequence[str], who: str) -> Iterator[Violation]:
    """Each token once and in order, to the byte; after a fault the count goes on behind it."""
    places = {text: index for index, text in enumerate(expected)}
    at = 0
    for text in _split(texts):
        index = places.get(text)
        if index is None:
            yield Violation("foreign", who, f"{text!r} where {''.join(expected[at : at + 1])!r} was due")
        elif index < at:
            yield Violation("doubled", who, f"token {index} again, after token {at - 1}")
        else:
            if index > at:
                yield Violation("gap", who, f"token {index} after token {at - 1}")
            at = index + 1


def _split(texts: Sequence[str]) -> list[str]:
    """Texts as tokens; what is no token stays as it is, and is foreign."""
    found: list[str] = []
    for text in texts:
        tokens = TOKEN.findall(text)
        found += tokens if "".join(tokens) == text else [text]
    return found


def _keys(lives: Iterable[Life]) -> Iterator[Violation]:
    """I5."""
    jobs: dict[str, set[str]] = defaultdict(set)
    for life in lives:
        for event in life.of("accepted"):
            jobs[life.ask["key"] or f"request {life.ask['req']}"].add(event["job"])
    for key, ids in jobs.items():
        if len(ids) > 1:
            yield Violation("two_jobs", key, f"{len(ids)} jobs: {sorted(ids)}")


def _name(life: Life) -> str:
    return f"request {life.ask['req']}, {life.job or 'never accepted'}"
