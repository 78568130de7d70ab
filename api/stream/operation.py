"""Operation label: names what a job computes (a chat, a text, embeddings ...) in the metrics of its answer."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.engine import TaskKind
from streaming.jobs.job import Chat, Job

CHAT, TEXT, RESPONSE = "chat", "text_completion", "response"
TASKS: Mapping[TaskKind, str] = {
    "embed": "embeddings",
    "rerank": "rerank",
    "tokenize": "tokenize",
    "detokenize": "detokenize",
}


def operation_of(job: Job) -> str:
    """The label of a job's answer."""
    if job.response is not None:
        return RESPONSE
    if job.task is not None:
        return TASKS[job.task.kind]
    return CHAT if isinstance(job.prompt, Chat) else TEXT
