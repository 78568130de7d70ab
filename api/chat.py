"""POST /v1/chat/completions and /v1/completions: the walk of one request on one screen.

Validate and accept (admission), then tell the answer as it comes (reply): as a stream, in one piece, or, if the client
prefers not to wait, as a job to come back for.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from api.admission import admit, services_of
from api.jobs import accepted_response
from api.reply import StreamReply, WholeReply
from api.schemas import Kind


class Completions:
    """The endpoint of one kind, as a bare ASGI application: the layers around a function cost more than its work."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An OpenAI chat.completion or text_completion, whole or streamed. Raises ApiError before it has begun."""
        reply = await _complete(Request(scope, receive, send), self._kind)
        await reply(scope, receive, send)


async def _complete(request: Request, kind: Kind) -> ASGIApp:
    services = services_of(request)
    if prefers_async(request):
        admitted = await admit(services, request, kind, waits=False)
        services.relay.close(admitted.inbox)
        admitted.headers["Preference-Applied"] = "respond-async"
        return await accepted_response(services, admitted)
    admitted = await admit(services, request, kind, waits=True)
    return StreamReply(services, admitted) if admitted.request.stream else WholeReply(services, admitted)


def prefers_async(request: Request) -> bool:
    """`Prefer: respond-async` (RFC 7240)."""
    preferences = request.headers.get("prefer", "").lower().split(",")
    return any(preference.split(";")[0].strip() == "respond-async" for preference in preferences)
