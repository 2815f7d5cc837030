"""What the answer to a chat may be, and how it is read: calls, structure and thinking put together.

start: thinking? body            body: text | calls        without a constraint where any text will do
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trunkline.gateway import thoughts
from trunkline.gateway.context import Gateway
from trunkline.gateway.errors import InvalidSchema, Unsupported
from trunkline.gateway.readers import PlainReader, Reader, ReaderFactory
from trunkline.gateway.structured import Structure, read_structure
from trunkline.gateway.thoughts import State, ThinkingReader
from trunkline.gateway.tools.declared import Choice, Tool, read_choice, read_tools
from trunkline.gateway.tools.hermes import Hermes
from trunkline.gateway.tools.history import LEAD
from trunkline.gateway.tools.lark import schema_rule
from trunkline.gateway.tools.llama3 import Llama3
from trunkline.gateway.tools.memory import Said
from trunkline.gateway.tools.mistral import Mistral
from trunkline.gateway.tools.syntax import MakeSyntax, Shape, Syntax
from trunkline.wire.openai import ChatBody, CompletionBody
from trunkline.wire.outputs import CallBegun, Part, Text, Thinking, calls_of
from trunkline.wire.turns import CallFormat, Constraint, TemplateTraits

SYNTAXES: Mapping[CallFormat, MakeSyntax] = {
    CallFormat.HERMES: Hermes,
    CallFormat.LLAMA3: Llama3,
    CallFormat.MISTRAL: Mistral,
    CallFormat.GENERIC: Hermes,
}

TOOL_CALL = "tool_call"
"""The kind of a turn that may or must call."""
NO_CALL = "no_call"
"""The kind of a turn that has tools and must not call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a body asks of its answer, checked as far as the body alone tells."""

    tools: tuple[Tool, ...]
    choice: Choice
    structure: Structure | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the executor is told, and what reads the choices."""

    constraint: Constraint | None
    show_control: tuple[str, ...]
    reader: ReaderFactory


def read_wanted(gateway: Gateway, body: ChatBody, tools: Sequence[Mapping[str, Any]] | None) -> Wanted:
    """Raises `InvalidRequest` or one of its kinds. `tools` are the body's, as they are rendered."""
    declared = read_tools(tools, gateway.settings)
    wanted = Wanted(
        tools=declared, choice=read_choice(body, declared), structure=read_structure(body, gateway.settings)
    )
    if wanted.choice.tools and wanted.structure is not None and wanted.structure.grammar is not None:
        raise Unsupported(
            f'`{wanted.structure.param}` is not supported beside tools; send `tool_choice` "none".',
            param=wanted.structure.param,
        )
    return wanted


def plan_answer(gateway: Gateway, wanted: Wanted, prompt: str, salt: str) -> Answer:
    """How the answer to `prompt` is generated and read. Raises `InvalidSchema` or `Unsupported`."""
    traits = gateway.executor.model.traits
    control = dict(traits.control)
    state = State.CLOSED if traits.thinking is None else thoughts.state_of(prompt, traits.thinking)
    syntax = SYNTAXES[traits.calls](control)
    constraint = _Planner(gateway, wanted, traits, syntax, state).constraint()
    choice = wanted.choice
    markers = (*(traits.thinking or ()), *(syntax.markers if choice.tools else ()))
    if not choice.tools and traits.thinking is None:
        return Answer(constraint=constraint, show_control=(), reader=PlainReader)

    def reader() -> Reader:
        read: Reader = syntax.reader(choice, _new_id(traits.calls)) if choice.tools else PlainReader()
        if traits.thinking is not None:
            read = ThinkingReader(read, traits.thinking, state)
        if not choice.tools:
            return read
        return _Remembering(read, lambda raw, parts: _remember(gateway, salt, prompt, traits, state, raw, parts))

    return Answer(
        constraint=constraint, show_control=tuple(marker for marker in markers if marker in control), reader=reader
    )


def plan_completion(gateway: Gateway, body: CompletionBody) -> Constraint | None:
    """The constraint of a completion, which has neither tools nor thinking. Raises `InvalidRequest` or its kinds."""
    structure = read_structure(body, gateway.settings)
    if structure is None:
        return None
    constraint = Constraint(structure.grammar or "start: answer\n" + structure.rules, structure.kind)
    _check(gateway, constraint, structure.param)
    return constraint


class _Planner:
    """Writes one grammar. Tools whose schema cannot be compiled are an error only where it was promised to hold."""

    def __init__(self, gateway: Gateway, wanted: Wanted, traits: TemplateTraits, syntax: Syntax, state: State) -> None:
        self._gateway = gateway
        self._wanted = wanted
        self._traits = traits
        self._syntax = syntax
        self._state = state

    def constraint(self) -> Constraint | None:
        """The constraint, compiled; None for any text. Raises `InvalidSchema` or `Unsupported`."""
        structure, choice = self._wanted.structure, self._wanted.choice
        if choice.tools:
            return self._calls(choice)
        if structure is None:
            return self._no_calls() if self._wanted.tools else None
        if structure.grammar is not None:
            return self._own_grammar(structure, structure.grammar)
        constraint = Constraint(self._thinking() + "body: answer\n" + structure.rules, structure.kind)
        _check(self._gateway, constraint, structure.param)
        return constraint

    def _thinking(self) -> str:
        if self._traits.thinking is None:
            return "start: body\n"
        return thoughts.grammar(self._state, self._traits.thinking, dict(self._traits.control))

    @property
    def _never(self) -> tuple[str, ...]:
        """What a free answer does not begin with: thinking has a rule of its own."""
        pair = self._traits.thinking
        in_letters = pair is not None and pair[0] not in dict(self._traits.control)
        return (pair[0],) if pair is not None and in_letters and self._state is State.MAY_OPEN else ()

    def _no_calls(self) -> Constraint | None:
        names = tuple(tool.name for tool in self._wanted.tools)
        constraint = Constraint(self._thinking() + self._syntax.silence(names, self._never), NO_CALL)
        return None if self._gateway.checks.problem(constraint) else constraint

    def _own_grammar(self, structure: Structure, grammar: str) -> Constraint:
        if self._state is not State.CLOSED:
            raise Unsupported(
                f"`{structure.param}` is not supported while the model thinks; turn its thinking off "
                "(`chat_template_kwargs`), or send a JSON schema.",
                param=structure.param,
            )
        constraint = Constraint(grammar, structure.kind)
        _check(self._gateway, constraint, structure.param)
        return constraint

    def _calls(self, choice: Choice) -> Constraint | None:
        constraint = self._with(choice)
        if self._gateway.checks.problem(constraint) is None:
            return constraint
        self._blame(choice)
        loose = self._with(replace(choice, tools=tuple(map(self._loosened, choice.tools))))
        return None if self._gateway.checks.problem(loose) else loose

    def _with(self, choice: Choice) -> Constraint:
        structure = self._wanted.structure
        shape = Shape(
            choice=choice,
            answer=None if structure is None else "answer",
            schema=None if structure is None else structure.schema,
            never=self._never,
        )
        rules = [f"args{at}: {schema_rule(tool.parameters)}\n" for at, tool in enumerate(choice.tools)]
        rules += [] if structure is None or choice.required else [structure.rules]
        return Constraint(self._thinking() + self._syntax.grammar(shape) + "".join(rules), TOOL_CALL)

    def _blame(self, choice: Choice) -> None:
        """Raise `InvalidSchema` for what cannot be compiled, unless it may be loosened."""
        for tool in choice.tools:
            if choice.required or tool.strict:
                _check(self._gateway, _alone(tool), tool.where)
        structure = self._wanted.structure
        if structure is not None and not choice.required:
            _check(self._gateway, Constraint("start: answer\n" + structure.rules, structure.kind), structure.param)
        if choice.required:
            _check(self._gateway, self._with(choice), "tools")

    def _loosened(self, tool: Tool) -> Tool:
        problem = self._gateway.checks.problem(_alone(tool))
        return tool if problem is None else replace(tool, parameters={"type": "object"})


def _alone(tool: Tool) -> Constraint:
    return Constraint(f"start: {schema_rule(tool.parameters)}\n", TOOL_CALL)


def _check(gateway: Gateway, constraint: Constraint, param: str) -> None:
    problem = gateway.checks.problem(constraint)
    if problem is not None:
        raise InvalidSchema(f"{param} cannot be served: {problem}.", param=param)


def _new_id(calls: CallFormat) -> Callable[[], str]:
    """Mistral's templates take ids of nine letters and digits only."""
    if calls is CallFormat.MISTRAL:
        return lambda: secrets.token_hex(5)[:9]
    return lambda: f"call_{secrets.token_hex(12)}"


class _Remembering:
    """Implements `Reader`: tells at the end what a turn that made calls really said."""

    def __init__(self, reader: Reader, tell: Callable[[str, list[Part]], None]) -> None:
        self._reader = reader
        self._tell = tell
        self._raw: list[str] = []
        self._parts: list[Part] = []

    def feed(self, text: str) -> Sequence[Part]:
        """As `Reader.feed`."""
        self._raw.append(text)
        parts = self._reader.feed(text)
        self._parts += parts
        return parts

    def end(self) -> Sequence[Part]:
        """As `Reader.end`."""
        parts = self._reader.end()
        self._parts += parts
        if any(isinstance(part, CallBegun) for part in self._parts):
            self._tell("".join(self._raw), self._parts)
        return parts


def _remember(
    gateway: Gateway,
    salt: str,
    prompt: str,
    traits: TemplateTraits,
    state: State,
    raw: str,
    parts: Sequence[Part],
) -> None:
    thought = "".join([part.text for part in parts if isinstance(part, Thinking)])
    text = raw if traits.thinking is None else thoughts.behind(raw, traits.thinking, state)
    gateway.calls.remember(
        salt,
        Said(
            text=text,
            content="".join([part.text for part in parts if isinstance(part, Text)]),
            thinking=thought,
            calls=tuple(calls_of(parts)),
            lead=prompt[-LEAD:] if text == raw else "",
        ),
    )
