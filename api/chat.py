"""POST /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/rerank, /tokenize and /detokenize: one request from
validation to its answer.

Each is a job: it waits in the same lanes under the same quotas, and any worker of the model answers it.

api/admission.py validates and accepts the job; api/stream/reply.py answers with a token stream or in one piece. A
client that sends `Prefer: respond-async` gets 202 and the job instead.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from api.admission import admit, header
from api.jobs import accepted_response
from api.openai.schemas import Kind
from api.services import Services
from api.stream.reply import StreamReply, WholeReply


class JobEndpoint:
    """Endpoint of one kind of request, as plain ASGI: the framework's wrappers would cost more than its work."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, whole or streamed. Raises ApiError before the answer starts."""
        services: Services = scope["app"].state.services
        waits = not prefers_async(header(scope, b"prefer"))
        admitted = await admit(services, scope, receive, self._kind, waits=waits)
        reply: ASGIApp
        if waits:
            reply = (StreamReply if admitted.request.streams else WholeReply)(services, admitted)
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
