"""POST /v1/embeddings, /v1/rerank, /tokenize and /detokenize: one request from validation to its whole answer.

Each is a job like a chat: it waits in the same lanes under the same quotas, and any worker of the model answers it.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from api.admission import admit, header
from api.chat import prefers_async
from api.jobs import accepted_response
from api.openai.rendering import to_json
from api.openai.schemas import Kind
from api.openai.tasks.answers import task_answer_in_slices
from api.services import Services
from api.stream.reply import WholeReply
from streaming.jobs.codec import Delta, Terminal


class TaskEndpoint:
    """Endpoint of one kind of task, as plain ASGI like the chat endpoint."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer once the job has ended. Raises ApiError before the answer starts."""
        services: Services = scope["app"].state.services
        waits = not prefers_async(header(scope, b"prefer"))
        admitted = await admit(services, scope, receive, self._kind, waits=waits)
        reply: ASGIApp = TaskReply(services, admitted)
        if not waits:
            services.relay.close(admitted.buffer)
            admitted.headers["Preference-Applied"] = "respond-async"
            reply = await accepted_response(services, admitted)
        await reply(scope, receive, send)


class TaskReply(WholeReply):
    """Sends the answer to a task."""

    async def _whole(self, terminal: Terminal, rows: list[Delta]) -> bytes:
        work = task_answer_in_slices(self._job, terminal, rows)
        return to_json(await self._services.store_client.turns.run(work))
