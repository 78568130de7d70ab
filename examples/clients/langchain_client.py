"""LangChain: `bind_tools` and `with_structured_output` of ChatOpenAI."""

import json
import os
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import BaseModel

url = os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000")
key = os.environ.get("PENSTOCK_API_KEY", "none")
model = OpenAI(base_url=f"{url}/v1", api_key=key).models.list().data[0].id


class River(BaseModel):
    name: str
    long: bool


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: rain"


def chat(max_tokens):
    return ChatOpenAI(base_url=f"{url}/v1", api_key=key, model=model, max_tokens=max_tokens)


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
