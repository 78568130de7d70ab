"""Job output of the CLI: follows a job to its end, prints its answer, and maps its final state to an exit code."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cli.client import Client
from cli.options import Where, completed
from cli.output import (
    DONE,
    ENDED_BADLY,
    INTERRUPTED,
    UNREACHABLE,
    Problem,
    StreamWrapper,
    emit,
    note,
    print_json,
    print_table,
    rfc3339,
    terminal_width,
    timed,
    visible,
)
from cli.progress import ProgressLine
from penstock.client import FINAL, JobFailed, Pause, StreamEvent, StreamReset
from penstock.text import duration

ATTEMPT_COLUMNS = ("WORKER", "STARTED", "SECONDS", "TOKENS", "OUTCOME")
OUTCOMES = {
    "lost": "its worker died",
    "handed_back": "its worker was stopped",
    "returned": "its server was away",
    "preempted": "made room for a higher lane",
}
"""What became of an attempt, in words; any other outcome is the state in which it ended the job."""
INTERRUPTIONS = {
    "handed_back": "{} was stopped",
    "returned": "the server of {} was away",
    "preempted": "{} made room for a higher lane",
}
"""The same, of a worker; any other outcome is its loss."""
MAX_SHOWN_CHARS, MAX_SHOWN_ITEMS = 400, 6
"""Of each text and of each list of a request, unless all of it is shown."""


def job_timed(job: dict[str, Any]) -> dict[str, Any]:
    """The job object with its Unix times, and those of its attempts, as RFC 3339."""
    attempts = [timed(each) for each in job.get("attempt_log") or ()]
    return timed(job) | ({"attempt_log": attempts} if attempts else {})


def attempts_in_words(job: dict[str, Any]) -> str:
    """How often a worker took a job, and how many of these attempts count as none, because its server was away."""
    returned = sum(each["outcome"] == "returned" for each in job.get("attempt_log") or ())
    return f"{job['attempts']}" + (f", of which {returned} count as none: the server was away" if returned else "")


def print_attempts(job: dict[str, Any]) -> None:
    """Print what became of each attempt at a job, as the API sent it, if it has more to say than the job itself."""
    attempts = job.get("attempt_log") or []
    if attempts:
        emit("\n")
        print_table(ATTEMPT_COLUMNS, [_attempt_row(each) for each in attempts])
    if any(each["outcome"] == "lost" for each in attempts):
        note(completed(f"next:  penstock logs --job {job['id']}"))


def _attempt_row(attempt: dict[str, Any]) -> tuple[str, ...]:
    began, ended, outcome = attempt["started_at"], attempt["ended_at"], attempt["outcome"] or "running"
    return (
        attempt["worker"],
        rfc3339(began) if began else "-",
        f"{ended - began:.1f}" if began and ended else "-",
        "-" if attempt["tokens"] is None else str(attempt["tokens"]),
        OUTCOMES.get(outcome, outcome),
    )


def print_input(job: dict[str, Any], *, whole: bool = True) -> None:
    """Print the request of a job as JSON, if it was asked for; without `whole`, of long texts and lists only a part."""
    if asked := job.get("input"):
        part = asked if whole else _shortened(asked)
        emit(f"\n{json.dumps(part, ensure_ascii=False, indent=2)}\n")
        if part != asked:
            note(completed(f"all of the request: penstock jobs show {job['id']} --input"))
    elif "input" in job:
        note("the request cannot be read any more")


def _shortened(value: Any) -> Any:
    """A part of a JSON value: of a text its beginning, of a list its end, where the newest messages are."""
    match value:
        case str() if len(value) > MAX_SHOWN_CHARS:
            return f"{value[:MAX_SHOWN_CHARS]}… ({len(value):,} characters)"
        case list():
            left = len(value) - MAX_SHOWN_ITEMS
            return [*([f"… {left:,} before these"] if left > 0 else []), *map(_shortened, value[-MAX_SHOWN_ITEMS:])]
        case dict():
            return {name: _shortened(each) for name, each in value.items()}
        case _:
            return value


def answer_of(result: dict[str, Any]) -> str:
    """The texts of a result; a blank line between choices; calls of functions follow, each in a line. Vectors, rankings
    and token ids as JSON."""
    if result.get("object") == "response":
        return _one_text(
            "".join(part["text"] for item in result["output"] for part in item.get("content", ())),
            [item for item in result["output"] if item["type"] == "function_call"],
        )
    if "choices" not in result:
        return json.dumps(result, ensure_ascii=False)
    return "\n\n".join(map(_text_of, result["choices"]))


def _text_of(choice: dict[str, Any]) -> str:
    if "message" not in choice:
        return str(choice["text"])
    message = choice["message"]
    return _one_text(message["content"] or "", [call["function"] for call in message.get("tool_calls") or ()])


def _one_text(text: str, calls: Sequence[dict[str, Any]]) -> str:
    return "\n".join([*filter(None, [text]), *(f"{call['name']}({call['arguments']})" for call in calls)])


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


def interruption(event: StreamEvent) -> str:
    """Say that a worker does not go on with an answer, or which one does; "" for any other event."""
    before = event.data if event.name == "interrupted" else event.data.get("previous")
    if event.name not in ("interrupted", "started") or not before:
        return ""
    ended = INTERRUPTIONS.get(before["outcome"], "{} was lost").format(before["worker"])
    if event.name == "interrupted":
        return f"{ended}; waiting for a worker to continue"
    verb, worker = "continued" if event.data["attempt"] > 1 else "begun again", event.data["worker"]
    is_same = worker == before["worker"]
    ended += " and started again" if is_same and before["outcome"] not in ("returned", "preempted") else ""
    return f"{ended}; {verb}{'' if is_same else f' by {worker}'} after {duration(before['pause_ms'])}"


class AnswerPrinter:
    """Prints an answer to stdout as it comes: the first choice live, all others behind it, as `answer_of` has them."""

    def __init__(self) -> None:
        self.texts: defaultdict[int, list[str]] = defaultdict(list)
        self._waits = False
        self._wrapper = StreamWrapper(sys.stdout.write, _stdout_width) if sys.stdout.isatty() else None
        """Elsewhere every byte stays as it is."""

    @property
    def text(self) -> str:
        """The text of the first choice, as the model wrote it."""
        return "".join(self.texts[0])

    def take(self, event: StreamEvent) -> None:
        """Print a delta; on any job's last event, whatever is left, and as a note whether the text was cut off."""
        if event.text:
            self.texts[event.choice].append(event.text)
        if event.text and not event.choice:
            self._show(event.text)
            sys.stdout.flush()
        elif event.name in FINAL:
            for choice, parts in sorted(self.texts.items()):
                self._show("\n\n" + "".join(parts) if choice else "")
            self.flush()
            sys.stdout.write("\n")
            sys.stdout.flush()
            if "length" in event.data.get("finish_reasons", ()):
                note("(cut at --max-tokens)")

    def flush(self) -> None:
        """Show what is held back until its word is complete."""
        if self._wrapper is not None:
            self._wrapper.flush()
            sys.stdout.flush()

    def _show(self, text: str) -> None:
        if self._wrapper is not None:
            self._wrapper.feed(visible(text))
        else:
            emit(text)

    def begin_again(self, reset: StreamReset) -> None:
        """Another text follows. Raises Problem if the first one stands where nobody can tell them apart."""
        if self.text and not sys.stdout.isatty():
            sys.stdout.write("\n")
            raise Problem(
                "the answer was cut off",
                cause="the store lost part of it, and it was written again from its beginning",
                next_step=f"penstock jobs result {reset.job_id}",
                code="stream_reset",
            )
        if self.text:
            self.flush()
            note("\n(the answer begins again)")
        self.texts.clear()
        self._wrapper = StreamWrapper(sys.stdout.write, _stdout_width) if self._wrapper is not None else None

    def aside(self, words: str, say: Callable[[str], object] = note) -> None:
        """Say something beside the answer, on a terminal in a line of its own."""
        if self._wrapper is not None:
            self._wrapper.begin_line()
        say(("\n" if self.text and self._wrapper is not None else "") + words)

    def waiting(self, say: Callable[[str], object]) -> Callable[[Pause], None]:
        """A function that says once, in one line, that there is a wait for the server."""

        def tell(pause: Pause) -> None:
            if self._waits:
                return
            self._waits = True
            cause = pause.cause if pause.status else f"the connection to {pause.url} broke"
            self.aside(f"({cause.removesuffix('.')}; trying again)", say)

        return tell


def _stdout_width() -> int:
    return terminal_width(sys.stdout)


def print_answer(
    client: Client, job_id: str, printer: AnswerPrinter, seen: Callable[[StreamEvent], object], after: str = ""
) -> None:
    """Print a job's answer to its end; `seen` gets every event first. Raises Problem."""
    while True:
        try:
            for event in client.stream(job_id, after):
                after = event.id
                seen(event)
                printer.take(event)
        except StreamReset as reset:
            printer.begin_again(reset)
            after = reset.cursor
        except JobFailed as failed:
            raise ended_badly(failed.job) from None
        except Problem as problem:
            if problem.exit_code == UNREACHABLE:
                problem.next_step = f"the job goes on: penstock jobs result {job_id}"
            raise
        else:
            return
        finally:
            printer.flush()  # also of an answer that is interrupted


def follow(client: Client, job_id: str, *, as_json: bool, after: str = "") -> int:
    """Print a job's tokens, or with `as_json` its events, from `after` on. Ctrl-C stops watching, not the job."""
    printer = _JsonPrinter() if as_json else AnswerPrinter()
    if not as_json:
        client.on_retry(printer.waiting(note))
    try:
        print_answer(client, job_id, printer, lambda event: None if as_json else _note(event, printer.aside), after)
    except KeyboardInterrupt:
        note(completed(f"\nnot watching any more; the job goes on: penstock jobs events {job_id}"))
        return INTERRUPTED
    return DONE


class _JsonPrinter(AnswerPrinter):
    """Prints each event as one line of JSON."""

    def take(self, event: StreamEvent) -> None:
        print_json({"event": event.name, "id": event.id, "data": job_timed(event.data)})
        sys.stdout.flush()

    def begin_again(self, reset: StreamReset) -> None:
        self.take(reset.event)


def _note(event: StreamEvent, say: Callable[[str], object]) -> None:
    """Say what an event means that brings no text."""
    match event.name:
        case "queued" | "queue.position":
            if event.data["position"] is not None:
                say(f"queued, {event.data['position']} ahead")
        case "started" | "interrupted":
            begun = f"started on {event.data['worker']}, attempt {event.data.get('attempt')}"
            say(interruption(event) or begun)


# It asks for the job's record twice a second. The tokens come from the job's events, which another thread reads: a
# record has no count while the job runs.


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


def watch(client: Client, where: Where, job_id: str, *, as_json: bool) -> int:
    """Follow a job to its end. Ctrl-C stops watching, not the job. Raises Problem, also if it ended badly."""
    with Client.find(where) as reading:
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
