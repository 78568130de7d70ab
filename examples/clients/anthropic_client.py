"""The anthropic package: messages, tools, `.parse`, and a stream that goes on after its API process was lost."""

import json
import os
import sys
import time

from anthropic import Anthropic, APIError, Stream
from anthropic.types import RawMessageStreamEvent
from httpx2 import TransportError
from pydantic import BaseModel

url = os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000")
client = Anthropic(base_url=url, api_key=os.environ.get("PENSTOCK_API_KEY", "none"))
model = client.models.list().data[0].id
ASKED = [{"role": "user", "content": "Name a river."}]


class River(BaseModel):
    name: str
    long: bool


def plain():
    return client.messages.create(model=model, messages=ASKED, max_tokens=16).content[0].text


def streamed():
    with client.messages.stream(model=model, messages=ASKED, max_tokens=16) as stream:
        return list(stream.text_stream)


def tools():
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    asked = {"model": model, "tools": [{"name": "get_weather", "input_schema": schema}], "max_tokens": 100}
    messages = [{"role": "user", "content": "What is the weather in Bern? Call get_weather."}]
    message = client.messages.create(messages=messages, **asked)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": f"{block.input['city']}: rain"}
        for block in message.content
        if block.type == "tool_use"
    ]
    messages += [message.to_param(), {"role": "user", "content": results}]
    return client.messages.create(messages=messages, **asked).content[-1].text


def structured():
    asked = {"model": model, "messages": ASKED, "max_tokens": 200}
    return client.messages.parse(output_format=River, **asked).parsed_output.model_dump()


def resumed():
    """After the line `begun`, the API process may be killed: another one gives the rest."""
    asked = {"model": model, "messages": [{"role": "user", "content": "Tell me about rivers."}], "max_tokens": 300}
    stream = client.messages.create(stream=True, extra_body={"queue": {"on_disconnect": "continue"}}, **asked)
    pieces, message, number, kind = [], "", -1, ""
    while kind != "message_stop":
        try:
            for event in stream or rest_of(message, number):
                kind, number = event.type, number + 1
                if kind == "message_start":
                    message = event.message.id
                elif kind == "content_block_delta":
                    pieces.append(event.delta.text)
                    if len(pieces) == 5:
                        print("begun", flush=True)
        except (APIError, TransportError):
            time.sleep(0.5)
        stream = None
    return pieces


def rest_of(message, number):
    """The events after one: each has the next number."""
    headers = {"Last-Event-ID": str(number), "Accept": "text/event-stream"}
    kinds = {"cast_to": RawMessageStreamEvent, "stream_cls": Stream[RawMessageStreamEvent]}
    return client.get(f"/v1/messages/{message}", options={"headers": headers}, stream=True, **kinds)


print(json.dumps(globals()[sys.argv[1]]()))
