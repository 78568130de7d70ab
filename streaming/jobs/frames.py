"""Frames: the tokens that a worker logs and sends to an API process, one frame per engine step.

A frame holds deltas, and each delta names the run that wrote it. Terminal records hold the same deltas.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import astuple

from penstock.engine import Logprob
from penstock.extras import Extras

MAX_ROWS_PER_FRAME = 1000
"""Deltas that are logged again in one frame, by a checkpoint or in a parked log: a reader decodes it in a few
milliseconds."""


class Run(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One attempt of one worker at a job, and the author of its deltas. No two runs are equal: a worker gets a random
    id at each start, and never uses a number twice."""

    worker: str
    number: int

    def __str__(self) -> str:
        return f"{self.worker}-{self.number}"


class Section(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The consecutive deltas of a job that one run wrote: from `first` up to the next section. If a run wrote nothing,
    its section has the same `first` as the next one."""

    first: int
    run: Run


def author(sections: Sequence[Section], seq: int) -> Run | None:
    """The run that wrote delta `seq`; None before the first section."""
    found = None
    for section in sections:
        if section.first > seq:
            break
        found = section.run
    return found


class Opening(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Header of a run, which the worker sends in the first frame with deltas of the run: the job, the number of the
    run's first delta, and the run that wrote the delta before it. Readers compare it with the text that they have, and
    never join a run that continues another text."""

    job: str
    first: int = 1
    parent: Run | None = None
    copied: tuple[Section, ...] = ()
    """Not empty: deltas under this run number, negated, are copies of these runs' deltas, logged again after a loss."""
    at_ms: int = 0
    """Redis time of the run's first token; 0: not known."""
    begun_ms: int = 0
    """Redis time of the job's first token, if an earlier run generated it, also in a text that was given up."""
    kept_ms: int = 0
    """For how long earlier runs generated the text that this run continues."""


def openings_of(job: str, sections: Sequence[Section]) -> list[tuple[Run, Opening]]:
    """The openings that the runs of these sections had when they began."""
    return [(run, Opening(job, first, author(sections, first - 1))) for first, run in map(astuple, sections)]


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A few tokens of one choice of one job. `seq` counts 1, 2, 3... over the whole job, across attempts."""

    stream: int
    """The number of the run that wrote it; minus that number for a copy (`Opening.copied`). Meaningless in a record,
    whose sections name the runs."""
    seq: int
    index: int
    text: str
    ids: tuple[int, ...]
    """The token ids, as far as the engine knows them; enough to continue after a loss."""
    n: int
    """How many tokens these are (may exceed len(ids))."""
    finish: str = ""
    """"stop", "length" or "content_filter" when this delta ends its choice."""
    logprobs: tuple[Logprob, ...] = ()
    prompt: tuple[int, int] | None = None
    """Tokens of the choice's prompt, and how many of them were cached; only in the first delta of a choice."""
    served_by: str = ""
    """The model that gave the choice, if it is another one than asked for; only in the first delta of the choice."""
    extras: Extras = {}
    """As in penstock.engine.Piece."""


class PlainDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A Delta without `prompt`, `served_by` and `extras`, as nearly all are written: read, it is one."""

    stream: int
    seq: int
    index: int
    text: str
    ids: tuple[int, ...]
    n: int
    finish: str = ""
    logprobs: tuple[Logprob, ...] = ()


class CountedDelta(PlainDelta, frozen=True, array_like=True, gc=False):
    """A Delta without `served_by` and `extras`, as the first of a choice is nearly always written."""

    prompt: tuple[int, int] | None = None


class Frame(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """The deltas of one engine step for the jobs of one API process, as one log field and as one pub/sub message.

    The first frame of a run that an address gets contains the run's opening. Later frames name the run only by its
    number, because the job's id would be most of a token's size.
    """

    worker: str
    number: int
    rows: tuple[Delta, ...]
    openings: dict[int, Opening] = {}
    """Openings of runs, by the numbers that name the runs in this and later frames of the worker."""
