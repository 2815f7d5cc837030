r"""Models whose template knows no tools: they are described in the system text, and Hermes' form is asked for.

Earlier calls and results are written out as text, calls just as the grammar makes them, so that a conversation stays a
prefix of its next turn. Results are a user's to say, since such templates know no other role:

    system     You are helpful.\n\n# Tools ...
    assistant  Let me look.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>
    user       <tool_response>\n3\n</tool_response>
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trunkline.gateway.tools.hermes import BEGIN, END
from trunkline.gateway.tools.syntax import call_head

_INSTRUCTIONS = """\
# Tools

You can call functions. These are available, one JSON description a line:
<tools>
{tools}
</tools>

To call one, write its name and its arguments as JSON between tags, like this:
<tool_call>
{{"name": "function_name", "arguments": {{"key": "value"}}}}
</tool_call>
Its result comes back between <tool_response> tags. Call a function only when it helps; otherwise just answer."""

SYSTEM_ROLES = frozenset({"system", "developer"})


def as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, system_role: bool = True
) -> list[dict[str, Any]]:
    """`messages` in roles and text alone, with `tools` described in the first one.

    `system_role` False describes them in the first user message, if there is no system message to take them.
    """
    written: list[dict[str, Any]] = []
    answered = False  # whether the last written message holds results
    for message in messages:
        result = message["role"] == "tool"
        plain = _result(message) if result else _plain(message)
        if answered and plain["role"] == "user":
            written[-1]["content"] += ("\n" if result else "\n\n") + plain["content"]
        else:
            written.append(plain)
        answered = result or (answered and plain["role"] == "user")
    return _described(written, tools, system_role) if tools else written


def _described(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], system_role: bool
) -> list[dict[str, Any]]:
    text = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first = messages[0]
    if first["role"] in SYSTEM_ROLES or (not system_role and first["role"] == "user"):
        parts = (first["content"], text) if first["role"] in SYSTEM_ROLES else (text, first["content"])
        return [{**first, "content": "\n\n".join(part for part in parts if part)}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _result(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    texts = [message["content"]] if message["content"] else []
    return {**plain, "content": "\n".join([*texts, *(_call(call["function"]) for call in calls)])}


def _call(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{BEGIN}\n{call_head(function['name'], 'arguments')}{text}}}\n{END}"
