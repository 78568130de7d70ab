"""Stream end rules: what completes an answer, what is continued, and what fails for good. Pure.

An answer is complete only by a finish reason that does not say that the server was interrupted; a word that nobody
knows completes it too, because the next reply would end with the same word. `[DONE]` proves nothing, because vLLM and
SGLang send it after errors too, and its absence after a finish reason is harmless.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from penstock.engine import Failure
from workers.engines.upstream.http.errors import KEY_REFUSED, MAX_PARAM, MAX_WORDS, error_of, name_of, plain, without

LENGTH = frozenset({"length", "max_tokens", "max_length", "max_output_tokens", "model_length", "token_limit",
                    "model_context_window_exceeded", "context_length_exceeded"})  # fmt: skip
FILTERED = frozenset({"content_filter", "content_filtered", "safety", "refusal", "recitation", "blocklist", "spii",
                      "prohibited_content", "guardrail_intervened", "sensitive"})  # fmt: skip
INTERRUPTED = ("error", "abort", "cancel", "timeout", "fail", "interrupt", "resource", "overload", "unavailable")
"""Parts of the finish reasons by which a server says that it did not complete the answer."""
NO_REASON = ("null", "none")
"""Words that some servers give in place of null."""
MAX_REASON = 64
"""Characters of a finish reason that a log shows."""

BUSY = (429, 503, 529)
LIMITED = (429, 529)
"""Of these, the ones that a server gives while it is there: others are waited for as for one that is away."""
RETRIED = (408, 409, 425, 500, 502, 504)
PASSED_ON = (400, 403, 404, 405, 406, 413, 414, 415, 422, 431, 451)
"""Statuses that a client gets as they are: it may do something about them. Other ones of 4xx become 400."""
GOING_ON = ("draining", "internal_error")
"""Errors of a Penstock that end a stream and not its job."""


class End(Enum):
    """What a reply's end means for its request."""

    DONE = "done"
    FAILED = "failed"
    """The job fails by its own fault, whatever the server."""
    BROKEN = "broken"
    """The server's fault: the request is continued."""
    BUSY = "busy"
    """The server has no room, or a rate limit is reached: the request waits."""
    KEY = "key"
    """The server does not take the key."""
    RESTART = "restart"
    """No server that is there can continue it."""
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class ReplyOutcome:
    """How a reply ended. `finish`: of an answer that is complete; `reason`: of one that is not, for logs."""

    end: End
    reason: str = ""
    finish: str = ""
    words: str = ""
    """The server's own words, which may repeat the prompt: for the job's owner, and never logged. Those of an error by
    the server's fault are for nobody: they may tell of its inside."""
    status: int = 0
    sent: bool = True
    """Whether the server may have begun to compute it."""
    malformed: bool = False
    """Whether it broke by what it says, which shows that the server is there."""
    stalled: bool = False
    """Whether it broke because nothing came for too long."""
    told: bool = False
    """Whether it broke by an error inside the stream, with which the generation has ended."""
    bare: bool = False
    """Whether the stream came to its end and only lacks a finish reason. A server that gives none is believed once it
    has nothing to add."""
    param: str | None = None
    retry_s: float | None = None
    """Seconds that a busy server asks to wait."""

    @property
    def failure(self) -> Failure:
        """The failure of a job that ends with this outcome."""
        if self.end is End.FAILED and self.status and self.status < 500:
            code = "context_length_exceeded" if _is_too_long(self.words) else "invalid_request_error"
            said, status = self.words[:MAX_WORDS] or self.reason, self.status if self.status in PASSED_ON else 400
            param = None if self.param is None else self.param[:MAX_PARAM]
            return Failure(code, f"the upstream server refused the request: {said}", status, param)
        return Failure("upstream_error", f"the upstream server failed: {self.reason}", 502)

    def without(self, secrets: Iterable[str]) -> ReplyOutcome:
        """The same, with no key that the server repeats."""
        keys = [each for each in secrets if each]
        if not keys or not (self.words or self.reason or self.param):
            return self
        param = None if self.param is None else without(keys, self.param)
        return replace(self, reason=without(keys, self.reason), words=without(keys, self.words), param=param)


def by_finish(reason: str) -> ReplyOutcome | None:
    """A stream that gave this finish reason; None if the reason says nothing."""
    word = reason.lower()
    if not word or word in NO_REASON:
        return None
    if word in LENGTH:
        return ReplyOutcome(End.DONE, finish="length")
    if word in FILTERED:
        return ReplyOutcome(End.DONE, finish="content_filter")
    if any(part in word for part in INTERRUPTED):
        return ReplyOutcome(End.BROKEN, f"finish reason {reason[:MAX_REASON]!r}")
    return ReplyOutcome(End.DONE, finish="stop")


def by_status(status: int, body: bytes, decoded: Any) -> ReplyOutcome:
    """A reply with an error status. `decoded`: its body as JSON, or None."""
    words, _, param = error_of(decoded) or (plain(body.decode(errors="replace")), 0, None)
    return _by_code(status, f"HTTP {status}", words, param)


def by_error(decoded: Any) -> ReplyOutcome:
    """An error inside a stream that began with 200."""
    words, code, param = error_of(decoded) or ("an error without words", 0, None)
    reason = f"error {code} inside the stream" if code else "an error inside the stream"
    outcome = _by_code(code, reason, words, param) if code else ReplyOutcome(End.BROKEN, reason, words=words)
    return replace(outcome, told=outcome.end is End.BROKEN and name_of(decoded) not in GOING_ON)


def by_cut(reason: str, *, sent: bool = True, bare: bool = False) -> ReplyOutcome:
    """A stream that ended without a finish reason."""
    return ReplyOutcome(End.BROKEN, reason, sent=sent, bare=bare)


def by_malformed(what: str) -> ReplyOutcome:
    """A reply that cannot be read."""
    return ReplyOutcome(End.BROKEN, f"a malformed {what}", malformed=True)


def _by_code(code: int, reason: str, words: str, param: str | None) -> ReplyOutcome:
    end, about = End.BROKEN, None
    if code in BUSY:
        end = End.BUSY
    elif code in KEY_REFUSED:
        end = End.KEY
    elif 400 <= code < 500 and code not in RETRIED:
        end, about = End.FAILED, param
    return ReplyOutcome(end, reason, words=words, status=code, param=about)


def _is_too_long(words: str) -> bool:
    lower = words.lower()
    return "context" in lower and any(each in lower for each in ("length", "exceed", "maximum", "size"))
