"""Commands for operators: `penstock dlq` (dead letters), `penstock webhooks` (messages and their delivery attempts),
`penstock tenants` (usage and limits in the store and on the disk), `penstock audit` (what admins did), `penstock
console`, `penstock keys` (the API keys of a server: those of its settings, and those that it keeps), `penstock usage`
(what tenants have used, by day (UTC), key and model), and `penstock scale` (how many workers each model has and should
have, why, and manual overrides)."""

from __future__ import annotations

import csv
import os
import socket
import sys
import time
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

import click

from api.auth.hosts import is_loopback
from cli.app import Group
from cli.client import Client, limit_option
from cli.jobs import print_attempts, print_input
from cli.options import Period, command, moment
from cli.output import (
    CommandResult,
    Problem,
    emit,
    fields_result,
    line_result,
    list_result,
    note,
    print_rows,
    print_table,
    rfc3339,
    styled,
    timed,
)

LETTER_COLUMNS = ("id", "reason", "at", "job_id", "lane")
MESSAGE_COLUMNS = (
    "id", "endpoint", "type", "subject", "status", "attempts", "at", "next_attempt_at", "url", "last_error",
)  # fmt: skip
AUDIT_COLUMNS = ("at", "action", "target", "outcome", "by")
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
    return list_result(letters, LETTER_COLUMNS, "no dead letters")


@command("show", dlq)
def show_letter(client: Client, letter_id: str) -> CommandResult:
    """Show one, by its id or by its job's: why it became a dead letter, the attempts at its job, and the request, if
    your key may read the job.

    \b
    Examples:
      penstock dlq show 0-1795486176000-0
    """
    letter = client.get(f"/admin/dlq/{letter_id}")
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

    return CommandResult(timed(letter), shown)


@command("replay", dlq)
def replay_letter(client: Client, letter_id: str) -> CommandResult:
    """Put its job in the queue again, as a new job; the new id goes to stdout.

    \b
    Examples:
      penstock dlq replay 0-1795486176000-0
    """
    return line_result(client.post(f"/admin/dlq/{letter_id}/replay", {}), "{id}")


@command("drop", dlq)
def drop_letter(client: Client, letter_id: str) -> CommandResult:
    """Delete one.

    \b
    Examples:
      penstock dlq drop 0-1795486176000-0
    """
    return line_result(client.delete(f"/admin/dlq/{letter_id}"), "{id} dropped")


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
def show_message(client: Client, message_id: str) -> CommandResult:
    """Show one: its content, its attempts and the last response.

    \b
    Examples:
      penstock webhooks show msg_003f9a1c
    """
    return fields_result(_message(client.get(f"/admin/webhooks/{message_id}")))


@command("replay", webhooks)
def replay_message(client: Client, message_id: str) -> CommandResult:
    """Send one again, with the same webhook-id.

    \b
    Examples:
      penstock webhooks replay msg_003f9a1c
    """
    return line_result(_message(client.post(f"/admin/webhooks/{message_id}/replay", {})), "{id} {status}")


def _message(message: dict[str, Any]) -> dict[str, Any]:
    return {name: "" if value is None and name.endswith("_at") else value for name, value in message.items()}


@command("audit")
@limit_option()
@click.option("--since", help="Only from this time on, such as 2h (ago).", metavar="TIME")
def audit(client: Client, limit: int, since: str | None) -> CommandResult:
    """Show what admins did to keys, pools, jobs, dead letters and webhooks, and who was refused, newest first.

    \b
    Examples:
      penstock audit --since 1d
      penstock audit --limit 1000 --json
    """
    found = client.pages("/admin/audit", limit, since=since and moment(since, time.time()))
    rows = (each | {"by": f"{each['who'] or 'somebody'} from {each['address']}"} for each in found)
    return list_result(found, AUDIT_COLUMNS, "nothing was noted", rows)


@command("tenants")
@click.argument("tenant", required=False)
def tenants(client: Client, tenant: str | None) -> CommandResult:
    """Show the usage of all tenants with a key, or of TENANT, as "used/limit".

    \b
    Examples:
      penstock tenants
      penstock tenants research --json
    """
    found: Any = client.get(f"/admin/tenants/{tenant}") if tenant else client.get("/admin/tenants")["data"]
    rows = []
    for each in [found] if tenant else found:
        quotas = {name: quota for name, quota in each["quotas"].items() if name in LIMITED and quota is not None}
        rows.append(each | {name: f"{each[name]}/{quota}" for name, quota in quotas.items()})
    return CommandResult(found, lambda: print_rows(rows, TENANT_COLUMNS))


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
        # Without a window of its own, a browser would use up the link in this terminal, or at a remote machine.
        is_remote = "SSH_CONNECTION" in os.environ
        has_screen = sys.platform != "linux" or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
        if not (no_browser or is_remote) and sys.stdout.isatty() and has_screen and webbrowser.open(url):
            return
        note("open this link within an hour; it works once")
        address = urlsplit(client.url)
        if is_remote and is_loopback(address.hostname or ""):
            port = address.port or 80
            note(f"on your own machine, first: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}")

    return CommandResult({"url": url, "expires_at": link["expires_at"]}, show)


KEY_COLUMNS = ("name", "tenant", "label", "state", "highest_lane", "admin", "last_used_at", "expires_at")


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
    return list_result(found, KEY_COLUMNS, "no keys: anyone on this machine is served")


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


BAR = 10
"""Columns of the longest bar."""
PLACES = {"cost": 4}


@command("usage")
@click.option("--from", "first", help="First day, in UTC, such as 2026-11-01 [29 days before the last].", metavar="DAY")
@click.option("--to", "last", help="Last day, in UTC [today].", metavar="DAY")
@click.option("--by", default="day", show_default=True, help="Columns that tell rows apart: day, tenant, key, model.")
@click.option("--tenant", help="Of this tenant, with an admin key [your own].")
@click.option("--all", "everyone", is_flag=True, help="Of all tenants, with an admin key.")
@click.option("--csv", "as_csv", is_flag=True, help="A table for spreadsheets.")
def usage(client: Client, everyone: bool, tenant: str | None, as_csv: bool, **query: str | None) -> CommandResult:
    """Show how many requests and tokens your tenant has used. A request counts on the day of its end, in UTC.

    \b
    Examples:
      penstock usage
      penstock usage --by key,model --from 2026-11-01
      penstock usage --all --by tenant,day --csv
    """
    asked: dict[str, Any] = {"from": query["first"], "to": query["last"], "by": query["by"], "tenant": tenant}
    found = client.get("/admin/usage" if everyone or tenant else "/v1/usage", **asked)
    rows, by = found["data"], found["by"]

    def show() -> None:
        if as_csv:
            writer = csv.DictWriter(sys.stdout, (*by, *found["total"]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        elif rows:
            _print_usage(rows, by, found["total"])
        else:
            note(f"nothing was used from {found['from']} to {found['to']}")

    return CommandResult(iter(rows), show)


def _print_usage(rows: list[dict[str, Any]], by: list[str], total: dict[str, float]) -> None:
    """Print a table: numbers end in line, and where there is colour, a bar shows each row's tokens."""
    shown = [*rows, {by[0]: "total", **total}] if len(rows) > 1 else rows
    header, columns = [each.upper() for each in by], []
    for name in total:
        column = [name.removesuffix("_tokens").upper(), *(f"{row[name]:,.{PLACES.get(name, 0)}f}" for row in shown)]
        title, *numbers = [each.rjust(max(map(len, column))) for each in column]
        header.append(title)
        columns.append(numbers)
    if styled(sys.stdout, os.environ):
        most = max(1, *(row["total_tokens"] for row in rows))
        columns.append(["▇" * -(-BAR * row["total_tokens"] // most) for row in rows] + [""] * (len(shown) - len(rows)))
        header.append("TOKENS")
    print_table(
        header, [[*(row.get(name) or "-" for name in by), *cells] for row, *cells in zip(shown, *columns, strict=True)]
    )


COLUMNS = ("model", "shape", "want", "ready", "starting", "draining", "range", "waiting", "wait", "override", "reason")
ACTIONS = ("at", "epoch", "model", "action", "what", "by", "reason")
for_option = click.option("--for", "hold_s", type=Period(), help="For so long (90s, 10m, 2h, 1d) [until resumed].")


@click.group(cls=Group)
def scale() -> None:
    """Show and set how many workers each model has.

    \b
    Examples:
      penstock scale status
      penstock scale set sim 3 --for 10m
      penstock scale resume sim
    """


@command("status", scale)
def status(client: Client) -> CommandResult:
    """Show wanted and actual workers of every model, the reason, and who decides.

    \b
    Examples:
      penstock scale status
      penstock scale status --json
    """
    answer = client.get("/admin/pools")
    leader = answer["leader"]

    def show() -> None:
        _table(answer["data"])
        for pool in answer["data"]:
            if stalled := pool.get("stalled"):
                note(f"{pool['model']}: no worker may run: {stalled['cause']}; next: {stalled['fix']}")
            for worker in pool["workers"]:
                if worker.get("away"):
                    note(f"{worker['id']} waits for its server, {worker['away_s']:.0f} s: {'; '.join(worker['away'])}")
        note(f"{leader['id']} leads (epoch {leader['epoch']})" if leader else "no scheduler leads: nothing is changed")

    return CommandResult(map(timed, answer["data"]), show)


@command("log", scale)
def log(client: Client) -> CommandResult:
    """Show what was decided and done to the pools, the newest first.

    \b
    Examples:
      penstock scale log
    """
    actions = client.get("/admin/pools")["actions"]
    return list_result(actions, ACTIONS, "nothing was done yet", map(_said, actions))


@command("set", scale)
@click.argument("model")
@click.argument("want", type=click.IntRange(0))
@for_option
def fix(client: Client, model: str, want: int, hold_s: int | None) -> CommandResult:
    """Give MODEL a fixed number of workers, whatever waits.

    \b
    Examples:
      penstock scale set sim 3
      penstock scale set sim 3 --for 10m
    """
    return _override(client, model, {"want": want}, hold_s)


@command("pause", scale)
@click.argument("model")
@for_option
def pause(client: Client, model: str, hold_s: int | None) -> CommandResult:
    """Change nothing: MODEL keeps the workers it has.

    \b
    Examples:
      penstock scale pause sim --for 2h
    """
    return _override(client, model, {"paused": True}, hold_s)


@command("resume", scale)
@click.argument("model")
def resume(client: Client, model: str) -> CommandResult:
    """Let the scheduler decide again.

    \b
    Examples:
      penstock scale resume sim
    """
    return _pool(client.delete(_path(model)))


def _override(client: Client, model: str, body: dict[str, Any], hold_s: int | None) -> CommandResult:
    return _pool(client.put(_path(model), body if hold_s is None else body | {"for_s": hold_s}))


def _pool(pool: dict[str, Any]) -> CommandResult:
    return CommandResult(timed(pool), lambda: _table([pool]))


def _table(pools: Sequence[dict[str, Any]]) -> None:
    """One row per model, followed by one for each of its shapes."""
    print_rows([row for pool in pools for row in (_row(pool), *_shapes(pool))], COLUMNS)


def _shapes(pool: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, shape in pool.get("shapes", {}).items():
        named = {"model": pool["model"], "shape": f"{name} (new jobs)" if shape["takes"] else name}
        yield shape | named | {"range": f"{shape['min']}-{shape['max']}"}


def _path(model: str) -> str:
    if not model:
        raise Problem("no model is named", next_step="penstock scale status")
    return f"/admin/pools/{quote(model)}"


def _row(pool: dict[str, Any]) -> dict[str, Any]:
    waits = [lane["wait_s"] for lane in pool["lanes"].values() if lane["wait_s"] is not None]
    by_hand = None
    if override := pool["override"]:
        until = "" if override["until"] is None else f" until {rfc3339(override['until'])}"
        what = "paused" if override["paused"] else f"set to {override['want']}"
        by_hand = f"{what} by {override['by']} at {rfc3339(override['at'])}{until}"
    return pool | {
        "range": f"{pool['min']}-{pool['max']}",
        "waiting": sum(lane["waiting"] for lane in pool["lanes"].values()),
        "wait": f"{min(waits):.1f} s" if waits else None,
        "override": by_hand,
    }


def _said(action: dict[str, Any]) -> dict[str, Any]:
    change = "" if action["want"] is None else f"{'-' if action['was'] is None else action['was']} -> {action['want']}"
    words = (action.get("shape"), action["worker"] or change)
    return action | {"what": " ".join(word for word in words if word)}
