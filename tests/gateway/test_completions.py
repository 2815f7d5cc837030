"""`/v1/completions`: prompts of every kind, echo, logprobs, batches and forks."""

from typing import Any

import pytest

from tests.gateway.conftest import Served
from tests.gateway.scripted import BOS
from tests.gateway.test_chat import events


def complete(gateway: Served, prompt: Any, **fields: Any) -> Any:
    response = gateway.post("/v1/completions", {"model": "scripted", "prompt": prompt, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_a_text_prompt_is_completed(gateway: Served) -> None:
    body = complete(gateway, "ab")
    assert (body["object"], body["choices"][0]["text"]) == ("text_completion", "hello")
    assert gateway.executor.requests[0].tokens.tolist() == [BOS, 97, 98]
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_special_tokens_can_be_left_out(gateway: Served) -> None:
    complete(gateway, "ab", add_special_tokens=False)
    assert gateway.executor.requests[0].tokens.tolist() == [97, 98]


def test_a_token_prompt_reaches_the_executor_as_it_is(gateway: Served) -> None:
    complete(gateway, [5, 6, 7])
    (request,) = gateway.executor.requests
    assert (request.tokens.tolist(), request.text) == ([5, 6, 7], None)


@pytest.mark.parametrize("prompts", [["ab", "cd"], [[97, 98], [99, 100]]])
def test_a_batch_gives_n_choices_a_prompt_in_order(gateway: Served, prompts: list[Any]) -> None:
    body = complete(gateway, prompts, n=2, echo=True, add_special_tokens=False)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == ["abhello", "abhello", "cdhello", "cdhello"]
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] == 20
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_only_the_first_prompt_of_a_batch_continues_the_named_run(gateway: Served) -> None:
    gateway.post("/v1/completions", {"prompt": ["a", "b"], "n": 2}, headers={"X-Trunkline-Run": "r"})
    hints = [(request.hint.run, request.hint.parent) for request in gateway.executor.requests]
    assert hints == [("r", None), (None, "r"), (None, "r"), (None, "inferred-1")]


def test_the_default_limit_is_16_tokens(gateway: Served) -> None:
    gateway.executor.reply = "x" * 100
    (choice,) = complete(gateway, "a")["choices"]
    assert (len(choice["text"]), choice["finish_reason"]) == (16, "length")


def test_echo_with_logprobs_covers_prompt_and_completion(gateway: Served) -> None:
    (choice,) = complete(gateway, "ab", echo=True, logprobs=1, max_tokens=1)["choices"]
    assert choice["text"] == "abh"
    assert choice["logprobs"] == {
        "tokens": ["<bos>", "a", "b", "h"],
        "token_logprobs": [None, -0.5, -0.5, -0.5],
        "top_logprobs": [None, {"a": -0.5}, {"b": -0.5}, {"h": -0.5}],
        "text_offset": [0, 5, 6, 7],
    }


def test_logprobs_without_echo_cover_the_completion_only(gateway: Served) -> None:
    (choice,) = complete(gateway, "ab", logprobs=2, max_tokens=2)["choices"]
    assert choice["logprobs"]["tokens"] == ["h", "e"]
    assert choice["logprobs"]["top_logprobs"] == [{"h": -0.5, "i": -1.5}, {"e": -0.5, "f": -1.5}]
    assert choice["logprobs"]["text_offset"] == [0, 1]
    assert gateway.executor.requests[0].prompt_logprobs is False


def test_zero_logprobs_still_report_the_chosen_token(gateway: Served) -> None:
    (choice,) = complete(gateway, "ab", logprobs=0, max_tokens=1)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"h": -0.5}]


def test_echo_of_token_ids_is_their_text(gateway: Served) -> None:
    assert complete(gateway, [97, 98], echo=True)["choices"][0]["text"] == "abhello"


def test_a_stream_echoes_first_and_ends_with_reason_and_usage(gateway: Served) -> None:
    body = {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 2, "stream_options": {"include_usage": True}}
    echo, first, second, closing, usage = events(gateway, "/v1/completions", body)
    assert [chunk["choices"][0]["text"] for chunk in (echo, first, second, closing)] == ["ab", "h", "e", ""]
    assert echo["choices"][0]["logprobs"]["tokens"] == ["<bos>", "a", "b"]
    assert second["choices"][0]["logprobs"]["text_offset"] == [8]
    assert closing["choices"][0]["finish_reason"] == "length"
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 5)


def test_best_of_equal_to_n_is_no_more_than_n(gateway: Served) -> None:
    assert len(complete(gateway, "a", n=2, best_of=2)["choices"]) == 2
