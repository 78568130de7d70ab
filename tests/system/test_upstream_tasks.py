"""A real llama-server behind the engine `upstream`: embeddings, token ids and tools, by the official client."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batching import client
from house import House, serving
from llama_process import LlamaProcess
from openai import OpenAI

pytestmark = pytest.mark.slow

TEMPLATE = Path(__file__).parents[1] / "support" / "tools.jinja"
MODEL = "small"
SIZE = 576
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


def asked_before(city: str) -> list[dict[str, Any]]:
    """A turn with a call: the small model does as it has done before."""
    function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    call = {"id": f"call_{city}", "type": "function", "function": function}
    return [
        {"role": "user", "content": f"Weather in {city}?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]


TALK: Any = [
    *[turn for city in ("Rome", "Oslo", "Paris") for turn in asked_before(city)],
    {"role": "user", "content": "Weather in Bern?"},
]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def llama(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaProcess]:
    log = tmp_path_factory.mktemp("llama") / "log"
    server = LlamaProcess(real_model, log, 2, pooling="last", template=TEMPLATE)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def house(llama: LlamaProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A worker that sends the server everything."""
    folder = tmp_path_factory.mktemp("house")
    settings = f'[models.{MODEL}]\nengine = "upstream"\noptions.urls = ["{llama.url}"]\n'
    (folder / "penstock.toml").write_text(settings + "options.cache_prompt = true\n")
    with serving(folder, "workers") as house:
        yield house


@pytest.fixture
def openai(house: House) -> OpenAI:
    return client(house)


def ask(house: House, path: str, **body: Any) -> tuple[int, Any]:
    status, _, answer = house.post(path, {"model": MODEL, **body})
    return status, json.loads(answer)


# --- embeddings ------------------------------------------------------------------------------------------------------


def test_vectors_are_those_of_the_server(openai: OpenAI, llama: LlamaProcess, house: House) -> None:
    """As base64 (the client's default) and as numbers, of texts and of token ids; a long list too."""
    texts = ["A river flows to the sea.", "The sea takes the river.", "Tax forms are due in May."]
    own = [each["embedding"] for each in llama.ask("/v1/embeddings", {"input": texts})["data"]]
    for form in ({}, {"encoding_format": "float"}):
        made = openai.embeddings.create(model=MODEL, input=texts, **form)  # type: ignore[arg-type]
        for found, vector in zip(made.data, own, strict=True):
            assert len(found.embedding) == SIZE and array("f", found.embedding) == pytest.approx(vector, abs=1e-3)
        assert made.usage.prompt_tokens > 10
    status, told = ask(house, "/tokenize", prompt=texts[0])
    assert status == 200
    (by_ids,) = openai.embeddings.create(model=MODEL, input=told["tokens"]).data
    assert by_ids.embedding == pytest.approx(own[0], abs=1e-3)
    many = openai.embeddings.create(model=MODEL, input=[f"{number}" for number in range(66)])
    assert [each.index for each in many.data] == list(range(66))


# --- token ids -------------------------------------------------------------------------------------------------------


def test_token_ids_are_those_that_an_answer_counts(openai: OpenAI, house: House) -> None:
    """Of a text and of a conversation; and back."""
    text = "A river – ünïcode 😀"
    _, told = ask(house, "/tokenize", prompt=text)
    assert told["count"] == len(told["tokens"]) and told["max_model_len"] == 2048
    whole = openai.completions.create(model=MODEL, prompt=text, max_tokens=1)
    assert whole.usage and whole.usage.prompt_tokens == told["count"]
    assert ask(house, "/detokenize", tokens=told["tokens"])[1] == {"prompt": text}
    messages: Any = [{"role": "user", "content": text}]
    _, chat = ask(house, "/tokenize", messages=messages)
    answer = openai.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert answer.usage and answer.usage.prompt_tokens == chat["count"]


# --- tools -----------------------------------------------------------------------------------------------------------


ASKED: Any = {"model": MODEL, "messages": TALK, "temperature": 0, "max_tokens": 60, "tools": [WEATHER, TIME]}


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_calls_come_through_whole(openai: OpenAI, choice: Any) -> None:
    """By the server's own template and parser."""
    whole = openai.chat.completions.create(**ASKED, tool_choice=choice)
    (answer,) = whole.choices
    assert answer.finish_reason == "tool_calls" and answer.message.tool_calls and not answer.message.content
    (call,) = answer.message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Bern"}
    assert call.id and whole.usage and whole.usage.completion_tokens > 5


def test_calls_come_through_streamed(openai: OpenAI) -> None:
    """The stream says the same, id, name and kind once."""
    arguments, ids, names, finish = "", list[str](), list[str](), ""
    for chunk in openai.chat.completions.create(**ASKED, stream=True):
        for part in chunk.choices[0].delta.tool_calls or ():
            assert part.index == 0
            ids += [part.id] if part.id else []
            if part.function is not None:
                names += [part.function.name] if part.function.name else []
                arguments += part.function.arguments or ""
        finish = chunk.choices[0].finish_reason or finish
    assert (len(ids), names, finish) == (1, ["get_weather"], "tool_calls")
    assert json.loads(arguments) == {"city": "Bern"}
