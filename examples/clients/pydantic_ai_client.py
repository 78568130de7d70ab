"""Pydantic AI: an agent with a tool, and structured answers, which are forced calls. Asks by chats, or, with a second
argument `messages`, by Anthropic's messages."""

import asyncio
import json
import os
import sys

import httpx2
from pydantic import BaseModel
from pydantic_ai import Agent

url = os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000")
key = os.environ.get("PENSTOCK_API_KEY", "none")
name = httpx2.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}).json()["data"][0]["id"]
if sys.argv[2:] == ["messages"]:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    model = AnthropicModel(name, provider=AnthropicProvider(base_url=url, api_key=key))
else:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))


class River(BaseModel):
    name: str
    long: bool


def plain():
    return Agent(model, model_settings={"max_tokens": 16}).run_sync("Name a river.").output


def streamed():
    async def run():
        async with Agent(model, model_settings={"max_tokens": 16}).run_stream("Name a river.") as answer:
            return [piece async for piece in answer.stream_text(delta=True, debounce_by=None)]

    return asyncio.run(run())


def tools():
    agent, cities = Agent(model, model_settings={"max_tokens": 100}), []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather of a city."""
        cities.append(city)
        return f"{city}: rain"

    answer = agent.run_sync("What is the weather in Bern? Call get_weather.").output
    assert cities
    return answer


def structured():
    agent = Agent(model, output_type=River, model_settings={"max_tokens": 200})
    return agent.run_sync("Name a river.").output.model_dump()


print(json.dumps(globals()[sys.argv[1]]()))
