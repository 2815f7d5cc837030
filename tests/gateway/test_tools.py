"""Tools over HTTP: what may be declared and chosen, what reaches the executor, and how calls come back."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.gateway.conftest import Serve, Served
from tests.gateway.scripted import ScriptedExecutor
from tests.gateway.test_chat import chat_events
from trunkline.gateway.executor import ConstraintError, TemplateError
from trunkline.wire.turns import CallFormat, Constraint, TemplateTraits

PLAIN = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def make_tool(name: str = "add", parameters: Any = PLAIN, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def said(name: str = "add", arguments: str = '{"a": 1}') -> str:
    """A call in Hermes' form."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def call_in(gateway: Served, **fields: Any) -> dict[str, Any]:
    """The one choice of a chat with a tool."""
    response = gateway.chat(**{"tools": [make_tool()], **fields})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return dict(choice)


# --- calls come back --------------------------------------------------------------------------------------------------


def test_a_call_is_no_text_and_ends_the_turn_for_its_sake(gateway: Served) -> None:
    gateway.executor.reply = "Let me see.\n" + said()
    choice = call_in(gateway)
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"]["content"] == "Let me see."
    assert call == {"id": call["id"], "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert choice["finish_reason"] == "tool_calls"
    gateway.executor.reply = said()
    assert call_in(gateway)["message"]["content"] is None


def test_calls_stream_as_deltas_that_add_up_to_the_whole(gateway: Served) -> None:
    gateway.executor.reply = "Both.\n" + said() + "\n" + said("sub", '{"a": [2, "x"]}')
    chunks = chat_events(gateway, tools=[make_tool(), make_tool("sub")])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "Both."
    calls: dict[int, dict[str, Any]] = {}
    for piece in (piece for delta in deltas for piece in delta.get("tool_calls", ())):
        if "id" in piece:
            calls[piece["index"]] = {"name": piece["function"]["name"], "arguments": ""}
            assert piece["type"] == "function"
        calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    assert calls == {
        0: {"name": "add", "arguments": '{"a": 1}'},
        1: {"name": "sub", "arguments": '{"a": [2, "x"]}'},
    }
    assert len([delta for delta in deltas if "tool_calls" in delta]) > len('{"a": 1}')  # as they are generated
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_cut_by_the_token_limit_ends_for_its_length(gateway: Served) -> None:
    gateway.executor.reply = said()
    choice = call_in(gateway, max_tokens=len('<tool_call>\n{"name": "add", "arguments": {"a"'))
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a"'


def test_ids_of_calls_are_never_repeated(gateway: Served) -> None:
    gateway.executor.reply = said() + said()
    ids = [
        call["id"]
        for choice in gateway.chat(tools=[make_tool()], n=3).json()["choices"]
        for call in choice["message"]["tool_calls"]
    ]
    assert len(set(ids)) == 6


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": None}])
def test_without_leave_to_call_everything_is_text(gateway: Served, fields: dict[str, Any]) -> None:
    gateway.executor.reply = said()
    choice = call_in(gateway, **fields)
    assert choice["message"] == {"role": "assistant", "content": said()}
    assert choice["finish_reason"] == "stop"


# --- what may be chosen -----------------------------------------------------------------------------------------------

ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "sub"}}]},
}


@pytest.mark.parametrize(
    ("choice", "kind", "has", "lacks"),
    [
        (None, "tool_call", ['\\"add\\"', '\\"sub\\"', "text | head"], []),
        ("auto", "tool_call", ['\\"add\\"', '\\"sub\\"', "text | head"], []),
        ("required", "tool_call", ['\\"add\\"', '\\"sub\\"'], ["TEXT"]),
        ({"type": "function", "function": {"name": "sub"}}, "tool_call", ['\\"sub\\"'], ['\\"add\\"', "TEXT", "*"]),
        (ALLOWED, "tool_call", ['\\"sub\\"'], ['\\"add\\"', "TEXT"]),
        ("none", "no_call", ["TEXT"], ["%json"]),
    ],
)
def test_a_tool_choice_becomes_a_constraint(
    gateway: Served, choice: Any, kind: str, has: list[str], lacks: list[str]
) -> None:
    gateway.chat(tools=[make_tool(), make_tool("sub")], tool_choice=choice)
    (request,) = gateway.executor.requests
    assert request.constraint is not None
    assert request.constraint.kind == kind
    assert all(text in request.constraint.grammar for text in has)
    assert not any(text in request.constraint.grammar for text in lacks)
    assert request.text == "<tool add><tool sub><user>hi<assistant>"  # the prefix does not depend on the choice


def test_parallel_calls_can_be_switched_off(gateway: Served) -> None:
    gateway.chat(tools=[make_tool()], parallel_tool_calls=False)
    gateway.chat(tools=[make_tool()])
    one, many = (request.constraint for request in gateway.executor.requests)
    assert one is not None
    assert many is not None
    assert (one.grammar.count(" call "), many.grammar.count(" call ")) == (1, 2)


NAMED = {"type": "function", "function": {"name": "nope"}}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "unsupported_parameter"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ({"tools": [{"function": "add"}]}, "tools[0].function", "invalid_type"),
        ({"tools": [{"function": {}}]}, "tools[0].function.name", "missing_required_parameter"),
        ({"tools": [make_tool("")]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [make_tool('a"b')]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [make_tool("x" * 129)]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [make_tool(description=5)]}, "tools[0].function.description", "invalid_type"),
        ({"tools": [make_tool(parameters=[])]}, "tools[0].function.parameters", "invalid_type"),
        ({"tools": [make_tool(), make_tool()]}, "tools[1].function.name", "invalid_value"),
        ({"tools": [make_tool(f"t{at}") for at in range(513)]}, "tools", "invalid_value"),
        ({"tools": [make_tool(parameters={"enum": ["x" * 140_000]})]}, "tools[0].function.parameters", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": NAMED, "tools": [make_tool()]}, "tool_choice.function.name", "invalid_value"),
        ({"tool_choice": "sometimes", "tools": [make_tool()]}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "custom"}, "tools": [make_tool()]}, "tool_choice.type", "unsupported_parameter"),
        ({"tool_choice": {}, "tools": [make_tool()]}, "tool_choice.function", "missing_required_parameter"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}, "tools": [make_tool()]},
            "tool_choice.allowed_tools.tools",
            "invalid_type",
        ),
        ({"functions": [{"name": "add"}]}, "functions", "unsupported_parameter"),
        ({"function_call": "auto"}, "function_call", "unsupported_parameter"),
    ],
)
def test_what_is_wrong_with_tools_is_said(gateway: Served, fields: dict[str, Any], param: str, code: str) -> None:
    response = gateway.chat(**fields)
    assert response.status_code == 400
    assert (response.json()["error"]["param"], response.json()["error"]["code"]) == (param, code)
    assert not gateway.executor.requests


def test_a_schema_nested_too_deeply_is_refused(gateway: Served) -> None:
    schema: dict[str, Any] = {}
    for _ in range(70):
        schema = {"type": "object", "properties": {"a": schema}}
    error = gateway.chat(tools=[make_tool(parameters=schema)]).json()["error"]
    assert error["param"] == "tools[0].function.parameters"
    assert "nested" in error["message"]


class Picky:
    """Makes an executor refuse grammars that hold a given text."""

    def __init__(self, gateway: Served, refused: str) -> None:
        self._refused = refused
        self.asked = 0
        gateway.executor.check_constraint = self  # type: ignore[method-assign]

    def __call__(self, constraint: Constraint) -> None:
        self.asked += 1
        if self._refused in constraint.grammar:
            raise ConstraintError("no such thing")


HARD = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required", "tools": [make_tool("ok"), make_tool("hard", HARD)]},
        {"tools": [make_tool("ok"), make_tool("hard", HARD, strict=True)]},
    ],
)
def test_a_schema_that_was_promised_and_cannot_be_compiled_is_refused(gateway: Served, fields: dict[str, Any]) -> None:
    picky = Picky(gateway, "(?=x)")
    response = gateway.chat(**fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("tools[1].function.parameters", "invalid_schema")
    assert "no such thing" in error["message"]
    asked = picky.asked
    gateway.chat(**fields)
    assert picky.asked <= asked + 1  # why is not found out twice


def test_a_schema_that_cannot_be_compiled_is_loosened_where_nothing_was_promised(gateway: Served) -> None:
    Picky(gateway, "(?=x)")
    assert gateway.chat(tools=[make_tool("ok"), make_tool("hard", HARD)]).status_code == 200
    (request,) = gateway.executor.requests
    assert request.constraint is not None
    assert '"additionalProperties": false' in request.constraint.grammar  # of the tool that is fine
    assert 'args1: %json {"type": "object", "x-guidance"' in request.constraint.grammar


# --- what is sent back ------------------------------------------------------------------------------------------------


def answer(call_id: str | None, content: str = "3") -> dict[str, Any]:
    message = {"role": "tool", "content": content}
    return message if call_id is None else message | {"tool_call_id": call_id}


def ask(gateway: Served, messages: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"messages": list(messages), "tools": [make_tool()], **fields}
    response = gateway.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


USER = {"role": "user", "content": "hi"}
ODD = 'Well \n\n <tool_call>{"name":"add","arguments":{"a":  1}}</tool_call>\n'


@pytest.mark.parametrize(
    "change",
    [
        lambda message: message,
        lambda message: message | {"content": message["content"] + " "},
        lambda message: rewritten(message, '{ "a" : 1 }'),
        lambda message: rewritten(message, {"a": 1}),
    ],
)
def test_a_turn_that_called_is_rendered_as_it_was_said(gateway: Served, change: Any) -> None:
    gateway.executor.reply = ODD
    message = ask(gateway, [USER])
    ask(gateway, [USER, change(message), answer(message["tool_calls"][0]["id"])])
    assert gateway.executor.requests[1].text == f"<tool add><user>hi<assistant>{ODD}<tool>3<assistant>"
    assert gateway.executor.requests[1].text.startswith((gateway.executor.requests[0].text or "!") + ODD)


def rewritten(message: dict[str, Any], arguments: Any) -> dict[str, Any]:
    (call,) = message["tool_calls"]
    return message | {"tool_calls": [call | {"function": {"name": "add", "arguments": arguments}}]}


@pytest.mark.parametrize(
    "change",
    [
        lambda message: message | {"content": "Well, well"},
        lambda message: rewritten(message, '{"a": 2}'),
        lambda message: rewritten(message, '{"a": true}'),
        lambda message: message | {"tool_calls": [message["tool_calls"][0] | {"id": "call_other"}]},
        lambda message: message | {"tool_calls": message["tool_calls"] * 2},
    ],
)
def test_an_edited_turn_is_rendered_as_it_is_sent(gateway: Served, change: Any) -> None:
    gateway.executor.reply = ODD
    sent = change(ask(gateway, [USER]))
    ask(gateway, [USER, sent, answer("x")])
    assert gateway.executor.requests[1].text == f"<tool add><user>hi<assistant>{sent['content']}<tool>3<assistant>"


def test_what_a_turn_said_is_not_known_under_another_key_or_salt(serve: Serve) -> None:
    gateway = serve(api_keys=("a", "b"))
    gateway.executor.reply = ODD
    post = {"messages": [USER], "tools": [make_tool()]}
    headers = {"Authorization": "Bearer a"}
    message = gateway.post("/v1/chat/completions", post, headers=headers).json()["choices"][0]["message"]
    again = post | {"messages": [USER, message, answer("x")]}
    gateway.post("/v1/chat/completions", again, headers={"Authorization": "Bearer b"})
    gateway.post("/v1/chat/completions", again | {"cache_salt": "s"}, headers=headers)
    gateway.post("/v1/chat/completions", again, headers=headers)
    assert [ODD in (request.text or "") for request in gateway.executor.requests] == [False, False, False, True]


def test_what_turns_said_is_forgotten_in_the_end(serve: Serve) -> None:
    gateway = serve(call_memory_bytes=2500)
    gateway.executor.reply = ODD
    messages = [ask(gateway, [USER]) for _ in range(3)]
    for message in messages:
        ask(gateway, [USER, message, answer("x")])
    known = [ODD in (request.text or "") for request in gateway.executor.requests[3:]]
    assert known == [False, False, False]  # each of these turns called too, and pushed the next one out
    last = ask(gateway, [USER])
    ask(gateway, [USER, last, answer("x")])
    assert ODD in (gateway.executor.requests[-1].text or "")


def test_the_tokens_that_tokenize_counts_are_those_of_the_next_turn(gateway: Served) -> None:
    gateway.executor.reply = ODD
    history = [USER, ask(gateway, [USER]), answer("x")]
    counted = gateway.post("/tokenize", {"messages": history, "tools": [make_tool()]}).json()["tokens"]
    ask(gateway, history)
    assert counted == gateway.executor.requests[-1].tokens.tolist()


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (answer(None), "messages[1].tool_call_id"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[1].tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]},
            "messages[1].tool_calls[0].id",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"arguments": "{}"}}]},
            "messages[1].tool_calls[0].function.name",
        ),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": 5}}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"role": "assistant", "tool_calls": [{"id": "1", "type": "custom"}]}, "messages[1].tool_calls[0].type"),
        ({"role": "assistant", "function_call": {"name": "add"}}, "messages[1].function_call"),
    ],
)
def test_what_is_wrong_with_earlier_calls_is_said(gateway: Served, message: dict[str, Any], param: str) -> None:
    response = gateway.post("/v1/chat/completions", {"messages": [USER, message]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_results_of_unknown_calls_are_accepted(gateway: Served) -> None:
    assert ask(gateway, [USER, answer("call_never_made")])["content"] == "hello"


# --- templates --------------------------------------------------------------------------------------------------------


def rendered_for(gateway: Served, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the template is given, chat by chat."""
    given: list[Any] = []
    render = ScriptedExecutor.render_chat

    def noting(self: ScriptedExecutor, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        given.append((list(messages), dict(options)))
        return render(self, messages, options)

    monkeypatch.setattr(ScriptedExecutor, "render_chat", noting)
    return given


CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}],
}


def test_templates_get_arguments_as_objects(gateway: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    given = rendered_for(gateway, monkeypatch)
    ask(gateway, [USER, CALLED, answer("c")])
    ((messages, options),) = given
    assert messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert options["tools"] == [make_tool()]


def test_a_template_without_tools_gets_all_about_them_as_text(gateway: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway.executor.traits, gateway.executor.context = TemplateTraits(CallFormat.GENERIC), 4096
    given = rendered_for(gateway, monkeypatch)
    two = answer("d", "4")
    ask(gateway, [{"role": "system", "content": "Be kind."}, USER, CALLED, answer("c"), two, USER])
    ((messages, options),) = given
    assert "tools" not in options
    system, user, assistant, results = messages
    assert system["content"].startswith("Be kind.\n\n# Tools\n")
    assert json.dumps(make_tool()) in system["content"]
    assert user == USER
    assert assistant == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    }
    assert results == {
        "role": "user",
        "content": "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>\n\nhi",
    }


def test_a_template_that_refuses_system_text_gets_tools_with_the_first_question(gateway: Served) -> None:
    gateway.executor.traits, gateway.executor.context = TemplateTraits(CallFormat.GENERIC), 4096
    whole = ScriptedExecutor.render_chat

    def no_system(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        if messages[0]["role"] == "system":
            raise TemplateError("System role not supported")
        return whole(gateway.executor, messages, options)

    gateway.executor.render_chat = no_system  # type: ignore[method-assign]
    ask(gateway, [USER])
    text = gateway.executor.requests[0].text
    assert text is not None
    assert text.startswith("<user># Tools")
    assert text.endswith("\n\nhi<assistant>")
