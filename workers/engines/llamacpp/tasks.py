"""Tasks of the embedded engine: token ids by llama.cpp's listener, vectors and scores by its library, in threads.

None of them takes one of the engine's slots: llama.cpp itself lets vectors and scores wait for one of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from penstock.engine import Failure, Piece, Refused, Request, Task
from workers.engines.llamacpp.prompt import Prompts, Tokenizer, TokenizerFailed, max_tokens_of, max_told_bytes
from workers.engines.llamacpp.request import engine_error, invalid
from workers.engines.task_answers import told_scores, told_tokens

TOO_LONG = ("is too large to process", "exceeds the available context")
"""Parts of llama.cpp's words for an input that does not fit."""

_log = logging.getLogger(__name__)


class LlamacppTasks:
    """The tasks that one engine runs."""

    def __init__(
        self,
        prompts: Prompts,
        tokenizer: Tokenizer,
        server: Any,
        *,
        context: int,
        slots: int,
        emit: Callable[[Piece], None],
    ) -> None:
        """
        Args:
            context: of the model, in tokens.
            emit: called with the one piece of each task.
        """
        self._prompts, self._tokenizer, self._server = prompts, tokenizer, server
        self._context, self._emit = context, emit
        self._threads = ThreadPoolExecutor(slots, thread_name_prefix="task")
        self._calls: set[Future[Any]] = set()
        self._running: dict[str, asyncio.Task[None]] = {}

    def begin(self, request: Request, task: Task) -> None:
        self._running[request.id] = asyncio.create_task(self._run(request, task))

    def cancel(self, request_id: str) -> None:
        """The request ends now; what llama.cpp still computes for it is dropped."""
        if running := self._running.get(request_id):
            running.cancel()

    def stop(self, timeout_s: float) -> None:
        """End all of them. Blocks until llama.cpp is out of its calls, at most so long."""
        wait(self._calls, timeout_s)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, request: Request, task: Task) -> None:
        try:
            last = await self._piece(request, task)
        except asyncio.CancelledError:
            last = Piece(request.id, finish="cancelled")
        except Refused as refused:
            last = Piece(request.id, failure=refused.failure)
        except TokenizerFailed as error:
            last = Piece(request.id, failure=engine_error(f"llama.cpp's tokenizer failed: {error}"))
        except Exception as error:  # noqa: BLE001 - boundary of one task: it must end, whatever the library raises
            _log.exception("a task failed in llama.cpp", extra={"request": request.id})
            last = Piece(request.id, failure=engine_error(f"llama.cpp failed: {type(error).__name__}"))
        del self._running[request.id]
        self._emit(last)

    async def _piece(self, request: Request, task: Task) -> Piece:
        """Raises Refused, TokenizerFailed."""
        match task.kind:
            case "tokenize":
                parts = self._prompts.of(request, begins=task.generation_prompt).parts if request.prompt else []
                self._check_size(request, parts)
                special = task.special_tokens or not isinstance(request.prompt, str)
                ids = await self._tokenizer.ids(parts, special=special) if parts else []
                return Piece(request.id, told_tokens(ids, self._context), finish="stop")
            case "detokenize":
                self._prompts.check_ids(request.ids, "tokens")
                text = await self._tokenizer.text(request.ids) if request.ids else ""
                return Piece(request.id, text, finish="stop")
            case "embed":
                body = {"input": [each if isinstance(each, str) else list(each) for each in request.inputs]}
                for each in request.inputs:
                    if not isinstance(each, str):
                        self._prompts.check_ids(each, "input")
                found = await self._call(self._server.handle_embeddings, body | {"encoding_format": "base64"}, "input")
                vectors = sorted(found["data"], key=lambda each: each["index"])
                text = ",".join([each["embedding"] for each in vectors])
            case "rerank":
                query, *documents = request.inputs
                found = await self._call(
                    self._server.handle_rerank, {"query": query, "documents": documents}, "documents"
                )
                scores = {each["index"]: each["relevance_score"] for each in found["results"]}
                text = told_scores([scores[index] for index in range(len(documents))])
        return Piece(request.id, text, finish="stop", prompt_tokens=found["usage"]["prompt_tokens"])

    def _check_size(self, request: Request, parts: Sequence[str | int]) -> None:
        """Raises Refused for a text that would take the tokenizer too long."""
        most = max_told_bytes(self._context)
        if max_tokens_of(parts) > most:  # a token for each byte, at most
            param = "prompt" if isinstance(request.prompt, str) else "messages"
            words = f"{param}: llama.cpp's tokenizer takes up to 7 s per megabyte, so it tells the token ids of {most}"
            raise Refused(invalid(f"{words} bytes at most. Send a shorter text, or its parts.", param))

    async def _call(self, call: Callable[[Any], Any], body: dict[str, Any], param: str) -> Mapping[str, Any]:
        """Call the library in a thread. Raises Refused."""
        running = self._threads.submit(call, body)
        self._calls.add(running)
        running.add_done_callback(self._calls.discard)
        found = await asyncio.wrap_future(running)
        found = json.loads(found) if isinstance(found, str | bytes) else found
        if error := found.get("error"):
            raise Refused(self._failure(error, param))
        answer: Mapping[str, Any] = found
        return answer

    def _failure(self, error: Mapping[str, Any], param: str) -> Failure:
        said = str(error.get("message"))
        if any(each in said for each in TOO_LONG):
            message = f"{param}: {said}. Cut the text, or raise options.batch or options.context of the model."
            return Failure("context_length_exceeded", message, 400, param)
        refused = error.get("code") == 400
        return (
            invalid(f"llama.cpp refused the request: {said}", param) if refused else engine_error(f"llama.cpp: {said}")
        )
