"""`/v1/chat/completions`: what reaches the executor, and what comes back whole and in chunks."""

import json
from typing import Any

import pytest

from tests.gateway.conftest import Served
from tests.gateway.scripted import CONTEXT, ScriptedExecutor, end, say_reply
from trunkline.core.types import EndReason
from trunkline.wire.turns import Accepted, Delta, Ended, Placed, Sampling, TokenLogprob, TurnRequest


def events(gateway: Served, path: str, body: dict[str, Any], **options: Any) -> list[Any]:
    """The events of a stream; the last must be `[DONE]`, which is left out."""
    response = gateway.post(path, body | {"stream": True}, **options)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def chat_events(gateway: Served, content: str = "hi", **fields: Any) -> list[Any]:
    body = {"messages": [{"role": "user", "content": content}], **fields}
    return events(gateway, "/v1/chat/completions", body)


def test_an_answer_has_text_usage_and_the_run_it_belongs_to(gateway: Served) -> None:
    response = gateway.chat("hi", headers={"X-Trunkline-Run": "my run"})
    assert response.status_code == 200
    assert response.headers["x-trunkline-run"] == "my run"
    assert response.headers["x-trunkline-turn"] == "0"
    body = response.json()
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello"}
    assert choice["finish_reason"] == "stop"
    prompt = len("<user>hi<assistant>")
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 5,
        "total_tokens": prompt + 5,
        "prompt_tokens_details": {"cached_tokens": prompt // 2},
    }


def test_the_turn_number_counts_up_within_a_run(gateway: Served) -> None:
    turns = [gateway.chat(headers={"X-Session-ID": "s"}).headers["x-trunkline-turn"] for _ in range(3)]
    assert turns == ["0", "1", "2"]


def test_a_stream_opens_with_the_role_and_closes_with_the_reason_and_the_usage(gateway: Served) -> None:
    chunks = chat_events(gateway, stream_options={"include_usage": True})
    *spoken, closing, usage = chunks
    deltas = [chunk["choices"][0]["delta"] for chunk in spoken]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas) == "hello"
    assert closing["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 9}
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_stream_without_stream_options_has_no_usage(gateway: Served) -> None:
    assert all("usage" not in chunk for chunk in chat_events(gateway))


def test_continuous_usage_counts_up_in_every_chunk(gateway: Served) -> None:
    chunks = chat_events(gateway, stream_options={"include_usage": True, "continuous_usage_stats": True})
    usages = [chunk["usage"] for chunk in chunks]
    assert [usage["completion_tokens"] for usage in usages] == [1, 1, 2, 3, 4, 5, 5, 5]
    assert all(usage["prompt_tokens_details"]["cached_tokens"] == 9 for usage in usages)


def test_text_that_waits_for_whole_characters_makes_no_chunk(gateway: Served) -> None:
    async def say_half_characters(executor: ScriptedExecutor, request: TurnRequest, accepted: Accepted) -> Any:
        yield accepted
        yield Placed(0)
        yield Delta((195,), "")
        yield Delta((169,), "é")
        yield end(request, accepted, spoken=2)

    gateway.executor.script = say_half_characters
    contents = [chunk["choices"][0]["delta"].get("content") for chunk in chat_events(gateway)]
    assert contents == ["", "é", None]


def test_an_answer_without_text_still_has_a_role_and_a_reason(gateway: Served) -> None:
    gateway.executor.reply = ""
    opening, closing = (chunk["choices"][0] for chunk in chat_events(gateway))
    assert opening["delta"]["role"] == "assistant"
    assert closing["finish_reason"] == "stop"
    assert gateway.chat().json()["choices"][0]["message"]["content"] == ""


def test_logprobs_name_tokens_bytes_and_alternatives(gateway: Served) -> None:
    gateway.executor.reply = "h"
    (entry,) = gateway.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert entry == {
        "token": "h",
        "logprob": -0.5,
        "bytes": [104],
        "top_logprobs": [
            {"token": "h", "logprob": -0.5, "bytes": [104]},
            {"token": "i", "logprob": -1.5, "bytes": [105]},
        ],
    }
    chunks = chat_events(gateway, logprobs=True, top_logprobs=2)
    assert chunks[1]["choices"][0]["logprobs"]["content"] == [entry]


def test_logprobs_of_half_a_character_have_no_bytes_and_infinity_is_finite(gateway: Served) -> None:
    async def say_half_a_character(executor: ScriptedExecutor, request: TurnRequest, accepted: Accepted) -> Any:
        yield accepted
        yield Delta((195,), "", (TokenLogprob(195, float("-inf"), ()),))
        yield end(request, accepted, spoken=1)

    gateway.executor.script = say_half_a_character
    (entry,) = gateway.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert entry["bytes"] is None
    assert entry["logprob"] == -9999.0


def test_every_sampling_parameter_reaches_the_executor(gateway: Served) -> None:
    gateway.chat(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias={"7": 5, "3": -100},
        seed=-1,
        ignore_eos=True,
        stop=["END", "\n\n"],
        stop_token_ids=[9, 10],
        max_tokens=7,
        logprobs=True,
        top_logprobs=3,
    )
    (request,) = gateway.executor.requests
    assert request.sampling == Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias=((3, -100.0), (7, 5.0)),
        seed=2**64 - 1,
        ignore_eos=True,
    )
    assert (request.stop, request.stop_tokens) == (("END", "\n\n"), (9, 10))
    assert (request.max_tokens, request.logprobs, request.prompt_logprobs) == (7, 3, False)


def test_nothing_given_means_openais_defaults_and_the_rest_of_the_context(gateway: Served) -> None:
    gateway.chat("hi", temperature=None, top_k=-1)
    (request,) = gateway.executor.requests
    assert request.sampling == Sampling()
    assert (request.stop, request.stop_tokens, request.logprobs) == ((), (), None)
    assert request.max_tokens == CONTEXT - len("<user>hi<assistant>")


@pytest.mark.parametrize("names", [["max_tokens"], ["max_completion_tokens"], ["max_tokens", "max_completion_tokens"]])
def test_both_names_of_the_token_limit_work(gateway: Served, names: list[str]) -> None:
    fields: dict[str, Any] = dict.fromkeys(names, 3)
    choice = gateway.chat(**fields).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("hel", "length")


def test_a_prompt_and_completion_that_fill_the_context_exactly_are_served(gateway: Served) -> None:
    room = CONTEXT - len("<user><assistant>")
    assert gateway.chat("x" * (room - 3), max_tokens=3).status_code == 200
    assert gateway.chat("x" * (room - 1)).json()["usage"]["completion_tokens"] == 1


def test_n_choices_are_branches_of_the_run_with_seeds_of_their_own(gateway: Served) -> None:
    body = gateway.chat(n=3, seed=5, headers={"X-Trunkline-Run": "r"}).json()
    first, *branches = gateway.executor.requests
    assert (first.hint.run, first.hint.final, first.sampling.seed) == ("r", False, 5)
    assert [(b.hint.run, b.hint.parent, b.hint.final, b.sampling.seed) for b in branches] == [
        (None, "r", True, 6),
        (None, "r", True, 7),
    ]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    prompt = len("<user>hi<assistant>")
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (prompt, 15)


def test_n_choices_stream_side_by_side(gateway: Served) -> None:
    texts = {0: "", 1: "", 2: ""}
    finished = []
    for chunk in chat_events(gateway, n=3):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        if choice["finish_reason"]:
            finished.append(choice["index"])
    assert texts == {0: "hello", 1: "hello", 2: "hello"}
    assert sorted(finished) == [0, 1, 2]


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def test_text_parts_are_joined_and_tools_are_rendered(gateway: Served) -> None:
    gateway.post(
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "42", "tool_call_id": "1"},
            ],
            "tools": [{"type": "function", "function": {"name": "add"}}],
            "tool_choice": "auto",
            "response_format": {"type": "text"},
        },
    )
    assert gateway.executor.requests[0].text == "<tool add><developer>be brief<user>a\nb<assistant><tool>42<assistant>"


def test_a_stop_reason_says_which_stop_ended_the_turn(gateway: Served) -> None:
    async def stop_at_end(executor: ScriptedExecutor, request: TurnRequest, accepted: Accepted) -> Any:
        async for event in say_reply(executor, request, accepted):
            yield Ended(EndReason.STOP, event.row, stopped_by="END") if isinstance(event, Ended) else event

    gateway.executor.script = stop_at_end
    assert gateway.chat().json()["choices"][0]["stop_reason"] == "END"
    assert chat_events(gateway)[-1]["choices"][0]["stop_reason"] == "END"


def test_unknown_fields_are_accepted_and_logged_once(gateway: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trunkline.gateway")
    for _ in range(3):
        assert gateway.chat(service_tier="flex", store=False).status_code == 200
    assert [record.message.count("service_tier") for record in caplog.records if "service_tier" in record.message] == [
        1
    ]


def test_a_body_larger_than_the_inline_limit_is_served_alike(gateway: Served) -> None:
    text = "é" * 20
    padded = {"messages": [{"role": "user", "content": text}], "padding": "x" * 100_000}
    assert gateway.post("/v1/chat/completions", padded).status_code == 200
    assert gateway.executor.requests[0].text == f"<user>{text}<assistant>"
