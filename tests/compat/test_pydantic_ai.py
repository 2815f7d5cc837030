"""pydantic-ai on all three APIs: an agent whose tool is another agent, and an answer of a given type."""

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.compat.conftest import Node
from tests.compat.harbour import ADVICE, INSTRUCTIONS, LEVELS, depth, errand, tide
from tests.compat.observed import kept_history
from tests.compat.scenes import call

MODELS: dict[str, Callable[[Node], Any]] = {
    "chat": lambda node: OpenAIChatModel(node.model, provider=OpenAIProvider(base_url=node.v1, api_key="none")),
    "responses": lambda node: OpenAIResponsesModel(
        node.model, provider=OpenAIProvider(base_url=node.v1, api_key="none")
    ),
    "messages": lambda node: AnthropicModel(node.model, provider=AnthropicProvider(base_url=node.url, api_key="none")),
}


class Verdict(BaseModel):
    """Whether a ship may come in, and why."""

    may_come_in: bool
    reason: str


@pytest.mark.parametrize("api", MODELS)
async def test_an_agent_that_delegates_is_one_run_with_a_branch(smollm2: Node, api: str) -> None:
    advice = smollm2.scene(f"pydantic-{api}-advice", call("depth", place="sow"), "With {last}, let her in.")
    task = smollm2.scene(
        f"pydantic-{api}",
        f"{call('tide', place='pier')}\n{call('tide', place='quay')}",
        call("harbour_master", question=f"{advice} {errand(f'pydantic-{api}')}"),
        call("final_result", may_come_in=True, reason="{last}"),
    )
    model = MODELS[api](smollm2)
    master = Agent(model, instructions=ADVICE, tools=[depth])

    async def harbour_master(question: str) -> str:
        """Ask the harbour master."""
        return str((await master.run(question)).output)

    keeper = Agent(model, instructions=INSTRUCTIONS, tools=[tide, harbour_master], output_type=Verdict)
    with smollm2.one_run() as seen:
        result = await keeper.run(f"{task} May the coaster come in?")
    assert result.output == Verdict(may_come_in=True, reason=f"With {depth('sow')}, let her in.")
    assert seen.turns == [3, 2], str(seen)
    assert min(map(kept_history, [seen.run, *seen.branches])) >= 0.95
    assert result.usage.cache_read_tokens > 0


@pytest.mark.parametrize("api", MODELS)
async def test_a_streamed_answer_ends_a_tool_loop(smollm2: Node, api: str) -> None:
    task = smollm2.scene(f"pydantic-{api}-stream", call("tide", place="quay"), "At the quay: {last}.")
    keeper = Agent(MODELS[api](smollm2), instructions=INSTRUCTIONS, tools=[tide])
    with smollm2.one_run() as seen:
        async with keeper.run_stream(f"{task} What does the gauge at the quay say?") as stream:
            assert await stream.get_output() == f"At the quay: {LEVELS['quay']}."
    assert seen.turns == [2], str(seen)
    assert kept_history(seen.run) >= 0.98
