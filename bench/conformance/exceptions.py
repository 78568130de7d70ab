"""Exceptions: cases of suites that Penstock does not pass, each with its reason."""

from __future__ import annotations

import re
from dataclasses import dataclass

DURABLE, RESPONSES = "Durable Streams", "Open Responses"


@dataclass(frozen=True, slots=True)
class ExpectedFailure:
    """Cases of one suite whose name matches `pattern`, and why they are not passed."""

    suite: str
    pattern: str
    reason: str


EXPECTED: tuple[ExpectedFailure, ...] = (
    ExpectedFailure(DURABLE, r"^Fork - ", "no forks: a job's stream has one history"),
    ExpectedFailure(DURABLE, r"[Pp]roducer", "no producers: workers write"),
    ExpectedFailure(DURABLE, r"(?:TTL|[Ee]xpir)", "no Stream-TTL: jobs are kept for [redis] retention_s"),
    ExpectedFailure(
        DURABLE, r"(?:[Ww]ebhook|[Ss]ubscription)", "no subscriptions of this protocol: Penstock has webhooks"
    ),
    ExpectedFailure(
        DURABLE, r"(?:\bseq\b|[Ss]equence [Oo]rdering)", "no Stream-Seq: workers write, each run in its order"
    ),
    ExpectedFailure(DURABLE, r"(?:base64|SSE Mode.*binary)", "no binary streams: Penstock's hold JSON"),
    ExpectedFailure(DURABLE, r"CORS preflight", "preflights are answered for the origins in [api] cors_origins alone"),
    ExpectedFailure(DURABLE, r"body dedup", "no producers: workers write"),
    ExpectedFailure(RESPONSES, r"^image-input$", "no images: 400 that names the part"),
    ExpectedFailure(RESPONSES, r"^compact", "no /v1/responses/compact: 405"),
    ExpectedFailure(RESPONSES, r"^websocket", "no WebSockets: a stream, which can be resumed"),
)
"""In order: the first one that matches counts."""


def reason_of(suite: str, case: str) -> str:
    """Return why a case is not passed; "" if it should be."""
    reasons = (each.reason for each in EXPECTED if each.suite == suite and re.search(each.pattern, case))
    return next(reasons, "")


def all_but_expected(suite: str) -> str:
    """Return a pattern of the names of all other cases of a suite, for programs that select cases by one."""
    patterns = "|".join(f"(?:.*{each.pattern})".replace(".*^", "") for each in EXPECTED if each.suite == suite)
    return f"^(?!{patterns})"
