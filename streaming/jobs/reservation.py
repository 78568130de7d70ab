"""Memory reservation: estimates the most bytes that an accepted job may still write: its log, then its record.

Admission reserves them (`streaming/store/memory.py`), so that every accepted job fits into the store until its end.
"""

from __future__ import annotations

from penstock.engine import ModelCard
from streaming.jobs.job import Job
from streaming.jobs.work import work_of

TOKEN = 96
"""Bytes of one token that is alone in its step: an entry of the log with one reply address, and a row of the record.
tests/streaming/store/test_memory.py measures 46 and 21 with Valkey 8; in steps shared by many jobs the log's share is
21. The rest is for longer texts and for what the allocator rounds up."""
LOGPROB, ALTERNATIVE = 40, 40
"""More for the log-probability of a token, and for each of its alternatives: both stand in log and record."""
JOB = 1536
"""Beside its tokens: fields of its hash that come with claim and end, its places in streams and sets."""


def reserved_bytes(job: Job, card: ModelCard | None = None) -> int:
    """The most bytes that a job may write from its acceptance to its end. `card`: of its model, if one is known."""
    sampling = job.sampling
    each = TOKEN
    if sampling.logprobs is not None:
        each += LOGPROB + ALTERNATIVE * sampling.logprobs
    return JOB + work_of(job.prompt, sampling, card) * each
