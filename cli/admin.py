"""Commands for operators: `penstock dlq` (dead letters), `penstock webhooks` (messages and their delivery attempts) and
`penstock tenants` (usage and limits in the store and on the disk), and `penstock console`."""

from __future__ import annotations

import os
import socket
import sys
import webbrowser
from typing import Any
from urllib.parse import urlsplit

import click

from api.auth.hosts import is_loopback
from cli.app import Group
from cli.client import Client, limit_option
from cli.job import job_timed, print_attempts, print_input
from cli.options import command
from cli.output import CommandResult, Problem, emit, fields_result, line_result, list_result, note, print_rows, timed

LETTER_COLUMNS = ("id", "reason", "at", "job_id", "lane")
MESSAGE_COLUMNS = (
    "id", "endpoint", "type", "subject", "status", "attempts", "at", "next_attempt_at", "url", "last_error",
)  # fmt: skip
TENANT_COLUMNS = ("tenant", "jobs", "waiting", "running", "job_bytes", "result_bytes", "files", "file_bytes")
LIMITED = ("jobs", "job_bytes", "result_bytes", "file_bytes")


@click.group(cls=Group)
def dlq() -> None:
    """List, show, replay and drop dead letters.

    \b
    Examples:
      penstock dlq ls
      penstock dlq show 0-1795486176000-0
    """


@command("ls", dlq)
@limit_option(100)
def list_letters(client: Client, limit: int) -> CommandResult:
    """List dead letters, newest first.

    \b
    Examples:
      penstock dlq ls
      penstock dlq ls --limit 100 --json
    """
    letters = client.get("/admin/dlq", limit=limit)["data"]
    return list_result(map(timed, letters), LETTER_COLUMNS, "no dead letters")


@command("show", dlq)
@click.argument("letter_id")
def show_letter(client: Client, letter_id: str) -> CommandResult:
    """Show one, by its id or by its job's: why it became a dead letter, the attempts at its job, and the request, if
    your key may read the job.

    \b
    Examples:
      penstock dlq show 0-1795486176000-0
    """
    letter = timed(client.get(f"/admin/dlq/{letter_id}"))
    job = letter.get("job") or {}
    fields = {name: value for name, value in letter.items() if name != "job"}
    fields |= {f"job {name}": job.get(name) for name in ("status", "model", "priority", "attempts")}
    refused = ""
    if job:
        try:
            job["input"] = client.get(f"/v1/jobs/{job['id']}", include="input").get("input")
        except Problem as problem:
            refused = f"the request is not shown: {problem.message}"

    def shown() -> None:
        fields_result(letter, fields).show()
        print_input(job)
        print_attempts(job)
        if refused:
            note(refused)

    return CommandResult(letter | ({"job": job_timed(job)} if job else {}), shown)


@command("replay", dlq)
@click.argument("letter_id")
def replay_letter(client: Client, letter_id: str) -> CommandResult:
    """Put its job in the queue again, as a new job; the new id goes to stdout.

    \b
    Examples:
      penstock dlq replay 0-1795486176000-0
    """
    job = job_timed(client.post(f"/admin/dlq/{letter_id}/replay", {}))
    return line_result(job, job["id"])


@command("drop", dlq)
@click.argument("letter_id")
def drop_letter(client: Client, letter_id: str) -> CommandResult:
    """Delete one.

    \b
    Examples:
      penstock dlq drop 0-1795486176000-0
    """
    dropped = client.delete(f"/admin/dlq/{letter_id}")
    return line_result(dropped, f"{dropped['id']} dropped")


@click.group(cls=Group)
def webhooks() -> None:
    """List, show and replay webhook messages.

    \b
    Examples:
      penstock webhooks ls
      penstock webhooks show msg_003f9a1c
    """


@command("ls", webhooks)
@limit_option(100)
def list_messages(client: Client, limit: int) -> CommandResult:
    """List messages, newest first.

    \b
    Examples:
      penstock webhooks ls
      penstock webhooks ls --json
    """
    messages = client.get("/admin/webhooks", limit=limit)["data"]
    return list_result(map(_message, messages), MESSAGE_COLUMNS, "no webhook messages")


@command("show", webhooks)
@click.argument("message_id")
def show_message(client: Client, message_id: str) -> CommandResult:
    """Show one: its content, its attempts and the last response.

    \b
    Examples:
      penstock webhooks show msg_003f9a1c
    """
    message = _message(client.get(f"/admin/webhooks/{message_id}"))
    return fields_result(message, message)


@command("replay", webhooks)
@click.argument("message_id")
def replay_message(client: Client, message_id: str) -> CommandResult:
    """Send one again, with the same webhook-id.

    \b
    Examples:
      penstock webhooks replay msg_003f9a1c
    """
    message = _message(client.post(f"/admin/webhooks/{message_id}/replay", {}))
    return line_result(message, f"{message['id']} {message['status']}")


def _message(message: dict[str, Any]) -> dict[str, Any]:
    return timed({name: "" if value is None and name.endswith("_at") else value for name, value in message.items()})


@command("tenants")
@click.argument("tenant", required=False)
def tenants(client: Client, tenant: str | None) -> CommandResult:
    """Show the usage of all tenants with a key, or of TENANT, as "used/limit".

    \b
    Examples:
      penstock tenants
      penstock tenants research --json
    """
    found = client.get(f"/admin/tenants/{tenant}" if tenant else "/admin/tenants")
    rows = [_tenant_row(each) for each in ([found] if tenant else found["data"])]
    return CommandResult(found if tenant else found["data"], lambda: print_rows(rows, TENANT_COLUMNS))


def _tenant_row(found: dict[str, Any]) -> dict[str, Any]:
    limits = found["limits"]
    bounded = {name: f"{found[name]}/{limits[name]}" for name in LIMITED if limits[name] is not None}
    return {**found, **bounded}


@command("console")
@click.option("--no-browser", is_flag=True, help="Only print the link.")
def console(client: Client, no_browser: bool) -> CommandResult:
    """Open the console in a browser, by a link that logs in once, within an hour.

    \b
    Examples:
      penstock console
      penstock console --no-browser
    """
    link = client.post("/admin/console/links", {})
    url = f"{client.url}/console#{link['path'].partition('#')[2]}"

    def show() -> None:
        emit(url + "\n")
        opens = not no_browser and sys.stdout.isatty() and _has_screen()
        if opens and webbrowser.open(url):
            return
        note("open this link within an hour; it works once")
        address = urlsplit(client.url)
        if "SSH_CONNECTION" in os.environ and is_loopback(address.hostname or ""):
            port = address.port or 80
            note(f"on your own machine, first: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}")

    return CommandResult({"url": url, "expires_at": link["expires_at"]}, show)


def _has_screen() -> bool:
    """Whether a browser would open a window for the reader; else it would use up the link in this terminal, or at a
    remote machine."""
    if "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform != "linux" or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
