"""Every error a client can get, in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

Under `/v1/messages` the same document is also Anthropic's, so that clients of both read it: `"type": "error"` beside
`error`, and Anthropic's `type` inside.

    ApiError                          status  code
    ├── InvalidRequest                400     invalid_value
    │   ├── InvalidJson               400     invalid_json
    │   ├── InvalidType               400     invalid_type
    │   ├── MissingField              400     missing_required_parameter
    │   ├── Unsupported               400     unsupported_parameter
    │   ├── InvalidSchema             400     invalid_schema
    │   ├── ContextOverflow           400     context_length_exceeded
    │   └── TemplateRefused           400     template_error
    ├── Unauthorized                  401     invalid_api_key
    ├── NotFound                      404     not_found
    │   ├── ModelNotFound             404     model_not_found
    │   ├── RunNotFound               404     run_not_found
    │   ├── ResponseNotFound          404     response_not_found
    │   ├── ItemNotFound              404     item_not_found
    │   └── PreviousNotFound          404     previous_response_not_found
    ├── MethodNotAllowed              405     method_not_allowed
    ├── BodyTimeout                   408     body_timeout
    ├── RunExists                     409     run_exists
    ├── BodyTooLarge                  413     request_too_large
    ├── EncodedBody                   415     unsupported_content_encoding
    ├── QueueFull                     429     queue_full
    ├── Internal                      500     internal_error
    ├── Unavailable                   503     not_ready
    │   └── Draining                  503     draining
    ├── TimedOut                      504     request_timeout
    └── ExecutorFailed                as the executor's `Failed` says

A message names the fix. `ClientGone` is no answer (nobody is left to read one), so it stands outside the tree.
"""

import math
from typing import ClassVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from trunkline.wire import anthropic
from trunkline.wire.openai import ErrorBody, ErrorDetail
from trunkline.wire.turns import Failed

ANTHROPIC_PATH = "/v1/messages"
"""Paths that begin so speak Anthropic's API."""

ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

CLIENT_GONE_STATUS = 499
"""What requests are counted under whose client left first; no response has it."""


class ApiError(Exception):
    """Root of the tree. `param` names the field at fault; `retry_after_s` becomes a `Retry-After` header."""

    status: int = 500
    type: str = "server_error"
    code: str = "internal_error"
    headers: ClassVar[dict[str, str]] = {}

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self, path: str = "") -> bytes:
        """The JSON document, as clients of `path` read it."""
        if path.startswith(ANTHROPIC_PATH):
            usual = "api_error" if self.status >= 500 else "invalid_request_error"
            kind = ANTHROPIC_TYPES.get(self.status, usual)
            detail = anthropic.ErrorDetail(type=kind, message=self.message, param=self.param, code=self.code)
            return msgspec.json.encode(anthropic.ErrorBody(detail))
        return msgspec.json.encode(
            ErrorBody(ErrorDetail(message=self.message, type=self.type, param=self.param, code=self.code))
        )

    def response(self, path: str = "") -> Response:
        """The document with its status and headers."""
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        return Response(self.body(path), self.status, headers, media_type="application/json")


class InvalidRequest(ApiError):
    """A value that cannot be served."""

    status, type, code = 400, "invalid_request_error", "invalid_value"


class InvalidJson(InvalidRequest):
    """The body is not JSON; the message says at which byte."""

    code = "invalid_json"


class InvalidType(InvalidRequest):
    """A field of the wrong type."""

    code = "invalid_type"


class MissingField(InvalidRequest):
    """A required field is absent."""

    code = "missing_required_parameter"


class Unsupported(InvalidRequest):
    """A field that would change the answer in a way that is not served."""

    code = "unsupported_parameter"


class InvalidSchema(InvalidRequest):
    """A schema, or another constraint on the answer, that cannot be compiled or satisfied; says where."""

    code = "invalid_schema"


class ContextOverflow(InvalidRequest):
    """Prompt plus completion do not fit the model; says both numbers."""

    code = "context_length_exceeded"

    def __init__(self, limit: int, prompt_tokens: int, max_tokens: int | None, param: str) -> None:
        asked = prompt_tokens + (1 if max_tokens is None else max_tokens)
        completion = "at least 1" if max_tokens is None else str(max_tokens)
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, you requested {asked} tokens "
            f"({prompt_tokens} in the prompt, {completion} in the completion). "
            "Please reduce the length of the prompt or completion.",
            param=param,
        )
        self.prompt_tokens = prompt_tokens


class TemplateRefused(InvalidRequest):
    """The model's chat template cannot render these messages."""

    code = "template_error"


class Unauthorized(ApiError):
    """No key, or one that is not ours."""

    status, type, code = 401, "invalid_request_error", "invalid_api_key"
    headers: ClassVar[dict[str, str]] = {"WWW-Authenticate": "Bearer"}


class NotFound(ApiError):
    """Nothing is served at this path."""

    status, type, code = 404, "invalid_request_error", "not_found"


class ModelNotFound(NotFound):
    """The request names a model that is not served."""

    code = "model_not_found"

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(
            f"The model {asked[:256]!r} does not exist; this server serves {served!r}. Ask for that, or start the "
            "server with `--model-alias NAME` for each other name to answer to, or with `--any-model`.",
            param="model",
        )


class RunNotFound(NotFound):
    """No run of this id in the caller's scope."""

    code = "run_not_found"

    def __init__(self, run: str) -> None:
        super().__init__(f"No run {run!r} under this API key; GET /v1/runs lists the known ones.", param="id")


class ResponseNotFound(NotFound):
    """No stored response of this id in the caller's scope."""

    code = "response_not_found"

    def __init__(self, id: str) -> None:
        super().__init__(
            f"No response {id[:256]!r} is stored under this API key; those of requests without `store: false` are, "
            "until the server needs their room.",
            param="id",
        )


class ItemNotFound(NotFound):
    """A request refers to an item that no stored response put out."""

    code = "item_not_found"

    def __init__(self, id: str, param: str) -> None:
        super().__init__(
            f"No stored response under this API key (any more) has an item {id[:256]!r}; send the whole item.",
            param=param,
        )


class PreviousNotFound(NotFound):
    """A request goes on from a response that is not stored, or stands on one (`missing`) that is not."""

    code = "previous_response_not_found"

    def __init__(self, previous: str, missing: str) -> None:
        stands = "" if missing == previous else f" goes on from {missing!r}, which"
        super().__init__(
            f"The response {previous[:256]!r}{stands} is not stored under this API key (any more); send the whole "
            "conversation as `input`.",
            param="previous_response_id",
        )


class MethodNotAllowed(ApiError):
    """The path exists, the method does not."""

    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class BodyTimeout(ApiError):
    """The client stopped sending its body."""

    status, type, code = 408, "invalid_request_error", "body_timeout"


class RunExists(ApiError):
    """A run of this id was declared or seen before."""

    status, type, code = 409, "invalid_request_error", "run_exists"


class BodyTooLarge(ApiError):
    """The body is over the limit."""

    status, type, code = 413, "invalid_request_error", "request_too_large"


class EncodedBody(ApiError):
    """The body is compressed."""

    status, type, code = 415, "invalid_request_error", "unsupported_content_encoding"


class QueueFull(ApiError):
    """Too many requests at once."""

    status, type, code = 429, "rate_limit_error", "queue_full"


class Internal(ApiError):
    """A bug of ours."""


class Unavailable(ApiError):
    """Generation does not work now."""

    status, type, code = 503, "server_error", "not_ready"


class Draining(Unavailable):
    """The server is stopping."""

    code = "draining"


class TimedOut(ApiError):
    """The request took longer than the server allows."""

    status, type, code = 504, "server_error", "request_timeout"


class ExecutorFailed(ApiError):
    """The executor could not serve the turn and said how that reads in HTTP."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message, retry_after_s=failed.retry_after_s)
        self.status, self.code = failed.status, failed.code
        if failed.status == QueueFull.status:
            self.type = QueueFull.type
        elif failed.status < 500:
            self.type = InvalidRequest.type


class ClientGone(Exception):
    """The client closed its connection before the answer was whole."""


async def api_error_response(request: Request, error: Exception) -> Response:
    """Handler for `ApiError`."""
    assert isinstance(error, ApiError)
    return error.response(request.url.path)


async def client_gone_response(request: Request, error: Exception) -> Response:
    """Handler for a client that left while its body was read: nobody gets this, but requests are counted by status."""
    return Response(status_code=CLIENT_GONE_STATUS)


async def http_exception_response(request: Request, error: Exception) -> Response:
    """Handler for what Starlette's router raises: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    if error.status_code == 405:
        allowed = ", ".join(sorted(_methods_at(request)))
        response = MethodNotAllowed(f"{where} is not allowed; use {allowed}.").response(request.url.path)
        response.headers["Allow"] = allowed
        return response
    if error.status_code == 404:
        return NotFound(f"{where} does not exist; docs/http.md lists every path that does.").response(request.url.path)
    shaped = Internal(str(error.detail))
    shaped.status = error.status_code
    return shaped.response(request.url.path)


def _methods_at(request: Request) -> set[str]:
    """Every method some route serves at this path (the router names only the first route's)."""
    methods: set[str] = set()
    for route in request.app.routes:
        match, _ = route.matches(request.scope)
        if match is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return methods
