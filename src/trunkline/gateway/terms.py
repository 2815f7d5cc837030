"""What APIs share that are served as chat completions: their own terms, what they leave out, how much to think."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from trunkline.gateway.chat import ChatTurn, chat_turn
from trunkline.gateway.context import Gateway
from trunkline.gateway.errors import ApiError, TemplateRefused, Unsupported
from trunkline.wire.openai import ChatBody, ContentPart, Message

log = logging.getLogger("trunkline.gateway")

_TOOL = re.compile(r"^tools\[(\d+)\](\.function)?")


class Terms:
    """How an API names what chat completions name otherwise.

    `fields` maps the heads of dotted names; `schema` is what a tool calls the schema of its arguments.
    """

    def __init__(self, fields: Mapping[str, str], *, schema: str = "parameters") -> None:
        self._fields = fields
        self._schema = schema

    @contextmanager
    def speaking(self, tools: Sequence[int]) -> Iterator[None]:
        """Errors raised inside name this API's fields. `tools[i]` is where the chat request's i-th tool came from."""
        try:
            yield
        except ApiError as error:
            if error.param is not None:
                told = self._told(error.param, tools)
                error.message = error.message.replace(error.param, told)
                error.param = told
            raise

    def _told(self, param: str, tools: Sequence[int]) -> str:
        tool = _TOOL.match(param)
        if tool and int(tool[1]) < len(tools):
            field = param[tool.end() :]
            if field == ".parameters" or field.startswith((".parameters.", ".parameters[")):
                field = f".{self._schema}{field.removeprefix('.parameters')}"
            return f"tools[{tools[int(tool[1])]}]{field}"
        for name, told in self._fields.items():
            if param == name or param.startswith((f"{name}.", f"{name}[")):
                # Places inside are those of the translation, which nobody sent.
                return told if name == "messages" else told + param[len(name) :]
        return param


class Ignored:
    """Logs, once each, tools that only their vendor's servers could run and that are therefore left out."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._logged: set[str] = set()

    def note(self, kinds: Sequence[str]) -> None:
        """These kinds of tool were left out of a request."""
        for kind in kinds:
            if kind not in self._logged and len(self._logged) < 256:
                self._logged.add(kind)
                log.info("%s: tools of type %r are accepted and never called", self._path, kind)


def refuse_choices(n: int | None) -> None:
    """Raise `Unsupported` for more than one choice, in an API that knows only one."""
    if n is not None and n != 1:
        raise Unsupported("`n` is not supported: this API gives one answer; send the request again.", param="n")


def with_effort(given: dict[str, Any], effort: str | None) -> dict[str, Any]:
    """The template variables `given`, with `effort` (how much to think) where they do not say otherwise.

    Templates know `reasoning_effort` (how much) or `enable_thinking` (whether); what one does not know it ignores.
    """
    if effort is None:
        return given
    thinks = {"enable_thinking": False} if effort == "none" else {}
    return {"reasoning_effort": effort, **thinks, **given}


def mended(messages: Sequence[Message]) -> list[Message]:
    """The conversation for templates that take the system's word only at the beginning, and roles only in turn.

    What the system says later becomes text of the user; neighbours of one role become one message. What stands before
    the first such place stays as it is, so that a prefix stays one.
    """
    made: list[Message] = []
    for message in messages:
        late = message.role in ("system", "developer") and bool(made)
        role = "user" if late else message.role
        last = made[-1] if made else None
        if role == "user" and last is not None and last.role == "user":
            made[-1] = msgspec.structs.replace(last, content=[*_parts(last), *_parts(message)])
        else:
            made.append(msgspec.structs.replace(message, role=role))
    return made


def _parts(message: Message) -> list[ContentPart]:
    content = message.content
    return [ContentPart("text", content)] if isinstance(content, str) else list(content or ())


def willing_turn(gateway: Gateway, body: ChatBody, scope: str, headers: Mapping[str, str]) -> ChatTurn:
    """As `chat_turn`, limits clipped; where the template refuses the conversation, as `mended`."""
    try:
        return chat_turn(gateway, body, scope, headers, clip=True)
    except TemplateRefused:
        again = mended(body.messages)
        if again == body.messages:
            raise
    return chat_turn(gateway, msgspec.structs.replace(body, messages=again), scope, headers, clip=True)
