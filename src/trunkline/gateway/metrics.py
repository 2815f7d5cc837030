"""Prometheus metrics: ours (`trunkline_*`), OpenTelemetry's GenAI names, and the vLLM names that harnesses scrape.

Per-turn figures come from run records, so they count every turn that ended, disconnected clients included. What only
the executor knows comes from its `gauges()`: a key K is exported as `trunkline_K`, a counter if K ends in `_total`.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_1_0_0

from trunkline.core.types import EndReason, MissReason, RefusalReason
from trunkline.gateway.executor import Executor
from trunkline.wire.noise import Normalizer
from trunkline.wire.records import TurnRow

SHORT_STEP_TOKENS = 64
"""A turn that generates at most this many tokens is a short step."""

LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
TOKEN_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
CONSTRAINT_KINDS = ("tool_call", "json_schema", "json_object")
"""Kinds of constrained steps whose counters exist from 0."""

MASK_S = (0.00002, 0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1)
GAP_S = (0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)

ENGINE_COUNTERS = {
    "broken_promises_total": "Tokens promised as hits that had to be prefilled after all.",
    "deaths_total": "Death notices: prefixes that can no longer be reused.",
    "runs_admitted_total": "New runs that were let in.",
    "runs_queued_total": "New runs that had to wait before they were let in.",
    "runs_queued_ms_total": "Milliseconds that new runs waited to be let in.",
    **{f"runs_refused_{reason}_total": f"New runs that were refused: {reason}." for reason in RefusalReason},
    "runs_ended_total": "Runs that ended, whose predictions are compared below.",
    "predicted_turns_total": "Turns that ended runs were predicted to take when they were let in.",
    "actual_turns_total": "Turns that they took.",
    "predicted_peak_tokens_total": "Tokens of context that ended runs were predicted to reach.",
    "actual_peak_tokens_total": "Tokens of context that they reached.",
}
"""Engine counters that exist from 0, whatever the executor reports."""

ENGINE_GAUGES = ("running", "waiting", "kv_used_fraction", "runs_open", "runs_waiting")
"""Engine gauges that exist from 0."""

CONTENT_TYPE = CONTENT_TYPE_PLAIN_1_0_0


class Metrics:
    """All metrics of one gateway, in a registry of its own."""

    def __init__(self, executor: Executor) -> None:
        registry = self.registry = CollectorRegistry()
        self.turns = Counter("trunkline_turns", "Turns that ended.", ["finish_reason"], registry=registry)
        for reason in EndReason:
            self.turns.labels(reason)
        self.tokens = {
            kind: Counter(f"trunkline_{kind}_tokens", help_, registry=registry)
            for kind, help_ in {
                "prompt": "Prompt tokens of ended turns: cached plus novel.",
                "cached": "Prompt tokens served from a live prefix.",
                "novel": "Prompt tokens that had to be prefilled.",
                "reusable": "Prompt tokens that had arrived earlier under the same key.",
                "completion": "Tokens generated.",
            }.items()
        }
        self.misses = Counter("trunkline_miss_tokens", "Novel tokens by why they were.", ["reason"], registry=registry)
        for miss in MissReason:
            self.misses.labels(miss)
        self.normalized = Counter(
            "trunkline_normalized", "Pieces of prompts that a normalizer replaced.", ["normalizer"], registry=registry
        )
        for normalizer in Normalizer:
            self.normalized.labels(normalizer)
        self.cost = Counter("trunkline_cost_usd", "Money paid to other nodes.", registry=registry)
        self.step_latency = Histogram(
            "trunkline_step_latency_seconds",
            f"Arrival to last token of a turn; short: at most {SHORT_STEP_TOKENS} tokens.",
            ["kind"],
            buckets=LATENCY_S,
            registry=registry,
        )
        for kind in ("short", "long"):
            self.step_latency.labels(kind)
        self.queue = Histogram(
            "trunkline_queue_seconds", "Arrival to placement of a turn.", buckets=LATENCY_S, registry=registry
        )
        self.tool_gap = Histogram(
            "trunkline_tool_gap_seconds", "A turn's end to the next's arrival.", buckets=GAP_S, registry=registry
        )
        self.ttft = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Arrival to first token of a turn.",
            buckets=LATENCY_S,
            registry=registry,
        )
        self.time_per_token = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time between a turn's tokens after the first.",
            buckets=TOKEN_S,
            registry=registry,
        )
        self.http_requests = Counter(
            "trunkline_http_requests",
            "HTTP requests answered (status 499: the client left first).",
            ["route", "method", "status"],
            registry=registry,
        )
        self.http_in_flight = Gauge("trunkline_http_generations", "Generation requests in flight.", registry=registry)
        self.records_lost = Gauge("trunkline_records_lost", "Turns whose record was not written.", registry=registry)
        self._add_constrained(registry)
        registry.register(_Engine(executor, self))

    def _add_constrained(self, registry: CollectorRegistry) -> None:
        self.constrained = Counter(
            "trunkline_constrained_tokens",
            "Tokens of turns under a grammar, by the kind of step and by whether the grammar forced or allowed them.",
            ["kind", "how"],
            registry=registry,
        )
        self.saved_passes = Counter(
            "trunkline_saved_passes",
            "Model passes that turns took fewer than tokens, since a grammar forced some.",
            ["kind"],
            registry=registry,
        )
        self.mask = Histogram(
            "trunkline_mask_seconds",
            "Mean time that a turn's grammar took for each token that was chosen under it.",
            buckets=MASK_S,
            registry=registry,
        )
        for kind in CONSTRAINT_KINDS:
            self.saved_passes.labels(kind)
            for how in ("forced", "sampled"):
                self.constrained.labels(kind, how)

    def turn_ended(self, row: TurnRow) -> None:
        """Count one turn. Thread-safe."""
        self.turns.labels(row.finish_reason).inc()
        self.tokens["prompt"].inc(row.prompt_tokens)
        self.tokens["cached"].inc(row.cached_tokens)
        self.tokens["novel"].inc(row.novel_tokens)
        self.tokens["reusable"].inc(row.reusable_tokens)
        self.tokens["completion"].inc(row.completion_tokens)
        self.cost.inc(row.cost_usd)
        for miss in row.misses:
            self.misses.labels(miss.reason).inc(miss.tokens)
        for normalizer, count in row.normalized.items():
            self.normalized.labels(normalizer).inc(count)
        kind = "short" if row.completion_tokens <= SHORT_STEP_TOKENS else "long"
        self.step_latency.labels(kind).observe(row.latency_ms / 1000)
        self.queue.observe(row.queue_ms / 1000)
        if row.completion_tokens > 0:
            self.ttft.observe((row.queue_ms + row.prefill_ms) / 1000)
        if row.completion_tokens > 1:
            self.time_per_token.observe(row.decode_ms / 1000 / (row.completion_tokens - 1))
        if row.constraint is not None:
            self._count_constrained(row, row.constraint)
        if row.tool_gap_ms is not None:
            self.tool_gap.observe(row.tool_gap_ms / 1000)

    def _count_constrained(self, row: TurnRow, kind: str) -> None:
        chosen = row.completion_tokens - row.forced_tokens
        self.constrained.labels(kind, "forced").inc(row.forced_tokens)
        self.constrained.labels(kind, "sampled").inc(chosen)
        self.saved_passes.labels(kind).inc(row.saved_passes)
        self.mask.observe(row.mask_ms / 1000 / max(1, chosen))

    def render(self, records_lost: int) -> bytes:
        """The text that `/metrics` returns."""
        self.records_lost.set(records_lost)
        return generate_latest(self.registry)


def _counter_value(counter: Counter) -> float:
    return next(
        sample.value for metric in counter.collect() for sample in metric.samples if sample.name.endswith("_total")
    )


class _Engine:
    """Collects the executor's values, under our names and vLLM's."""

    def __init__(self, executor: Executor, metrics: Metrics) -> None:
        self._executor = executor
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        values = dict.fromkeys((*ENGINE_COUNTERS, *ENGINE_GAUGES), 0.0) | dict(self._executor.gauges())
        for key, value in sorted(values.items()):
            name = f"trunkline_{key}"
            if key.endswith("_total"):
                yield CounterMetricFamily(name, ENGINE_COUNTERS.get(key, "Reported by the engine."), value=value)
            else:
                yield GaugeMetricFamily(name, "Reported by the engine.", value=value)
        yield from self._as_vllm(values)

    def _as_vllm(self, values: dict[str, float]) -> Iterable[Metric]:
        model = {"model_name": self._executor.model.id, "engine": "0"}
        tokens = {kind: _counter_value(counter) for kind, counter in self._metrics.tokens.items()}
        gauges = {
            "num_requests_running": values.get("running", 0.0),
            "num_requests_waiting": values.get("waiting", 0.0),
            "kv_cache_usage_perc": values.get("kv_used_fraction", 0.0),
        }
        counters = {
            "prefix_cache_queries": tokens["prompt"],
            "prefix_cache_hits": tokens["cached"],
            "prompt_tokens": tokens["prompt"],
            "generation_tokens": tokens["completion"],
            "num_preemptions": values.get("preemptions_total", 0.0),
        }
        for name, value in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", "As vLLM reports it.", labels=list(model))
            gauge.add_metric(list(model.values()), value)
            yield gauge
        for name, value in counters.items():
            counter = CounterMetricFamily(f"vllm:{name}", "As vLLM reports it.", labels=list(model))
            counter.add_metric(list(model.values()), value)
            yield counter
        # KV is kept by the token here, so a block is one token.
        config = {"engine": "0", "block_size": "1", "num_gpu_blocks": str(int(values.get("kv_capacity_tokens", 0)))}
        info = GaugeMetricFamily("vllm:cache_config_info", "As vLLM reports it.", labels=list(config))
        info.add_metric(list(config.values()), 1.0)
        yield info
