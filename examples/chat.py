"""A streamed chat with OpenAI's package: only the address differs from OpenAI's."""

import os

from openai import OpenAI

url = os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("PENSTOCK_API_KEY", "none"))

stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "What is the capital of France?"}],
    max_tokens=64,
    stream=True,
    extra_body={"queue": {"priority": "interactive"}},  # what OpenAI does not have goes here
)
finish_reason = None
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
        finish_reason = choice.finish_reason or finish_reason
print()
if finish_reason is None:
    # The package does not report a broken connection. resume.py shows how a stream goes on then.
    raise SystemExit("the connection broke before the answer's end")
