"""Servers for the tests of llama.cpp's server: Penstock with a real model, and with an API key and the simulated one.

Their size is that of the server that those tests mean to start: two texts at a time, 256 tokens each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.conformance.llama_front import serving_llama
from bench.conformance.suites import LlamaPorts
from bench.penstock import MODEL as SIM_MODEL
from bench.penstock import Penstock, key_rows
from workers.engines.llamacpp.weights import fetch

MODEL = "llama-test-model"
"""Under this name those tests expect it in a stream."""
KEY = "sk-this-is-the-secret-key"
REAL = {"llamacpp.slots": 2, "llamacpp.context": 256, "llamacpp.embeddings": "true"}


@contextmanager
def serving_for_llama(room: Path, keyed_room: Path, cache: Path) -> Iterator[LlamaPorts]:
    """Until the end of the context. `cache` is where the weights are kept. Raises Died, WeightsError."""
    fetch(cache, lambda _what, _done, _of: None)
    with (
        Penstock(room, engine="llamacpp", model=MODEL, settings=REAL, data_dir=cache) as real,
        Penstock(keyed_room, settings={"sim.step_ms": 2}, config=key_rows("suite", KEY)) as keyed,
        serving_llama(real.url, MODEL) as real_port,
        serving_llama(keyed.url, SIM_MODEL) as keyed_port,
        serving_llama(keyed.url, SIM_MODEL, KEY) as tools_port,
    ):
        yield LlamaPorts(real_port, keyed_port, tools_port)
