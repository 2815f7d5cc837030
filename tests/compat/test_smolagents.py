"""smolagents: an agent that calls tools as JSON and one that writes code, each with an agent to delegate to."""

import pytest
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool
from smolagents.monitoring import LogLevel

from tests.compat.conftest import Node
from tests.compat.harbour import ADVICE, depth, errand, tide
from tests.compat.scenes import call


@pytest.fixture
def model(gemma: Node) -> OpenAIModel:
    return OpenAIModel(gemma.model, api_base=gemma.v1, api_key="none", client_kwargs={"max_retries": 0})


def test_a_manager_of_tool_calling_agents_is_one_run_with_a_branch(gemma: Node, model: OpenAIModel) -> None:
    advice = gemma.scene("smol-advice", call("depth", place="sow"), call("final_answer", answer="She may: {last}"))
    task = gemma.scene(
        "smol",
        call("tide", place="pier"),
        call("harbour_master", task=f"{advice} {errand('calls')}"),
        call("final_answer", answer="{last}"),
    )
    gauge = tool(tide)
    master = ToolCallingAgent(
        [tool(depth)], model, name="harbour_master", description=ADVICE, verbosity_level=LogLevel.OFF, max_steps=3
    )
    keeper = ToolCallingAgent([gauge], model, managed_agents=[master], verbosity_level=LogLevel.OFF, max_steps=4)
    with gemma.one_run() as seen:
        answer = str(keeper.run(f"{task} May the coaster come in?"))
    assert "She may:" in answer and depth("sow") in answer
    assert seen.turns == [3, 2], str(seen)


def test_a_manager_of_code_agents_is_one_run_with_a_branch(gemma: Node, model: OpenAIModel) -> None:
    advice = gemma.scene(
        "smol-code-advice",
        "Thought: I ask the gauge.\n<code>\nprint(depth('sow'))\n</code>",
        "Thought: That will do.\n<code>\nfinal_answer('''She may: {last}''')\n</code>",
    )
    task = gemma.scene(
        "smol-code",
        "Thought: First the pier.\n<code>\nprint(tide('pier'))\n</code>",
        f"I ask the master.\n<code>\nadvice = harbour_master('''{advice} {errand('code')}''')\nprint(advice)\n</code>",
        "Thought: Done.\n<code>\nfinal_answer(advice)\n</code>",
    )
    gauge = tool(tide)
    master = CodeAgent(
        [tool(depth)], model, name="harbour_master", description=ADVICE, verbosity_level=LogLevel.OFF, max_steps=3
    )
    keeper = CodeAgent([gauge], model, managed_agents=[master], verbosity_level=LogLevel.OFF, max_steps=4)
    with gemma.one_run() as seen:
        answer = str(keeper.run(f"{task} May the coaster come in with code?"))
    assert "She may:" in answer and depth("sow") in answer
    assert seen.turns == [3, 2], str(seen)
