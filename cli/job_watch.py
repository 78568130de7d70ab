"""`penstock jobs watch`: what happens to one job, a line for each change, until it has ended.

It asks for the job's record twice a second. The tokens come from the job's events, which another thread reads: a
record has no count while the job runs.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cli.client import Client
from cli.errors import DONE, INTERRUPTED, Problem
from cli.job import OUTCOMES, ended_badly, job_timed
from cli.options import Where
from cli.output import emit, note, print_json, rfc3339
from cli.progress import ProgressLine
from cli.suggestions import completed
from penstock.client import FINAL, JobFailed, StreamReset
from telemetry.report.words import duration

LOOK_INTERVAL_S = 0.5

Job = Mapping[str, Any]


class JobChange(NamedTuple):
    """Something that happened to a job."""

    said: str
    at: float | None = None
    """When (Unix seconds), if the job's record tells it; None: as it was seen."""


def changes(before: Job, now: Job) -> Iterator[JobChange]:
    """What has happened between two looks at a job, in the order in which it happened. Pure.

    Args:
        before: as GET /v1/jobs/{id} showed it; {} for the first look.
    """
    if not before:
        yield JobChange(f"accepted, in lane {now['priority']} of {now['model']}", now["created_at"])
    elif now["status"] == "queued" != before["status"]:
        yield JobChange("waits for a worker again")
    if now["status"] == "queued" and (place := _place(now)) and place != _place(before):
        yield JobChange(place)
    known = before.get("attempt_log") or ()
    for number, attempt in enumerate(now.get("attempt_log") or (), 1):
        earlier = known[number - 1] if number <= len(known) else {}
        if not earlier:
            yield JobChange(f"attempt {number} begins on {attempt['worker']}", attempt["started_at"])
        if attempt["outcome"] in OUTCOMES and not earlier.get("outcome"):
            lasted = _between(attempt["started_at"], attempt["ended_at"])
            ending = f"{OUTCOMES[attempt['outcome']]} ({attempt['worker']})"
            yield JobChange(f"attempt {number} ends after {lasted}: {ending}", attempt["ended_at"])
    if now["status"] in FINAL and before.get("status") not in FINAL:
        yield JobChange(_end(now), now["completed_at"])


def _place(job: Job) -> str:
    """Where a job waits, and why; "" if that is not known."""
    if not job or job.get("queue_position") is None:
        return ""
    eta = f", about {duration(job['eta_ms'])}" if job.get("eta_ms") is not None else ""
    reason = f": {job['queue_reason']}" if job.get("queue_reason") else ""
    return f"waits, {job['queue_position']} ahead{eta}{reason}"


def _end(job: Job) -> str:
    usage, error = job.get("usage") or {}, job.get("error") or {}
    said = f"{job['status']} after {_between(job['created_at'], job['completed_at'])}"
    if job["first_token_at"]:
        said += f", first token after {_between(job['created_at'], job['first_token_at'])}"
    if usage:
        said += f", {usage['completion_tokens']} tokens"
    return said + (f": {error['code']}" if error.get("code") else "")


def _between(begin: float | None, end: float | None) -> str:
    return duration(1000 * max(0.0, end - begin)) if begin and end else "?"


class WatchedTokens:
    """Counts the tokens of a running job, in a thread of its own."""

    def __init__(self, client: Client, job_id: str) -> None:
        self._client, self._job_id = client, job_id
        self.tokens = 0
        self._thread = threading.Thread(target=self._read, name="tokens", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _read(self) -> None:
        after = ""
        while True:
            try:
                for event in self._client.stream(self._job_id, after):
                    after = event.id
                    self.tokens += int(event.data.get("tokens", 0)) if event.name == "delta" else 0
                return
            except StreamReset as reset:
                self.tokens, after = 0, reset.cursor
            except (JobFailed, Problem):
                return  # the record says it, or that the server is away


def watch(where: Where, job_id: str, *, as_json: bool) -> int:
    """Follow a job to its end. Ctrl-C stops watching, not the job. Raises Problem, also if it ended badly."""
    with Client.find(where) as client, Client.find(where) as reading:
        count = WatchedTokens(reading, job_id)
        progress = ProgressLine(sys.stderr, {}, quiet=as_json or not sys.stderr.isatty())  # a pipe has the changes
        try:
            with progress:
                job = _until_ended(client, job_id, progress, count, as_json=as_json)
        except KeyboardInterrupt:
            note(completed(f"\nnot watching any more; the job goes on: penstock jobs watch {job_id}"))
            return INTERRUPTED
    if job["status"] != "completed":
        raise ended_badly(dict(job))
    return DONE


def _until_ended(client: Client, job_id: str, progress: ProgressLine, count: WatchedTokens, *, as_json: bool) -> Job:
    """Print every change until the last one; returns the job as it ended."""
    before: Job = {}
    begun = False
    while True:
        now = client.get(f"/v1/jobs/{job_id}")
        for change in changes(before, now):
            _print(now, change, progress, as_json=as_json)
        if now["status"] in FINAL:
            return now
        if not before:
            count.start()
            progress.explain(lambda: f"{count.tokens} tokens" if count.tokens else "")
        elif count.tokens and not begun:
            begun = True
            _print(now, JobChange("the first tokens are there", now["first_token_at"]), progress, as_json=as_json)
        before = now
        progress.phase(_state(now))
        time.sleep(LOOK_INTERVAL_S)


def _print(job: Job, change: JobChange, progress: ProgressLine, *, as_json: bool) -> None:
    said, at = change.said, time.time() if change.at is None else change.at
    if as_json:
        print_json({"at": rfc3339(at), "change": said, "job": job_timed(dict(job) | {"result": None})})
    else:
        progress.phase("")
        emit(f"{time.strftime('%H:%M:%S', time.localtime(at))} {said}\n")
    sys.stdout.flush()


def _state(job: Job) -> str:
    """What the job does now, for the progress line."""
    if job["status"] == "queued":
        return "waits"
    return f"runs on {(job.get('attempt_log') or [{}])[-1].get('worker', 'a worker')}"
