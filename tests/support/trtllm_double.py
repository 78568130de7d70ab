"""TensorRT-LLM's double, which takes the names of one version alone (trtllm_package), and an engine on it.

Its requests move only when a test steps the engine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

from flow import until
from trtllm_package import signature

from penstock.engine import NEUTRAL_PRIORITY, EngineDead, Failure, Piece, Refused, Request, Sampling
from workers.engines.trtllm.engine import TrtllmEngine

END, TURN = 256, 257
DEADLINE_S = 10.0


class ToyTokenizer:
    """One token per byte, an end token, a turn token; as many methods and keywords as the facts list."""

    eos_token_id = END
    chat_template = "{{ messages }}"

    def __len__(self) -> int:
        return 258

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return ([TURN] if add_special_tokens else []) + list(text.encode())

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: Any
    ) -> str:
        special = {} if skip_special_tokens else {END: b"<end>", TURN: b"<turn>"}
        parts = [bytes([token]) if token < 256 else special.get(token, b"") for token in token_ids]
        return b"".join(parts).decode(errors="replace")

    def apply_chat_template(
        self, conversation: Any, tools: Any = None, *, tokenize: bool, add_generation_prompt: bool, **kwargs: Any
    ) -> str:
        assert not tokenize
        if conversation[0]["role"] == "refuse":
            raise ValueError("unknown role")
        return "".join(f"{turn['role']}:{turn['content']}\n" for turn in conversation)


class Output:
    """RequestOutput: an async iterator that yields itself, changed by each response."""

    def __init__(self, llm: Any, prompt: list[int], tokens: list[int], max_tokens: int) -> None:
        self._llm, self._queue, self._tokens = llm, asyncio.Queue[Any](), tokens
        self._left, self._done, self.aborts = max_tokens, False, 0
        self.prompt, self.prompt_token_ids, self.cached_tokens = None, prompt, 3
        self.error, self.finished, self.decoding_iter = None, False, 0
        self.outputs = [SimpleNamespace(index=0, text="", token_ids=[], logprobs=[], finish_reason=None)]

    def abort(self) -> None:
        self.aborts += 1

    def respond(self, change: Callable[[], None] | Exception | None) -> None:
        """From the test's thread: the response wakes the request on the loop of its call."""
        self._llm.notify(partial(self._queue.put_nowait, change))

    def advance(self, count: int) -> None:
        """One engine step: up to `count` tokens, or the final response to an abort."""
        out = self.outputs[0]
        if self.aborts:
            return self._last("cancelled", [])
        new, self._tokens = self._tokens[: min(count, self._left)], self._tokens[min(count, self._left) :]
        self._left -= len(new)
        if new and new[-1] == END:
            return self._last("stop", new)
        if not self._left:
            return self._last("length", new)
        return self.respond(lambda: out.token_ids.extend(new))

    def _last(self, reason: str, new: list[int]) -> None:
        self._llm.live.remove(self)

        def change() -> None:
            self.outputs[0].token_ids.extend(new)
            self.outputs[0].finish_reason, self._done = reason, True

        self.respond(change)

    def __aiter__(self) -> Output:
        return self

    async def __anext__(self) -> Output:
        if self._done:
            raise StopAsyncIteration
        change = await self._queue.get()
        if isinstance(change, Exception):
            self._done = True
            raise change
        if change is None:
            raise StopAsyncIteration
        change()
        return self


class DoubleLLM:
    """LLM: says `reply` whatever it is asked, going on where the given ids already end with a part of it."""

    instances: list[DoubleLLM] = []  # noqa: RUF012 - cleared by the fixture
    loop: asyncio.AbstractEventLoop | None = None
    """Of the last call of generate_async."""
    load_error: Exception | None = None
    version = ""

    def __init__(self, **given: Any) -> None:
        unknown = set(given) - set(signature(self.version, "TorchLlmArgs"))
        if unknown:
            raise ValueError(f"unexpected arguments {unknown}")
        if self.load_error:
            raise self.load_error
        self.given, self.calls, self.live = given, [], []
        self.reply, self.at_call, self.healthy = "Hello, world.", None, True
        self.hang, self.shutdowns, self.statistics = threading.Event(), 0, []
        self.tokens_held = 100_000
        self._notices: list[Callable[[], None]] | None = None
        DoubleLLM.instances.append(self)

    @property
    def tokenizer(self) -> ToyTokenizer:
        return ToyTokenizer()

    def generate_async(self, **given: Any) -> Output:
        assert set(given) <= set(signature(self.version, "LLM.generate_async"))
        DoubleLLM.loop = asyncio.get_running_loop()
        if self.at_call:
            raise self.at_call
        said = [*self.reply.encode(), END]
        ids = given["inputs"]
        if len(ids) + given["sampling_params"].given["max_tokens"] > self.given["max_seq_len"]:
            raise RequestError("the prompt and max_tokens exceed max_seq_len")
        known = max(count for count in range(len(said)) if not count or ids[-count:] == said[:count])
        output = Output(self, ids, said[known:], given["sampling_params"].given["max_tokens"])
        self.calls.append(given)
        self.live.append(output)
        return output

    def step(self, count: int = 1) -> None:
        with self.together():
            for output in list(self.live):
                output.advance(count)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wakes all requests of one step in one callback, as the engine's thread does."""
        self._notices = notices = []
        yield
        self._notices = None
        self.notify(lambda: [notice() for notice in notices])

    def notify(self, notice: Callable[[], Any]) -> None:
        if self._notices is not None:
            self._notices.append(notice)
        elif DoubleLLM.loop is not None and not DoubleLLM.loop.is_closed():
            DoubleLLM.loop.call_soon_threadsafe(notice)

    def fail(self, *errors: Exception) -> None:
        with self.together():
            for output, error in zip(list(self.live), errors, strict=False):
                output.respond(error)

    def get_stats(self, timeout: float = 2) -> list[dict[str, Any]]:
        assert timeout < 1
        batch, self.statistics = self.statistics, []
        if batch == ["broken"]:
            raise NotImplementedError("no statistics on this backend")
        return batch

    def get_kv_cache_capacity(self) -> dict[str, int]:
        return {"maxNumTokens": self.tokens_held}

    def _check_health(self) -> bool:
        return self.healthy

    def shutdown(self) -> None:
        self.shutdowns += 1
        self.hang.wait()


class RequestError(RuntimeError):
    pass


class EngineDeadError(RuntimeError):
    pass


class Rig:
    """A started engine, its double and every piece it told."""

    def __init__(self, engine: TrtllmEngine) -> None:
        self.engine, self.steps, self.phases = engine, [], []
        self.card: Any = None

    @property
    def llm(self) -> DoubleLLM:
        return DoubleLLM.instances[-1]

    def pieces(self, request_id: str) -> list[Piece]:
        return [piece for step in self.steps for piece in step if piece.id == request_id]

    def failure(self, request_id: str) -> Failure:
        """Of its last piece."""
        found = self.pieces(request_id)[-1].failure
        assert found is not None
        return found

    def text(self, request_id: str) -> str:
        return "".join(piece.text for piece in self.pieces(request_id))

    async def submit(self, request: Request) -> None:
        """Submit, and wait until the engine has the request, or it has got its answer."""
        calls = len(self.llm.calls)
        self.engine.submit(request)
        with suppress(Refused, EngineDead):
            await self.engine.check(ask("behind it"))
        await until(lambda: len(self.llm.calls) > calls or bool(self.pieces(request.id)) or not self.engine.health().ok)
        await settle()

    async def turn(self, count: int = 1) -> None:
        """One engine step, and what follows from it on the loop."""
        self.llm.step(count)
        await settle()

    async def begin(self, *args: Any, **more: Any) -> None:
        """A request, and the first engine step with it."""
        await self.submit(ask(*args, **more))
        await self.turn()

    async def finish(self, *request_ids: str, count: int = 1) -> None:
        """Step until these requests have had their last piece."""
        for _ in range(500):
            if all(any(piece.last for piece in self.pieces(one)) for one in request_ids):
                return
            await self.turn(count)
        raise AssertionError(f"{request_ids} did not end: {self.steps}")


async def settle() -> None:
    """Let everything that is ready run, on the engine's loop and on this one."""
    for _ in range(6):
        loop = DoubleLLM.loop
        if loop is not None and not loop.is_closed():
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop))
        await asyncio.sleep(0)


def ask(
    name: str = "r", prompt: Any = "Hi ", past: Any = (), priority: float = NEUTRAL_PRIORITY, **sampling: Any
) -> Request:
    return Request(name, prompt, Sampling(**sampling), past, priority=priority)


def params(rig: Rig, call: int = -1) -> dict[str, Any]:
    return rig.llm.calls[call]["sampling_params"].given
