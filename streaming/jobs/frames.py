"""Frames: the tokens that a worker logs and sends to an API process, one frame per engine step.

A frame holds deltas, and each delta names the run that wrote it. Terminal records hold the same deltas.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import astuple

from penstock.engine import Logprob


class Run(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One begin of a job by one worker: the author of its deltas. No two are equal: worker ids are random and new in
    every life of a process, and a worker never uses a number twice."""

    worker: str
    number: int

    def __str__(self) -> str:
        return f"{self.worker}-{self.number}"


class Section(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The stretch of a job's deltas that one run wrote: from `first` up to the next section. Of a run that wrote
    nothing, `first` is the next section's too."""

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
    """What a worker says of a run in the first frame that has deltas of it: the job, the number of the run's first
    delta, and the run that wrote the delta before that one. Readers compare it with what they have: a run that does
    not go on from there is never spliced to it."""

    job: str
    first: int = 1
    parent: Run | None = None
    copied: tuple[Section, ...] = ()
    """Deltas under this number are copies of what these earlier runs wrote, logged anew for a store that lost them."""


def openings_of(job: str, sections: Sequence[Section]) -> list[tuple[Run, Opening]]:
    """What the runs of these sections said of themselves when they began."""
    return [(run, Opening(job, first, author(sections, first - 1))) for first, run in map(astuple, sections)]


class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A few tokens of one choice of one job. `seq` counts 1, 2, 3... over the whole job, across attempts."""

    stream: int
    """The number of the run that wrote it; minus that number for a copy (`Opening.copied`). In a record the sections
    tell who wrote what, and this says nothing."""
    seq: int
    index: int
    text: str
    ids: tuple[int, ...]
    """The token ids, as far as the engine knows them; enough to go on after a loss."""
    n: int
    """How many tokens these are (may exceed len(ids))."""
    finish: str = ""
    """"stop" or "length" when this delta ends its choice."""
    logprobs: tuple[Logprob, ...] = ()
    prompt: tuple[int, int] | None = None
    """Tokens of its choice's prompt, and how many of them were cached: in the first delta of a choice, in no other."""


class PlainDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A Delta without `prompt`, as nearly all of them are written: read, it is one. Fields as there."""

    stream: int
    seq: int
    index: int
    text: str
    ids: tuple[int, ...]
    n: int
    finish: str = ""
    logprobs: tuple[Logprob, ...] = ()


class Frame(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    """What one engine step gave the jobs of one API process: log entry and pub/sub message alike.

    A run is opened once, in the first frame with deltas of it that an address gets; from then on its number stands for
    it. Most of what a token weighs on the wire was its job's id.
    """

    worker: str
    number: int
    rows: tuple[Delta, ...]
    openings: dict[int, Opening] = {}
    """Runs by the numbers that stand for them, in every frame of this worker from now on."""
