"""TLS of the API: the certificate that the server shows, read anew when its files change, and what trusts it."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from api.settings import ApiSettings
from penstock.config import ConfigError
from penstock.loops import coalesced

log = logging.getLogger(__name__)

RELOAD_INTERVAL_S = 1.0
END = "-----END CERTIFICATE-----"
PAIR = "name a PEM file of the certificate and those that signed it, its own first, and its key without a password"


class Certificate:
    """The certificate and key of [api]; new connections use `context`. Raises ConfigError."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self._versions, self._problem = self._stat(), ""
        self.context = _server_context(certificate, key)

    @classmethod
    def of(cls, settings: ApiSettings) -> Certificate | None:
        """None without TLS. Raises ConfigError."""
        certificate, key = settings.tls_certificate, settings.tls_key
        return cls(certificate, key) if certificate and key else None

    async def keep_fresh(self) -> None:
        """Look for new files, for ever."""
        while True:
            await asyncio.sleep(coalesced(RELOAD_INTERVAL_S))
            self.refresh()

    def refresh(self) -> None:
        """Use the files if they have changed and fit each other; open connections keep what they have."""
        versions = self._stat()
        if versions == self._versions:
            return
        try:
            self.context = _server_context(*self._files)
        except ConfigError as error:
            if str(error) != self._problem:
                log.warning("the certificate stays as it was: %s", error)
            self._problem = str(error)
        else:
            self._versions, self._problem = versions, ""
            log.info("new connections get the new certificate of %s", self._files[0])

    def _stat(self) -> list[tuple[int, ...]]:
        try:
            found = [path.stat() for path in self._files]
        except OSError:
            return []
        return [(each.st_mtime_ns, each.st_ctime_ns, each.st_size, each.st_ino) for each in found]


def trusting(certificate: Path | str) -> ssl.SSLContext:
    """For clients on the server's machine: trusts exactly this certificate, whatever its name. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # those that signed it are trusted for nothing
    try:
        context.load_verify_locations(cadata="".join(Path(certificate).read_text("ascii").partition(END)[:2]))
    except (OSError, ValueError) as error:
        raise ConfigError("api.tls_certificate", f"{certificate} cannot be used: {error}", PAIR) from None
    return context


def _server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Raises ConfigError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        if key.stat().st_mode & 0o007:
            raise ConfigError("api.tls_key", f"all users can read {key}", f"chmod o= {key}")
        context.load_cert_chain(certificate, key, password="")  # else it would ask at the terminal
    except OSError as error:  # also ssl.SSLError
        problem = f"{certificate} and {key} cannot be used: {error}"
        raise ConfigError("api.tls_certificate", problem, PAIR) from None
    return context
