"""Task answers: renders what an engine computed for a task, in the form that OpenAI's API and other servers have."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from api.openai.answers import INTEGER, NUMBER, STRING, Schema, list_of, object_of, word_of
from penstock.loops import Sliced
from streaming.jobs.codec import Delta, Terminal
from streaming.jobs.job import Inputs, Job


def task_answer_schemas() -> dict[str, Schema]:
    usage = object_of(prompt_tokens=INTEGER, total_tokens=INTEGER)
    vector: Schema = {"anyOf": [list_of(NUMBER), STRING | {"description": "With encoding_format base64."}]}
    ranked = object_of(index=INTEGER | {"description": "Of the document in the request."}, relevance_score=NUMBER)
    ranked["properties"]["document"] = object_of(text=STRING) | {"description": "With return_documents."}
    return {
        "EmbeddingList": object_of(
            object=word_of("list"),
            data=list_of(object_of(object=word_of("embedding"), index=INTEGER, embedding=vector)),
            model=STRING,
            usage=usage,
        ),
        "Ranking": object_of(
            id=STRING,
            object=word_of("list"),
            model=STRING,
            results=list_of(ranked) | {"description": "The best first."},
            usage=usage,
        ),
        "TokenIds": object_of(
            count=INTEGER, tokens=list_of(INTEGER), max_model_len=INTEGER | {"description": "The model's context."}
        ),
        "TokenText": object_of(prompt=STRING),
    }


NUMBERS_PER_SLICE = 8192
"""Numbers rendered in one slice: some milliseconds."""
FLOAT32_DIGITS = 9
"""Decimal digits that tell any float32 from its neighbours."""

_TOKENS = msgspec.json.Decoder(dict[str, Any])
_SCORES = msgspec.json.Decoder(list[float])


def task_answer_in_slices(job: Job, terminal: Terminal, rows: Sequence[Delta]) -> Sliced[dict[str, Any]]:
    """Render the answer to a completed job with a task."""
    assert job.task is not None
    texts = [""] * job.choices
    for row in rows:
        texts[row.index] += row.text
    match job.task.kind:
        case "embed":
            return (yield from _embeddings(job, terminal, texts))
        case "rerank":
            return _ranking(job, terminal, texts)
        case "tokenize":
            found = _TOKENS.decode(texts[0])
            return {"count": len(found["tokens"]), **found}
        case "detokenize":
            return {"prompt": texts[0]}


def count_of(answer: str) -> int:
    """The number of token ids in the answer to a `tokenize`, without parsing them."""
    ids = answer[answer.index("[") + 1 : answer.index("]")]
    return ids.count(",") + 1 if ids.strip() else 0


def _usage(terminal: Terminal) -> dict[str, int]:
    return {"prompt_tokens": terminal.usage.prompt, "total_tokens": terminal.usage.prompt}


def _embeddings(job: Job, terminal: Terminal, texts: Sequence[str]) -> Sliced[dict[str, Any]]:
    data: list[dict[str, Any]] = []
    rendered = 0
    for encoded in [each for text in texts for each in text.split(",")]:
        vector: Any = encoded
        if not job.task_form.base64:
            numbers = _numbers(encoded)
            vector, rendered = msgspec.Raw(_as_json(numbers)), rendered + len(numbers)
            if rendered > NUMBERS_PER_SLICE:
                rendered = 0
                yield
        data.append({"object": "embedding", "index": len(data), "embedding": vector})
    return {"object": "list", "data": data, "model": job.model, "usage": _usage(terminal)}


def _numbers(encoded: str) -> array[float]:
    numbers = array("f", base64.b64decode(encoded))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _as_json(numbers: array[float]) -> bytes:
    """A JSON list with the shortest digits that give the same float32 again, or one more."""
    return msgspec.json.encode([float(f"{number:.{FLOAT32_DIGITS}g}") for number in numbers])


def _ranking(job: Job, terminal: Terminal, texts: Sequence[str]) -> dict[str, Any]:
    assert isinstance(job.prompt, Inputs)
    scores = [score for text in texts for score in _SCORES.decode(text)]
    documents = [each for group in job.prompt.groups for each in group[1:]]
    best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    results = []
    for index in best[: job.task_form.top_n]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        results.append(result | ({"document": {"text": documents[index]}} if job.task_form.documents else {}))
    return {
        "id": f"rerank-{terminal.job}",
        "object": "list",
        "model": job.model,
        "results": results,
        "usage": _usage(terminal),
    }
