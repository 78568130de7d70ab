"""Conversations rendered with a model's own template."""

from __future__ import annotations

import pytest
from model_file import prompts_of

from penstock.engine import ChatTurn, Refused
from workers.engines.chats import messages_of
from workers.engines.llamacpp.request import ChatTemplate

CHATML = """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
{{ bos_token }}system
Be brief.{{ eos_token }}
    {% endif %}
{{ '<s>' + message['role'] + '|' + message['content'] + '</s>' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<s>assistant|' }}{% endif %}"""


def test_turns_are_rendered_up_to_the_answer() -> None:
    """Blocks leave no blank lines or indentation behind, and the special tokens' texts are known."""
    template = ChatTemplate(CHATML, bos="<s>", eos="</s>")
    turns = [ChatTurn("user", "Hello"), ChatTurn("assistant", "Hi"), ChatTurn("user", "Bye")]
    assert template.render(messages_of(turns)) == (
        "<s>system\nBe brief.</s>\n<s>user|Hello</s>\n<s>assistant|Hi</s>\n<s>user|Bye</s>\n<s>assistant|"
    )


def test_a_turn_is_text_and_never_a_template() -> None:
    """What a user writes is not executed."""
    rendered = ChatTemplate(CHATML).render(messages_of([ChatTurn("user", "{{ 7 * 6 }}{% raise %}")]))
    assert "{{ 7 * 6 }}{% raise %}" in rendered


def test_json_is_not_escaped_for_html() -> None:
    """Models were trained on plain JSON, of one line or of several."""
    assert ChatTemplate("{{ messages[0] | tojson }}").render(messages_of([ChatTurn("user", "<é>")])) == (
        '{"role": "user", "content": "<é>"}'
    )
    assert ChatTemplate("{{ messages[0] | tojson(indent=2) }}").render(messages_of([ChatTurn("user", "<é>")])) == (
        '{\n  "role": "user",\n  "content": "<é>"\n}'
    )


FAILS = {  # templates, and what is said
    "{{ raise_exception('roles must alternate') }}": "roles must alternate",
    **dict.fromkeys((
        "{{ messages[0].content + 1 }}",
        "{{ messages[9]['role'] + 'x' }}",
        "{{ 1 // (messages | length - 1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ), "chat template does not take"),
}  # fmt: skip


@pytest.mark.parametrize("template", FAILS)
def test_a_template_that_fails_is_a_refusal(template: str) -> None:
    """Its own refusals in its words, mistakes, and what the sandbox forbids end this request and not the worker."""
    with pytest.raises(Refused, match=FAILS[template]) as caught:
        ChatTemplate(template).render(messages_of([ChatTurn("user", "a")]))
    assert (caught.value.failure.status, caught.value.failure.param) == (400, "messages")


def test_a_model_whose_template_does_not_compile_has_no_chats() -> None:
    """It serves raw prompts only."""
    assert not prompts_of("{% for x in %}").chats.chat
