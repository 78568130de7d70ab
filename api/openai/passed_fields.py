"""Passed fields: what of a request goes on to the server of its model, which may know fields that nobody here reads.

An engine without the capability `passes_fields` gets nothing of it, nor does a model whose card is not known yet:
X-Ignored-Fields then names the fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from api.openai.errors import invalid_request
from api.openai.fields import PASSABLE
from api.openai.queued_request import QueuedRequest
from api.openai.refused_fields import CHAT_ONLY, COMPLETION_ONLY, CONSTRAINTS, UNSUPPORTED
from penstock.engine import ModelCard
from penstock.tools import Tools
from streaming.jobs.job import Prompt, has_extras, without_extras

ALL = "*"
"""In a card's `withheld`: every field."""
OURS = frozenset(
    {
        *UNSUPPORTED,
        *(CHAT_ONLY.keys() - {"reasoning_effort"}),
        *COMPLETION_ONLY,
        *CONSTRAINTS,
        # what Penstock decides: which answer is continued and how, what is streamed and counted, and in which order
        *(
            "model",
            "models",
            "fallbacks",
            "endpoint",
            "queue",
            "messages",
            "prompt",
            "input",
            "stream",
            "stream_options",
        ),
        *("n", "best_of", "stop", "background", "priority", "rid", "request_id", "client_metadata"),
        *("continue_final_message", "add_generation_prompt", "add_special_tokens", "input_ids", "prompt_embeds"),
        *("prompt_token_ids", "return_token_ids", "return_tokens_as_token_ids", "return_tokens", "return_progress"),
        *("n_predict", "max_new_tokens", "verbose", "detokenize", "return_hidden_states"),
        # what reaches other tenants' data, other machines, or the server itself
        *("cache_salt", "cache_prompt", "id_slot", "slot_id", "session_id", "session_params", "keep_alive"),
        *("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank"),
        *("custom_logit_processor", "lora_path", "api_key", "api_base", "api_version", "base_url", "headers"),
        *("extra_headers", "user_config", "extra_body", "extra_query", "extra_key", "routed_dp_rank"),
        *("disaggregated_params", "ec_transfer_params", "logits_processors", "lora_request", "lora", "options"),
        *("mm_processor_kwargs", "media_io_kwargs", "model_list", "custom_llm_provider", "deployment_id"),
        *("organization", "data_sources", "cache", "guardrails", "num_retries", "timeout", "preset", "provider"),
        *("plugins", "previous_response_id", "conversation_id", "use_beam_search"),
        # what would mean something else where an answer is continued
        *("truncate_prompt_tokens", "t_max_predict_ms"),
    }
)
"""Fields that are never passed on."""


OF_GATEWAYS = ("aws_", "azure_", "vertex_", "litellm_")
"""How fields begin with which a gateway is told where to send a request, and as whom."""


def passes(name: str, card: ModelCard | None) -> bool:
    """Whether a field of a request is passed on. `card`: of the model; None: not known."""
    if card is None or not card.capabilities.passes_fields or not PASSABLE.fullmatch(name):
        return False
    if name in OURS or name.startswith(OF_GATEWAYS):
        return False
    return {name, ALL}.isdisjoint(card.withheld)


def passed_fields(request: QueuedRequest, card: ModelCard | None) -> dict[str, Any]:
    """Return the fields of a request that its job has for the model's server. Raises ApiError (400)."""
    if card is None or not card.capabilities.passes_fields:
        return {}
    found = {**(request.model_extra or {}), **request.known_to_servers}
    found = {name: value for name, value in found.items() if value is not None and passes(name, card)}
    _check(found)
    return found


def passed_parts(prompt: Prompt, tools: Tools | None, card: ModelCard | None) -> tuple[Prompt, Tools | None]:
    """Return prompt and tools with those further fields of messages, calls and tools that are passed on. Raises
    ApiError (400)."""
    if not has_extras(prompt, tools):
        return prompt, tools
    if card is None or not card.capabilities.passes_fields or ALL in card.withheld:
        return without_extras(prompt, tools)
    _check({"messages": prompt, "tools": tools})
    return prompt, tools


def _check(fields: Mapping[str, Any]) -> None:
    """Raises ApiError (400) for a number that the log cannot hold."""
    for name, value in fields.items():
        try:
            msgspec.msgpack.encode(value)
        except OverflowError:
            raise invalid_request(f"{name} must hold numbers of at most 64 bits.", name) from None
