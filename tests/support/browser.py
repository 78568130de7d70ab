"""A real browser on a hostile page, and what the page's owner runs: a web server, and a name that is rebound."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

from http_serving import QuietHandler

NAME = "evil.example"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-popup-blocking",
    "--disable-dev-shm-usage",
)  # fmt: skip
REPORT_S = 60.0


class Page(ThreadingHTTPServer):
    """The hostile page's own server. Its page runs `script` with `config` and reports what came of it."""

    def __init__(self, script: str) -> None:
        super().__init__(("127.0.0.1", 0), PageHandler)
        self.reports: Queue[dict[str, Any]] = Queue()
        self.config: dict[str, Any] = {}
        self._script = script

    @property
    def port(self) -> int:
        return self.server_port

    def html(self) -> str:
        """The page as it is now."""
        config = f"const config = {json.dumps(self.config)};"
        return f"<!doctype html><title>hostile</title><body><script>{config}\n{self._script}</script>"

    def report(self) -> dict[str, Any]:
        """What the page says it achieved."""
        try:
            return self.reports.get(timeout=REPORT_S)
        except Empty:
            raise AssertionError("the page has reported nothing") from None


class PageHandler(QuietHandler):
    server: Page

    def do_GET(self) -> None:  # noqa: N802 - the name http.server looks for
        self.send(200, self.server.html(), "text/html; charset=utf-8", Connection="close")

    def do_POST(self) -> None:  # noqa: N802 - the name http.server looks for
        self.server.reports.put(self.read_json())
        self.send(200, "", "text/html; charset=utf-8", Connection="close")


class Rebound:
    """A name that first means the page's server and then the server under attack, for a browser that keeps its name.

    The first connection to this port goes, byte by byte, to the first, every later one to the second: what DNS
    rebinding brings about, without waiting for a name's lifetime.
    """

    def __init__(self, first: int, then: int) -> None:
        self._first, self._then = first, then
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._served = False
        self._threads = [Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = Thread(target=self._carry, args=(client,))
            self._threads.append(thread)
            thread.start()

    def _carry(self, client: socket.socket) -> None:
        with client:
            client.settimeout(REPORT_S)
            try:
                sent = client.recv(65536)
            except OSError:
                return
            if not sent:
                return  # a connection that the browser opened in advance
            target = self._then if self._served else self._first
            self._served = True
            with suppress(OSError), socket.create_connection(("127.0.0.1", target)) as server:
                server.sendall(sent)
                _copy(client, server)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()


def _copy(one: socket.socket, other: socket.socket) -> None:
    """Both ways, until one side ends."""
    while True:
        for ready in select.select([one, other], [], [], REPORT_S)[0]:
            data = ready.recv(65536)
            if not data:
                return
            (other if ready is one else one).sendall(data)


@contextmanager
def browsing(folder: Path, url: str, *rules: str) -> Iterator[None]:
    """A browser with a new profile on this page; it can reach nothing but this machine."""
    names = [*rules, f"MAP {NAME} 127.0.0.1", "MAP * ~NOTFOUND", "EXCLUDE 127.0.0.1", "EXCLUDE localhost"]
    profile = folder / "profile"
    profile.mkdir()
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            ["chromium", *FLAGS, f"--user-data-dir={profile}", f"--host-resolver-rules={', '.join(names)}", url],
            env={**os.environ, "HOME": str(folder)},
            stdout=log,
            stderr=log,
            process_group=0,
        )
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
