"""Terminal: the message that ends a job, as its record keeps it and as its readers receive it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.engine import Failure
from streaming.jobs.frames import Delta, Section
from streaming.jobs.job import JobState


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Token counts of a job, each token counted once whatever the number of attempts."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    reasoning: int = 0
    """Those of `completion` that are reasoning."""


def total_usage(prompts: Mapping[int, tuple[int, int]], completion: int, choices: int, n: int) -> Usage:
    """Compute a job's usage. Each prompt counts once, with the largest count among its `n` choices.

    Args:
        prompts: By choice: tokens of its prompt, and how many of them were cached.
        completion: Tokens of all attempts.
    """
    counts = [prompts.get(index, (0, 0)) for index in range(choices)]
    each = [counts[at : at + n] for at in range(0, choices, n)]
    prompt, cached = (sum([max(count[part] for count in copies) for copies in each]) for part in (0, 1))
    return Usage(prompt, completion, cached)


def served_by(choices: int, found: Mapping[int, str], model: str) -> tuple[str, ...]:
    """Build `Terminal.served_by`. `found`: by choice, the model that gave it, if it is another one than `model`."""
    return tuple([found.get(index, model) for index in range(choices)]) if found else ()


class Generated(msgspec.Struct, frozen=True, array_like=True):
    """When the last worker of a job saw it pass, in microseconds of Redis time, within `clock_us`; 0: not known."""

    released: int = 0
    """Given to the engine."""
    scheduled: int = 0
    """First run by the engine."""
    first: int = 0
    last: int = 0
    """The engine's first and last token."""
    clock_us: int = 0
    shown: int = 0
    """The job's first token, if an earlier attempt generated it, also in a text that was given up."""
    shown_claimed: int = 0
    """The claim of that attempt."""
    kept: int = 0
    """For how many microseconds earlier attempts generated the text that the last one continued."""


class Terminal(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """The end of a job, as stored. The published form leaves `rows` out when the reader has already had them."""

    job: str
    state: JobState
    seq: int
    """The last delta's number: a reader that has fewer has missed some."""
    finishes: tuple[str, ...] = ()
    usage: Usage = Usage()
    failure: Failure | None = None
    worker: str = ""
    first_ms: int = 0
    """Redis time of the first token, whichever attempt gave it, or 0."""
    sections: tuple[Section, ...] = ()
    """Which run wrote which deltas, in order, runs that wrote none included; empty where a script ended the job."""
    rows: tuple[Delta, ...] = ()
    generated: Generated = Generated()
    """Left out of the published form too: readers do not need it."""
    tokens: tuple[int, ...] = ()
    """Tokens of each section; empty if there is only one."""
    last_ms: int = 0
    """Redis time of the last token; of a job without tokens, when the engine had it; 0: not known."""
    served_by: tuple[str, ...] = ()
    """By choice, the model that gave it; empty if all were given by the model that was asked for."""
    cancelled_by: str = ""
    """Who cancelled it, as CancelledBy; "" if it ended otherwise, or a version that did not note it cancelled it."""


def without_rows(end: Terminal) -> Terminal:
    """Copy a terminal without its rows: for job lists, and for readers that have received the rows."""
    copy: Terminal = msgspec.structs.replace(end, rows=(), generated=Generated())
    return copy


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="e"):
    """A script ended this job (cancelled in the queue, expired, given up): look the record up."""

    job: str
