"""POST /v1/chat/completions and /v1/completions: the walk of one request on one screen.

Validate and accept (admission), then tell the answer as it comes (reply): as a stream, in one piece, or, if the client
prefers not to wait, as a job to come back for.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from api.admission import admit, header
from api.jobs import accepted_response
from api.openai.schemas import Kind
from api.services import Services
from api.stream.reply import StreamReply, WholeReply


class Completions:
    """The endpoint of one kind, as a bare ASGI application: the layers around a function cost more than its work."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An OpenAI chat.completion or text_completion, whole or streamed. Raises ApiError before it has begun."""
        services: Services = scope["app"].state.services
        waits = not prefers_async(header(scope, b"prefer"))
        admitted = await admit(services, scope, receive, self._kind, waits=waits)
        reply: ASGIApp
        if not waits:
            services.relay.close(admitted.inbox)
            admitted.headers["Preference-Applied"] = "respond-async"
            reply = await accepted_response(services, admitted)
        elif admitted.request.stream:
            reply = StreamReply(services, admitted)
        else:
            reply = WholeReply(services, admitted)
        await reply(scope, receive, send)


def prefers_async(prefer: str) -> bool:
    """`Prefer: respond-async` (RFC 7240)."""
    return bool(prefer) and any(
        preference.split(";")[0].strip() == "respond-async" for preference in prefer.lower().split(",")
    )
