"""Cases of llama.cpp's server tests that Penstock does not pass, each with its reason.

Whole files are left out where they are about a thing that Penstock does not have. Each other case is run.
"""

from __future__ import annotations

PORT, KEYED_PORT, TOOLS_PORT = "PORT", "CONFORMANCE_KEYED_PORT", "CONFORMANCE_TOOLS_PORT"
"""Variables with the ports of the server of the real model, of one with an API key, and of one that knows tools."""

OWN_FIELDS = "fields of llama.cpp alone: timings, settings, progress, prompts"
TOKENIZER = "counts of its own tokenizer"
INPUTS = "inputs of llama.cpp alone: 400 that names the field"
TEMPLATES = "/apply-template, `__verbose`, and templates of its command line: the model's own is used"
SLOTS = "/slots: 404, /admin/overview has the workers"
CORS = "a preflight is 204, for the origins in [api] cors_origins alone"

LEFT_OUT = {
    "test_compat_anthropic": "Anthropic's API: 404, its clients need a gateway that translates",
    "test_compat_gcp": "the protocol of Vertex AI's containers",
    "test_infill": "/infill, for editors",
    "test_kv_keep_only_active": "its own cache",
    "test_lora": "adapters that a server changes while it runs",
    "test_mcp_servers": "its own client of MCP servers",
    "test_metrics": "the names of its own metrics: docs/metrics.md has Penstock's",
    "test_proxy": "a proxy for its page in the browser",
    "test_router": "its own router, which loads models by request",
    "test_sleep": "a server that gives its memory back while it is idle",
    "test_slot_save": "/slots: its own cache in files",
    "test_speculative": "its own drafts of tokens",
    "test_stream": "its own /v1/stream: /v1/jobs/{id}/stream",
    "test_template": TEMPLATES,
    "test_tools_builtin": "tools that the server itself runs",
    "test_vision_api": "images: 400 that names the part",
}
"""Files whose cases are not run."""

LLAMA_CASES = (
    *((f"{file}::", reason) for file, reason in LEFT_OUT.items()),
    (r"test_basic::test_server_multiple_addresses", "Penstock listens at one address"),
    (r"test_basic::test_server_props", "/props: 404, /v1/models has the context"),
    (r"test_basic::test_server_slots", SLOTS),
    (r"test_basic::test_server_models", "the model has the name that the tests of streams expect"),
    (r"test_basic::test_no_ui", "no page at /: the console is at /console"),
    (r"test_basic::test_server_model_aliases_and_tags", "no other names and no tags of a model"),
    (r"test_compat_oai_responses::test_responses_stream_with_llama_telemetry", OWN_FIELDS),
    (r"test_tokenize::test_tokenize_with_bos", "the first token of its own tiny model"),
    (r"test_tokenize::test_tokenize_with_pieces", "/detokenize has the text of each token"),
    (r"test_ignore_eos::", OWN_FIELDS),
    (r"test_ctx_shift::test_ctx_shift_(?:enabled|disabled_short_prompt)", OWN_FIELDS),
    (r"test_ctx_shift::test_ctx_shift_disabled_long_prompt", TOKENIZER),
    (r"test_ctx_shift::test_ctx_shift_disabled_stream", "its tiny model never ends a text by itself"),
    (r"test_chat_completion::test_chat_completion_cached_tokens", TOKENIZER),
    (r"test_chat_completion::test_chat_completion\[.*(?:chatml|This is not a chat template)", TEMPLATES),
    (r"test_chat_completion::test_chat_template_continue_final_message",
     "continue_final_message is ignored, and named in X-Ignored-Fields"),
    (r"test_chat_completion::test_(?:chat_template|apply_chat_template)", TEMPLATES),
    (r"test_chat_completion::test_(?:chat_completion_stream|logprobs_stream)",
     "a stream says the role in the chunk of the first text, not in one before it"),
    (r"test_chat_completion::test_completion_with_(?:json_schema|grammar)",
     "400 that names response_format with type json_schema"),
    (r"test_chat_completion::test_completion_with_response_format\[response_format[01]-",
     "type json_object with a schema: 400 that names type json_schema"),
    (r"test_chat_completion::test_invalid_chat_completion_req\[messages7\]",
     "two messages of the assistant in a row are accepted"),
    (r"test_chat_completion::test_context_size_exceeded",
     "OpenAI's error: type invalid_request_error, code context_length_exceeded"),
    (r"test_chat_completion::test_(?:\w+_timings_per_token|return_progress|verbose_debug)", OWN_FIELDS),
    (r"test_chat_completion::test_chat_completions_token_count",
     "/v1/chat/completions/input_tokens: /tokenize takes a conversation"),
    (r"test_completion::test_(?:completion|completion_stream|completion_response_fields)\[", OWN_FIELDS),
    (r"test_completion::test_completion_prompt_cache", OWN_FIELDS),
    (r"test_completion::test_cache_vs_nocache_prompt", "its own CI leaves it out"),
    (r"test_completion::test_json_prompt_no_mtmd", INPUTS),
    (r"test_completion::test_completion_with_tokens_input", INPUTS),
    (r"test_completion::test_n_probs", "`n_probs` of /completion: /v1/completions has logprobs"),
    (r"test_completion::test_logit_bias\[False-", "a bias of a text: 400, it is of a token's id"),
    (r"test_completion::test_cancel_request", SLOTS),
    (r"test_embedding::test_embedding_multiple_with_fa", TOKENIZER),
    (r"test_embedding::test_embedding_mixed_input\[-False\]", "an empty text is a 400, as at OpenAI"),
    (r"test_embedding::test_embedding_(?:mixed_input\[input(?:[35789]|10)-|content_text_same_as_string)", INPUTS),
    (r"test_embedding::test_embedding_pooling_none", "no vector for each token"),
    (r"test_embedding::test_embedding_error_prompt_too_long", "the error says that the text exceeds the context"),
    (r"test_embedding::test_embedding_usage_multiple", TOKENIZER),
    (r"test_rerank::test_rerank_tei", "the shape of text-embeddings-inference: 400 that names documents"),
    (r"test_security::test_access_static_assets_without_api_key", "no page at /: the console is at /console"),
    (r"test_security::test_correct_api_key_anthropic_header", "a key is sent as a Bearer token alone"),
    (r"test_security::test_cors_(?:options|origins)", CORS),
    (r"test_security::test_cors_proxy", "a proxy for its page in the browser"),
    (r"test_security::test_local_media_file\[.*-True\]", "images: 400 that names the part"),
    (r"test_tool_call::test_completion_without_tool_call_fast\[.*tools1-None",
     "a choice of auto is the model's: the simulated one calls"),
)  # fmt: skip
"""Beginnings of names, and why. In order: the first one that matches counts."""
