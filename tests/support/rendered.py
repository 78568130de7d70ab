"""Jobs as the renderers of answers see them, and their whole answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from api.openai.rendering import Facts
from api.openai.results import answer_in_slices
from penstock.engine import ChatTurn, Sampling
from penstock.loops import at_once
from streaming.jobs.codec import Delta, Terminal
from streaming.jobs.job import Chat, Job, Text
from streaming.order import Priority


def facts_of(
    *,
    chat: bool = True,
    choices: int = 1,
    logprobs: bool = False,
    job_id: str = "j1",
    priority: Priority = Priority.STANDARD,
    **fields: Any,
) -> Facts:
    """What is constant in the renderings of a chat or completion. `fields`: further ones of the job."""
    prompt = Chat((ChatTurn("user", "a"),)) if chat else Text(("a",))
    sampling = Sampling(n=choices, logprobs=0 if logprobs else None)
    job = Job(id=job_id, model="m", tenant="t", priority=priority, prompt=prompt, sampling=sampling, **fields)
    return Facts(job, 1_700_000_000_999, "fp_1")


def completion(facts: Facts, terminal: Terminal, rows: Sequence[Delta]) -> dict[str, Any]:
    """The whole answer. Raises ApiError."""
    return at_once(answer_in_slices(facts, terminal, rows))
