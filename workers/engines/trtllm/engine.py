"""TensorRT-LLM engine: implements the engine interface on TensorRT-LLM's `LLM` API, with in-flight batching.

TensorRT-LLM schedules its steps; the worker handles queueing, fencing, delivery and retries. This side lives on the
worker's event loop and never waits for the engine: a driver's thread makes the requests, and the import, the
construction of LLM, which takes minutes, and the read of statistics run in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.engine import EngineDead, EngineHealth, ModelCard, Piece, Request, Stats, Step
from penstock.loops import wait
from workers.engines import manifest
from workers.engines.chats import OF_TEMPLATE
from workers.engines.reasoning import END
from workers.engines.trtllm import args as trtllm_args
from workers.engines.trtllm import library as trtllm_library
from workers.engines.trtllm import text as trtllm_text
from workers.engines.trtllm.driver import Driver, Loaded, asked
from workers.engines.trtllm.generation import BUDGET
from workers.engines.trtllm.library import Library
from workers.engines.trtllm.settings import TrtllmSection, TrtllmSettings
from workers.engines.trtllm.text import CheckpointInfo, Codec

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 0.05
MIN_PAUSE_S, MAX_PAUSE_S, MAX_RETRY_DELAY_S = 0.1, 2.0, 60.0
"""Between two reads of statistics, the last of them after errors."""
GRACE_S, SHUTDOWN_S = 5.0, 20.0
"""How long `stop` waits at most for the ends of requests, and then for the engine."""
STUCK_S = 2.0
"""For one that answers nothing any more: until the process ends, its GPUs serve nobody."""


class TrtllmEngine:
    """Implements Engine. `model` is the name that requests use."""

    def __init__(self, model: str, settings: TrtllmSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._model, self._settings, self._clock = model, settings, clock
        self._engine: Loaded | None = None
        self._driver: Driver | None = None
        self._stopping = threading.Event()
        self._steps = self._evictions = 0
        self._iterations: dict[int, Mapping[str, Any]] = {}
        """The engine's latest statistics, by the rank of attention DP."""

    # --- start and stop --------------------------------------------------------------------------------------------

    async def start(self, on_step: Step, on_phase: Callable[[str], None]) -> ModelCard:
        """Load the model in a thread, so that the process keeps reporting itself meanwhile."""
        self._on_step = on_step
        on_phase("importing TensorRT-LLM")
        library = await asyncio.to_thread(trtllm_library.load, self._settings)
        config = await asyncio.to_thread(trtllm_library.read_config, self._settings.config)
        settings = self._settings = trtllm_args.with_config(self._settings, config)
        if reasons := trtllm_args.refusals(settings, library.gpus, os.path.exists, config):
            raise EngineDead("TensorRT-LLM cannot serve this configuration: " + "; ".join(reasons))
        if settings.manifest is not None:
            on_phase("checking the checkpoint against its manifest")
            paths = [Path(each) for each in trtllm_args.folders(settings).values()]
            await asyncio.to_thread(manifest.check, settings.manifest, paths)
        try:
            checkpoint = trtllm_text.read_checkpoint(Path(settings.model))
            modules = trtllm_text.adapter_modules(settings.adapters, settings.max_lora_rank)
        except (ValueError, OSError) as error:
            raise EngineDead(f"the configuration of the checkpoint or of an adapter cannot be read: {error}") from error
        context = settings.max_seq_len or checkpoint.context
        if not context:
            raise EngineDead("the checkpoint does not say how long its context is: set trtllm.max_seq_len")
        arguments = self._arguments(library, context, modules)
        on_phase("loading weights")
        llm = await self._loaded(lambda: library.llm(**arguments))
        try:
            self._engine = self._inspect(llm, library, checkpoint, context)
            self._driver = Driver(self._engine, settings, self._take_step, self._clock)
        except BaseException:
            await ends_in_time(llm.shutdown, SHUTDOWN_S)
            raise
        if settings.enable_iter_perf_stats:
            threading.Thread(target=self._read_statistics, args=(llm.get_stats,), daemon=True).start()
        return self._card(self._engine)

    def _arguments(self, library: Library, context: int, modules: Sequence[str]) -> dict[str, Any]:
        """The keyword arguments of LLM(...). Raises EngineDead for settings that this version lacks."""
        if not library.facts.cache_salt and self._settings.kv_cache.get("enable_block_reuse", True):
            log.warning("this TensorRT-LLM cannot tell cached prompts of tenants apart: no block is reused")
        plain = trtllm_args.fields(self._settings, context, library.facts, modules)
        if lacking := library.facts.lacking(trtllm_args.needs(plain)):
            raise EngineDead(
                f"the installed TensorRT-LLM {library.facts.version} does not have {', '.join(lacking)}; this adapter "
                f"was written for about {trtllm_library.ANCHOR}: take the setting out or install a version that has it"
            )
        return plain

    async def _loaded(self, load: Callable[[], Any]) -> Any:
        """Run `load` in a thread. It cannot be interrupted: on a cancel, wait for its end and shut the engine down."""
        loading = asyncio.ensure_future(asyncio.to_thread(load))
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            await asyncio.wait({loading})
            if not loading.cancelled() and loading.exception() is None:
                await ends_in_time(loading.result().shutdown, SHUTDOWN_S)
            raise
        except Exception as error:
            raise EngineDead(f"TensorRT-LLM could not load {self._settings.model}: {error}") from error

    def _inspect(self, llm: Any, library: Library, checkpoint: CheckpointInfo, context: int) -> Loaded:
        codec = Codec(llm.tokenizer)
        end_ids = tuple(dict.fromkeys((*codec.end_ids, *checkpoint.end_ids)))
        if not end_ids:
            raise EngineDead("neither the tokenizer nor the checkpoint names an end-of-text token")
        kv_tokens = asked(lambda: int(llm.get_kv_cache_capacity().get("maxNumTokens", 0)), "size of its KV cache") or 0
        context = min(context, kv_tokens) if kv_tokens else context  # a request is on one rank
        kv_tokens *= trtllm_args.ranks(self._settings)
        vocabulary, logits = checkpoint.vocabulary or codec.vocabulary, checkpoint.vocabulary
        return Loaded(llm, library, codec, context, vocabulary, end_ids, logits, kv_tokens)

    def _card(self, engine: Loaded) -> ModelCard:
        library, chats = engine.library, engine.codec.chats
        limits = library.thinking and chats.reasoning and not trtllm_args.samples_fused(self._settings)
        limits = limits and len(engine.codec.ids([END])) == 1  # of several tokens, the first would be forced again
        return ModelCard(
            name=self._model,
            engine="trtllm",
            context=engine.context,
            max_output=engine.context,
            default_output=self._settings.default_output,
            capabilities=trtllm_args.capabilities(library.facts, self._settings, chats.capabilities, engine.logits),
            withheld=("*",),
            takes=(OF_TEMPLATE, BUDGET) if limits else (OF_TEMPLATE,),
            created=int(time.time()),
            adapters=tuple(self._settings.adapters),
        )

    async def stop(self) -> None:
        """Abort running requests and free the GPUs, in bounded time; what still hangs then ends with the process."""
        if self._stopping.is_set() or self._engine is None or self._driver is None:
            return
        self._stopping.set()
        grace_s, limit_s = (0.0, STUCK_S) if self._driver.stuck(self._settings.watchdog_s) else (GRACE_S, SHUTDOWN_S)
        await self._driver.stop(grace_s)
        if not await ends_in_time(self._engine.llm.shutdown, limit_s):
            log.error("TensorRT-LLM did not shut down: end the process with os._exit", extra={"after_s": limit_s})
        self._driver.close()

    # --- requests --------------------------------------------------------------------------------------------------

    async def check(self, request: Request) -> None:
        """Raises Refused, EngineDead."""
        await self._running().check(request)

    def submit(self, request: Request) -> None:
        """A request that can never run here gets a failure as its only piece. Raises EngineDead."""
        driver = self._running()
        if driver.dead:
            raise EngineDead(driver.dead)
        driver.submit(request)

    def cancel(self, request_id: str) -> None:
        """Idempotent; the last piece comes once the engine has released the request."""
        if self._driver is not None and not self._stopping.is_set():
            self._driver.cancel(request_id)

    def _running(self) -> Driver:
        if self._driver is None or self._stopping.is_set():
            raise EngineDead("the engine is not running")
        return self._driver

    def _take_step(self, pieces: list[Piece]) -> None:
        self._steps += 1
        self._on_step(pieces)

    # --- what it says of itself ------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        slots = self._settings.max_batch_size * trtllm_args.ranks(self._settings)
        if self._engine is None or self._driver is None:
            return Stats(slots=slots)
        live = self._driver.held()
        evicts = self._settings.scheduler_policy == "MAX_UTILIZATION"
        held = sum([each.prompt + (each.generated if evicts else each.budget) for each in live])
        blocks = [iteration.get("kvCacheStats") or {} for iteration in [*self._iterations.values()]]
        if blocks and all("usedNumBlocks" in each and "tokensPerBlock" in each for each in blocks):
            held = sum([int(each["usedNumBlocks"]) * int(each["tokensPerBlock"]) for each in blocks])
        return Stats(
            slots=slots,
            running=min(len(live), slots),
            waiting=max(0, len(live) - slots),
            kv_tokens=self._engine.kv_tokens,
            kv_used=held,
            evicts=evicts,
            evictions=self._evictions,
            steps=self._steps,
            adapters=self._driver.loaded.names,
            swaps=self._driver.loaded.swaps,
        )

    def health(self) -> EngineHealth:
        if self._driver is None:
            return EngineHealth(False, "the engine is not running")
        reason = self._driver.trouble(self._settings.watchdog_s)
        return EngineHealth(not reason, reason)

    def _read_statistics(self, read: Callable[..., list[Mapping[str, Any]]]) -> None:
        """Read statistics for ever, in a thread of its own: a read removes them from the engine, and may block. The
        interface is new: it may be missing or fail for a while, and nothing else depends on it."""
        pause = MIN_PAUSE_S
        while not self._stopping.wait(pause):
            batch = asked(lambda: read(timeout=READ_TIMEOUT_S), "statistics")
            if batch is None:
                pause = min(pause * 2, MAX_RETRY_DELAY_S)
                continue
            for iteration in batch:
                paused = (iteration.get("inflightBatchingStats") or {}).get("numPausedRequests", 0)
                self._evictions += paused if isinstance(paused, int) else 0
                self._iterations[iteration.get("attentionDpRank") or 0] = iteration
            pause = MIN_PAUSE_S if batch else min(pause * 2, MAX_PAUSE_S)


async def ends_in_time(shutdown: Callable[[], None], limit_s: float) -> bool:
    """Run LLM.shutdown(), which may block forever, in a daemon thread. Returns whether it ended within the limit."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            shutdown()
        except Exception as error:  # noqa: BLE001 - the process ends next; the log keeps the cause
            log.warning("TensorRT-LLM did not shut down cleanly", extra={"cause": str(error)})
        with contextlib.suppress(RuntimeError):  # the loop was closed before this thread came back
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="trtllm-shutdown", daemon=True).start()
    return await wait(done, limit_s)


def build(model: str, section: TrtllmSection, data_dir: Path, adapters: Mapping[str, str]) -> TrtllmEngine:
    """See workers.engines.registry; nothing of this engine lies in the data folder."""
    return TrtllmEngine(model, TrtllmSettings.of(section, adapters))
