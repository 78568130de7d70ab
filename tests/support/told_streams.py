"""Histories of streams that were read to their end, for judges: events with times that a test chooses."""

from __future__ import annotations

from bench.chaos import oracle
from bench.chaos.history import Event

TOKENS = 4
RUN = "worker-1.1"


def said(req: int) -> list[str]:
    """The tokens of a request."""
    return [oracle.plain(oracle.chat(f"p{req}"), number) + "ALIC" for number in range(TOKENS)]


def asked(req: int, at: float = 0.0) -> Event:
    ask = {"req": req, "prompt": f"p{req}", "tokens": TOKENS, "may": ["completed"], "key": "", "reads": True}
    return {"t": at, "event": "ask", **ask, "tenant": "first"}


def taken(req: int, at: float = 0.0) -> Event:
    return {"t": at, "event": "accepted", "req": req, "job": f"job_{req}", "status": 200, "ms": 1.0}


def tokens(req: int, at: float, first: int = 0, last: int = TOKENS) -> list[Event]:
    return [{"t": at, "event": "token", "req": req, "text": text, "id": ""} for text in said(req)[first:last]]


def begun(req: int, at: float = 0.0) -> list[Event]:
    """Asked, accepted, and its first token."""
    return [asked(req, at), taken(req, at), *tokens(req, at, 0, 1)]


def ended(req: int, at: float, attempts: int = 1) -> list[Event]:
    """Its end, and what is then stored."""
    names = ["queued", "started", *["delta"] * TOKENS, "completed"]
    log = [[name, f"1:{number}:{RUN if number > 1 else '-'}"] for number, name in enumerate(names, 1)]
    usage = [oracle.prompt_tokens(oracle.chat(f"p{req}")), TOKENS]
    final = {"job": f"job_{req}", "status": 200, "state": "completed", "code": "", "text": "".join(said(req))}
    read = {"attempts": attempts, "replay": said(req), "before": [], "ends": ["completed"], "log": log}
    end = {"req": req, "state": "completed", "code": "", "usage": usage, "finish": ["length"]}
    finals = {"t": at, "event": "final", **final, **read, "usage": usage, "finish": ["length"]}
    return [{"t": at, "event": "end", **end}, finals]


def refused(req: int, at: float, code: str = "store_unavailable") -> Event:
    answer = {"status": 503, "code": code, "ms": 1.0, "retry_after": "1"}
    return {"t": at, "event": "refused", "req": req, **answer}
