"""Webhook signatures: HMAC-SHA256 headers as the Standard Webhooks specification defines them."""

from __future__ import annotations

import base64
import hmac

from streaming.settings import signing_key


def signed_headers(secret: str, message: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Return the three headers of one attempt; `timestamp` is in Unix seconds. Raises ValueError for a bad secret."""
    signed = b"%b.%d.%b" % (message.encode(), timestamp, body)
    digest = base64.b64encode(hmac.digest(signing_key(secret), signed, "sha256")).decode()
    return {"webhook-id": message, "webhook-timestamp": str(timestamp), "webhook-signature": f"v1,{digest}"}
