"""Attempt log: what became of each attempt at a job, from the fields of its record."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from streaming.jobs.frames import Run
from streaming.jobs.history import History
from streaming.jobs.job import PastAttempt
from streaming.jobs.terminal import Terminal

MAX_ATTEMPTS = 20
"""The newest attempts, which are kept."""

_ENTRY = re.compile(
    r"([^:;]*):([^:;]+):([0-9]{1,15}):([0-9.]{1,24}):([0-9]{1,15}):([a-z_]+)(?::([0-9]{1,15}))?(?::[^;]*)?;"
)
"""name:worker:run:claimed:ended:outcome; as the scripts write it, and of a lost worker the time of its last write. A
later version may write more behind that. Anything else in the field is passed over: nothing but this log depends on
it."""


def attempt_log(fields: Mapping[str, bytes], last: Run | None, terminal: Terminal | None) -> dict[Run, PastAttempt]:
    """Build the log, oldest attempt first. The scripts note attempts that did not end the job; the last one's end is
    that of the job.

    Args:
        last: The run of the last attempt; None before the first.
    """
    tokens = _tokens(terminal)
    found = {}
    for name, worker, number, started, ended, outcome, seen in _ENTRY.findall(_word(fields, "past")):
        run = Run(worker, int(number))
        found[run] = PastAttempt(name or worker, _ms(started), int(ended), tokens.get(run), outcome, int(seen or 0))
    if last is not None and last not in found:
        started_ms, name = _ms(_word(fields, "claimed")), _word(fields, "name") or last.worker
        if terminal is None:
            found[last] = PastAttempt(name, started_ms)
        else:
            found[last] = PastAttempt(
                name, started_ms, _ms(_word(fields, "done")), tokens.get(last), str(terminal.state)
            )
    return found


def kept_ms(history: History, attempts: Sequence[PastAttempt]) -> int:
    """For how long earlier attempts have generated the text of `history`, which another one continues."""
    if not history.rows:
        return 0
    at_ms = history.at_ms
    seen_ms = next((each.seen_ms or each.ended_ms for each in attempts if each.holds(at_ms)), at_ms)
    return history.kept_ms + max(0, seen_ms - at_ms)


def claimed_ms(first_ms: int, attempts: Sequence[PastAttempt]) -> int:
    """When the attempt was claimed that generated the job's first token; 0: not known."""
    return next((each.started_ms for each in attempts if each.holds(first_ms)), 0)


def _tokens(terminal: Terminal | None) -> dict[Run, int]:
    """The tokens of each run, once the job has ended."""
    if terminal is None:
        return {}
    tokens = terminal.tokens or (terminal.usage.completion,)
    return dict(zip((section.run for section in terminal.sections), tokens, strict=False))


def _word(fields: Mapping[str, bytes], name: str) -> str:
    return fields.get(name, b"").decode(errors="replace")


def _ms(text: str) -> int:
    """A time of a record; 0 if it is malformed."""
    try:
        return int(float(text or 0))
    except (ValueError, OverflowError):
        return 0
