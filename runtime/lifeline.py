"""Lifeline: the socket over which a process reports its state to its supervisor, and which ends it when that dies.

The supervisor passes each child one end of a socket pair (its number in PENSTOCK_LIFELINE). The child writes its state
as JSON lines. When the supervisor dies, the socket closes and the child exits at once, so no orphan is left. Without a
supervisor there is no socket and every method does nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading

ENV = "PENSTOCK_LIFELINE"
LIFE = "PENSTOCK_LIFE"
"""Variable with the random id under which a process registers itself in the store: its supervisor chooses it, because
machines may have the same name, and their processes the same pids."""


class Lifeline:
    """The child's end. A process's `__main__` creates one."""

    def __init__(self, fd: int | None) -> None:
        self._socket = socket.socket(fileno=fd) if fd is not None else None
        self._has_completed = False
        self._away = ""
        if self._socket is not None:
            self._socket.set_inheritable(False)
            threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    @classmethod
    def from_environ(cls) -> Lifeline:
        """The socket this process was started with, if any; grandchildren do not inherit it."""
        value = os.environ.pop(ENV, None)
        return cls(int(value) if value else None)

    def say(self, state: str, detail: str = "") -> None:
        """Report a state: starting (with the phase as detail) | ready | draining | failed (with the reason)."""
        self._send({"state": state, "detail": detail})

    def note_completed(self) -> None:
        """Report that this process has completed a job, the first time: it does not die of each one."""
        if not self._has_completed:
            self._has_completed = True
            self._send({"completed": True})

    def note_away(self, why: str) -> None:
        """Report the servers that a ready process waits for; "" once one is back. Only a change is sent."""
        if why != self._away:
            self._away = why
            self._send({"away": why})

    def wait(self, message: str, error: Exception) -> None:
        """Tell the supervisor what the start of this process waits for: a `write` of `loops.ExpectedErrors`."""
        self.say("starting", message % error)

    def _send(self, message: dict[str, str | bool]) -> None:
        if self._socket is None:
            return
        with contextlib.suppress(OSError):  # the supervisor died: the watching thread ends this process
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _watch(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(OSError):  # a broken socket means the same as a closed one
            while self._socket.recv(64):
                pass
        os._exit(70)
