"""Resume policy: whether a claimed job continues after the tokens of earlier attempts or starts over. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.engine import Capabilities
from streaming.jobs.frames import Delta
from streaming.jobs.job import Job


def restart_reason(job: Job, capabilities: Capabilities, history: Sequence[Delta]) -> str:
    """Why the job must be generated from its first token, without `history`; "" if it can be continued.

    An engine applies a JSON grammar from its root to the first token that it generates. Unless it can restore the
    grammar's state behind the logged tokens, a continuation is a second JSON text inside the first one.
    """
    if job.sampling.json_schema is None or capabilities.json_resume:
        return ""
    counts: Counter[int] = Counter()
    ended: set[int] = set()
    for row in history:
        counts[row.index] += row.n
        if row.finish:
            ended.add(row.index)
    limit = job.sampling.max_tokens
    for index, count in counts.items():
        if index not in ended and (limit is None or count < limit):
            return f"the engine cannot continue JSON output that another attempt began (choice {index})"
    return ""
