"""Judge of event logs: the numbers and the order of the events that readers of a job were told.

A log is `queued`, then for each run `started` and its deltas, then the end, with nothing behind it. `stream.reset`
begins another log.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TypeAlias

from bench.chaos.history import Event, Life, Losses, Violation

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
