"""Chat templates: the model's own Jinja, from messages to prompt text.

The environment is what templates are written for: Hugging Face's (`trim_blocks`, `lstrip_blocks`, loop controls,
`raise_exception`, `strftime_now`, `tojson` without HTML escapes, `{% generation %}`), in Jinja's immutable sandbox.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trunkline.wire.turns import TemplateError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""What a model without a template gets: the format that most base models have met."""

MAX_CHARACTERS = 64 << 20
MAX_SECONDS = 5.0

_DEADLINE = "render deadline"  # no template can name a variable with a blank
_MARK = "\ue000trunkline\ue000"  # private-use characters: no message holds this
_OWN = frozenset({"messages", "bos_token", "eos_token", "raise_exception", "strftime_now", _DEADLINE})


class Refused(Exception):
    """What a template's own `raise_exception` raises."""


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox (which refuses ranges over 100,000), with a deadline looked at in every call a template makes."""

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _look_at_clock(context[_DEADLINE])
        return super().call(context, obj, *args, **kwargs)


class _GenerationBlock(Extension):
    """`{% generation %}` marks for training what the assistant said; a prompt needs only what it holds."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders messages to the prompt text one model expects. Immutable and thread-safe."""

    def __init__(
        self,
        source: str | None,
        *,
        bos_token: str = "",
        eos_token: str = "",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`source` None means ChatML; `now` is the clock of `strftime_now`. Raises `TemplateError` for bad Jinja."""
        self.source = CHATML if source is None else source
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        self._variables = {
            "bos_token": bos_token,
            "eos_token": eos_token,
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: now().strftime(form),
        }
        try:
            self._template = environment.from_string(self.source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template is no valid Jinja ({error}); use another GGUF") from error
        self._knows_developer = "developer" in self.source
        self._wants_parts = not self._repeats(_MARK) and self._repeats([{"type": "text", "text": _MARK}])

    def opening(self) -> str:
        """What follows the messages of a prompt to open the answer; "" where that depends on the messages."""
        probe = {"messages": [self._message({"role": "user", "content": "."})]}
        try:
            closed, opened = (
                self._render({**_PROMPT, **probe, "add_generation_prompt": opens}) for opens in (False, True)
            )
        except TemplateError:
            return ""
        return opened.removeprefix(closed) if opened.startswith(closed) else ""

    def _repeats(self, content: Any) -> bool:
        try:
            return _MARK in self._render({"messages": [{"role": "user", "content": content}], **_PROMPT})
        except TemplateError:
            return False

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """The prompt text, with the generation prompt unless `options` say otherwise. Raises `TemplateError`.

        `options` become template variables (`tools`, ...), those in `chat_template_kwargs` too. With
        `continue_final_message` true and `add_generation_prompt` false, the prompt ends inside the last message, an
        assistant's, for the model to go on with.
        """
        variables = {**_PROMPT, **options, **(options.get("chat_template_kwargs") or {})}
        variables.pop("chat_template_kwargs", None)
        taken = sorted(_OWN & variables.keys())
        if taken:
            raise TemplateError(f"{taken[0]} is not a client's to set; take it out of chat_template_kwargs")
        continues = variables.pop("continue_final_message", False)
        variables["messages"] = [self._message(message) for message in messages]
        if not continues:
            return self._render(variables)
        if variables["add_generation_prompt"]:
            raise TemplateError("continue_final_message needs add_generation_prompt: false")
        return self._render_open(variables)

    def _render_open(self, variables: dict[str, Any]) -> str:
        last = variables["messages"][-1] if variables["messages"] else {}
        if last.get("role") != "assistant" or not isinstance(last["content"], str):
            raise TemplateError("continue_final_message needs an assistant message with text as the last one")
        variables["messages"][-1] = {**last, "content": last["content"] + _MARK}
        text, mark, _ = self._render(variables).rpartition(_MARK)
        if not mark:
            raise TemplateError("the template hides the last message's end, so it cannot be continued")
        return text

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        role, content = message.get("role"), message.get("content")
        if role == "developer" and not self._knows_developer:
            role = "system"
        text = _flattened(content)
        return {**message, "role": role, "content": [{"type": "text", "text": text}] if self._wants_parts else text}

    def _render(self, variables: Mapping[str, Any]) -> str:
        deadline = time.monotonic() + MAX_SECONDS
        parts, size = [], 0
        try:
            for part in self._template.generate({**self._variables, **variables, _DEADLINE: deadline}):
                parts.append(part)
                size += len(part)
                if size > MAX_CHARACTERS:
                    raise OverflowError(f"the prompt has over {MAX_CHARACTERS} characters")
                _look_at_clock(deadline)
        except Refused as error:
            raise TemplateError(f"{error}; {_fix(str(error))}") from error
        except (jinja2.TemplateError, SecurityError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise TemplateError(f"{error} (in the template); {_fix(str(error))}") from error
        except (ArithmeticError, RecursionError, TimeoutError, MemoryError) as error:
            raise TemplateError(
                f"it takes too much to render them ({error}); send fewer or simpler messages"
            ) from error
        return "".join(parts)


_PROMPT = {"add_generation_prompt": True, "tools": None, "documents": None}


def _flattened(content: Any) -> str:
    """Text of OpenAI's content: a string, None (an assistant that only called tools), or parts, one a line."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    wrong = [part for part in content if part.get("type") != "text"]
    if wrong:
        raise TemplateError(f"this model reads text only; take the {wrong[0].get('type')!r} part out of the message")
    return "\n".join(part["text"] for part in content)


def _fix(reason: str) -> str:
    """What a client can do about a template's refusal, whose own words rarely say."""
    reason = reason.lower()
    if "alternate" in reason:
        return "merge neighbouring messages of one role into one, and let a user's be the first"
    if "system" in reason:
        return "put the system text into the first user message"
    return "change the messages to what this model's template takes"


def _look_at_clock(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"it took over {MAX_SECONDS:g} s")


def _raise_exception(reason: str) -> NoReturn:
    raise Refused(reason)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
