"""A response in the background, with OpenAI's package: its stream goes on after the API process was killed.

Try it: kill the API process (`penstock ps` shows its pid) while the text comes. `penstock up` starts another one.
"""

import os
import time

import httpx2  # what the package connects with; older ones use httpx
from openai import APIConnectionError, InternalServerError, OpenAI

RETRY_DELAY_S = 0.5
ENDS = ("response.completed", "response.incomplete", "response.failed")

url = os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("PENSTOCK_API_KEY", "none"))
stream = client.responses.create(
    model=client.models.list().data[0].id,
    input="Tell me about rivers.",
    max_output_tokens=200,
    background=True,
    stream=True,
)
response_id, last, kind = "", -1, ""  # store the first two, and another program can go on from here
while kind not in ENDS:
    try:
        if response_id:
            stream = client.responses.retrieve(response_id, stream=True, starting_after=last)
        for event in stream:
            last, kind = event.sequence_number, event.type
            if event.type == "response.created":
                response_id = event.response.id
            elif event.type == "response.output_text.delta":
                print(event.delta, end="", flush=True)
    except (APIConnectionError, InternalServerError, httpx2.TransportError):
        time.sleep(RETRY_DELAY_S)
print()
