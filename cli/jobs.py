"""`penstock submit` and `penstock jobs`: queues jobs; lists, times, follows and cancels them; prints their answers.

A job's final state becomes an exit code."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click

from cli.app import Group
from cli.client import Client, limit_option
from cli.options import command, moment
from cli.output import (
    CommandResult,
    Exit,
    Problem,
    ProgressLine,
    StreamWrapper,
    emit,
    fields_result,
    line_result,
    list_result,
    note,
    print_json,
    print_rows,
    print_table,
    rfc3339,
    timed,
    visible,
)
from penstock.client import FINAL, JobFailed, Pause, StreamEvent, StreamReset, WaitTimeout
from penstock.text import duration, fault_of
from streaming.order import Priority
from telemetry.latency import EGRESS_FIRST, PARTS

OUTCOMES = {
    "lost": ("its worker died", "{} was lost"),
    "handed_back": ("its worker was stopped", "{} was stopped"),
    "returned": ("its server was away", "the server of {} was away"),
    "preempted": ("made room for a higher lane", "{} made room for a higher lane"),
}
"""What became of an attempt, and what of its worker, in words. Any other outcome is the state in which it ended the
job."""


def print_attempts(job: dict[str, Any]) -> None:
    """Print what became of each attempt at a job, as the API sent it, if it has more to say than the job itself."""
    rows, attempts = [], job.get("attempt_log") or []
    for each in attempts:
        began, ended, outcome = each["started_at"], each["ended_at"], each["outcome"] or "running"
        started, seconds = began and rfc3339(began), f"{ended - began:.1f}" if began and ended else None
        rows.append(each | {"started": started, "seconds": seconds, "outcome": OUTCOMES.get(outcome, (outcome,))[0]})
    if rows:
        emit("\n")
        print_rows(rows, ("worker", "started", "seconds", "tokens", "outcome"))
    if any(each["outcome"] == "lost" for each in attempts):
        note(f"next:  penstock logs --job {job['id']}")


def print_input(job: dict[str, Any]) -> None:
    """Print the request of a job as JSON, if it was asked for."""
    if asked := job.get("input"):
        emit(f"\n{json.dumps(asked, ensure_ascii=False, indent=2)}\n")
    elif "input" in job:
        note("the request cannot be read any more")


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


def ended_badly(job: Mapping[str, Any]) -> Problem:
    """The error for a job that ended in any state but completed."""
    error = job.get("error") or {}
    what, next_step = f"the job ended as {job['status']}", f"penstock jobs show {job['id']}"
    cause, code = str(error.get("message", "")), str(error.get("code") or job["status"])
    return Problem(what, cause=cause, next_step=next_step, exit_code=Exit.ENDED_BADLY, code=code)


def interruption(event: StreamEvent) -> str:
    """Say that a worker does not go on with an answer, or which one does; "" for any other event."""
    before = event.data if event.name == "interrupted" else event.data.get("previous")
    if event.name not in ("interrupted", "started") or not before:
        return ""
    ended = OUTCOMES.get(before["outcome"], OUTCOMES["lost"])[1].format(before["worker"])
    if event.name == "interrupted":
        return f"{ended}; waiting for a worker to continue"
    verb, worker = "continued" if event.data["attempt"] > 1 else "begun again", event.data["worker"]
    is_same = worker == before["worker"]
    ended += " and started again" if is_same and before["outcome"] not in ("returned", "preempted") else ""
    return f"{ended}; {verb}{'' if is_same else f' by {worker}'} after {duration(before['pause_ms'])}"


class AnswerPrinter:
    """Prints an answer to stdout as it comes: the first choice live, all others behind it, as `answer_of` has them.
    What is beside the answer goes to `say`."""

    def __init__(self, say: Callable[[str], object] = note) -> None:
        self.texts: defaultdict[int, list[str]] = defaultdict(list)
        self._say, self._waits, self._wrapper = say, False, StreamWrapper()

    @property
    def text(self) -> str:
        """The text of the first choice, as the model wrote it."""
        return "".join(self.texts[0])

    def take(self, event: StreamEvent) -> None:
        """Print a delta; on any job's last event, whatever is left, and as a note whether the text was cut off."""
        if event.text:
            self.texts[event.choice].append(event.text)
        if event.text and not event.choice:
            self._wrapper.feed(visible(event.text))
        elif event.name in FINAL:
            for choice, parts in sorted(self.texts.items()):
                self._wrapper.feed(visible("\n\n" + "".join(parts)) if choice else "")
            self._wrapper.flush()
            sys.stdout.write("\n")
        sys.stdout.flush()
        if event.name in FINAL and "length" in event.data.get("finish_reasons", ()):
            note("(cut at --max-tokens)")

    def begin_again(self, reset: StreamReset) -> None:
        """Another text follows. Raises Problem if the first one stands where nobody can tell them apart."""
        self._wrapper.flush()
        if self.text and not self._wrapper.wraps:
            sys.stdout.write("\n")
            what = "the answer was cut off"
            cause = "the store lost part of it, and it was written again from its beginning"
            raise Problem(what, cause=cause, next_step=f"penstock jobs result {reset.job_id}", code="stream_reset")
        if self.text:
            note("\n(the answer begins again)")
        self.texts.clear()
        self._wrapper = StreamWrapper()

    def aside(self, words: str) -> None:
        """Say something beside the answer, on a terminal in a line of its own."""
        self._wrapper.begin_line()
        self._say(("\n" if self.text and self._wrapper.wraps else "") + words)

    def waiting(self, pause: Pause) -> None:
        """Say once, in one line, that there is a wait for the server."""
        if not self._waits:
            self._waits = True
            cause = pause.cause if pause.status else f"the connection to {pause.url} broke"
            self.aside(f"({cause.removesuffix('.')}; trying again)")

    def print(self, client: Client, job_id: str, after: str = "") -> None:
        """Print what it makes of a job's events from `after` on, to the end. Raises Problem."""
        client.on_retry(self.waiting)
        while True:
            try:
                for event in client.stream(job_id, after):
                    after = event.id
                    self.take(event)
            except StreamReset as reset:
                self.begin_again(reset)
                after = reset.cursor
            except JobFailed as failed:
                raise ended_badly(failed.job) from None
            else:
                return
            finally:
                self._wrapper.flush()  # also of an answer that is interrupted
                sys.stdout.flush()

    def follow(self, client: Client, job_id: str, after: str = "") -> int:
        """As `print`, but Ctrl-C stops watching, not the job."""
        try:
            self.print(client, job_id, after)
        except KeyboardInterrupt:
            note(f"\nnot watching any more; the job goes on: penstock jobs events {job_id}")
            return Exit.INTERRUPTED
        return Exit.DONE


class EventPrinter(AnswerPrinter):
    """Prints each event as one line of JSON."""

    def take(self, event: StreamEvent) -> None:
        print_json({"event": event.name, "id": event.id, "data": timed(event.data)})
        sys.stdout.flush()

    def begin_again(self, reset: StreamReset) -> None:
        self.take(reset.event)

    def waiting(self, pause: Pause) -> None:
        pass


class TokenPrinter(AnswerPrinter):
    """Prints an answer, and beside it what happens to its job."""

    def take(self, event: StreamEvent) -> None:
        if words := change(event):
            self.aside(words)
        super().take(event)


class ChangePrinter(AnswerPrinter):
    """Prints what happens to a job, when it is seen, and nothing of its answer."""

    def __init__(self, client: Client, job_id: str, *, as_json: bool) -> None:
        super().__init__()
        self._client, self._job_id, self._as_json, self._writes = client, job_id, as_json, False

    def take(self, event: StreamEvent) -> None:
        words, before, self._writes = change(event), self._writes, event.name == "delta"
        if self._writes and not before:
            words = "the first tokens are there"
        if event.name in FINAL:
            usage, error = event.data.get("usage") or {}, event.data.get("error") or {}
            more = (f"{usage['completion_tokens']} tokens" if usage else "", error.get("code"))
            words = ", ".join(filter(None, (event.name, *more)))
        if words and self._as_json:
            job = self._client.get(f"/v1/jobs/{self._job_id}", patient=True, job_id=self._job_id) | {"result": None}
            print_json({"at": rfc3339(time.time()), "change": words, "job": timed(job)})
        elif words:
            emit(f"{time.strftime('%H:%M:%S')} {words}\n")
        sys.stdout.flush()

    def begin_again(self, reset: StreamReset) -> None:
        self.aside("the answer begins again")


def change(event: StreamEvent) -> str:
    """What an event means that brings no text; "" for others."""
    if event.name in ("queued", "queue.position") and event.data["position"] is not None:
        return f"queued, {event.data['position']} ahead"
    if event.name in ("started", "interrupted"):
        begun = f"started on {event.data['worker']}, attempt {event.data.get('attempt')}"
        return interruption(event) or begun
    return ""


def stdin_text() -> str:
    """All of stdin. Raises Problem if it is not UTF-8 text."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        cause = f"it is {fault_of(error.object)}"
        raise Problem("stdin is no UTF-8 text", cause=cause, next_step="convert it first", code="usage") from None


COLUMNS = ("id", "tenant", "status", "lane", "model", "created_at", "took", "tokens", "prompt")
STATES = ["queued", "in_progress", "completed", "failed", "cancelled", "expired"]
WIDTH = 24
"""Characters of the longest bar."""
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
    found = client.pages(path, limit, tenant=tenant, **equal, **times)
    return list_result(found, COLUMNS, "no jobs", map(_row, found))


@command("show", jobs)
@click.option("--input", "whole", is_flag=True, help="Show its request, too.")
def show(client: Client, job_id: str, whole: bool) -> CommandResult:
    """Show one job: its state, times, place in the lane, what became of each attempt, and its answer.

    \b
    Examples:
      penstock jobs show job_0074d316
      penstock jobs show job_0074d316 --input
      penstock jobs show job_0074d316 --json
    """
    job = client.get(f"/v1/jobs/{job_id}", include="input")
    fields = {name: value for name, value in job.items() if name not in ("attempt_log", "input", "result")}

    def shown() -> None:
        fields_result(job, fields).show()
        if whole:
            print_input(job)
        print_attempts(job)
        if answer := job.get("result"):
            emit(f"\nRESULT\n{answer_of(answer)}\n")

    return CommandResult(timed(job), shown)


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
        raise Problem(what, next_step=next_step, exit_code=Exit.STILL_RUNNING, code="not_ready")
    if job["status"] != "completed":
        raise ended_badly(job)
    return CommandResult(job["result"], lambda: emit(answer_of(job["result"]) + "\n"))


@command("events", jobs)
@click.option("--after", default="", help="Id of the last event seen, to go on behind it.")
def events(client: Client, job_id: str, after: str, as_json: bool) -> int:
    """Follow a job to its end: its tokens on stdout, or with --json every event, one per line.

    \b
    Examples:
      penstock jobs events job_0074d316
      penstock jobs events job_0074d316 --after 1:131:fd1fa10b0c19-1 --json
    """
    return (EventPrinter() if as_json else TokenPrinter()).follow(client, job_id, after)


@command("watch", jobs)
def watch(client: Client, job_id: str, as_json: bool) -> int:
    """Follow what happens to a job: its place in the queue, each attempt and its worker, and how it ends.

    \b
    Examples:
      penstock jobs watch job_0074d316
      penstock jobs watch job_0074d316 --json
    """
    return ChangePrinter(client, job_id, as_json=as_json).follow(client, job_id)


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
    job = client.post(f"/v1/jobs/{job_id}/cancel", {})
    state, already_ended = job["status"], job.get("already_ended")
    if already_ended and state != "cancelled":
        what = f"the job had already ended as {state}: nothing was cancelled"
        raise Problem(what, next_step=f"penstock jobs show {job_id}", code="already_ended")
    return line_result(job, f"{{id}} {'was cancelled before' if already_ended else state}")


def _row(job: dict[str, Any]) -> dict[str, Any]:
    began, ended = job["started_at"], job["completed_at"]
    usage = job.get("usage") or {}
    by = job.get("cancelled_by")
    return job | {
        "status": f"{job['status']} ({by.replace('_', ' ')})" if by else job["status"],
        "lane": job["priority"],
        "prompt": job.get("preview"),
        "took": f"{ended - began:.1f}s" if began and ended else "",
        "tokens": usage.get("completion_tokens", ""),
    }


def _timing_rows(timing: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """The rows: the parts in order, each bar at its offset; then the overlapping part, the sum, and the latencies."""
    parts, reasons = timing["parts_ms"], timing["reasons"]
    scale = WIDTH / (timing["end_to_end_ms"] or timing["sum_ms"] or 1.0)
    meanings = {part.name: part.meaning for part in PARTS} | {EGRESS_FIRST.name: "beside decode"}
    begun = shown = 0.0
    for part in [*(name for name in parts if name != EGRESS_FIRST.name), EGRESS_FIRST.name]:
        spent, offset = parts[part] or 0.0, shown if part == EGRESS_FIRST.name else begun
        start = min(WIDTH - 1, int(max(0.0, offset) * scale))
        bar = " " * start + "█" * max(1, min(WIDTH - start, round(spent * scale))) if spent > 0 else ""
        yield part, _ms(parts[part]), bar, reasons.get(part) or meanings[part]
        begun += spent
        shown = begun if part == "prefill" else shown
    yield "sum", _ms(timing["sum_ms"]), "", ", ".join(f"{name} {ms:.1f}" for name, ms in timing["groups_ms"].items())
    if timing["end_to_end_ms"] is not None:
        yield "end to end", _ms(timing["end_to_end_ms"]), "", f"received to {timing['until']}".replace("_", " ")
    whole_answer = reasons.get(EGRESS_FIRST.name) == SENT_WHOLE  # then that is when the answer had ended
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
def submit(client: Client, text: str, wait: float | None, following: bool, as_json: bool, **asked: Any) -> int:
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
    text = stdin_text() if text == "-" else text
    if not text.strip():
        raise Problem("there is nothing to submit", next_step='penstock submit "a text"', code="usage")
    if not as_json:
        client.on_retry(AnswerPrinter().waiting)
    key, model, max_tokens = (asked.pop(name) for name in ("idempotency_key", "model", "max_tokens"))
    body: dict[str, Any] = {"model": model or client.default_model(), "messages": [{"role": "user", "content": text}]}
    queue = {name: value for name, value in asked.items() if value is not None}
    body |= ({"max_tokens": max_tokens} if max_tokens else {}) | ({"queue": queue} if queue else {})
    job = client.submit(body, key or "")
    if following:
        note(f"job {job['id']}")
        return (EventPrinter() if as_json else TokenPrinter()).follow(client, job["id"])
    if wait is None:
        line_result(job, "{id}").print(as_json=as_json)
        return Exit.DONE
    return _wait(client, job, wait, as_json=as_json)


def _wait(client: Client, job: dict[str, Any], seconds: float, *, as_json: bool) -> int:
    with ProgressLine(quiet=as_json or not sys.stderr.isatty()) as progress:
        if not as_json:
            client.on_retry(AnswerPrinter(progress.say).waiting)
        progress.phase(f"waiting for {job['id']}")
        progress.explain(lambda: client.worker_problem(job["model"]))
        try:
            ended = client.wait(job["id"], seconds)
        except KeyboardInterrupt:
            progress.end()
            note(f"\nnot waiting any more; the job goes on: penstock jobs result {job['id']}")
            return Exit.INTERRUPTED
        except JobFailed as failed:
            ended = failed.job
        except WaitTimeout as timeout:
            progress.end()
            job = timeout.job or job
            line_result(job, "{id}").print(as_json=as_json)
            what, cause = f"the job is still {job['status']}", f"--wait {seconds:g} is over; the work goes on"
            next_step = f"penstock jobs events {job['id']}"
            raise Problem(what, cause=cause, next_step=next_step, code="wait_timeout") from None
    if as_json:
        print_json(timed(ended))
    if ended["status"] != "completed":
        raise ended_badly(ended)
    if not as_json:
        emit(answer_of(ended["result"]) + "\n")
    return Exit.DONE
