"""Listening sockets of an address."""

from __future__ import annotations

import errno
import socket

BACKLOG = 2048
LOCALHOST = ("127.0.0.1", "::1")
MISSING = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Errors of an address that this machine does not have."""
MAX_TRIES = 20
"""Searches for a port that is free on each address."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Open the sockets that listen on a host, all on one port. `localhost` is 127.0.0.1 and ::1, because a client may
    try either; a machine may lack one of them. Raises OSError.

    Args:
        port: 0 for one that is free on each address.
    """
    hosts = LOCALHOST if host.lower() == "localhost" else (host,)
    for left in reversed(range(MAX_TRIES)):
        found: list[socket.socket] = []
        try:
            for each in hosts:
                try:
                    found.append(_listening(each, found[0].getsockname()[1] if found else port))
                except OSError as error:
                    if error.errno not in MISSING or (each == hosts[-1] and not found):
                        raise
            break
        except OSError as error:
            for opened in found:
                opened.close()
            if port or error.errno != errno.EADDRINUSE or not left:
                raise
    return found


def _listening(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
