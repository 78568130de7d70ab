"""POST /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/rerank, /tokenize and /detokenize: one request from
validation to its answer.

Each is a job: it waits in the same lanes under the same quotas, and any worker of the model answers it.

api/admission.py validates and accepts the job; api/stream/reply.py answers with a token stream or in one piece. A
client that sends `Prefer: respond-async` gets 202 and the job instead. GET /v1/models lists the configured models,
whether or not a worker serves them now.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.admission import admit, caller_of, header, may_use, model_of, services_of
from api.anthropic.answer import model_object, model_page
from api.anthropic.errors import is_asked
from api.jobs import accepted_response, as_json
from api.openai.schemas import Kind
from api.services import Services
from api.stream.reply import Reply, StreamReply, WholeReply
from streaming.fleet.aliases import Target
from streaming.fleet.settings import served_names


class JobEndpoint:
    """Endpoint of one kind of request, as plain ASGI: the framework's wrappers would cost more than its work."""

    admit = staticmethod(admit)
    """How a request becomes a job."""
    streamed: type[Reply] = StreamReply
    whole: type[Reply] = WholeReply
    queues = True
    """Whether its clients may ask not to wait."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, whole or streamed. Raises ApiError before the answer starts."""
        services: Services = scope["app"].state.services
        prefers = b"prefer" in scope["state"]["headers"] and self.queues
        waits = not (prefers and prefers_async(header(scope, b"prefer")))
        admitted = await self.admit(services, scope, receive, self._kind, waits=waits)
        reply: ASGIApp
        if waits:
            reply = (self.streamed if admitted.job.stream else self.whole)(services, admitted)
        else:
            services.relay.close(admitted.buffer)
            admitted.headers["Preference-Applied"] = "respond-async"
            reply = await accepted_response(services, admitted)
        await reply(scope, receive, send)


def prefers_async(prefer: str) -> bool:
    """Whether a Prefer header asks for `respond-async` (RFC 7240)."""
    return bool(prefer) and any(
        preference.split(";")[0].strip() == "respond-async" for preference in prefer.lower().split(",")
    )


# --- the models -------------------------------------------------------------------------------------------------------


async def listing(request: Request) -> Response:
    """List the models.

    GET /v1/models: list every configured model with its adapters, then the aliases that the caller may use.
    """
    services, caller = services_of(request), caller_of(request)
    await services.learn_cards()
    names = [*served_names(services.models), *services.aliases.listed(caller.tenant)]
    meant = [(name, services.meant(caller.tenant, name)) for name in names]
    shown = [_model(services, name, each) for name, each in meant if each and may_use(caller, name, *each.names)]
    return as_json(model_page(shown) if _by_anthropic(request) else {"object": "list", "data": shown})


async def show(request: Request) -> Response:
    """Describe a model.

    GET /v1/models/{model}: show one model or adapter, or what an alias means; 404 if it is not configured.
    """
    services, name = services_of(request), request.path_params["model"]
    meant = model_of(services, caller_of(request), name)
    await services.learn_cards()
    shown = _model(services, name, meant)
    return as_json(model_object(shown) if _by_anthropic(request) else shown)


def _by_anthropic(request: Request) -> bool:
    """Whether the client expects the answer in the form of Anthropic's API."""
    return is_asked(request.url.path, request.scope["state"]["headers"])


async def tokenizer_info(request: Request) -> Response:
    """Show the special tokens of a model.

    GET /tokenizer_info[?model=]: show the special tokens of a model, the default or first one if none is named, as
    vLLM does; lm-eval looks here for a tokenizer.
    """
    services = services_of(request)
    name = request.query_params.get("model") or services.aliases.default or next(iter(services.models))
    card = services.cards.get(model_of(services, caller_of(request), name).model)
    return as_json({"bos_token": None, "eos_token": None} | (card.special_tokens if card else {}))


def _model(services: Services, name: str, meant: Target) -> dict[str, Any]:
    """Render OpenAI's model object, with context length and capabilities once a worker has loaded the model. `name`:
    its own, or an alias. An adapter names its model as vLLM's do."""
    card = services.cards.get(meant.model)
    known = {"context_length": card.context, "capabilities": msgspec.to_builtins(card.capabilities)} if card else {}
    created = card.created if card else 0
    shown: dict[str, Any] = {"id": name, "object": "model", "created": created, "owned_by": "penstock"}
    shown |= {"root": meant.model, "parent": meant.model} if meant.adapter else {}
    return shown | ({} if meant.full_model == name else {"alias_of": meant.full_model}) | known
