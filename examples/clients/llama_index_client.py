"""LlamaIndex: OpenAILike, its function agent, and its structured answers, which force a call."""

import asyncio
import json
import os
import sys

from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
from llama_index.llms.openai_like import OpenAILike
from openai import OpenAI
from pydantic import BaseModel

url = os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000")
key = os.environ.get("PENSTOCK_API_KEY", "none")
model = OpenAI(base_url=f"{url}/v1", api_key=key).models.list().data[0].id


class River(BaseModel):
    name: str
    long: bool


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: rain"


def llm(max_tokens, **more):
    return OpenAILike(api_base=f"{url}/v1", api_key=key, model=model, max_tokens=max_tokens, **more)


def plain():
    return llm(16).complete("Name a river.").text


def streamed():
    return [piece.delta for piece in llm(16).stream_complete("Name a river.") if piece.delta]


def tools():
    able = llm(100, is_chat_model=True, is_function_calling_model=True)

    async def run():
        handler = FunctionAgent(tools=[get_weather], llm=able).run("What is the weather in Bern? Call get_weather.")
        called = [event async for event in handler.stream_events() if isinstance(event, ToolCallResult)]
        answer = str(await handler)
        assert called
        return answer

    return asyncio.run(run())


def structured():
    able = llm(200, is_chat_model=True, is_function_calling_model=True)
    return able.as_structured_llm(River).complete("Name a river.").raw.model_dump()


print(json.dumps(globals()[sys.argv[1]]()))
