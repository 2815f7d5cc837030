"""Whose turn is it? Pure functions from headers and body to a run and to the scope that isolates its cache.

A request may name its run exactly (`X-Trunkline-Run`, or `metadata.run_id` in the body), or else the session that it
belongs to; of these the first that is present counts:

1. session headers that agents already send (`SESSION_HEADERS`, in that order)
2. body fields: `session_id`, `prompt_cache_key`, and the session inside Anthropic's `metadata.user_id`

Coding agents use one session for their main run, their sub-agents and their side calls, so a session only names a
group of runs: which of them a turn belongs to, the policy core infers from the prompt, as it does for a request that
names nothing at all.

A *scope* is what one API key may see ("" without keys). A *salt* is a scope, or `scope/digest` where the request
carries vLLM's `cache_salt`: cached prefixes are shared inside a salt only, runs are listed by scope.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from trunkline.core.types import RunOrigin, ServiceClass
from trunkline.gateway.errors import InvalidRequest
from trunkline.wire.turns import RunHint

MAX_ID_LENGTH = 256

RUN_HEADER = "x-trunkline-run"
PARENT_HEADERS = ("x-trunkline-run-parent", "x-trunkline-parent", "x-dynamo-parent-session-id")
CLASS_HEADER = "x-trunkline-class"
FINAL_HEADERS = ("x-trunkline-run-final", "x-trunkline-final")
SESSION_HEADERS = (
    "x-session-id",
    "x-claude-code-session-id",
    "session_id",  # Codex
    "x-dynamo-session-id",
    "x-smg-routing-key",
    "x-session-affinity",
    "x-correlation-id",
)
USER_SESSION = re.compile(r"_session_([0-9A-Za-z-]{1,128})\Z")
BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def identify(
    headers: Mapping[str, str],
    *,
    session_id: str | None = None,
    prompt_cache_key: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> RunHint:
    """What a request says about its run. `headers` has lower-case names (or ignores case).

    Raises `InvalidRequest` for an id that could not be sent back in a header.
    """
    run, source, origin = _run(headers, metadata)
    group = None
    if run is None:
        group, source, origin = _group(headers, session_id, prompt_cache_key, metadata)
    parent_header, parent = _first(headers, PARENT_HEADERS)
    if parent is not None:
        check_id(parent, parent_header)
    if parent is not None and parent in (run, group):
        raise InvalidRequest(f"{parent_header} repeats the run's own id {parent!r} ({source}).", param=parent_header)
    service = service_class(headers.get(CLASS_HEADER), CLASS_HEADER)
    return RunHint(run=run, group=group, parent=parent, origin=origin, final=_final(headers), service=service)


def service_class(value: str | None, param: str) -> ServiceClass:
    """What a run is for, interactive unless said otherwise. Raises `InvalidRequest`."""
    try:
        return ServiceClass((value or ServiceClass.INTERACTIVE).strip().lower())
    except ValueError:
        raise InvalidRequest(f"{param} must be one of {', '.join(ServiceClass)}.", param=param) from None


def _run(headers: Mapping[str, str], metadata: Mapping[str, Any] | None) -> tuple[str | None, str, RunOrigin]:
    named = headers.get(RUN_HEADER)
    if named:
        return check_id(named, RUN_HEADER), RUN_HEADER, RunOrigin.HEADER
    run_id = (metadata or {}).get("run_id")
    if run_id is not None and not isinstance(run_id, str):
        raise InvalidRequest("metadata.run_id must be a string.", param="metadata.run_id")
    if run_id:
        return check_id(run_id, "metadata.run_id"), "metadata.run_id", RunOrigin.BODY
    return None, "", RunOrigin.INFERRED


def _group(
    headers: Mapping[str, str],
    session_id: str | None,
    prompt_cache_key: str | None,
    metadata: Mapping[str, Any] | None,
) -> tuple[str | None, str, RunOrigin]:
    header, session = _first(headers, SESSION_HEADERS)
    if session is not None:
        return check_id(session, header), header, RunOrigin.SESSION
    user_session = session_of_user((metadata or {}).get("user_id"))
    fields = (
        ("session_id", session_id),
        ("prompt_cache_key", prompt_cache_key),
        ("metadata.user_id", user_session),
    )
    for field, value in fields:
        if value:
            return check_id(value, field), field, RunOrigin.BODY
    return None, "", RunOrigin.INFERRED


def session_of_user(user_id: object) -> str | None:
    """The session in Anthropic's `metadata.user_id` as coding agents fill it in; None where there is none.

    Two forms occur: `user_X_account_Y_session_ID`, and a JSON object with a `session_id`. Whatever else the field holds
    names a person, not a session.
    """
    if not isinstance(user_id, str):
        return None
    found = USER_SESSION.search(user_id)
    if found:
        return found[1]
    try:
        fields = msgspec.json.decode(user_id)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None
    session = fields.get("session_id") if isinstance(fields, dict) else None
    return session if isinstance(session, str) and _usable(session) else None


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str | None]:
    for name in names:
        value = headers.get(name)
        if value:
            return name, value
    return "", None


def _final(headers: Mapping[str, str]) -> bool:
    name, value = _first(headers, FINAL_HEADERS)
    if value is None:
        return False
    known = BOOLEANS.get(value.strip().lower())
    if known is None:
        raise InvalidRequest(f"{name} must be true or false, not {value!r}.", param=name)
    return known


def check_id(value: str, param: str) -> str:
    """`value` if it can name a run: ids travel back in headers, so they are printable ASCII."""
    if not _usable(value):
        raise InvalidRequest(
            f"{param} must be 1 to {MAX_ID_LENGTH} printable ASCII characters without spaces around them.", param=param
        )
    return value


def _usable(value: str) -> bool:
    return 0 < len(value) <= MAX_ID_LENGTH and value.isascii() and value.isprintable() and value == value.strip()


def key_scope(api_key: str) -> str:
    """A stable name for what `api_key` may see, from which the key cannot be read."""
    return hashlib.sha256(b"trunkline scope\0" + api_key.encode()).hexdigest()[:32]


def salt_of(scope: str, cache_salt: str | None) -> str:
    """The salt of a request in `scope`, further isolated by vLLM's `cache_salt`."""
    if not cache_salt:
        return scope
    return f"{scope}/{hashlib.sha256(cache_salt.encode()).hexdigest()[:32]}"


def scope_of(salt: str) -> str:
    """The scope a salt lies in."""
    return salt.partition("/")[0]
