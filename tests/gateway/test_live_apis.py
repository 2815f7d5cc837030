"""The real server with the real model through OpenAI's Responses and Anthropic's Messages, with their own clients."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from openai.types.responses import Response

from tests.live import LiveServer, live_server

MODEL = "smollm2-135m-instruct"
SYSTEM = "You keep the log of a harbour. " * 12
RESPONSES: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 8}
ONE_CALL: Any = {"type": "any", "disable_parallel_tool_use": True}
PLACE = {
    "type": "object",
    "properties": {"place": {"type": "string", "enum": ["pier", "quay"]}},
    "required": ["place"],
    "additionalProperties": False,
}
MESSAGES: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "extra_body": {"temperature": 0}}


@pytest.fixture
def openai_client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture
def anthropic_client(server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as opened:
        yield opened


def tokens(response: Response) -> tuple[int, int, int]:
    """(prompt, cached, generated)."""
    assert response.usage is not None
    usage = response.usage
    return usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens


def test_one_conversation_has_one_prompt_and_one_cache_in_every_api(
    openai_client: openai.OpenAI, anthropic_client: anthropic.Anthropic
) -> None:
    asked = "Which ship left at dawn?"
    chat = openai_client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}],
        temperature=0,
        max_tokens=8,
    )
    response = openai_client.responses.create(instructions=SYSTEM, input=asked, **RESPONSES)
    said: Any = [{"role": "user", "content": asked}]
    message = anthropic_client.messages.create(system=SYSTEM, messages=said, **MESSAGES)
    counted = anthropic_client.messages.count_tokens(model=MODEL, system=SYSTEM, messages=said)
    assert chat.usage is not None
    prompt = chat.usage.prompt_tokens
    assert tokens(response)[:2] == (prompt, prompt - 1)
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (1, prompt - 1)
    assert counted.input_tokens == prompt
    (block,) = message.content
    assert block.type == "text"
    assert chat.choices[0].message.content == response.output_text == block.text


def test_a_chain_of_responses_reuses_all_that_was_said(server: LiveServer, openai_client: openai.OpenAI) -> None:
    first = openai_client.responses.create(input=f"{SYSTEM} Begin.", **RESPONSES)
    previous = first
    for word in ("one", "two", "three"):
        with openai_client.responses.stream(input=word, previous_response_id=previous.id, **RESPONSES) as stream:
            *_, last = stream
        assert last.type in ("response.completed", "response.incomplete")
        response: Response = last.response
        before, _, generated = tokens(previous)
        assert tokens(response)[1] >= before + generated - 1
        previous = response


def test_a_conversation_of_messages_reuses_all_that_was_said(anthropic_client: anthropic.Anthropic) -> None:
    said: list[Any] = [{"role": "user", "content": [{"type": "text", "text": f"{SYSTEM} Start."}]}]
    held = 0
    for word in ("one", "two", "three"):
        with anthropic_client.messages.stream(messages=said, **MESSAGES) as stream:
            message = stream.get_final_message()
        usage = message.usage
        assert usage.cache_read_input_tokens is not None
        assert usage.cache_read_input_tokens >= held
        held = usage.cache_read_input_tokens + usage.input_tokens + usage.output_tokens - 1
        said += [message.to_param(), {"role": "user", "content": word}]


def unbroken(server: LiveServer, session: str, turns: int) -> None:
    """Each turn of the session's run extends the one before it: nothing that was said came back changed."""
    run = httpx.get(f"{server.url}/v1/runs/{session}").json()
    assert len(run["turns"]) == turns
    for before, turn in pairwise(run["turns"]):
        assert turn["cached_tokens"] == turn["reusable_tokens"] > before["prompt_tokens"]
        assert [miss["reason"] for miss in turn["misses"]] == ["never_seen"]


def test_a_tool_loop_of_messages_breaks_no_prefix(server: LiveServer, anthropic_client: anthropic.Anthropic) -> None:
    tool: Any = {"name": "tide", "description": "The tide at a place.", "input_schema": PLACE}
    asked: dict[str, Any] = MESSAGES | {"max_tokens": 60, "system": SYSTEM, "tools": [tool]}
    asked["extra_headers"] = {"X-Claude-Code-Session-Id": "tool-loop-of-messages"}
    said: list[Any] = [{"role": "user", "content": "How is the tide at the pier?"}]
    for _ in range(3):
        message = anthropic_client.messages.create(messages=said, tool_choice=ONE_CALL, **asked)
        assert message.stop_reason == "tool_use"
        (call,) = (block for block in message.content if block.type == "tool_use")
        assert call.input in ({"place": "pier"}, {"place": "quay"})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "low"}
        said += [message.to_param(), {"role": "user", "content": [result]}]
    counted = anthropic_client.messages.count_tokens(model=MODEL, system=SYSTEM, tools=[tool], messages=said)
    last = anthropic_client.messages.create(messages=said, tool_choice={"type": "none"}, **asked)
    assert last.usage.cache_read_input_tokens is not None
    assert counted.input_tokens == last.usage.input_tokens + last.usage.cache_read_input_tokens
    unbroken(server, "tool-loop-of-messages", 4)


def test_a_tool_loop_of_responses_breaks_no_prefix(server: LiveServer, openai_client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "tide", "parameters": PLACE, "strict": True}
    asked: dict[str, Any] = RESPONSES | {"max_output_tokens": 60, "tools": [tool], "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False, "prompt_cache_key": "tool-loop-of-responses"}
    given: Any = f"{SYSTEM} How is the tide at the quay?"
    previous = None
    for _ in range(3):
        response = openai_client.responses.create(input=given, previous_response_id=previous, **asked)
        (call,) = (item for item in response.output if item.type == "function_call")
        assert json.loads(call.arguments) in ({"place": "pier"}, {"place": "quay"})
        previous = response.id
        given = [{"type": "function_call_output", "call_id": call.call_id, "output": "low"}]
    unbroken(server, "tool-loop-of-responses", 3)


def test_a_session_of_messages_is_one_run(server: LiveServer, anthropic_client: anthropic.Anthropic) -> None:
    said: list[Any] = [{"role": "user", "content": "What is the tide?"}]
    session = {"X-Claude-Code-Session-Id": "tide-session"}
    for _ in range(2):
        message = anthropic_client.messages.create(messages=said, extra_headers=session, **MESSAGES)
        said += [message.to_param(), {"role": "user", "content": "And now?"}]
    run = httpx.get(f"{server.url}/v1/runs/tide-session").json()
    assert [turn["index"] for turn in run["turns"]] == [0, 1]
    assert run["turns"][1]["cached_tokens"] > 0


def test_a_response_is_gone_on_from_after_a_restart(tmp_path: Path) -> None:
    with live_server(tmp_path, "--ctx", "512", "--any-model") as running, openai_at(running) as client:
        first = client.responses.create(input="Remember the number 7.", **RESPONSES)
        both = f"{running.url}/v1/responses/{first.id}"
        document = httpx.get(both).json()
    with live_server(tmp_path, "--ctx", "512", "--model-alias", "other") as running, openai_at(running) as client:
        assert client.responses.retrieve(first.id).to_dict() == document
        asked = RESPONSES | {"model": "other"}
        second = client.responses.create(input="Which number?", previous_response_id=first.id, **asked)
        assert tokens(second)[0] > tokens(first)[0] + tokens(first)[2]
        with pytest.raises(openai.NotFoundError, match="--model-alias"):
            client.responses.create(input="hi", **(RESPONSES | {"model": "gpt-5"}))


def openai_at(running: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
