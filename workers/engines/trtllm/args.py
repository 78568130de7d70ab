"""Keyword arguments of TensorRT-LLM: builds them from the settings, and checks that the installed version takes them.

Pure: the caller passes the classes of the installed package; this module imports nothing and touches no device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.engine import Sampling
from workers.engines.trtllm.settings import TrtllmSettings
from workers.engines.trtllm.text import keywords

ANCHOR = "1.3.0rc23"
"""The version of TensorRT-LLM that this adapter was written for."""

PASSED = (
    *("model", "tokenizer", "tensor_parallel_size", "pipeline_parallel_size", "moe_expert_parallel_size"),
    *("max_batch_size", "max_num_tokens", "stream_interval", "enable_iter_perf_stats", "return_perf_metrics"),
)
"""Settings that are passed as the TorchLlmArgs field of the same name, unless they are empty or off."""

SALT = "cache_salt"
"""The keyword of generate_async that keeps the cached prompts of tenants apart."""

OPTIONAL = frozenset({"priority", SALT})
"""Prototype keywords of generate_async, passed if the installed version has them."""

REFUSED_EXTRA = {
    "quant_config": "quantisation is read from the checkpoint; the KV cache's type is kv_cache.dtype",
    "calib_config": "quantisation is read from the checkpoint: calibrate it before",
    "build_config": "it belongs to the TensorRT engine backend, which is gone",
    "batching_type": "it belongs to the TensorRT engine backend; this one always batches in flight",
    "normalize_log_probs": "it belongs to the TensorRT engine backend",
    "workspace": "it belongs to the TensorRT engine backend",
    "fast_build": "it belongs to the TensorRT engine backend",
    "enable_build_cache": "it belongs to the TensorRT engine backend",
    "backend": "only the PyTorch backend is driven here, and it is the default",
    "trust_remote_code": "code out of a checkpoint is not run",
    "skip_tokenizer_init": "the tokenizer is needed to render chats and to find stop strings",
    "num_postprocess_workers": "each step would send every request's whole output again",
    "max_beam_width": "beam search rewrites what readers have seen",
    "gather_generation_logits": "it forces a single process and nothing here reads logits",
}
"""TorchLlmArgs keywords (or keywords of older versions) that this adapter refuses, and why."""

OWNED = frozenset(TrtllmSettings.__struct_fields__) | {
    *("max_seq_len", "enable_chunked_prefill", "kv_cache_config", "scheduler_config", "speculative_config"),
    *("guided_decoding_backend", "enable_lora", "lora_config"),
}
"""TorchLlmArgs keywords that follow from settings."""

SPECULATION_NEEDS = {
    "Eagle3": ("speculative_model", "max_draft_len"),
    "Draft_Target": ("speculative_model", "max_draft_len"),
    "NGram": ("max_draft_len",),
}

REFUSED_SPECULATION = {
    "Lookahead": "the PyTorch backend does not have it",
    "Medusa": "the PyTorch backend does not have it",
    "Eagle": "it would silently become Eagle3: ask for Eagle3 and give an Eagle3 draft model",
    "User_Provided": "it needs a Python object, which a settings file cannot hold",
    "SaveState": "it records hidden states and does not serve",
}


@dataclass(frozen=True, slots=True)
class Library:
    """The parts of the installed package that this adapter uses, and the number of GPUs."""

    version: str
    llm: Any
    llm_args: Any
    """The TorchLlmArgs class, for inspection only: constructing one touches the device."""
    sampling: Any
    guided: Any
    kv_cache: Any
    scheduler: Any
    capacity_policy: Any
    waiting_policy: Any
    """None where the installed version has no such enumeration."""
    lora_request: Any
    request_error: type[Exception]
    """The error of a single request. Any other error counts as a dead engine: older versions have no class for that."""
    gpus: int
    floats: Any
    """Makes a tensor of a list of numbers."""
    thinking: Any
    """The logits processor that ends reasoning; None where the installed version has none."""

    @property
    def tags(self) -> bool:
        """Guided decoding can begin at a tag, as calls of tools do."""
        return "structural_tag" in (accepted(self.guided) or ())


def folders(settings: TrtllmSettings) -> dict[str, str]:
    """All folders from which the engine loads files, or their names at the hub, by the setting."""
    draft = str(settings.speculative.get("speculative_model", ""))
    named = {"model": settings.model, "tokenizer": settings.tokenizer, "speculative.speculative_model": draft}
    named |= {f"lora.{name}": path for name, path in settings.lora.items()}
    return {name: path for name, path in named.items() if path or name.startswith("lora.")}


def fields(settings: TrtllmSettings, context: int, *, salted: bool = True) -> dict[str, Any]:
    """The keyword arguments of LLM(...) as plain data.

    Args:
        context: maximum sequence length in tokens.
        salted: this version can separate the cached prompts of tenants; without that, cache reuse is switched off.
    """
    optional = {name: getattr(settings, name) for name in PASSED}
    optional |= {"speculative_config": settings.speculative, "guided_decoding_backend": settings.guided_decoding}
    scheduler: dict[str, str] = {"capacity_scheduler_policy": settings.scheduler_policy}
    if settings.waiting_queue_policy == "priority":
        scheduler["waiting_queue_policy"] = "priority"
    chosen: dict[str, Any] = {name: value for name, value in optional.items() if value} | {
        "max_seq_len": context,
        "enable_chunked_prefill": settings.chunked_prefill,
        "kv_cache_config": settings.kv_cache | ({} if salted else {"enable_block_reuse": False}),
        "scheduler_config": scheduler,
    }
    if count := len(settings.lora):
        # As plain data, because the class's module differs between versions.
        paths, rank = list(settings.lora.values()), settings.max_lora_rank
        lora = {"lora_dir": paths, "max_lora_rank": rank, "max_loras": count, "max_cpu_loras": count}
        chosen |= {"enable_lora": True, "lora_config": lora}
    return chosen | settings.extra


def arguments(plain: dict[str, Any], library: Library) -> dict[str, Any]:
    """The result of `fields`, with the two configurations as the package's objects. Raises what its classes raise."""
    scheduler = dict(plain["scheduler_config"])
    scheduler["capacity_scheduler_policy"] = getattr(library.capacity_policy, scheduler["capacity_scheduler_policy"])
    if "waiting_queue_policy" in scheduler:
        scheduler["waiting_queue_policy"] = library.waiting_policy.PRIORITY
    return plain | {
        "kv_cache_config": library.kv_cache(**plain["kv_cache_config"]),
        "scheduler_config": library.scheduler(**scheduler),
    }


# --- what the installed version supports -----------------------------------------------------------------------------


def accepted(target: Any) -> frozenset[str] | None:
    """The keywords that a class or function takes; None if that cannot be inspected (native code, **kwargs)."""
    declared = getattr(target, "model_fields", None)
    if declared:
        return frozenset(declared)
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def needs(plain: dict[str, Any]) -> list[str]:
    """Names of the package without which this configuration cannot be served, for example "SamplingParams.end_id"."""
    call = ["inputs", "sampling_params", "streaming", *(["lora_request"] if "lora_config" in plain else [])]
    members = {
        "LLM": ["generate_async", "shutdown", "tokenizer"],
        "LLM.generate_async": call,
        "TorchLlmArgs": list(plain),
        "SamplingParams": list(keywords(Sampling(), 1, [0])),
        "GuidedDecodingParams": ["json", "json_object"] if "guided_decoding_backend" in plain else [],
        "KvCacheConfig": list(plain["kv_cache_config"]),
        "SchedulerConfig": list(plain["scheduler_config"]),
    }
    return [f"{symbol}.{name}" for symbol, names in members.items() for name in names]


def missing(plain: dict[str, Any], library: Library) -> list[str]:
    """Names that this configuration needs and the installed version lacks."""
    known = {
        "LLM": frozenset(dir(library.llm)),
        "LLM.generate_async": accepted(getattr(library.llm, "generate_async", None)),
        "TorchLlmArgs": accepted(library.llm_args),
        "SamplingParams": accepted(library.sampling),
        "GuidedDecodingParams": accepted(library.guided),
        "KvCacheConfig": accepted(library.kv_cache),
        "SchedulerConfig": accepted(library.scheduler),
    }
    lacking = []
    for name in needs(plain):
        symbol, _, member = name.rpartition(".")
        names = known[symbol]
        lacking += [name] if names is not None and member not in names else []
    return lacking


def optional_call(library: Library) -> frozenset[str]:
    """The OPTIONAL keywords that the installed generate_async takes."""
    return OPTIONAL & (accepted(library.llm.generate_async) or frozenset())


# --- can this configuration work at all? ----------------------------------------------------------------------------


def refusals(settings: TrtllmSettings, gpus: int, exists: Callable[[str], bool]) -> list[str]:
    """Why this configuration cannot be served, one sentence per reason; empty if none is known. TensorRT-LLM itself
    checks the values of its own fields."""
    chosen, extra = settings.speculative, settings.extra
    reasons = [] if settings.model else ["model is empty: name a checkpoint folder"]
    for name, path in folders(settings).items():
        is_folder = name.startswith("lora.") or path.startswith(("/", "./", "../", "~"))  # else a name at the hub
        reasons += [f"{name}: the folder {path!r} does not exist"] if is_folder and not exists(path) else []
    experts, tensor = settings.moe_expert_parallel_size, settings.tensor_parallel_size
    needed = tensor * settings.pipeline_parallel_size * int(extra.get("context_parallel_size", 1))
    if experts and tensor % experts:
        reasons.append(f"moe_expert_parallel_size {experts} does not divide tensor_parallel_size {tensor}")
    fraction = settings.kv_cache.get("free_gpu_memory_fraction", 0.9)
    if not isinstance(fraction, int | float) or not 0 < fraction < 1:
        reasons.append(f"kv_cache.free_gpu_memory_fraction must lie between 0 and 1, got {fraction!r}")
    if needed > gpus:
        reasons.append(f"it needs {needed} GPUs, this machine shows {gpus}: use smaller parallel sizes")
    reasons += [f"extra.{name} is a setting of its own: use that" for name in extra if name in OWNED]
    reasons += [f"extra.{name} cannot be used: {REFUSED_EXTRA[name]}" for name in extra if name in REFUSED_EXTRA]
    kind = str(chosen.get("decoding_type", ""))
    if chosen and not kind:
        reasons.append("speculative.decoding_type is missing: for example Eagle3, MTP, NGram or Draft_Target")
    missing = [name for name in SPECULATION_NEEDS.get(kind, ()) if not chosen.get(name)]
    reasons += [f"speculative.{name} is missing: {kind} needs it" for name in missing]
    if kind in REFUSED_SPECULATION:
        reasons.append(f"speculative.decoding_type {kind!r} cannot be used: {REFUSED_SPECULATION[kind]}")
    if settings.adapter and settings.adapter not in settings.lora:
        reasons.append(f"adapter {settings.adapter!r} is not in lora (known: {', '.join(settings.lora) or 'none'})")
    return reasons
