"""Turns a replay's events into the figures that are reported everywhere, and shows them."""

from collections.abc import Callable, Sequence

import msgspec

from trunkline.bench.events import Event, RunEvent, TurnEvent
from trunkline.wire.spread import Spread

SHORT_TOKENS = 64
"""A short step produces at most this many tokens."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one replay. Shares are None where the server did not report cached tokens.

    `reuse` is cached / reusable over all turns, `reuse_from_turn_2` without each run's first; `cached_share` is
    cached / prompt tokens. Completion is of whole runs, sub-agents and tool gaps included; failed runs are left out.
    """

    runs: int
    failed_runs: int
    turns: int
    wall_s: float
    completion_s: Spread | None
    reuse: float | None
    reuse_from_turn_2: float | None
    cached_share: float | None
    latency_ms: Spread | None
    short_latency_ms: Spread | None
    ttft_ms: Spread | None
    prompt_tokens: int
    completion_tokens: int
    output_tokens_per_s: float


def summarize(events: Sequence[Event]) -> Summary:
    """Compute the summary of one replay's events."""
    turns = [event for event in events if isinstance(event, TurnEvent) and event.error is None]
    runs = [event for event in events if isinstance(event, RunEvent)]
    done = [run for run in runs if run.error is None]
    wall_s = max((run.ended_ms for run in runs), default=0.0) / 1e3
    generated = sum(turn.completion_tokens for turn in turns)
    return Summary(
        runs=len(runs),
        failed_runs=len(runs) - len(done),
        turns=len(turns),
        wall_s=wall_s,
        completion_s=Spread.of((run.ended_ms - run.started_ms) / 1e3 for run in done),
        reuse=_share(turns, lambda turn: turn.reusable_tokens),
        reuse_from_turn_2=_share([turn for turn in turns if turn.index], lambda turn: turn.reusable_tokens),
        cached_share=_share(turns, lambda turn: turn.prompt_tokens),
        latency_ms=Spread.of(turn.latency_ms for turn in turns),
        short_latency_ms=Spread.of(turn.latency_ms for turn in turns if turn.completion_tokens <= SHORT_TOKENS),
        ttft_ms=Spread.of(turn.ttft_ms for turn in turns if turn.ttft_ms is not None),
        prompt_tokens=sum(turn.prompt_tokens for turn in turns),
        completion_tokens=generated,
        output_tokens_per_s=generated / wall_s if wall_s else 0.0,
    )


def show(summary: Summary) -> str:
    """The summary as lines for people."""
    lines = [
        f"runs           {summary.runs} ({summary.failed_runs} failed), {summary.turns} turns, {summary.wall_s:.1f} s",
        f"run completion {_spread(summary.completion_s, 's')}",
        f"reuse          {_percent(summary.reuse)} of reusable tokens"
        f" (from turn 2: {_percent(summary.reuse_from_turn_2)}); {_percent(summary.cached_share)} of prompt tokens",
        f"step latency   {_spread(summary.latency_ms, 'ms')}",
        f"  short steps  {_spread(summary.short_latency_ms, 'ms')}",
        f"first token    {_spread(summary.ttft_ms, 'ms')}",
        f"tokens         {summary.prompt_tokens} in, {summary.completion_tokens} out,"
        f" {summary.output_tokens_per_s:.1f} out/s",
    ]
    return "\n".join(lines)


def _share(turns: Sequence[TurnEvent], whole: Callable[[TurnEvent], int | None]) -> float | None:
    """Cached tokens over `whole`; None unless every turn says both and there is something to share."""
    total = 0
    for turn in turns:
        part = whole(turn)
        if turn.cached_tokens is None or part is None:
            return None
        total += part
    return sum(turn.cached_tokens or 0 for turn in turns) / total if total else None


def _spread(spread: Spread | None, unit: str) -> str:
    if spread is None:
        return "not measured"
    digits = 0 if unit == "ms" else 2
    named = ("mean", spread.mean), ("p50", spread.p50), ("p95", spread.p95), ("p99", spread.p99)
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in named) + f" {unit} ({spread.count})"


def _percent(share: float | None) -> str:
    return "not reported" if share is None else f"{share:.2%}"
