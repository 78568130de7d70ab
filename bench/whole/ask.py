"""One answer in one piece: what to ask for, when it came, and whether every token of every choice is in it."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.breakdown.ask import BreakdownTarget
from bench.http import fetch
from bench.load.streams import misplaced

TIMING_TIMEOUT_S = 10.0
"""How long the server may take to write down when an answer was sent."""
MAX_N = 8
"""Choices of one prompt that a request may ask for; more are asked for by a list of prompts."""


@dataclass(frozen=True, slots=True)
class AnswerSize:
    """Of one answer."""

    choices: int
    tokens: int
    """Of each choice."""

    def body(self, model: str, number: int) -> dict[str, Any]:
        """A completion request; `number` makes its prompts unlike those of other requests."""
        n = next(n for n in range(min(MAX_N, self.choices), 0, -1) if self.choices % n == 0)
        prompts = [f"Tell me about water, please: question {number}.{at}." for at in range(self.choices // n)]
        return {
            "model": model,
            "prompt": prompts if len(prompts) > 1 else prompts[0],
            "n": n,
            "max_tokens": self.tokens,
        }


@dataclass(frozen=True, slots=True)
class Came:
    """An answer, or why there is none."""

    at: float
    """When its last byte was here, as Unix time."""
    spent_ms: float
    """From sending the request."""
    behind_ms: float | None
    """From the engine's last token, by the server's stamp; None: the server does not say."""
    clock_error_ms: float = 0.0
    wrong: str = ""


def ask(target: BreakdownTarget, size: AnswerSize, number: int, limit_s: float) -> Came:
    """Ask and wait, at most `limit_s` seconds."""
    began = time.time()
    try:
        asked = json.dumps(size.body(target.model, number)).encode()
        known = {"Content-Type": "application/json", **target.headers}
        status, headers, body = fetch(
            target.port, "POST", "/v1/completions", asked, known, host=target.host, timeout_s=limit_s
        )
    except (OSError, http.client.HTTPException) as error:
        at = time.time()
        return Came(at, 1e3 * (at - began), None, wrong=f"{type(error).__name__} after {at - began:.0f} s: {error}")
    at = time.time()
    wrong = fault_of(json.loads(body), size) if status == 200 else body.decode(errors="replace")[:200]
    ended, clock_error_ms = _ended(target, headers) if not wrong else (None, 0.0)
    return Came(at, 1e3 * (at - began), None if ended is None else 1e3 * (at - ended), clock_error_ms, wrong)


def _ended(target: BreakdownTarget, headers: Mapping[str, str]) -> tuple[float | None, float]:
    """When the engine was done, as Unix time, and how exactly that is known, in ms: the control says it in a header,
    Penstock in the job's timing."""
    if "x-ended" in headers:
        return float(headers["x-ended"]), 0.0
    path, deadline = f"/v1/jobs/{headers['x-job-id']}/timing", time.monotonic() + TIMING_TIMEOUT_S
    while True:
        timing = next(target.get([path]))
        ended = timing["stamps"]["last_token"]
        if ended is not None or time.monotonic() > deadline:
            return ended, timing["clock_error_ms"]["worker"]
        time.sleep(0.05)


def fault_of(answer: Mapping[str, Any], size: AnswerSize) -> str:
    """What is wrong with an answer; "" if it has all choices, each with all its tokens in order."""
    choices = answer["choices"]
    if [choice["index"] for choice in choices] != list(range(size.choices)):
        return f"{len(choices)} choices instead of {size.choices}, or out of order"
    faults = (misplaced(choice["text"].split(), size.tokens) for choice in choices)
    return next((fault for fault in faults if fault), "")
