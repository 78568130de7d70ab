"""`penstock webhooks`: list, show and replay webhook messages and their delivery attempts."""

from __future__ import annotations

from typing import Any

import click

from cli.client import Client
from cli.errors import DONE
from cli.options import Command, Where, json_option, where_options
from cli.output import emit, note, print_json, print_rows, print_table, rfc3339

COLUMNS = ("id", "endpoint", "type", "subject", "status", "attempts", "at", "next_attempt_at", "last_error")
TIMES = ("at", "last_attempt_at", "next_attempt_at")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def webhooks() -> None:
    """List, show and replay webhook messages."""


@webhooks.command("ls", cls=Command)
@click.option(
    "--limit", type=click.IntRange(1, 100), default=20, show_default=True, help="Maximum number, newest first."
)
@where_options(url=True)
@json_option
def ls(limit: int, where: Where, as_json: bool) -> int:
    """List messages, newest first."""
    with Client.find(where) as client:
        messages = [_timed(message) for message in client.get("/admin/webhooks", limit=limit)["data"]]
    if messages or as_json:
        print_rows(messages, COLUMNS, as_json=as_json)
    else:
        note("no webhook messages")
    return DONE


@webhooks.command("show", cls=Command)
@click.argument("message_id")
@where_options(url=True)
@json_option
def show(message_id: str, where: Where, as_json: bool) -> int:
    """Show one: its content, its attempts and the last response."""
    with Client.find(where) as client:
        message = _timed(client.get(f"/admin/webhooks/{message_id}"))
    if as_json:
        print_json(message)
        return DONE
    print_table(("FIELD", "VALUE"), [(name, str(value)) for name, value in message.items() if value not in (None, "")])
    return DONE


@webhooks.command("replay", cls=Command)
@click.argument("message_id")
@where_options(url=True)
@json_option
def replay(message_id: str, where: Where, as_json: bool) -> int:
    """Send one again, with the same webhook-id."""
    with Client.find(where) as client:
        message = _timed(client.post(f"/admin/webhooks/{message_id}/replay", {}))
    if as_json:
        print_json(message)
    else:
        emit(f"{message['id']} {message['status']}\n")
    return DONE


def _timed(message: dict[str, Any]) -> dict[str, Any]:
    return message | {name: rfc3339(message[name]) if message[name] else "" for name in TIMES}
