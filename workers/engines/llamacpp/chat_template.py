"""Chat template renderer: turns a conversation into a prompt with the Jinja template of the model file.

Such a template is a program by the author of the model file, so it runs in a sandbox. This module knows no engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.engine import ChatTurn, Failure, Refused

_MAX_PROMPT_CHARS = 1 << 24
"""Characters of a rendered prompt; far more than any context holds."""


class TemplateBroken(Exception):
    """Raised when a model's chat template cannot be compiled; the model can still complete raw text."""


class _RaisedError(jinja2.TemplateError):
    """Raised by the template itself, through its `raise_exception`."""


class ChatTemplate:
    """One model's template, compiled once. Raises TemplateBroken."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now)
        self._special = {"bos_token": bos, "eos_token": eos}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateBroken(f"the model's chat template cannot be compiled: {error}") from None

    def render(self, turns: Sequence[ChatTurn]) -> str:
        """Render the prompt, up to where the assistant's answer begins. Raises Refused if the template rejects it."""
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        try:
            prompt = self._template.render(messages=messages, add_generation_prompt=True, tools=None, **self._special)
        except _RaisedError as error:
            raise _refused(f"this model's chat template refuses the conversation: {error}") from None
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            # a template is a program and may raise any of these on a conversation that its author did not expect
            raise _refused(f"this model's chat template fails on the conversation: {error}") from None
        if len(prompt) > _MAX_PROMPT_CHARS:
            raise _refused(f"the rendered conversation has {len(prompt)} characters; shorten the messages")
        return prompt


def _refused(message: str) -> Refused:
    return Refused(Failure(code="invalid_request_error", message=message, status=400, param="messages"))


def _raise(message: object) -> NoReturn:
    raise _RaisedError(str(message))


def _tojson(value: Any, indent: int | None = None) -> str:
    """Plain JSON: the built-in filter escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)
