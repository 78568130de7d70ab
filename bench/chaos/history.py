"""The record of what clients saw: one line of JSON per event, in the order they happened.

Nothing in it is the server's own word about itself; the checker judges from this alone.

| event    | fields                                          | meaning                                              |
|----------|-------------------------------------------------|------------------------------------------------------|
| ask      | req, prompt, tokens, may, key, reads, tenant    | a client begins; `may`: final states it may meet     |
| accepted | req, job, status, ms                            | a 2xx with a job id                                  |
| refused  | req, status, code, ms, retry_after              | an answer to a request that is no 2xx                |
| answered | what, status, code, retry_after                 | an answer to anything else that is no 2xx            |
| error    | req, code                                       | an error in a stream that is no documented one       |
| unknown  | req or job, why                                 | no answer: nobody can say whether it was accepted; `job`: of a cancel |
| token    | req, text, id                                   | text shown; the id of its delta, "" in a chat stream |
| event    | req, name, id                                   | an event of a job's log that is no delta             |
| cut      | req, why                                        | the connection ended before the end was told         |
| resume   | req, after                                      | reading goes on behind this event id, or anew        |
| reset    | req, code                                       | stream.reset: what was shown no longer counts        |
| end      | req, state, code, usage                         | a terminal frame or answer; `usage`: tokens of prompt and answer that it counts, or none |
| gave_up  | req, why                                        | the client's patience was over, before an answer or before the end |
| left     | req                                             | the client went away on purpose                      |
| cancel   | job, status                                     | a cancel was answered with this state of the job     |
| final    | job, status, state, code, text, usage, attempts, replay, before, ends, log | read afterwards through the public API; `before`: what came before each stream.reset; `log`: name and id of each event |
| quiet    | what, number                                    | what was still held after everything had ended       |
| crossed  | job, status, path                               | another tenant's key opened it                       |
| fault    | trial, what                                     | injected now                                         |
| missed   | trial, why                                      | that fault did not bite: the trial does not count    |
| rollback | since                                           | the store has now forgotten what came since then     |
"""  # noqa: E501 - a table

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

Event: TypeAlias = dict[str, Any]


class ClientHistory:
    """Events in memory, and line by line in a file. Times are monotonic seconds since the first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[Event] = []
        self._began = time.monotonic()
        self._file = path.open("ab")

    def add(self, kind: str, **fields: Any) -> None:
        """One event, now. Clients of a row that broke off may go on while it is judged: that is left out."""
        if self._file.closed:
            return
        event = {"t": round(self.now(), 5), "event": kind, **fields}
        self.events.append(event)
        self._file.write(msgspec.json.encode(event) + b"\n")

    def now(self) -> float:
        """The time an event would have that is added now."""
        return time.monotonic() - self._began

    def close(self) -> None:
        """Flush, and add no more."""
        self._file.close()


def load(path: Path) -> list[Event]:
    """A history read back from its file."""
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def of_kind(events: Iterable[Event], *kinds: str) -> list[Event]:
    """Those of these kinds."""
    return [event for event in events if event["event"] in kinds]
