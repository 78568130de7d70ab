"""A real API server of Kubernetes with its etcd, on loopback: it takes or refuses objects, and runs nothing."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.ports import free_port

PROGRAMS = ("etcd", "kube-apiserver", "kubectl")
START_TIMEOUT_S = 60.0


def missing() -> str:
    """Why there can be none; "" if there can."""
    lacks = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"not on the PATH: {', '.join(lacks)} (setup-envtest of Kubernetes brings all three)" if lacks else ""


@dataclass(frozen=True)
class ApiServer:
    """Its administrator's view, and that of others by `who`."""

    url: str
    folder: Path

    def kubectl(self, *words: str, who: str = "", given: Any = None) -> subprocess.CompletedProcess[str]:
        """Run it; `given` is an object for its standard input."""
        access = ["--server", self.url, "--token", "secret", "--insecure-skip-tls-verify"]
        seen = [*access, *(["--as", who] if who else [])]
        return subprocess.run(
            ["kubectl", *seen, *words],
            input=json.dumps(given) if given is not None else None,
            env={**os.environ, "KUBECONFIG": os.devnull, "NO_PROXY": "127.0.0.1"},
            capture_output=True,
            check=False,
            text=True,
            timeout=60,
        )

    def patch(self, path: str, patch: Any, who: str) -> tuple[int, str]:
        """Send a strategic merge patch without reading the object before, as `kubectl patch` does. Status and body."""
        host, certificate = self.url.removeprefix("https://"), self.folder / "certs/apiserver.crt"
        context = ssl.create_default_context(cafile=str(certificate))
        connection = http.client.HTTPSConnection(host, context=context, timeout=60)
        headers = {"Authorization": "Bearer secret", "Impersonate-User": who}
        headers["Content-Type"] = "application/strategic-merge-patch+json"
        try:
            connection.request("PATCH", path, json.dumps(patch), headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def get(self, *words: str) -> dict[str, Any]:
        found = self.kubectl("get", *words, "--output", "json")
        assert found.returncode == 0, found.stderr
        return dict(json.loads(found.stdout))

    def config(self, token: str, namespace: str) -> Path:
        """A kubeconfig for whoever has this token."""
        path = self.folder / "kubeconfig"
        cluster = {"server": self.url, "insecure-skip-tls-verify": True}
        context = {"cluster": "c", "user": "u", "namespace": namespace}
        known = {
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "x", "context": context}],
        }
        path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "x", **known}))
        return path


@contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """Up, with RBAC, and with admission as it is by default but for accounts of pods, which a controller would make."""
    data, peers, port = free_port(), free_port(), free_port()
    key, tokens = folder / "sa.key", folder / "tokens.csv"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    tokens.write_text('secret,admin,1,"system:masters"\n')
    etcd = [
        *("etcd", "--data-dir", str(folder / "etcd"), "--listen-peer-urls", f"http://127.0.0.1:{peers}"),
        *(word for flag in ("listen", "advertise") for word in (f"--{flag}-client-urls", f"http://127.0.0.1:{data}")),
    ]
    server = [
        *("kube-apiserver", "--bind-address", "127.0.0.1", "--secure-port", str(port)),
        *("--cert-dir", str(folder / "certs"), "--etcd-servers", f"http://127.0.0.1:{data}"),
        *("--service-cluster-ip-range", "10.96.0.0/16", "--service-account-issuer", "https://test"),
        *("--service-account-signing-key-file", str(key), "--service-account-key-file", str(key)),
        *("--token-auth-file", str(tokens), "--authorization-mode", "RBAC"),
        *("--disable-admission-plugins", "ServiceAccount"),
    ]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for argv in (etcd, server):
            with (folder / f"{argv[0]}.log").open("wb") as log:
                running.append(subprocess.Popen(argv, stdout=log, stderr=log))
        found = ApiServer(f"https://127.0.0.1:{port}", folder)
        deadline = time.monotonic() + START_TIMEOUT_S
        while found.kubectl("get", "--raw", "/readyz").returncode:
            assert time.monotonic() < deadline, (folder / "kube-apiserver.log").read_text()[-2000:]
            time.sleep(0.2)
        yield found
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(30)
