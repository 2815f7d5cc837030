"""OpenAI's Agents SDK, on chat completions and on responses: agents as tools of another."""

import pytest
from agents import (
    Agent,
    Model,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI

from tests.compat.conftest import Node
from tests.compat.harbour import ADVICE, INSTRUCTIONS, LEVELS, depth, errand, tide
from tests.compat.observed import kept_history
from tests.compat.scenes import call

UNTRACED = RunConfig(tracing_disabled=True)


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
async def test_agents_as_tools_are_branches_of_one_run(smollm2: Node, kind: type[Model]) -> None:
    api = "chat" if kind is OpenAIChatCompletionsModel else "responses"
    low = smollm2.scene(f"agents-{api}-low", call("depth", place="sow"), "Too low: {last}.")
    high = smollm2.scene(f"agents-{api}-high", call("depth", place="farrow"), "High enough: {last}.")
    asks = [call("harbour_master", input=f"{cue} {errand(cue)}") for cue in (low, high)]
    task = smollm2.scene(f"agents-{api}", call("tide", place="pier"), "\n".join(asks), "In short: {last}")
    async with AsyncOpenAI(base_url=smollm2.v1, api_key="none", max_retries=0) as client:
        model = kind(smollm2.model, client)
        gauge = function_tool(tide)
        master = Agent(name="Harbour master", instructions=ADVICE, tools=[function_tool(depth)], model=model)
        advice = master.as_tool("harbour_master", "Ask the harbour master.", run_config=UNTRACED)
        keeper = Agent(name="Log keeper", instructions=INSTRUCTIONS, tools=[gauge, advice], model=model)
        with smollm2.one_run() as seen:
            result = await Runner.run(keeper, f"{task} May the coaster come in?", run_config=UNTRACED)
    assert result.final_output == f"In short: Too low: {depth('sow')}. High enough: {depth('farrow')}."
    assert seen.turns == [3, 2, 2], str(seen)
    assert seen.children(seen.run["id"]) == [view["id"] for view in seen.branches]
    assert min(map(kept_history, [seen.run, *seen.branches])) >= 0.95


async def test_a_streamed_conversation_goes_on_by_the_id_of_a_response(smollm2: Node) -> None:
    task = smollm2.scene("agents-stream", call("tide", place="pier"), "At the pier: {last}.")
    later = smollm2.scene("agents-later", call("tide", place="bar"), "Over the bar: {last}.")
    async with AsyncOpenAI(base_url=smollm2.v1, api_key="none", max_retries=0) as client:
        model = OpenAIResponsesModel(smollm2.model, client)
        keeper = Agent(name="Log keeper", instructions=INSTRUCTIONS, tools=[function_tool(tide)], model=model)
        with smollm2.one_run() as seen:
            first = Runner.run_streamed(keeper, f"{task} How is the tide for a coaster?", run_config=UNTRACED)
            kinds = [event.type async for event in first.stream_events()]
            second = await Runner.run(
                keeper, f"{later} And further out?", previous_response_id=first.last_response_id, run_config=UNTRACED
            )
    assert "run_item_stream_event" in kinds
    assert first.final_output == f"At the pier: {LEVELS['pier']}."
    assert second.final_output == f"Over the bar: {LEVELS['bar']}."
    assert seen.turns == [4], str(seen)
    assert kept_history(seen.run) >= 0.98


async def test_a_handoff_stays_in_its_run(smollm2: Node) -> None:
    task = smollm2.scene(
        "agents-handoff",
        call("tide", place="pier"),
        call("transfer_to_harbour_master"),
        call("tide", place="bar"),
        "The bar has {last}.",
    )
    async with AsyncOpenAI(base_url=smollm2.v1, api_key="none", max_retries=0) as client:
        model = OpenAIChatCompletionsModel(smollm2.model, client)
        gauge = function_tool(tide)
        master = Agent(name="Harbour master", instructions=ADVICE, tools=[gauge], model=model)
        keeper = Agent(name="Log keeper", instructions=INSTRUCTIONS, tools=[gauge], handoffs=[master], model=model)
        with smollm2.one_run() as seen:
            result = await Runner.run(keeper, f"{task} {errand('handoff')}", run_config=UNTRACED)
    assert result.last_agent is master
    assert result.final_output == f"The bar has {LEVELS['bar']}."
    assert sum(seen.turns) == 4, str(seen)


async def test_one_question_to_several_agents_is_a_branch_for_each(smollm2: Node) -> None:
    question = errand("vote")
    scenes = [smollm2.scene(f"vote-{at}", f"Vote {at}.") for at in range(3)]
    task = smollm2.scene("vote", "\n".join(call("ask", input=f"{cue} {question}") for cue in scenes), "{last}")
    async with AsyncOpenAI(base_url=smollm2.v1, api_key="none", max_retries=0) as client:
        model = OpenAIChatCompletionsModel(smollm2.model, client)
        voter = Agent(name="Voter", instructions=ADVICE, model=model)
        ask = voter.as_tool("ask", "Ask for a vote.", run_config=UNTRACED)
        keeper = Agent(name="Log keeper", instructions=INSTRUCTIONS, tools=[ask], model=model)
        with smollm2.one_run() as seen:
            result = await Runner.run(keeper, f"{task} Let three vote.", run_config=UNTRACED)
    assert result.final_output == "Vote 0. Vote 1. Vote 2."
    assert seen.turns == [2, 1, 1, 1], str(seen)
