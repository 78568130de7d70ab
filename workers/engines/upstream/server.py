"""Servers of a model: what kind they are, what a probe finds, and the model card that follows from it.

Sources: the servers' code and documents, as of vLLM 0.32, SGLang 0.5.23, llama.cpp b11434, TensorRT-LLM 1.3,
text-generation-inference 3 and the hosted APIs in November 2026.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import msgspec

from penstock.engine import MAX_LOGPROBS, Capabilities, ModelCard
from workers.engines.reasoning import EFFORT_NAMES, END
from workers.engines.upstream.http import KEY_REFUSED, BrokenReply, ConnectError, Reply, UpstreamClient, error_of
from workers.engines.upstream.settings import UpstreamSettings

ChatIds = Literal["", "template", "tokenize"]
Prefill = Literal["", "continue_final_message", "prefix", "trailing"]
Reattach = Literal["", "stream", "key"]

DEFAULT_CONTEXT = 8192


class ServerFacts(Capabilities, frozen=True, kw_only=True):
    """What is known of one server: what its model can do, and how it is asked."""

    kind: str = "other"
    model: str = ""
    """The model's name there."""
    context: int = 0
    """Tokens of prompt + completion; 0: not known."""
    vocabulary: int = 0
    """Number of its tokens; 0: not known."""
    slots: int = 0
    """Requests that it runs at once; 0: not known."""
    token_ids: bool = False
    """Whether the stream of /completions tells the ids of its tokens."""
    chat_token_ids: bool = False
    """Whether the stream of a chat tells the ids of its tokens."""
    chat_ids: ChatIds = ""
    """How a conversation becomes a prompt of /completions: its "template" renders it as text, or "tokenize" as ids."""
    mixed: bool = False
    """Whether a prompt may mix texts and ids."""
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
    all_tokens: int = 0
    """The value of top_k that turns it off."""
    hides_reasoning: bool = False
    """Whether the settings say that reasoning is not shown."""
    logprobs: int = -1
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
    forced_tools: bool = True
    named_tools: bool = True
    """Whether it forces a call of a named function, although others are offered too."""
    embedding_size: int = 0
    """Numbers of a vector; 0: not known."""
    completion_limit: bool = False
    """Whether a chat's limit is max_completion_tokens."""

    @property
    def template_chat(self) -> bool:
        """Whether chats are rendered there first and then sent as a prompt, so that they continue as one."""
        return self.chat_ids == "template"

    def capabilities(self) -> Capabilities:
        """What follows for requests."""
        can = {name: getattr(self, name) for name in Capabilities.__struct_fields__}
        can["forced_tools"] &= self.tools
        can["tools_with_schema"] &= self.tools and self.json_schema
        can["embedding_dimensions"] &= self.embed
        found = {"reattaches": bool(self.reattach), "tokenize_chats": self.tokenize and bool(self.chat_ids)}
        return Capabilities(**can | found | {"passes_fields": True})


SAMPLING: dict[str, Any] = dict.fromkeys(("top_k", "min_p", "repetition_penalty", "logit_bias", "ignore_eos"), True)
SELF_HOSTED: dict[str, Any] = {**SAMPLING, "token_prompts": True, "token_ids": True, "tokenize": True,
                               "repetition_span": True, "logprobs": MAX_LOGPROBS, "json_schema": True}  # fmt: skip
"""What llama-server, vLLM and SGLang have in common."""
CONTINUES: Prefill = "continue_final_message"
KINDS: dict[str, ServerFacts] = {
    "llama-server": ServerFacts(**SELF_HOSTED, chat_ids="template", mixed=True, penalties_span=True, named_tools=False),
    "vllm": ServerFacts(**SELF_HOSTED, chat_token_ids=True, chat_ids="tokenize", embedding_dimensions=True,
                        prefill=CONTINUES, all_tokens=-1, running_usage=True, priority=-1, reasoning_effort=True,
                        salted=True, prompt_logprobs=True),
    # SGLang refuses token ids on streamed chats with 400.
    "sglang": ServerFacts(**SELF_HOSTED, prefill=CONTINUES, all_tokens=-1, running_usage=True, priority=1,
                          reasoning_effort=True, aborts=True),
    "trtllm": ServerFacts(**SAMPLING, token_prompts=True, running_usage=True, strict=True),
    "tgi": ServerFacts(),
    "ollama": ServerFacts(prefill="trailing", json_schema=True, forced_tools=False, reasoning_effort=True),
    "mistral": ServerFacts(text_prompts=False, prefill="prefix", json_schema=True, strict=True, reasoning_effort=True),
    "deepseek": ServerFacts(text_prompts=False, prefill="prefix", logprobs=MAX_LOGPROBS, reasoning_effort=True),
    "openai": ServerFacts(text_prompts=False, logprobs=MAX_LOGPROBS, json_schema=True, strict=True, logit_bias=True,
                          completion_limit=True, tools_with_schema=True, embedding_dimensions=True,
                          reasoning_effort=True),
    "penstock": ServerFacts(reattach="key", penalties=False, tools=False),  # its card says more
    "other": ServerFacts(reasoning_effort=True),  # passed on
}  # fmt: skip

HOSTS = {"api.openai.com": "openai", "api.mistral.ai": "mistral", "api.deepseek.com": "deepseek"}
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
    ours = {"chat": True, "tools": can.tools or can.forced_tools, "json_resume": False, "tool_resume": False}
    return msgspec.structs.replace(facts, **msgspec.structs.asdict(can) | ours)


def of(kind: str, **known: object) -> ServerFacts:
    """The facts of a kind, with what is known of this server."""
    return msgspec.structs.replace(KINDS[kind], kind=kind, **known)


def without_adapters(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The models of a list; its adapters name theirs."""
    return [each for each in entries if not each.get("parent")]


def card_of(model: str, settings: UpstreamSettings, known: Sequence[ServerFacts]) -> ModelCard:
    """The card of a model that these servers compute, at least one: what all of them can do. Vectors of different
    lengths cannot be compared, so such servers make none together."""
    each = [facts.capabilities() for facts in known]
    least = {name: min(getattr(one, name) for one in each) for name in Capabilities.__struct_fields__}
    sizes = {facts.embedding_size for facts in known}
    context = min([facts.context for facts in known if facts.context], default=DEFAULT_CONTEXT)
    return ModelCard(
        name=model,
        engine="upstream",
        context=context,
        max_output=min(settings.max_output or context, context),
        default_output=settings.default_output,
        capabilities=Capabilities(**least | {"embed": least["embed"] and len(sizes - {0}) <= 1}),
        withheld=settings.withhold_fields,
        embedding_size=max(sizes),
        created=int(time.time()),
    )


def lacking(card: ModelCard, facts: ServerFacts) -> str:
    """Why a server cannot stand for the card that other servers gave; "" if it can."""
    if facts.context and facts.context < card.context:
        return f"its context is {facts.context} tokens, and the others' is {card.context}"
    can, must = facts.capabilities(), card.capabilities
    sizes = facts.embedding_size, card.embedding_size
    if must.embed and all(sizes) and sizes[0] != sizes[1]:
        return "its vectors have {} numbers, and the others' have {}".format(*sizes)
    named = [name for name in Capabilities.__struct_fields__ if name != "reattaches"]  # which refuses nothing
    lacks = [name for name in named if getattr(can, name) < getattr(must, name)]
    return f"it lacks {', '.join(lacks)}" if lacks else ""


HOSTED = tuple(HOSTS.values())
LOOKUP = "/streams/lookup"
"""llama-server's list of the replies that it keeps, behind its base."""
EMBEDDING_NAME = "embed"
"""Part of the names of hosted models that make vectors."""
GAUGES = {
    "vllm": ("vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    "sglang": ("sglang:num_queue_reqs", "sglang:full_token_usage"),
    "llama-server": ("llamacpp:requests_deferred", ""),
    "tgi": ("tgi_queue_size", ""),
}
"""By kind, the names of the gauges of waiting requests and of the share of the KV cache in use."""


class ProbeFailed(Exception):
    """The server cannot be used now. `lasting`: nor later, unless somebody changes settings. `starting`: it is there,
    and says that it is not ready yet (503), as while it loads its model."""

    def __init__(self, reason: str, *, lasting: bool = False, starting: bool = False) -> None:
        super().__init__(reason)
        self.lasting, self.starting = lasting, starting


class ServerProbe:
    """Probe of one server.

    It generates nothing, but has the server make one vector and rank one document. What a server cannot be asked comes
    from its kind.
    """

    def __init__(
        self, client: UpstreamClient, settings: UpstreamSettings, model: str, key: str, adapters: Collection[str] = ()
    ) -> None:
        """`model`: its name here. `key`: an API key, or "". `adapters`: names that it must list, if it lists any."""
        self._client, self._settings, self._model, self._key = client, settings, model, key
        self._adapters = adapters

    async def facts(self) -> ServerFacts:
        """Raises ProbeFailed."""
        entries = await self._models()
        entry = self._chosen(entries)
        kind, props = await self._kind(entry)
        n_ctx = _object(props.get("default_generation_settings")).get("n_ctx") or props.get("max_total_tokens")
        known: dict[str, Any] = {
            "model": str(entry.get("id") or self._settings.name or self._model),
            "context": self._settings.context
            or _whole(n_ctx or entry.get("max_model_len") or entry.get("context_length")),
            "vocabulary": _whole(_object(entry.get("meta")).get("n_vocab")),
            "slots": _whole(props.get("total_slots") or props.get("max_concurrent_requests")),
        }
        if kind == "llama-server":
            if (reply := await self._reply("GET", "/health")).status != 200:  # it loads its model
                raise ProbeFailed(f"it is not ready (HTTP {reply.status} of /health)")
            template = str(props.get("chat_template") or "")
            known |= {"chat_ids": "template" if template else "", "tools": "tools" in template}
            senses = _object(props.get("modalities"))
            known |= {"images": senses.get("vision") is True, "audio": senses.get("audio") is True}
            known |= {"reasoning": END in template, "reasoning_effort": any(each in template for each in EFFORT_NAMES)}
            if isinstance(await self._tried(LOOKUP, {"conversation_ids": []}), list):
                known["reattach"] = "stream"  # it gives a reply again that it keeps under a name
        elif kind == "sglang":
            loads = (await self._page("/v1/loads")).get("loads")
            each_loads = [_object(each) for each in loads] if isinstance(loads, list) else []
            known["slots"] = sum(_whole(each.get("max_running_requests")) for each in each_loads)
        elif kind == "vllm":
            body = {"model": known["model"], "messages": [{"role": "user", "content": "a"}]}
            found = await self._tried("/tokenize", body | {"add_generation_prompt": True}, based=False)
            if not isinstance(_object(found).get("tokens"), list):
                known |= {"chat_ids": "", "tokenize": False}
        facts = of(kind, **known)
        if kind == "penstock":  # a try of its tasks would be a job, and wake workers
            facts = of_card(facts, entry.get("capabilities"))
        elif kind in HOSTED:  # which bill a try
            facts = msgspec.structs.replace(facts, embed=EMBEDDING_NAME in facts.model.lower())
        else:
            facts = msgspec.structs.replace(facts, **await self._tasks(facts.model))
        wanted = self._settings.reasoning
        hides = {} if wanted is None else {"reasoning": wanted, "hides_reasoning": not wanted}
        return msgspec.structs.replace(facts, **hides, **dict.fromkeys(self._settings.abilities, True))

    async def _tasks(self, model: str) -> dict[str, Any]:
        """What a try shows of vectors and rankings."""
        vectors = _object(await self._tried("/embeddings", {"model": model, "input": "a"})).get("data")
        first = _object(vectors[0]).get("embedding") if isinstance(vectors, list) and vectors else None
        size = len(first) if isinstance(first, list) else 0
        ranked = _object(await self._tried("/rerank", {"model": model, "query": "a", "documents": ["b"]}))
        return {"embed": size > 0, "embedding_size": size, "rerank": isinstance(ranked.get("results"), list)}

    async def _tried(self, path: str, body: dict[str, Any], *, based: bool = True) -> Any:
        """The reply to a try; None if it is refused."""
        with suppress(ProbeFailed):
            reply = await self._reply("POST", path, body, based=based)
            return reply.json() if reply.status == 200 else None
        return None

    async def names(self) -> list[str]:
        """The names of its models. Raises ProbeFailed."""
        return [str(each.get("id")) for each in without_adapters(await self._models())]

    async def _models(self) -> list[Mapping[str, Any]]:
        reply = await self._reply("GET", "/models", based=True)
        if reply.status in KEY_REFUSED:
            problem = "does not take the key of key_env" if self._key else "needs an API key: set options.key_env"
            raise ProbeFailed(f"it {problem} (HTTP {reply.status})", lasting=True)
        if reply.status == 404:
            return []  # some gateways have no such list
        decoded = reply.json()
        if reply.status != 200:
            error = error_of(decoded)
            said = f"HTTP {reply.status}" + (f": {error.words}" if error else "")
            raise ProbeFailed(said, starting=reply.status == 503)
        data = decoded.get("data") if isinstance(decoded, Mapping) else None
        if not isinstance(data, list):
            raise ProbeFailed("its /models is not that of an OpenAI-compatible server: the address may lack /v1")
        return [each for each in data if isinstance(each, Mapping)]

    def _chosen(self, entries: list[Mapping[str, Any]]) -> Mapping[str, Any]:
        """The served model's entry, which may be that of an adapter. Raises ProbeFailed if it has several models and
        none has its name, and if it lacks an adapter."""
        by_name, wanted = {str(each.get("id")): each for each in entries}, self._settings.name or self._model
        if by_name and (lacks := [each for each in self._adapters if each not in by_name]):
            raise ProbeFailed(f"it lists no adapter {lacks[0]!r}: load it there, or leave it out of models.*.adapters")
        if wanted in by_name:
            return by_name[wanted]
        models = without_adapters(entries)
        if not models:
            return {}
        if len(models) == 1 and not self._settings.name:
            return models[0]
        shown = ", ".join([str(each.get("id")) for each in models][:8])
        raise ProbeFailed(f"it has no model {wanted!r}: set options.name to one of {shown}", lasting=True)

    async def _kind(self, entry: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """The kind of the server, and what its own page of properties says."""
        known = self._settings.kind or HOSTS.get(self._client.address.host, "")
        if not known:
            known = OWNERS.get(str(entry.get("owned_by")), "")
        if known in ("", "llama-server"):
            props = await self._page("/props")
            if known or "total_slots" in props:
                return "llama-server", props
        if known in ("", "tgi"):
            info = await self._page("/info")
            if known or "max_concurrent_requests" in info:
                return "tgi", info
        return known or "other", {}

    async def _page(self, path: str) -> Mapping[str, Any]:
        """A page of the server's own as an object; empty if it has none."""
        reply = await self._reply("GET", path)
        return _object(reply.json() if reply.status == 200 else None)

    async def _reply(self, method: str, path: str, body: Any = None, *, based: bool = False) -> Reply:
        """`based`: the path is behind the base, such as /v1. Raises ProbeFailed."""
        try:
            return await self._client.ask(method, path, body, self._key, based=based)
        except (ConnectError, BrokenReply) as error:
            raise ProbeFailed(str(error)) from None


async def gauges(client: UpstreamClient, kind: str, key: str) -> tuple[float, float] | None:
    """How many requests wait in the server, and which share of its KV cache is used; None: it does not say."""
    if kind not in GAUGES:
        return None
    try:
        reply = await client.ask("GET", "/metrics", None, key, based=False)
    except (ConnectError, BrokenReply):
        return None
    waiting, share = [_gauge(reply.body, name) if name and reply.status == 200 else None for name in GAUGES[kind]]
    return None if waiting is None else (waiting, share or 0.0)


def _gauge(page: bytes, name: str) -> float | None:
    """The sum of a gauge over its labels; None if the page has none."""
    pattern = rb"^" + re.escape(name.encode()) + rb"(?:\{[^}\n]*\})? ([0-9.eE+-]+)"
    found = re.findall(pattern, page, re.MULTILINE)
    try:
        return sum(map(float, found)) if found else None
    except ValueError:
        return None


def _object(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31 else 0
