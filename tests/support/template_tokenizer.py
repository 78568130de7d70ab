"""A tokenizer with a real chat template, as a checkpoint's: a token for each byte, and for each special text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jinja2

SPECIAL = ("<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
IDS = {text: 256 + number for number, text in enumerate(SPECIAL)}
END = IDS["<|im_end|>"]

AGENT = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{#- -#}<|im_end|>
{% endfor %}
{%- if voice %}[{{ voice }}]{% endif %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% elif opens %}<think>
{% endif %}{% endif %}"""
"""Of a model that reasons and calls, as Qwen's: with `opens` it begins the reasoning itself."""
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
"""Of a model that knows neither."""


class Added(str):
    """An added token, as the library's tokenizers list them."""

    __slots__ = ("special",)

    def __new__(cls, text: str, *, special: bool = False) -> Added:
        made = super().__new__(cls, text)
        made.special = special
        return made


@cache
def compiled(source: str) -> jinja2.Template:
    environment = jinja2.Environment()  # noqa: S701 - no HTML
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    return environment.from_string(source)


class TemplateTokenizer:
    """`hides_tags`: the tags are special tokens, which a text does not have."""

    eos_token_id = END

    def __init__(self, chat_template: str = AGENT, *, hides_tags: bool = False) -> None:
        self.chat_template = chat_template
        self._hidden = {each for text, each in IDS.items() if hides_tags or text.startswith("<|")}
        self.added_tokens_decoder = {each: Added(text, special=each in self._hidden) for text, each in IDS.items()}
        self.all_special_tokens = [text for text, each in IDS.items() if each in self._hidden]

    def __len__(self) -> int:
        return 256 + len(SPECIAL)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        at, ids = 0, [IDS["<|im_start|>"]] if add_special_tokens else []
        data = text.encode()
        while at < len(data):
            special = next((each for each in SPECIAL if data.startswith(each.encode(), at)), "")
            ids.append(IDS[special] if special else data[at])
            at += len(special) or 1
        return ids

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: Any = None
    ) -> str:
        hidden = self._hidden if skip_special_tokens else set()
        special = [b"" if each in hidden else text.encode() for text, each in IDS.items()]
        parts = [bytes([each]) if each < 256 else special[each - 256] for each in token_ids]
        return b"".join(parts).decode(errors="replace")

    def apply_chat_template(
        self, conversation: Any, tools: Any = None, *, tokenize: bool, add_generation_prompt: bool, **kwargs: Any
    ) -> str:
        assert not tokenize
        known = {"messages": conversation, "tools": tools, "add_generation_prompt": add_generation_prompt}
        return compiled(self.chat_template).render(**known, **kwargs)
