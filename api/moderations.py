"""POST /v1/moderations: says which content rules of the caller's tenant find something in texts. No model is asked."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from api.admission import caller_of, read_body, services_of
from api.jobs import as_json, ignored_header
from api.openai.fields import StrictBody
from api.openai.json_body import read_object, validated

MAX_INPUTS = 1000


class ModerationPart(StrictBody):
    """A part of one input."""

    type: Literal["text"]
    text: str


Inputs = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]
Parts = Annotated[list[ModerationPart], Field(min_length=1, max_length=MAX_INPUTS)]


class ModerationRequest(StrictBody):
    """The body of POST /v1/moderations."""

    input: str | Inputs | Parts
    """A text; several, each with a result; or the parts of one."""
    model: Literal["content-rules"] | None = None
    """The rules themselves; no other model is asked."""

    @property
    def texts(self) -> list[str]:
        """The texts that have a result each."""
        if isinstance(self.input, str):
            return [self.input]
        parts = [each.text for each in self.input if isinstance(each, ModerationPart)]
        return ["\n".join(parts)] if parts else [each for each in self.input if isinstance(each, str)]


async def create(request: Request) -> Response:
    """Answer as OpenAI does, with rules as categories. A score is 1 or 0, because a rule matches or does not."""
    services = services_of(request)
    body = await read_body(request.scope, request.receive, services.settings.body_limit)
    asked = validated(ModerationRequest, read_object(body))
    found: list[dict[str, bool]] = [{} for _ in asked.texts]
    if services.content is not None:
        found = await services.content.moderated(caller_of(request).tenant, asked.texts, len(body))
    request_id = request.scope["state"]["request_id"]
    answer = {"id": f"modr-{request_id}", "model": "content-rules", "results": [_result(each) for each in found]}
    return as_json(answer, headers=ignored_header(asked))


def _result(found: dict[str, bool]) -> dict[str, Any]:
    return {
        "flagged": any(found.values()),
        "categories": found,
        "category_scores": {name: float(hit) for name, hit in found.items()},
        "category_applied_input_types": {name: ["text"] for name in found},
    }
