"""An authority of a test's own, and certificates it has signed, made by the openssl command."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
AUTHORITY = ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign")
SERVER = ("basicConstraints=critical,CA:FALSE", "extendedKeyUsage=serverAuth")


class Authority:
    """`file` is what one who believes it is given."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder, self.file, self._key = folder, folder / "ca.pem", folder / "ca.key"
        _openssl(self.file, self._key, "An authority of a test", AUTHORITY)

    def server(self, name: str) -> ssl.SSLContext:
        """What a server of this name shows."""
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        extensions = (*SERVER, f"subjectAltName=DNS:{name}")
        _openssl(certificate, key, "A server of a test", extensions, "-CA", self.file, "-CAkey", self._key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        return context


def _openssl(certificate: Path, key: Path, name: str, extensions: tuple[str, ...], *more: str | Path) -> None:
    words = ["openssl", "req", "-x509", *KEY, "-subj", f"/CN={name}", "-keyout", key, "-out", certificate, *more]
    words += [word for extension in extensions for word in ("-addext", extension)]
    subprocess.run(words, check=True, capture_output=True, timeout=30)
