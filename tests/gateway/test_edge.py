"""What clients send at the edge of sense, to every endpoint that generates: served, or refused with what to do."""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.gateway.conftest import Serve, Served
from tests.gateway.test_errors import error_of
from trunkline.gateway.openapi import OPERATIONS

Turns = list[tuple[str, str]]


@dataclass(frozen=True)
class Api:
    """How one endpoint is told a conversation, tools and an image (None: it has no such thing)."""

    say: Callable[[Turns], dict[str, Any]]
    tool: Callable[[str, Any], dict[str, Any]] | None
    image: dict[str, Any] | None

    def hi(self, **fields: Any) -> dict[str, Any]:
        """A request that is served."""
        return self.say([("user", "hi")]) | fields


def _messages(turns: Turns) -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for role, text in turns]


APIS = {
    "/v1/chat/completions": Api(
        say=lambda turns: {"messages": _messages(turns)},
        tool=lambda name, schema: {"type": "function", "function": {"name": name, "parameters": schema}},
        image={
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}
            ]
        },
    ),
    "/v1/completions": Api(
        say=lambda turns: {"prompt": "".join(f"<{role}>{text}" for role, text in turns)}, tool=None, image=None
    ),
    "/v1/responses": Api(
        say=lambda turns: {"input": _messages(turns)},
        tool=lambda name, schema: {"type": "function", "name": name, "parameters": schema},
        image={
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]}]
        },
    ),
    "/v1/messages": Api(
        say=lambda turns: {"messages": _messages(turns), "max_tokens": 16},
        tool=lambda name, schema: {"name": name, "input_schema": schema},
        image={
            "max_tokens": 16,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
                    ],
                }
            ],
        },
    ),
}
TOOLED = [path for path, api in APIS.items() if api.tool is not None]
paths = pytest.mark.parametrize("path", APIS)
tooled = pytest.mark.parametrize("path", TOOLED)


@pytest.fixture(scope="module")
def shared(serve_module: Serve) -> Served:
    served = serve_module()
    served.executor.context = 10_000_000
    return served


def raw(shared: Served, path: str, body: bytes) -> Any:
    response = shared.client.post(path, content=body, headers={"content-type": "application/json"})
    assert shared.executor.open_turns == 0
    return response


def test_every_endpoint_that_generates_is_tried_here() -> None:
    assert set(APIS) == {path for (_, path), operation in OPERATIONS.items() if operation.generation}


@paths
def test_unknown_fields_are_accepted_and_named_once_in_the_log(
    serve: Serve, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve()
    with caplog.at_level(logging.INFO, "trunkline.gateway"):
        for _ in range(2):
            assert served.post(path, APIS[path].hi(field_of_tomorrow={"a": [1]})).status_code == 200
    assert sum("field_of_tomorrow" in record.getMessage() for record in caplog.records) == 1


@paths
def test_a_history_of_a_thousand_messages_is_served(shared: Served, path: str) -> None:
    turns = [(("user", "assistant")[at % 2], f"message {at}") for at in range(1001)]
    response = shared.post(path, APIS[path].say(turns))
    assert response.status_code == 200, response.text
    text = shared.executor.requests[-1].text
    assert text is not None
    assert text.index("message 0<") < text.index("message 999<") < text.index("message 1000")


@paths
@pytest.mark.parametrize(
    "text", ["\x00\x01\x7f", "\ufeff\u202e\u0085", "e\u0301\U0001f9d1\u200d\U0001f680", "\r\n\u2028"]
)
def test_odd_characters_reach_the_model_as_they_are(shared: Served, path: str, text: str) -> None:
    assert shared.post(path, APIS[path].say([("user", f"[{text}]")])).status_code == 200
    assert f"[{text}]" in (shared.executor.requests[-1].text or "")


@paths
@pytest.mark.parametrize("bad", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\xc0\xaf"])
def test_bytes_that_are_not_utf8_are_refused_with_their_place(shared: Served, path: str, bad: bytes) -> None:
    body = json.dumps(APIS[path].say([("user", "hi MARK")])).encode()
    error = error_of(raw(shared, path, body.replace(b"MARK", bad)), 400)
    assert error["code"] == "invalid_json"
    assert f"byte {body.index(b'MARK')}" in error["message"]


@paths
@pytest.mark.parametrize("escape", [b"\\ud800", b"\\udfff", b"\\ud800x\\udc00", b"\\udc00\\ud800"])
def test_lone_surrogates_are_refused_with_what_to_do(shared: Served, path: str, escape: bytes) -> None:
    body = json.dumps(APIS[path].say([("user", "hi MARK")])).encode()
    error = error_of(raw(shared, path, body.replace(b"MARK", escape)), 400)
    assert error["code"] == "invalid_json"
    assert "surrogates must come in pairs" in error["message"]


@paths
def test_images_are_refused_by_name(shared: Served, path: str) -> None:
    image = APIS[path].image
    if image is None:  # a completion's prompt is text by its type
        assert error_of(shared.post(path, {"prompt": [{"type": "image_url"}]}), 400)["code"] == "invalid_type"
        return
    error = error_of(shared.post(path, image), 400)
    assert error["code"] == "unsupported_parameter"
    assert "image" in error["message"]
    assert error["param"].endswith("content[0]")


DEEP = 20_000


@paths
@pytest.mark.parametrize("field", ["metadata", "tools", "field_of_tomorrow"])
@pytest.mark.parametrize(("begin", "end"), [(b"[", b"]"), (b'{"a":', b"}")], ids=["lists", "objects"])
def test_endless_nesting_is_refused(shared: Served, path: str, field: str, begin: bytes, end: bytes) -> None:
    body = json.dumps(APIS[path].hi(**{field: "MARK"})).encode()
    nested = begin * DEEP + b"0" + end * DEEP
    error = error_of(raw(shared, path, body.replace(b'"MARK"', nested)), 400)
    assert error["code"] in ("invalid_json", "invalid_type")


@tooled
@pytest.mark.parametrize(("depth", "status"), [(20, 200), (200, 400), (450, 400), (900, 400)])
def test_schemas_are_served_to_a_sensible_depth(shared: Served, path: str, depth: int, status: int) -> None:
    make = APIS[path].tool
    assert make is not None
    body = json.dumps(APIS[path].hi(tools=[make("t", {"MARK": 0})])).encode()
    nested = b'{"type":"object","properties":{"a":' * depth + b"{}" + b"}}" * depth
    response = raw(shared, path, body.replace(b'{"MARK": 0}', nested))
    assert response.status_code == status, response.text
    if status == 400:
        assert "nested" in error_of(response, 400)["message"]


@tooled
def test_huge_schemas_are_served_or_refused(shared: Served, path: str) -> None:
    make = APIS[path].tool
    assert make is not None
    properties = {f"property_{at}": {"type": "string", "description": "d" * 100} for at in range(20_000)}
    response = shared.post(path, APIS[path].hi(tools=[make("t", {"type": "object", "properties": properties})]))
    if response.status_code != 200:
        assert "tools" in error_of(response, 400)["param"]


@tooled
def test_a_hundred_tools_are_served(shared: Served, path: str) -> None:
    make = APIS[path].tool
    assert make is not None
    tools = [make(f"tool_{at}", {"type": "object", "properties": {"a": {"type": "string"}}}) for at in range(100)]
    assert shared.post(path, APIS[path].hi(tools=tools)).status_code == 200


@paths
@pytest.mark.parametrize("number", ["1e400", "-1e400", "1" + "0" * 5000, "0.1e-5000", "NaN", "Infinity"])
@pytest.mark.parametrize("field", ["temperature", "seed", "top_k", "max_tokens", "field_of_tomorrow"])
def test_numbers_that_no_machine_holds_are_no_bug(shared: Served, path: str, field: str, number: str) -> None:
    body = json.dumps(APIS[path].hi(**{field: "MARK"})).encode()
    response = raw(shared, path, body.replace(b'"MARK"', number.encode()))
    if response.status_code != 200:
        error_of(response, 400)


@paths
def test_a_field_sent_twice_counts_as_it_came_last(shared: Served, path: str) -> None:
    body = json.dumps(APIS[path].hi(temperature=0)).encode()
    response = raw(shared, path, body[:-1] + b',"temperature":101}')
    assert "101" in error_of(response, 400)["message"]


@paths
def test_an_endless_word_is_served(shared: Served, path: str) -> None:
    assert shared.post(path, APIS[path].say([("user", "a" * 4_000_000)])).status_code == 200
    assert shared.executor.requests[-1].tokens.size > 4_000_000
