"""Structured answers and thinking over HTTP."""

from typing import Any

import pytest

from tests.gateway.conftest import Served
from tests.gateway.test_chat import chat_events
from tests.gateway.test_tools import make_tool, said
from trunkline.wire.turns import CallFormat, Constraint, TemplateTraits

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
THINKER = TemplateTraits(CallFormat.HERMES, thinking=("<think>", "</think>"))


def format_of(schema: Any = SCHEMA, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **fields}}


def constraint_of(gateway: Served, **fields: Any) -> Constraint:
    response = gateway.chat(**fields)
    assert response.status_code == 200, response.text
    constraint = gateway.executor.requests[-1].constraint
    assert constraint is not None
    return constraint


@pytest.mark.parametrize(
    ("fields", "kind", "has"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", 'answer: %json {"type": "object"'),
        ({"response_format": format_of()}, "json_schema", '"required": ["a"]'),
        ({"response_format": format_of(strict=True)}, "json_schema", '"required": ["a"]'),
        ({"guided_json": SCHEMA}, "json_schema", '"required": ["a"]'),
        ({"guided_json": '{"type": "null"}'}, "json_schema", '{"type": "null"'),
        ({"guided_choice": ["yes", 'n"o']}, "choice", 'answer: "yes" | "n\\"o"'),
        ({"guided_regex": r"a/[\d]+\/b"}, "regex", r"ANSWER: /a\/[\d]+\/b/"),
        ({"guided_grammar": "start: /x/"}, "grammar", "start: /x/"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", '"required": ["a"]'),
        ({"structured_outputs": {"regex": "x+"}}, "regex", "ANSWER: /x+/"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", 'answer: "a"'),
        ({"structured_outputs": {"grammar": "start: /x/"}}, "grammar", "start: /x/"),
        ({"structured_outputs": {"json_object": True}}, "json_object", '"type": "object"'),
    ],
)
def test_structure_becomes_a_constraint_of_chats_and_completions(
    gateway: Served, fields: dict[str, Any], kind: str, has: str
) -> None:
    constraint = constraint_of(gateway, **fields)
    assert constraint.kind == kind
    assert has in constraint.grammar
    assert gateway.post("/v1/completions", {"prompt": "x", **fields}).status_code == 200
    completion = gateway.executor.requests[-1].constraint
    assert completion is not None
    assert (completion.kind, has in completion.grammar) == (kind, True)
    assert completion in gateway.executor.constraints  # compiled before the turn begins


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}])
def test_without_structure_nothing_is_constrained(gateway: Served, fields: dict[str, Any]) -> None:
    gateway.chat(**fields)
    assert gateway.executor.requests[-1].constraint is None
    assert not gateway.executor.constraints


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_required_parameter"),
        ({"response_format": {"type": "json_schema", "json_schema": 5}}, "response_format.json_schema", "invalid_type"),
        ({"response_format": format_of(None)}, "response_format.json_schema.schema", "missing_required_parameter"),
        ({"response_format": format_of([])}, "response_format.json_schema.schema", "invalid_type"),
        ({"response_format": {}}, "response_format.type", "unsupported_parameter"),
        ({"guided_json": "{"}, "guided_json", "invalid_value"),
        ({"guided_json": "5"}, "guided_json", "invalid_type"),
        ({"guided_choice": []}, "guided_choice", "invalid_type"),
        ({"guided_choice": ["", "x"]}, "guided_choice", "invalid_type"),
        ({"guided_choice": ["x"] * 5000}, "guided_choice", "invalid_value"),
        ({"guided_regex": "x" * 200_000}, "guided_regex", "invalid_value"),
        ({"guided_grammar": 'root ::= "x"'}, "guided_grammar", "unsupported_parameter"),
        ({"guided_regex": "x", "guided_choice": ["x"]}, "guided_choice", "invalid_value"),
        ({"guided_regex": "x", "response_format": format_of()}, "guided_regex", "invalid_value"),
        ({"structured_outputs": {"regex": "x", "choice": ["x"]}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "invalid_value"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "invalid_type"),
        ({"guided_grammar": "start: /x/", "tools": [make_tool()]}, "guided_grammar", "unsupported_parameter"),
    ],
)
def test_what_is_wrong_with_a_structure_is_said(gateway: Served, fields: dict[str, Any], param: str, code: str) -> None:
    response = gateway.chat(**fields)
    assert response.status_code == 400
    assert (response.json()["error"]["param"], response.json()["error"]["code"]) == (param, code)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": format_of()}, "response_format.json_schema.schema"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
        ({"response_format": format_of(), "tools": [make_tool()]}, "response_format.json_schema.schema"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_structure_that_cannot_be_compiled_is_refused_with_the_reason(
    gateway: Served, path: str, fields: dict[str, Any], param: str
) -> None:
    gateway.executor.constraint_error = "it has no end"
    given = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    response = gateway.post(path, given | fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, "invalid_schema")
    assert "it has no end" in error["message"]
    assert not gateway.executor.requests


def test_a_structured_answer_and_calls_are_alternatives(gateway: Served) -> None:
    both = constraint_of(gateway, response_format=format_of(), tools=[make_tool()])
    assert (both.kind, "answer" in both.grammar, "TEXT" in both.grammar) == ("tool_call", True, False)
    calls = constraint_of(gateway, response_format=format_of(), tools=[make_tool()], tool_choice="required")
    assert "answer" not in calls.grammar
    answer = constraint_of(gateway, response_format=format_of(), tools=[make_tool()], tool_choice="none")
    assert (answer.kind, "tool_call" in answer.grammar) == ("json_schema", False)


# --- thinking ---------------------------------------------------------------------------------------------------------

THOUGHT = "<think>\nHm, 1.\n</think>\n\n"


def test_thinking_is_kept_out_of_the_content(gateway: Served) -> None:
    gateway.executor.traits = THINKER
    gateway.executor.reply = THOUGHT + "Yes."
    message = gateway.chat().json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm, 1.", "reasoning": "Hm, 1."}
    deltas = [chunk["choices"][0]["delta"] for chunk in chat_events(gateway)]
    for name, whole in (("content", "Yes."), ("reasoning_content", "Hm, 1."), ("reasoning", "Hm, 1.")):
        assert "".join(delta.get(name, "") for delta in deltas) == whole


def test_a_prompt_that_opens_or_closes_the_thinking_is_noticed(
    gateway: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.executor.traits = THINKER
    gateway.executor.reply = "Hm.\n</think>\n\nYes."
    message = gateway.chat("x<think>\n", add_generation_prompt=False).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm.")
    gateway.executor.reply = "<think> is a word"
    message = gateway.chat("<think>\n\n</think>\n\n", add_generation_prompt=False).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "<think> is a word"}


def test_markers_that_are_control_tokens_are_asked_to_be_shown(gateway: Served) -> None:
    gateway.executor.traits = TemplateTraits(
        CallFormat.MISTRAL, ("[THINK]", "[/THINK]"), (("[TOOL_CALLS]", 7), ("[THINK]", 8))
    )
    gateway.chat(tools=[make_tool()])
    gateway.chat()
    with_tools, without = gateway.executor.requests
    assert with_tools.show_control == ("[THINK]", "[TOOL_CALLS]")
    assert without.show_control == ("[THINK]",)
    assert with_tools.constraint is not None
    assert "TEXT <[7]>" in with_tools.constraint.grammar
    assert "thinking: <[8]> thought" in with_tools.constraint.grammar


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thinking_that_is_sent_back_reaches_the_template(gateway: Served, name: str) -> None:
    earlier = {"role": "assistant", "content": "Yes.", name: "Hm."}
    user = {"role": "user", "content": "hi"}
    gateway.post("/v1/chat/completions", {"messages": [user, earlier, user]})
    assert gateway.executor.rendered[-1][1]["reasoning_content"] == "Hm."


def test_thinking_before_a_call_comes_back_even_if_the_client_left_it_out(gateway: Served) -> None:
    gateway.executor.traits = THINKER
    gateway.executor.reply = THOUGHT + said()
    user = {"role": "user", "content": "hi"}
    message = gateway.chat(tools=[make_tool()]).json()["choices"][0]["message"]
    for name in ("reasoning", "reasoning_content"):
        del message[name]
    result = {"role": "tool", "content": "3", "tool_call_id": message["tool_calls"][0]["id"]}
    gateway.post("/v1/chat/completions", {"messages": [user, message, result], "tools": [make_tool()]})
    assert gateway.executor.rendered[-1][1]["reasoning_content"] == "Hm, 1."
    assert gateway.executor.requests[-1].text == f"<tool add><user>hi<assistant>{said()}<tool>3<assistant>"


def test_a_grammar_of_the_clients_own_cannot_wait_for_the_thinking(gateway: Served) -> None:
    gateway.executor.traits = THINKER
    error = gateway.chat(guided_grammar="start: /x/").json()["error"]
    assert (error["param"], error["code"]) == ("guided_grammar", "unsupported_parameter")
    closed = gateway.chat("</think>", guided_grammar="start: /x/", add_generation_prompt=False)
    assert closed.status_code == 200


def test_schemas_begin_behind_the_thinking(gateway: Served) -> None:
    gateway.executor.traits = THINKER
    assert "start: thinking? body" in constraint_of(gateway, response_format=format_of()).grammar
    opened = constraint_of(gateway, content="<think>\n", add_generation_prompt=False, response_format=format_of())
    assert "start: thinking body" in opened.grammar
