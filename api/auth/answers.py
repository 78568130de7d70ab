"""Open answers by created key, so that they end with it, or with its secret or rights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from streaming.fleet.api_keys import CreatedKey

ENDED = "its key has ended"
"""The message of the cancellation."""


class OpenAnswers:
    """The tasks that answer requests with created keys, in one API process."""

    def __init__(self) -> None:
        self._tasks: dict[CreatedKey, set[asyncio.Task[object]]] = {}

    @contextmanager
    def of(self, key: CreatedKey) -> Iterator[None]:
        """Run an answer: the current task, which may be cancelled inside the block."""
        task = asyncio.current_task()
        assert task is not None
        tasks = self._tasks.setdefault(key, set())
        tasks.add(task)
        try:
            yield
        finally:
            tasks.discard(task)
            if not tasks:
                self._tasks.pop(key, None)

    def end(self, holds: Callable[[CreatedKey], bool]) -> None:
        """Cancel the answers to requests whose key does not hold any more, but for the one that has just changed it."""
        ended = [task for key, tasks in self._tasks.items() if not holds(key) for task in tasks]
        for task in ended:
            if task is not asyncio.current_task():
                task.cancel(ENDED)


def is_key_ended(error: BaseException) -> bool:
    """Whether an answer was cancelled because its key has ended, and not because the process ends."""
    return isinstance(error, asyncio.CancelledError) and ENDED in error.args
