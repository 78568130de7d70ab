"""A receiver of webhooks: verifies the signature of each message, and fetches the result that it is about.

In penstock.toml, with a secret of your own (`echo whsec_$(openssl rand -base64 32)`):

    [webhooks.example]
    url = "http://127.0.0.1:9000/"
    secret = "whsec_..."
    events = []                   # what requests do not name: none
    allow_http = true
    networks = ["127.0.0.1/32"]

Then start it with the same secret in PENSTOCK_WEBHOOK_SECRET, and submit a job that names it:

    penstock submit "Name a river." --webhook example
"""

import base64
import hmac
import json
import os
import time
from email.message import Message
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from penstock.client import PenstockClient

SECRET = os.environ["PENSTOCK_WEBHOOK_SECRET"]
PORT = int(os.environ.get("PORT", "9000"))
MAX_AGE_S = 300

client = PenstockClient()
seen: set[str] = set()
"""Ids of the messages so far: one may come twice. A real receiver stores them."""


def is_genuine(headers: Message, body: bytes) -> bool:
    """Whether somebody who knows the secret signed exactly this body, a moment ago."""
    name, sent = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    if not sent.isdecimal() or abs(time.time() - int(sent)) > MAX_AGE_S:
        return False
    key = base64.b64decode(SECRET.removeprefix("whsec_"))
    mine = b"v1," + base64.b64encode(hmac.digest(key, f"{name}.{sent}.".encode() + body, "sha256"))
    signatures = headers.get("webhook-signature", "").encode().split()
    return any(hmac.compare_digest(mine, each) for each in signatures)


class Receiver(BaseHTTPRequestHandler):
    """Answers 2xx at once to what is genuine, so that Penstock need not send it again."""

    def do_POST(self) -> None:
        """Take one message."""
        body = self.rfile.read(int(self.headers["content-length"]))
        genuine = is_genuine(self.headers, body)
        self.send_response(204 if genuine else 401)
        self.end_headers()
        if genuine and self.headers["webhook-id"] not in seen:
            seen.add(self.headers["webhook-id"])
            self.take(json.loads(body))

    def take(self, message: dict[str, Any]) -> None:
        """Print what happened. The message says how a job ended; its result is fetched with our own key."""
        ended = message["data"]
        result = client.get(ended["id"])["result"] if ended["status"] == "completed" else ended.get("error")
        print(message["type"], ended["id"], json.dumps(result), flush=True)


HTTPServer(("127.0.0.1", PORT), Receiver).serve_forever()
