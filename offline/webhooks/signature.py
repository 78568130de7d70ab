"""Signatures of webhooks by the Standard Webhooks form, symmetric: whoever has the secret knows who sent a message."""

from __future__ import annotations

import base64
import hmac

from streaming.settings import signing_key


def signed_headers(secret: str, message: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The three headers of one attempt; `timestamp` in Unix seconds. Raises ValueError for what is no secret."""
    signed = b"%b.%d.%b" % (message.encode(), timestamp, body)
    digest = base64.b64encode(hmac.digest(signing_key(secret), signed, "sha256")).decode()
    return {"webhook-id": message, "webhook-timestamp": str(timestamp), "webhook-signature": f"v1,{digest}"}
