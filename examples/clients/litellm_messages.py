"""LiteLLM by Anthropic's messages: its models `anthropic/NAME`, asked and answered as chats of OpenAI's API."""

import json
import os
import sys

import httpx
import litellm
from pydantic import BaseModel

url = os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000")
key = os.environ.get("PENSTOCK_API_KEY", "none")
name = httpx.get(f"{url}/v1/models", headers={"x-api-key": key}).json()["data"][0]["id"]
ASKED = [{"role": "user", "content": "Name a river."}]
litellm.suppress_debug_info = True


class River(BaseModel, extra="forbid"):  # else a small model adds fields, which its schema would allow
    name: str
    long: bool


def ask(messages, max_tokens, **more):
    return litellm.completion(f"anthropic/{name}", messages, max_tokens=max_tokens, api_base=url, api_key=key, **more)


def plain():
    return ask(ASKED, 16).choices[0].message.content


def streamed():
    pieces = [chunk.choices[0].delta.content for chunk in ask(ASKED, 16, stream=True)]
    return [piece for piece in pieces if piece]


def tools():
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    offered = [{"type": "function", "function": {"name": "get_weather", "parameters": schema}}]
    messages = [{"role": "user", "content": "What is the weather in Bern? Call get_weather."}]
    messages.append(ask(messages, 100, tools=offered).choices[0].message)
    for call in messages[-1].tool_calls:
        city = json.loads(call.function.arguments)["city"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{city}: rain"})
    return ask(messages, 100, tools=offered).choices[0].message.content


def structured():
    return River.model_validate_json(ask(ASKED, 200, response_format=River).choices[0].message.content).model_dump()


print(json.dumps(globals()[sys.argv[1]]()))
