"""Operation names: what a request computes, in the words of the GenAI conventions, alike in spans and metrics.

The conventions know `chat` (which a request of the Responses API is too), `text_completion` and `embeddings`. They have
no name for the other tasks, and allow one of one's own.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.engine import TaskKind

CHAT, TEXT_COMPLETION = "chat", "text_completion"
TASK_OPERATIONS: Mapping[TaskKind, str] = {
    "embed": "embeddings",
    "rerank": "rerank",
    "tokenize": "tokenize",
    "detokenize": "detokenize",
}
OPERATIONS = (CHAT, TEXT_COMPLETION, *TASK_OPERATIONS.values())
"""All of them: the values of the label `gen_ai_operation_name`."""


def operation_name(task: TaskKind | None, *, is_chat: bool) -> str:
    """The operation of a request. `is_chat`: its prompt is a conversation, not a text or token ids."""
    if task is not None:
        return TASK_OPERATIONS[task]
    return CHAT if is_chat else TEXT_COMPLETION
