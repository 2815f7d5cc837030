"""Bodies: read within the limit, decode into structs, and say exactly what is wrong with those that do not fit."""

import asyncio
import json
import logging
import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from trunkline.gateway.errors import (
    ApiError,
    BodyTimeout,
    BodyTooLarge,
    ClientGone,
    EncodedBody,
    InvalidJson,
    InvalidType,
    MissingField,
    Unsupported,
)
from trunkline.gateway.settings import GatewaySettings

log = logging.getLogger("trunkline.gateway")

Body = TypeVar("Body", bound=msgspec.Struct)

# A client that is told 413 while it still sends may see a reset instead of the answer, so this many times the limit
# is read and thrown away first.
DISCARD_FACTOR = 4

REFUSED_FIELDS = {
    "functions": "send the functions as `tools`",
    "function_call": "send `tool_choice` instead",
    "modalities": "only text is served; leave it out",
    "audio": "only text is served; leave it out",
    "suffix": "insertion is not served; put everything the model may see into `prompt`",
    "prompt_embeds": "embeddings are not served; send text or token ids in `prompt`",
    "use_beam_search": "beam search is not served; sample with `n`",
    "chat_template": "the model's own template is used; render yours and send the text to `/v1/completions`",
    "json_schema": "send it as `response_format` or `guided_json`",
    "grammar": "send it in Lark as `guided_grammar`",
}
"""Fields that would change the answer and cannot be honoured, with what to do instead."""

NEUTRAL = frozenset({b"null", b"false", b"[]", b"{}", b'""', b'["text"]'})
"""Values that leave a refused field without effect."""

PAIRS = "; \\u escapes of surrogates must come in pairs"
"""What is wrong with most broken escapes: text that was cut inside a character."""

_PATH = re.compile(r" - at `\$\.?(.*)`$")
_BYTE = re.compile(r"\(byte (\d+)\)$")
_MISSING = re.compile(r"missing required field `([^`]+)`")


async def read_body(request: Request, settings: GatewaySettings) -> bytes:
    """The whole body.

    Raises `BodyTooLarge` as soon as the limit is known to be passed, `BodyTimeout` if the client stops sending, and
    `ClientGone` if it leaves.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise EncodedBody(f"Content-Encoding {encoding!r} is not accepted; send the body uncompressed.")
    limit = settings.max_body_bytes
    body = bytearray()
    seen = 0
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for chunk in request.stream():
                seen += len(chunk)
                if seen <= limit:
                    body += chunk
                elif seen > DISCARD_FACTOR * limit:
                    break
    except TimeoutError:
        raise BodyTimeout(f"The body did not arrive within {settings.body_timeout_s:g} s; send it again.") from None
    except ClientDisconnect:
        raise ClientGone from None
    if seen > limit:
        raise BodyTooLarge(f"The body is over the limit of {limit} bytes; send a shorter prompt.")
    return bytes(body)


class BodyDecoder:
    """Decodes bodies of one endpoint. Thread-safe. Fields it does not know are logged once each."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._logged: set[str] = set()

    def decode(self, body: bytes, into: type[Body]) -> Body:
        """`body` as a struct. Raises `InvalidJson`, `InvalidType`, `MissingField` or `Unsupported`."""
        try:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            self._check_fields(fields, into)
            return msgspec.json.decode(body, type=into)
        except msgspec.ValidationError as error:
            raise _validation_error(error) from None
        except msgspec.DecodeError as error:
            raise _json_error(error, body) from None
        except RecursionError:
            raise InvalidJson("The body is nested too deeply; flatten it.") from None

    def _check_fields(self, fields: Mapping[str, msgspec.Raw], into: type[msgspec.Struct]) -> None:
        for name in fields.keys() - set(into.__struct_fields__):
            if name in REFUSED_FIELDS and bytes(fields[name]).replace(b" ", b"") not in NEUTRAL:
                raise Unsupported(f"`{name}` is not supported: {REFUSED_FIELDS[name]}.", param=name)
            if name not in self._logged and len(self._logged) < 256:
                self._logged.add(name)
                log.info("%s: the field %r is accepted and ignored", self._path, name[:64])


def _validation_error(error: msgspec.ValidationError) -> ApiError:
    text = str(error)
    path = _PATH.search(text)
    param = path[1] if path else None
    what = text[: path.start()] if path else text
    missing = _MISSING.search(what)
    if missing:
        param = f"{param}.{missing[1]}" if param else missing[1]
        return MissingField(f"`{param}` is required.", param=param)
    where = f"`{param}`" if param else "The body"
    return InvalidType(f"{where}: {what[0].lower()}{what[1:]}.", param=param)


def _json_error(error: msgspec.DecodeError, body: bytes) -> InvalidJson:
    """The parser's complaint, with a position where it gives none itself."""
    try:
        text = body.decode()
    except UnicodeDecodeError as bad:
        return InvalidJson(f"The body is not valid UTF-8 (byte {bad.start}); send JSON encoded as UTF-8.")
    if not text.strip():
        return InvalidJson("The body is empty (byte 0); send a JSON object.")
    if _BYTE.search(str(error)):
        hint = PAIRS if "surrogate" in str(error) or "hex escape" in str(error) else ""
        return InvalidJson(f"The body is not valid JSON: {error}{hint}.")
    try:
        json.loads(text)
    except (json.JSONDecodeError, RecursionError) as bad:
        at = bad.pos if isinstance(bad, json.JSONDecodeError) else len(body)
        return InvalidJson(f"The body is not valid JSON: {error} (character {at}).")
    return InvalidJson(f"The body is not valid JSON: {error}{PAIRS}.")
