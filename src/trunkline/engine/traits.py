"""What a chat template reveals about its model: how it writes tool calls, and how it marks thinking.

Found by behaviour: small conversations are rendered, and what came out is looked at.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trunkline.wire.turns import CallFormat, TemplateError, TemplateTraits

Render = Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], str]

_TOOL, _CALLED, _THOUGHT, _SAID = "probe_tool", "probe_call", "PROBE THOUGHT", "PROBE ANSWER"
_OBJECT = r'\{"name": "probe_call", "%s": \{"probe_key": "probe_value"\}'
_CALLS = {
    CallFormat.HERMES: re.compile(r"<tool_call>\s*" + _OBJECT % "arguments" + r"\}\s*</tool_call>"),
    CallFormat.MISTRAL: re.compile(r"\[TOOL_CALLS\]\s*\[" + _OBJECT % "arguments" + r'(, "id": "[a-z0-9]{9}")?\}\]'),
    CallFormat.LLAMA3: re.compile(_OBJECT % "parameters" + r"\}"),
}
_CALL_MARKERS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]")
_AROUND_THOUGHT = re.compile(r"(<\w{1,20}>|\[[A-Z]{1,20}\])\s*" + _THOUGHT + r"\s*(</\w{1,20}>|\[/[A-Z]{1,20}\])")
_PAIRS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Markers looked for where a template takes thinking only as part of the content."""

_ASKED = {"role": "user", "content": "PROBE QUESTION"}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "A probe.",
            "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "A key."}}},
        },
    }
]


def template_traits(render: Render, control: Mapping[int, str]) -> TemplateTraits:
    """What the template reveals. `render` takes messages and options; `control` are the texts of control tokens."""
    pair = thinking(render)
    ids = {text: token for token, text in control.items()}
    markers = (*(pair or ()), *_CALL_MARKERS)
    return TemplateTraits(
        calls=call_format(render),
        thinking=pair,
        control=tuple((marker, ids[marker]) for marker in markers if marker in ids),
    )


def call_format(render: Render) -> CallFormat:
    """How the template writes calls; generic if it shows no tools, or calls in no form that is known."""
    call = {"name": _CALLED, "arguments": {"probe_key": "probe_value"}}
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "abcdefgh1", "type": "function", "function": call}],
    }
    result = {"role": "tool", "content": "PROBE RESULT", "tool_call_id": "abcdefgh1", "name": _CALLED}
    if _TOOL not in _rendered(render, [_ASKED], tools=_TOOLS):
        return CallFormat.GENERIC
    text = _rendered(render, [_ASKED, called, result], tools=_TOOLS)
    return next((form for form, shape in _CALLS.items() if shape.search(text)), CallFormat.GENERIC)


def thinking(render: Render) -> tuple[str, str] | None:
    """The markers around thinking; None if the template knows none."""
    answered = {"role": "assistant", "content": _SAID, "reasoning_content": _THOUGHT}
    shown = _AROUND_THOUGHT.search(_rendered(render, [_ASKED, answered]))
    if shown:
        return shown[1], shown[2]
    prompt = _rendered(render, [_ASKED]).rstrip()
    for begin, end in _PAIRS:
        inside = {"role": "assistant", "content": f"{begin}\n{_THOUGHT}\n{end}\n\n{_SAID}"}
        text = _rendered(render, [_ASKED, inside, _ASKED])
        drops = _SAID in text and _THOUGHT not in text
        if drops or prompt.endswith(begin):
            return begin, end
    return None


def _rendered(render: Render, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    try:
        return render(messages, options)
    except TemplateError:
        return ""
