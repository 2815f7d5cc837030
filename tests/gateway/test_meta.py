"""Models, tokenizer, health, metrics, cache reset."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.conftest import Served
from tests.gateway.scripted import BOS, CONTEXT, make_row
from tests.gateway.test_errors import error_of
from trunkline.core.types import EndReason, MissReason
from trunkline.gateway.metrics import Metrics


def test_the_model_is_listed_with_its_context(gateway: Served) -> None:
    listing = gateway.client.get("/v1/models").json()
    (card,) = listing["data"]
    assert listing["object"] == "list"
    assert (card["id"], card["object"], card["max_model_len"]) == ("scripted", "model", CONTEXT)
    assert gateway.client.get("/v1/models/scripted").json() == card
    assert error_of(gateway.client.get("/v1/models/org/other"), 404)["code"] == "model_not_found"


def test_text_and_messages_are_tokenized_as_generation_would(gateway: Served) -> None:
    body = gateway.post("/tokenize", {"model": "scripted", "prompt": "ab", "return_token_strs": True}).json()
    assert body == {"count": 3, "max_model_len": CONTEXT, "tokens": [BOS, 97, 98], "token_strs": ["<bos>", "a", "b"]}
    assert gateway.post("/tokenize", {"prompt": "ab", "add_special_tokens": False}).json()["tokens"] == [97, 98]
    messages = [{"role": "user", "content": "hi"}]
    tokens = gateway.post("/tokenize", {"messages": messages}).json()["tokens"]
    gateway.post("/v1/chat/completions", {"messages": messages})
    assert gateway.executor.requests[0].tokens.tolist() == tokens
    shorter = gateway.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()
    assert shorter["count"] == len(tokens) - len("<assistant>")


def test_tokens_are_detokenized(gateway: Served) -> None:
    assert gateway.post("/detokenize", {"tokens": [BOS, 97, 98]}).json() == {"prompt": "<bos>ab"}
    assert gateway.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_health_and_metrics_answer_get_and_head(gateway: Served, path: str) -> None:
    assert gateway.client.get(path).status_code == 200
    head = gateway.client.head(path)
    assert (head.status_code, head.content) == (200, b"")


def test_resetting_the_cache_reaches_the_executor(gateway: Served) -> None:
    assert gateway.client.post("/reset_prefix_cache").status_code == 200
    assert gateway.executor.resets == 1


def samples(gateway: Served) -> dict[tuple[str, ...], float]:
    """Every metric: (name, label values in the order of their names) to value."""
    text = gateway.client.get("/metrics").text
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counters_exist_from_zero(gateway: Served) -> None:
    seen = samples(gateway)
    for name in (
        "trunkline_broken_promises_total",
        "trunkline_deaths_total",
        "trunkline_prompt_tokens_total",
        "trunkline_cached_tokens_total",
        "trunkline_novel_tokens_total",
        "trunkline_reusable_tokens_total",
        "trunkline_completion_tokens_total",
        "trunkline_queue_seconds_count",
        "trunkline_tool_gap_seconds_count",
        "gen_ai_server_time_to_first_token_seconds_count",
    ):
        assert seen[(name,)] == 0
    for reason in EndReason:
        assert seen["trunkline_turns_total", reason] == 0
    for miss in MissReason:
        assert seen["trunkline_miss_tokens_total", miss] == 0
    for kind in ("short", "long"):
        assert seen["trunkline_step_latency_seconds_count", kind] == 0


def test_a_turn_is_counted_by_the_end_of_its_response(gateway: Served) -> None:
    gateway.chat("hi")
    seen = samples(gateway)
    prompt = len("<user>hi<assistant>")
    assert seen["trunkline_turns_total", "stop"] == 1
    assert seen[("trunkline_prompt_tokens_total",)] == prompt
    assert seen[("trunkline_cached_tokens_total",)] == prompt // 2
    assert seen[("trunkline_completion_tokens_total",)] == 5
    assert seen["trunkline_miss_tokens_total", "never_seen"] == prompt - prompt // 2
    assert seen["trunkline_step_latency_seconds_count", "short"] == 1
    assert seen["trunkline_http_requests_total", "POST", "/v1/chat/completions", "200"] == 1


def test_long_steps_are_counted_apart(gateway: Served) -> None:
    gateway.executor.reply = "x" * 65
    gateway.chat("hi")
    assert samples(gateway)["trunkline_step_latency_seconds_count", "long"] == 1


def test_engine_values_are_exported_under_our_names_and_vllms(gateway: Served) -> None:
    gateway.chat("hi")
    gateway.executor.engine_gauges = {
        "running": 3,
        "waiting": 2,
        "kv_used_fraction": 0.25,
        "kv_capacity_tokens": 4096,
        "deaths_total": 7,
        "something_new": 1.5,
    }
    seen = samples(gateway)
    assert seen[("trunkline_running",)] == 3
    assert seen[("trunkline_something_new",)] == 1.5
    assert seen[("trunkline_deaths_total",)] == 7
    prompt = len("<user>hi<assistant>")
    expected = {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 2,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prefix_cache_queries_total": prompt,
        "vllm:prefix_cache_hits_total": prompt // 2,
        "vllm:prompt_tokens_total": prompt,
        "vllm:generation_tokens_total": 5,
        "vllm:num_preemptions_total": 0,
    }
    assert {name: seen[name, "0", "scripted"] for name in expected} == expected
    assert seen["vllm:cache_config_info", "1", "0", "4096"] == 1


def test_what_a_grammar_forced_and_saved_is_counted_by_kind(gateway: Served) -> None:
    metrics = Metrics(gateway.executor)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    assert value("trunkline_constrained_tokens_total", kind="tool_call", how="forced") == 0
    row = make_row(constraint="tool_call", completion_tokens=20, forced_tokens=15, saved_passes=14, mask_ms=1.0)
    metrics.turn_ended(row)
    metrics.turn_ended(make_row(completion_tokens=20))
    assert value("trunkline_constrained_tokens_total", kind="tool_call", how="forced") == 15
    assert value("trunkline_constrained_tokens_total", kind="tool_call", how="sampled") == 5
    assert value("trunkline_saved_passes_total", kind="tool_call") == 14
    assert value("trunkline_mask_seconds_sum") == pytest.approx(0.0002)
    assert value("trunkline_mask_seconds_count") == 1


def test_unknown_paths_do_not_make_labels(gateway: Served) -> None:
    gateway.client.get("/some/random/path")
    gateway.client.request("BREW", "/health")
    seen = samples(gateway)
    assert seen["trunkline_http_requests_total", "GET", "unknown", "404"] == 1
    assert seen["trunkline_http_requests_total", "other", "/health", "405"] == 1
