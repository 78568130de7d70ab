"""Reattachment: how a generation that goes on without its reader is named at a server, found, read again and stopped.

A server gives such a generation again from its beginning, and what was logged of it is swallowed. So nothing of the
server's needs to be logged: the name is made from the request. llama-server keeps the bytes of a reply under the name
of its X-Conversation-Id; a Penstock gives the job of an idempotency key. Pure.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import quote

from penstock.engine import Request
from workers.engines.upstream.continuation.ladder import FROM_BEGINNING, Rung
from workers.engines.upstream.server.kinds import ServerFacts

BY_NAME = "DELETE"
"""Method of a call that stops whatever generation has a name."""
JOB_HEADER = "x-job-id"
JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


def kept_under(facts: ServerFacts, request: Request, rung: Rung, tried: Collection[Rung] = ()) -> dict[str, str]:
    """The header that names a generation, "" to "": only of replies from the beginning, since others lack a part.
    `tried`: as in the ladder; the key of a job that is given up leads to that job for as long as it is kept."""
    if not request.text_id or rung not in FROM_BEGINNING:
        return {}
    if facts.reattach == "stream":
        return {"X-Conversation-Id": stream_name(request)}
    # A replay is another generation than the one that is lost.
    by_key = facts.reattach == "key" and rung is not Rung.REPLAY and Rung.REATTACH not in tried
    return {"Idempotency-Key": _key(facts, request)} if by_key else {}


def stream_name(request: Request) -> str:
    """Of a text at a llama-server: a new generation of the text ends the one before."""
    return quote(request.text_id, safe="")


def _key(facts: ServerFacts, request: Request) -> str:
    """Of an answer at a Penstock: one that begins again, or that another model gives, is another job."""
    return hashlib.sha256(f"{request.text_id}\n{request.begun_by}\n{facts.model}".encode()).hexdigest()


def stream_path(request: Request) -> str:
    """Where a llama-server gives a reply again, behind its base."""
    return f"/stream?conv_id={quote(stream_name(request), safe='')}&from=0"


def stop_path(facts: ServerFacts, request: Request, headers: Mapping[str, str]) -> tuple[str, str] | None:
    """Method and path, behind the base, that stop a generation; None: nothing does. `headers`: of its reply."""
    if not request.text_id:
        return None
    if facts.reattach == "stream":
        return BY_NAME, f"/stream?conv_id={quote(stream_name(request), safe='')}"
    path = cancel_path(headers) if facts.reattach == "key" else None
    return None if path is None else ("POST", path)


def cancel_path(headers: Mapping[str, str]) -> str | None:
    """Where a Penstock cancels the job of a reply with these headers; None: they name none."""
    job_id = headers.get(JOB_HEADER, "")
    return f"/jobs/{job_id}/cancel" if JOB_ID.fullmatch(job_id) else None


def begun_at(found: Any, request: Request) -> float:
    """When the reply of this text began that a llama-server keeps (its Unix time), by the answer of LOOKUP; 0: it keeps
    none."""
    rows = found if isinstance(found, list) else []
    starts = [row.get("started_at") for row in rows if isinstance(row, Mapping)
              and row.get("conversation_id") == stream_name(request)]  # fmt: skip
    return max([float(each) for each in starts if isinstance(each, int | float)], default=0.0)
