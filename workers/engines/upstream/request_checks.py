"""Request checks: refuses what no server of a model can ever do. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.engine import Failure, Refused, Request
from workers.engines.upstream.continuation import ladder
from workers.engines.upstream.places.endpoint import ServerEndpoint


def refuse(request: Request, context: int, endpoints: Sequence[ServerEndpoint]) -> None:
    """Raises Refused. `context`: tokens of prompt and answer."""
    if request.task is not None:
        return
    _refuse_biases(request.sampling.logit_bias, endpoints)
    prompt, wanted = request.prompt, request.sampling.max_tokens or 1
    if isinstance(prompt, str) or ladder.is_chat(request):
        if not len(prompt):
            raise Refused(Failure("invalid_request_error", "the prompt is empty", 400, "prompt"))
        return
    if len(prompt) + wanted > context:
        message = f"the prompt has {len(prompt)} tokens and {wanted} more are asked for, but the context is {context}"
        raise Refused(Failure("context_length_exceeded", message, 400, "prompt"))


def _refuse_biases(biases: Mapping[int, float], endpoints: Sequence[ServerEndpoint]) -> None:
    """Raises Refused for a token that a server is known to lack: llama-server would ignore it."""
    known = [each.facts.vocabulary for each in endpoints if each.facts is not None and each.facts.vocabulary]
    if biases and known and max(biases) >= min(known):
        message = f"logit_bias: token {max(biases)} is not one of this model's {min(known)}"
        raise Refused(Failure("invalid_request_error", message, 400, "logit_bias"))
