"""Exit codes of the CLI, and the exception that ends a command with an error block."""

from __future__ import annotations

DONE = 0
FAILED = 1
USAGE = 2
UNREACHABLE = 3
FORBIDDEN = 4
ENDED_BADLY = 5
STILL_RUNNING = 6
INTERRUPTED = 130


class Problem(Exception):
    """Raised to end a command with an error block: what happened, its cause, the next step, and an exit code."""

    def __init__(
        self,
        message: str,
        *,
        cause: str = "",
        next_step: str = "",
        exit_code: int = FAILED,
        code: str = "failed",
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.message, self.cause, self.next_step = message, cause, next_step
        self.exit_code, self.code, self.request_id = exit_code, code, request_id
