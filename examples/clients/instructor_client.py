"""Instructor in its default mode: an answer is the arguments of one forced call."""

import json
import os
import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel

url = os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000")
plain_client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("PENSTOCK_API_KEY", "none"))
client = instructor.from_openai(plain_client)
asked = {
    "model": plain_client.models.list().data[0].id,
    "messages": [{"role": "user", "content": "Name a river."}],
    "max_tokens": 200,
}


class River(BaseModel):
    name: str
    long: bool


def structured():
    return client.chat.completions.create(response_model=River, **asked).model_dump()


def streamed():
    """The object as it grows."""
    return [partial.model_dump() for partial in client.chat.completions.create_partial(response_model=River, **asked)]


def tools():
    """Many objects, one call."""
    return [river.model_dump() for river in client.chat.completions.create_iterable(response_model=River, **asked)]


print(json.dumps(globals()[sys.argv[1]]()))
