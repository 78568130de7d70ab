"""LangChain: `bind_tools` and `with_structured_output` of ChatOpenAI, or, with a second argument `messages`, of
ChatAnthropic."""

import json
import os
import sys

import httpx2
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel

url = os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000")
key = os.environ.get("PENSTOCK_API_KEY", "none")
model = httpx2.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}).json()["data"][0]["id"]
if sys.argv[2:] == ["messages"]:
    from langchain_anthropic import ChatAnthropic as Chat

    base_url = url
else:
    from langchain_openai import ChatOpenAI as Chat

    base_url = f"{url}/v1"


class River(BaseModel):
    name: str
    long: bool


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: rain"


def chat(max_tokens):
    return Chat(base_url=base_url, api_key=key, model=model, max_tokens=max_tokens)


def plain():
    return chat(16).invoke("Name a river.").content


def streamed():
    return [chunk.content for chunk in chat(16).stream("Name a river.") if chunk.content]


def tools():
    bound = chat(100).bind_tools([get_weather])
    messages = [HumanMessage("What is the weather in Bern? Call get_weather.")]
    messages.append(bound.invoke(messages))
    messages += [get_weather.invoke(call) for call in messages[-1].tool_calls]
    assert isinstance(messages[-1], ToolMessage)
    return bound.invoke(messages).content


def structured():
    return chat(200).with_structured_output(River).invoke("Name a river.").model_dump()


print(json.dumps(globals()[sys.argv[1]]()))
