"""Chat templates: what a model's Jinja makes of messages, and how its refusals read."""

from datetime import datetime
from typing import Any

import pytest

from tests.engine.vocabularies import smollm2_path
from trunkline.engine import template
from trunkline.engine.model import load_model
from trunkline.engine.template import ChatTemplate
from trunkline.wire.turns import TemplateError

ALTERNATING = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<' + message.role + '>' + message.content | trim + '</>' }}
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}
"""


def said(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def rendered(source: str | None, *turns: tuple[str, Any], **options: Any) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(said(*turns), options)


def test_a_real_models_template_makes_its_prompt() -> None:
    model = load_model(smollm2_path())
    chat = ChatTemplate(model.chat_template)
    model.close()
    text = chat.render(said(("user", "Hi <b>é</b>"), ("assistant", "Yes."), ("user", "Go")), {})
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi <b>é</b><|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
        "<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_model_without_a_template_gets_chatml() -> None:
    assert rendered(None, ("system", "Be brief."), ("user", "Hi\n\n")) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi\n\n<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_environment_is_the_one_templates_are_written_for() -> None:
    source = (
        "{{ bos_token }}{{ eos_token }}\n{% for m in messages %}\n  {% if loop.first %}{% continue %}{% endif %}\n"
        "{% generation %}{{ m.content }}{% endgeneration %}{% break %}\n{% endfor %}\n"
        "{{ {'a': '<é>'} | tojson }}{{ strftime_now('%Y') }}{{ tools is none }}{{ name }}"
    )
    chat = ChatTemplate(source, bos_token="<s>", eos_token="</s>", now=lambda: datetime(2031, 5, 1))
    text = chat.render(said(("user", "1"), ("user", "2"), ("user", "3")), {"chat_template_kwargs": {"name": "N"}})
    assert text == '<s></s>\n2{"a": "<é>"}2031TrueN'


def test_tools_and_other_options_reach_the_template() -> None:
    source = "{% for tool in tools %}{{ tool | tojson(indent=1) }}{% endfor %}{{ thinking }}{{ add_generation_prompt }}"
    assert rendered(source, tools=[{"n": 1}], thinking=False) == '{\n "n": 1\n}FalseTrue'


def test_content_parts_become_lines_of_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert rendered(ALTERNATING, ("user", parts)) == "<s><user>one\ntwo</><assistant>"


def test_a_template_that_takes_parts_only_gets_parts() -> None:
    source = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
    assert rendered(source, ("user", "plain"), ("user", [{"type": "text", "text": "part"}])) == "[plain][part]"


def test_content_that_is_no_text_is_refused_by_its_type() -> None:
    with pytest.raises(TemplateError, match="reads text only; take the 'image_url' part out"):
        rendered(None, ("user", [{"type": "image_url", "image_url": {"url": "x"}}]))


def test_an_assistant_without_content_says_nothing() -> None:
    assert rendered(ALTERNATING, ("user", "a"), ("assistant", None)) == "<s><user>a</><assistant></><assistant>"


def test_a_developer_is_the_system_unless_the_template_knows_developers() -> None:
    names = "{% for m in messages %}{{ m.role }} {% endfor %}"
    assert rendered(names, ("developer", "x"), ("user", "y")) == "system user "
    assert rendered("{# developer #}" + names, ("developer", "x")) == "developer "


@pytest.mark.parametrize(
    ("turns", "fix"),
    [
        ([("user", "a"), ("user", "b")], "must alternate.*; merge neighbouring messages"),
        ([("system", "a")], "System role not supported; put the system text into the first user message"),
    ],
)
def test_a_templates_refusal_says_what_to_change(turns: list[tuple[str, str]], fix: str) -> None:
    with pytest.raises(TemplateError, match=fix):
        rendered(ALTERNATING, *turns)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ nothing.at_all }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ messages | tojson | tojson(indent='x', sort_keys=nothing.x) }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_whatever_goes_wrong_in_a_template_is_a_template_error(source: str) -> None:
    with pytest.raises(TemplateError):
        rendered(source, ("user", "a"))


def test_an_endless_template_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MAX_SECONDS", 0.05)
    loops = "{% for i in range(99999) %}{% for j in range(9) %}{% endfor %}{% endfor %}" * 50
    with pytest.raises(TemplateError, match=r"over 0.05 s.*; send fewer or simpler messages"):
        rendered(loops, ("user", "a"))


def test_an_endless_prompt_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MAX_CHARACTERS", 1000)
    with pytest.raises(TemplateError, match="over 1000 characters"):
        rendered("{% for i in range(99999) %}0123456789{% endfor %}", ("user", "a"))


def test_a_template_that_is_no_jinja_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(TemplateError, match="no valid Jinja"):
        ChatTemplate("{% for %}")


@pytest.mark.parametrize("name", ["messages", "bos_token", "raise_exception"])
def test_the_servers_own_variables_cannot_be_set(name: str) -> None:
    with pytest.raises(TemplateError, match=f"{name} is not a client's to set"):
        rendered(None, ("user", "a"), chat_template_kwargs={name: "x"})


OPEN = {"add_generation_prompt": False, "continue_final_message": True}


def test_a_prompt_may_end_inside_the_final_assistant_message() -> None:
    turns = ("user", "a"), ("assistant", "Once upon a ")
    assert rendered(ALTERNATING, *turns, **OPEN) == "<s><user>a</><assistant>Once upon a "
    assert rendered(None, *turns, **OPEN).endswith("<|im_start|>assistant\nOnce upon a ")


def test_a_prompt_may_end_without_the_generation_prompt() -> None:
    assert rendered(ALTERNATING, ("user", "a"), add_generation_prompt=False) == "<s><user>a</>"


def test_only_an_assistants_final_message_can_be_continued() -> None:
    with pytest.raises(TemplateError, match="needs an assistant message"):
        rendered(ALTERNATING, ("user", "a"), **OPEN)
    with pytest.raises(TemplateError, match="needs add_generation_prompt: false"):
        rendered(ALTERNATING, ("user", "a"), ("assistant", "b"), continue_final_message=True)
    with pytest.raises(TemplateError, match="hides the last message's end"):
        rendered("{{ messages[-1].content[:3] }}", ("assistant", "abcdef"), **OPEN)


@pytest.mark.parametrize(
    ("source", "opening"),
    [
        (None, "<|im_start|>assistant\n"),
        (ALTERNATING, "<assistant>"),
        ("{{ messages[0].content }}{% if add_generation_prompt %}<a><think>\n{% endif %}", "<a><think>\n"),
        ("{{ messages[0].content }}", ""),
        ("{% if add_generation_prompt %}A{% else %}B{% endif %}{{ messages[0].content }}", ""),
        ("{{ raise_exception('tools are missing') }}", ""),
    ],
)
def test_what_opens_the_answer_is_known_where_the_template_puts_it_last(source: str | None, opening: str) -> None:
    assert ChatTemplate(source, bos_token="<s>").opening() == opening
