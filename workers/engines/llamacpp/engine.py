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
import queue
import secrets
import shutil
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.engine import (
    EngineDead,
    EngineHealth,
    ModelCard,
    Piece,
    Refused,
    Request,
    Stats,
    Step,
)
from workers.engines import manifest
from workers.engines.constraint import begins_json
from workers.engines.llamacpp import gguf
from workers.engines.llamacpp.prompt import Tokenizer, max_tokens_of
from workers.engines.llamacpp.request import Gap, Generation, Row, engine_error, invalid, too_long
from workers.engines.llamacpp.settings import LlamacppSettings, card_of
from workers.engines.llamacpp.tasks import LlamacppTasks
from workers.engines.llamacpp.weights import fetch
from workers.engines.schema import UnusableSchemaError
from workers.engines.text import joined, length, shared_length

if TYPE_CHECKING:
    from workers.engines.llamacpp.prompt import Prompts


MIN_SHARED = 0.1
"""Share of a prompt that a slot must have cached to be preferred; otherwise the least recently used slot is chosen."""


@dataclass(slots=True, eq=False)
class Slot:
    """One slot of llama.cpp. Its thread takes requests from `inbox`; None ends the thread."""

    number: int
    inbox: queue.SimpleQueue[Generation | None] = field(default_factory=queue.SimpleQueue)
    owner: str | None = None
    """The tenant whose prompt the slot's KV cache holds; None: unknown, so that it may not be reused."""
    prompt: Sequence[str | int] = ()
    """The cached prompt."""
    last_used: int = 0

    def begin(self, generation: Generation) -> bool:
        """Return whether this request may reuse the slot's cache. If not, no other request may either until `own`: a
        request that is refused before its prefill leaves the previous request's cache in place."""
        reusable = self.owner == generation.tenant
        if not reusable:
            self.disown()
        return reusable

    def own(self, generation: Generation) -> None:
        """Record that the slot's cache holds only this request's prompt, or the part that was computed."""
        self.owner, self.prompt = generation.tenant, generation.prompt

    def disown(self) -> None:
        """Forbid the reuse of the slot's cache."""
        self.owner, self.prompt = None, ()


class Slots:
    """All slots of one engine. Not thread-safe: the engine's lock guards it.

    A slot keeps the KV cache of its last request, and a request with the same prefix need not compute it again. That
    shows in `cached_tokens` and in the time to first token, so a request may reuse only its own tenant's prompts:
    otherwise one tenant could guess another's prompts and see which guess was right.
    """

    def __init__(self, count: int) -> None:
        self.all = [Slot(number) for number in range(count)]
        self._idle = list(self.all)
        self._waiting: deque[Generation] = deque()
        self._uses = 0

    def submit(self, generation: Generation) -> None:
        """Give the request to an idle slot's thread, or queue it for the first slot that is free."""
        if not self._idle:
            self._waiting.append(generation)
            return
        slot = max(self._idle, key=lambda each: self._fitness(each, generation))
        self._idle.remove(slot)
        self._give(slot, generation)

    def free(self, slot: Slot) -> None:
        """Give an idle slot's thread the oldest waiting request, or mark the slot idle."""
        if self._waiting:
            self._give(slot, self._waiting.popleft())
        else:
            self._idle.append(slot)

    def _give(self, slot: Slot, generation: Generation) -> None:
        self._uses += 1
        slot.last_used = self._uses
        slot.inbox.put(generation)

    @staticmethod
    def _fitness(slot: Slot, generation: Generation) -> tuple[int, int]:
        """Sort key of a slot: the length of this tenant's prompt prefix in its cache. Among equals the most recently
        used slot is best, or the least recently used one if nothing is cached."""
        shared = 0
        if slot.owner == generation.tenant:
            shared = shared_length(slot.prompt, generation.prompt)
            shared = shared if shared >= MIN_SHARED * length(generation.prompt) else 0
        return shared, slot.last_used if shared else -slot.last_used


GATHER_S = 0.0015
"""How long pieces are collected into one step: the callbacks of a step come on separate threads within about 2 ms."""

STOP_TIMEOUT_S = 5.0
"""How long stop() waits for running requests to end."""

TRIAL_TOKENS = 3
"""Tokens generated to test whether a schema constrains the output."""

HELD_ALTERNATIVES = 200
"""Alternatives among which a token within a character is looked for first, before the whole vocabulary."""

MAX_KNOWN_SCHEMAS = 256
"""Size of the cache of schemas that were tested."""

_log = logging.getLogger(__name__)


class LlamacppEngine:
    """Serves one GGUF file. Slots are llama.cpp's; further requests wait here in FIFO order."""

    def __init__(self, model: str, settings: LlamacppSettings, path: Path) -> None:
        self._model, self._settings, self._path = model, settings, path
        self._context = settings.context
        self._prompts: Prompts | None = None
        self._server: Any = None
        self._tokenizer: Tokenizer | None = None
        self._tasks: LlamacppTasks | None = None
        self._embedding_size, self._pooled, self._vocabulary = 0, False, 0
        self._folder: Path | None = None
        self._threads: list[threading.Thread] = []
        self._slots = Slots(settings.slots)
        self._live: dict[str, Generation] = {}
        self._waiting: set[Generation] = set()
        self._running = 0
        self._steps = 0
        self._last_chunk_at = 0.0
        self._broken = ""
        self._schemas: dict[str, bool] = {}
        self._outbox: list[Piece] = []
        self._lock = threading.Lock()
        """Guards the outbox, the counters and the idle slots, which the slots' threads and the event loop share."""

    # --- the engine protocol ---------------------------------------------------------------------------------------

    async def start(self, on_step: Step, on_phase: Callable[[str], None]) -> ModelCard:
        """Load the model, which takes a few seconds. Raises EngineDead."""
        self._on_step, self._loop = on_step, asyncio.get_running_loop()
        if self._settings.manifest is not None:
            on_phase("checking the model file against its manifest")
            await asyncio.to_thread(manifest.check, self._settings.manifest, manifest.shards(self._path))
        on_phase("reading the model file")
        await asyncio.to_thread(self._read)
        on_phase("loading weights")
        await asyncio.to_thread(self._load)
        if self._prompts is not None and self._tokenizer is not None:
            self._tasks = LlamacppTasks(
                self._prompts,
                self._tokenizer,
                self._server,
                context=self._context,
                slots=self._settings.slots,
                emit=self._push,
            )
        for slot in self._slots.all:
            thread = threading.Thread(target=self._serve, args=(slot,), name=f"slot-{slot.number}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return card_of(self._model, self._context, self._prompts, self._settings, self._embedding_size)

    async def check(self, request: Request) -> None:
        """Raises Refused, EngineDead."""
        if self._tokenizer is None or self._prompts is None:
            raise EngineDead("the engine is not running")
        if request.task is not None:
            return
        prompt, _ = self._prompts.of(request)
        wanted = request.sampling.max_tokens or 1
        if max_tokens_of(prompt) + wanted <= self._context:
            return
        tokens = await self._tokenizer.count(prompt)
        if tokens is not None and tokens + wanted > self._context:
            raise Refused(too_long(request, tokens, self._context))

    def submit(self, request: Request) -> None:
        """Raises Refused, EngineDead."""
        if self._server is None or self._prompts is None:
            raise EngineDead("the engine is not running")
        if request.task is not None and self._tasks is not None:
            self._tasks.begin(request, request.task)
            return
        prompt = self._prompts.of(request)
        generation = Generation(request, prompt.parts, self._context, opened=prompt.opened)
        with self._lock:
            self._live[request.id] = generation
            self._waiting.add(generation)
            self._slots.submit(generation)

    def cancel(self, request_id: str) -> None:
        """Cancel a request: a waiting one ends now, a running one at its next token or next batch of its prompt."""
        if self._tasks is not None:
            self._tasks.cancel(request_id)
        generation = self._live.get(request_id)
        if generation is None:
            return
        generation.cancelled = True
        if self._claim(generation):
            self._end(generation)

    def stats(self) -> Stats:
        """`steps` counts deliveries, which are close to llama.cpp's decode steps."""
        with self._lock:
            live, waiting = list(self._live.values()), len(self._waiting)
        return Stats(
            slots=self._settings.slots,
            running=self._running,
            waiting=waiting,
            kv_tokens=self._settings.slots * self._context,
            kv_used=sum(generation.held_tokens for generation in live),
            steps=self._steps,
        )

    def health(self) -> EngineHealth:
        """Not ok when llama.cpp aborted a request by itself, or sends nothing for `hang_s` while requests run."""
        if self._broken:
            return EngineHealth(False, self._broken)
        silent = time.monotonic() - self._last_chunk_at
        if self._running and silent > self._settings.hang_s:
            return EngineHealth(False, f"llama.cpp is silent for {silent:.0f} s with {self._running} requests running")
        return EngineHealth(True)

    async def stop(self) -> None:
        """Cancel all requests and unload. Running ones get their last piece if they end within STOP_TIMEOUT_S."""
        for request_id in list(self._live):
            self.cancel(request_id)
        for slot in self._slots.all:
            slot.inbox.put(None)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        await asyncio.to_thread(self._join, deadline)
        self._threads.clear()
        if self._tasks is not None:
            await asyncio.to_thread(self._tasks.stop, max(0.0, deadline - time.monotonic()))
        self._tasks = None
        if self._tokenizer is not None:
            await self._tokenizer.close()
        self._server = self._tokenizer = None
        self._deliver()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)  # llama.cpp may remove its socket at the same time
            self._folder = None

    # --- starting and stopping -------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            from workers.engines.llamacpp.prompt import Prompts  # noqa: PLC0415 - needs jinja2, of the same extra
        except ImportError as error:
            raise _not_installed(error) from error
        try:
            file = gguf.read(self._path)
            self._prompts = Prompts(file)
            self._context = min(self._settings.context, file.context_length or self._settings.context)
            self._vocabulary = file.vocabulary
            self._pooled, self._embedding_size = file.pooling, file.embedding_length
        except gguf.GgufError as error:
            raise EngineDead(str(error)) from error
        except (TypeError, ValueError, struct.error) as error:  # metadata of the wrong type
            raise EngineDead(
                f"cannot use the model file {self._path}: it is damaged ({error}). Get it again."
            ) from error

    def _load(self) -> None:
        # The library reads these once, on load: its threads must not spin at barriers, other processes need the cores.
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ["GOMP_SPINCOUNT"] = "0"
        try:
            import xllamacpp  # noqa: PLC0415 - after the environment is set
        except ImportError as error:
            raise _not_installed(error) from error
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="penstock-"))  # mode 0700
        except OSError as error:
            raise EngineDead(f"no folder can be made in {tempfile.gettempdir()}: {error}. Make room there.") from error
        try:
            self._tokenizer = Tokenizer(self._folder / "engine.sock", secrets.token_hex(32))
            params = xllamacpp.CommonParams()
            self._server = xllamacpp.Server(
                fill(params, self._settings, self._path, self._context, self._tokenizer, pooled=self._pooled)
            )
        except Exception as error:  # the library raises whatever its C++ side throws
            shutil.rmtree(self._folder, ignore_errors=True)  # nothing in it is needed
            raise EngineDead(
                f"llama.cpp cannot load {self._path}: {error}. The file may be damaged, of a kind this version does "
                f"not know, or too large for the memory ({self._settings.slots} slots of {self._context} tokens)."
            ) from error

    def _join(self, deadline: float) -> None:
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            _log.error("llama.cpp did not end its requests within %s s; they end with this process", STOP_TIMEOUT_S)

    # --- the slots' threads ----------------------------------------------------------------------------------------

    def _serve(self, slot: Slot) -> None:
        while (generation := slot.inbox.get()) is not None:
            if self._claim(generation):  # False: it was cancelled while it waited
                self._run(generation, slot)
            with self._lock:
                self._slots.free(slot)

    def _run(self, generation: Generation, slot: Slot) -> None:
        generation.scheduled = time.monotonic()
        self._count(running=1)
        try:
            if not generation.done:
                self._generate(generation, slot)
        except ValueError as error:  # the library's error for a request it cannot parse
            generation.fail(invalid(f"llama.cpp refused the request: {error}"))
        except Exception as error:  # noqa: BLE001 - the request must fail and the slot must survive
            _log.exception("a request failed in llama.cpp")
            generation.fail(engine_error(f"llama.cpp failed: {type(error).__name__}"))
        self._count(running=-1)
        self._end(generation)

    def _claim(self, generation: Generation) -> bool:
        """Remove it from the waiting requests. Returns False if a slot or its cancel has done so before."""
        with self._lock:
            waits = generation in self._waiting
            self._waiting.discard(generation)
            return waits

    def _end(self, generation: Generation) -> None:
        with self._lock:
            self._live.pop(generation.id, None)
        self._push(generation.last())

    def _generate(self, generation: Generation, slot: Slot) -> None:
        """Run the request; blocks until it has ended. Raises what the library or the callback raised."""
        try:
            enforced = generation.schema is None or self._is_enforced(generation.schema, slot)
            problem = "" if enforced else generation.unusable
        except UnusableSchemaError as error:
            problem = f"this JSON schema cannot be used: {error}. Correct or simplify it."
        if problem:
            generation.fail(invalid(problem, generation.schema_field))
            return
        errors: list[Exception] = []
        reuse = slot.begin(generation) and not self._settings.embeddings  # a vector's text may be in any slot

        def on_chunk(chunk: dict[str, Any]) -> bool:
            self._last_chunk_at = time.monotonic()
            if generation.gap is not None:
                return True
            try:
                if chunk.get("prompt_progress"):
                    slot.own(generation)
                piece = generation.take(chunk)
                if piece.n or piece.text:
                    self._push(piece)
            except Exception as error:  # noqa: BLE001 - the library would swallow it and end the stream
                errors.append(error)
            return bool(errors) or generation.done or generation.gap is not None  # True: stop

        while True:
            self._server.handle_completions(generation.body(self._settings, slot.number, reuse=reuse), on_chunk)
            if errors:
                raise RuntimeError("a chunk was not understood") from errors[0]
            if generation.gap is None or generation.cancelled:
                break
            self._fill(generation, slot, reuse=reuse)
            if generation.done:
                break
        for piece in generation.late():
            if generation.gap is not None:
                self._fill(generation, slot, reuse=reuse)
            elif piece.n or piece.text:
                self._push(piece)
        if not generation.done:
            self._broken = "llama.cpp ended a request without a result"
            generation.fail(engine_error(self._broken))

    def _fill(self, generation: Generation, slot: Slot, *, reuse: bool) -> None:
        if generation.gap is not None:
            self._push(generation.fill(self._held_tokens(generation, generation.gap, slot, reuse=reuse)))

    def _held_tokens(self, generation: Generation, gap: Gap, slot: Slot, *, reuse: bool) -> list[tuple[int, Row]]:
        """The tokens of a gap before its last one, with their rows; [] if they cannot be told.

        llama.cpp gives no row for a token that ends within a character. Where it stood, another token is forced, and
        the token is found among the alternatives, by its bytes.
        """
        left, held = bytes(gap.row["bytes"]), list[tuple[int, Row]]()
        last = next((bytes(row["bytes"]) for row in gap.row["top_logprobs"] if row["id"] in gap.ids), b"")
        asked = {"n_predict": 1, "temperature": 0, "logit_bias": [["\n", 100]], "id_slot": slot.number}
        for rest in range(gap.tokens - 1, 0, -1):
            prompt = [*generation.prompt_now, *(number for number, _ in held)]
            for alternatives in (HELD_ALTERNATIVES, self._vocabulary):
                answer = self._server.handle_completions(
                    {"prompt": prompt, "cache_prompt": reuse, "logprobs": alternatives, **asked}
                )
                content = (answer["choices"][0]["logprobs"] or {}).get("content") if "choices" in answer else None
                rows: list[Row] = content[0]["top_logprobs"] if content else []
                found = next((row for row in rows if _begins(bytes(row["bytes"]), left, last, rest)), None)
                if found is not None:
                    break
            if found is None:
                return []
            held.append((found["id"], {**found, "top_logprobs": rows}))
            left = left[len(found["bytes"]) :]
        return held

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

    def _count(self, running: int) -> None:
        with self._lock:
            self._running += running
            self._last_chunk_at = time.monotonic()

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


def _not_installed(error: ImportError) -> EngineDead:
    return EngineDead(f"the embedded engine is not installed ({error}): pip install 'penstock[llamacpp]'")


def build(model: str, settings: LlamacppSettings, data_dir: Path) -> LlamacppEngine:
    """See workers.engines.registry. Fetches the default model if none is set. Raises EngineDead."""
    return LlamacppEngine(model, settings, settings.path or fetch(data_dir / "weights", lambda *_: None))


def _begins(token: bytes, left: bytes, last: bytes, rest: int) -> bool:
    """Whether a token may begin the bytes that are left, and ends within a character; `rest` tokens follow it, at the
    end `last` (b"": not known)."""
    behind = len(left) - len(token)
    if not token or not left.startswith(token) or behind < rest or (rest == 1 and last and left[len(token) :] != last):
        return False
    try:
        token.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" or error.start == 0
    return False


MIN_EMBEDDING_BATCH = 512
"""Tokens that a text to embed may have at least."""


def batch_of(settings: LlamacppSettings) -> int:
    """Prompt tokens per prefill batch, which for most poolings must hold a whole text."""
    return max(settings.batch, MIN_EMBEDDING_BATCH) if settings.embeddings else settings.batch


def fill(
    params: Any, settings: LlamacppSettings, path: Path, context: int, listener: Tokenizer, *, pooled: bool
) -> Any:
    """Fill in the parameters, and return them.

    Args:
        params: the library's CommonParams.
        context: tokens of a request.
        pooled: the model file says how one vector is made of those of all tokens.
    """
    threads = settings.threads or max(1, _cores() - 1)
    params.model.path = str(path)
    params.n_parallel, params.n_ctx = settings.slots, settings.slots * context
    params.n_batch = params.n_ubatch = batch_of(settings)
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
    return params


def _cores() -> int:
    """The number of cores this process may use; in a container fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
