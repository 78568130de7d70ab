"""The judge: invariants I1-I8 held against a history, and every answer against the row's budget.

Pure: it sees what clients saw, and knows from `oracle` what the simulated engine says.

| invariant | violations                                                                            |
|-----------|---------------------------------------------------------------------------------------|
| I1        | `lost`: accepted, and no final state; `untold`: a reader was never told the end        |
| I2        | `two_ends`: two different final states; `wrong_end`: one that nobody asked for         |
| I3        | `doubled`, `gap`: a token twice or missing at a reader; `numbering`: event ids that do not rise one by one, or are not those of the job's log; a log that does not tell queued, started, deltas and end in this order |
| I4        | `spliced`: what was shown is not what is stored, or has parts of two texts; `not_prefix`: the stored result is not what the engine says; `reset`: one without a loss of data, or two for one loss |
| I5        | `two_jobs`: one idempotency key of one tenant, several jobs                            |
| I6        | `foreign`: text that is not of this request; `crossed`: a job that another tenant could read |
| I7        | `leak`: something is still held after everything has ended, or nothing says what is   |
| I8        | `accounting`: the tokens counted are not the tokens given                              |
| answers   | `error`: an answer that is no documented refusal; `refused`, `unanswered`, `broken`: more than the row allows, and a client that never got an answer; `unserved`: no request came to the end it should |

A `rollback` in the history says that the store lost what it was told from `since` on: only such writes may be gone.

A log of events is `queued`, then for each run `started` and its deltas, then the end, with nothing behind it.
`stream.reset` begins another log.
"""  # noqa: E501 - a table

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TypeAlias

from bench.chaos import oracle
from bench.chaos.asks import REFUSALS, Budget
from bench.chaos.history import Event, Life, Losses, Violation, lives_of, of_kind
from bench.chaos.oracle import Token

FINAL = ("completed", "failed", "cancelled", "expired")
CUT_SHORT = ("failed", "cancelled", "expired")
"""Final states that a job may be brought to without a word of its worker."""
RESET = "stream.reset"
EVENT_ID = re.compile(r"(\d+):(\d+)(?::(.*))?")
"""The epoch, the number and the run in an event id. Of the run only that it is another one means something."""

Log: TypeAlias = list[list[str]]
"""Name and id of each event."""


def numbering(life: Life, reads: Sequence[Event], losses: Losses) -> Iterator[Violation]:
    """The events that a reader was told, over all its connections, are the job's log: each once, none left out."""
    told, since_reset = _told_log(life)
    for log in told:
        yield from _in_order(life.name, log)
        yield from _shaped(life.name, log, losses)
    for read in reads:
        who = f"{life.name}, replay"
        yield from _in_order(who, read["log"])
        yield from _shaped(who, read["log"], losses)
        yield from _whole(who, read)
    if losses.hold(life.first("end")):
        return  # as with what was shown
    for read in reads:
        # Since a loss every log of the partition has a new epoch, also those that lost nothing.
        epochs = not losses.between(life.ask["t"], read["t"])
        stored = _compared(read["log"], epochs=epochs)
        for log in (_compared(each, epochs=epochs) for each in told[since_reset:]):
            if read["state"] == "completed" and log != stored[: len(log)]:
                at = next(n for n, pair in enumerate(zip_longest(log, stored)) if pair[0] != pair[1])
                here, there = (each[at] if at < len(each) else "nothing" for each in (log, stored))
                yield Violation("numbering", life.name, f"told {here} where the log has {there}")


def _told_log(life: Life) -> tuple[list[Log], int]:
    """Names and ids of what a reader was told, anew each time it read from the start, and where the part begins that
    it was told after the last reset."""
    told: list[Log] = [[]]
    since_reset = 0
    for event in life.of("token", "event", "reset", "resume"):
        match event["event"]:
            case "token" if event["id"]:
                told[-1].append(["delta", event["id"]])
            case "event":
                told[-1].append([event["name"], event["id"]])
            case "resume" if not event["after"]:
                told.append([])
            case "reset":
                since_reset = len(told) - 1
    return told, since_reset


def _since_reset(log: Log) -> Log:
    """What stands in a log behind its last stream.reset."""
    resets = [at for at, (name, _) in enumerate(log) if name == RESET]
    return log[resets[-1] + 1 :] if resets else log


def _compared(log: Log, *, epochs: bool) -> Log:
    """What stands in a log behind its last stream.reset; its ids with or without their epochs."""
    newest = _since_reset(log)
    return newest if epochs else [[name, event_id.partition(":")[2]] for name, event_id in newest]


def _in_order(who: str, log: Log) -> Iterator[Violation]:
    """Ids count from 1, within one epoch until `stream.reset` names another. Before an end that no worker wrote there
    may be a hole: what its worker still logged may be trimmed."""
    epoch, number = -1, 0
    for name, event_id in log:
        found = EVENT_ID.fullmatch(event_id)
        if found is None:
            yield Violation("numbering", who, f"{name} with the id {event_id!r}")
            continue
        here = int(found[1]), int(found[2])
        if name == RESET:
            if here[0] == epoch:
                yield Violation("numbering", who, f"stream.reset into the same epoch, {event_id}")
        elif epoch not in (-1, here[0]):
            yield Violation("numbering", who, f"{name} {event_id} after epoch {epoch}, without stream.reset")
        elif here[1] <= number or (here[1] > number + 1 and name not in CUT_SHORT):
            yield Violation("numbering", who, f"{name} {event_id} after number {number}")
        epoch, number = here


def _shaped(who: str, log: Log, losses: Losses) -> Iterator[Violation]:
    """`queued` comes first, the deltas of a run behind its `started`, and nothing behind the end. Of a job that the
    store lost, its end may be all that is told."""
    queued, run, over = False, "", ""
    for name, event_id in log:
        if over:
            yield Violation("numbering", who, f"{name} {event_id} behind the end, {over}")
        elif name == RESET:
            queued, run = False, ""
        elif name == "queued" and not queued:
            queued = True
        elif name == "queued" or not (queued or (losses.spans and name in FINAL)):
            yield Violation("numbering", who, f"{name} {event_id} {'again' if queued else 'before queued'}")
        elif name == "started":
            run = _run_of(event_id)
        elif name == "delta" and _run_of(event_id) != run:
            yield Violation("numbering", who, f"delta {event_id} of a run that was not told started")
        over = name if name in FINAL else over


def _run_of(event_id: str) -> str:
    found = EVENT_ID.fullmatch(event_id)
    return found[3] or "" if found else ""


def _whole(who: str, read: Event) -> Iterator[Violation]:
    """The log of a job that has ended says its end, and has a delta for each one of the replay."""
    if read["state"] not in FINAL:
        return
    log = _since_reset(read["log"])
    deltas = sum(name == "delta" for name, _ in log)
    if deltas != len(read["replay"]):
        yield Violation("numbering", who, f"{deltas} deltas in the log, {len(read['replay'])} were read")
    if not log or log[-1][0] != read["state"]:
        yield Violation("numbering", who, f"{read['state']}, and the log ends with {log[-1:]}")


FORGOTTEN = "forgotten"
"""What a client was told of a job that the store does not know any more."""
GONE = (404, 410)
"""The store does not know the job, or its result any more: whether that may be is judged from when it was accepted."""
CLOCK_TOLERANCE_MS = 20
"""Limits go by the store's clock, and by whole milliseconds."""
RETRY_AFTER, MAX_RETRY_S = re.compile(r"[1-9][0-9]{0,2}"), 120
"""Whole seconds, and the most that the documentation allows."""
BY_NO_WORKER = ":-"
"""What the id of an event ends with that no run of a worker wrote."""

LOST = frozenset({"lost", "untold", "gap", "not_prefix"})
DOUBLED = frozenset({"doubled", "two_jobs", "numbering"})
SPLICED = frozenset({"spliced", "foreign", "crossed"})
WRONG_END = frozenset({"two_ends", "wrong_end"})
WRONG_ANSWER = frozenset({"error", "refused", "unanswered", "broken", "unserved"})


def check(
    events: Sequence[Event],
    *,
    resets_allowed: bool = False,
    budget: Budget | None = None,
    clusters: int = 0,
) -> list[Violation]:
    """Every violation in a history. Without a budget only wrong answers count, not how many were refused. Each of the
    clusters must have been quiet in the end."""
    lives = lives_of(events)
    finals, losses = _finals(events), Losses.of(events)
    found = [violation for life in lives.values() for violation in _check_life(life, finals, losses, resets_allowed)]
    found += _keys(lives.values(), losses)
    found += _answers(events, lives, budget)
    return [*found, *_leaks(of_kind(events, "quiet"), clusters)]


def _leaks(quiet: Sequence[Event], clusters: int) -> Iterator[Violation]:
    """I7. A cluster that never said what it still held shows nothing."""
    for event in quiet:
        if event["number"]:
            yield Violation("leak", event["what"], f"{event['number']} left after quiet")
    said = Counter(event["what"] for event in quiet)
    if clusters and min(said.values(), default=0) < clusters:
        yield Violation(
            "leak", "all clusters", f"{clusters} clusters, and in the end they said what is held: {dict(said)}"
        )


def _finals(events: Iterable[Event]) -> dict[str, list[Event]]:
    finals: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event["event"] in ("final", "cancel", "crossed"):
            finals[event["job"]].append(event)
    return finals


# --- every answer -----------------------------------------------------------------------------------------------------


def _answers(events: Sequence[Event], lives: dict[int, Life], budget: Budget | None) -> Iterator[Violation]:
    """Refusals must be documented ones and few; a history in which nobody was served shows nothing."""
    for number, trial in enumerate(trials_of(events), 1):
        yield from _documented(trial, budget)
        yield from _within(trial, budget, f"all clients, trial {number}")
    for event in of_kind(events, "error"):
        yield Violation("error", f"request {event['req']}", f"its stream was told {event['code']!r}")
    if budget is not None:
        yield from _explained(events, budget)
    if lives and not any(_served(life, events) for life in lives.values()):
        yield Violation("unserved", "all clients", f"none of {len(lives)} requests came to an end it may meet")


def trials_of(events: Sequence[Event]) -> list[Sequence[Event]]:
    """The history in pieces: each from its fault to the next one, the first from the beginning."""
    faults = [number for number, event in enumerate(events) if event["event"] == "fault"]
    bounds = [0, *faults[1:], len(events)]
    return [events[start:end] for start, end in itertools.pairwise(bounds)]


def counts_of(trial: Sequence[Event]) -> dict[str, int]:
    """How many answers of a trial were documented refusals, were missing, and were broken off."""
    return {
        "refused": sum((e["status"], e["code"]) in REFUSALS for e in of_kind(trial, "refused", "answered")),
        "unanswered": len(of_kind(trial, "unknown")),
        "broken": len(of_kind(trial, "cut")),
    }


def _documented(trial: Sequence[Event], budget: Budget | None) -> Iterator[Violation]:
    """Every answer that is no success is a documented refusal, or one that the row asks for."""
    others = {(other.status, other.code): other.most for other in (budget.others if budget else ())}
    for event in of_kind(trial, "refused", "answered"):
        status, code, who = event["status"], event["code"], f"request {event.get('req', '-')}"
        if (status, code) in others:
            others[status, code] -= 1
            if others[status, code] < 0:
                yield Violation("error", who, f"answered {status} {code!r} more often than the row asks for")
            continue
        if (status, code) not in REFUSALS:
            yield Violation("error", who, f"answered {status} {code!r}")
        elif not RETRY_AFTER.fullmatch(event["retry_after"] or "") or int(event["retry_after"]) > MAX_RETRY_S:
            after = event["retry_after"]
            yield Violation("error", who, f"answered {status} {code!r} with Retry-After {after!r}")


def _within(trial: Sequence[Event], budget: Budget | None, who: str) -> Iterator[Violation]:
    """No trial may have more of a kind than the budget says, whatever the others had."""
    for kind, count in counts_of(trial).items() if budget is not None else ():
        most = getattr(budget, kind)
        if count > most:
            yield Violation(kind, who, f"{count}, allowed: {most:g} ({budget.why if budget else ''})")


def _explained(events: Sequence[Event], budget: Budget) -> Iterator[Violation]:
    """A fault explains refusals of its own kind only, however few."""
    refusals = Counter((e["status"], e["code"]) for e in of_kind(events, "refused", "answered"))
    for (status, code), count in refusals.items():
        if (status, code) in REFUSALS and budget.codes is not None and code not in budget.codes:
            yield Violation("refused", "all clients", f"{count} times {code!r}, allowed: {budget.codes} ({budget.why})")


def _served(life: Life, events: Sequence[Event]) -> bool:
    ends = [*life.of("end"), *(e for e in events if e["event"] == "final" and life.job and e["job"] == life.job)]
    return any(event["state"] in life.ask["may"] for event in ends)


# --- one request ------------------------------------------------------------------------------------------------------


def _check_life(
    life: Life, finals: dict[str, list[Event]], losses: Losses, resets_allowed: bool
) -> Iterator[Violation]:
    reads: list[Event] = []
    if life.job:
        told = finals.get(life.job, [])
        reads = [event for event in told if event["event"] == "final"]
        yield from _end(life, told, losses)
        yield from _stored(life, reads)
        yield from _told_anew(life, reads, losses, resets_allowed)
        for event in told:
            if event["event"] == "crossed":
                yield Violation("crossed", life.name, f"another tenant read it: {event['status']} at {event['path']}")
    yield from _answered(life)
    yield from _shown(life, reads, losses, resets_allowed)
    yield from numbering(life, reads, losses)


def _answered(life: Life) -> Iterator[Violation]:
    """What became of every request is told: an answer, that there was none, or that its client left; and of every job
    that is read, how its reading ended. A client that gave up has waited longer than any fault lasts."""
    if life.job:
        if life.ask["reads"] and not life.of("end", "left", "gave_up"):
            yield Violation("untold", life.name, "its reader was told no end, and nothing says why")
        return
    for gave_up in life.of("gave_up"):
        yield Violation("unanswered", life.name, gave_up["why"])
    if not life.of("refused", "unknown", "gave_up", "left"):
        yield Violation("unanswered", life.name, "asked, and nothing says what became of it")


def _end(life: Life, told: Sequence[Event], losses: Losses) -> Iterator[Violation]:
    """I1 and I2."""
    who, reads = life.name, [event for event in told if event["event"] == "final"]
    forgettable = losses.hold(life.first("accepted"))
    if not reads:
        yield Violation("lost", who, "accepted, and never read again")
    for read in reads:
        gone = read["status"] in GONE and forgettable
        if read["state"] not in FINAL and not gone:
            yield Violation("lost", who, f"accepted, and in the end {read['state'] or read['status']}")
    # An end that the store forgot again may be followed by another one; any other may not.
    ends = [event for event in life.of("end") if not losses.hold(event["t"])]
    states = [event["state"] for event in (*ends, *reads) if event["state"] in FINAL]
    # The answer to a cancel may come before the end: only a final state in it is a word about the end.
    states += [event["state"] for event in told if event["event"] == "cancel" and event["state"] in FINAL]
    if len(told_ends := life.of("end")) > 1:
        yield Violation("two_ends", who, f"one reader was told {len(told_ends)} ends")
    if len(set(states)) > 1:
        yield Violation("two_ends", who, f"told {sorted(set(states))}")
    for state in sorted(set(states) - set(life.ask["may"])):
        yield Violation("wrong_end", who, f"{state}, expected one of {list(life.ask['may'])}")
    if not forgettable and any(event["state"] == FORGOTTEN for event in life.of("end")):
        yield Violation("lost", who, "told that the store does not know the job")
    if not forgettable and any(event["event"] == "cancel" and event["status"] in GONE for event in told):
        yield Violation("lost", who, "a cancel was answered that the store does not know the job")
    for gave_up in life.of("gave_up"):
        yield Violation("untold", who, gave_up["why"])
    yield from _same_end(who, ends, reads)
    yield from _finished(who, [*life.of("end"), *reads])
    yield from _in_time(life, ends)
    for read in reads:
        if len(read["ends"]) != 1 and read["state"] in FINAL:
            yield Violation("two_ends", who, f"its events end {len(read['ends'])} times: {read['ends']}")


def _same_end(who: str, ends: Sequence[Event], reads: Sequence[Event]) -> Iterator[Violation]:
    """Why a job ended, and what it counts, is the same in what its reader was told and in its record. An error in a
    chat stream counts nothing."""
    for end, read in ((end, read) for end in ends for read in reads if end["state"] == read["state"]):
        if end["code"] != read["code"]:
            yield Violation("wrong_end", who, f"{end['state']}, told as {end['code']!r} and kept as {read['code']!r}")
        if end["usage"] and end["usage"] != read["usage"]:
            yield Violation("accounting", who, f"{end['usage']} tokens told, {read['usage']} kept")


def _finished(who: str, told: Sequence[Event]) -> Iterator[Violation]:
    """A text that completed ended because it was as long as asked for: the engine never ends one by itself."""
    for each in told:
        if each["state"] == "completed" and each["finish"] != ["length"]:
            yield Violation("wrong_end", who, f"completed, with the finish reasons {each['finish']}")


def _in_time(life: Life, ends: Sequence[Event]) -> Iterator[Violation]:
    """A job expires by a limit that was asked for, and not before it is over."""
    soonest = min(life.ask.get("limits", {}).values(), default=float("inf"))
    for end in ends:
        spent = 1000 * (end["t"] - life.ask["t"])
        if end["state"] == "expired" and spent < soonest - CLOCK_TOLERANCE_MS:
            yield Violation("wrong_end", life.name, f"expired after {spent:.0f} ms, its limit is {soonest} ms")


def _stored(life: Life, reads: Sequence[Event]) -> Iterator[Violation]:
    """What is kept: exactly what the engine says, by one author after the other, counted exactly."""
    who, length = life.name, life.ask["tokens"]
    for read in reads:
        replay = list(oracle.tokens(read["replay"]))
        yield from _sequence(life, replay, "replay")
        if read["state"] == "completed":
            numbers = [token.number for token in oracle.tokens([read["text"]])]
            if numbers != list(range(length)) or "".join(read["replay"]) != read["text"]:
                yield Violation("not_prefix", who, "the stored result is not what the engine says")
        elif read["text"] not in ("", "".join(read["replay"])):
            yield Violation("not_prefix", who, f"{read['state']}, and its result is not what its log says")
        yield from _sequence(life, list(oracle.tokens([read["text"]])), "result")
        yield from _counted(life, read["state"], read["usage"], "job")
    for end in life.of("end"):
        yield from _counted(life, end["state"], end["usage"], "stream")


def _counted(life: Life, state: str, usage: Sequence[int], what: str) -> Iterator[Violation]:
    """I8. A completed job's tokens are counted exactly. Of any other what was computed is counted, or nothing."""
    right = [oracle.prompt_tokens(life.prompt), life.ask["tokens"]]
    if list(usage) == right or state not in FINAL:
        return
    if state == "completed" or (any(usage) and (usage[0] not in (0, right[0]) or usage[1] > right[1])):
        yield Violation("accounting", f"{life.name}, {what}", f"{list(usage)} tokens counted, {right} given")


def _told_anew(life: Life, reads: Sequence[Event], losses: Losses, resets_allowed: bool) -> Iterator[Violation]:
    """What a reader of a finished job was shown before it was told to begin anew, and whether it may have been."""
    for read in reads:
        for part in read["before"]:
            yield from _sequence(life, list(oracle.tokens(part)), "replay before stream.reset")
        lost = losses.between(life.ask["t"], read["t"]) if resets_allowed else 0
        if len(read["before"]) > lost:
            resets = len(read["before"])
            yield Violation("reset", life.name, f"{resets} stream.reset in the replay, {lost} losses of data")


def _shown(life: Life, reads: Sequence[Event], losses: Losses, resets_allowed: bool) -> Iterator[Violation]:
    """I3, I4 and I6: every token a reader was shown. A reader that begins anew without having been told to compares:
    what it had and what it gets must both be the text."""
    who, length, resets = life.name, life.ask["tokens"], 0
    parts: list[list[Token]] = [[]]
    for event in life.of("token", "reset", "resume", "end"):
        match event["event"]:
            case "token":
                parts[-1] += oracle.tokens([event["text"]])
            case "resume" if not event["after"]:
                parts.append([])
            case "reset":
                for part in parts:
                    yield from _sequence(life, part, "before stream.reset")
                parts, resets = [[]], resets + 1
                lost = losses.between(life.ask["t"], event["t"]) if resets_allowed else 0
                if resets > lost:
                    yield Violation("reset", who, f"stream.reset number {resets} after {lost} losses of data")
            case "end" if event["state"] == "completed" and life.ask["reads"] and len(parts[-1]) < length:
                yield Violation("gap", who, f"completed after {len(parts[-1])} of {length} tokens")
    for part in parts:
        yield from _sequence(life, part, "shown")
    if losses.hold(life.first("end")):
        return  # the store forgot an end this reader had been told: it has left, and nobody can tell it
    for part in parts:
        yield from _kept(life, part, reads)


def _kept(life: Life, part: Sequence[Token], reads: Sequence[Event]) -> Iterator[Violation]:
    """What was shown is how the stored text begins, by author, and is counted (I4, I8). Of a job that no worker ended
    the store may keep less, and count nothing."""
    shown, number = "".join(token.text for token in part), len(part)
    for read in reads:
        stored, last_id = "".join(read["replay"]), read["log"][-1][1] if read["log"] else ""
        in_part = read["state"] != "completed" and last_id.endswith(BY_NO_WORKER) and shown.startswith(stored)
        if read["state"] in FINAL and not stored.startswith(shown) and not in_part:
            yield Violation("spliced", life.name, f"{number} tokens were shown that are not how the stored text begins")
    for told in (*reads, *life.of("end")):
        if told["state"] in FINAL and any(told["usage"]) and told["usage"][1] < number:
            yield Violation("accounting", life.name, f"{told['usage']} tokens counted, {number} shown")


def _sequence(life: Life, tokens: Sequence[Token], where: str) -> Iterator[Violation]:
    """Each token right, once and in order; after a fault the count goes on behind it. An author who was followed by
    another one has lost the job: no token of it may come after."""
    who, at, length = f"{life.name}, {where}", 0, life.ask["tokens"]
    authors: list[str] = []
    for token in tokens:
        if not oracle.is_right(life.prompt, token) or token.number >= length:
            yield Violation("foreign", who, f"{token.text!r} where {oracle.plain(life.prompt, at)!r} was due")
            continue
        if token.number < at:
            yield Violation("doubled", who, f"token {token.number} again, after token {at - 1}")
            continue
        if token.number > at:
            yield Violation("gap", who, f"token {token.number} after token {at - 1}")
        at = token.number + 1
        if token.author not in authors[-1:]:
            if token.author in authors:
                yield Violation("spliced", who, f"token {token.number} is of an author that had lost the job")
            authors.append(token.author)


def _keys(lives: Iterable[Life], losses: Losses) -> Iterator[Violation]:
    """I5. A key may be forgotten together with its job."""
    jobs: dict[tuple[str, str], set[str]] = defaultdict(set)
    for life in lives:
        for event in life.of("accepted"):
            if not losses.hold(event["t"]):
                jobs[life.ask["tenant"], life.ask["key"] or f"request {life.ask['req']}"].add(event["job"])
    for (tenant, key), ids in jobs.items():
        if len(ids) > 1:
            yield Violation("two_jobs", f"{tenant}, {key}", f"{len(ids)} jobs: {sorted(ids)}")
