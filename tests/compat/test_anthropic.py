"""The `anthropic` package: messages, streamed and whole."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from anthropic import Anthropic

from tests.compat.conftest import Node
from tests.compat.harbour import ADVICE, INSTRUCTIONS, LEVELS, PARAMETERS, errand, tide
from tests.compat.observed import kept_history
from tests.compat.scenes import call

TOOL = {"name": "tide", "description": "The tide at a place.", "input_schema": PARAMETERS}


@pytest.fixture
def client(smollm2: Node) -> Iterator[Anthropic]:
    with Anthropic(base_url=smollm2.url, api_key="none", max_retries=0) as opened:
        yield opened


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def loop(client: Anthropic, node: Node, messages: list[Any], *, stream: bool = False, **options: Any) -> str:
    """Call what is asked for until there is an answer. `messages` grows by all that was said."""
    asked: dict[str, Any] = {"model": node.model, "max_tokens": 500} | options
    while True:
        if stream:
            with client.messages.stream(messages=messages, **asked) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(messages=messages, **asked)
        messages.append(message.to_param())
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            (text,) = message.content
            assert text.type == "text"
            return text.text
        results = [
            {"type": "tool_result", "tool_use_id": made.id, "content": tide(**cast(dict[str, str], made.input))}
            for made in calls
        ]
        messages.append({"role": "user", "content": results})


def test_a_loop_of_messages_with_a_fork_and_a_sub_agent_is_one_run(smollm2: Node, client: Anthropic) -> None:
    question = errand("messages")
    task = smollm2.scene(
        "messages",
        call("tide", place="bar"),
        f"Two more.\n{call('tide', place='quay')}\n{call('tide', place='pier')}",
        f"The gauge says: {{last}}. I ask the harbour master: {question}",
    )
    inwards = smollm2.scene("messages-in", call("tide", place="bar"), "Inwards with {last}.")
    outwards = smollm2.scene("messages-out", call("tide", place="quay"), "Outwards with {last}.")
    advice = smollm2.scene("messages-advice", "Let her wait for the flood.")
    system = [{"type": "text", "text": INSTRUCTIONS, "cache_control": {"type": "ephemeral"}}]
    with smollm2.one_run() as seen:
        said = [user(f"{task} How is the tide, everywhere, for a ship that comes in?")]
        answer = loop(client, smollm2, said, system=system, tools=[TOOL])
        assert f"{LEVELS['quay']} {LEVELS['pier']}" in answer
        forks = [[*said, user(f"{cue} And now?")] for cue in (inwards, outwards)]
        with ThreadPoolExecutor() as pool:
            ways = list(
                pool.map(lambda fork: loop(client, smollm2, fork, stream=True, system=system, tools=[TOOL]), forks)
            )
        sub = [user(f"{advice} I ask the harbour master: {question}")]
        assert loop(client, smollm2, sub, system=ADVICE) == "Let her wait for the flood."
    assert ways == [f"Inwards with {LEVELS['bar']}.", f"Outwards with {LEVELS['quay']}."]
    assert (seen.turns[0], sorted(seen.turns[1:])) == (5, [1, 2]), str(seen)
    assert seen.children(seen.run["id"]) == [view["id"] for view in seen.branches]
    assert kept_history(seen.run) >= 0.98
