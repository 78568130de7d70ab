"""`python -m bench.gateway.peers.dynamo_worker MODEL_FOLDER SETTINGS`: Dynamo's worker around the simulated engine.

It speaks in token ids, as its frontend expects, so it makes a tokenizer that has one token for each word the simulated
engine can say at each place.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.runtime import Context, DistributedRuntime
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from bench.gateway.engine import MODEL, Tap, settings_from
from penstock.engine import Piece
from workers.engines.sim.answers import WORDS

PLACES = 1024
"""Longer answers it cannot give."""
SPECIAL = ("<unk>", "<s>", "</s>")
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def vocabulary() -> dict[str, int]:
    """Every word at every place."""
    words = [*SPECIAL, *(f"{word}{place}" for place in range(PLACES) for word in WORDS)]
    return {word: number for number, word in enumerate(words)}


def write_model(folder: Path, words: dict[str, int]) -> None:
    """The files a frontend reads of a model, weights aside."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(WordLevel(words, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    size = {"vocab_size": len(words), "max_position_embeddings": 8192, "hidden_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 64}
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "model_max_length": 8192}
    _write(folder / "config.json", kind | size | heads | ends)
    _write(folder / "generation_config.json", ends)
    _write(folder / "tokenizer_config.json", tokens | about)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


async def work(folder: Path, tap: Tap) -> None:
    """Until the process is ended."""
    words = vocabulary()
    write_model(folder, words)
    await tap.start()

    async def generate(request: dict[str, Any], context: Context) -> AsyncIterator[dict[str, Any]]:
        pieces: asyncio.Queue[Piece] = asyncio.Queue()
        prompt = " ".join(map(str, request["token_ids"]))
        name = tap.open(prompt, request["stop_conditions"]["max_tokens"], pieces.put_nowait)
        try:
            while True:
                piece = await pieces.get()
                row: dict[str, Any] = {"token_ids": [words[piece.text.strip()]], "index": 0}
                if piece.last:
                    yield row | {"finish_reason": piece.finish}
                    return
                yield row
        finally:
            tap.close(name)

    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint("bench.backend.generate")
    await register_model(
        ModelInput.Tokens, ModelType.Chat, endpoint, str(folder), MODEL, worker_type=WorkerType.Aggregated
    )
    await endpoint.serve_endpoint(generate)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work(Path(sys.argv[1]), Tap(settings_from(sys.argv[2]))))
