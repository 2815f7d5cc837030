"""Every error has OpenAI's shape, names the field and the fix, and no input makes a 500."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from tests.gateway.conftest import Serve, Served
from tests.gateway.scripted import CONTEXT, ScriptedExecutor, end
from trunkline.core.types import EndReason
from trunkline.gateway.app import build_app
from trunkline.gateway.records import RunRecords
from trunkline.gateway.settings import GatewaySettings
from trunkline.wire.turns import Accepted, Delta, Failed, Placed, TurnRequest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def error_of(response: Any, status: int) -> dict[str, Any]:
    """The error of a response, its shape checked."""
    assert response.status_code == status, response.text
    body = response.json()
    if response.url.path.startswith("/v1/messages"):
        assert body.pop("type") == "error"
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"] and error["code"]
    return error


BAD_FIELDS = [
    # path, body, code, param, what the message must say
    (CHAT, {"messages": "hi"}, "invalid_type", "messages", "expected `array`"),
    (CHAT, {}, "missing_required_parameter", "messages", "required"),
    (CHAT, {"messages": []}, "invalid_value", "messages", "at least one"),
    (CHAT, {"messages": [{"content": "x"}]}, "missing_required_parameter", "messages[0].role", "required"),
    (CHAT, {"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content", "required"),
    (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "invalid_value", "messages[0].role", "assistant"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, "invalid_type", "messages[0].content", "`int`"),
    (CHAT, {"messages": [{"role": "user", "content": "refuse me"}]}, "template_error", "messages", "alternate"),
    (CHAT, {"max_tokens": "5"}, "invalid_type", "max_tokens", "`str`"),
    (CHAT, {"max_tokens": 2.5}, "invalid_type", "max_tokens", "`float`"),
    (CHAT, {"max_tokens": 0}, "invalid_value", "max_tokens", "from 1"),
    (CHAT, {"max_tokens": 10**30}, "invalid_value", "max_tokens", "from 1"),
    (CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, "invalid_value", "max_tokens", "send one"),
    (CHAT, {"temperature": -0.1}, "invalid_value", "temperature", "from 0"),
    (CHAT, {"top_p": 1.5}, "invalid_value", "top_p", "from 0 to 1"),
    (CHAT, {"top_k": -2}, "invalid_value", "top_k", "-1"),
    (CHAT, {"min_p": 2}, "invalid_value", "min_p", "from 0 to 1"),
    (CHAT, {"presence_penalty": 3}, "invalid_value", "presence_penalty", "from -2 to 2"),
    (CHAT, {"repetition_penalty": 0}, "invalid_value", "repetition_penalty", "from 0.01"),
    (CHAT, {"logit_bias": {"x": 1}}, "invalid_value", "logit_bias.x", "token ids"),
    (CHAT, {"logit_bias": {"258": 1}}, "invalid_value", "logit_bias.258", "0 to 257"),
    (CHAT, {"logit_bias": {"1": 101}}, "invalid_value", "logit_bias.1", "from -100 to 100"),
    (CHAT, {"stop": ["a"] * 17}, "invalid_value", "stop", "at most 16"),
    (CHAT, {"stop": ""}, "invalid_value", "stop", "empty"),
    (CHAT, {"stop_token_ids": [-1]}, "invalid_value", "stop_token_ids", "0 to 257"),
    (CHAT, {"n": 0}, "invalid_value", "n", "from 1"),
    (CHAT, {"n": 129}, "invalid_value", "n", "to 128"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs", "to 20"),
    (CHAT, {"top_logprobs": 1}, "invalid_value", "top_logprobs", "logprobs"),
    (CHAT, {"model": "gpt-5"}, "model_not_found", "model", "'scripted'"),
    (CHAT, {"tool_choice": "required"}, "invalid_value", "tool_choice", "needs tools"),
    (CHAT, {"response_format": {"type": "xml"}}, "unsupported_parameter", "response_format.type", "json_schema"),
    (CHAT, {"functions": [{"name": "f"}]}, "unsupported_parameter", "functions", "not supported"),
    (CHAT, {"grammar": "root ::= x"}, "unsupported_parameter", "grammar", "guided_grammar"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "invalid_value", "chat_template_kwargs", "messages"),
    (CHAT, {"metadata": {"run_id": 1}}, "invalid_value", "metadata.run_id", "string"),
    (CHAT, {"session_id": "\n"}, "invalid_value", "session_id", "printable"),
    (TEXT, {}, "missing_required_parameter", "prompt", "required"),
    (TEXT, {"prompt": 3}, "invalid_type", "prompt", "expected"),
    (TEXT, {"prompt": []}, "invalid_value", "prompt", "empty"),
    (TEXT, {"prompt": [[]]}, "invalid_value", "prompt[0]", "empty"),
    (TEXT, {"prompt": "", "add_special_tokens": False}, "invalid_value", "prompt", "empty"),
    (TEXT, {"prompt": [1, "a"]}, "invalid_type", "prompt", "mixes"),
    (TEXT, {"prompt": [1, 258]}, "invalid_value", "prompt", "0 to 257"),
    (TEXT, {"prompt": [1, 10**30]}, "invalid_value", "prompt", "0 to 257"),
    (TEXT, {"prompt": ["a", "b"], "n": 100}, "invalid_value", "n", "200 choices"),
    (TEXT, {"prompt": "a", "best_of": 2}, "unsupported_parameter", "best_of", "not supported"),
    (TEXT, {"prompt": "a", "suffix": "b"}, "unsupported_parameter", "suffix", "not supported"),
    (TEXT, {"prompt": "a", "logprobs": 21}, "invalid_value", "logprobs", "to 20"),
    (TEXT, {"prompt": "a", "echo": "yes"}, "invalid_type", "echo", "bool"),
    ("/tokenize", {}, "invalid_value", "prompt", "either"),
    ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "invalid_value", "prompt", "either"),
    ("/tokenize", {"prompt": "a", "model": "gpt-5"}, "model_not_found", "model", "'scripted'"),
    ("/detokenize", {"tokens": [-1]}, "invalid_value", "tokens", "0 to 257"),
    ("/detokenize", {"tokens": "a"}, "invalid_type", "tokens", "expected `array`"),
    ("/v1/runs", {"id": ""}, "invalid_value", "id", "printable"),
    ("/v1/runs", {"id": "a", "parent": "a"}, "invalid_value", "parent", "own id"),
    ("/v1/runs", {"name": "x" * 5000}, "invalid_value", "name", "4096"),
    ("/v1/runs", {"expected_turns": 0}, "invalid_value", "expected_turns", "from 1"),
]


@pytest.fixture(scope="module")
def shared(serve_module: Serve) -> Served:
    """One gateway for all cases that change nothing in it."""
    return serve_module(max_body_bytes=2_000_000)


@pytest.mark.parametrize(("path", "body", "code", "param", "says"), BAD_FIELDS)
def test_a_bad_field_is_named_with_the_fix(
    shared: Served, path: str, body: dict[str, Any], code: str, param: str, says: str
) -> None:
    complete = {"messages": MESSAGES} | body if path == CHAT and body else body
    error = error_of(shared.post(path, complete), 404 if code == "model_not_found" else 400)
    assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error")
    assert says in error["message"]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_content_parts_that_are_not_text_are_named(shared: Served, kind: str) -> None:
    content = [{"type": "text", "text": "see"}, {"type": kind, kind: {}}]
    error = error_of(shared.post(CHAT, {"messages": [{"role": "user", "content": content}]}), 400)
    assert (error["code"], error["param"]) == ("unsupported_parameter", "messages[0].content[1]")
    assert kind in error["message"]


BAD_BODIES = [
    (b"", "byte 0"),
    (b"{", "character"),
    (b'{"messages": [}', "byte 14"),
    (b"nonsense", "byte"),
    (b"[]", "expected `object`"),
    (b'{"messages": NaN}', "byte 13"),
    (b'{"messages": [], "temperature": Infinity}', "byte"),
    (b'{"messages": [{"role": "user", "content": "\xff"}]}', "not valid UTF-8 (byte 43)"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogates"),
    (b'{"messages": [{"role": "user", "content": "\\ud800 and more text"}]}', "byte 49"),
    (b'{"messages": ' + b"[" * 100_000, "nested too deeply"),
    (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b', "messages": []}', "nested too deeply"),
]


@pytest.mark.parametrize(("raw", "says"), BAD_BODIES)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
def test_a_broken_body_is_a_400_that_says_where(shared: Served, path: str, raw: bytes, says: str) -> None:
    error = error_of(shared.client.post(path, content=raw), 400)
    if path == CHAT:
        assert says in error["message"]


def test_a_number_that_no_float_holds_is_named(shared: Served) -> None:
    raw = json.dumps({"messages": MESSAGES})[:-1].encode() + b', "temperature": 1e999}'
    error = error_of(shared.client.post(CHAT, content=raw), 400)
    assert error["param"] == "temperature"
    assert "out of range" in error["message"]


def test_deeply_nested_tools_are_refused(shared: Served) -> None:
    nested: Any = {}
    for _ in range(5000):
        nested = {"a": nested}
    raw = (
        json.dumps({"messages": MESSAGES})[:-1].encode()
        + b', "tools": ['
        + b'{"a":' * 5000
        + b"1"
        + b"}" * 5000
        + b"]}"
    )
    assert "nested" in error_of(shared.client.post(CHAT, content=raw), 400)["message"]


def test_a_context_overflow_says_both_numbers(shared: Served) -> None:
    error = error_of(shared.chat("x" * 400, max_tokens=200), 400)
    prompt = 400 + len("<user><assistant>")
    assert error["code"] == "context_length_exceeded"
    for number in (CONTEXT, prompt + 200, prompt, 200):
        assert str(number) in error["message"]


def test_a_prompt_that_fills_the_context_alone_overflows(shared: Served) -> None:
    assert error_of(shared.chat("x" * CONTEXT), 400)["code"] == "context_length_exceeded"
    assert error_of(shared.post(TEXT, {"prompt": [1] * CONTEXT}), 400)["code"] == "context_length_exceeded"
    assert error_of(shared.post(TEXT, {"prompt": ["a", "x" * CONTEXT]}), 400)["param"] == "prompt[1]"


def test_a_body_over_the_limit_is_refused(serve: Serve) -> None:
    gateway = serve(max_body_bytes=1000)
    error = error_of(gateway.chat("x" * 1000), 413)
    assert error["code"] == "request_too_large"
    assert "1000 bytes" in error["message"]


def test_a_body_over_the_limit_is_refused_without_a_content_length(serve: Serve) -> None:
    gateway = serve(max_body_bytes=1000)

    def chunks() -> Iterator[bytes]:
        for _ in range(50):
            yield b"x" * 100

    error_of(gateway.client.post(CHAT, content=chunks()), 413)


def test_a_body_that_never_ends_is_cut_off(serve: Serve) -> None:
    gateway = serve(max_body_bytes=1000)
    with socket.create_connection(("127.0.0.1", gateway.port)) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n".encode())
        connection.sendall(b"x" * 8000)
        assert connection.recv(12) == b"HTTP/1.1 413"


def test_a_body_that_stops_arriving_is_a_408(serve: Serve) -> None:
    gateway = serve(body_timeout_s=0.05)
    with socket.create_connection(("127.0.0.1", gateway.port)) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
        assert connection.recv(12) == b"HTTP/1.1 408"


def test_a_compressed_body_is_a_415(shared: Served) -> None:
    error = error_of(shared.client.post(CHAT, content=b"x", headers={"content-encoding": "gzip"}), 415)
    assert "gzip" in error["message"]


def test_requests_beyond_the_limit_get_429_with_retry_after(serve: Serve) -> None:
    gateway = serve(max_in_flight=0)
    response = gateway.chat()
    error = error_of(response, 429)
    assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
    assert int(response.headers["retry-after"]) >= 1


def test_a_server_that_is_not_ready_says_what_it_waits_for(gateway: Served) -> None:
    gateway.executor.not_ready = "the model is loading"
    for response in (gateway.chat(), gateway.client.get("/health")):
        assert "the model is loading" in error_of(response, 503)["message"]
        assert response.headers["retry-after"]


def refuse(status: int, code: str, retry_after_s: float | None = None, after_accepting: bool = False) -> Any:
    """A script that fails a turn at once, or after its first token."""

    async def script(executor: ScriptedExecutor, request: TurnRequest, accepted: Accepted) -> Any:
        if after_accepting:
            yield accepted
            yield Placed(0)
            yield Delta((97,), "a")
        yield Failed(status, code, "the executor says no", retry_after_s)

    return script


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_an_executors_refusal_becomes_a_status_even_for_streams(gateway: Served, stream: bool, n: int) -> None:
    gateway.executor.script = refuse(429, "queue_full", 2.5)
    response = gateway.chat(stream=stream, n=n)
    error = error_of(response, 429)
    assert (error["message"], error["type"]) == ("the executor says no", "rate_limit_error")
    assert response.headers["retry-after"] == "3"
    assert gateway.executor.open_turns == 0


def test_a_refused_branch_refuses_the_request_and_aborts_the_others(gateway: Served) -> None:
    calls = 0

    async def refuse_third(executor: ScriptedExecutor, request: TurnRequest, accepted: Accepted) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            yield Failed(429, "queue_full", "no room for the third", 1)
            return
        yield accepted
        time.sleep(0)
        yield end(request, accepted, spoken=0)

    gateway.executor.script = refuse_third
    error_of(gateway.chat(n=4), 429)
    assert gateway.executor.open_turns == 0


@pytest.mark.parametrize("status", [500, 503])
def test_a_turn_that_fails_midway_is_a_status_or_an_event(gateway: Served, status: int) -> None:
    gateway.executor.script = refuse(status, "engine_failed", after_accepting=True)
    assert error_of(gateway.chat(), status)["code"] == "engine_failed"
    events = [line for line in gateway.chat(stream=True).text.split("\n\n") if line]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "engine_failed"
    assert "data: [DONE]" not in events


@pytest.mark.parametrize(("reason", "status"), [(EndReason.FAILED, 500), (EndReason.ABORTED, 503)])
def test_a_turn_that_did_not_end_by_itself_is_an_error(gateway: Served, reason: EndReason, status: int) -> None:
    async def end_badly(executor: ScriptedExecutor, request: TurnRequest, accepted: Accepted) -> Any:
        yield accepted
        yield end(request, accepted, spoken=0, reason=reason)

    gateway.executor.script = end_badly
    error_of(gateway.chat(), status)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_bug_is_a_500_in_the_same_shape(
    gateway: Served, caplog: pytest.LogCaptureFixture, late: bool, n: int
) -> None:
    async def break_down(executor: ScriptedExecutor, request: TurnRequest, accepted: Accepted) -> Any:
        yield accepted
        if late:
            yield Delta((97,), "a")
        raise KeyError("bug")

    gateway.executor.script = break_down
    assert error_of(gateway.chat(n=n), 500)["code"] == "internal_error"
    events = [line for line in gateway.chat(n=n, stream=True).text.split("\n\n") if line]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "internal_error"
    assert "KeyError" in caplog.text
    assert gateway.executor.open_turns == 0


# --- every route ------------------------------------------------------------------------------------------------


def routes(served: Served) -> list[Route]:
    return [route for route in served.app.routes if isinstance(route, Route)]


def test_every_route_answers_a_wrong_method_in_the_same_shape(shared: Served) -> None:
    for route in routes(shared):
        path = route.path.replace("{id:path}", "x")
        response = shared.client.patch(path)
        error = error_of(response, 405)
        assert error["code"] == "method_not_allowed"
        for method in route.methods or ():
            assert method in response.headers["allow"]


def test_every_post_route_answers_a_broken_body_in_the_same_shape(shared: Served) -> None:
    for route in routes(shared):
        if "POST" in (route.methods or ()) and "{" not in route.path and route.path != "/reset_prefix_cache":
            assert error_of(shared.client.post(route.path, content=b"{broken"), 400)["code"] == "invalid_json"


@pytest.mark.parametrize("path", ["/", "/v1", "/v2/models", "/v1/chat/completions/", "/v1/runs/unknown"])
def test_an_unknown_path_is_a_404_in_the_same_shape(shared: Served, path: str) -> None:
    error_of(shared.client.get(path), 404)


def test_every_route_refuses_a_missing_key_in_the_same_shape(serve: Serve) -> None:
    gateway = serve(api_keys=("sk-a",))
    for route in routes(gateway):
        for method in (route.methods or set()) - {"HEAD"}:
            response = gateway.client.request(method, route.path.replace("{id:path}", "x"))
            if route.path in ("/health", "/metrics"):
                assert response.status_code == 200
            else:
                assert error_of(response, 401)["code"] == "invalid_api_key"


def test_every_route_is_documented() -> None:
    records = RunRecords(None)
    app = build_app(ScriptedExecutor(records.turn), records, GatewaySettings())
    records.close()
    text = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    for route in app.routes:
        assert isinstance(route, Route)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            assert f"`{method} {route.path.replace(':path', '')}" in text
