"""`penstock console`: opens the console in a browser, logged in."""

from __future__ import annotations

import os
import socket
import sys
import webbrowser
from urllib.parse import urlsplit

import click

from api.auth.hosts import is_loopback
from cli.client import Client, api_command
from cli.output import CommandResult, emit, note


@api_command("console")
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
