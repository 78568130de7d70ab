"""TensorRT-LLM engine: implements the engine interface on TensorRT-LLM's `LLM` API, with in-flight batching.

This is the only file that imports tensorrt_llm, and only when an engine starts. TensorRT-LLM schedules its steps; the
worker handles queueing, fencing, delivery and retries. Used from one event loop; only the import and the construction
of LLM, which take minutes, run in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import importlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.engine import (
    MAX_LOGPROBS,
    Capabilities,
    EngineDead,
    EngineHealth,
    Failure,
    ModelCard,
    Piece,
    Refused,
    Request,
    Stats,
    Step,
)
from penstock.loops import wait
from workers.engines import manifest
from workers.engines.trtllm import args as trtllm_args
from workers.engines.trtllm import inflight as trtllm_stats
from workers.engines.trtllm import text as trtllm_sampling
from workers.engines.trtllm.args import Library
from workers.engines.trtllm.inflight import InFlight, Live, StatsReader
from workers.engines.trtllm.settings import TrtllmSettings
from workers.engines.trtllm.text import CheckpointInfo, Codec, EngineLimits, TextStream

log = logging.getLogger(__name__)

RESUMED_AHEAD = 0.1
"""A request that lost its worker goes ahead of new ones by this, which is less than the gap between two lanes."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A running engine and its properties."""

    llm: Any
    library: Library
    codec: Codec
    limits: EngineLimits
    end_ids: tuple[int, ...]
    """Every token that ends a text; many chat models have more than the one of the tokenizer."""
    kv_tokens: int
    optional: frozenset[str]
    """The prototype keywords that this version's generate_async takes."""
    requests: InFlight
    reader: StatsReader | None


class TrtllmEngine:
    """Implements Engine. `model` is the name that requests use; `stop` waits at most `grace_s` plus `shutdown_s`."""

    def __init__(
        self,
        model: str,
        settings: TrtllmSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        grace_s: float = 5.0,
        shutdown_s: float = 20.0,
    ) -> None:
        self._model, self._settings, self._clock = model, settings, clock
        self._grace_s, self._shutdown_s = grace_s, shutdown_s
        self._engine: Loaded | None = None
        self._stopping = False
        self._salt_key = secrets.token_bytes(32)
        """Random per process, so that a tenant's cache salt cannot be computed from its name."""

    async def start(self, on_step: Step, on_phase: Callable[[str], None]) -> ModelCard:
        """Load the model in a thread, so that the process keeps reporting itself meanwhile."""
        on_phase("importing TensorRT-LLM")
        library = await asyncio.to_thread(load_library)
        reasons = trtllm_args.refusals(self._settings, library.gpus, os.path.exists)
        if reasons:
            raise EngineDead("TensorRT-LLM cannot serve this configuration: " + "; ".join(reasons))
        if self._settings.manifest is not None:
            on_phase("checking the checkpoint against its manifest")
            await asyncio.to_thread(manifest.check, self._settings.manifest, trtllm_args.folders(self._settings))
        checkpoint = self._checkpoint()
        optional = trtllm_args.optional_call(library)
        plain = self._arguments(library, self._settings.max_seq_len or checkpoint.context, optional)
        on_phase("loading weights")
        llm = await self._loaded(lambda: library.llm(**trtllm_args.arguments(plain, library)))
        self._engine = self._inspect(llm, library, optional, checkpoint, on_step)
        return self._card(self._engine)

    def _checkpoint(self) -> CheckpointInfo:
        try:
            checkpoint = CheckpointInfo.read(Path(self._settings.model))
        except (ValueError, OSError) as error:
            raise EngineDead(f"the checkpoint's configuration cannot be read: {error}") from error
        if not (self._settings.max_seq_len or checkpoint.context):
            raise EngineDead("the checkpoint does not say how long its context is: set trtllm.max_seq_len")
        return checkpoint

    def _arguments(self, library: Library, context: int, optional: frozenset[str]) -> dict[str, Any]:
        """The keyword arguments of LLM(...) as plain data. Raises EngineDead for settings that this version lacks."""
        salted = trtllm_args.SALT in optional
        if not salted and self._settings.kv_cache.get("enable_block_reuse", True):
            log.warning("this TensorRT-LLM cannot tell cached prompts of tenants apart: no block is reused")
        plain = trtllm_args.fields(self._settings, context, salted=salted)
        lacking = trtllm_args.missing(plain, library)
        if lacking:
            raise EngineDead(
                f"the installed TensorRT-LLM {library.version} does not have {', '.join(lacking)}; this adapter was "
                f"written for about {trtllm_args.ANCHOR}: take the setting out or install a version that has it"
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
                await ends_in_time(loading.result().shutdown, self._shutdown_s)
            raise
        except Exception as error:
            raise EngineDead(f"TensorRT-LLM could not load {self._settings.model}: {error}") from error

    def _inspect(
        self, llm: Any, library: Library, optional: frozenset[str], checkpoint: CheckpointInfo, on_step: Step
    ) -> Loaded:
        codec, kv_tokens = Codec(llm.tokenizer), trtllm_stats.kv_capacity(llm)
        own = () if codec.end_id is None else (codec.end_id,)
        end_ids = tuple(dict.fromkeys(own + checkpoint.end_ids))
        if not end_ids:
            raise EngineDead("neither the tokenizer nor the checkpoint names an end-of-text token")
        return Loaded(
            llm=llm,
            library=library,
            codec=codec,
            limits=EngineLimits.of(
                self._settings, checkpoint.context, kv_tokens, checkpoint.vocabulary or codec.vocabulary
            ),
            end_ids=end_ids,
            kv_tokens=kv_tokens,
            optional=optional,
            requests=InFlight(
                on_step,
                codec,
                end_ids,
                request_error=library.request_error,
                clock=self._clock,
                cached_hidden=trtllm_args.SALT not in optional,
            ),
            reader=StatsReader(llm.get_stats) if self._settings.enable_iter_perf_stats else None,
        )

    def _card(self, engine: Loaded) -> ModelCard:
        return ModelCard(
            name=self._model,
            engine="trtllm",
            context=engine.limits.context,
            max_output=engine.limits.context,
            default_output=self._settings.default_output,
            capabilities=Capabilities(
                chat=engine.codec.chats,
                logprobs=MAX_LOGPROBS,
                json_schema=engine.limits.guided,
                penalties=True,
                token_prompts=True,
                top_k=True,
                min_p=True,
                repetition_penalty=True,
            ),
            created=int(time.time()),
        )

    async def check(self, request: Request) -> None:
        """Raises Refused, EngineDead."""
        engine = self._running()
        admit(request, engine.codec, engine.limits)

    def submit(self, request: Request) -> None:
        """Raises Refused, EngineDead."""
        engine = self._running()
        if engine.requests.dead:
            raise EngineDead(engine.requests.dead)
        live, ids = admit(request, engine.codec, engine.limits)
        if live.generated >= live.budget:  # the worker was lost after the last token and before the finish reason
            engine.requests.end(live, Piece(request.id, text=live.text.flush(), finish="length"))
            return
        live.handle = self._generate(engine, request, ids, live.budget - live.generated)
        engine.requests.add(live)

    def _running(self) -> Loaded:
        if self._engine is None or self._stopping:
            raise EngineDead("the engine is not running")
        return self._engine

    def _generate(self, engine: Loaded, request: Request, ids: list[int], max_tokens: int) -> Any:
        """Submit to TensorRT-LLM and return its handle. Raises Refused if the request is at fault, else EngineDead."""
        library = engine.library
        try:
            sampling = trtllm_sampling.keywords(
                request.sampling, max_tokens, engine.end_ids, library.guided, timed=self._settings.return_perf_metrics
            )
            return engine.llm.generate_async(
                inputs=ids,
                sampling_params=library.sampling(**sampling),
                streaming=True,
                **self._extras(engine, request),
            )
        except (library.request_error, ValueError, TypeError) as error:
            raise Refused(Failure("invalid_value", f"the engine refused the request: {error}", 400)) from error
        except Exception as error:  # noqa: BLE001 - a dead process or a submit after shutdown: not the request's fault
            engine.requests.die(f"the engine failed at a submit: {type(error).__name__}: {error}")
        raise EngineDead(engine.requests.dead)

    def _extras(self, engine: Loaded, request: Request) -> dict[str, Any]:
        """Keywords of generate_async that depend on the settings and on the installed version."""
        chosen: dict[str, Any] = {}
        if self._settings.waiting_queue_policy == "priority" and "priority" in engine.optional:
            chosen["priority"] = min(1.0, request.priority + (RESUMED_AHEAD if request.past else 0.0))
        if trtllm_args.SALT in engine.optional:
            chosen[trtllm_args.SALT] = hmac.digest(self._salt_key, request.tenant.encode(), "sha256").hex()
        if name := self._settings.adapter:
            number = list(self._settings.lora).index(name) + 1
            path = self._settings.lora[name]
            chosen["lora_request"] = engine.library.lora_request(lora_name=name, lora_int_id=number, lora_path=path)
        return chosen

    def cancel(self, request_id: str) -> None:
        """Idempotent; the last piece comes once the engine has released the request."""
        if self._engine is not None:
            self._engine.requests.abort(request_id)

    def stats(self) -> Stats:
        slots, engine = self._settings.max_batch_size, self._engine
        if engine is None:
            return Stats(slots=slots)
        reader, evicts = engine.reader, self._settings.scheduler_policy == "MAX_UTILIZATION"
        running, used = (
            min(len(engine.requests), slots),
            None if reader is None else trtllm_stats.kv_used(reader.latest),
        )
        return Stats(
            slots=slots,
            running=running,
            waiting=len(engine.requests) - running,
            kv_tokens=engine.kv_tokens,
            kv_used=engine.requests.held(whole=not evicts) if used is None else used,
            evicts=evicts,
            evictions=0 if reader is None else reader.paused,
            steps=engine.requests.steps,
        )

    def health(self) -> EngineHealth:
        if self._engine is None:
            return EngineHealth(False, "the engine is not running")
        reason = self._engine.requests.dead or self._engine.requests.stalled(self._settings.watchdog_s)
        if not reason and not trtllm_stats.answers(self._engine.llm):
            reason = "TensorRT-LLM says it is not healthy"
        return EngineHealth(not reason, reason)

    async def stop(self) -> None:
        """Abort running requests and free the GPUs, in bounded time; what still hangs then ends with the process."""
        if self._stopping or self._engine is None:
            return
        self._stopping = True
        await self._engine.requests.close(self._grace_s)
        if self._engine.reader is not None:
            self._engine.reader.stop()
        if not await ends_in_time(self._engine.llm.shutdown, self._shutdown_s):
            log.error(
                "TensorRT-LLM did not shut down: end the process with os._exit", extra={"after_s": self._shutdown_s}
            )


def admit(request: Request, codec: Codec, limits: EngineLimits) -> tuple[Live, list[int]]:
    """Validate a request. Returns its in-flight state and the token ids to continue. Raises Refused."""
    prompt, past = codec.prompt_ids(request.prompt), codec.past_ids(request.past)
    budget = trtllm_sampling.budget(request.sampling, len(prompt), limits)
    failure = trtllm_sampling.refusal(request.sampling, prompt, limits)
    if failure is None and request.past_tokens < budget:
        failure = trtllm_sampling.unresumable(len(prompt), len(past), limits)
    if failure is not None:
        raise Refused(failure)
    text = TextStream(codec, request, prompt, past)
    return Live(request, text, len(prompt), budget, request.past_tokens), prompt + past


def load_library() -> Library:
    """Import TensorRT-LLM. Raises EngineDead when it is missing or incompatible."""
    os.environ.setdefault("TRTLLM_NO_USAGE_STATS", "1")  # it sends usage statistics by default
    try:
        import tensorrt_llm  # noqa: PLC0415 - heavy, and only there on a machine with a GPU
        from tensorrt_llm.executor import request, utils  # noqa: PLC0415
        from tensorrt_llm.llmapi import llm_args  # noqa: PLC0415
        from tensorrt_llm.sampling_params import GuidedDecodingParams, SamplingParams  # noqa: PLC0415

        return Library(
            version=str(getattr(tensorrt_llm, "__version__", "of unknown version")),
            llm=tensorrt_llm.LLM,
            llm_args=llm_args.TorchLlmArgs,
            sampling=SamplingParams,
            guided=GuidedDecodingParams,
            kv_cache=llm_args.KvCacheConfig,
            scheduler=llm_args.SchedulerConfig,
            capacity_policy=llm_args.CapacitySchedulerPolicy,
            waiting_policy=getattr(llm_args, "WaitingQueuePolicy", None),
            lora_request=request.LoRARequest,
            request_error=utils.RequestError,
            gpus=int(importlib.import_module("torch").cuda.device_count()),
        )
    except (ImportError, AttributeError, OSError) as error:  # OSError: a CUDA library it links to is missing
        raise EngineDead(
            f"TensorRT-LLM cannot be used: {error}. It needs a machine with NVIDIA GPUs and about version "
            f"{trtllm_args.ANCHOR}, see docs/tensorrt-llm.md"
        ) from error


async def ends_in_time(shutdown: Callable[[], None], limit_s: float) -> bool:
    """Run LLM.shutdown(), which may block forever, in a daemon thread. Returns whether it ended within `limit_s`."""
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


def build(model: str, settings: TrtllmSettings, data_dir: Path) -> TrtllmEngine:
    """See workers.engines.registry; nothing of this engine lies in the data folder."""
    return TrtllmEngine(model, settings)
