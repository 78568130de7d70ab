"""Keyword arguments of TensorRT-LLM, built from the settings, and what the installed version can do with them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from penstock.engine import Capabilities, EngineDead, Sampling
from workers.engines.trtllm.facts import Facts
from workers.engines.trtllm.settings import TrtllmSection, TrtllmSettings
from workers.engines.trtllm.text import keywords

ADAPTERS = "adapters"
"""The model's table, as messages name it."""

PASSED = (
    *("model", "tensor_parallel_size", "pipeline_parallel_size", "moe_expert_parallel_size"),
    *("max_batch_size", "max_num_tokens", "stream_interval", "enable_iter_perf_stats", "return_perf_metrics"),
)
"""Settings that are passed as the TorchLlmArgs field of the same name, unless they are empty or off."""

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
    "custom_tokenizer": "it names code to import; the tokenizer's folder is the setting tokenizer",
    "skip_tokenizer_init": "the tokenizer is needed to render chats and to find stop strings",
    "num_postprocess_workers": "each step would send every request's whole output again",
    "max_beam_width": "beam search rewrites what readers have seen",
    "gather_generation_logits": "it forces a single process and nothing here reads logits",
}
"""TorchLlmArgs keywords (or keywords of older versions) that this adapter refuses, and why."""

OWNED = frozenset(TrtllmSection.__struct_fields__) | {
    *("max_seq_len", "max_input_len", "enable_chunked_prefill", "kv_cache_config", "scheduler_config"),
    *("speculative_config", "guided_decoding_backend", "enable_lora", "lora_config"),
}
"""TorchLlmArgs keywords that follow from settings."""

MERGED = {"kv_cache_config": "kv_cache", "scheduler_config": "scheduler", "speculative_config": "speculative"}
"""Fields of a settings file of TensorRT-LLM that join the setting of the same content, which has precedence."""

OWN_SCHEDULER = {"capacity_scheduler_policy": "scheduler_policy", "waiting_queue_policy": "waiting_queue_policy"}
"""Fields of SchedulerConfig, each with the setting from which it follows."""

SAMPLED = "allow_advanced_sampling"
"""Field of a speculative config without which versions that have it decode greedily, whatever a request asks for."""
DRAFTED = ("speculative_model", "max_draft_len")
SPECULATION_NEEDS = {
    **dict.fromkeys(("Eagle3", "Draft_Target", "PARD", "DFlash"), DRAFTED),
    **dict.fromkeys(("NGram", "SA"), ("max_draft_len",)),
}

REFUSED_SPECULATION = {
    "Lookahead": "the PyTorch backend does not have it",
    "Medusa": "the PyTorch backend does not have it",
    "Eagle": "it would silently become Eagle3: ask for Eagle3 and give an Eagle3 draft model",
    "User_Provided": "it needs a Python object, which a settings file cannot hold",
    "SaveState": "it records hidden states and does not serve",
}


def with_config(settings: TrtllmSettings, config: Mapping[str, Any]) -> TrtllmSettings:
    """The settings above what a settings file of TensorRT-LLM says; its fields without a setting join `extra`.

    Raises EngineDead."""
    if wrong := [name for name in MERGED if not isinstance(config.get(name, {}), dict)]:
        raise EngineDead(f"config: {', '.join(wrong)} must hold fields: write name: value")
    joined = {own: _deep(config.get(name, {}), getattr(settings, own)) for name, own in MERGED.items()}
    extra = {name: value for name, value in config.items() if name not in MERGED}
    return msgspec.structs.replace(settings, extra=_deep(extra, settings.extra), **joined)


def _deep(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both, `above` where they differ; maps in both are joined likewise."""
    both = {name for name, value in above.items() if isinstance(value, dict) and isinstance(below.get(name), dict)}
    return below | above | {name: _deep(below[name], above[name]) for name in both}


def ranks(settings: TrtllmSettings) -> int:
    """Copies of the scheduler, each with `max_batch_size` and a KV cache of its own: several with attention DP."""
    return settings.tensor_parallel_size if settings.extra.get("enable_attention_dp") else 1


def folders(settings: TrtllmSettings) -> dict[str, str]:
    """All folders from which the engine loads files, or their names at the hub, by the setting."""
    draft = str(settings.speculative.get("speculative_model", ""))
    named = {"model": settings.model, "tokenizer": settings.tokenizer, "speculative.speculative_model": draft}
    named |= {f"{ADAPTERS}.{name}": path for name, path in settings.adapters.items()}
    return {name: path for name, path in named.items() if path}


def fields(settings: TrtllmSettings, context: int, facts: Facts, modules: Collection[str] = ()) -> dict[str, Any]:
    """The keyword arguments of LLM(...), plain data throughout: TensorRT-LLM makes its own objects of it.

    Args:
        context: maximum sequence length in tokens.
        modules: that the adapters change, all together.
    """
    greedy = facts.has(f"DecodingBaseConfig.{SAMPLED}") and settings.speculative
    speculative = {SAMPLED: True} | settings.speculative if greedy else settings.speculative
    alone = {} if facts.cache_salt else {"enable_block_reuse": False}  # cached prompts of tenants are not kept apart
    optional = {name: getattr(settings, name) for name in PASSED}
    optional |= {"speculative_config": speculative, "guided_decoding_backend": settings.guided_decoding}
    scheduler = settings.scheduler | {"capacity_scheduler_policy": settings.scheduler_policy}
    if settings.waiting_queue_policy != "fcfs":
        scheduler["waiting_queue_policy"] = settings.waiting_queue_policy
    chosen: dict[str, Any] = {name: value for name, value in optional.items() if value} | {
        "tokenizer": settings.tokenizer or settings.model,  # else an adapter's folder would be read for one
        "max_seq_len": context,
        "max_input_len": context,  # MAX_UTILIZATION cuts a paused request to this, and its default is 1024
        "enable_chunked_prefill": settings.chunked_prefill,
        "kv_cache_config": settings.kv_cache | alone,
        "scheduler_config": scheduler,
    }
    if count := len(settings.adapters):
        lora = {
            "lora_dir": [*settings.adapters.values()],
            "max_lora_rank": settings.max_lora_rank,
            "max_loras": min(count, settings.max_loras),
            "max_cpu_loras": min(count, max(settings.max_loras, settings.max_cpu_loras)),
        }
        if modules:  # of several adapters, TensorRT-LLM does not read them
            lora["lora_target_modules"] = [*modules]
        chosen |= {"enable_lora": True, "lora_config": lora}
    return chosen | settings.extra


# --- what the installed version supports -----------------------------------------------------------------------------


def needs(plain: dict[str, Any]) -> list[str]:
    """Names of the package without which this configuration cannot be served, for example "SamplingParams.end_id"."""
    call = ["inputs", "sampling_params", "streaming", *(["lora_request"] if "lora_config" in plain else [])]
    members = {
        "LLM": ["generate_async", "shutdown", "tokenizer"],
        "LLM.generate_async": call,
        "TorchLlmArgs": list(plain),
        "SamplingParams": list(keywords(Sampling(), 1, [0])),
        "LoRARequest": ["lora_name", "lora_int_id", "lora_path"] if "lora_config" in plain else [],
        "GuidedDecodingParams": ["json", "json_object"] if "guided_decoding_backend" in plain else [],
        "KvCacheConfig": list(plain["kv_cache_config"]),
        "SchedulerConfig": list(plain["scheduler_config"]),
    }
    return [f"{symbol}.{name}" for symbol, names in members.items() for name in names]


def capabilities(facts: Facts, settings: TrtllmSettings, chats: Mapping[str, bool], logits: int) -> Capabilities:
    """What a model can do on this version.

    Args:
        chats: capabilities that follow from its chat template.
        logits: numbers in the output of a step; 0: unknown.
    """
    guided = bool(settings.guided_decoding) and facts.grammar_errors
    fused = samples_fused(settings)
    penalties = facts.penalties and (not fused or bool(settings.speculative.get("enable_penalty")))
    return Capabilities(
        **dict.fromkeys(("token_prompts", "ignore_eos", "tokenize"), True),
        **chats,
        top_k=facts.top_k,
        min_p=facts.min_p and not fused,
        logprobs=-1 if fused else facts.max_logprobs if facts.alternatives else 0,
        json_schema=guided,
        forced_tools=guided and chats["chat"],
        logit_bias=facts.logit_bias and logits > 0 and not fused,
        penalties=penalties and facts.prompt_ignore_length,  # OpenAI's do not count the prompt
        repetition_penalty=penalties,
        seed=facts.seed and not fused,
    )


def samples_fused(settings: TrtllmSettings) -> bool:
    """Speculation in one model samples in its own kernels, which take temperature, top_p and top_k and nothing else."""
    return bool(settings.speculative.get("decoding_type", "NGram") != "NGram")


# --- can this configuration work at all? ----------------------------------------------------------------------------


def refusals(
    settings: TrtllmSettings, gpus: int, exists: Callable[[str], bool], config: Mapping[str, Any] | None = None
) -> list[str]:
    """Why this configuration cannot be served, one sentence per reason; empty if none is known. TensorRT-LLM itself
    checks the values of its own fields.

    Args:
        settings: with those of the settings file (`with_config`).
        config: the fields of that file, only to say where a refused one stands.
    """
    chosen, extra = settings.speculative, settings.extra
    reasons = [] if settings.model else ["model is empty: name a checkpoint folder"]
    for name, path in folders(settings).items():
        is_folder = name.startswith(ADAPTERS) or path.startswith(("/", "./", "../", "~"))  # else a name at the hub
        reasons += [f"{name}: the folder {path!r} does not exist"] if is_folder and not exists(path) else []
    experts, tensor = settings.moe_expert_parallel_size, settings.tensor_parallel_size
    contexts = extra.get("context_parallel_size", 1)
    if not isinstance(contexts, int) or contexts < 1:
        reasons.append(f"context_parallel_size must be a number of GPUs, got {contexts!r}")
        contexts = 1
    needed = tensor * settings.pipeline_parallel_size * contexts
    if experts and tensor % experts:
        reasons.append(f"moe_expert_parallel_size {experts} does not divide tensor_parallel_size {tensor}")
    fraction = settings.kv_cache.get("free_gpu_memory_fraction")
    if fraction is not None and (not isinstance(fraction, int | float) or not 0 < fraction <= 1):
        reasons.append(f"kv_cache.free_gpu_memory_fraction must be above 0 and at most 1, got {fraction!r}")
    if needed > gpus:
        several = "use smaller parallel sizes, or start the worker on several machines with trtllm-llmapi-launch"
        reasons.append(f"it needs {needed} GPUs, this machine shows {gpus}: {several}")
    places = {name: "config" if name in (config or {}) else "extra" for name in extra}
    reasons += [f"{places[name]}.{name} is a setting of its own: use that" for name in extra if name in OWNED]
    reasons += [f"{places[name]}.{name} cannot be used: {why}" for name, why in REFUSED_EXTRA.items() if name in extra]
    for name, own in OWN_SCHEDULER.items():
        reasons += [f"scheduler.{name} is a setting of its own: use {own}"] if name in settings.scheduler else []
    kind = str(chosen.get("decoding_type", ""))
    if chosen and not kind:
        reasons.append("speculative.decoding_type is missing: for example Eagle3, MTP, NGram or Draft_Target")
    missing = [name for name in SPECULATION_NEEDS.get(kind, ()) if not chosen.get(name)]
    reasons += [f"speculative.{name} is missing: {kind} needs it" for name in missing]
    if kind in REFUSED_SPECULATION:
        reasons.append(f"speculative.decoding_type {kind!r} cannot be used: {REFUSED_SPECULATION[kind]}")
    return reasons
