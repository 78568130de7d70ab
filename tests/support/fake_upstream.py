"""Fake upstream server: reproduces published shapes and faults of OpenAI-compatible servers.

Its model is a list: the answer to every prompt is ANSWER, from its first token on or from where the prompt, by ids, by
text or by an assistant's message, has got to.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.parser import BytesParser
from email.policy import HTTP
from typing import Any

from bench.ports import free_port

ANSWER = [f" w{number}" for number in range(80)]
FIRST_ID = 1000
"""Id of the answer's first token; ids below are those of prompts."""
MODEL = "fake-model"
N_CTX = {"n_ctx": 2048}
STREAM = "Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
OWNERS = {
    "vllm": "vllm",
    "sglang": "sglang",
    "llama-server": "llamacpp",
    "trtllm": "tensorrt_llm",
    "ollama": "library",
    "openai": "openai",
    "penstock": "penstock",
    "other": "someone",
}
STRICT = ("trtllm", "openai")
"""Servers that refuse fields that they do not know."""
KNOWN_FIELDS = {
    "model", "stream", "prompt", "messages", "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty",
    "max_tokens", "max_completion_tokens", "stream_options", "logprobs", "top_logprobs", "response_format",
    "tools", "tool_choice", "parallel_tool_calls",
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one request. Without anything else, the reply is whole."""

    status: int = 0
    """An error reply instead."""
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    reset: bool = False
    """The connection is reset before the head."""
    silent_s: float = 0.0
    """Nothing for so long, before the head."""
    slow_s: float = 0.0
    """The first token takes so long."""
    after: int = 0
    """Tokens in front of what follows."""
    cut: bool = False
    """Then the body is truncated."""
    end: bool = False
    """Then the body ends well, without a finish reason."""
    done: bool = False
    """Then [DONE], without a finish reason."""
    stall_s: float = 0.0
    data: bytes = b""
    """Then these bytes, and the body ends."""
    finish: str = ""
    """Then this finish reason."""
    no_done: bool = False
    """A whole reply, without [DONE]."""
    only_continued: bool = False
    """For requests that continue an answer; others pass it by."""


@dataclass
class Sent:
    """One request to the fake."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    at: float = field(default_factory=time.monotonic)

    @property
    def continues(self) -> bool:
        return start_of(self.body) > 0


def start_of(body: dict[str, Any]) -> int:
    """Tokens of the answer that a request already has."""
    prompt: Any = body.get("prompt", "")
    if messages := body.get("messages"):
        prompt = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
    if isinstance(prompt, list):
        ids = [part for part in prompt if isinstance(part, int) and part >= FIRST_ID]
        texts = "".join(part for part in prompt if isinstance(part, str))
        return len(ids) + start_of({"prompt": texts})
    for count in range(len(ANSWER), 0, -1):
        if str(prompt).endswith("".join(ANSWER[:count])):
            return count
    return 0


def form_of(headers: dict[str, str], body: bytes) -> dict[str, Any]:
    """The fields of a form; of a file its name, its media type and its bytes."""
    found: dict[str, Any] = {}
    head = f"Content-Type: {headers['content-type']}\r\n\r\n".encode()
    message = BytesParser(policy=HTTP).parsebytes(head + body)
    for part in message.iter_parts():
        name, data = part.get_param("name", header="content-disposition"), part.get_payload(decode=True)
        file = part.get_filename()
        found[str(name)] = data.decode() if file is None else (file, part.get_content_type(), data)  # type: ignore[union-attr]
    return found


class FakeUpstream:
    """One server of a kind. `faults`: of the first requests for texts, in order."""

    def __init__(self, kind: str, faults: Iterable[Fault] = (), *, key: str = "", step_s: float = 0.0) -> None:
        self.kind, self.faults, self.key, self.step_s = kind, deque(faults), key, step_s
        self.sent: list[Sent] = []
        self.aborted: list[str] = []
        self.running = self.most_running = 0
        self.waiting = 0
        self.slots = 4
        """What a llama-server says of its slots."""
        self.headers: dict[str, str] = {}
        """Of every reply."""
        self.batch = 1
        """Tokens of one chunk."""
        self.open = asyncio.Event()
        """No reply goes beyond its first chunk until it is set."""
        self.open.set()
        self.late = -1
        """The token whose text comes with the next one, like the first bytes of a character; its id comes at once."""
        self.burst = False
        """Write each reply in one piece."""
        self.deltas: list[dict[str, Any]] = []
        """What a chat with tools streams instead of the answer, one chunk each."""
        self.adapters: tuple[str, ...] = ()
        """Names of adapters that it lists before its model."""
        self.template = "x"
        """Chat template of a llama-server."""
        self.hidden = 0
        """Tokens of reasoning in front of the answer of a chat."""
        self.vector: list[float] = []
        """What it makes of each text; empty: it makes no vectors and no rankings."""
        self.made: Any = {"text": "hello"}
        """A transcript, or images."""
        self.port = free_port()
        """No other process takes it while nobody listens there: an engine asks again where a server was."""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def stop(self) -> None:
        """Break every connection, and listen no more."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.strip().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = first.split(" ")
                form = headers.get("content-type", "").startswith("multipart/form-data")
                read: Any = form_of(headers, body) if form else json.loads(body) if body else {}
                if not await self._answer(writer, method, path, headers, read):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            with contextlib.suppress(ConnectionError):
                writer.close()

    async def _answer(
        self, writer: asyncio.StreamWriter, method: str, path: str, headers: dict[str, str], body: dict[str, Any]
    ) -> bool:
        """Returns whether the connection goes on."""
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            return await self._json(writer, {"error": {"message": "no such key", "type": "auth"}}, 401)
        if path.endswith("completions"):
            self.sent.append(Sent(path, body, headers))
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            try:
                return await self._complete(writer, path, body)
            finally:
                self.running -= 1
        if path in ("/v1/embeddings", "/v1/rerank") and self.vector:
            return await self._perform(writer, Sent(path, body, headers))
        if path.startswith(("/v1/audio/", "/v1/images/")):
            self.sent.append(Sent(path, body, headers))
            await self.open.wait()
            fault = self.faults.popleft() if self.faults else Fault()
            if fault.reset:
                writer.transport.abort()
                return False
            return await self._json(writer, self.made, fault.status or 200)
        page = self._page(path, body)
        return await self._json(writer, {"error": "not found"} if page is None else page, 404 if page is None else 200)

    async def _perform(self, writer: asyncio.StreamWriter, sent: Sent) -> bool:
        """Answer a task; a probe's meets no fault."""
        body, texts = sent.body, sent.body.get("input", sent.body.get("documents"))
        fault = Fault()
        if texts not in ("a", ["b"]):
            self.sent.append(sent)
            fault = self.faults.popleft() if self.faults else fault
        await self.open.wait()
        if fault.cut or fault.reset:
            writer.transport.abort()
            return False
        if fault.status or fault.data:
            page: Any = (fault.data or fault.body or json.dumps({"error": {"message": "as told"}}).encode()).decode()
            return await self._json(writer, page, fault.status or 200)
        encoded = base64.b64encode(array("f", self.vector).tobytes()).decode()
        vector: Any = encoded if body.get("encoding_format") == "base64" else self.vector
        count = 1 if isinstance(texts, str) else len(texts)
        if sent.path.endswith("rerank"):
            results = [{"index": each, "relevance_score": each / 8} for each in reversed(range(count))]
            return await self._json(writer, {"results": results, "usage": {"total_tokens": 7 * count}})
        data = [{"object": "embedding", "index": each, "embedding": vector} for each in range(count)]
        return await self._json(writer, {"data": data, "usage": {"prompt_tokens": 5 * count, "total_tokens": 0}})

    def _page(self, path: str, body: dict[str, Any]) -> Any:
        kind, llama, vllm = self.kind, self.kind == "llama-server", self.kind == "vllm"
        if path == "/v1/models":
            entry = {"id": MODEL, "object": "model", "owned_by": OWNERS[kind]}
            more = [entry | {"id": name, "parent": MODEL, "root": "/adapters"} for name in self.adapters]
            return {"data": [*more, entry | ({"max_model_len": 2048} if kind in ("vllm", "sglang") else {})]}
        if path == "/abort_request":
            self.aborted.append(body["rid"])
            return {}
        if path == "/metrics" and vllm:
            return f'vllm:num_requests_waiting{{engine="0"}} {self.waiting}\nvllm:kv_cache_usage_perc{{e="0"}} 0.1\n'
        pages = {
            "/health": (llama, {"status": "ok"}),
            "/props": (llama, {"total_slots": self.slots, "chat_template": self.template,
                               "default_generation_settings": N_CTX}),
            "/apply-template": (llama, {"prompt": "<user>hi<assistant>"}),
            "/tokenize": (vllm or kind == "sglang", {"tokens": [1, 2, 3]}),
            "/detokenize": (vllm or kind == "sglang", {
                "prompt" if vllm else "text": "".join(ANSWER[each - FIRST_ID] for each in body.get("tokens", ()))}),
            "/v1/loads": (kind == "sglang", {"loads": [{"max_running_requests": 8}]}),
        }  # fmt: skip
        there, page = pages.get(path, (False, None))
        return page if there else None

    async def _json(self, writer: asyncio.StreamWriter, page: Any, status: int = 200) -> bool:
        data = page.encode() if isinstance(page, str) else json.dumps(page).encode()
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        return True

    async def _complete(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> bool:
        fault = self._fault(body)
        if refusal := self._refusal(path, body):
            return await self._json(writer, refusal, 400)
        if fault.reset:
            writer.transport.abort()
            return False
        await asyncio.sleep(fault.silent_s)
        headers = "".join(f"{name}: {value}\r\n" for name, value in (*self.headers.items(), *fault.headers))
        if fault.status:
            data = fault.body or json.dumps({"error": {"message": "as told", "code": fault.status}}).encode()
            writer.write(f"HTTP/1.1 {fault.status} X\r\n{headers}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            await writer.drain()
            return True
        writer.write(f"HTTP/1.1 200 OK\r\n{headers}{STREAM}".encode())
        events = self._events(path, body, fault)
        if self.burst:
            whole = b"".join([data async for data in events])
            writer.write(b"%x\r\n%s\r\n" % (len(whole), whole))
        else:
            async for data in events:
                writer.write(b"%x\r\n%s\r\n" % (len(data), data))
                await writer.drain()
        if fault.cut:
            writer.transport.abort()
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    def _fault(self, body: dict[str, Any]) -> Fault:
        if not self.faults or (self.faults[0].only_continued and not start_of(body)):
            return Fault()
        return self.faults.popleft()

    def _refusal(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        unknown = set(body) - KNOWN_FIELDS if self.kind in STRICT else set()
        if unknown:
            return {"object": "error", "message": f"extra fields {sorted(unknown)}", "code": 400}
        if self.kind == "sglang" and "messages" in body and body.get("return_token_ids"):
            return {"object": "error", "message": "return_token_ids is not supported in streamed chats", "code": 400}
        if body.get("continue_final_message") and body.get("add_generation_prompt", True):
            return {"error": {"message": "both cannot be true", "code": 400}}
        if self.kind == "openai" and path.endswith("/v1/completions"):
            return {"error": {"message": "no such endpoint", "code": 404}}
        return None

    async def _events(self, path: str, body: dict[str, Any], fault: Fault) -> AsyncIterator[bytes]:
        start, limit = start_of(body), body.get("max_tokens") or body.get("max_completion_tokens") or 10**6
        end = min(len(ANSWER), start + limit)
        shape = _Shape(self.kind, "messages" in body, body, start, self.late)
        yield shape.first()
        await asyncio.sleep(fault.slow_s)
        await self.open.wait()
        for number in range(self.hidden if "messages" in body and not start else 0):
            yield shape.reasoning(f" r{number}")
        if body.get("tools") and self.deltas:
            async for data in self._called(shape, fault):
                yield data
            return
        breaks = fault.cut or fault.end or fault.done or fault.stall_s or fault.data or fault.finish
        stop = min(end, start + fault.after) if breaks else end
        for number in range(start, stop, self.batch):
            await asyncio.sleep(self.step_s)
            yield shape.tokens(number, min(number + self.batch, stop))
        if fault.stall_s:
            yield b": ping\n\n"
            await asyncio.sleep(fault.stall_s)
        if fault.data:
            yield fault.data
        elif fault.done:
            yield b"data: [DONE]\n\n"
        if breaks and not fault.finish:
            return
        for data in shape.last(fault.finish or ("length" if end - start == limit else "stop"), stop):
            yield data
        if not fault.no_done:
            yield b"data: [DONE]\n\n"

    async def _called(self, shape: _Shape, fault: Fault) -> AsyncIterator[bytes]:
        """The chunks of an answer with calls."""
        for delta in self.deltas[: fault.after if fault.cut else None]:
            await asyncio.sleep(self.step_s)
            yield shape.delta(delta)
        if fault.cut:
            return
        for data in shape.last("tool_calls", 0):
            yield data
        yield b"data: [DONE]\n\n"


class _Shape:
    """The chunks of one reply."""

    def __init__(self, kind: str, chat: bool, body: dict[str, Any], start: int, late: int) -> None:
        self._kind, self._chat, self._start, self._late = kind, chat, start, late
        self._ids = bool(body.get("return_token_ids")) or kind == "llama-server"
        options = body.get("stream_options") or {}
        self._usage, self._running = options.get("include_usage"), options.get("continuous_usage_stats")
        self._out = 0
        prompt = body.get("prompt")
        self._prompt_tokens = 3 + start if not isinstance(prompt, list) or kind != "vllm" else len(prompt)

    def first(self) -> bytes:
        if self._kind == "llama-server":
            total = 3 + self._start
            return self._chunk({"text": "", "finish_reason": None}, prompt_progress={"total": total, "cache": 0})
        if not self._chat:
            return b": hello\n\n"
        choice: dict[str, Any] = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return self._chunk(choice, **({"prompt_token_ids": [1, 2, 3]} if self._ids else {}))

    def reasoning(self, text: str) -> bytes:
        self._out += 1
        name = "reasoning" if self._kind == "vllm" else "reasoning_content"
        choice: dict[str, Any] = {"index": 0, "delta": {name: text}, "finish_reason": None}
        return self._chunk(choice | ({"token_ids": [7]} if self._ids else {}))

    def delta(self, delta: dict[str, Any]) -> bytes:
        self._out += 1
        return self._chunk({"index": 0, "delta": delta, "finish_reason": None})

    def tokens(self, first: int, end: int) -> bytes:
        self._out += end - first
        ids = [FIRST_ID + number for number in range(first, end)]
        shown = [self._late] if first == self._late + 1 and self._late >= self._start else []
        shown += [number for number in range(first, end) if number != self._late]
        text = "".join(ANSWER[number] for number in shown)
        choice: dict[str, Any] = {"index": 0, "finish_reason": None, "logprobs": None}
        choice |= {"delta": {"content": text, "reasoning_content": None}} if self._chat else {"text": text}
        if self._kind == "llama-server":
            return self._chunk(choice, __verbose={"tokens": ids, "tokens_predicted": self._out})
        return self._chunk(choice | ({"token_ids": ids} if self._ids else {}))

    def last(self, finish: str, stop: int) -> Iterable[bytes]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        choice |= {"delta": {}} if self._chat else {"text": ""}
        yield self._chunk(choice)
        if self._usage or self._kind == "llama-server":
            yield b"data: " + json.dumps({"choices": [], "usage": self._counts()}).encode() + b"\n\n"

    def _counts(self) -> dict[str, Any]:
        cached = {"cached_tokens": 2}
        return {
            "prompt_tokens": self._prompt_tokens, "completion_tokens": self._out, "prompt_tokens_details": cached,
        }  # fmt: skip

    def _chunk(self, choice: dict[str, Any], **more: Any) -> bytes:
        chunk: dict[str, Any] = {"id": "x", "object": "chunk", "choices": [choice], **more}
        if self._running:
            chunk["usage"] = self._counts()
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"


@asynccontextmanager
async def serving(*fakes: FakeUpstream) -> AsyncIterator[None]:
    """The fakes listen inside the block."""
    for fake in fakes:
        await fake.start()
    try:
        yield
    finally:
        for fake in fakes:
            await fake.stop()
