"""`python -m bench.gateway.peers.plain_api PORT REDIS_URL`: the gateway that FastAPI's documentation leads to.

A job goes onto a list, its tokens come back on a channel of its own, each is rendered and given to a StreamingResponse.
Nothing is kept: what is published while nobody listens is gone.
"""

import json
import sys
import time
import uuid
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from redis.asyncio import Redis

JOBS = "plain:jobs"


class PlainMessage(BaseModel):
    """One turn."""

    role: str
    content: str


class PlainChatRequest(BaseModel):
    """What is asked."""

    model: str
    messages: list[PlainMessage]
    max_tokens: int
    stream: bool = True


def build(redis: Redis) -> FastAPI:
    """The whole application."""
    app = FastAPI()

    @app.post("/v1/chat/completions")  # type: ignore[untyped-decorator]
    async def chat(request: PlainChatRequest) -> StreamingResponse:
        return StreamingResponse(tokens(request), media_type="text/event-stream")

    async def tokens(request: PlainChatRequest) -> AsyncIterator[str]:
        channel = f"plain:{uuid.uuid4().hex}"
        async with redis.pubsub() as pubsub:
            await pubsub.subscribe(channel)
            job = {"channel": channel, "prompt": request.messages[-1].content, "tokens": request.max_tokens}
            await redis.lpush(JOBS, json.dumps(job))
            async for message in pubsub.listen():
                if message["type"] != "message":
                    continue
                piece = json.loads(message["data"])
                yield chunk(channel, request.model, {"content": piece["text"]}, None)
                if piece["finish"]:
                    yield chunk(channel, request.model, {}, piece["finish"])
                    yield "data: [DONE]\n\n"
                    return

    return app


def chunk(name: str, model: str, delta: dict[str, str], finish: str | None) -> str:
    """One event."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    body = {
        "id": name,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
    }
    return f"data: {json.dumps(body)}\n\n"


if __name__ == "__main__":
    app = build(Redis.from_url(sys.argv[2], max_connections=4096))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False, backlog=2048)
