"""Answer checks: the running tasks that validate schemas, and finished answers, of jobs that asked for JSON."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

from penstock.engine import Failure
from streaming.jobs.job import JobState
from workers.attempt import Attempt
from workers.checker import Checker
from workers.engines.constraint import unchecked
from workers.held_jobs import HeldJobs

log = logging.getLogger(__name__)


class AnswerChecks:
    """The answer checks of one worker, which share one child process."""

    def __init__(
        self, held: HeldJobs, *, on_refused: Callable[[Attempt], None], on_checked: Callable[[Attempt], None]
    ) -> None:
        """
        Args:
            on_refused: called with an attempt that was stopped, because its schema cannot be used.
            on_checked: called with an attempt whose complete answer was checked, and which is to be ended.
        """
        self._held, self._on_refused, self._on_checked = held, on_refused, on_checked
        self._checker = Checker()
        self.tasks: set[asyncio.Task[None]] = set()

    def try_schema(self, attempt: Attempt) -> None:
        """Start to check whether the schema of an attempt can be used."""
        self._keep(self._refuse_unusable(attempt))

    def begin(self, attempt: Attempt) -> asyncio.Task[None]:
        """Start to check the complete answer of an attempt."""
        return self._keep(self._end_checked(attempt))

    async def stop(self) -> None:
        """End the checker. Idempotent."""
        await self._checker.stop()

    def _keep(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        check = asyncio.create_task(work)
        self.tasks.add(check)
        check.add_done_callback(self.tasks.discard)
        return check

    async def _refuse_unusable(self, attempt: Attempt) -> None:
        """End a job with a schema by which no answer can be judged while the engine generates."""
        failure = await self._checker.failure(attempt.job.sampling.json_schema or {}, ())
        if failure is not None and not attempt.over:
            attempt.stop(JobState.FAILED, failure)
            self._on_refused(attempt)

    async def _end_checked(self, attempt: Attempt) -> None:
        """End a job that asked for JSON: as failed, if its texts do not follow the schema."""
        try:
            failure = await self.failure(attempt)
        except Exception:  # the job must end, whatever is wrong with its answer or with the check
            log.exception("an answer could not be checked", extra={"job": attempt.job.id})
            failure = unchecked()
        if self._held.attempts.get(attempt.job.id) is not attempt:
            return  # handed back: its next worker checks it again
        if failure is not None:
            attempt.stop(JobState.FAILED, failure)
        self._on_checked(attempt)

    async def failure(self, attempt: Attempt) -> Failure | None:
        """Why the complete texts of a job do not follow its schema."""
        texts = await asyncio.to_thread(attempt.complete_texts)
        if isinstance(texts, Failure):
            return texts
        if not texts:
            return None
        return await self._checker.failure(attempt.job.sampling.json_schema or {}, texts)
