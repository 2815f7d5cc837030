"""Readers of calls and thinking: whole and in any pieces, sense and nonsense."""

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.gateway.answers import SYNTAXES
from trunkline.gateway.readers import PlainReader, Reader
from trunkline.gateway.thoughts import State, ThinkingReader
from trunkline.gateway.tools.declared import Choice, Tool
from trunkline.wire.outputs import CallArguments, CallBegun, Part, Text, Thinking, calls_of
from trunkline.wire.turns import CallFormat

TOOLS = tuple(Tool(name, {"type": "object"}, False, "tools[0].function.parameters") for name in ("add", "get_weather"))
HERMES, LLAMA3, MISTRAL = CallFormat.HERMES, CallFormat.LLAMA3, CallFormat.MISTRAL
FORMATS = (HERMES, LLAMA3, MISTRAL)


def make_reader(form: CallFormat) -> Reader:
    count = itertools.count()
    return SYNTAXES[form]({}).reader(Choice(TOOLS), lambda: f"id{next(count)}")


def read(reader: Reader, pieces: Sequence[str]) -> list[Part]:
    parts = [part for piece in pieces for part in reader.feed(piece)]
    return [*parts, *reader.end()]


def text_of(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text))


def thinking_of(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Thinking))


def summary(form: CallFormat, text: str) -> tuple[str, list[tuple[str, str]]]:
    parts = read(make_reader(form), list(text))
    return text_of(parts), [(call.name, call.arguments) for call in calls_of(parts)]


A = '{"a": 1}'
B = '{"b": "x}\\"{"}'


@pytest.mark.parametrize(
    ("form", "text", "shown", "calls"),
    [
        (HERMES, f'<tool_call>\n{{"name": "add", "arguments": {A}}}\n</tool_call>', "", [("add", A)]),
        (HERMES, f'Look.\n<tool_call>\n{{"name": "add", "arguments": {B}}}\n</tool_call>\n', "Look.", [("add", B)]),
        (
            HERMES,
            f'<tool_call>{{"name":"add","arguments":{A}}}</tool_call>\n\n'
            f'<tool_call> {{ "name" : "get_weather" , "parameters" : {B} }} </tool_call>',
            "",
            [("add", A), ("get_weather", B)],
        ),
        (HERMES, f'<tool_call>{{"arguments": {A}, "name": "add"}}</tool_call>', "", [("add", A)]),
        (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("add", A)]),
        (HERMES, f'<tool_call>{{"name": "add", "arguments": {A}, "id": "7}}"}}</tool_call>!', "!", [("add", A)]),
        (HERMES, f'<tool_call>{{"name": "add", "arguments": {A}</tool_call> so', " so", [("add", A)]),
        (HERMES, f'<tool_call>{{"name": "add", "arguments": {A}}}', "", [("add", A)]),
        (HERMES, f'<tool_call>{{"name": "add", "arguments": {A}}}</tool', "", [("add", A)]),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": [1', "", [("add", '{"a": [1')]),
        (HERMES, "no call here \n", "no call here \n", []),
        (HERMES, "<tool_call> is how <tool_call>x</tool_call>", "<tool_call> is how <tool_call>x</tool_call>", []),
        (HERMES, '<tool_call>{"name": "rm"}</tool_call>', '<tool_call>{"name": "rm"}</tool_call>', []),
        (
            HERMES,
            f'a <tool_call>{{"name": "rm", "arguments": {A}}}',
            f'a <tool_call>{{"name": "rm", "arguments": {A}}}',
            [],
        ),
        (HERMES, "cut <tool_ca", "cut <tool_ca", []),
        (HERMES, 'cut <tool_call>{"na', 'cut <tool_call>{"na', []),
        (LLAMA3, f'{{"name": "add", "parameters": {A}}}', "", [("add", A)]),
        (LLAMA3, f'{{"type": "function", "name": "add", "parameters": {A}}}', "", [("add", A)]),
        (LLAMA3, f'\n{{"name": "add", "parameters": {A}}} done', "done", [("add", A)]),
        (LLAMA3, '{"city": "Rome", "more": {}}', '{"city": "Rome", "more": {}}', []),
        (LLAMA3, '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
        (LLAMA3, "{", "{", []),
        (LLAMA3, "It is {sunny}.", "It is {sunny}.", []),
        (MISTRAL, f'[TOOL_CALLS][{{"name": "add", "arguments": {A}}}]', "", [("add", A)]),
        (
            MISTRAL,
            f'Hm.[TOOL_CALLS] [{{"name": "add", "arguments": {A}}}, {{"name": "get_weather", "arguments": {B}}}]',
            "Hm.",
            [("add", A), ("get_weather", B)],
        ),
        (MISTRAL, f'[TOOL_CALLS][{{"name": "add", "arguments": {A}, "id": "abcdefgh1"}}]', "", [("add", A)]),
        (MISTRAL, "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
        (MISTRAL, '[TOOL_CALLS][{"name": "rm", "arguments": {}}]', '[TOOL_CALLS][{"name": "rm", "arguments": {}}]', []),
        (MISTRAL, "a [TOOL_", "a [TOOL_", []),
    ],
)
def test_calls_are_told_from_text(form: CallFormat, text: str, shown: str, calls: list[tuple[str, str]]) -> None:
    assert summary(form, text) == (shown, calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "\n".join(f'<tool_call>\n{{"name": "add", "arguments": {A}}}\n</tool_call>' for _ in range(3))),
        (LLAMA3, f'{{"name": "add", "parameters": {A}}}'),
        (MISTRAL, "[TOOL_CALLS][" + ", ".join(f'{{"name": "add", "arguments": {A}}}' for _ in range(3)) + "]"),
    ],
)
def test_calls_that_the_token_limit_cuts_anywhere_leave_nothing_of_themselves_in_the_text(
    form: CallFormat, text: str
) -> None:
    first = text.index(A) + 1
    for end in range(first, len(text) + 1):
        shown, calls = summary(form, text[:end])
        assert (shown, bool(calls)) == ("", True), text[:end]


def test_arguments_come_piece_by_piece_as_they_are_generated() -> None:
    pieces = ["Hi <to", "ol_call>\n", '{"name": "add", ', '"arguments": {"a', '": 1', "}}", "\n</tool_call>"]
    reader = make_reader(HERMES)
    parts = [list(reader.feed(piece)) for piece in pieces]
    assert parts == [
        [Text("Hi")],
        [],
        [],
        [CallBegun(0, "id0", "add"), CallArguments(0, '{"a')],
        [CallArguments(0, '": 1')],
        [CallArguments(0, "}")],
        [],
    ]
    assert list(reader.end()) == []


def test_text_is_shown_at_once_unless_a_marker_may_begin_in_it() -> None:
    reader = make_reader(HERMES)
    assert text_of(reader.feed("a < b")) == "a < b"
    assert text_of(reader.feed(" <tool")) == ""
    assert text_of(reader.feed("s>")) == " <tools>"
    reader = make_reader(LLAMA3)
    assert text_of(reader.feed('{"city"')) == ""
    assert text_of(reader.feed(": {")) == '{"city": {'
    assert text_of(reader.feed("x")) == "x"


# Text made of what readers look at, so that nonsense comes close to sense.
MARKERS = ["<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[TOOL", "<think>", "</think>", "</th"]
SIGNS = ["[", "]", ",", "{", "}", '"', "\\", ":", "x", "é", " ", "\n", '"name"', "add", "}}</tool_call>", "}]"]
CALLS = ['{"name": "add", "arguments": {', '{"name": "add", "parameters": {"a": 1}', '{"a": 1}']
NEAR = st.lists(st.sampled_from([*MARKERS, *SIGNS, *CALLS]), max_size=12).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=NEAR, cuts=st.lists(st.integers(0, 80), max_size=8))
@pytest.mark.parametrize("form", FORMATS)
def test_how_text_is_cut_into_pieces_changes_nothing(form: CallFormat, text: str, cuts: list[int]) -> None:
    places = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    for wrap in (False, True):
        one, many = make_reader(form), make_reader(form)
        if wrap:
            one, many = (ThinkingReader(r, ("<think>", "</think>"), State.MAY_OPEN) for r in (one, many))
        whole, split = read(one, [text]), read(many, pieces)
        assert text_of(whole) == text_of(split)
        assert thinking_of(whole) == thinking_of(split)
        assert calls_of(whole) == calls_of(split)


@settings(max_examples=300, deadline=None)
@given(text=NEAR)
@pytest.mark.parametrize("form", FORMATS)
def test_without_a_call_all_text_is_shown(form: CallFormat, text: str) -> None:
    parts = read(make_reader(form), [text])
    if not calls_of(parts):
        assert text_of(parts) == text


@settings(max_examples=200, deadline=None)
@given(
    arguments=st.dictionaries(st.text(), st.recursive(st.text() | st.integers() | st.none(), st.lists, max_leaves=5)),
    before=st.text(alphabet="ab <\n"),
)
@pytest.mark.parametrize("form", FORMATS)
def test_any_arguments_arrive_as_they_were_written(form: CallFormat, arguments: dict[str, object], before: str) -> None:
    written = json.dumps(arguments, ensure_ascii=False)
    text = {
        HERMES: f'{before}<tool_call>\n{{"name": "add", "arguments": {written}}}\n</tool_call>',
        LLAMA3: f'{{"name": "add", "parameters": {written}}}',
        MISTRAL: f'{before}[TOOL_CALLS][{{"name": "add", "arguments": {written}}}]',
    }[form]
    assert summary(form, text)[1] == [("add", written)]


@pytest.mark.parametrize(
    ("state", "text", "thought", "answer"),
    [
        (State.MAY_OPEN, "<think>\nHm\n\nso\n</think>\n\nYes\n", "Hm\n\nso", "Yes\n"),
        (State.MAY_OPEN, "\n<think>Hm", "Hm", ""),
        (State.MAY_OPEN, "Yes <think>no</think>", "", "Yes <think>no</think>"),
        (State.MAY_OPEN, "<thin", "", "<thin"),
        (State.OPEN, "Hm\n</think>\n\nYes", "Hm", "Yes"),
        (State.OPEN, "Hm </thi", "Hm </thi", ""),
        (State.OPEN, "</think>Yes", "", "Yes"),
        (State.CLOSED, "<think>Yes", "", "<think>Yes"),
    ],
)
def test_thinking_is_told_from_the_answer(state: State, text: str, thought: str, answer: str) -> None:
    for pieces in ([text], list(text)):
        parts = read(ThinkingReader(PlainReader(), ("<think>", "</think>"), state), pieces)
        assert (thinking_of(parts), text_of(parts)) == (thought, answer)
