"""Tasks: validates embeddings, rankings and the tokenizer's calls, turns each into the input of a job, and renders its
answer in the form that OpenAI's API and other servers have.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from pydantic import Field, Tag

from api.openai.errors import refuse_if
from api.openai.fields import MAX_INPUTS, MAX_MESSAGES, PromptText, StrictBody, by_shape, inputs_of, shape
from api.openai.fields import Prompt as PromptField
from api.openai.generation import OfJob, QueuedRequest
from api.openai.messages import ChatMessage
from penstock.engine import Input, ModelCard, Sampling, Task
from penstock.loops import Sliced
from streaming.jobs.codec import Delta, Terminal
from streaming.jobs.job import Chat, Inputs, Job, Prompt, TaskForm, Text, Tokens

GROUP_INPUTS = 64
"""Inputs that an engine computes at once; another worker computes only the groups that have no answer."""
MAX_DIMENSIONS = 65_536


def groups_of(inputs: list[Input], first: tuple[Input, ...] = ()) -> Inputs:
    """Inputs in groups, each of which begins with `first`."""
    starts = range(0, len(inputs), GROUP_INPUTS)
    return Inputs(tuple([first + tuple(inputs[start : start + GROUP_INPUTS]) for start in starts]))


class TaskRequest(QueuedRequest):
    """A request for something else than generated texts."""

    @property
    def sampling(self) -> Sampling:
        return Sampling(max_tokens=1, temperature=0)  # it has no tokens; equal requests have equal answers


class EmbeddingRequest(TaskRequest):
    """The body of POST /v1/embeddings."""

    input: PromptField
    """One text or several, or their token ids; at most 2,048."""
    encoding_format: Literal["float", "base64"] | None = None
    """`base64`: of little-endian float32. Null: `float`."""
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    """Numbers of each vector. Refused if the model makes vectors of one length."""

    @property
    def prompt_asked(self) -> Prompt:
        return groups_of(inputs_of(self.input))

    def particulars(self, card: ModelCard | None) -> dict[str, Any]:
        form = TaskForm(base64=self.encoding_format == "base64")
        return {"task": Task(kind="embed", dimensions=self.dimensions), "task_form": form}


class TextDocument(StrictBody):
    """A document to rank, as an object."""

    text: PromptText
    """Its text."""


Document: TypeAlias = Annotated[
    Annotated[PromptText, Tag("<str>")] | Annotated[TextDocument, Tag("<dict>")],
    by_shape(shape, "a string or an object with text"),
]


class RerankRequest(TaskRequest):
    """The body of POST /v1/rerank."""

    query: PromptText
    """What is asked."""
    documents: Annotated[list[Document], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    """Texts, or objects with `text`; at most 2,048."""
    top_n: Annotated[int, Field(ge=0, le=1_048_576)] | None = None
    """Only the best so many. Null or 0: all."""
    return_documents: bool | None = False
    """Repeat the text of each document."""

    @property
    def prompt_asked(self) -> Prompt:
        texts = [each if isinstance(each, str) else each.text for each in self.documents]
        return groups_of([*texts], (self.query,))

    def particulars(self, card: ModelCard | None) -> dict[str, Any]:
        form = TaskForm(top_n=self.top_n or None, documents=bool(self.return_documents))
        return {"task": Task(kind="rerank"), "task_form": form}


class EmbeddingJobRequest(OfJob, EmbeddingRequest):
    """The body of POST /v1/jobs for embeddings."""

    endpoint: Literal["/v1/embeddings"]
    """What the other fields describe."""


class RerankJobRequest(OfJob, RerankRequest):
    """The body of POST /v1/jobs for a ranking."""

    endpoint: Literal["/v1/rerank"]
    """What the other fields describe."""


class TokenizeRequest(TaskRequest):
    """The body of POST /tokenize: a text, or a conversation."""

    prompt: str | None = None
    """A text. Or give `messages`."""
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    """A conversation, which the model's template renders. Or give `prompt`."""
    add_special_tokens: bool | None = None
    """Count what the tokenizer adds to a text, such as its first token. Null: true."""
    add_generation_prompt: bool | None = True
    """Count the begin of the answer's turn at the end of a conversation."""
    return_token_strs: bool | None = None
    """Refused if true: use `/detokenize` for the text of each token."""

    def check(self) -> None:
        what = "is not supported here: use /detokenize for the text of each token"
        refuse_if(self.return_token_strs, "return_token_strs", what)
        both = self.messages is not None and self.prompt is not None
        refuse_if(both, "messages", "must not be given together with prompt")

    @property
    def prompt_asked(self) -> Prompt:
        """Raises ApiError (400)."""
        if self.messages is not None:
            return Chat(tuple([message.turn for message in self.messages]))
        refuse_if(self.prompt is None, "prompt", "is required, or messages")
        return Text((self.prompt or "",))

    def particulars(self, card: ModelCard | None) -> dict[str, Any]:
        special, begun = self.add_special_tokens is not False, self.add_generation_prompt is not False
        return {"task": Task(kind="tokenize", special_tokens=special, generation_prompt=begun)}


class DetokenizeRequest(TaskRequest):
    """The body of POST /detokenize."""

    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
    """Token ids of the model."""

    @property
    def prompt_asked(self) -> Prompt:
        return Tokens((tuple(self.tokens),))

    def particulars(self, card: ModelCard | None) -> dict[str, Any]:
        return {"task": Task(kind="detokenize")}


# --- answers ----------------------------------------------------------------------------------------------------------


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
