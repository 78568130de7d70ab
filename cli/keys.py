"""`penstock keys`: lists the API keys of a server, and creates, changes, rotates and revokes those that it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from cli.app import Group
from cli.client import Client
from cli.options import Period, command
from cli.output import CommandResult, emit, fields_result, line_result, list_result, note, timed

COLUMNS = ("name", "tenant", "label", "state", "highest_lane", "admin", "last_used_at", "expires_at")


def _limits(words: Sequence[str]) -> dict[str, float | str]:
    """Limits by name, of words such as queued=5; the word none stands for no limit. The server checks them."""
    given = [word.partition("=") for word in words if word != "none"]
    return {name: float(text) if "." in text else int(text) if text.isdigit() else text for name, _, text in given}


@click.group(cls=Group)
def keys() -> None:
    """List, create, change, rotate and revoke API keys.

    \b
    Examples:
      penstock keys create research --label "batch scripts" --lane batch
      penstock keys ls
      penstock keys revoke key_4f1c
    """


RIGHTS = (
    click.Option(["--label"], help="What it is for."),
    click.Option(["--lane"], help="The highest lane that it may use.", metavar="LANE"),
    click.Option(["--model", "models"], multiple=True, help="A model that it may use (repeatable); none: all."),
    click.Option(
        ["--endpoint", "endpoints"], multiple=True, help="What it may call, e.g. chat (repeatable); none: all."
    ),
    click.Option(
        ["--limit", "limits"],
        multiple=True,
        metavar="NAME=NUMBER",
        help="How much it may use, e.g. tokens_per_minute=20000 (repeatable); these replace all earlier ones.",
    ),
    click.Option(["--expires"], type=Period(), help="After this time, such as 30d, it is void."),
    click.Option(["--admin/--no-admin"], default=None, help="Whether it may administer the queue."),
)
"""Options of `create` and `update`."""


def _asked(given: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a request, by the options of a command."""
    named = {"lane": "highest_lane", "expires": "expires_in_s"}
    asked = {named.get(name, name): value for name, value in given.items()}
    if limits := asked.pop("limits"):
        asked["limits"] = _limits(limits)
    whole = {name: list(value) if isinstance(value, tuple) else value for name, value in asked.items()}
    return {name: value for name, value in whole.items() if value not in (None, [])}


@command("ls", keys)
def list_keys(client: Client) -> CommandResult:
    """List all keys: those of the settings, then the created ones, the oldest first.

    \b
    Examples:
      penstock keys ls
      penstock keys ls --json
    """
    found = client.get("/admin/keys")["data"]
    return list_result(found, COLUMNS, "no keys: anyone on this machine is served")


@command("show", keys)
def show_key(client: Client, key_id: str) -> CommandResult:
    """Show a created key.

    \b
    Examples:
      penstock keys show key_4f1c
    """
    return fields_result(client.get(f"/admin/keys/{key_id}"))


@command("create", keys, options=RIGHTS)
@click.argument("tenant")
def create_key(client: Client, tenant: str, **given: Any) -> CommandResult:
    """Create a key for TENANT. The key goes to stdout; it is shown only now.

    \b
    Examples:
      penstock keys create research
      penstock keys create web --model smollm2 --expires 90d --json
    """
    return _shown_once(client.post("/admin/keys", {"tenant": tenant, **_asked(given)}))


@command("update", keys, options=RIGHTS)
def update_key(client: Client, key_id: str, **given: Any) -> CommandResult:
    """Change what a created key may do; what is not named stays.

    \b
    Examples:
      penstock keys update key_4f1c --lane batch
    """
    return fields_result(client.post(f"/admin/keys/{key_id}", _asked(given)))


@command("rotate", keys)
def rotate_key(client: Client, key_id: str) -> CommandResult:
    """Replace the secret of a created key: the new one goes to stdout, the old one is void.

    \b
    Examples:
      penstock keys rotate key_4f1c
    """
    return _shown_once(client.post(f"/admin/keys/{key_id}/rotate", {}))


@command("revoke", keys)
def revoke_key(client: Client, key_id: str) -> CommandResult:
    """Revoke a created key for good; its open answers end within seconds.

    \b
    Examples:
      penstock keys revoke key_4f1c
    """
    return line_result(client.delete(f"/admin/keys/{key_id}"), "{id} revoked")


def _shown_once(key: Mapping[str, Any]) -> CommandResult:
    def show() -> None:
        emit(f"{key['key']}\n")
        note(f"{key['id']} of tenant {key['tenant']}; nobody can see the key again")

    return CommandResult(timed(key), show)
