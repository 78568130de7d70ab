"""Job output of the CLI: follows a job to its end, prints its answer, and maps its final state to an exit code."""

from __future__ import annotations

import json
import sys
from typing import Any

from cli.client import Client, ServerSentEvent
from cli.errors import DONE, ENDED_BADLY, INTERRUPTED, Problem
from cli.output import emit, note, print_json, timed

FINAL = ("completed", "failed", "cancelled", "expired", "incomplete")
TIMES = ("created_at", "started_at", "first_token_at", "completed_at", "expires_at")


def job_timed(job: dict[str, Any]) -> dict[str, Any]:
    """The job object with its Unix times as RFC 3339."""
    return timed(job, TIMES)


def answer_of(result: dict[str, Any]) -> str:
    """The texts of a result; several choices are separated by a blank line."""
    choices = result["choices"]
    return "\n\n".join(choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices)


def ended_badly(job: dict[str, Any]) -> Problem:
    """The error for a job that ended in any state but completed."""
    error = job.get("error") or {}
    return Problem(
        f"the job ended as {job['status']}",
        cause=str(error.get("message", "")),
        next_step=f"penstock jobs show {job['id']}",
        exit_code=ENDED_BADLY,
        code=str(error.get("code") or job["status"]),
    )


def follow(client: Client, job_id: str, *, as_json: bool, after: str = "") -> int:
    """Print a job's tokens, or with `as_json` its events, from `after` on. Ctrl-C stops watching, not the job."""
    try:
        end = _watch(client, job_id, as_json=as_json, after=after)
    except KeyboardInterrupt:
        note(f"\nnot watching any more; the job goes on: penstock jobs events {job_id}")
        return INTERRUPTED
    if end["status"] != "completed":
        raise ended_badly(end)
    return DONE


def _watch(client: Client, job_id: str, *, as_json: bool, after: str) -> dict[str, Any]:
    """Print the events until the last. Returns the job's final state from it."""
    with client.events("GET", f"/v1/jobs/{job_id}/events", after=after) as events:
        for event in events:
            if event.name == "ping":
                continue
            data: dict[str, Any] = json.loads(event.data)
            if as_json:
                print_json({"event": event.name, "id": event.id, "data": job_timed(data)})
                sys.stdout.flush()
            else:
                _show(event, data)
            if event.name in FINAL:
                return data
    raise Problem(
        "the events were cut off",
        cause="the connection ended before the job did",
        next_step=f"penstock jobs events {job_id}",
    )


def _show(event: ServerSentEvent, data: dict[str, Any]) -> None:
    """Print an event: tokens to stdout, all others as notes to stderr."""
    match event.name:
        case "delta":
            emit(data["text"])
            sys.stdout.flush()
        case "queued" | "queue.position":
            if data["position"] is not None:
                note(f"queued, {data['position']} ahead")
        case "started":
            note(f"started on {data['worker']}, attempt {data['attempt']}")
        case "stream.reset":
            note("\n(the answer begins again)")
        case name if name in FINAL:
            sys.stdout.write("\n")
