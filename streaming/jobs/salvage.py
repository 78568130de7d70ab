"""Salvage: builds the terminal record of a job that a script ended after a worker had begun it, from its logs.

Scripts cannot decode tokens, so a job that they end (given up, cancelled or expired after its worker was lost) has none
in its record at first. Any process that reads the record, or sweeps, stores them there; its logs are kept until then.
"""

from __future__ import annotations

from streaming.jobs.attempts import claimed_ms, kept_ms
from streaming.jobs.history import History
from streaming.jobs.job import Job
from streaming.jobs.records import MALFORMED, JobRecord
from streaming.jobs.terminal import Generated, Terminal, served_by, total_usage

MAX_CHOICES = 1024
"""The most that a request may ask for."""


def was_cut_short(record: JobRecord) -> bool:
    """Whether a script ended the job after a worker had begun it, and its tokens are only in logs."""
    end = record.terminal
    return record.unrecorded and end is not None and end.failure is not MALFORMED and bool(record.runs)


def salvaged(record: JobRecord, history: History) -> Terminal:
    """Build the terminal record of a job that was cut short, as a worker would have written it. If the store has lost
    deltas in the middle, those before them count."""
    assert record.terminal is not None
    job, history = record.job, history.intact
    finishes = [""] * (job.choices if not record.fault else 0)
    prompts: dict[int, tuple[int, int]] = {}
    servers: dict[int, str] = {}
    for row in history.rows:
        if len(finishes) <= row.index < MAX_CHOICES:  # of a job whose body cannot be read
            finishes += [""] * (row.index + 1 - len(finishes))
        if row.finish and 0 <= row.index < len(finishes):
            finishes[row.index] = row.finish
        if row.prompt is not None:
            prompts.setdefault(row.index, row.prompt)
        if row.served_by:
            servers[row.index] = row.served_by
    completion = sum([row.n for row in history.rows])
    generated = Generated()
    if history.first_ms:
        claimed = 1000 * claimed_ms(history.first_ms, record.attempts) or record.stamps.started or 0
        generated = Generated(
            shown=1000 * history.first_ms, shown_claimed=claimed, kept=1000 * kept_ms(history, record.attempts)
        )
    return Terminal(
        job.id,
        record.state,
        len(history.rows),
        tuple(finishes),
        total_usage(prompts, completion, len(finishes), _copies(job)),
        record.terminal.failure,
        record.runs[-1].run.worker,
        history.first_ms,
        history.sections,
        tuple(history.rows),
        generated,
        tokens=history.tokens if len(history.sections) > 1 else (),
        served_by=served_by(len(finishes), servers, job.model),
        cancelled_by=record.terminal.cancelled_by,
    )


def _copies(job: Job) -> int:
    return max(1, job.sampling.n)
