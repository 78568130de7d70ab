"""What counts as this machine: one answer for the address to listen on, a client's address, a Host and an origin."""

from __future__ import annotations

import pytest

from api.auth.hosts import is_loopback, is_loopback_name


@pytest.mark.parametrize(
    ("host", "address", "name"),
    [
        ("127.0.0.1", True, True), ("127.8.9.10", True, True), ("::1", True, True), ("[::1]", True, True),
        ("::ffff:127.0.0.1", True, True), ("localhost", True, True), ("LOCALHOST", True, True),
        ("app.localhost", False, True), ("localhost.", False, True),
        ("", False, False), ("0.0.0.0", False, False),  # noqa: S104 - not listened on
        ("::", False, False), ("10.0.0.1", False, False),
        ("fe80::1%lo", False, False), ("::ffff:10.0.0.1", False, False), ("2130706433", False, False),
        ("evil.example", False, False), ("evillocalhost", False, False), ("localhost.evil.example", False, False),
        (".localhost", False, False), ("evil_.localhost", False, False),
    ],
)  # fmt: skip
def test_what_is_this_machine(host: str, address: bool, name: bool) -> None:
    """Names below localhost only where a browser asks for them: elsewhere a resolver decides what they are."""
    assert (is_loopback(host), is_loopback_name(host)) == (address, name)
