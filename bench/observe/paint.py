"""First paint: how soon a browser shows the pages of the console, beside a page that is one sentence, in the same run.

Every page is opened with an empty cache, the bare one in turn with them. The first paint is the browser's own figure
(first-contentful-paint): from the beginning of the navigation until something stands on the page.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from bench.browser import BrowserPage, browsing
from bench.http import fetch
from bench.load.plan import LoadFailed
from bench.report import Ratio
from bench.stats import median_interval

PATHS = ("", "/jobs", "/dead-letters", "/batches", "/chat", "/models", "/keys")
"""Of the console, below /console."""
BARE = b'<!doctype html><html lang="en"><title>bare</title><p>One sentence.</p>'
WIDTH, HEIGHT = 1280, 800
PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
READ = "document.querySelector('main h1') && !document.body.innerText.includes('Loading\u2026')"


@dataclass(frozen=True, slots=True)
class PaintRound:
    """First paints in milliseconds: of the bare page, and of each page of the console."""

    bare: float
    pages: Sequence[float]

    @property
    def slowest(self) -> float:
        """Of the console."""
        return max(self.pages)


class _Bare(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(BARE)))
        self.end_headers()
        self.wfile.write(BARE)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextmanager
def bare_page() -> Iterator[str]:
    """The address of a page that is one sentence."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Bare)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def measured(port: int, token: str, folder: Path, rounds: int) -> list[PaintRound]:
    """Open every page `rounds` times. `token`: of an admin; `folder`: for the browser's profile. Raises LoadFailed,
    PageError."""
    status, _, body = fetch(port, "POST", "/admin/console/links", b"{}", {
        "Authorization": f"Bearer {token}", "Content-Type": "application/json",
    })  # fmt: skip
    if status != HTTPStatus.CREATED:
        raise LoadFailed(f"a link of the console was answered with {status}")
    base = f"http://127.0.0.1:{port}"
    with browsing(folder) as browser, bare_page() as bare:
        page = browser.page()
        page.show(WIDTH, HEIGHT)
        page.goto(base + json.loads(body)["path"])
        page.wait(READ)
        page.command("Network.setCacheDisabled", cacheDisabled=True)
        return [_round(page, base, bare) for _ in range(rounds)]


def _round(page: BrowserPage, base: str, bare: str) -> PaintRound:
    plain, pages = [], []
    for path in PATHS:
        page.goto(bare)
        plain.append(float(page.wait(PAINTED)))
        page.goto(f"{base}/console{path}")
        pages.append(float(page.wait(PAINTED)))
        page.wait(READ)
    return PaintRound(sorted(plain)[len(plain) // 2], pages)


def paint_ratios(rounds: Sequence[PaintRound]) -> list[Ratio]:
    """The slowest page of each round, in milliseconds and over the bare page of the same round."""
    slowest = [each.slowest for each in rounds]
    times = [each.slowest / each.bare for each in rounds]
    found = []
    for goal, what, values, digits in (
        ("observe.paint", "first paint of the console's slowest page, ms", slowest, 0),
        ("observe.paint_bare", "first paint of the console's slowest page over that of a bare page", times, 2),
    ):
        middle = median_interval(values)
        interval = (middle.low, middle.high)
        found.append(Ratio.held(goal, what, middle.median, digits=digits, rounds=values, interval=interval))
    return found
