"""A file of prompts as a batch, with OpenAI's package: upload, wait, download."""

import json
import os
import time

from openai import OpenAI

url = os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("PENSTOCK_API_KEY", "none"))
model = client.models.list().data[0].id

lines = [
    {
        "custom_id": f"river-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": model, "messages": [{"role": "user", "content": f"Name river {number}."}], "max_tokens": 8},
    }
    for number in range(20)
]
data = "".join(json.dumps(line) + "\n" for line in lines).encode()

file = client.files.create(file=("rivers.jsonl", data), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.5)
    batch = client.batches.retrieve(batch.id)

print(f"{batch.id}: {batch.status}, {batch.request_counts}")
if batch.output_file_id:
    for line in client.files.content(batch.output_file_id).text.strip().split("\n"):
        answer = json.loads(line)  # in the order of the input
        print(answer["custom_id"], repr(answer["response"]["body"]["choices"][0]["message"]["content"]))
if batch.error_file_id:
    print(client.files.content(batch.error_file_id).text)
