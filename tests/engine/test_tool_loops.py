"""Tool loops of a real client against real models: grammar, readers, templates and history together.

What must hold in every loop: a turn's prompt begins with the tokens of the turn before, prompt and answer.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import jsonschema
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.engine import templates
from tests.engine.scripted_choice import ScriptedChoice
from tests.engine.served import Served, make_settings
from trunkline.engine.embedded import EmbeddedEngine
from trunkline.engine.model import Model
from trunkline.engine.sampling import Choosers, Sampler
from trunkline.engine.tokens import Vocabulary
from trunkline.gateway.app import build_app
from trunkline.gateway.records import RunRecords
from trunkline.gateway.settings import GatewaySettings
from trunkline.wire.turns import Delta, TurnEvent, TurnRequest

CTX = 2048
TURNS = 4
MAX_TOKENS = 96
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city"],
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "Tells weather.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "get_time", "description": "Tells the time."}},
]


class Noting:
    """An engine that notes the tokens of every turn: its prompt's, and those it generated."""

    def __init__(self, engine: EmbeddedEngine, ends: Collection[int]) -> None:
        """`ends` are the end tokens: a template closes a turn with its own."""
        self._engine = engine
        self._ends = ends
        self.prompts: list[list[int]] = []
        self.generated: list[list[int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: TurnRequest) -> AsyncIterator[TurnEvent]:
        """As the engine's."""
        said: list[int] = []
        self.prompts.append(request.tokens.tolist())
        self.generated.append(said)
        async for event in self._engine.generate(request):
            if isinstance(event, Delta):
                said += [token for token in event.tokens if token not in self._ends]
            yield event

    def broken(self) -> list[int]:
        """The turns whose prompt does not begin with all tokens of the turn before."""
        turns = range(1, len(self.prompts))
        whole = [prompt + said for prompt, said in zip(self.prompts, self.generated, strict=True)]
        return [turn for turn in turns if self.prompts[turn][: len(whole[turn - 1])] != whole[turn - 1]]


@asynccontextmanager
async def serving(
    model: Model, choosers: Choosers = Sampler
) -> AsyncIterator[tuple[openai.AsyncOpenAI, Noting, Served]]:
    """A client of a server on `model`."""
    records = RunRecords(None)
    with Served(model, make_settings(model, slots=2, slot_tokens=CTX), choosers=choosers) as served:
        noting = Noting(served.engine, Vocabulary(model.vocab).end_tokens)
        app = build_app(cast(Any, noting), records, GatewaySettings())
        transport = httpx.ASGITransport(app)
        async with openai.AsyncOpenAI(
            base_url="http://test/v1",
            api_key="none",
            max_retries=0,
            http_client=cast(Any, httpx.AsyncClient(transport=transport, timeout=120)),
        ) as client:
            yield client, noting, served
    records.close()


async def answered(client: openai.AsyncOpenAI, messages: Sequence[Any], stream: bool, **fields: Any) -> Any:
    """The assistant's message, as a client sends it back."""
    asked: Any = {"model": "m", "messages": messages, "tools": TOOLS, "max_tokens": MAX_TOKENS, **fields}
    if not stream:
        completion = await client.chat.completions.create(**asked)
        return completion.choices[0].message.model_dump(exclude_none=True)
    state = ChatCompletionStreamState()
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        state.handle_chunk(chunk)
    return state.current_completion_snapshot.choices[0].message.model_dump(exclude_none=True, exclude={"parsed"})


def results(message: Any) -> list[Any]:
    """What the tools, or else the user, say to `message`."""
    calls = message.get("tool_calls", [])
    for call in calls:
        call["function"].pop("parsed_arguments", None)
    said = [{"role": "tool", "tool_call_id": call["id"], "content": '{"sky": "grey"}'} for call in calls]
    return said or [{"role": "user", "content": "Go on."}]


async def run_loop(client: openai.AsyncOpenAI, fields_of: Callable[[int], dict[str, Any]]) -> list[Any]:
    """A loop of `TURNS` turns; the messages in the end."""
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
    for turn in range(TURNS):
        message = await answered(client, messages, stream=turn % 2 == 1, **fields_of(turn))
        messages += [message, *results(message)]
    return messages


def calls_of(messages: Sequence[Any]) -> list[Any]:
    return [call["function"] for message in messages for call in message.get("tool_calls", [])]


SOURCES = {
    "own": None,
    "qwen2.5": templates.QWEN25,
    "qwen3": templates.QWEN3,
    "llama3.1": templates.LLAMA31,
    "mistral": templates.MISTRAL,
}


def speak(monkeypatch: pytest.MonkeyPatch, source: str | None) -> None:
    """Make models say that `source` is their template."""
    monkeypatch.setattr(Model, "chat_template", property(lambda _: source))


@pytest.fixture(params=[("smollm2", name) for name in SOURCES] + [("gemma", "own")], ids="-".join)
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Model:
    """A real model, with its own template or with one that is built like another family's."""
    name, source = request.param
    loaded: Model = request.getfixturevalue(name)
    if SOURCES[source] is not None:
        speak(monkeypatch, SOURCES[source])
    return loaded


def test_no_prefix_breaks_in_a_loop_of_required_calls(model: Model) -> None:
    async def check() -> None:
        async with serving(model) as (client, noting, _):
            messages = await run_loop(client, lambda turn: {"tool_choice": "required", "seed": turn})
            calls = calls_of(messages)
            assert len(calls) >= TURNS
            for call in calls[:1]:
                assert call["name"] in ("get_weather", "get_time")
            assert noting.broken() == []

    asyncio.run(check())


def test_arguments_under_required_match_their_schema(smollm2: Model) -> None:
    async def check() -> None:
        async with serving(smollm2) as (client, _, served):
            for seed in range(6):
                choice = {"type": "function", "function": {"name": "get_weather"}}
                user = [{"role": "user", "content": "Weather?"}]
                message = await answered(client, user, False, tool_choice=choice, seed=seed)
                (call,) = calls_of([message])
                assert call["name"] == "get_weather"
                jsonschema.validate(json.loads(call["arguments"]), SCHEMA)
            assert all(row.finish_reason == "stop" and row.forced_tokens > 5 for row in served.rows)

    asyncio.run(check())


REPLIES = {
    "tags": [
        "Let me look.\n\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "R\\"ö\\n", "days": 3}}\n</tool_call>',
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "é <b>"}}\n</tool_call>',
        "It is grey.\n",
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
    ],
    "bare": [
        '{"name": "get_weather", "parameters": {"city": "R\\"ö\\n", "days": 3}}',
        '{"name": "get_time", "parameters": {}}',
        "It is {grey}.",
        '{"name": "get_time", "parameters": {}}',
    ],
    "list": [
        'Let me look.[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "R\\"ö\\n", "days": 3}}]',
        '[TOOL_CALLS] [{"name": "get_time", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "é"}}]',
        '[TOOL_CALLS][{"name": "get_time", "arguments": {}}]',
        " It is grey.",
    ],
}


@pytest.mark.parametrize(
    "model", [("smollm2", name) for name in SOURCES] + [("gemma", "own")], indirect=True, ids="-".join
)
def test_no_prefix_breaks_when_text_calls_and_answers_mix(model: Model, request: pytest.FixtureRequest) -> None:
    source = request.node.callspec.params["model"][1]
    replies = REPLIES[{"llama3.1": "bare", "mistral": "list"}.get(source, "tags")]

    async def check() -> None:
        script = ScriptedChoice(Vocabulary(model.vocab), replies)
        async with serving(model, script) as (client, noting, _):
            messages = await run_loop(client, lambda turn: {})
            assert [call["name"] for call in calls_of(messages)][:2] == ["get_weather", "get_time"]
            assert json.loads(calls_of(messages)[0]["arguments"]) == {"city": 'R"ö\n', "days": 3}
            assert noting.broken() == []

    asyncio.run(check())


def test_thinking_in_a_loop_stays_in_the_prefix_until_the_template_drops_it(
    smollm2: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    speak(monkeypatch, templates.QWEN3)
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    replies = ["<think>\nHm.\n</think>\n\n" + call, "<think>\nSo.\n</think>\n\n" + call, "Noon.", "Bye."]

    async def check() -> None:
        script = ScriptedChoice(Vocabulary(smollm2.vocab), replies)
        async with serving(smollm2, script) as (client, noting, _):
            messages = await run_loop(client, lambda turn: {})
            assert [message.get("reasoning_content") for message in messages[1:4:2]] == ["Hm.", "So."]
            assert not messages[1].get("content")
            assert noting.broken() == [3]  # a new question: now the thoughts before it are dropped

    asyncio.run(check())


def test_an_edited_call_is_rendered_as_sent(smollm2: Model) -> None:
    async def check() -> None:
        script = ScriptedChoice(Vocabulary(smollm2.vocab), REPLIES["tags"][1:])
        async with serving(smollm2, script) as (client, noting, _):
            messages: list[Any] = [{"role": "user", "content": "Time?"}]
            message = await answered(client, messages, stream=False)
            message["tool_calls"][1]["function"]["arguments"] = '{"city": "Oslo"}'
            await answered(client, [*messages, message, *results(message)], stream=False)
            assert noting.broken() == [1]
            assert '{"city": "Oslo"}' in script.prompts[1]

    asyncio.run(check())


def test_a_structured_answer_matches_its_schema(smollm2: Model) -> None:
    async def check() -> None:
        async with serving(smollm2) as (client, _, _):
            for seed in range(3):
                completion = await client.chat.completions.create(
                    model="m",
                    messages=[{"role": "user", "content": "A forecast, please."}],
                    response_format=cast(Any, {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}),
                    max_tokens=MAX_TOKENS,
                    seed=seed,
                )
                value = json.loads(completion.choices[0].message.content or "")
                jsonschema.validate(value, SCHEMA)
            with pytest.raises(openai.BadRequestError, match=r"response_format.json_schema.schema.*look-around"):
                await client.chat.completions.create(
                    model="m",
                    messages=[{"role": "user", "content": "x"}],
                    response_format=cast(
                        Any,
                        {
                            "type": "json_schema",
                            "json_schema": {
                                "name": "n",
                                "schema": {
                                    "type": "object",
                                    "properties": {"p": {"type": "string", "pattern": "(?=x)"}},
                                },
                            },
                        },
                    ),
                )

    asyncio.run(check())
