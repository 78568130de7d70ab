"""Open WebUI in front of Penstock, without a network: `serve` keeps it up for a browser; the others ask its own API."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import httpx

PORT = int(os.environ.get("OPEN_WEBUI_PORT", "3000"))
ASKED = [{"role": "user", "content": "Name a river."}]
WITHOUT_TOOLS = {"capabilities": {"builtin_tools": False}}
SETTINGS = {
    "OPENAI_API_BASE_URL": os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000") + "/v1",
    "OPENAI_API_KEY": os.environ.get("PENSTOCK_API_KEY", "none"),
    # Without this it offers its own functions with each message of a page, and a model that knows none refuses them.
    "DEFAULT_MODEL_METADATA": json.dumps({} if os.environ.get("OPEN_WEBUI_TOOLS") else WITHOUT_TOOLS),
    "ENABLE_OLLAMA_API": "False",
    "OFFLINE_MODE": "True",
    "RAG_EMBEDDING_ENGINE": "openai",  # otherwise it loads a model of its own
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "example",
}


def client():
    """A client of its API, once it has started."""
    client = httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=120)
    while True:
        try:
            client.get("/health").raise_for_status()
            break
        except httpx.HTTPError:
            if process.poll() is not None:
                sys.exit((Path(folder) / "log").read_text())
            time.sleep(1)
    token = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]
    client.headers["Authorization"] = f"Bearer {token}"
    return client


def asked(client, **more):
    model = client.get("/api/models").json()["data"][0]["id"]
    return {"model": model, "messages": ASKED, "max_tokens": 16, **more}


def plain(client):
    answer = client.post("/api/chat/completions", json=asked(client, stream=False)).raise_for_status()
    return answer.json()["choices"][0]["message"]["content"]


def streamed(client):
    pieces = []
    with client.stream("POST", "/api/chat/completions", json=asked(client, stream=True)) as answer:
        for line in answer.raise_for_status().iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                pieces += [choice["delta"]["content"] for choice in choices if choice["delta"].get("content")]
    return pieces


def serve(client):
    print(f"http://127.0.0.1:{PORT}, until Ctrl-C; it forgets all then", flush=True)
    with suppress(KeyboardInterrupt):
        process.wait()


socket.create_server(("127.0.0.1", PORT)).close()  # fails where another server has the port
program = Path(sys.executable).with_name("open-webui")
with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
    process = subprocess.Popen(
        [program, "serve", "--host", "127.0.0.1", "--port", str(PORT)],
        env={**os.environ, **SETTINGS, "DATA_DIR": folder}, cwd=folder, stdout=log, stderr=log,
    )  # fmt: skip
    try:
        print(json.dumps(globals()[sys.argv[1]](client())))
    finally:
        process.terminate()
        process.wait()
