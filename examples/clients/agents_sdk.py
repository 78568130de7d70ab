"""OpenAI's Agents SDK: an agent with a tool, by the Responses API, which it speaks by default."""

import asyncio
import json
import os
import sys

from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

url = os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000")
key = os.environ.get("PENSTOCK_API_KEY", "none")
set_tracing_disabled(True)  # traces would go to OpenAI
set_default_openai_client(AsyncOpenAI(base_url=f"{url}/v1", api_key=key), use_for_tracing=False)
model = OpenAI(base_url=f"{url}/v1", api_key=key).models.list().data[0].id


class River(BaseModel):
    name: str
    long: bool


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: rain"


def agent(**more):
    return Agent(name="Guide", model=model, **more)


async def plain():
    return (await Runner.run(agent(), "Name a river.")).final_output


async def streamed():
    run = Runner.run_streamed(agent(), "Name a river.")
    raw = [event.data async for event in run.stream_events() if event.type == "raw_response_event"]
    return [event.delta for event in raw if event.type == "response.output_text.delta"]


async def tools():
    run = await Runner.run(agent(tools=[get_weather]), "What is the weather in Bern? Call get_weather.")
    assert any(item.type == "tool_call_output_item" for item in run.new_items)
    return run.final_output


async def structured():
    return (await Runner.run(agent(output_type=River), "Name a river.")).final_output.model_dump()


print(json.dumps(asyncio.run(globals()[sys.argv[1]]())))
