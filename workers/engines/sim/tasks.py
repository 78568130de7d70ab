"""Tasks of the simulated engine: vectors, scores and token ids, all as a function of the inputs alone."""

from __future__ import annotations

import json
import math
import re
import zlib
from array import array

from penstock.engine import CHARACTERS_PER_TOKEN, Input, Request, Task
from workers.engines.sim.text import INNER, count_tokens, prompt_text
from workers.engines.task_answers import joined_vectors, told_tokens

SIZE = 64
"""Numbers of a vector, unless a request asks for others."""
MAX_SIZE = 4096
WORD = re.compile(r"\w+")


def input_text(each: Input) -> str:
    """An input as text; that of token ids is their numbers."""
    return each if isinstance(each, str) else prompt_text(each)


def input_tokens(each: Input) -> int:
    return count_tokens(each) if isinstance(each, str) else len(each)


def task_answer(request: Request, task: Task, context: int) -> str:
    """The text of the piece that answers a task. `context`: of the model, in tokens."""
    match task.kind:
        case "embed":
            return joined_vectors([vector(input_text(each), task.dimensions or SIZE) for each in request.inputs])
        case "rerank":
            query, *documents = [input_text(each) for each in request.inputs]
            return json.dumps([score(query, document) for document in documents])
        case "tokenize":
            return told_tokens(token_ids(prompt_text(request.prompt)), context)
        case "detokenize":
            ids = [each for each in request.prompt if isinstance(each, int)]
            return "".join([f"{INNER[number % len(INNER)]}{number}" for number in ids])


def vector(text: str, size: int) -> array[float]:
    """A vector of length 1: each word adds its own direction, so that texts with the same words are close."""
    total = [0.0] * size
    for word in WORD.findall(text.lower()) or [text]:
        for at in range(size):
            total[at] += zlib.crc32(f"{word}/{at}".encode()) / 2**31 - 1
    length = math.sqrt(sum(each * each for each in total)) or 1.0
    return array("f", [each / length for each in total])


def score(query: str, document: str) -> float:
    """The share of the query's words that the document has, and a little less the longer it is."""
    asked, found = set(WORD.findall(query.lower())), set(WORD.findall(document.lower()))
    return round(len(asked & found) / max(1, len(asked)) - len(document) / 1e6, 6)


def token_ids(text: str) -> list[int]:
    """As many as the engine counts: each of CHARACTERS_PER_TOKEN characters, the last one of the rest too."""
    count = count_tokens(text)
    starts = range(0, count * CHARACTERS_PER_TOKEN, CHARACTERS_PER_TOKEN)
    ends = [*starts[1:], len(text)]
    return [zlib.crc32(text[start:end].encode()) & 0x7FFFFFFF for start, end in zip(starts, ends, strict=True)]
