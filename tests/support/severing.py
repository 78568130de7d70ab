"""A way to the store that is cut in a chosen moment: when the answer to a chosen call has passed, or is about to."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class StoreCut:
    """A TCP proxy in front of a store. Cut, it closes what is open and refuses what comes, until it is mended."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._word, self._lose = b"", False
        self._asked = b""
        self._losing: set[socket.socket] = set()
        """Connections whose next answer is lost."""
        self.severed = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def cut_at(self, word: bytes, *, lose: bool = False) -> None:
        """Cut when an answer with this word has been passed on, or (`lose`) in its place."""
        self._word, self._lose = word, lose

    def cut_when_asked(self, word: bytes) -> None:
        """Cut in place of the answer to a call with this word: the store has done it by then."""
        self._asked = word

    def mend(self) -> None:
        """Let everything pass again."""
        self._word = self._asked = b""
        self.severed.clear()

    def close(self) -> None:
        self._listener.close()
        self._sever()

    def _sever(self) -> None:
        self.severed.set()
        with self._lock:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
            self._open.clear()
            self._losing.clear()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.severed.is_set():
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._target))
            with self._lock:
                self._open += [client, server]
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not answers and self._asked and self._asked in data:
                    self._losing.add(sink)
                lost = answers and source in self._losing
                hit = lost or (answers and self._word and self._word in data)
                if not (lost or (hit and self._lose)):
                    sink.sendall(data)
                if hit:
                    self._sever()
                    return
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextmanager
def store_cut(url: str) -> Iterator[StoreCut]:
    """In front of the store at this address."""
    cut = StoreCut(int(url.rpartition(":")[2].partition("/")[0]))
    try:
        yield cut
    finally:
        cut.close()
