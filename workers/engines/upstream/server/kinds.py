"""Server kinds: what each kind of OpenAI-compatible server can do, before its own answers correct it. Pure.

Sources: the servers' sources and documents, as of vLLM 0.32, SGLang 0.5.23, llama.cpp b11434, TensorRT-LLM 1.3,
text-generation-inference 3 and the hosted APIs in November 2026.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.engine import MAX_LOGPROBS, Capabilities

ChatIds = Literal["", "template", "tokenize"]
Prefill = Literal["", "continue_final_message", "prefix", "trailing"]
Reattach = Literal["", "stream", "key"]

DEFAULT_CONTEXT = 8192


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one server."""

    kind: str = "other"
    version: str = ""
    model: str = ""
    """The model's name there."""
    context: int = 0
    """Tokens of prompt + completion; 0: not known."""
    vocabulary: int = 0
    """Number of its tokens; 0: not known."""
    slots: int = 0
    """Requests that it runs at once; 0: not known."""
    text: bool = True
    """Whether it takes raw prompts (/completions)."""
    token_prompts: bool = False
    """Whether /completions takes token ids, and leaves them as they are."""
    token_ids: bool = False
    """Whether the stream of /completions tells the ids of its tokens."""
    chat_token_ids: bool = False
    """Whether the stream of a chat tells the ids of its tokens."""
    chat_ids: ChatIds = ""
    """How a conversation becomes a prompt of /completions: its "template" renders it as text, or "tokenize" as ids."""
    mixed: bool = False
    """Whether a prompt may mix texts and ids."""
    tokenizes: bool = False
    """Whether /tokenize turns a text into ids."""
    prefill: Prefill = ""
    """How a chat continues the beginning of an answer."""
    reattach: Reattach = ""
    """How a generation is read again that goes on without its reader: as a "stream" that is kept under a name, or by
    the idempotency "key" of its job. The second is that of another Penstock."""
    penalties: bool = True
    penalties_span: bool = False
    """Whether penalties also count the tokens of the prompt, and so those of an earlier attempt."""
    repetition_span: bool = False
    """Whether repetition_penalty also counts the tokens of the prompt."""
    top_k: bool = False
    all_tokens: int = 0
    """The value of top_k that turns it off."""
    min_p: bool = False
    repetition_penalty: bool = False
    logit_bias: bool = False
    ignore_eos: bool = False
    reasoning: bool = False
    """Whether its answers are expected to hold reasoning, which is shown then."""
    reasoning_effort: bool = False
    hides_reasoning: bool = False
    """Whether the settings say that reasoning is not shown."""
    logprobs: int = -1
    json_schema: bool = False
    usage: bool = True
    """Whether it knows stream_options.include_usage."""
    running_usage: bool = False
    """Whether each chunk can tell the number of tokens so far."""
    strict: bool = False
    """Whether it refuses fields that it does not know."""
    priority: int = 0
    """1: it runs higher numbers first, -1: lower ones, 0: it knows no priority."""
    aborts: bool = False
    """Whether a call aborts a request. All of them notice a closed connection."""
    assumed: bool = False
    """Whether the server has not said yet what its model can do, but will."""
    salted: bool = False
    """Whether requests tell apart whose cached prompts they may reuse (cache_salt)."""
    tools: bool = True
    """Whether chats may offer tools."""
    tools_with_schema: bool = False
    """Whether a chat that offers tools may also have a response_format, which then holds its text alone."""
    forced_tools: bool = True
    """Whether it forces a call where that is asked for."""
    named_tools: bool = True
    """Whether it forces a call of a named function, although others are offered too."""
    embeds: bool = False
    """Whether it makes vectors, as a try has shown."""
    embedding_size: int = 0
    """Numbers of a vector; 0: not known."""
    embedding_dimensions: bool = False
    """Whether the length of vectors can be chosen, if its model allows that."""
    ranks: bool = False
    """Whether it ranks documents, as a try has shown."""
    detokenizes: bool = False
    """Whether /detokenize turns ids into a text."""
    completion_limit: bool = False
    """Whether a chat's limit is max_completion_tokens."""

    @property
    def template_chat(self) -> bool:
        """Whether chats are rendered there first and then sent as a prompt, so that they continue as one."""
        return self.chat_ids == "template"

    def capabilities(self) -> Capabilities:
        return Capabilities(
            chat=True,
            text_prompts=self.text,
            logprobs=self.logprobs,
            json_schema=self.json_schema,
            penalties=self.penalties,
            token_prompts=self.token_prompts,
            tools=self.tools,
            forced_tools=self.tools and self.forced_tools,
            tools_with_schema=self.tools and self.tools_with_schema and self.json_schema,
            reattaches=bool(self.reattach),
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            ignore_eos=self.ignore_eos,
            reasoning=self.reasoning,
            reasoning_effort=self.reasoning_effort,
            passes_fields=True,
            embed=self.embeds,
            embedding_dimensions=self.embeds and self.embedding_dimensions,
            rerank=self.ranks,
            tokenize=self.tokenizes and self.detokenizes,
            tokenize_chats=self.tokenizes and self.detokenizes and bool(self.chat_ids),
        )


KINDS: dict[str, ServerFacts] = {
    "llama-server": ServerFacts(
        token_prompts=True,
        token_ids=True,
        chat_ids="template",
        mixed=True,
        tokenizes=True,
        detokenizes=True,
        penalties_span=True,
        named_tools=False,
        top_k=True,
        min_p=True,
        repetition_penalty=True,
        repetition_span=True,
        logit_bias=True,
        ignore_eos=True,
        logprobs=MAX_LOGPROBS,
        json_schema=True,
    ),
    "vllm": ServerFacts(
        token_prompts=True,
        token_ids=True,
        chat_token_ids=True,
        chat_ids="tokenize",
        tokenizes=True,
        detokenizes=True,
        embedding_dimensions=True,
        prefill="continue_final_message",
        top_k=True,
        all_tokens=-1,
        min_p=True,
        repetition_penalty=True,
        repetition_span=True,
        logit_bias=True,
        ignore_eos=True,
        logprobs=MAX_LOGPROBS,
        json_schema=True,
        running_usage=True,
        priority=-1,
        reasoning_effort=True,
        salted=True,
    ),
    "sglang": ServerFacts(
        token_prompts=True,
        token_ids=True,  # not on streamed chats, which it refuses with 400
        tokenizes=True,
        detokenizes=True,
        prefill="continue_final_message",
        top_k=True,
        all_tokens=-1,
        min_p=True,
        repetition_penalty=True,
        repetition_span=True,
        logit_bias=True,
        ignore_eos=True,
        logprobs=MAX_LOGPROBS,
        json_schema=True,
        running_usage=True,
        priority=1,
        reasoning_effort=True,
        aborts=True,
    ),
    "trtllm": ServerFacts(
        token_prompts=True,
        top_k=True,
        min_p=True,
        repetition_penalty=True,
        logit_bias=True,
        ignore_eos=True,
        logprobs=-1,
        running_usage=True,
        strict=True,
    ),
    "tgi": ServerFacts(logprobs=-1, json_schema=False),
    "ollama": ServerFacts(prefill="trailing", json_schema=True, forced_tools=False, reasoning_effort=True),
    "mistral": ServerFacts(text=False, prefill="prefix", json_schema=True, strict=True, reasoning_effort=True),
    "deepseek": ServerFacts(text=False, prefill="prefix", logprobs=MAX_LOGPROBS, reasoning_effort=True),
    "openai": ServerFacts(
        text=False,
        logprobs=MAX_LOGPROBS,
        json_schema=True,
        strict=True,
        completion_limit=True,
        tools_with_schema=True,
        embedding_dimensions=True,
        logit_bias=True,
        reasoning_effort=True,
    ),
    "penstock": ServerFacts(reattach="key", logprobs=-1, penalties=False, tools=False),  # its card says more
    "other": ServerFacts(reasoning_effort=True),  # passed on
}

HOSTS = {
    "api.openai.com": "openai",
    "api.mistral.ai": "mistral",
    "api.deepseek.com": "deepseek",
}
"""Kinds of hosted servers by their names."""

OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama-server", "tensorrt_llm": "trtllm", "library": "ollama",
          "penstock": "penstock"}  # fmt: skip
"""Kinds by what /models says of a model's owner."""


def of_card(facts: ServerFacts, card: object) -> ServerFacts:
    """The facts of another Penstock, with the capabilities that it shows of the model."""
    try:
        can = msgspec.convert(card, Capabilities)
    except msgspec.ValidationError:
        return msgspec.structs.replace(facts, assumed=True)
    return msgspec.structs.replace(
        facts,
        text=can.text_prompts,
        token_prompts=can.token_prompts,
        tokenizes=can.tokenize,
        detokenizes=can.tokenize,
        penalties=can.penalties,
        top_k=can.top_k,
        min_p=can.min_p,
        repetition_penalty=can.repetition_penalty,
        logit_bias=can.logit_bias,
        ignore_eos=can.ignore_eos,
        reasoning=can.reasoning,
        reasoning_effort=can.reasoning_effort,
        logprobs=can.logprobs,
        json_schema=can.json_schema,
        tools=can.tools or can.forced_tools,
        forced_tools=can.forced_tools,
        tools_with_schema=can.tools_with_schema,
        embeds=can.embed,
        embedding_dimensions=can.embedding_dimensions,
        ranks=can.rerank,
    )


def of(kind: str, **known: object) -> ServerFacts:
    """The facts of a kind, with what is known of this server."""
    return msgspec.structs.replace(KINDS[kind], kind=kind, **known)
