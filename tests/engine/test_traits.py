"""What templates reveal about their models. The fixtures are our own, built as the named families build theirs."""

import pytest

from tests.engine.vocabularies import smollm2_path
from trunkline.engine.model import Model, load_model
from trunkline.engine.template import ChatTemplate
from trunkline.engine.traits import template_traits
from trunkline.wire.turns import CallFormat, TemplateTraits

from . import templates


@pytest.mark.parametrize(
    ("source", "calls", "thinking"),
    [
        (templates.QWEN25, CallFormat.HERMES, None),
        (templates.QWEN3, CallFormat.HERMES, ("<think>", "</think>")),
        (templates.LLAMA31, CallFormat.LLAMA3, None),
        (templates.MISTRAL, CallFormat.MISTRAL, None),
        (templates.R1, CallFormat.GENERIC, ("<think>", "</think>")),
        (templates.MAGISTRAL, CallFormat.GENERIC, ("[THINK]", "[/THINK]")),
        (templates.TOOLS_IN_XML, CallFormat.GENERIC, None),
        (None, CallFormat.GENERIC, None),
        ("{{ raise_exception('no') }}", CallFormat.GENERIC, None),
    ],
)
def test_a_template_shows_how_its_model_calls_and_thinks(
    source: str | None, calls: CallFormat, thinking: tuple[str, str] | None
) -> None:
    traits = template_traits(ChatTemplate(source, bos_token="<s>", eos_token="</s>").render, {})
    assert (traits.calls, traits.thinking) == (calls, thinking)


def test_markers_among_the_control_tokens_are_named_by_id() -> None:
    control = {5: "[TOOL_CALLS]", 6: "<think>", 7: "<other>"}
    assert template_traits(ChatTemplate(templates.QWEN3).render, control).control == (
        ("<think>", 6),
        ("[TOOL_CALLS]", 5),
    )


def test_the_packaged_models_know_no_tools(gemma: Model) -> None:
    smollm2 = load_model(smollm2_path())
    for model in (smollm2, gemma):
        assert template_traits(ChatTemplate(model.chat_template).render, {}) == TemplateTraits()
    smollm2.close()
