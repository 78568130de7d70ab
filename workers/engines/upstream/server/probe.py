"""Probe: asks a server what it is and what it can do, before it gets requests and after it was away.

It generates nothing, but has it make one vector and rank one document. What a server cannot be asked comes from its
kind (kinds.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from workers.engines.reasoning import EFFORT_NAMES, END
from workers.engines.upstream.http.client import BrokenReply, BufferedReply, ConnectError, UpstreamClient
from workers.engines.upstream.http.errors import KEY_REFUSED, error_of
from workers.engines.upstream.server import kinds
from workers.engines.upstream.server.kinds import ServerFacts
from workers.engines.upstream.settings import UpstreamSettings

TIMEOUT_S = 10.0
HOSTED = ("openai", "mistral", "deepseek")
LOOKUP = "/streams/lookup"
"""llama-server's list of the replies that it keeps, behind its base."""
EMBEDDING_NAME = "embed"
"""Part of the names of hosted models that make vectors."""
GAUGES = {
    "vllm": ("/metrics", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    "sglang": ("/metrics", "sglang:num_queue_reqs", "sglang:full_token_usage"),
    "llama-server": ("/metrics", "llamacpp:requests_deferred", ""),
    "tgi": ("/metrics", "tgi_queue_size", ""),
}
"""By kind: the page of the gauges, and their names for waiting requests and for the share of the KV cache in use."""


class ProbeFailed(Exception):
    """The server cannot be used now. `lasting`: nor later, unless somebody changes settings. `starting`: it is there,
    and says that it is not ready yet (503), as while it loads its model."""

    def __init__(self, reason: str, *, lasting: bool = False, starting: bool = False) -> None:
        super().__init__(reason)
        self.lasting, self.starting = lasting, starting


class ServerProbe:
    """Probe of one server."""

    def __init__(self, client: UpstreamClient, settings: UpstreamSettings, model: str, key: str) -> None:
        """`model`: its name here. `key`: an API key, or ""."""
        self._client, self._settings, self._model, self._key = client, settings, model, key

    async def facts(self) -> ServerFacts:
        """Raises ProbeFailed."""
        entries = await self._models()
        entry = self._chosen(entries)
        name = str(entry.get("id") or self._settings.name or self._model)
        kind, props = await self._kind(entry)
        known: dict[str, Any] = {"model": name, "version": await self._version(kind)}
        if context := self._settings.context or _context(entry, props):
            known["context"] = context
        known["vocabulary"] = _vocabulary(entry)
        if slots := _whole(props.get("total_slots") or props.get("max_concurrent_requests")):
            known["slots"] = slots
        if kind == "llama-server" and (reply := await self._get("/health")).status != 200:
            raise ProbeFailed(f"it is not ready (HTTP {reply.status} of /health)")  # it loads its model
        if kind == "sglang":
            known["slots"] = await self._sglang_slots()
        facts = kinds.of(kind, **known)
        if kind == "vllm" and not await self._tokenizes(name):
            facts = kinds.of(kind, **known, chat_ids="", tokenizes=False)
        if kind == "llama-server" and not props.get("chat_template"):
            facts = kinds.of(kind, **known, chat_ids="")
        if kind == "llama-server":
            template = str(props.get("chat_template", ""))
            knows_effort = any(name in template for name in EFFORT_NAMES)
            facts = msgspec.structs.replace(
                facts, tools="tools" in template, reasoning=END in template, reasoning_effort=knows_effort
            )
            if await self._keeps_replies():
                facts = msgspec.structs.replace(facts, reattach="stream")
        if kind == "penstock":
            facts = kinds.of_card(facts, entry.get("capabilities"))
        facts = await self._with_tasks(facts)
        wanted = self._settings.reasoning
        if wanted is None:
            return facts
        return msgspec.structs.replace(facts, reasoning=wanted, hides_reasoning=not wanted)

    async def _with_tasks(self, facts: ServerFacts) -> ServerFacts:
        """The facts, with what a try shows of vectors and rankings. Hosted servers, which bill it, are judged by the
        model's name."""
        if facts.kind in HOSTED:
            return msgspec.structs.replace(facts, embeds=EMBEDDING_NAME in facts.model.lower())
        if facts.kind == "penstock":  # a try would be a job, and wake workers
            return facts
        made = await self._tried("/embeddings", {"model": facts.model, "input": "a"})
        vectors = made.get("data")
        first = vectors[0].get("embedding") if isinstance(vectors, list) and vectors else None
        ranked = await self._tried("/rerank", {"model": facts.model, "query": "a", "documents": ["b"]})
        return msgspec.structs.replace(
            facts,
            embeds=isinstance(first, list) and bool(first),
            embedding_size=len(first) if isinstance(first, list) else 0,
            ranks=isinstance(ranked.get("results"), list),
        )

    async def _tried(self, path: str, body: dict[str, Any]) -> Mapping[str, Any]:
        """The reply to a try behind the base; empty if it is refused."""
        try:
            reply = await self._client.ask("POST", self._client.address.base + path, body, self._key, TIMEOUT_S)
        except (ConnectError, BrokenReply):
            return {}
        decoded = _json(reply) if reply.status == 200 else None
        return decoded if isinstance(decoded, Mapping) else {}

    async def names(self) -> list[str]:
        """The names of its models. Raises ProbeFailed."""
        return [str(each.get("id")) for each in await self._models()]

    async def _models(self) -> list[Mapping[str, Any]]:
        reply = await self._get("/models", based=True)
        if reply.status in KEY_REFUSED:
            problem = "does not take the key of key_env" if self._key else "needs an API key: set options.key_env"
            raise ProbeFailed(f"it {problem} (HTTP {reply.status})", lasting=True)
        if reply.status == 404:
            return []  # some gateways have no such list
        decoded = _json(reply)
        if reply.status != 200:
            words = error_of(decoded)
            said = f"HTTP {reply.status}" + (f": {words[0]}" if words else "")
            raise ProbeFailed(said, starting=reply.status == 503)
        data = decoded.get("data") if isinstance(decoded, Mapping) else None
        if not isinstance(data, list):
            raise ProbeFailed("its /models is not that of an OpenAI-compatible server: the address may lack /v1")
        return [each for each in data if isinstance(each, Mapping)]

    def _chosen(self, entries: list[Mapping[str, Any]]) -> Mapping[str, Any]:
        """The served model's entry. Raises ProbeFailed if it has several and none has its name."""
        names = [str(each.get("id")) for each in entries]
        wanted = self._settings.name or self._model
        if wanted in names:
            return entries[names.index(wanted)]
        if not entries:
            return {}
        if len(entries) == 1 and not self._settings.name:
            return entries[0]
        shown = ", ".join(names[:8])
        raise ProbeFailed(f"it has no model {wanted!r}: set options.name to one of {shown}", lasting=True)

    async def _kind(self, entry: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """The kind of the server, and what its own page of properties says."""
        known = self._settings.kind or kinds.HOSTS.get(self._client.address.host, "")
        if not known:
            known = kinds.OWNERS.get(str(entry.get("owned_by")), "")
        if known in ("", "llama-server"):
            props = await self._page("/props")
            if known or "total_slots" in props:
                return "llama-server", props
        if known in ("", "tgi"):
            info = await self._page("/info")
            if known or "max_concurrent_requests" in info:
                return "tgi", info
        return known or "other", {}

    async def _version(self, kind: str) -> str:
        path = {"vllm": "/version", "trtllm": "/version", "ollama": "/api/version"}.get(kind)
        page = await self._page(path) if path else {}
        return str(page.get("version", ""))[:32]

    async def _sglang_slots(self) -> int:
        loads = (await self._page("/v1/loads")).get("loads")
        if not isinstance(loads, list):
            return 0
        return sum(_whole(each.get("max_running_requests")) for each in loads if isinstance(each, Mapping))

    async def _tokenizes(self, name: str) -> bool:
        messages = [{"role": "user", "content": "a"}]
        body = {"model": name, "messages": messages, "add_generation_prompt": True}
        try:
            reply = await self._client.ask("POST", f"{self._client.address.root}/tokenize", body, self._key, TIMEOUT_S)
        except (ConnectError, BrokenReply):
            return False
        decoded = _json(reply)
        return reply.status == 200 and isinstance(decoded, Mapping) and isinstance(decoded.get("tokens"), list)

    async def _keeps_replies(self) -> bool:
        """Whether a llama-server gives a reply again that it keeps under a name."""
        path = self._client.address.base + LOOKUP
        try:
            reply = await self._client.ask("POST", path, {"conversation_ids": []}, self._key, TIMEOUT_S)
        except (ConnectError, BrokenReply):
            return False
        return reply.status == 200 and isinstance(_json(reply), list)

    async def _page(self, path: str) -> Mapping[str, Any]:
        """A page of the server's own as an object; empty if it has none."""
        reply = await self._get(path)
        decoded = _json(reply) if reply.status == 200 else None
        return decoded if isinstance(decoded, Mapping) else {}

    async def _get(self, path: str, *, based: bool = False) -> BufferedReply:
        address = self._client.address
        try:
            return await self._client.ask("GET", (address.base if based else address.root) + path, None, self._key)
        except (ConnectError, BrokenReply) as error:
            raise ProbeFailed(str(error)) from None


async def gauges(client: UpstreamClient, kind: str, key: str) -> tuple[float, float] | None:
    """How many requests wait in the server, and which share of its KV cache is used; None: it does not say."""
    if kind not in GAUGES:
        return None
    path, waiting, cache = GAUGES[kind]
    try:
        reply = await client.ask("GET", client.address.root + path, None, key, TIMEOUT_S)
    except (ConnectError, BrokenReply):
        return None
    if reply.status != 200:
        return None
    found = _gauge(reply.body, waiting)
    return None if found is None else (found, (_gauge(reply.body, cache) or 0.0) if cache else 0.0)


def _gauge(page: bytes, name: str) -> float | None:
    """The sum of a gauge over its labels; None if the page has none."""
    pattern = rb"^" + re.escape(name.encode()) + rb"(?:\{[^}\n]*\})? ([0-9.eE+-]+)"
    found = re.findall(pattern, page, re.MULTILINE)
    try:
        return sum(map(float, found)) if found else None
    except ValueError:
        return None


def _context(entry: Mapping[str, Any], props: Mapping[str, Any]) -> int:
    settings = props.get("default_generation_settings")
    own = settings.get("n_ctx") if isinstance(settings, Mapping) else None
    return _whole(own or props.get("max_total_tokens") or entry.get("max_model_len") or entry.get("context_length"))


def _vocabulary(entry: Mapping[str, Any]) -> int:
    meta = entry.get("meta")
    return _whole(meta.get("n_vocab")) if isinstance(meta, Mapping) else 0


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31 else 0


def _json(reply: BufferedReply) -> Any:
    try:
        return reply.json()
    except ValueError:
        return None
