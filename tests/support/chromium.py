"""Headless browser: drives Debian's chromium over a pipe, for tests of the console.

It speaks the Chrome DevTools Protocol: JSON messages, each ended by a zero byte, on the file descriptors 3 and 4 of the
browser. The browser resolves no name, so it reaches only this machine.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync", "--lang=en-GB",
    "--disable-background-networking", "--disable-component-update", "--disable-popup-blocking", "--hide-scrollbars",
    "--disable-dev-shm-usage", "--force-color-profile=srgb", "--remote-debugging-pipe",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)  # fmt: skip
ANSWER_TIMEOUT_S, WAIT_TIMEOUT_S, POLL_INTERVAL_S = 30.0, 30.0, 0.05


class PageError(Exception):
    """A script of the page failed, or what was waited for did not happen."""


def missing() -> str:
    """Why there can be no browser; "" if there can."""
    return "" if shutil.which("chromium") else "chromium is not on the PATH (Debian: apt-get install chromium)"


class BrowserPage:
    """One page of a browser. `errors`: what its console and its scripts complained about."""

    def __init__(self, ask: Callable[..., dict[str, Any]], session: str, errors: list[str]) -> None:
        self._ask, self._session, self.errors = ask, session, errors

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command of the protocol, and return its result. Raises PageError."""
        return self._ask(method, params, self._session)

    def show(self, width: int, height: int) -> None:
        """Set the size of the page."""
        size = {"width": width, "height": height}
        self.command("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=width < 600)

    def goto(self, url: str) -> None:
        """Open an address."""
        self.command("Page.navigate", url=url)
        address = json.dumps(url.partition("#")[0])
        self.wait(f"location.href.split('#')[0] === {address} && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return the value of an expression, which may be a promise. Raises PageError."""
        answer = self.command(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise PageError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def wait(self, script: str, timeout_s: float = WAIT_TIMEOUT_S) -> Any:
        """Wait until an expression is true, and return its value. Raises PageError."""
        deadline, error = time.monotonic() + timeout_s, ""
        while time.monotonic() < deadline:
            try:
                if (value := self.run(script)) not in (None, False, 0, ""):  # an element is {} here
                    return value
            except PageError as failure:  # also while a page is left
                error = str(failure)
            time.sleep(POLL_INTERVAL_S)
        shown = self.run("document.body.innerText")
        raise PageError(f"{script} did not become true in {timeout_s:g} s. {error}\nThe page shows:\n{shown}")

    def click(self, selector: str) -> None:
        """Click an element once it is there and can be used."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})].find((each) => !each.disabled)"
        self.wait(f"Boolean({found})")
        self.run(f"{found}.click()")

    def press(self, key: str) -> None:
        """Press a key, as a person does."""
        code = {"Escape": 27, "Enter": 13, "Tab": 9}.get(key)
        text = {} if code and key != "Enter" else {"text": "\r" if key == "Enter" else key}
        params = {"key": key, "windowsVirtualKeyCode": code or ord(key.upper()), **text}
        self.command("Input.dispatchKeyEvent", type="keyDown", **params)
        self.command("Input.dispatchKeyEvent", type="keyUp", key=key)

    def type(self, selector: str, text: str) -> None:
        """Write into a field."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")
        self.command("Input.insertText", text=text)

    def choose_file(self, selector: str, file: Path) -> None:
        """Choose a file in an upload field."""
        root = self.command("DOM.getDocument")["root"]["nodeId"]
        node = self.command("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.command("DOM.setFileInputFiles", nodeId=node, files=[str(file)])


class Browser:
    """A running browser. Close it with `close`."""

    def __init__(self, folder: Path) -> None:
        """`folder`: for its profile and its log."""
        to_browser, from_us = os.pipe()
        to_us, from_browser = os.pipe()
        with (folder / "chromium.log").open("wb") as log:
            self._process = subprocess.Popen(
                [shutil.which("bash") or "bash", "-c", f'exec chromium "$@" 3<&{to_browser} 4>&{from_browser}',
                 "chromium", *FLAGS, f"--user-data-dir={folder / 'profile'}"],
                env={**os.environ, "HOME": str(folder)}, pass_fds=(to_browser, from_browser), stdout=log, stderr=log,
                process_group=0,
            )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._to, self._from, self._rest, self._last = from_us, to_us, b"", 0
        self._errors: dict[str, list[str]] = {}

    def page(self) -> BrowserPage:
        """Open an empty page."""
        target = self._ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self._ask("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        errors = self._errors.setdefault(session, [])
        page = BrowserPage(self._ask, session, errors)
        for domain in ("Page", "Runtime", "DOM", "Log", "Network"):
            page.command(f"{domain}.enable")
        return page

    def close(self) -> None:
        """End the browser and its helpers."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def _ask(self, method: str, params: dict[str, Any], session: str = "") -> dict[str, Any]:
        """Send a command, and wait for its answer. Raises PageError."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params} | ({"sessionId": session} if session else {})
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while True:
            answer = self._message()
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise PageError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])
            self._note(answer)

    def _message(self) -> dict[str, Any]:
        """Read the next message. Raises PageError after ANSWER_TIMEOUT_S."""
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], ANSWER_TIMEOUT_S)[0]:
                raise PageError("the browser does not answer")
            data = os.read(self._from, 1 << 20)
            if not data:
                raise PageError("the browser has ended")
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, message: dict[str, Any]) -> None:
        """Keep what a page complains about."""
        params, errors = message.get("params", {}), self._errors.get(message.get("sessionId", ""))
        if errors is None:
            return
        if message["method"] == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            errors.append(details.get("exception", {}).get("description", details["text"]))
        elif message["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser with a new profile in this folder."""
    browser = Browser(folder)
    try:
        yield browser
    finally:
        browser.close()
