"""Embedded engine: runs llama.cpp inside the worker process, on the CPU, with in-flight batching.

llama.cpp has one blocking call per request and no step hook: each slot has a thread that blocks in that call, and the
engine delivers what the threads produce within GATHER_S as one step. It renders chats with the model's own template, so
that chats, texts and token ids take one path.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.engine import EngineDead, EngineHealth, Failure, ModelCard, Piece, Refused, Request, Stats, Step, Task
from workers.engines import manifest
from workers.engines.chats import OF_TEMPLATE
from workers.engines.constraint import begins_json
from workers.engines.llamacpp import gguf
from workers.engines.llamacpp import request as llama
from workers.engines.llamacpp.request import UNUSABLE_SCHEMA, Generation, Prompts, Tokenizer, TokenizerFailed
from workers.engines.llamacpp.scores import PromptScorer
from workers.engines.llamacpp.settings import LlamacppSettings, capabilities
from workers.engines.llamacpp.weights import fetch
from workers.engines.schema import UnusableSchemaError
from workers.engines.task_answers import max_told_bytes, reported_scores, reported_tokens
from workers.engines.text import joined, length, shared_length

MIN_SHARED = 0.1
"""Share of a prompt that a slot must have cached to be preferred; otherwise the least recently used slot is chosen."""


@dataclass(slots=True, eq=False)
class Slot:
    """One slot of llama.cpp."""

    number: int
    owner: tuple[str, str] | None = None
    """Tenant and adapter of the prompt that the slot's KV cache holds; None: unknown, so that it may not be reused."""
    prompt: Sequence[str | int] = ()
    """The cached prompt."""
    last_used: int = 0

    def begin(self, generation: Generation) -> bool:
        """Return whether this request may reuse the slot's cache. If not, no other request may either until `own`: a
        request that is refused before its prefill leaves the previous request's cache in place."""
        reusable = self.owner == generation.owner
        if not reusable:
            self.disown()
        return reusable

    def own(self, generation: Generation) -> None:
        """Record that the slot's cache holds only this request's prompt, or the part that was computed."""
        self.owner, self.prompt = generation.owner, generation.prompt

    def disown(self) -> None:
        """Forbid the reuse of the slot's cache."""
        self.owner, self.prompt = None, ()

    def fitness(self, generation: Generation) -> tuple[int, int]:
        """Sort key: the length of this tenant's prompt prefix in its cache. Among equals the most recently used slot is
        best, or the least recently used one if nothing is cached.

        A request with a cached prefix need not compute it again. That shows in `cached_tokens` and in the time to first
        token, so a request may reuse only its own tenant's prompts: otherwise one tenant could guess another's prompts
        and see which guess was right.
        """
        shared = shared_length(self.prompt, generation.prompt) if self.owner == generation.owner else 0
        if shared < MIN_SHARED * length(generation.prompt):
            shared = 0
        return shared, self.last_used if shared else -self.last_used


GATHER_S = 0.0015
"""How long pieces are collected into one step: the callbacks of a step come on separate threads within about 2 ms."""

STOP_TIMEOUT_S = 5.0
"""How long stop() waits for running requests to end."""

TOO_LONG = ("is too large to process", "exceeds the available context")
"""Parts of llama.cpp's words for an input of a task that does not fit."""

TRIAL_TOKENS = 3
"""Tokens generated to test whether a schema constrains the output."""

MAX_KNOWN_SCHEMAS = 256
"""Size of the cache of schemas that were tested."""

_log = logging.getLogger(__name__)


class LlamacppEngine:
    """Serves one GGUF file. Slots are llama.cpp's; further requests wait here in FIFO order."""

    def __init__(
        self, model: str, settings: LlamacppSettings, path: Path, adapters: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`adapters`: by name, the file of each."""
        self._model, self._settings, self._path, self._adapters = model, settings, path, adapters
        self._context = settings.context
        self._prompts: Prompts | None = None
        self._server: Any = None
        self._tokenizer: Tokenizer | None = None
        self._embedding_size, self._pooled = 0, False
        self._folder: Path | None = None
        self._threads = ThreadPoolExecutor(settings.slots, thread_name_prefix="slot")
        """As many as slots, each for one request at a time; further requests wait in its queue."""
        self._task_threads = ThreadPoolExecutor(settings.slots, thread_name_prefix="task")
        self._task_calls: set[Future[Any]] = set()
        self._tasks: dict[str, asyncio.Task[Piece]] = {}
        self._idle = [Slot(number) for number in range(settings.slots)]
        self._uses = self._steps = 0
        self._live: dict[str, tuple[Generation, Future[None]]] = {}
        self._last_chunk_at = 0.0
        self._broken = ""
        self._schemas: dict[str, bool] = {}
        self._outbox: list[Piece] = []
        self._lock = threading.Lock()
        """Guards the outbox, the live requests and the idle slots, which the threads and the event loop share."""
        self._turns = threading.Condition(self._lock)
        self._line: list[Generation] = []
        """Of a model with adapters: the requests that wait for their turn, the oldest first."""
        self._in_turn: list[str] = []
        """The adapter of each text that has its turn; it is the same."""
        self._adapter, self._swaps = "", 0
        """Of the last turn, and how often that was another one than before."""

    # --- the engine protocol ---------------------------------------------------------------------------------------

    async def start(self, on_step: Step, on_phase: Callable[[str], None]) -> ModelCard:
        """Load the model, which takes a few seconds. Raises EngineDead."""
        self._on_step, self._loop = on_step, asyncio.get_running_loop()
        if self._settings.manifest is not None:
            on_phase("checking the model file against its manifest")
            files = [*manifest.shards(self._path), *map(Path, self._adapters.values())]
            await asyncio.to_thread(manifest.check, self._settings.manifest, files)
        on_phase("reading the model file")
        self._prompts = await asyncio.to_thread(self._read)
        on_phase("loading weights")
        self._tokenizer = await asyncio.to_thread(self._load)
        return self._card(self._prompts)

    def _card(self, prompts: Prompts) -> ModelCard:
        can = capabilities(self._settings, prompts.chats.capabilities)
        return ModelCard(
            name=self._model,
            engine="llamacpp",
            context=self._context,
            max_output=self._context,
            capabilities=can,
            withheld=("*",),
            takes=(OF_TEMPLATE,),
            adapters=tuple(self._adapters),
            special_tokens=prompts.special,
            embedding_size=self._embedding_size if can.embed else 0,
            created=int(time.time()),
        )

    def _running(self) -> tuple[Prompts, Tokenizer]:
        """Raises EngineDead."""
        if self._tokenizer is None or self._prompts is None:
            raise EngineDead("the engine is not running")
        return self._prompts, self._tokenizer

    async def check(self, request: Request) -> None:
        """Raises Refused, EngineDead."""
        prompts, tokenizer = self._running()
        if request.task is not None:
            return
        prompt, _ = prompts.of(request)
        wanted = request.sampling.max_tokens or 1
        if llama.max_tokens_of(prompt) + wanted <= self._context:
            return
        tokens = await tokenizer.count(prompt)
        if tokens is not None and tokens + wanted > self._context:
            raise Refused(llama.over_context(request, tokens, self._context))

    def submit(self, request: Request) -> None:
        """Raises Refused, EngineDead."""
        prompts, _ = self._running()
        if request.task is not None:
            task = self._tasks[request.id] = asyncio.create_task(self._perform(request, request.task))
            task.add_done_callback(partial(self._on_task_end, request.id))
            return
        prompt = prompts.of(request)
        generation = Generation(request, prompt.parts, self._context, opened=prompt.opened)
        generation.scales = {name: float(name == request.adapter) for name in self._adapters}
        with self._lock:
            self._live[request.id] = generation, self._in_thread(self._threads, self._serve, generation)

    def cancel(self, request_id: str) -> None:
        """Cancel a request: a task or a waiting one ends now, a running one at its next token or next batch of its
        prompt. What llama.cpp still computes for a task is dropped."""
        if task := self._tasks.get(request_id):
            task.cancel()
        if (live := self._live.get(request_id)) is not None:
            generation, serving = live
            generation.cancelled = True
            if serving.cancel():  # it waits still
                self._end(generation)
            with self._turns:
                self._turns.notify_all()

    def stats(self) -> Stats:
        """`steps` counts deliveries, which are close to llama.cpp's decode steps."""
        with self._lock:
            live = [generation for generation, _ in self._live.values()]
        running = sum(generation.scheduled > 0 for generation in live)
        return Stats(
            slots=self._settings.slots,
            running=running,
            waiting=len(live) - running,
            adapters=(self._adapter,) if self._adapter else (),
            swaps=self._swaps,
            kv_tokens=self._settings.slots * self._context,
            kv_used=sum(generation.held_tokens for generation in live),
            steps=self._steps,
        )

    def health(self) -> EngineHealth:
        """Not ok when llama.cpp aborted a request by itself, or sends nothing for `hang_s` while requests run."""
        if self._broken:
            return EngineHealth(False, self._broken)
        silent, running = time.monotonic() - self._last_chunk_at, self.stats().running
        if running and silent > self._settings.hang_s:
            return EngineHealth(False, f"llama.cpp is silent for {silent:.0f} s with {running} requests running")
        return EngineHealth(True)

    async def stop(self) -> None:
        """Cancel all requests and unload. Running ones get their last piece if they end within STOP_TIMEOUT_S."""
        for request_id in list(self._live):
            self.cancel(request_id)
        running = [serving for _, serving in list(self._live.values())]
        ended = await asyncio.to_thread(wait, running, STOP_TIMEOUT_S)
        self._threads.shutdown(wait=False)
        await asyncio.to_thread(wait, self._task_calls, STOP_TIMEOUT_S)
        self._task_threads.shutdown(wait=False, cancel_futures=True)
        if ended.not_done:
            _log.error("llama.cpp did not end its requests within %s s; they end with this process", STOP_TIMEOUT_S)
        if self._tokenizer is not None:
            await self._tokenizer.close()
        self._server = self._tokenizer = None
        self._deliver()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)  # llama.cpp may remove its socket at the same time
            self._folder = None

    # --- starting and stopping -------------------------------------------------------------------------------------

    def _read(self) -> Prompts:
        if absent := [path for path in self._adapters.values() if not Path(path).is_file()]:
            raise EngineDead(f"the adapter file {absent[0]} does not exist: correct [models.{self._model}.adapters]")
        if self._adapters and self._settings.embeddings:  # vectors have no turns
            raise EngineDead("llama.cpp cannot make vectors beside adapters: configure a second model for embeddings")
        try:
            file = gguf.read(self._path)
            prompts = Prompts(file)
            self._context = min(self._settings.context, int(file.own("context_length", 0)) or self._settings.context)
            self._embedding_size = int(file.own("embedding_length", 0))
            self._pooled = file.own("pooling_type") is not None  # it says how one vector is made of those of all tokens
            return prompts
        except gguf.GgufError as error:
            raise EngineDead(str(error)) from error
        except (TypeError, ValueError, struct.error) as error:  # metadata of the wrong type
            problem = f"cannot use the model file {self._path}: it is damaged ({error}). Get it again."
            raise EngineDead(problem) from error

    def _load(self) -> Tokenizer:
        # The library reads these once, on load: its threads must not spin at barriers, other processes need the cores.
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ["GOMP_SPINCOUNT"] = "0"
        try:
            import xllamacpp  # noqa: PLC0415 - after the environment is set
        except ImportError as error:
            problem = f"the embedded engine is not installed ({error}): pip install 'penstock[llamacpp]'"
            raise EngineDead(problem) from error
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="penstock-"))  # mode 0700
        except OSError as error:
            raise EngineDead(f"no folder can be made in {tempfile.gettempdir()}: {error}. Make room there.") from error
        try:
            tokenizer, params = Tokenizer(self._folder / "engine.sock", secrets.token_hex(32)), xllamacpp.CommonParams()
            fill(params, self._settings, self._path, self._context, tokenizer, pooled=self._pooled)
            params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(path, 0.0) for path in self._adapters.values()]
            self._server = xllamacpp.Server(params)
            return tokenizer
        except Exception as error:  # the library raises whatever its C++ side throws
            shutil.rmtree(self._folder, ignore_errors=True)  # nothing in it is needed
            raise EngineDead(
                f"llama.cpp cannot load {self._path}: {error}. The file may be damaged, of a kind this version does "
                f"not know, or too large for the memory ({self._settings.slots} slots of {self._context} tokens)."
            ) from error

    def _in_thread(self, threads: ThreadPoolExecutor, call: Callable[..., Any], given: Any) -> Future[Any]:
        """Raises EngineDead if the system refuses a thread: it would refuse the next request's, too."""
        try:
            return threads.submit(call, given)
        except RuntimeError as error:
            self._broken = f"llama.cpp cannot take requests: {error}"
            raise EngineDead(self._broken) from error

    # --- the slots' threads ----------------------------------------------------------------------------------------

    def _serve(self, generation: Generation) -> None:
        """Run one request in the idle slot that fits best, once it has its turn."""
        adapter = generation.owner[1]
        if self._adapters:
            self._await_turn(generation, adapter)
        with self._lock:
            slot = max(self._idle, key=lambda each: each.fitness(generation))
            self._idle.remove(slot)
            self._uses += 1
            slot.last_used = self._uses
        generation.scheduled = self._last_chunk_at = time.monotonic()
        try:
            if generation.scores:
                self._score(generation, slot)
            if not generation.done:
                self._generate(generation, slot)
        except ValueError as error:  # the library's error for a request it cannot parse
            generation.fail(llama.invalid(f"llama.cpp refused the request: {error}"))
        except Exception as error:  # noqa: BLE001 - the request must fail and the slot must survive
            _log.exception("a request failed in llama.cpp")
            generation.fail(llama.engine_error(f"llama.cpp failed: {type(error).__name__}"))
        with self._lock:
            self._idle.append(slot)
            if self._adapters:
                self._in_turn.remove(adapter)
                self._turns.notify_all()
        self._last_chunk_at = time.monotonic()
        self._end(generation)

    def _await_turn(self, generation: Generation, adapter: str) -> None:
        """Wait until all older requests have begun and the texts of another adapter have ended. llama.cpp computes
        those of one adapter together, and no others while such texts come."""
        with self._turns:
            self._line.append(generation)
            others = self._in_turn
            self._turns.wait_for(
                lambda: generation.done or (self._line[0] is generation and (not others or others[0] == adapter))
            )
            self._line.remove(generation)
            self._in_turn.append(adapter)
            self._swaps += adapter != self._adapter
            self._adapter = adapter
            self._turns.notify_all()

    def _end(self, generation: Generation) -> None:
        with self._lock:
            self._live.pop(generation.id, None)
        try:
            last = generation.last()
        except Exception as error:  # noqa: BLE001 - nobody awaits this thread: the request would never end
            _log.exception("the end of a request failed")
            last = Piece(generation.id, failure=llama.engine_error(f"its end failed: {type(error).__name__}"))
        self._push(last)

    def _score(self, generation: Generation, slot: Slot) -> None:
        """Tell the log-probabilities of the prompt's tokens, in a piece of its own; blocks. Raises what the library
        raised, TokenizerFailed."""
        prompts, tokenizer = self._running()

        async def read() -> tuple[list[tuple[int, bytes]], int]:
            return await tokenizer.tokens(generation.prompt), (await tokenizer.ids(["a"], special=False))[-1]

        tokens, plain = asyncio.run_coroutine_threadsafe(read(), self._loop).result()
        if (alternatives := generation.begin_prompt(len(tokens))) is None or generation.stopped:
            return
        slot.begin(generation)

        def complete(body: dict[str, Any], take: Callable[[Mapping[str, Any]], bool]) -> None:
            def on_chunk(chunk: dict[str, Any]) -> bool:
                self._last_chunk_at = time.monotonic()
                if chunk.get("prompt_progress"):
                    slot.own(generation)
                return take(chunk)

            reuse = slot.owner == generation.owner and not self._settings.embeddings
            self._server.handle_completions(body | generation.placed(slot.number, reuse=reuse), on_chunk)

        if isinstance(text := generation.prompt[0], str) and not text.encode().startswith(tokens[0][1]):
            tokens[0] = tokens[0][0], b""  # the model's own begin, which is no part of the text
        scorer = PromptScorer(complete, tokens, prompts.control, plain, prompts.vocabulary)
        rows = tuple(scorer.rows(alternatives, lambda: generation.stopped))
        if not generation.stopped:
            piece = Piece(generation.id, logprobs=rows, prompt_tokens=len(tokens))
            self._loop.call_soon_threadsafe(self._on_step, [piece])

    def _generate(self, generation: Generation, slot: Slot) -> None:
        """Run the request; blocks until it has ended. Raises what the library or the callback raised."""
        try:
            enforced = generation.schema is None or self._is_enforced(generation.schema, slot)
            problem = "" if enforced else UNUSABLE_SCHEMA
        except UnusableSchemaError as error:
            problem = f"this JSON schema cannot be used: {error}. Correct or simplify it."
        if problem:
            generation.fail(llama.invalid(problem, generation.schema_field))
            return
        errors: list[Exception] = []
        reuse = slot.begin(generation) and not self._settings.embeddings  # a vector's text may be in any slot

        def on_chunk(chunk: dict[str, Any]) -> bool:
            self._last_chunk_at = time.monotonic()
            try:
                if chunk.get("prompt_progress"):
                    slot.own(generation)
                piece = generation.take(chunk)
                if piece.n or piece.text:
                    self._push(piece)
            except Exception as error:  # noqa: BLE001 - the library would swallow it and end the stream
                errors.append(error)
            return bool(errors) or generation.done  # True: stop

        self._server.handle_completions(generation.body(self._settings, slot.number, reuse=reuse), on_chunk)
        if errors:
            raise RuntimeError("a chunk was not understood") from errors[0]
        if not generation.done:
            self._broken = "llama.cpp ended a request without a result"
            generation.fail(llama.engine_error(self._broken))

    def _is_enforced(self, schema: dict[str, Any], slot: Slot) -> bool:
        """Test whether llama.cpp applies this schema; the result is cached.

        llama.cpp silently ignores a schema that it cannot use, and drops a grammar with too many alternatives (600
        optional properties in one object) in the middle. So the engine generates a few tokens with a strong bias to a
        word that no JSON begins with and that follows no brace: only an active grammar suppresses it. The validation
        of the finished text finds a grammar that is dropped later.
        """
        key = json.dumps(schema, sort_keys=True)
        if key not in self._schemas:
            trial = {
                "prompt": [0],
                "id_slot": slot.number,
                "cache_prompt": False,
                "json_schema": schema,
                "logit_bias": [["The", 100]],
                "n_predict": TRIAL_TOKENS,
                "temperature": 0,
            }
            slot.disown()
            answer = self._server.handle_completions(trial)
            works = "error" not in answer and begins_json(answer["choices"][0]["text"])
            with self._lock:
                if len(self._schemas) >= MAX_KNOWN_SCHEMAS:
                    self._schemas.clear()
                self._schemas[key] = works
            return works
        return self._schemas[key]

    # --- tasks: none takes a slot; llama.cpp itself lets vectors and scores wait for one of its own -------------------

    async def _perform(self, request: Request, task: Task) -> Piece:
        try:
            return await self._answer(request, task)
        except Refused as refused:
            return Piece(request.id, failure=refused.failure)
        except TokenizerFailed as error:
            return Piece(request.id, failure=llama.engine_error(f"llama.cpp's tokenizer failed: {error}"))
        except Exception as error:  # noqa: BLE001 - boundary of one task: it must end, whatever the library raises
            _log.exception("a task failed in llama.cpp", extra={"request": request.id})
            return Piece(request.id, failure=llama.engine_error(f"llama.cpp failed: {type(error).__name__}"))

    def _on_task_end(self, request_id: str, task: asyncio.Task[Piece]) -> None:
        del self._tasks[request_id]
        self._push(Piece(request_id, finish="cancelled") if task.cancelled() else task.result())

    async def _answer(self, request: Request, task: Task) -> Piece:
        """Raises Refused, TokenizerFailed, EngineDead, by which this task fails, too."""
        prompts, tokenizer = self._running()
        match task.kind:
            case "tokenize":
                parts = prompts.of(request, begins=task.generation_prompt).parts if request.prompt else []
                self._check_size(request, parts)
                special = task.special_tokens or not isinstance(request.prompt, str)
                ids = await tokenizer.ids(parts, special=special) if parts else []
                return Piece(request.id, reported_tokens(ids, self._context), finish="stop")
            case "detokenize":
                prompts.check_ids(request.ids, "tokens")
                text = await tokenizer.text(request.ids) if request.ids else ""
                return Piece(request.id, text, finish="stop")
            case "embed":
                body = {"input": [each if isinstance(each, str) else list(each) for each in request.inputs]}
                for each in request.inputs:
                    if not isinstance(each, str):
                        prompts.check_ids(each, "input")
                found = await self._call(self._server.handle_embeddings, body | {"encoding_format": "base64"}, "input")
                vectors = sorted(found["data"], key=lambda each: each["index"])
                text = ",".join([each["embedding"] for each in vectors])
            case "rerank":
                query, *documents = request.inputs
                found = await self._call(
                    self._server.handle_rerank, {"query": query, "documents": documents}, "documents"
                )
                scores = {each["index"]: each["relevance_score"] for each in found["results"]}
                text = reported_scores([scores[index] for index in range(len(documents))])
        return Piece(request.id, text, finish="stop", prompt_tokens=found["usage"]["prompt_tokens"])

    def _check_size(self, request: Request, parts: Sequence[str | int]) -> None:
        """Raises Refused for a text that would take the tokenizer too long."""
        most = max_told_bytes(self._context)
        if llama.max_tokens_of(parts) > most:  # a token for each byte, at most
            param = "prompt" if isinstance(request.prompt, str) else "messages"
            words = f"{param}: llama.cpp's tokenizer takes up to 7 s per megabyte, so it tells the token ids of {most}"
            raise Refused(llama.invalid(f"{words} bytes at most. Send a shorter text, or its parts.", param))

    async def _call(self, call: Callable[[Any], Any], body: dict[str, Any], param: str) -> Mapping[str, Any]:
        """Call the library in a thread. Raises Refused, EngineDead."""
        running = self._in_thread(self._task_threads, call, body)
        self._task_calls.add(running)
        running.add_done_callback(self._task_calls.discard)
        found = await asyncio.wrap_future(running)
        answer: Mapping[str, Any] = json.loads(found) if isinstance(found, str | bytes) else found
        if error := answer.get("error"):
            said = str(error.get("message"))
            if any(each in said for each in TOO_LONG):
                message = f"{param}: {said}. Cut the text, or raise options.batch or options.context of the model."
                raise Refused(Failure("context_length_exceeded", message, 400, param))
            raise Refused(llama.refusal(error, param))
        return answer

    # --- handing over ----------------------------------------------------------------------------------------------

    def _push(self, piece: Piece) -> None:
        """Queue a piece, from any thread. All pieces within GATHER_S of the first are delivered in one step."""
        with self._lock:
            self._outbox.append(piece)
            first = len(self._outbox) == 1
        if first and not self._loop.is_closed():  # closed: stop() no longer waits for this thread
            self._loop.call_soon_threadsafe(self._loop.call_later, GATHER_S, self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            pieces, self._outbox = self._outbox, []
        if not pieces:
            return
        by_request: dict[str, list[Piece]] = {}
        for piece in pieces:
            by_request.setdefault(piece.id, []).append(piece)
        self._steps += 1
        self._on_step([joined(request_id, parts) for request_id, parts in by_request.items()])


def build(model: str, settings: LlamacppSettings, data_dir: Path, adapters: Mapping[str, str]) -> LlamacppEngine:
    """See workers.engines.registry. Fetches the default model if none is set. Raises EngineDead."""
    return LlamacppEngine(model, settings, settings.path or fetch(data_dir / "weights", lambda *_: None), adapters)


MIN_EMBEDDING_BATCH = 512
"""Tokens that a text to embed may have at least."""


def fill(
    params: Any, settings: LlamacppSettings, path: Path, context: int, listener: Tokenizer, *, pooled: bool
) -> None:
    """Fill in the parameters.

    Args:
        params: the library's CommonParams.
        context: tokens of a request.
        pooled: the model file says how one vector is made of those of all tokens.
    """
    threads = settings.threads or max(1, _cores() - 1)
    params.model.path = str(path)
    params.n_parallel, params.n_ctx = settings.slots, settings.slots * context
    # For most poolings a batch must hold a whole text.
    params.n_batch = params.n_ubatch = max(settings.batch, MIN_EMBEDDING_BATCH * settings.embeddings)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_gpu_layers = settings.gpu_layers
    # 0: this cache would share prompts between all slots, and so between tenants.
    params.cache_ram_mib = 0
    params.verbosity = -1
    # The library requires a listener: a Unix socket of this user, with a key that only this process knows.
    # It also counts tokens, for which the library has no call.
    params.hostnames, params.api_keys = [str(listener.socket)], [listener.key]
    params.ui = params.endpoint_slots = False
    if settings.embeddings:
        params.embedding = True
        name = settings.pooling or ("unspecified" if pooled else "last")
        params.pooling_type = getattr(type(params.pooling_type), f"LLAMA_POOLING_TYPE_{name.upper()}")


def _cores() -> int:
    """The number of cores this process may use; in a container fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
