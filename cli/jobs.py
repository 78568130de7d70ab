"""`penstock submit` and `penstock jobs`: queues jobs; lists, times, follows and cancels them; prints their answers.

A job's final state becomes an exit code."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import click

from cli.app import Group
from cli.client import Client, limit_option
from cli.options import Where, command, completed, moment
from cli.output import (
    DONE,
    ENDED_BADLY,
    INTERRUPTED,
    STILL_RUNNING,
    UNREACHABLE,
    CommandResult,
    Problem,
    ProgressLine,
    emit,
    fields_result,
    line_result,
    list_result,
    note,
    print_json,
    print_rows,
    print_table,
    rfc3339,
    stdout_wrapper,
    terminal_width,
    timed,
    visible,
)
from penstock.client import FINAL, JobFailed, Pause, StreamEvent, StreamReset, WaitTimeout
from penstock.text import duration, fault_of
from streaming.order import Priority
from telemetry.latency import EGRESS_FIRST, PARTS

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
    if attempts := job.get("attempt_log") or []:
        emit("\n")
        print_rows(map(_attempt_row, attempts), ("worker", "started", "seconds", "tokens", "outcome"))
    if any(each["outcome"] == "lost" for each in attempts):
        note(completed(f"next:  penstock logs --job {job['id']}"))


def _attempt_row(attempt: dict[str, Any]) -> dict[str, Any]:
    began, ended, outcome = attempt["started_at"], attempt["ended_at"], attempt["outcome"] or "running"
    return attempt | {
        "started": rfc3339(began) if began else None,
        "seconds": f"{ended - began:.1f}" if began and ended else None,
        "outcome": OUTCOMES.get(outcome, outcome),
    }


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
        text = "".join(part["text"] for item in result["output"] for part in item.get("content", ()))
        return _one_text(text, [item for item in result["output"] if item["type"] == "function_call"])
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
    what, next_step = f"the job ended as {job['status']}", f"penstock jobs show {job['id']}"
    cause, code = str(error.get("message", "")), str(error.get("code") or job["status"])
    return Problem(what, cause=cause, next_step=next_step, exit_code=ENDED_BADLY, code=code)


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
        self._wrapper = stdout_wrapper() if sys.stdout.isatty() else None
        """None unless stdout is a terminal: every byte then stays as it is."""

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
            what = "the answer was cut off"
            cause = "the store lost part of it, and it was written again from its beginning"
            raise Problem(what, cause=cause, next_step=f"penstock jobs result {reset.job_id}", code="stream_reset")
        if self.text:
            self.flush()
            note("\n(the answer begins again)")
        self.texts.clear()
        self._wrapper = stdout_wrapper() if self._wrapper is not None else None

    def aside(self, words: str, say: Callable[[str], object] = note) -> None:
        """Say something beside the answer, on a terminal in a line of its own."""
        if self._wrapper is not None:
            self._wrapper.begin_line()
        say(("\n" if self.text and self._wrapper is not None else "") + words)

    def waiting(self, pause: Pause, say: Callable[[str], object] = note) -> None:
        """Say once, in one line, that there is a wait for the server."""
        if not self._waits:
            self._waits = True
            cause = pause.cause if pause.status else f"the connection to {pause.url} broke"
            self.aside(f"({cause.removesuffix('.')}; trying again)", say)


def print_answer(
    client: Client, job_id: str, printer: AnswerPrinter, seen: Callable[[StreamEvent], object], after: str = ""
) -> None:
    """Print a job's answer to its end; `seen` gets every event first. Raises Problem."""
    while True:
        try:
            with _naming_job(job_id):
                for event in client.stream(job_id, after):
                    after = event.id
                    seen(event)
                    printer.take(event)
        except StreamReset as reset:
            printer.begin_again(reset)
            after = reset.cursor
        except JobFailed as failed:
            raise ended_badly(failed.job) from None
        else:
            return
        finally:
            printer.flush()  # also of an answer that is interrupted


@contextmanager
def _naming_job(job_id: str) -> Iterator[None]:
    """If no server answers any more, name the command that prints the job's answer later."""
    try:
        yield
    except Problem as problem:
        if problem.exit_code == UNREACHABLE:
            problem.next_step = f"the job goes on: penstock jobs result {job_id}"
        raise


def follow(client: Client, job_id: str, *, as_json: bool, after: str = "") -> int:
    """Print a job's tokens, or with `as_json` its events, from `after` on. Ctrl-C stops watching, not the job."""
    printer = _JsonPrinter() if as_json else AnswerPrinter()
    if not as_json:
        client.on_retry(printer.waiting)
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


LOOK_INTERVAL_S = 0.5
"""How often `jobs watch` asks for the job's record."""

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


class WatchedTokens(threading.Thread):
    """Counts the tokens of a running job from its events, in a thread of its own: its record has no count yet."""

    def __init__(self, client: Client, job_id: str) -> None:
        super().__init__(name="tokens", daemon=True)
        self._client, self._job_id, self.tokens = client, job_id, 0

    def run(self) -> None:
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


def stdin_text() -> str:
    """All of stdin. Raises Problem if it is not UTF-8 text."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        cause = f"it is {fault_of(error.object)}"
        raise Problem("stdin is no UTF-8 text", cause=cause, next_step="convert it first", code="usage") from None


COLUMNS = ("id", "status", "lane", "model", "created_at", "took", "tokens", "prompt")
STATES = ["queued", "in_progress", "completed", "failed", "cancelled", "expired"]
WIDTH, NARROW = 40, 20
"""Length of the longest bar in characters; NARROW where the terminal has no room for it."""
EIGHTHS = " ▏▎▍▌▋▊▉"
"""The end of a bar, by eighths of a character."""
WIDE = 110
"""Columns of a terminal that has room for WIDTH."""
A_SECOND_MS = 1000.0
SENT_WHOLE = "the answer was sent in one piece"
"""The API's reason why a first token was not delivered on its own."""
HEADER = ("PART", "MS", "", "WHAT IT IS")


@click.group(cls=Group)
def jobs() -> None:
    """List, show, time, follow and cancel jobs.

    \b
    Examples:
      penstock jobs ls
      penstock jobs show job_0074d316
      penstock jobs cancel job_0074d316
    """


@command("ls", jobs)
@click.option("--status", type=click.Choice(STATES), help="Only jobs in this state.")
@click.option("--model", help="Only jobs of this model.")
@click.option("--lane", type=click.Choice([lane.value for lane in Priority]), help="Only jobs of this lane.")
@click.option("--tenant", help="Jobs of this tenant, or of all: '*'. Needs an admin key, and hides their prompts.")
@click.option("--since", help="Only jobs accepted since then: 15m, 2h, 7d (ago), or a time (UTC).")
@click.option("--until", help="Only jobs accepted until then.")
@limit_option()
def ls(
    client: Client, limit: int, tenant: str | None, since: str | None, until: str | None, **equal: str | None
) -> CommandResult:
    """List jobs, newest first, with the first words of their prompts.

    \b
    Examples:
      penstock jobs ls
      penstock jobs ls --status failed --limit 100
      penstock jobs ls --lane batch --since 2h
      penstock jobs ls --json
    """
    now = time.time()
    times = {name: moment(text, now) for name, text in (("since", since), ("until", until)) if text}
    path = "/admin/jobs" if tenant else "/v1/jobs"
    found = client.pages(path, limit, "cursor", "next_cursor", tenant=tenant, **equal, **times)

    def shown() -> None:
        all_found = list(found)
        list_result((), columns_of(all_found), "no jobs", map(_row, all_found)).show()

    return CommandResult(map(job_timed, found), shown)


def columns_of(found: Iterable[Mapping[str, Any]]) -> Sequence[str]:
    """The columns of a table of jobs; that of endpoints only where there are several, tenants and prompts if known."""
    place, jobs_found = COLUMNS.index("model") + 1, list(found)
    further = ["endpoint"] if len({job.get("endpoint") for job in jobs_found}) > 1 else []
    further += ["tenant"] if any("tenant" in job for job in jobs_found) else []
    last = COLUMNS[place:] if any(job.get("preview") for job in jobs_found) else COLUMNS[place:-1]
    return (*COLUMNS[:place], *further, *last)


@command("show", jobs)
@click.option("--input", "whole", is_flag=True, help="Show all of its request; without it, long texts are cut.")
def show(client: Client, job_id: str, whole: bool) -> CommandResult:
    """Show one job: its state, times, place in the lane, its request, what became of each attempt, and its answer.

    \b
    Examples:
      penstock jobs show job_0074d316
      penstock jobs show job_0074d316 --input
      penstock jobs show job_0074d316 --json
    """
    found = client.get(f"/v1/jobs/{job_id}", include="input")
    job = job_timed(found)
    fields = {name: value for name, value in job.items() if name not in ("attempt_log", "input", "result")}

    def shown() -> None:
        fields_result(job, fields | {"attempts": attempts_in_words(job)}).show()
        print_input(job, whole=whole)
        print_attempts(found)
        if answer := job.get("result"):
            emit(f"\nRESULT\n{answer_of(answer)}\n")

    return CommandResult(job, shown)


@command("result", jobs)
def result(client: Client, job_id: str) -> CommandResult:
    """Print the answer of a job that has completed.

    \b
    Examples:
      penstock jobs result job_0074d316
    """
    job = client.get(f"/v1/jobs/{job_id}")
    if job["status"] in ("queued", "in_progress"):
        what, next_step = f"the job is still {job['status']}", f"penstock jobs events {job_id}"
        raise Problem(what, next_step=next_step, exit_code=STILL_RUNNING, code="not_ready")
    if job["status"] != "completed":
        raise ended_badly(job)
    return line_result(job["result"], answer_of(job["result"]))


@command("events", jobs)
@click.option("--after", default="", help="Id of the last event seen, to go on behind it.")
def events(client: Client, job_id: str, after: str, as_json: bool) -> int:
    """Follow a job to its end: its tokens on stdout, or with --json every event, one per line.

    \b
    Examples:
      penstock jobs events job_0074d316
      penstock jobs events job_0074d316 --after 1:131:fd1fa10b0c19-1 --json
    """
    return follow(client, job_id, as_json=as_json, after=after)


@command("watch", jobs)
def watch(client: Client, job_id: str, where: Where, as_json: bool) -> int:
    """Follow what happens to a job: its place in the queue, each attempt and its worker, tokens, and how it ends.

    \b
    Examples:
      penstock jobs watch job_0074d316
      penstock jobs watch job_0074d316 --json
    """
    quiet = as_json or not sys.stderr.isatty()  # a pipe has the changes
    before: Job = {}
    begun = False
    try:
        with (
            _naming_job(job_id),
            Client.find(where) as reading,
            ProgressLine(sys.stderr, os.environ, quiet=quiet) as progress,
        ):
            if not as_json:
                client.on_retry(partial(AnswerPrinter().waiting, say=progress.say))
            count = WatchedTokens(reading, job_id)
            while before.get("status") not in FINAL:
                now = client.get(f"/v1/jobs/{job_id}", patient=True)
                for change in changes(before, now):
                    _print(now, change, progress, as_json=as_json)
                if now["status"] not in FINAL:
                    if not before:
                        count.start()
                        progress.explain(lambda: f"{count.tokens} tokens" if count.tokens else "")
                    elif count.tokens and not begun:
                        begun = True
                        change = JobChange("the first tokens are there", now["first_token_at"])
                        _print(now, change, progress, as_json=as_json)
                    progress.phase(_state(now))
                    time.sleep(LOOK_INTERVAL_S)
                before = now
    except KeyboardInterrupt:
        note(completed(f"\nnot watching any more; the job goes on: penstock jobs watch {job_id}"))
        return INTERRUPTED
    if before["status"] != "completed":
        raise ended_badly(dict(before))
    return DONE


@command("timing", jobs)
def timing(client: Client, job_id: str) -> CommandResult:
    """Show where a job's time went: on its way in, in the queue, in the engine, on its way out.

    \b
    Examples:
      penstock jobs timing job_0074d316
    """
    found = client.get(f"/v1/jobs/{job_id}/timing")

    def chart() -> None:
        print_table(HEADER, list(_timing_rows(found)))
        error = found["clock_error_ms"]
        note(f"clocks known to {error['api']:.3f} ms (API) and {error['worker']:.3f} ms (worker)")

    return CommandResult(found, chart)


@command("cancel", jobs)
def cancel(client: Client, job_id: str) -> CommandResult:
    """Cancel a job, queued or running. The exit code is 1 if it had already ended otherwise.

    \b
    Examples:
      penstock jobs cancel job_0074d316
    """
    job = job_timed(client.post(f"/v1/jobs/{job_id}/cancel", {}))
    state, already_ended = job["status"], job.get("already_ended")
    if already_ended and state != "cancelled":
        what = f"the job had already ended as {state}: nothing was cancelled"
        raise Problem(what, next_step=f"penstock jobs show {job_id}", code="already_ended")
    return line_result(job, f"{job['id']} {'was cancelled before' if already_ended else state}")


def _row(job: dict[str, Any]) -> dict[str, Any]:
    began, ended = job["started_at"], job["completed_at"]
    usage = job.get("usage") or {}
    by = job.get("cancelled_by")
    return job_timed(job) | {
        "status": f"{job['status']} ({by.replace('_', ' ')})" if by else job["status"],
        "lane": job["priority"],
        "prompt": job.get("preview"),
        "took": f"{ended - began:.1f}s" if began and ended else "",
        "tokens": usage.get("completion_tokens", ""),
    }


def _timing_rows(timing: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """The rows: the parts in order, each bar at its offset; then the overlapping part, the sum, and the latencies."""
    parts, whole = timing["parts_ms"], timing["end_to_end_ms"] or timing["sum_ms"]
    width = NARROW if sys.stdout.isatty() and terminal_width(sys.stdout) < WIDE else WIDTH
    begun = shown = 0.0
    meanings = {part.name: part.meaning for part in PARTS}
    for part in sorted(meanings, key=list(parts).index):
        spent = parts[part]
        yield part, _ms(spent), _bar(begun, spent or 0.0, whole, width), timing["reasons"].get(part) or meanings[part]
        begun += spent or 0.0
        shown = begun if part == "prefill" else shown
    name = EGRESS_FIRST.name
    yield (
        name,
        _ms(parts[name]),
        _bar(shown, parts[name] or 0.0, whole, width),
        timing["reasons"].get(name) or "beside decode",
    )
    groups = ", ".join(f"{name} {spent:.1f}" for name, spent in timing["groups_ms"].items())
    yield "sum", _ms(timing["sum_ms"]), "", groups
    if timing["end_to_end_ms"] is not None:
        yield "end to end", _ms(timing["end_to_end_ms"]), "", f"received to {timing['until']}".replace("_", " ")
    whole_answer = timing["reasons"].get(name) == SENT_WHOLE  # then that is when the answer had ended
    whose = "as the reader got them" if timing["stamps"]["last_sent"] else "in the engine"
    first = "received to the whole answer" if whole_answer else "received to first token"
    for key, label, meaning in (
        ("time_to_first_token_ms", "TTFT", first),
        ("gateway_time_to_first_token_ms", "gateway TTFT", "received to the first token in the API process"),
        ("time_per_output_token_ms", "TPOT", f"mean time between tokens, {whose}"),
    ):
        if timing[key] is not None and not (whole_answer and key.startswith("gateway")):
            yield label, _ms(timing[key]), "", meaning


def _ms(spent: float | None) -> str:
    if spent is None:
        return "-"
    return f"{spent:.3f}" if spent < A_SECOND_MS else duration(spent)


def _bar(begun: float, spent: float, whole: float, width: int) -> str:
    """A bar of `width` at most, in eighths of a character; a part that took any time has at least one."""
    if whole <= 0 or spent <= 0:
        return ""
    start = min(width - 1, int(width * max(0.0, begun) / whole))
    eighths = max(1, min(8 * (width - start), round(8 * width * spent / whole)))
    return " " * start + "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


@command("submit")
@click.argument("text")
@click.option("--priority", type=click.Choice(["interactive", "standard", "batch"]), help="Lane [standard].")
@click.option("--wait", type=click.FloatRange(0), is_flag=False, flag_value=math.inf, metavar="[SECONDS]",
              help="Wait for the end, and print the answer; without SECONDS, give it behind TEXT.")  # fmt: skip
@click.option("--follow", "following", is_flag=True, help="Print the tokens as they come; Ctrl-C only stops watching.")
@click.option("--idempotency-key", help="Repeating the command with the same key creates no second job.")
@click.option("--deadline-ms", type=click.IntRange(1), help="Time limit from now to the last token.")
@click.option("--webhook", help="Webhook of the server's settings to tell how the job ends, or a URL that they allow.")
@click.option("--max-tokens", type=click.IntRange(1), help="Maximum tokens of an answer.")
@click.option("--model", help="Model to ask [the instance's default].")
def submit(
    client: Client,
    text: str,
    wait: float | None,
    following: bool,
    idempotency_key: str | None,
    as_json: bool,
    **asked: Any,
) -> int:
    """Queue TEXT (- reads it from stdin) as a chat job; its id goes to stdout.

    With --wait the answer goes to stdout instead. Exit code 5: the job ended without an answer. Exit code 6: the
    seconds of --wait are over, the job continues, and its id is on stdout.

    \b
    Examples:
      penstock submit "Write a haiku about water."
      penstock submit "Write a haiku about water." --wait 30
      penstock submit "Name a river." --priority batch --idempotency-key river-1
      penstock submit "Name a river." --webhook crm
      penstock submit - < prompt.txt
    """
    if not as_json:
        client.on_retry(AnswerPrinter().waiting)
    body = _body(client, stdin_text() if text == "-" else text, **asked)
    job = client.submit(body, idempotency_key or "")
    if following:
        note(f"job {job['id']}")
        return follow(client, job["id"], as_json=as_json)
    if wait is not None:
        return _wait(client, job, wait, as_json=as_json)
    _found(job).print(as_json=as_json)
    return DONE


def _body(
    client: Client,
    text: str,
    *,
    model: str | None,
    max_tokens: int | None,
    priority: str | None,
    deadline_ms: int | None,
    webhook: str | None,
) -> dict[str, Any]:
    if not text.strip():
        raise Problem("there is nothing to submit", next_step='penstock submit "a text"', code="usage")
    queue = {"priority": priority, "deadline_ms": deadline_ms, "webhook": webhook}
    body = {
        "model": model or client.default_model(),
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "queue": {name: value for name, value in queue.items() if value is not None},
    }
    return {name: value for name, value in body.items() if value not in (None, {})}


def _wait(client: Client, job: dict[str, Any], seconds: float, *, as_json: bool) -> int:
    with ProgressLine(sys.stderr, os.environ, quiet=as_json or not sys.stderr.isatty()) as progress:
        if not as_json:
            client.on_retry(partial(AnswerPrinter().waiting, say=progress.say))
        progress.phase(f"waiting for {job['id']}")
        progress.explain(lambda: client.worker_problem(job["model"]))
        try:
            with _naming_job(job["id"]):
                job = client.wait(job["id"], seconds)
        except KeyboardInterrupt:
            progress.end()
            note(completed(f"\nnot waiting any more; the job goes on: penstock jobs result {job['id']}"))
            return INTERRUPTED
        except JobFailed as failed:
            job = failed.job
        except WaitTimeout as timeout:
            job = timeout.job or job
            progress.end()
            _found(job).print(as_json=as_json)
            what, cause = f"the job is still {job['status']}", f"--wait {seconds:g} is over; the work goes on"
            next_step = f"penstock jobs events {job['id']}"
            raise Problem(what, cause=cause, next_step=next_step, code="wait_timeout") from None
    if as_json:
        print_json(job_timed(job))
    if job["status"] != "completed":
        raise ended_badly(job)
    if not as_json:
        emit(answer_of(job["result"]) + "\n")
    return DONE


def _found(job: dict[str, Any]) -> CommandResult:
    return line_result(job_timed(job), job["id"])
