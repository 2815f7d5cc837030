r"""Earlier calls in a prompt: checked, made ready for a template, and where they are known, rendered as they were said.

Two ways lead there. Mostly, a stand-in takes the place of a turn's content, and its text replaces it in the rendered
prompt, so that the template cannot touch it:

    <|im_start|>assistant\n [stand-in] <|im_end|>
    <|im_start|>assistant\n<tool_call>\n{...}\n</tool_call><|im_end|>

Mistral's templates insist on seeing calls as calls. There the list that they render is found by the ids in it.
"""

import json
import secrets
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from trunkline.gateway.errors import InvalidType, MissingField, Unsupported
from trunkline.gateway.tools import mistral
from trunkline.gateway.tools.memory import Said
from trunkline.wire.openai import Message
from trunkline.wire.turns import CallFormat

LEAD = 32
"""Characters of a prompt's end by which the place of its answer is known again."""

_MISTRAL_ID = 9


def sent_calls(where: str, message: Message, form: CallFormat) -> list[dict[str, Any]]:
    """A message's `tool_calls` as templates read them: arguments as an object. Raises `InvalidRequest` or its kinds."""
    return [_sent_call(f"{where}.tool_calls[{at}]", call, form) for at, call in enumerate(message.tool_calls or ())]


def _sent_call(where: str, call: Mapping[str, Any], form: CallFormat) -> dict[str, Any]:
    if call.get("type", "function") != "function":
        raise Unsupported(f'`{where}.type` is not supported except "function".', param=f"{where}.type")
    function = call.get("function")
    if function is None:
        raise MissingField(f"`{where}.function` is required.", param=f"{where}.function")
    if not isinstance(function, dict):
        raise InvalidType(f"`{where}.function`: expected an object.", param=f"{where}.function")
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict | None):
        raise InvalidType(f"`{where}.function.arguments`: expected JSON text.", param=f"{where}.function.arguments")
    return {
        "id": call_id(_text(f"{where}.id", call.get("id")), form),
        "type": "function",
        "function": {
            "name": _text(f"{where}.function.name", function.get("name")),
            "arguments": _object(arguments or {}),
        },
    }


def _text(where: str, value: Any) -> str:
    if value is None:
        raise MissingField(f"`{where}` is required.", param=where)
    if not isinstance(value, str):
        raise InvalidType(f"`{where}`: expected a string.", param=where)
    return value


def _object(arguments: str | dict[str, Any]) -> Any:
    """Arguments as an object; what a client's model cut or spelled wrongly stays text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def call_id(sent: str, form: CallFormat) -> str:
    """A call's id as the template takes it: Mistral's refuse any but nine letters and digits."""
    fits = len(sent) == _MISTRAL_ID and sent.isascii() and sent.isalnum()
    if form is not CallFormat.MISTRAL or fits:
        return sent
    return blake2b(sent.encode(errors="surrogatepass"), digest_size=8).hexdigest()[:_MISTRAL_ID]


class Past:
    """The turns of one prompt whose own text is known."""

    def __init__(self, form: CallFormat) -> None:
        self._form = form
        self._stand_ins: list[tuple[str, Said]] = []

    def __bool__(self) -> bool:
        return bool(self._stand_ins)

    def stand_in(self, message: Mapping[str, Any], said: Said) -> dict[str, Any]:
        """What to render instead of `message`, which repeats `said`. Thinking that a client left out comes back: the
        template knows whether the model sees it again.
        """
        mark = f"\ue000{secrets.token_hex(8)}\ue000"
        self._stand_ins.append((mark, said))
        whole = dict(message)
        if said.thinking:
            whole.setdefault("reasoning_content", said.thinking)
        if self._form is CallFormat.MISTRAL:
            return whole
        del whole["tool_calls"]
        return {**whole, "content": mark}

    def restored(self, rendered: str) -> str | None:
        """The prompt with what was said; None if the template did not render a stand-in just once."""
        for mark, said in self._stand_ins:
            if self._form is CallFormat.MISTRAL:
                rendered = mistral.restored(rendered, said)
                continue
            before, found, after = rendered.partition(mark)
            if not found or mark in after:
                return None
            rendered = said.placed_behind(before) + after
        return rendered
