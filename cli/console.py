"""`penstock console`: opens the console in a browser, logged in."""

from __future__ import annotations

import sys
import webbrowser

import click

from cli.api_command import api_command
from cli.client import Client
from cli.output import CommandResult, emit, note


@api_command("console")
@click.option("--no-browser", is_flag=True, help="Only print the link.")
def console(client: Client, no_browser: bool) -> CommandResult:
    """Open the console in a browser, by a link that logs in once, within a minute."""
    link = client.post("/admin/console/links", {})
    url = f"{client.url}/console#{link['path'].partition('#')[2]}"

    def show() -> None:
        emit(url + "\n")
        if no_browser or not sys.stdout.isatty() or not webbrowser.open(url):
            note("open this link within a minute; it works once")

    return CommandResult({"url": url, "expires_at": link["expires_at"]}, show)
