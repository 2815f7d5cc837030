"""Whatever is sent, the answer is 200 or a 4xx in OpenAI's shape: never a 500, never a hung or lost turn."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateway.conftest import Serve, Served
from tests.gateway.test_errors import error_of
from trunkline.wire.anthropic import CountTokensBody, MessagesBody
from trunkline.wire.openai import ChatBody, CompletionBody, DeclareRunBody, DetokenizeBody, TokenizeBody
from trunkline.wire.responses import ResponsesBody

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    scalars | st.sampled_from(["user", "text", "auto", "none", "required", "", "\x00", "x" * 600]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
small = st.integers(-3, 20) | st.floats(-3, 3)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"]) | values, "content": st.text() | values},
        optional={"name": values, "tool_calls": values, "tool_call_id": values},
    ),
    max_size=3,
)

items = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output"]) | values,
            "role": st.sampled_from(["user", "assistant", "system", "developer"]) | values,
            "content": st.text() | values,
            "call_id": st.text(),
            "name": st.text(),
            "arguments": st.text(),
            "output": st.text() | values,
            "summary": st.just([]) | values,
            "encrypted_content": st.text() | st.text().map("trunkline.1.{}".format),
        },
    ),
    max_size=4,
)
blocks = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "thinking", "tool_use", "tool_result", "document", "image"])},
        optional={
            "text": st.text(),
            "thinking": st.text(),
            "id": st.text(),
            "name": st.text(),
            "input": st.dictionaries(st.text(), values),
            "tool_use_id": st.text(),
            "content": st.text() | values,
            "source": st.just({"type": "text", "data": "x"}) | values,
        },
    ),
    max_size=3,
)
turns = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text() | blocks}), max_size=3
)
tools = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["function", "custom"]) | values,
            "name": st.text(),
            "parameters": st.just({"type": "object"}) | values,
            "input_schema": st.just({"type": "object"}) | values,
        },
    ),
    max_size=2,
)


def bodies(struct: type, **usual: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of a body's fields, each of its usual kind or of any."""
    fields = {name: usual.get(name, small) | values for name in struct.__struct_fields__ if name != "model"}  # type: ignore[attr-defined]
    return st.fixed_dictionaries({}, optional=fields)


REQUESTS = {
    "/v1/chat/completions": bodies(
        ChatBody, messages=messages, stop=st.text(), logit_bias=st.dictionaries(st.text(), small)
    ),
    "/v1/completions": bodies(CompletionBody, prompt=st.text() | st.lists(st.integers(-2, 300)) | st.lists(st.text())),
    "/tokenize": bodies(TokenizeBody, prompt=st.text(), messages=messages),
    "/detokenize": bodies(DetokenizeBody, tokens=st.lists(st.integers(-2, 300))),
    "/v1/responses": bodies(ResponsesBody, input=st.text() | items, tools=tools, include=st.lists(st.text())),
    "/v1/messages": bodies(MessagesBody, messages=turns, system=st.text() | blocks, tools=tools, max_tokens=st.just(5)),
    "/v1/messages/count_tokens": bodies(CountTokensBody, messages=turns, system=st.text() | blocks, tools=tools),
    "/v1/runs": bodies(DeclareRunBody, id=st.text(), parent=st.text(), name=st.text()),
}


@pytest.fixture(scope="module")
def shared(serve_module: Serve) -> Served:
    return serve_module(max_choices=4)


def check(gateway: Served, path: str, raw: bytes) -> None:
    response = gateway.client.post(path, content=raw)
    if response.status_code not in (200, 201):
        assert 400 <= response.status_code < 500
        error_of(response, response.status_code)
    assert gateway.executor.open_turns == 0


@pytest.mark.parametrize("path", REQUESTS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_json_object_is_answered(shared: Served, path: str, data: st.DataObject) -> None:
    body = data.draw(REQUESTS[path])
    if path == "/v1/chat/completions":
        body.setdefault("messages", [{"role": "user", "content": "hi"}])
    if path.startswith("/v1/messages"):
        body.setdefault("messages", [{"role": "user", "content": "hi"}])
        body.setdefault("max_tokens", 5)
    check(shared, path, json.dumps(body).encode())


@given(raw=st.binary(max_size=40) | values.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=60, deadline=None)
def test_any_bytes_are_answered(shared: Served, raw: bytes) -> None:
    check(shared, "/v1/chat/completions", raw)


HEADERS = ("x-trunkline-run", "x-trunkline-run-parent", "x-trunkline-run-final", "x-session-id", "session_id", "expect")


@given(
    name=st.sampled_from(HEADERS),
    value=st.lists(st.integers(0x21, 0x7E) | st.integers(0x80, 0xFF) | st.just(0x20), max_size=300).map(bytes),
)
@settings(max_examples=60, deadline=None)
def test_any_header_is_answered(shared: Served, name: str, value: bytes) -> None:
    raw = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    response = shared.client.post("/v1/chat/completions", content=raw, headers={name.encode(): value.strip()})
    assert response.status_code in (200, 400)
