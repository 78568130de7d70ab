"""Redis errors: translates the exceptions of the client library into Penstock's."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from redis.exceptions import BusyLoadingError, RedisClusterException, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from streaming.errors import Loading, Unavailable

REFUSALS = frozenset(
    {
        *("OOM", "MISCONF", "READONLY", "NOREPLICAS", "LOADING", "MASTERDOWN", "NOSCRIPT", "UNBLOCKED"),
        *("NOAUTH", "WRONGPASS", "NOPERM"),
        *("CLUSTERDOWN", "MOVED", "ASK", "TRYAGAIN"),
    }
)
"""Answers that mean "this server cannot keep a write now", whatever the command was."""
DENIED_IN_SCRIPT = "ACL failure"
"""Part of an error answer without its own code: the user may not run a command that a script contains."""
PIPELINED = re.compile(r"Command # .* of pipeline caused error: \(['\"]?", re.DOTALL)


def checked(answers: list[Any]) -> list[Any]:
    """The same answers, if there is no error among them; raises the first."""
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


class translated:  # noqa: N801 - used like a function
    """Translates the client library's errors into ours: Unavailable if a later retry may help.

    Also passes a cancellation on: the client writes under `asyncio.wait_for`, which on Python 3.11 swallows a
    cancellation that arrives as the write ends. Without this, a caller that waits for this task would wait for ever.
    """

    __slots__ = ("_cancels", "_task")

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._cancels = self._task.cancelling() if self._task else 0

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._task and self._task.cancelling() > self._cancels:
            raise asyncio.CancelledError
        if error is not None and (meaning := _meaning(error)):
            raise (Loading if _is_loading(error) else Unavailable)(meaning) from error


def _meaning(error: BaseException) -> str:
    """Why Redis is unavailable, or "" for an error of another kind."""
    match error:
        case RedisConnectionError() | RedisTimeoutError() | OSError():
            return f"Redis does not answer: {error}"
        case ResponseError():
            code, words = _refusal(error)
            if DENIED_IN_SCRIPT in words:
                return f"Redis refuses: {words} (the user's rights must be those of `penstock store acl`)"
            return f"Redis refuses: {code} {words}" if code in REFUSALS else ""
        case RedisError() | RedisClusterException():
            return f"Redis: {error}"
    return ""


def _is_loading(error: BaseException) -> bool:
    if isinstance(error, ResponseError):
        return _refusal(error)[0] == "LOADING"
    return isinstance(error, BusyLoadingError)


def _refusal(error: ResponseError) -> tuple[str, str]:
    """Code and words of an error answer. In a pipeline the client puts the command before it, which may be a job."""
    text = PIPELINED.sub("", str(error), count=1).rstrip("',)")
    if error.status_code:  # already taken off the text
        return error.status_code, text
    code, _, words = text.partition(" ")
    return code, words.strip()
