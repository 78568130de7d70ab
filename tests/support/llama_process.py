"""A real llama-server for tests: started, killed by its process id, and started again on the same port."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from house import eventually

from bench.ports import free_port

PROGRAM = Path(__file__).parent / "llama_server.py"


class LlamaProcess:
    """One server of the test model, with `slots` slots; `pooling` and `template` as for llama_server.py."""

    def __init__(
        self, model: Path, log: Path, slots: int = 1, *, pooling: str = "", template: Path | None = None
    ) -> None:
        self._model, self._log, self._slots, self.port = model, log, slots, free_port()
        self._more = [pooling, "" if template is None else str(template)]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Start it, and return once it answers."""
        with self._log.open("ab") as log:
            command = [sys.executable, str(PROGRAM), str(self._model), str(self.port), str(self._slots), *self._more]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        eventually(self._is_ready, OSError, http.client.HTTPException, seconds=60)

    def kill(self) -> None:
        """End it with SIGKILL. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def gauge(self, name: str) -> float:
        """One of its gauges."""
        found = re.search(rf"^llamacpp:{name} (\S+)$", self._get("/metrics")[1].decode(), re.MULTILINE)
        assert found is not None
        return float(found[1])

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Its answer to one request, without Penstock."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        connection.close()
        return answer

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()[-2000:]
        return self._get("/health")[0] == 200

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("GET", path)
        reply = connection.getresponse()
        found = reply.status, reply.read()
        connection.close()
        return found
