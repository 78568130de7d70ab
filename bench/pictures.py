"""`python -m bench.pictures`: takes the pictures of console, top and report, of real processes.

Starts `penstock up` with the simulated engine, sends it chats and jobs, opens the console in a headless browser, and
kills a worker while it answers a chat there. The browser also shows what `penstock top` prints, and the page of
`penstock report`.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from bench.browser import BrowserPage, browsing, missing
from bench.penstock import own_environ
from bench.ports import free_port

SETTINGS = """
[models.sim]
engine = "sim"
min_workers = 2
max_workers = 3
[sim]
step_ms = 30
slots = 12
faults = true
"""
CHATS, LOAD_S, KILL_AFTER_CHARACTERS = 12, 12.0, 100
QUESTIONS = ("Name a river.", "What is a turbine?", "Write a haiku about water.", "List three dams.")
WIDE, NARROW = (1280, 800), (390, 844)
TERMINAL, TALL = (960, 560), (1280, 1400)
PENSTOCK = (sys.executable, "-m", "penstock")


class PicturedInstance:
    """A running `penstock up` with its data in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        (folder / "penstock.toml").write_text(SETTINGS, encoding="utf-8")
        self.command("up", "--detach", "--port", str(self.port), "--workers", "2")

    def command(self, *words: str, **environ: str) -> str:
        """Run a `penstock` command on it, and return what it printed. Raises CalledProcessError."""
        data = ("--data-dir", str(self.folder / "data"))
        done = subprocess.run(
            [*PENSTOCK, *words, *data], cwd=self.folder, env=own_environ() | {"PYTHONPATH": str(Path.cwd())} | environ,
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        return done.stdout

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send JSON; a stream is read to its end, and {} returned."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            data = connection.getresponse().read()
            return {} if body.get("stream") else dict(json.loads(data))
        finally:
            connection.close()

    def chat_until(self, over: Event) -> None:
        """One client that chats without a pause."""
        while not over.is_set():
            messages = [{"role": "user", "content": random.choice(QUESTIONS)}]  # noqa: S311 - only for variety
            lane = random.choice(("interactive", "interactive", "standard"))  # noqa: S311
            body = {"model": "sim", "stream": True, "max_tokens": 80, "messages": messages, "queue": {"priority": lane}}
            self.post("/v1/chat/completions", body)

    def submit(self, text: str, **queue: Any) -> None:
        """Queue a job."""
        messages = [{"role": "user", "content": text}]
        self.post("/v1/jobs", {"model": "sim", "max_tokens": 90, "messages": messages, "queue": queue})

    def kill_worker(self, name: str) -> None:
        """`kill -9` of one worker."""
        rows = [json.loads(line) for line in self.command("ps", "--json").splitlines()]
        (pid,) = (row["pid"] for row in rows if row["id"] == name)
        os.kill(pid, signal.SIGKILL)


@contextmanager
def running(folder: Path) -> Iterator[PicturedInstance]:
    """An instance, stopped at the end of the block."""
    instance = PicturedInstance(folder)
    try:
        yield instance
    finally:
        instance.command("down", "--now")


def take(instance: PicturedInstance, page: BrowserPage, out: Path) -> None:
    """Take every picture."""
    base = f"http://127.0.0.1:{instance.port}/console"
    page.show(*WIDE)
    page.goto(instance.command("console", "--no-browser").strip())
    page.wait("document.querySelector('.verdict')")
    time.sleep(LOAD_S)  # so that the charts have something to show
    page.screenshot(out / "console-overview.png")
    page.show(*NARROW, dark=True)
    page.screenshot(out / "console-phone.png")
    page.show(*WIDE)
    path = _interrupted_chat(instance, page, base, out / "console-chat.png")
    page.show(*WIDE, dark=True)
    page.goto(f"http://127.0.0.1:{instance.port}{path}")
    page.wait("document.querySelector('.timeline')")
    page.wait("document.querySelector('.transcript').textContent.length > 100")
    page.screenshot(out / "console-job.png")


def take_texts(instance: PicturedInstance, page: BrowserPage, out: Path) -> None:
    """Take the pictures of `penstock top`, as a terminal shows it, and of the page of `penstock report`."""
    page.show(*TERMINAL)
    _show_text(instance, page, instance.command("top", "--once", FORCE_COLOR="1"))
    page.screenshot(out / "top.png")
    file = instance.folder / "report.html"
    instance.command("report", "--since", "10m", "--html", str(file))
    page.show(*TALL)
    page.goto(file.as_uri())
    page.wait("document.querySelector('.tiles')")
    page.screenshot(out / "report.png")


def _show_text(instance: PicturedInstance, page: BrowserPage, text: str) -> None:
    """Show the text of a terminal, with its styles."""
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(Text.from_ansi(text))
    file = instance.folder / "terminal.html"
    file.write_text(console.export_html(theme=MONOKAI, inline_styles=True), encoding="utf-8")
    page.goto(file.as_uri())
    page.wait("document.querySelector('pre')")
    page.run("document.body.style.padding = '16px', document.querySelector('pre').style.fontSize = '15px'")


def _interrupted_chat(instance: PicturedInstance, page: BrowserPage, base: str, file: Path) -> str:
    """Kill the worker that answers a chat, and take a picture once another went on. Returns the path of its job."""
    page.goto(f"{base}/chat")
    page.wait("document.querySelector('select[name=model]').value === 'sim'")
    page.type("textarea", "Tell me a story about a river.")
    page.click(".ask .primary")
    page.wait(f"document.querySelector('.assistant .text')?.textContent.length > {KILL_AFTER_CHARACTERS}")
    instance.kill_worker(
        str(page.run("document.querySelector('.assistant .meta').textContent.match(/worker-[0-9]+/)[0]"))
    )
    page.wait("document.querySelector('.joint')")
    page.wait("document.querySelector('.assistant .badge.good')")
    page.run("document.activeElement.blur()")
    page.wait("document.querySelector('#status').textContent === ''")
    page.screenshot(file)
    return str(page.run("document.querySelector('.assistant .meta a').pathname"))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.pictures", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    args = parser.parse_args(argv)
    if reason := missing():
        sys.stderr.write(f"error: {reason}\n")
        return 1
    args.out.mkdir(exist_ok=True)
    over = Event()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(CHATS) as clients:
        folder = Path(name)
        (folder / "browser").mkdir()
        with running(folder) as instance, browsing(folder / "browser") as browser:
            for number in range(30):
                instance.submit(f"Summarize report {number}.", priority="batch")
            for _ in range(CHATS):
                clients.submit(instance.chat_until, over)
            try:
                page = browser.page()
                take(instance, page, args.out)
                take_texts(instance, page, args.out)
            finally:
                over.set()
                clients.shutdown()
    for file in sorted(args.out.glob("*.png")):
        sys.stdout.write(f"{file}: {file.stat().st_size / 1024:.0f} KiB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
