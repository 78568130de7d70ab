"""A stream that goes on when the API process is killed: each token once and in order.

Try it: kill the API process (`penstock ps` shows its pid) while the text comes. `penstock up` starts another one.
"""

import sys

from penstock.client import PenstockClient, StreamReset

with PenstockClient(on_retry=lambda pause: print(f"[{pause.cause}]", file=sys.stderr)) as client:
    model = client.request("GET", "/v1/models", tries_again=True)["data"][0]["id"]
    question = {"role": "user", "content": "Tell me about rivers."}
    job = client.submit({"model": model, "messages": [question], "max_tokens": 200})

    cursor = ""  # store it, and another program can go on from here
    while True:
        try:
            for event in client.stream(job["id"], after=cursor):
                print(event.text, end="", flush=True)
                cursor = event.id
            break
        except StreamReset as reset:  # rare: the store lost tokens that are on the screen already
            print("\n[the answer begins again]", file=sys.stderr)
            cursor = reset.cursor
print()
