"""Launcher: replaces itself with a program that the kernel terminates when the parent process dies.

Run as a file, so that it imports hardly anything: `python tether.py PARENT_PID PROGRAM ARGUMENT...`. The process id
stays the same. Only Linux supports this; elsewhere the program simply runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Replace this process by the program, bound to the parent."""
    parent, program = int(arguments[0]), arguments[1]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before prctl
        sys.exit(70)
    os.execv(program, arguments[1:])  # noqa: S606 - that is what this program is for


if __name__ == "__main__":
    main(sys.argv[1:])
