"""Tools, thinking and schemas through OpenAI's Responses and Anthropic's Messages, with their own clients."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.gateway.conftest import Served
from tests.gateway.sse import named_events
from tests.gateway.test_errors import error_of
from tests.gateway.test_tools import said
from trunkline.wire.turns import CallFormat, TemplateTraits

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION: Any = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}
TOOL: Any = {"name": "add", "input_schema": SCHEMA}
BOTH = "Both.\n" + said() + "\n" + said("sub", '{"a": [2, "x"]}')
THINKING = TemplateTraits(CallFormat.HERMES, ("<think>", "</think>"))


class Sum(BaseModel):
    """What a schema asks for."""

    total: int


@pytest.fixture
def gpt(gateway: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(gateway: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{gateway.port}", api_key="none", max_retries=0) as client:
        yield client


def respond(gateway: Served, given: Any = "hi", **fields: Any) -> Any:
    return gateway.post("/v1/responses", {"input": given, "tools": [FUNCTION], **fields})


def message(gateway: Served, **fields: Any) -> Any:
    body = {"model": "scripted", "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
    return gateway.post("/v1/messages", body | fields)


# --- Responses --------------------------------------------------------------------------------------------------


def test_calls_are_items_of_a_response(gateway: Served, gpt: openai.OpenAI) -> None:
    gateway.executor.reply = BOTH
    tools = [FUNCTION, {**FUNCTION, "name": "sub"}]
    with gpt.responses.stream(model="scripted", input="hi", tools=tools) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        streamed = stream.get_final_response()
    text, first, second = streamed.output
    assert text.type == "message" and streamed.output_text == "Both."
    assert first.type == "function_call" and second.type == "function_call"
    assert (first.name, first.arguments, first.status) == ("add", '{"a": 1}', "completed")
    assert (second.name, json.loads(second.arguments)) == ("sub", {"a": [2, "x"]})
    assert "".join(pieces) == first.arguments + second.arguments
    assert len(pieces) > 8  # as they are generated
    assert len({first.call_id, second.call_id}) == 2
    whole = gpt.responses.create(model="scripted", input="hi", tools=tools)
    assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]


def test_the_events_of_a_call_are_openais(gateway: Served) -> None:
    gateway.executor.reply = said()
    events = named_events(respond(gateway, stream=True))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert set(kinds[3:-3]) == {"function_call_arguments.delta"}
    added, arguments, done = events[2]["item"], events[-3], events[-2]["item"]
    assert (added["status"], added["arguments"]) == ("in_progress", "")
    assert arguments["arguments"] == done["arguments"] == '{"a": 1}'
    assert added["id"] == arguments["item_id"] == done["id"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_a_call_in_a_namespace_comes_back_with_it(gateway: Served) -> None:
    gateway.executor.reply = said("agents__spawn")
    tools = [{"type": "namespace", "name": "agents", "description": "d", "tools": [{**FUNCTION, "name": "spawn"}]}]
    (call,) = respond(gateway, tools=tools).json()["output"]
    assert (call["namespace"], call["name"]) == ("agents", "spawn")


def test_a_tool_loop_of_responses_renders_what_was_said(gateway: Served, gpt: openai.OpenAI) -> None:
    gateway.executor.reply = BOTH
    tools = [FUNCTION, {**FUNCTION, "name": "sub"}]
    first = gpt.responses.create(model="scripted", input="hi", tools=tools)
    results: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "5"}
        for item in first.output
        if item.type == "function_call"
    ]
    gateway.executor.reply = "done"
    gpt.responses.create(model="scripted", input=results, tools=tools, previous_response_id=first.id)
    chained = gateway.executor.requests[-1].text
    assert chained == f"<tool add><tool sub><user>hi<assistant>{BOTH}<tool>5<tool>5<assistant>"
    history: Any = [{"role": "user", "content": "hi"}, *first.output, *results]
    gpt.responses.create(model="scripted", input=history, tools=tools, store=False)
    assert gateway.executor.requests[-1].text == chained


def test_reasoning_is_an_item_and_never_text(gateway: Served, gpt: openai.OpenAI) -> None:
    gateway.executor.traits = THINKING
    gateway.executor.reply = "<think>\nhm\n</think>\n\nhello"
    response = gpt.responses.create(model="scripted", input="hi", include=["reasoning.encrypted_content"])
    thought, text = response.output
    assert thought.type == "reasoning" and thought.content is not None
    assert (thought.content[0].text.strip(), response.output_text) == ("hm", "hello")
    assert text.type == "message" and response.usage is not None
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    with gpt.responses.stream(model="scripted", input="hi") as stream:
        streamed = "".join(event.delta for event in stream if event.type == "response.reasoning_text.delta")
    assert streamed == thought.content[0].text
    asked: Any = {"role": "user", "content": "hi"}
    again: Any = {"role": "user", "content": "so?"}
    silent = thought.to_dict() | {"content": None}  # as the Codex CLI sends it back
    for sent in (thought, silent):
        gpt.responses.create(model="scripted", input=[asked, sent, text, again])  # type: ignore[list-item]
        assert gateway.executor.rendered[-1][1]["reasoning_content"] == thought.content[0].text
    gpt.responses.create(model="scripted", input="so?", previous_response_id=response.id)
    assert gateway.executor.rendered[-1][1]["reasoning_content"] == thought.content[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_response_that_thought_are_those_of_its_text(gateway: Served, stream: bool) -> None:
    gateway.executor.traits = THINKING
    gateway.executor.reply = "<think>hm</think>hello"
    answer = respond(gateway, tools=[], stream=stream, include=["message.output_text.logprobs"])
    response = named_events(answer)[-1]["response"] if stream else answer.json()
    (text,) = response["output"][1]["content"]
    assert "".join(entry["token"] for entry in text["logprobs"]).endswith("hello")
    assert "hm" not in "".join(entry["token"] for entry in text["logprobs"])


def test_a_schema_of_a_response_becomes_a_constraint(gateway: Served, gpt: openai.OpenAI) -> None:
    gateway.executor.reply = '{"total": 3}'
    response = gpt.responses.parse(model="scripted", input="hi", text_format=Sum)
    assert response.output_parsed == Sum(total=3)
    constraint = gateway.executor.requests[-1].constraint
    assert constraint is not None and "total" in constraint.grammar
    assert response.text is not None and response.text.format is not None
    assert response.text.format.type == "json_schema"


@pytest.mark.parametrize(
    ("choice", "has"),
    [
        ("required", ['\\"add\\"', '\\"sub\\"']),
        ({"type": "function", "name": "sub"}, ['\\"sub\\"']),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "sub"}]},
            ['\\"sub\\"'],
        ),
    ],
)
def test_a_forced_call_of_a_response_becomes_a_constraint(gateway: Served, choice: Any, has: list[str]) -> None:
    assert respond(gateway, tools=[FUNCTION, {**FUNCTION, "name": "sub"}], tool_choice=choice).status_code == 200
    constraint = gateway.executor.requests[-1].constraint
    assert constraint is not None
    assert [name for name in ('\\"add\\"', '\\"sub\\"') if name in constraint.grammar] == has


def test_what_is_wrong_with_a_responses_tools_is_said_by_its_place(gateway: Served) -> None:
    def param(*tools: Any, **fields: Any) -> str:
        return str(error_of(respond(gateway, tools=list(tools), **fields), 400)["param"])

    search = {"type": "web_search"}
    assert param(search, {**FUNCTION, "name": "a b"}) == "tools[1].name"
    assert param(search, FUNCTION, {**FUNCTION, "parameters": 3}) == "tools[2].parameters"
    assert param(FUNCTION, FUNCTION) == "tools[1].name"
    assert param(search, tool_choice="required") == "tool_choice"
    bad = {"format": {"type": "json_schema", "name": "x"}}
    assert param(text=bad).startswith("text.format")


# --- Messages ---------------------------------------------------------------------------------------------------


def test_calls_are_blocks_of_a_message(gateway: Served, claude: anthropic.Anthropic) -> None:
    gateway.executor.reply = BOTH
    tools = [TOOL, {**TOOL, "name": "sub"}]
    asked: Any = {"model": "scripted", "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}]}
    with claude.messages.stream(tools=tools, **asked) as stream:
        streamed: Any = stream.get_final_message()
    text, first, second = streamed.content
    assert text.type == "text" and text.text == "Both."
    assert first.type == "tool_use" and second.type == "tool_use"
    assert (first.name, first.input) == ("add", {"a": 1})
    assert (second.name, second.input) == ("sub", {"a": [2, "x"]})
    assert streamed.stop_reason == "tool_use"
    whole: Any = claude.messages.create(tools=tools, **asked)
    assert [block.type for block in whole.content] == ["text", "tool_use", "tool_use"]
    assert whole.content[2].input == second.input
    assert whole.stop_reason == "tool_use"


def test_the_events_of_a_call_are_anthropics(gateway: Served) -> None:
    gateway.executor.reply = said()
    events = named_events(message(gateway, stream=True))[2:]
    begun = events[0]["content_block"]
    assert (begun["type"], begun["name"], begun["input"]) == ("tool_use", "add", {})
    pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(pieces) == '{"a": 1}'
    assert [event["type"] for event in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_call_cut_by_the_limit_stops_for_its_length(gateway: Served) -> None:
    gateway.executor.reply = said()
    cut = message(gateway, max_tokens=len('<tool_call>\n{"name": "add", "arguments": {"a"')).json()
    assert cut["stop_reason"] == "max_tokens"
    assert cut["content"] == [{"type": "tool_use", "id": cut["content"][0]["id"], "name": "add", "input": {}}]


def test_a_tool_loop_of_messages_renders_what_was_said(gateway: Served, claude: anthropic.Anthropic) -> None:
    gateway.executor.reply = BOTH
    tools = [TOOL, {**TOOL, "name": "sub"}]
    asked: Any = {"model": "scripted", "max_tokens": 200, "tools": tools}
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    first = claude.messages.create(messages=messages, **asked)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "5"}
        for block in first.content
        if block.type == "tool_use"
    ]
    messages += [first.to_param(), {"role": "user", "content": results}]
    gateway.executor.reply = "done"
    claude.messages.create(messages=messages, **asked)
    told = gateway.executor.requests[-1].text
    assert told == f"<tool add><tool sub><user>hi<assistant>{BOTH}<tool>5<tool>5<assistant>"
    counted = claude.messages.count_tokens(model="scripted", messages=messages, tools=tools)
    assert counted.input_tokens == len(gateway.executor.requests[-1].tokens)


def test_thinking_is_a_block_and_never_text(gateway: Served, claude: anthropic.Anthropic) -> None:
    gateway.executor.traits = THINKING
    gateway.executor.reply = "<think>\nhm\n</think>\n\nhello"
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    asked: Any = {"model": "scripted", "max_tokens": 200}
    with claude.messages.stream(messages=messages, **asked) as stream:
        streamed: Any = stream.get_final_message()
    whole: Any = claude.messages.create(messages=messages, **asked)
    for answer in (streamed, whole):
        thought, text = answer.content
        assert thought.type == "thinking" and text.type == "text"
        assert (thought.thinking.strip(), text.text) == ("hm", "hello")
        assert thought.signature
        details = answer.usage.output_tokens_details
        assert details is not None and 0 < details.thinking_tokens < answer.usage.output_tokens
    assert streamed.content[0].to_dict() == whole.content[0].to_dict()
    messages += [whole.to_param(), {"role": "user", "content": "so?"}]
    claude.messages.create(messages=messages, **asked)
    assert gateway.executor.rendered[-1][1]["reasoning_content"].strip() == "hm"


@pytest.mark.parametrize(
    ("choice", "has"),
    [
        ({"type": "any"}, ['\\"add\\"', '\\"sub\\"']),
        ({"type": "tool", "name": "sub", "disable_parallel_tool_use": True}, ['\\"sub\\"']),
    ],
)
def test_a_forced_call_of_a_message_becomes_a_constraint(gateway: Served, choice: Any, has: list[str]) -> None:
    assert message(gateway, tools=[TOOL, {**TOOL, "name": "sub"}], tool_choice=choice).status_code == 200
    constraint = gateway.executor.requests[-1].constraint
    assert constraint is not None
    assert [name for name in ('\\"add\\"', '\\"sub\\"') if name in constraint.grammar] == has


def test_a_schema_of_a_message_becomes_a_constraint(gateway: Served, claude: anthropic.Anthropic) -> None:
    gateway.executor.reply = '{"total": 3}'
    said: Any = [{"role": "user", "content": "hi"}]
    parsed = claude.messages.parse(model="scripted", max_tokens=50, messages=said, output_format=Sum)
    assert parsed.parsed_output == Sum(total=3)
    constraint = gateway.executor.requests[-1].constraint
    assert constraint is not None and "total" in constraint.grammar


def test_what_is_wrong_with_a_messages_tools_is_said_by_its_place(gateway: Served) -> None:
    def param(*tools: Any) -> str:
        return str(error_of(message(gateway, tools=list(tools)), 400)["param"])

    search = {"type": "web_search_20250305", "name": "web_search"}
    assert param(search, {**TOOL, "name": "a b"}) == "tools[1].name"
    assert param(TOOL, TOOL) == "tools[1].name"
    deep: Any = {"type": "object"}
    for _ in range(100):
        deep = {"type": "object", "properties": {"a": deep}}
    assert param(search, {**TOOL, "input_schema": deep}) == "tools[1].input_schema"
