"""LangGraph with `langchain-openai`: a graph with a tool node, two branches from one state, and a sub-graph."""

from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from tests.compat.conftest import Node
from tests.compat.harbour import ADVICE, INSTRUCTIONS, LEVELS, depth, errand, tide
from tests.compat.observed import kept_history
from tests.compat.scenes import call


def react(model: Any, tools: list[Any]) -> Any:
    """A model that calls tools until it answers."""
    bound = model.bind_tools(tools)
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


def forked(agent: Any, cues: dict[str, str]) -> Any:
    """A graph that does the task, then follows each cue from the same state, at once."""
    graph = StateGraph(MessagesState)
    graph.add_node("task", agent)
    graph.add_edge(START, "task")
    for name, cue in cues.items():
        more = HumanMessage(f"{cue} And now?")
        graph.add_node(
            name,
            lambda state, more=more: {
                "messages": agent.invoke({"messages": [*state["messages"], more]})["messages"][-1:]
            },
        )
        graph.add_edge("task", name)
        graph.add_edge(name, END)
    return graph.compile()


def test_a_graph_that_forks_is_one_run_with_branches(smollm2: Node) -> None:
    advice = smollm2.scene("graph-advice", call("depth", place="sow"), "With {last}, she may come in.")
    task = smollm2.scene(
        "graph",
        f"{call('tide', place='pier')}\n{call('tide', place='quay')}",
        call("harbour_master", question=f"{advice} {errand('langgraph')}"),
        "The master says: {last}",
    )
    cues = {
        "inwards": smollm2.scene("graph-in", call("tide", place="bar"), "Inwards with {last}."),
        "outwards": smollm2.scene("graph-out", call("tide", place="quay"), "Outwards with {last}."),
    }
    model = ChatOpenAI(base_url=smollm2.v1, api_key="none", model=smollm2.model, max_retries=0)
    gauge = tool(tide)
    master = react(model, [tool(depth)])

    def harbour_master(question: str) -> str:
        """Ask the harbour master."""
        told = master.invoke({"messages": [SystemMessage(ADVICE), HumanMessage(question)]})
        return str(told["messages"][-1].content)

    keeper = react(model, [gauge, tool(harbour_master)])
    with smollm2.one_run() as seen:
        asked = [SystemMessage(INSTRUCTIONS), HumanMessage(f"{task} May the coaster come in, and where to?")]
        *_, inwards, outwards = forked(keeper, cues).invoke({"messages": asked})["messages"]
    assert inwards.content == f"Inwards with {LEVELS['bar']}."
    assert outwards.content == f"Outwards with {LEVELS['quay']}."
    assert seen.turns == [5, 2, 2], str(seen)
    assert seen.children(seen.run["id"]) == [view["id"] for view in seen.branches]
    assert min(map(kept_history, [seen.run, *seen.branches])) >= 0.95


async def test_a_graph_that_streams_sees_the_answer_in_pieces(smollm2: Node) -> None:
    task = smollm2.scene("graph-stream", call("tide", place="pier"), "At the pier: {last}.")
    model = ChatOpenAI(base_url=smollm2.v1, api_key="none", model=smollm2.model, max_retries=0)
    asked = [SystemMessage(INSTRUCTIONS), HumanMessage(f"{task} What does the gauge at the pier say?")]
    with smollm2.one_run() as seen:
        stream = react(model, [tool(tide)]).astream({"messages": asked}, stream_mode="messages")
        pieces = [piece async for piece, about in stream if about["langgraph_node"] == "model"]
    assert "".join(piece.text for piece in pieces) == f"At the pier: {LEVELS['pier']}."
    assert len(pieces) > 5
    assert seen.turns == [2], str(seen)
    assert kept_history(seen.run) >= 0.98
