"""Login to the console by a browser: finds the caller of a session, and makes its cookie.

A session has two secrets: a cookie that no script can read, and a token that only pages of this origin can read and
send. Browsers send cookies to every port of a host, so the cookie alone must open nothing; and no page of another
origin can send the token's header without permission. A request needs both.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

from api.auth.hosts import HOST
from api.auth.keys import Caller, Keyring
from streaming.fleet.processes import SESSION_S, ConsoleLogin, ConsoleSessions

TOKEN_HEADER = b"x-penstock-console"
SECRET = re.compile(r"[A-Za-z0-9_-]{43}")
LINK_SECRET = re.compile(r"[A-Za-z0-9_-]{22}")
"""A link has room in a line of 80 columns."""
COOKIE = "penstock-console"


class ConsoleAccess:
    """Opens, finds and ends the console's sessions for one API process. Every method raises Unavailable."""

    def __init__(self, keyring: Keyring, sessions: ConsoleSessions) -> None:
        self._keyring, self._sessions = keyring, sessions

    async def caller(self, headers: Mapping[bytes, bytes]) -> Caller | None:
        """Return the admin whose session a request belongs to; None if there is none, or if a page of another origin
        sent it."""
        secret = secret_of(headers)
        if secret is None or not _is_own_page(headers):
            return None
        login = await self._sessions.find(secret)
        return None if login is None else self._keyring.unsealed(login.by, secret, login.seal)

    async def link(self, caller: Caller) -> str:
        """Return the secret of a new link that opens one session of this admin."""
        secret = secrets.token_urlsafe(16)
        login = ConsoleLogin(by=caller.name, seal=self._keyring.seal(caller.name, secret))
        await self._sessions.keep("link", secret, login)
        return secret

    async def redeem(self, link: str) -> Caller | None:
        """Use up a link, and return its admin; None if it is unknown, used or over."""
        login = await self._sessions.take("link", link) if LINK_SECRET.fullmatch(link) else None
        return None if login is None else self._keyring.unsealed(login.by, link, login.seal)

    async def begin(self, caller: Caller) -> tuple[str, str]:
        """Open a session of an admin; return its cookie and its token."""
        cookie, token = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        secret = _joined(cookie, token)
        login = ConsoleLogin(by=caller.name, seal=self._keyring.seal(caller.name, secret))
        await self._sessions.keep("session", secret, login)
        return cookie, token

    async def end(self, headers: Mapping[bytes, bytes]) -> None:
        """End the session of this request."""
        if (secret := secret_of(headers)) is not None:
            await self._sessions.take("session", secret)


def link_path(secret: str) -> str:
    """Return the path of a link. The secret is in the fragment, which browsers do not send and servers do not log."""
    return f"/console#link={secret}"


def secret_of(headers: Mapping[bytes, bytes]) -> str | None:
    """Return the secret of a request's session; None unless it has both the cookie and the token."""
    token = headers.get(TOKEN_HEADER, b"").decode("latin-1")
    name = cookie_name(headers)
    for part in headers.get(b"cookie", b"").decode("latin-1").split(";"):
        given, _, cookie = part.strip().partition("=")
        if given == name and SECRET.fullmatch(cookie) and SECRET.fullmatch(token):
            return _joined(cookie, token)
    return None


def cookie_name(headers: Mapping[bytes, bytes]) -> str:
    """Return the cookie's name, which holds the port: several servers of one host keep their cookies apart."""
    match = HOST.fullmatch(headers.get(b"host", b"").decode("latin-1"))
    port = match[0].removeprefix(match[1]).lstrip(":") if match else ""
    return f"{COOKIE}-{port}" if port else COOKIE


def set_cookie(headers: Mapping[bytes, bytes], value: str, max_age_s: int = SESSION_S) -> str:
    """Return the Set-Cookie header that keeps (or, with 0 seconds, removes) the cookie. Behind a proxy with TLS, the
    page's origin tells that the cookie must never be sent without TLS."""
    secure = "; Secure" if headers.get(b"origin", b"").startswith(b"https://") else ""
    return f"{cookie_name(headers)}={value}; Path=/; Max-Age={max_age_s}; HttpOnly; SameSite=Strict{secure}"


def _joined(cookie: str, token: str) -> str:
    return f"{cookie}.{token}"


def _is_own_page(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a page of this origin sent the request. Browsers set both headers, and no page can change them; one of
    them is missing where there is no TLS, or with GET."""
    site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
    if site is not None and site != b"same-origin":
        return False
    return origin is None or origin.partition(b"://")[2] == headers.get(b"host", b"")
