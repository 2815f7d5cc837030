"""Grammars of calls, structure and thinking, walked byte by byte: what they take, refuse and force."""

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from trunkline.gateway import thoughts
from trunkline.gateway.answers import SYNTAXES
from trunkline.gateway.thoughts import State
from trunkline.gateway.tools.declared import Choice, Tool, arguments_schema
from trunkline.gateway.tools.lark import schema_rule
from trunkline.gateway.tools.syntax import Shape
from trunkline.wire.outputs import calls_of
from trunkline.wire.turns import CallFormat

HERMES, LLAMA3, MISTRAL = CallFormat.HERMES, CallFormat.LLAMA3, CallFormat.MISTRAL
EOS, TOOL_CALLS, THINK, END_THINK = 256, 257, 258, 259
CONTROL = {"[TOOL_CALLS]": TOOL_CALLS}
THINKING = ("<think>", "</think>")


class Bytes:
    """A vocabulary of single bytes and a few control tokens, as `llguidance` takes it."""

    eos_token_id = EOS
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>", b"[TOOL_CALLS]", b"<think>", b"</think>")
    special_token_ids = (EOS, TOOL_CALLS, THINK, END_THINK)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


def make_tool(name: str, **properties: Any) -> Tool:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return Tool(name, arguments_schema(schema), False, "tools[0].function.parameters")


ADD = make_tool("add", a={"type": "integer"})
LOOK = make_tool("look_up", q={"type": "string"})
NOTHING = Tool("now", arguments_schema({}), False, "tools[0].function.parameters")


def calls_grammar(
    form: CallFormat,
    tools: Sequence[Tool] = (ADD, LOOK),
    *,
    required: bool = False,
    parallel: bool = True,
    answer: dict[str, Any] | None = None,
    start: str = "start: body\n",
    never: tuple[str, ...] = (),
) -> str:
    choice = Choice(tuple(tools), required, parallel)
    shape = Shape(choice=choice, answer="answer" if answer else None, schema=answer, never=never)
    rules = [f"args{at}: {schema_rule(tool.parameters)}\n" for at, tool in enumerate(tools)]
    rules += [f"answer: {schema_rule(answer)}\n"] if answer else []
    return start + SYNTAXES[form](CONTROL).grammar(shape) + "".join(rules)


def tokens_of(text: str) -> list[int]:
    """Bytes of `text`, with the control token for its name."""
    parts = text.split("[TOOL_CALLS]")
    return [t for at, part in enumerate(parts) for t in ([TOOL_CALLS] if at else []) + list(part.encode())]


def walked(grammar: str, text: str) -> LLMatcher:
    matcher = LLMatcher(TOKENIZER, grammar)
    assert not matcher.is_error(), matcher.get_error()
    for at, token in enumerate(tokens_of(text)):
        if not matcher.try_consume_tokens([token]):
            raise AssertionError(f"refused after {text[:at]!r}")
    return matcher


def takes(grammar: str, text: str) -> bool:
    """Whether `text` may be a whole answer."""
    try:
        return walked(grammar, text).is_accepting()
    except AssertionError:
        return False


def forced(grammar: str, text: str) -> str:
    """What must follow `text`."""
    return walked(grammar, text).compute_ff_bytes().decode()


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ONE = {
    HERMES: hermes("add", '{"a": 5}'),
    LLAMA3: '{"name": "add", "parameters": {"a": 5}}',
    MISTRAL: '[TOOL_CALLS][{"name": "add", "arguments": {"a": 5}}]',
}
TWO = {
    HERMES: ONE[HERMES] + "\n" + hermes("look_up", '{"q": "x"}'),
    MISTRAL: '[TOOL_CALLS][{"name": "add", "arguments": {"a": 5}}, {"name": "look_up", "arguments": {"q": "x"}}]',
}
FORMATS = tuple(ONE)


@pytest.mark.parametrize("form", FORMATS)
def test_auto_takes_text_or_calls_and_holds_calls_to_their_schema(form: CallFormat) -> None:
    grammar = calls_grammar(form)
    assert takes(grammar, "Just text.\n{} <tool")
    assert takes(grammar, "")
    assert takes(grammar, ONE[form])
    assert not takes(grammar, ONE[form].replace("5", '"five"'))
    assert not takes(grammar, ONE[form] + " and more")
    assert not takes(grammar, ONE[form].replace('"a"', '"b"'))


@pytest.mark.parametrize("form", FORMATS)
def test_required_takes_calls_only_and_forces_all_that_is_fixed(form: CallFormat) -> None:
    grammar = calls_grammar(form, [ADD], required=True)
    assert takes(grammar, ONE[form])
    assert not takes(grammar, "text")
    head = ONE[form].split("5")[0]
    fixed = head.removeprefix("[TOOL_CALLS]")  # behind the control token a blank may stand
    assert forced(grammar, head[: -len(fixed)] + ("[" if form is MISTRAL else "")) == fixed.removeprefix("[")
    whole = walked(calls_grammar(form, [NOTHING], required=True, parallel=False), "")
    while not whole.is_stopped():
        ahead = whole.compute_ff_tokens()
        assert whole.consume_tokens(ahead or [ord("[")])
    assert whole.is_accepting()


@pytest.mark.parametrize("form", TWO)
def test_several_calls_are_taken_unless_they_must_not_be_parallel(form: CallFormat) -> None:
    assert takes(calls_grammar(form), TWO[form])
    assert not takes(calls_grammar(form, parallel=False), TWO[form])
    assert takes(calls_grammar(form, parallel=False), ONE[form])


@pytest.mark.parametrize("form", [HERMES, MISTRAL])
def test_calls_may_follow_text(form: CallFormat) -> None:
    assert takes(calls_grammar(form), "Let me see.\n" + ONE[form])
    assert not takes(calls_grammar(form, required=True), "Let me see.\n" + ONE[form])


@pytest.mark.parametrize("form", FORMATS)
def test_a_structured_answer_stands_beside_calls(form: CallFormat) -> None:
    grammar = calls_grammar(form, answer={"type": "object", "properties": {"x": {"type": "null"}}, "required": ["x"]})
    assert takes(grammar, ONE[form])
    assert takes(grammar, '{"x": null}')
    assert not takes(grammar, "text")
    assert not takes(grammar, '{"x": 1}')


def test_schemas_keep_their_own_references_where_calls_and_answers_begin_alike() -> None:
    node = {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "additionalProperties": False}
    schema = {"$ref": "#/$defs/n", "$defs": {"n": node}}
    tool = Tool("walk", schema, False, "tools[0].function.parameters")
    grammar = calls_grammar(LLAMA3, [tool], answer={**node, "$defs": {"n": {"type": "integer"}}})
    assert takes(grammar, '{"name": "walk", "parameters": {"n": {"n": {}}}}')
    assert not takes(grammar, '{"name": "walk", "parameters": {"n": 5}}')
    assert takes(grammar, '{"n": 5}')


def test_json_that_is_no_call_may_be_an_answer_where_calls_are_bare_json() -> None:
    grammar = calls_grammar(LLAMA3)
    assert takes(grammar, '{"name": "Ada", "parameters": {}}')
    assert takes(grammar, '{"name": "add"}')
    assert not takes(grammar, '{"name": "add", "parameters": {"b": 5}}')


@pytest.mark.parametrize("form", FORMATS)
def test_silence_takes_any_text_but_calls(form: CallFormat) -> None:
    grammar = "start: body\n" + SYNTAXES[form](CONTROL).silence(["add", "look_up"], ())
    assert takes(grammar, "Text with { and <tool_calls> and \n.")
    assert not takes(grammar, ONE[form])


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("control", [{}, {"<think>": THINK, "</think>": END_THINK}])
def test_constraints_begin_behind_the_thinking(state: State, control: dict[str, int]) -> None:
    start = thoughts.grammar(state, THINKING, control)
    grammar = calls_grammar(HERMES, required=True, start=start)

    def takes_thinking(text: str) -> bool:
        pieces: list[int] = []
        for at, piece in enumerate(text.replace("</think>", "\0e\0").replace("<think>", "\0b\0").split("\0")):
            names = {"b": control.get("<think>"), "e": control.get("</think>")}
            plain = {"b": "<think>", "e": "</think>"}
            if at % 2:
                pieces += list(plain[piece].encode()) if names[piece] is None else [names[piece] or 0]
            else:
                pieces += list(piece.encode())
        matcher = LLMatcher(TOKENIZER, grammar)
        return matcher.try_consume_tokens(pieces) == len(pieces) and matcher.is_accepting()

    inside = "I could <tool_call> or not.\n</think>\n\n" + ONE[HERMES]
    assert takes_thinking(ONE[HERMES]) == (state is not State.OPEN)
    assert takes_thinking("<think>" + inside) == (state is State.MAY_OPEN or (state is State.OPEN and not control))
    assert takes_thinking(inside) == (state is State.OPEN)


def test_a_free_answer_that_may_think_first_calls_behind_its_thinking_only() -> None:
    start = thoughts.grammar(State.MAY_OPEN, THINKING, {})
    grammar = calls_grammar(HERMES, start=start, never=("<think>",))
    assert takes(grammar, "<think>Maybe <tool_call>?</think>\n\nNo.")
    assert takes(grammar, "<think>Maybe.</think>\n\n" + ONE[HERMES])
    assert takes(grammar, "No.")
    assert not takes(grammar, "<think>Maybe.</think>\n\n" + ONE[HERMES].replace("5", "x"))


@pytest.mark.parametrize(
    "schema",
    [
        {
            "type": "object",
            "properties": {"description": {"type": "string"}, "title": {"const": "x"}},
            "required": ["title"],
        },
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}},
        {"anyOf": [{"type": "object", "properties": {"a": {"enum": ["é", "\u2028", '"']}}, "required": ["a"]}]},
        {},
    ],
)
@pytest.mark.parametrize("form", FORMATS)
def test_whatever_a_grammar_lets_through_is_read_as_the_call_it_is(form: CallFormat, schema: dict[str, Any]) -> None:
    tool = Tool("do.it", arguments_schema(schema), False, "tools[0].function.parameters")
    grammar = calls_grammar(form, [tool], required=True)
    for seed in range(10):
        text = random_text(grammar, seed)
        ids = map(str, itertools.count())
        reader = SYNTAXES[form](CONTROL).reader(Choice((tool,)), ids.__next__)
        parts = [*reader.feed(text), *reader.end()]
        calls = calls_of(parts)
        assert calls, text
        for call in calls:
            assert call.name == "do.it"
            value = json.loads(call.arguments)
            assert call.arguments in text
            assert isinstance(value, dict)


def random_text(grammar: str, seed: int) -> str:
    """A whole text of the grammar: random bytes at first, then whatever ends it soonest."""
    rng = random.Random(seed)
    matcher = LLMatcher(TOKENIZER, grammar)
    out: list[int] = []
    while not matcher.is_stopped():
        assert not matcher.is_error(), matcher.get_error()
        ahead = matcher.compute_ff_tokens()
        if not ahead:
            bits = matcher.compute_bitmask()
            may = [token for token in range(260) if bits[token // 8] >> token % 8 & 1]
            ends = [token for token in may if token in (*b'"}]0', EOS)]
            ahead = [rng.choice(ends if ends and (len(out) > 60 or rng.random() < 0.3) else may)]
        if ahead == [EOS]:
            break
        assert matcher.consume_tokens(ahead)
        out += ahead
    names = {TOOL_CALLS: b"[TOOL_CALLS]"}
    return b"".join(names.get(token) or bytes([token]) for token in out).decode()
