"""An engine for Penstock that answers each request with the words of its prompt, one word per step."""

import asyncio
from collections.abc import Callable

import msgspec

from penstock.engine import Capabilities, ChatTurn, EngineHealth, ModelCard, Piece, Request, Stats, Step, task_health

MAX_OUTPUT = 4095
"""Words of an answer, at most."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Its options in penstock.toml: `options.slots` and `options.step_ms`."""

    slots: int = 64
    step_ms: float = 10.0


class Answer:
    """What a running request still has to say, and how it ends."""

    def __init__(self, words: list[str], finish: str) -> None:
        self.words, self.finish = words, finish


class Echo:
    """See penstock.engine.Engine for what each method promises."""

    Settings = Settings

    def __init__(self, model: str, settings: Settings) -> None:
        self._model, self._settings = model, settings
        self._answers: dict[str, Answer] = {}

    async def start(self, on_step: Step, on_phase: Callable[[str], None]) -> ModelCard:
        on_phase("loading nothing")
        self._task = asyncio.create_task(self._run(on_step))
        can = Capabilities(logprobs=-1)  # none
        context = 1 + MAX_OUTPUT  # a prompt counts as one token
        return ModelCard(
            name=self._model, engine="echo", context=context, max_output=MAX_OUTPUT, capabilities=can, created=0
        )

    async def check(self, request: Request) -> None:
        """Every prompt can be echoed, a long one up to the limit."""

    def submit(self, request: Request) -> None:
        parts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        text = " ".join(part.content if isinstance(part, ChatTurn) else str(part) for part in parts)
        for stop in filter(None, request.sampling.stop):
            text = text.partition(stop)[0]
        words, limit = text.split(), request.sampling.max_tokens
        if limit is None:
            limit = MAX_OUTPUT
        finish = "stop" if len(words) <= limit else "length"
        self._answers[request.id] = Answer(words[request.past_tokens : limit], finish)

    def cancel(self, request_id: str) -> None:
        if request_id in self._answers:
            self._answers[request_id] = Answer([], "cancelled")

    def stats(self) -> Stats:
        return Stats(slots=self._settings.slots, running=len(self._answers))

    def health(self) -> EngineHealth:
        return task_health(self._task)

    async def stop(self) -> None:
        self._task.cancel()

    async def _run(self, on_step: Step) -> None:
        while True:
            await asyncio.sleep(self._settings.step_ms / 1000)
            if pieces := [self._next(request_id) for request_id in list(self._answers)]:
                on_step(pieces)

    def _next(self, request_id: str) -> Piece:
        answer = self._answers[request_id]
        if answer.words:
            return Piece(request_id, text=f"{answer.words.pop(0)} ", n=1, prompt_tokens=1)
        del self._answers[request_id]
        return Piece(request_id, finish=answer.finish, prompt_tokens=1)
