"""What happened in a simulation, and the figures that are reported everywhere."""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from trunkline.wire.spread import Spread

SHORT_TOKENS = 64
"""A short step produces at most this many tokens."""


class TurnOutcome(msgspec.Struct, kw_only=True):
    """One turn as its client saw it. `ideal_ms`: alone on the node, with every reusable token held."""

    run: str
    session: str
    index: int
    submitted_ms: float
    first_token_ms: float | None
    ended_ms: float
    ideal_ms: float
    prompt_tokens: int
    cached_tokens: int
    reusable_tokens: int
    completion_tokens: int
    recomputed_tokens: int
    reason: str

    @property
    def latency_ms(self) -> float:
        """From sending to the last token."""
        return self.ended_ms - self.submitted_ms

    @property
    def well(self) -> bool:
        """Whether it ended as it should."""
        return self.reason in ("stop", "length")


class RunOutcome(msgspec.Struct, kw_only=True):
    """One run. `ideal_ms`: its length if every reusable token hit and nothing queued. `error`: why it ended early."""

    run: str
    session: str
    kind: str
    began_ms: float
    ended_ms: float | None = None
    ideal_ms: float = 0.0
    turns: int = 0
    refusals: int = 0
    late_refusals: int = 0
    """Refusals for load after a turn of the run had been served."""
    refused_ms: float = 0.0
    """Time outside: it was not let in, and told when to come back."""
    error: str | None = None

    @property
    def wall_ms(self) -> float:
        """From when it was let in (or into the line) to its end, with tool gaps and sub-agents that it waits for."""
        assert self.ended_ms is not None
        return self.ended_ms - self.began_ms - self.refused_ms

    @property
    def stretch(self) -> float:
        """Wall time over ideal."""
        return self.wall_ms / self.ideal_ms if self.ideal_ms > 0 else 1.0


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The node at one time; `turns` counts those that have ended."""

    at_ms: float
    open_sessions: int
    running: int
    queued: int
    slot_tokens: int
    host_bytes: int
    turns: int


class Interactivity(msgspec.Struct, frozen=True):
    """Tokens a second of turn time, per run: what 90 % and 99 % of the runs have at least."""

    p90: float
    p99: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one simulation; None where nothing was there to measure.

    `reuse` is cached / reusable prompt tokens, `cached_share` cached / prompt. `goodput_per_h` counts runs that
    completed with a stretch of at most `stretch_objective`. `cost_per_run_usd` is the node's price over completed runs.
    """

    runs: int
    completed_runs: int
    failed_runs: int
    refusals: int
    late_refusals: int
    turns: int
    wall_s: float
    completion_s: Spread | None
    reuse: float | None
    cached_share: float | None
    latency_ms: Spread | None
    short_latency_ms: Spread | None
    ttft_ms: Spread | None
    interactivity: Interactivity | None
    stretch: Spread | None
    stretch_objective: float
    completed_per_h: float
    goodput_per_h: float
    broken_promises: int
    cost_per_run_usd: float | None
    busy_share: float
    prompt_tokens: int
    novel_tokens: int
    completion_tokens: int
    tokens_per_s: float


def figures(
    turns: Sequence[TurnOutcome],
    runs: Sequence[RunOutcome],
    *,
    busy_ms: float,
    broken_promises: int,
    stretch_objective: float,
    usd_per_h: float | None,
) -> Figures:
    """Count them. Turns that ended badly and runs that failed are counted, not measured."""
    good = [turn for turn in turns if turn.well]
    over = [run for run in runs if run.ended_ms is not None]
    done = [run for run in over if run.error is None]
    wall_ms = max((run.ended_ms for run in over if run.ended_ms is not None), default=0.0)
    hours = wall_ms / 3.6e6
    cached, prompt = sum(t.cached_tokens for t in good), sum(t.prompt_tokens for t in good)
    generated = sum(turn.completion_tokens for turn in good)
    within = sum(run.stretch <= stretch_objective for run in done)
    return Figures(
        runs=len(runs),
        completed_runs=len(done),
        failed_runs=len(over) - len(done),
        refusals=sum(run.refusals for run in runs),
        late_refusals=sum(run.late_refusals for run in runs),
        turns=len(good),
        wall_s=wall_ms / 1e3,
        completion_s=Spread.of(run.wall_ms / 1e3 for run in done),
        reuse=_ratio(cached, sum(turn.reusable_tokens for turn in good)),
        cached_share=_ratio(cached, prompt),
        latency_ms=Spread.of(turn.latency_ms for turn in good),
        short_latency_ms=Spread.of(turn.latency_ms for turn in good if turn.completion_tokens <= SHORT_TOKENS),
        ttft_ms=Spread.of(t.first_token_ms - t.submitted_ms for t in good if t.first_token_ms is not None),
        interactivity=interactivity(good),
        stretch=Spread.of(run.stretch for run in done),
        stretch_objective=stretch_objective,
        completed_per_h=len(done) / hours if hours else 0.0,
        goodput_per_h=within / hours if hours else 0.0,
        broken_promises=broken_promises,
        cost_per_run_usd=usd_per_h * hours / len(done) if usd_per_h is not None and done else None,
        busy_share=min(1.0, busy_ms / wall_ms) if wall_ms else 0.0,
        prompt_tokens=prompt,
        novel_tokens=prompt - cached,
        completion_tokens=generated,
        tokens_per_s=generated / wall_ms * 1e3 if wall_ms else 0.0,
    )


def interactivity(turns: Iterable[TurnOutcome]) -> Interactivity | None:
    """Tokens a second of every run, over the time that its turns took."""
    tokens: dict[str, int] = {}
    spent_ms: dict[str, float] = {}
    for turn in turns:
        tokens[turn.run] = tokens.get(turn.run, 0) + turn.completion_tokens
        spent_ms[turn.run] = spent_ms.get(turn.run, 0.0) + turn.latency_ms
    if not tokens:
        return None
    rates = [tokens[run] / max(spent_ms[run], 1e-9) * 1e3 for run in tokens]
    p10, p1 = (float(x) for x in np.percentile(rates, (10, 1)))
    return Interactivity(p10, p1)


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
