"""The real server with the real model, seen through the real `openai` client."""

import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from tests.live import LiveServer, live_server, wait_for

MODEL = "smollm2-135m-instruct"
STORY = "A lighthouse keeper counts ships. " * 20


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as opened:
        yield opened


def user(text: str) -> ChatCompletionMessageParam:
    return {"role": "user", "content": text}


def ask(client: openai.OpenAI, messages: list[ChatCompletionMessageParam], **options: Any) -> ChatCompletion:
    options = {"temperature": 0, "max_tokens": 8} | options
    answer = client.chat.completions.create(model=MODEL, messages=messages, **options)
    assert isinstance(answer, ChatCompletion)
    return answer


def text_of(answer: ChatCompletion) -> str:
    text = answer.choices[0].message.content
    assert text is not None
    return text


def cached(answer: ChatCompletion) -> int:
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    tokens = answer.usage.prompt_tokens_details.cached_tokens
    assert tokens is not None
    return tokens


def run_of(http: httpx.Client, run: str) -> Any:
    response = http.get(f"/v1/runs/{run}")
    assert response.status_code == 200, response.text
    return response.json()


def test_the_served_model_is_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == 2048


def test_a_stream_says_what_a_whole_answer_says(client: openai.OpenAI) -> None:
    messages = [user("Name three colours.")]
    whole = ask(client, messages)
    parts, usage = [], None
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=messages,
        temperature=0,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    ):
        parts += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(parts) == text_of(whole)
    assert usage is not None
    assert whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_an_agent_that_names_nothing_continues_one_run_and_hits_all_its_history(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    messages = [user(f"What does the keeper do? {STORY}")]
    runs, prompts = [], []
    for question in ("And then?", "Why?", "Is that all?"):
        answer = client.chat.completions.with_raw_response.create(model=MODEL, messages=messages, max_tokens=12, seed=3)
        runs.append(answer.headers["x-trunkline-run"])
        parsed = answer.parse()
        assert parsed.usage is not None
        prompts.append(parsed.usage.prompt_tokens)
        messages += [{"role": "assistant", "content": text_of(parsed)}, user(question)]
    assert len(set(runs)) == 1
    view = run_of(http, runs[0])
    first, second, third = view["turns"]
    assert (view["state"], view["origin"]) == ("waiting", "inferred")
    assert first["cached_tokens"] < 40  # at most the template's own opening, which other chats share
    for earlier, later in ((first, second), (second, third)):
        # All of the earlier prompt and answer is reused, but for the answer's last token, which was never computed.
        assert later["cached_tokens"] >= earlier["prompt_tokens"] + earlier["completion_tokens"] - 1
        assert later["tool_gap_ms"] > 0
        assert sum(miss["tokens"] for miss in later["misses"]) == later["novel_tokens"]


def test_a_named_run_takes_the_turns_that_name_it(client: openai.OpenAI, http: httpx.Client) -> None:
    for index in range(2):
        answer = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=[user("One word.")], max_tokens=2, extra_headers={"X-Trunkline-Run": "named run"}
        )
        assert answer.headers["x-trunkline-run"] == "named run"
        assert answer.headers["x-trunkline-turn"] == str(index)
    assert [turn["index"] for turn in run_of(http, "named run")["turns"]] == [0, 1]


def test_a_seed_reproduces_and_another_does_not(client: openai.OpenAI) -> None:
    def sampled(seed: int) -> str:
        return text_of(ask(client, [user("Invent a word.")], temperature=1.5, seed=seed, max_tokens=16))

    assert sampled(7) == sampled(7)
    assert len({sampled(seed) for seed in range(4)}) > 1


def test_choices_are_branches_that_share_the_prompt(client: openai.OpenAI, http: httpx.Client) -> None:
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=[user(f"Fork here. {STORY}")], n=3, max_tokens=4, temperature=1, seed=1
    )
    parsed = answer.parse()
    assert [choice.index for choice in parsed.choices] == [0, 1, 2]
    assert parsed.usage is not None
    parent = run_of(http, answer.headers["x-trunkline-run"])
    assert len(parent["children"]) == 2
    for child in parent["children"]:
        view = run_of(http, child)
        assert (view["parent"], view["state"]) == (parent["id"], "finished")
        assert view["turns"][0]["cached_tokens"] == parsed.usage.prompt_tokens - 1


def test_a_greedy_token_is_the_likeliest_of_its_alternatives(client: openai.OpenAI) -> None:
    answer = ask(client, [user("Count to five.")], logprobs=True, top_logprobs=4)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 8
    for entry in logprobs.content:
        assert entry.top_logprobs[0].token == entry.token
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
    assert "".join(entry.token for entry in logprobs.content) == text_of(answer)


def test_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    prompt = "The capital of France is Paris"
    answer = client.completions.create(model=MODEL, prompt=prompt, echo=True, logprobs=2, max_tokens=1, temperature=0)
    (choice,) = answer.choices
    assert choice.text.startswith(prompt)
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    logprobs: list[float | None] = list(choice.logprobs.token_logprobs)
    assert logprobs[0] is None
    assert all(logprob is not None and logprob <= 0 for logprob in logprobs[1:])


def test_token_ids_and_their_text_complete_alike(client: openai.OpenAI, http: httpx.Client) -> None:
    prompt = "Once upon a time there was"
    tokens = http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == prompt
    texts = [
        client.completions.create(model=MODEL, prompt=given, max_tokens=6, temperature=0).choices[0].text
        for given in (prompt, tokens)
    ]
    assert texts[0] == texts[1]


def test_a_stop_string_ends_the_answer_and_is_left_out(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
    full = client.completions.create(model=MODEL, prompt="1, 2, 3, 4,", **options).choices[0].text
    stop = full[4:7]
    cut = client.completions.create(model=MODEL, prompt="1, 2, 3, 4,", stop=stop, **options).choices[0]
    assert cut.text == full[: full.index(stop)]
    assert cut.finish_reason == "stop"


def test_ignore_eos_generates_all_tokens_asked_for(client: openai.OpenAI) -> None:
    answer = ask(client, [user("Say hi.")], max_tokens=40, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (40, "length")


def test_errors_arrive_as_openais_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as overflow:
        ask(client, [user("word " * 3000)])
    assert overflow.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match=MODEL):
        client.chat.completions.create(model="other", messages=[user("x")])
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ask(client, [user("x")], temperature=-1)


def test_a_client_that_leaves_frees_its_place_and_leaves_a_record(client: openai.OpenAI, http: httpx.Client) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[user("Write a long story.")],
        max_tokens=1500,
        stream=True,
        extra_headers={"X-Trunkline-Run": "left"},
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    assert run_of(http, "left")["state"] == "active"
    stream.close()
    wait_for(lambda: bool(run_of(http, "left")["turns"]))
    (turn,) = run_of(http, "left")["turns"]
    assert turn["finish_reason"] == "aborted"
    assert 0 < turn["completion_tokens"] < 1500


def test_no_turn_is_left_running_when_its_client_has_left(client: openai.OpenAI, http: httpx.Client) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[user("Write a long story.")],
        max_tokens=1500,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    wait_for(lambda: "trunkline_running 1.0" in http.get("/metrics").text)
    stream.close()
    wait_for(lambda: "trunkline_running 0.0" in http.get("/metrics").text)


def test_resetting_the_cache_makes_the_next_turn_miss_for_that_reason(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    messages = [user(f"Reset. {STORY}")]
    ask(client, messages)
    assert cached(ask(client, messages)) > 0
    http.post("/reset_prefix_cache")
    answer = client.chat.completions.with_raw_response.create(model=MODEL, messages=messages, max_tokens=2)
    turn = run_of(http, answer.headers["x-trunkline-run"])["turns"][-1]
    assert turn["cached_tokens"] < 10
    assert "cache_reset" in {miss["reason"] for miss in turn["misses"]}


def test_many_forks_of_prompts_that_overlap_are_all_served(server: LiveServer) -> None:
    """Prompts over two tokens end and part at every place a tree can be cut."""

    def work(seed: int) -> list[int]:
        draw = random.Random(seed)
        statuses = []
        with httpx.Client(base_url=server.url, timeout=120) as http:
            for _ in range(25):
                body = {
                    "prompt": [draw.choice((40, 41)) for _ in range(draw.randint(1, 12))],
                    "n": draw.choice((1, 2, 3)),
                    "max_tokens": draw.randint(1, 4),
                    "ignore_eos": True,
                }
                statuses.append(http.post("/v1/completions", json=body).status_code)
        return statuses

    with ThreadPoolExecutor(3) as pool:
        statuses = [status for seed in pool.map(work, range(3)) for status in seed]
    assert statuses == [200] * 75


@pytest.mark.parametrize("headers", [{}, {"X-Correlation-ID": "replayed"}])
def test_a_replay_that_never_sends_answers_back_is_one_run(
    client: openai.OpenAI, http: httpx.Client, headers: dict[str, str]
) -> None:
    messages, runs = [user(f"{STORY} Told with {len(headers)} headers.")], set()
    for step in range(3):
        answer = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=messages, max_tokens=30, extra_body={"ignore_eos": True}, extra_headers=headers
        )
        runs.add(answer.headers["x-trunkline-run"])
        messages.append(user(f"The log of night {step}: calm, three ships, no fog."))
    (run,) = runs
    assert [turn["relation"] for turn in run_of(http, run)["turns"]] == ["new", "continues", "continues"]


def test_nothing_that_was_promised_was_broken(client: openai.OpenAI, http: httpx.Client) -> None:
    ask(client, [user("Last words?")])
    assert "trunkline_broken_promises_total 0.0" in http.get("/metrics").text


def test_keys_do_not_hit_each_others_prefixes(tmp_path: Path) -> None:
    messages = [user(STORY)]
    with live_server(tmp_path, "--ctx", "1024", "--api-key", "sk-a", "--api-key", "sk-b") as server:
        hits = []
        for key in ("sk-a", "sk-b", "sk-a"):
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
                hits.append(cached(ask(client, messages, max_tokens=2)))
        assert hits[0] == hits[1] == 0
        assert hits[2] > 100


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_runs_survive_a_stop_and_a_kill(tmp_path: Path, how: signal.Signals) -> None:
    def turn(server: LiveServer) -> str:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.with_raw_response.create(
                model=MODEL, messages=[user("hi")], max_tokens=2, extra_headers={"X-Trunkline-Run": "r"}
            )
            return str(answer.headers["x-trunkline-turn"])

    with live_server(tmp_path, "--ctx", "512") as server:
        assert turn(server) == "0"
        server.process.send_signal(how)
        server.process.wait()
    with live_server(tmp_path, "--ctx", "512") as server:
        assert turn(server) == "1"
        view = httpx.get(f"{server.url}/v1/runs/r").json()
        assert [recorded["index"] for recorded in view["turns"]] == [0, 1]
