"""`/v1/messages`: what reaches the executor, and what Anthropic's own client makes of the answers."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import TextBlock

from tests.gateway.conftest import Serve, Served
from tests.gateway.scripted import CONTEXT, ScriptedExecutor, end, say_and_hang, say_reply
from tests.gateway.sse import named_events
from tests.gateway.test_errors import error_of, refuse
from tests.live import wait_for
from trunkline.core.types import EndReason
from trunkline.wire.turns import Accepted, Delta, Ended, Placed, TurnRequest

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(gateway: Served) -> Iterator[anthropic.Anthropic]:
    with connected(gateway) as opened:
        yield opened


@pytest.fixture(scope="module")
def shared(serve_module: Serve) -> Served:
    return serve_module()


def connected(gateway: Served, key: str = "none", retries: int = 0) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{gateway.port}", api_key=key, max_retries=retries)


def post(gateway: Served, path: str = PATH, **fields: Any) -> Any:
    limit = {"max_tokens": 50} if path == PATH else {}
    return gateway.post(path, {"model": "scripted", **limit, "messages": HI, **fields})


def prompt(gateway: Served, **fields: Any) -> str:
    """The prompt text that a request made."""
    response = post(gateway, **fields)
    assert response.status_code == 200, response.text
    text = gateway.executor.requests[-1].text
    assert text is not None
    return text


def test_an_answer_is_a_message_with_what_the_cache_held_apart(gateway: Served, client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="scripted", max_tokens=50, messages=HI)
    (block,) = message.content
    assert isinstance(block, TextBlock)
    assert (message.type, message.role, message.model, block.text) == ("message", "assistant", "scripted", "hello")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    length = len("<user>hi<assistant>")
    usage = message.usage
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (length // 2, 0)
    assert (usage.input_tokens, usage.output_tokens) == (length - length // 2, 5)
    assert message.id.startswith("msg_")


def test_a_stream_ends_in_the_message_that_a_whole_answer_is(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="scripted", max_tokens=50, messages=HI) as stream:
        assert "".join(stream.text_stream) == "hello"
        streamed = stream.get_final_message()
    whole = client.messages.create(model="scripted", max_tokens=50, messages=HI)
    assert streamed.to_dict(exclude_none=True) | {"id": ""} == whole.to_dict(exclude_none=True) | {"id": ""}


def test_a_stream_begins_with_the_prompts_usage_and_names_its_events(gateway: Served) -> None:
    events = named_events(post(gateway, stream=True))
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[3:-3] == ["content_block_delta"] * 5
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    started, closing = events[0]["message"], events[-2]
    assert (started["content"], started["stop_reason"]) == ([], None)
    assert started["usage"]["cache_read_input_tokens"] == 9
    assert started["usage"]["output_tokens"] == 0
    assert closing["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert closing["usage"]["output_tokens"] == 5


def test_an_answer_without_text_has_no_blocks(gateway: Served) -> None:
    gateway.executor.reply = ""
    assert post(gateway).json()["content"] == []
    kinds = [event["type"] for event in named_events(post(gateway, stream=True))]
    assert kinds == ["message_start", "ping", "message_delta", "message_stop"]


@pytest.mark.parametrize("stream", [False, True])
def test_every_way_to_stop_has_anthropics_name(gateway: Served, stream: bool) -> None:
    def stopped(**fields: Any) -> tuple[str, str | None]:
        response = post(gateway, stream=stream, **fields)
        said = named_events(response)[-2]["delta"] if stream else response.json()
        return said["stop_reason"], said["stop_sequence"]

    assert stopped() == ("end_turn", None)
    assert stopped(max_tokens=3) == ("max_tokens", None)

    async def stop_at_end(executor: ScriptedExecutor, request: TurnRequest, accepted: Accepted) -> Any:
        assert request.stop == ("END",)
        async for event in say_reply(executor, request, accepted):
            yield Ended(EndReason.STOP, event.row, stopped_by="END") if isinstance(event, Ended) else event

    gateway.executor.script = stop_at_end
    assert stopped(stop_sequences=["END"]) == ("stop_sequence", "END")


def test_a_limit_beyond_the_context_means_the_rest_of_it(gateway: Served) -> None:
    gateway.executor.reply = "x" * CONTEXT
    message = post(gateway, max_tokens=64_000).json()
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert gateway.executor.requests[0].max_tokens == CONTEXT - len("<user>hi<assistant>")


def test_system_text_and_blocks_of_text_are_one_system_message(gateway: Served) -> None:
    assert prompt(gateway, system="be kind") == "<system>be kind<user>hi<assistant>"
    blocks = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    assert prompt(gateway, system=blocks) == "<system>a\nb<user>hi<assistant>"
    inside = [*HI, {"role": "system", "content": "now"}, {"role": "user", "content": "go"}]
    assert prompt(gateway, messages=inside) == "<user>hi<system>now<user>go<assistant>"


def test_a_tool_loop_reaches_the_template_as_chat_messages(gateway: Served) -> None:
    loop = [
        {"role": "user", "content": [{"type": "text", "text": "add"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "one"},
                {"type": "text", "text": " moment"},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"b": 2, "a": [1]}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "3"}]},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                {"type": "text", "text": "so?"},
            ],
        },
    ]
    tools = [{"name": "add", "description": "adds", "input_schema": {"type": "object"}}]
    text = prompt(gateway, messages=loop, tools=tools)
    assert text == "<tool add><user>add<assistant>one moment<tool>3<tool><user>so?<assistant>"
    _, assistant, first, second, _ = gateway.executor.rendered[-1]
    assert assistant["reasoning_content"] == "hm"
    (call,) = assistant["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("t1", "add")
    assert call["function"]["arguments"] == {"b": 2, "a": [1]}
    assert (first["tool_call_id"], second["tool_call_id"]) == ("t1", "t2")


def test_neighbouring_messages_of_one_role_become_one(gateway: Served) -> None:
    twice = [*HI, {"role": "user", "content": "there"}]
    assert prompt(gateway, messages=twice) == "<user>hi\nthere<assistant>"


def test_a_last_message_of_the_assistant_is_gone_on_with(gateway: Served) -> None:
    begun = [*HI, {"role": "assistant", "content": "I am"}]
    assert prompt(gateway, messages=begun) == "<user>hi<assistant>I am"


def test_plain_text_documents_are_text_and_everything_else_is_refused_by_its_place(gateway: Served) -> None:
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "facts"}}
    assert prompt(gateway, messages=[{"role": "user", "content": [document]}]) == "<user>facts<assistant>"
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}
    for block in (image, pdf):
        error = error_of(post(gateway, messages=[{"role": "user", "content": [block]}]), 400)
        assert (error["code"], error["param"]) == ("unsupported_parameter", "messages[0].content[0]")
        assert block["type"] in error["message"]
        said = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [block]}]}]
        assert error_of(post(gateway, messages=said), 400)["param"] == "messages[0].content[0].content[0]"


def test_a_template_that_wants_roles_in_turn_gets_them(gateway: Served) -> None:
    gateway.executor.strict_template = True
    said = [*HI, {"role": "system", "content": "late"}]
    assert prompt(gateway, system="be kind", messages=said) == "<system>be kind<user>hi\nlate<assistant>"
    longer = [*said, {"role": "assistant", "content": "hello"}, {"role": "system", "content": "later"}]
    told = prompt(gateway, system="be kind", messages=longer)
    assert told == "<system>be kind<user>hi\nlate<assistant>hello<user>later<assistant>"
    wrong = [{"role": "assistant", "content": "first"}, *HI]
    assert error_of(post(gateway, messages=wrong), 400)["code"] == "template_error"


def test_sampling_and_thinking_reach_the_executor(gateway: Served) -> None:
    post(
        gateway,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        seed=7,
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low"},
    )
    (request,) = gateway.executor.requests
    how = request.sampling
    assert (how.temperature, how.top_p, how.top_k, how.seed) == (0.5, 0.9, 40, 7)
    assert gateway.executor.options[-1] == {"enable_thinking": True, "reasoning_effort": "low"}
    post(gateway, thinking={"type": "disabled"})
    assert gateway.executor.options[-1] == {"enable_thinking": False}


def test_tools_that_only_anthropic_runs_are_left_out_and_named_once(
    gateway: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trunkline.gateway")
    for _ in range(2):
        text = prompt(gateway, tools=[{"type": "web_search_20250305", "name": "web_search"}])
        assert text == "<user>hi<assistant>"
    assert sum("web_search_20250305" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_counted_tokens_are_those_of_the_prompt(gateway: Served, client: anthropic.Anthropic, stream: bool) -> None:
    asked: dict[str, Any] = {
        "system": [{"type": "text", "text": "be kind"}],
        "messages": [*HI, {"role": "assistant", "content": "I am"}],
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
    }
    counted = client.messages.count_tokens(model="scripted", **asked).input_tokens
    post(gateway, stream=stream, **asked)
    (request,) = gateway.executor.requests
    assert counted == len(request.tokens)


def test_tokens_of_a_prompt_that_does_not_fit_are_counted(client: anthropic.Anthropic) -> None:
    long: list[Any] = [{"role": "user", "content": "x" * (CONTEXT + 1)}]
    count = client.messages.count_tokens(model="scripted", messages=long).input_tokens
    assert count == CONTEXT + 1 + len("<user><assistant>")
    with pytest.raises(anthropic.BadRequestError, match=f"maximum context length is {CONTEXT}"):
        client.messages.create(model="scripted", max_tokens=1, messages=long)


def test_a_session_in_the_headers_names_the_run(gateway: Served) -> None:
    body = {"model": "scripted", "max_tokens": 5, "messages": HI}
    response = gateway.post(PATH, body, headers={"X-Claude-Code-Session-Id": "s1", "anthropic-beta": "x,y"})
    assert (response.headers["x-trunkline-run"], response.headers["x-trunkline-turn"]) == ("s1", "0")


@pytest.mark.parametrize("user", ["user_a_account_b_session_s2", '{"device_id": "d", "session_id": "s2"}'])
def test_a_session_in_the_user_id_names_a_group(gateway: Served, user: str) -> None:
    assert post(gateway, metadata={"user_id": user}).status_code == 200
    assert gateway.executor.requests[-1].hint.group == "s2"


# --- errors -----------------------------------------------------------------------------------------------------


def test_the_client_raises_its_own_kinds_of_error(serve: Serve) -> None:
    gateway = serve(api_keys=("sk-a",))
    with connected(gateway, "wrong") as stranger, pytest.raises(anthropic.AuthenticationError) as refused:
        stranger.messages.create(model="scripted", max_tokens=5, messages=HI)
    assert refused.value.type == "authentication_error"
    with connected(gateway, "sk-a") as client:
        with pytest.raises(anthropic.NotFoundError) as missing:
            client.messages.create(model="other", max_tokens=5, messages=HI)
        with pytest.raises(anthropic.BadRequestError) as bad:
            client.messages.create(model="scripted", max_tokens=0, messages=HI)
        gateway.executor.script = refuse(429, "queue_full", 1)
        with pytest.raises(anthropic.RateLimitError) as full:
            client.messages.create(model="scripted", max_tokens=5, messages=HI)
        gateway.executor.script = refuse(503, "engine_stopped")
        with pytest.raises(anthropic.ServiceUnavailableError) as stopped:
            client.messages.create(model="scripted", max_tokens=5, messages=HI)
    kinds = [error.value.type for error in (missing, bad, full, stopped)]
    assert kinds == ["not_found_error", "invalid_request_error", "rate_limit_error", "overloaded_error"]


def test_an_error_after_the_first_event_is_raised_from_the_stream(gateway: Served, client: anthropic.Anthropic) -> None:
    gateway.executor.script = refuse(500, "engine_failed", after_accepting=True)
    with (
        pytest.raises(anthropic.APIStatusError, match="the executor says no"),
        client.messages.stream(model="scripted", max_tokens=5, messages=HI) as stream,
    ):
        stream.until_done()
    assert gateway.executor.open_turns == 0


BAD = [
    # fields, code, param, what the message must say
    ({"messages": "hi"}, "invalid_type", "messages", "expected `array`"),
    ({"messages": []}, "invalid_value", "messages", "at least one"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "invalid_value", "messages[0].role", "assistant"),
    ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content", "required"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "missing_required_parameter", None, "type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "missing_required_parameter",
        "messages[0].content[0].text",
        "required",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "missing_required_parameter",
        "messages[0].content[0].tool_use_id",
        "required",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f"}]}]},
        "invalid_value",
        "messages[0].content[0].input",
        "object",
    ),
    ({"messages": [{"role": "user", "content": "refuse me"}]}, "template_error", "messages", "alternate"),
    ({"max_tokens": 0}, "invalid_value", "max_tokens", "from 1"),
    ({"max_tokens": "5"}, "invalid_type", "max_tokens", "`str`"),
    ({"max_tokens": None}, "invalid_type", "max_tokens", "`null`"),
    ({"temperature": -1}, "invalid_value", "temperature", "from 0"),
    ({"n": 2}, "unsupported_parameter", "n", "one answer"),
    ({"stop_sequences": [""]}, "invalid_value", "stop_sequences", "stop_sequences"),
    ({"stop_sequences": ["x"] * 17}, "invalid_value", "stop_sequences", "at most 16"),
    ({"tools": [{"name": "f"}]}, "missing_required_parameter", "tools[0].input_schema", "required"),
    ({"tools": [{"input_schema": {}}]}, "missing_required_parameter", "tools[0].name", "required"),
    ({"tool_choice": {"type": "any"}}, "invalid_value", "tool_choice", "tools"),
    ({"tool_choice": {"type": "tool"}}, "missing_required_parameter", "tool_choice.name", "required"),
    ({"tool_choice": {"type": "tool", "name": "f"}}, "invalid_value", "tool_choice.name", "none of the tools"),
    ({"tool_choice": {"type": "some"}}, "invalid_value", "tool_choice.type", "auto, any"),
    ({"output_config": {"format": {"type": "xml"}}}, "invalid_value", "output_config.format", "json_schema"),
    ({"system": [{"type": "image"}]}, "unsupported_parameter", "system[0]", "image"),
    ({"chat_template_kwargs": {"messages": 1}}, "invalid_value", "chat_template_kwargs", "server's"),
]


@pytest.mark.parametrize(("fields", "code", "param", "says"), BAD)
@pytest.mark.parametrize("path", [PATH, COUNT])
def test_a_bad_field_is_named_with_the_fix(
    shared: Served, path: str, fields: dict[str, Any], code: str, param: str | None, says: str
) -> None:
    if path == COUNT and ("max_tokens" in fields or "stop_sequences" in fields):
        fields = {"messages": []}
        code, param, says = "invalid_value", "messages", "at least one"
    error = error_of(post(shared, path, **fields), 400)
    assert error["code"] == code
    assert param is None or error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]


def test_max_tokens_is_required_as_anthropic_requires_it(shared: Served) -> None:
    error = error_of(shared.post(PATH, {"model": "scripted", "messages": HI}), 400)
    assert (error["code"], error["param"]) == ("missing_required_parameter", "max_tokens")


def test_a_client_that_leaves_frees_its_turn(gateway: Served, client: anthropic.Anthropic) -> None:
    gateway.executor.script = say_and_hang
    with client.messages.stream(model="scripted", max_tokens=5, messages=HI) as stream:
        for event in stream:
            if event.type == "text":
                break
        assert gateway.executor.open_turns == 1
    wait_for(lambda: gateway.executor.open_turns == 0)
    assert gateway.executor.aborted == 1


def test_a_turn_that_waits_for_whole_characters_says_nothing_meanwhile(gateway: Served) -> None:
    async def say_half_characters(executor: ScriptedExecutor, request: TurnRequest, accepted: Accepted) -> Any:
        yield accepted
        yield Placed(0)
        yield Delta((195,), "")
        yield Delta((169,), "é")
        yield end(request, accepted, spoken=2)

    gateway.executor.script = say_half_characters
    events = named_events(post(gateway, stream=True))
    assert [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"] == ["é"]


# --- model names ------------------------------------------------------------------------------------------------


def test_a_model_answers_to_its_aliases_only(serve: Serve) -> None:
    gateway = serve(model_aliases=("claude-x",))
    assert post(gateway, model="claude-x").json()["model"] == "scripted"
    error = error_of(post(gateway, model="claude-y"), 404)
    assert "--model-alias" in error["message"]
    with connected(gateway) as client:
        listed = client.models.list()
        assert [card.id for card in listed] == ["scripted", "claude-x"]
        card = client.models.retrieve("claude-x")
    assert (card.type, card.display_name, card.max_input_tokens) == ("model", "scripted", CONTEXT)
    assert card.created_at is not None


def test_a_model_told_to_answers_to_every_name(serve: Serve) -> None:
    gateway = serve(any_model=True)
    assert post(gateway, model="claude-anything").status_code == 200
    assert gateway.chat(model="gpt-anything").json()["model"] == "scripted"
