"""Constrained turns in the engine: what is forced takes few passes, is reused like any token, and replays exactly."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.engine.scripted_choice import ScriptedChoice
from tests.engine.served import Served, make_request, make_settings, some_tokens
from trunkline.core.types import EndReason, Ints
from trunkline.engine.model import Model
from trunkline.engine.tokens import Vocabulary
from trunkline.wire.journal import Journal, replay
from trunkline.wire.turns import Constraint, Delta, Ended, Failed, RunHint, Sampling, TurnRequest

TOOL = {
    "type": "object",
    "properties": {
        "name": {"const": "get_current_weather"},
        "arguments": {
            "type": "object",
            "properties": {"location": {"type": "string"}, "temperature_unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["location", "temperature_unit"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
CALL = Constraint(f'start: "<tool_call>\\n" call "\\n</tool_call>"\ncall: %json {json.dumps(TOOL)}', "tool_call")
SAID = (
    '<tool_call>\n{"name":"get_current_weather","arguments":{"location":"Oslo","temperature_unit":"celsius"}}\n'
    "</tool_call>"
)


@dataclass
class Answer:
    """What one turn said."""

    prompt: Ints
    tokens: list[int]
    text: str
    end: Ended | Failed


async def ask(
    served: Served,
    text: str,
    constraint: Constraint | None = CALL,
    *,
    run: str | None = None,
    max_tokens: int = 300,
    logprobs: int | None = None,
    show_control: tuple[str, ...] = (),
) -> Answer:
    prompt = served.engine.tokenize(text, salt="")
    request = TurnRequest(
        salt="",
        tokens=prompt,
        text=text,
        max_tokens=max_tokens,
        hint=RunHint(run=run),
        sampling=Sampling(temperature=0.0),
        logprobs=logprobs,
        constraint=constraint,
        show_control=show_control,
    )
    tokens: list[int] = []
    said = ""
    async for event in served.engine.generate(request):
        if isinstance(event, Delta):
            tokens += event.tokens
            said += event.text
        if isinstance(event, Ended | Failed):
            return Answer(prompt, tokens, said, event)
    raise AssertionError("a turn ends")


def chat(*messages: str) -> str:
    roles = ("user", "assistant")
    said = [f"<|im_start|>{roles[at % 2]}\n{text}<|im_end|>\n" for at, text in enumerate(messages)]
    return "".join(said) + "<|im_start|>assistant\n"


def test_a_tool_call_takes_fewer_passes_than_tokens_and_replays_exactly(smollm2: Model, tmp_path: Path) -> None:
    settings = make_settings(smollm2)
    journal = Journal(tmp_path / "decisions.jsonl", settings)
    script = ScriptedChoice(Vocabulary(smollm2.vocab), lambda prompt: SAID if "weather" in prompt else "Plain words.")

    async def all_turns(served: Served) -> list[Answer]:
        plain = (ask(served, chat(f"Say words, {at}."), None) for at in range(2))
        return await asyncio.gather(*(ask(served, chat(f"weather {at}?")) for at in range(2)), *plain)

    with Served(smollm2, settings, journal, script) as served:
        answers = asyncio.run(all_turns(served))
    journal.close()
    assert [answer.text for answer in answers] == [SAID, SAID, "Plain words.", "Plain words."]
    for answer in answers:
        assert isinstance(answer.end, Ended)
        row = answer.end.row
        assert row.completion_tokens == len(answer.tokens)
        assert answer.end.reason is EndReason.STOP
        if answer.text == SAID:
            assert row.constraint == "tool_call"
            assert row.forced_tokens > len(answer.tokens) / 2
            assert row.forced_tokens - 3 <= row.saved_passes < row.completion_tokens
            assert row.mask_ms > 0
        else:
            assert (row.constraint, row.forced_tokens, row.saved_passes, row.mask_ms) == (None, 0, 0, 0)
    plans = list(replay(tmp_path / "decisions.jsonl"))
    assert len(plans) > 5
    assert all(logged == planned for logged, planned in plans)


def test_the_next_turn_reuses_forced_tokens_and_retokenizes_none(smollm2: Model) -> None:
    script = ScriptedChoice(Vocabulary(smollm2.vocab), [SAID, "It is cold.", SAID])
    with Served(smollm2, make_settings(smollm2), choosers=script) as served:
        text = chat("What is the weather in Oslo?")
        first = asyncio.run(ask(served, text, run="a"))
        text = chat("What is the weather in Oslo?", first.text, "-3")
        second = asyncio.run(ask(served, text, None, run="a"))
        text = chat("What is the weather in Oslo?", first.text, "-3", second.text, "And the weather in Rome?")
        third = asyncio.run(ask(served, text, run="a"))
    assert second.prompt[: len(first.prompt) + len(first.tokens)].tolist() == [*first.prompt, *first.tokens]
    assert isinstance(first.end, Ended) and isinstance(second.end, Ended) and isinstance(third.end, Ended)
    unfed = len(first.prompt) + len(first.tokens) - second.end.row.cached_tokens
    assert 1 <= unfed <= 12  # the last chosen token and the closing braces and tag that were forced with it
    assert third.end.row.cached_tokens >= len(second.prompt)


def test_tokens_are_the_same_whether_forced_ones_are_fed_together_or_one_by_one(smollm2: Model) -> None:
    with Served(smollm2, make_settings(smollm2)) as served:
        together, one_by_one = (
            asyncio.run(ask(served, chat("What is the weather in Oslo?"), logprobs=logprobs)) for logprobs in (None, 1)
        )
    assert together.tokens == one_by_one.tokens
    assert isinstance(together.end, Ended) and isinstance(one_by_one.end, Ended)
    assert together.end.row.saved_passes > one_by_one.end.row.saved_passes == 0
    assert together.end.row.forced_tokens == one_by_one.end.row.forced_tokens


@pytest.mark.parametrize("alone", [True, False])
def test_a_forced_span_longer_than_a_slice_is_fed_in_parts(smollm2: Model, alone: bool) -> None:
    text = " ".join(f"word{number}" for number in range(150))
    constraint = Constraint(f'start: "{text}" /[a-z]/', "test")

    async def turns(served: Served) -> Answer:
        other = None if alone else asyncio.create_task(served.turn(some_tokens(20), length=60))
        answer = await ask(served, chat("Go on."), constraint, max_tokens=800)
        if other is not None:
            await other
        return answer

    with Served(smollm2, make_settings(smollm2)) as served:
        answer = asyncio.run(turns(served))
    assert answer.text[:-1].startswith(text[:-1])
    assert isinstance(answer.end, Ended)
    passes = answer.end.row.completion_tokens - answer.end.row.saved_passes
    assert 3 <= passes < 100


def test_windowed_memory_takes_forced_tokens(gemma: Model) -> None:
    script = ScriptedChoice(Vocabulary(gemma.vocab), [SAID, "Cold."])
    with Served(gemma, make_settings(gemma, slots=2), choosers=script) as served:
        text = "<start_of_turn>user\nweather?<end_of_turn>\n<start_of_turn>model\n"
        first = asyncio.run(ask(served, text, run="a"))
        text += f"{first.text}<end_of_turn>\n<start_of_turn>user\n-3<end_of_turn>\n<start_of_turn>model\n"
        second = asyncio.run(ask(served, text, None, run="a"))
    assert first.text == SAID
    assert second.text == "Cold."
    assert isinstance(first.end, Ended) and isinstance(second.end, Ended)
    assert first.end.row.saved_passes > 10
    assert second.prompt[: len(first.prompt) + len(first.tokens)].tolist() == [*first.prompt, *first.tokens]


def test_a_dead_end_fails_its_turn_and_no_other(smollm2: Model) -> None:
    dead = Constraint('start: ("a" | "b") x\nx: x "c"', "test")
    with Served(smollm2, make_settings(smollm2)) as served:

        async def turns() -> tuple[Answer, list[int]]:
            return await asyncio.gather(ask(served, chat("a?"), dead), served.turn(some_tokens(30), length=12))

        failed, others = asyncio.run(turns())
        assert len(served.serve(some_tokens(30), length=3)) == 3
    assert isinstance(failed.end, Failed)
    assert failed.end.status == 400
    assert "no token of the model can continue" in failed.end.message
    assert len(others) == 12


def test_a_grammar_that_nobody_checked_is_compiled_or_refused_when_its_turn_comes(smollm2: Model) -> None:
    with Served(smollm2, make_settings(smollm2)) as served:
        refused = asyncio.run(ask(served, chat("a?"), Constraint("start: nothing", "test")))
        said = asyncio.run(ask(served, chat("a?"), Constraint('start: "yes"', "test")))
    assert isinstance(refused.end, Failed)
    assert refused.end.status == 400
    assert said.text == "yes"


def test_a_shown_control_token_is_text_to_the_client_and_a_token_in_the_history(smollm2: Model) -> None:
    constraint = Constraint('start: "one" <file_sep> "two three" /[a-z]/', "test")
    answers = []
    with Served(smollm2, make_settings(smollm2)) as served:
        for shown in ((), ("<file_sep>",)):
            answer = asyncio.run(ask(served, chat(f"Say {len(shown)}."), constraint, show_control=shown))
            answers.append(answer)
        again = served.engine.tokenize(chat("Say 1.", answers[1].text, "go on"), salt="")
    hidden, shown_text = answers[0].text, answers[1].text
    assert hidden.startswith("onetwo three")
    assert shown_text == hidden.replace("onetwo", "one<file_sep>two")
    whole = [*answers[1].prompt, *answers[1].tokens]
    assert again[: len(whole)].tolist() == whole


def test_aborting_among_forced_tokens_keeps_what_was_computed(smollm2: Model) -> None:
    async def leave() -> None:
        request = make_request(some_tokens(60), "a", length=300)
        constrained = TurnRequest(
            salt="",
            tokens=request.tokens,
            text=None,
            max_tokens=300,
            hint=request.hint,
            constraint=Constraint('start: "' + "one two three four five " * 12 + '" /[a-z]{90}/', "test"),
        )
        stream = served.engine.generate(constrained)
        async for event in stream:
            if isinstance(event, Delta):
                break
        await stream.aclose()  # type: ignore[attr-defined]

    with Served(smollm2, make_settings(smollm2, slots=1)) as served:
        asyncio.run(leave())
        served.serve(np.append(some_tokens(60), np.int32(33)), "a", length=2)
    assert [row.finish_reason for row in served.rows] == ["aborted", "length"]
    assert served.rows[1].cached_tokens == 60
