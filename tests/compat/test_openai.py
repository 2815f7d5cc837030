"""The `openai` package: chat completions and responses."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI

from tests.compat.conftest import Node
from tests.compat.harbour import ADVICE, INSTRUCTIONS, LEVELS, PARAMETERS, errand, tide
from tests.compat.observed import kept_history
from tests.compat.scenes import call

FUNCTION: dict[str, Any] = {"name": "tide", "description": "The tide at a place.", "parameters": PARAMETERS}
SYSTEM = {"role": "system", "content": INSTRUCTIONS}


@pytest.fixture
def client(smollm2: Node) -> Iterator[OpenAI]:
    with OpenAI(base_url=smollm2.v1, api_key="none", max_retries=0) as opened:
        yield opened


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def chat_loop(client: OpenAI, node: Node, messages: list[Any], *, stream: bool = False, **options: Any) -> str:
    """Call what is asked for until there is an answer. `messages` grows by all that was said."""
    asked: dict[str, Any] = {"model": node.model, "tools": [{"type": "function", "function": FUNCTION}]} | options
    while True:
        if stream:
            with client.chat.completions.stream(messages=messages, **asked) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(messages=messages, **asked).choices[0].message
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        if not message.tool_calls:
            return message.content or ""
        for made in message.tool_calls:
            assert made.type == "function"
            result = tide(**json.loads(made.function.arguments))
            messages.append({"role": "tool", "tool_call_id": made.id, "content": result})


def test_a_chat_loop_with_a_fork_and_a_sub_agent_is_one_run(smollm2: Node, client: OpenAI) -> None:
    question = errand("chat")
    task = smollm2.scene(
        "openai-chat",
        call("tide", place="pier"),
        f"Two more.\n{call('tide', place='quay')}\n{call('tide', place='bar')}",
        f"The gauge says: {{last}}. I ask the harbour master: {question}",
    )
    inwards = smollm2.scene("openai-chat-in", call("tide", place="bar"), "Inwards with {last}.")
    outwards = smollm2.scene("openai-chat-out", call("tide", place="quay"), "Outwards with {last}.")
    advice = smollm2.scene("openai-chat-advice", "Let her come in on the flood.")
    with smollm2.one_run() as seen:
        said: list[Any] = [SYSTEM, user(f"{task} How is the tide, everywhere?")]
        assert f"{LEVELS['quay']} {LEVELS['bar']}" in chat_loop(client, smollm2, said)
        forks = [[*said, user(f"{cue} And now?")] for cue in (inwards, outwards)]
        with ThreadPoolExecutor() as pool:
            ways = list(pool.map(lambda fork: chat_loop(client, smollm2, fork, stream=True), forks))
        sub = [{"role": "system", "content": ADVICE}, user(f"{advice} I ask the harbour master: {question}")]
        assert chat_loop(client, smollm2, sub) == "Let her come in on the flood."
    assert ways == [f"Inwards with {LEVELS['bar']}.", f"Outwards with {LEVELS['quay']}."]
    assert sorted(seen.turns[1:]) == [1, 2], str(seen)
    assert seen.turns[0] == 5
    assert seen.children(seen.run["id"]) == [view["id"] for view in seen.branches]
    assert kept_history(seen.run) >= 0.98


def respond_loop(client: OpenAI, node: Node, given: Any, previous: str | None = None) -> Any:
    """Call what is asked for until there is an answer; returns the last response."""
    tools: Any = [{"type": "function", "strict": True, **FUNCTION}]
    while True:
        response = client.responses.create(
            model=node.model, instructions=INSTRUCTIONS, input=given, tools=tools, previous_response_id=previous
        )
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response
        results = [tide(**json.loads(made.arguments)) for made in calls]
        given = [
            {"type": "function_call_output", "call_id": made.call_id, "output": result}
            for made, result in zip(calls, results, strict=True)
        ]
        previous = response.id


def test_responses_that_go_on_from_one_are_branches_of_one_run(smollm2: Node, client: OpenAI) -> None:
    task = smollm2.scene("responses", call("tide", place="pier"), call("tide", place="bar"), "First: {last}.")
    inwards = smollm2.scene("responses-in", call("tide", place="bar"), "Inwards with {last}.")
    outwards = smollm2.scene("responses-out", call("tide", place="quay"), "Outwards with {last}.")
    with smollm2.one_run() as seen:
        first = respond_loop(client, smollm2, f"{task} How is the tide for a ship that waits?")
        assert first.output_text == f"First: {LEVELS['bar']}."
        with ThreadPoolExecutor() as pool:
            ways = pool.map(lambda cue: respond_loop(client, smollm2, f"{cue} And now?", first.id), (inwards, outwards))
    assert [way.output_text for way in ways] == [f"Inwards with {LEVELS['bar']}.", f"Outwards with {LEVELS['quay']}."]
    assert seen.turns == [5, 2], str(seen)
    assert min(map(kept_history, [seen.run, *seen.branches])) >= 0.95
