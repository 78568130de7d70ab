"""A message broker on both sides: puts a message in, which becomes a job, and takes the events of its life out.

In penstock.toml (Redis or RabbitMQ; the broker is not the queue's own Redis):

    [events]
    take_url = "redis://127.0.0.1:6380/0"
    publish_url = "redis://127.0.0.1:6380/0"
    results = true

Then start it with the same address in PENSTOCK_BROKER_URL.
"""

import json
import os
import uuid

from kombu import Connection

from penstock.client import PenstockClient

ENDS = {"penstock.job.completed", "penstock.job.failed", "penstock.job.cancelled", "penstock.job.expired"}

with PenstockClient() as client:  # only to learn the name of a model
    model = client.request("GET", "/v1/models", tries_again=True)["data"][0]["id"]

order = f"order-{uuid.uuid4()}"
body = {
    "model": model,
    "messages": [{"role": "user", "content": "Name a river."}],
    "max_tokens": 8,
    "metadata": {"order": order},
}
with Connection(os.environ["PENSTOCK_BROKER_URL"]) as connection:
    # The message id is the idempotency key: a message that comes twice leads to one job.
    connection.SimpleQueue("penstock.jobs").put(body, message_id=order)
    events = connection.SimpleQueue("penstock.events")
    kind = ""
    while kind not in ENDS:
        message = events.get(timeout=60)
        event = json.loads(message.body)
        message.ack()
        if event["data"].get("metadata") == {"order": order}:
            kind = event["type"]
            print(kind, event["subject"])
    print(json.dumps(event["data"].get("result")))
