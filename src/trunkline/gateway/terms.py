"""What APIs that are served as chat completions share: errors in their own terms, and what they leave out."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from trunkline.gateway.errors import ApiError, Unsupported

log = logging.getLogger("trunkline.gateway")

_TOOL = re.compile(r"^tools\[(\d+)\](\.function)?")


class Terms:
    """How an API names what chat completions name otherwise. `fields` maps the heads of dotted names."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        self._fields = fields

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
            param = f"tools[{tools[int(tool[1])]}]{param[tool.end() :]}"
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
