"""A plug-in engine that answers with a JSON list of as many texts as the prompt says; each attempt writes others. It
cannot continue one."""

import secrets
from collections.abc import Callable

from echo_engine import Answer, Echo
from msgspec.structs import replace

from penstock.engine import ModelCard, Request, Step


class Json(Echo):
    async def start(self, on_step: Step, on_phase: Callable[[str], None]) -> ModelCard:
        card = await super().start(on_step, on_phase)
        return replace(card, capabilities=replace(card.capabilities, json_schema=True))

    def submit(self, request: Request) -> None:
        count, author = int(request.prompt[-1].content), secrets.token_hex(4)  # type: ignore[union-attr]
        words = ["[", *(f'"{author}-{number}",' for number in range(count)), f'"{author}-end"]']
        self._answers[request.id] = Answer(words[request.past_tokens :], "stop")
