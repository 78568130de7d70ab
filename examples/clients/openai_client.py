"""The openai package: chats, tools, `.parse`, and a response whose stream goes on after its API process was lost."""

import json
import os
import sys
import time

from openai import APIConnectionError, InternalServerError, OpenAI, pydantic_function_tool
from pydantic import BaseModel

url = os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("PENSTOCK_API_KEY", "none"))
model = client.models.list().data[0].id


class Weather(BaseModel):
    city: str


class River(BaseModel):
    name: str
    long: bool


def plain():
    asked = [{"role": "user", "content": "Name a river."}]
    return client.chat.completions.create(model=model, messages=asked, max_tokens=16).choices[0].message.content


def streamed():
    asked = [{"role": "user", "content": "Name a river."}]
    chunks = client.chat.completions.create(model=model, messages=asked, max_tokens=16, stream=True)
    return [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]


def tools():
    asked = {"model": model, "tools": [pydantic_function_tool(Weather, name="get_weather")], "max_tokens": 100}
    messages = [{"role": "user", "content": "What is the weather in Bern? Call get_weather."}]
    message = client.chat.completions.parse(messages=messages, **asked).choices[0].message
    messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
    for call in message.tool_calls:
        found = f"{call.function.parsed_arguments.city}: rain"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return client.chat.completions.create(messages=messages, **asked).choices[0].message.content


def structured():
    asked = [{"role": "user", "content": "Name a river."}]
    answer = client.chat.completions.parse(model=model, messages=asked, response_format=River, max_tokens=200)
    return answer.choices[0].message.parsed.model_dump()


def resumed():
    """After the line `begun`, the API process may be killed: another one gives the rest."""
    asked = {"model": model, "input": "Tell me about rivers.", "max_output_tokens": 300}
    stream = client.responses.create(background=True, stream=True, **asked)
    pieces, last, kind, response_id = [], -1, "", ""
    while kind not in ("response.completed", "response.incomplete"):
        try:
            if response_id:
                stream = client.responses.retrieve(response_id, stream=True, starting_after=last)
            for event in stream:
                last, kind = event.sequence_number, event.type
                if kind == "response.created":
                    response_id = event.response.id
                elif kind == "response.output_text.delta":
                    pieces.append(event.delta)
                    if len(pieces) == 5:
                        print("begun", flush=True)
        except (APIConnectionError, InternalServerError):
            time.sleep(0.5)
    return pieces


print(json.dumps(globals()[sys.argv[1]]()))
