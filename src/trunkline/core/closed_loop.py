"""How fast many agents go on one engine: each waits for its turn, then its tools, then sends the next.

A closed loop answers to its own load: slower turns come more seldom. With `n` runs whose turns take `p` ms of prefill
and `D` decode steps, and whose tool gaps take `Z`, a turn's time `R` solves

    R (1 - (n - 1) p / (Z + R)) = p + D d(b)

since others' prefills leave a turn the rest of the time, and `b` turns decode together at `d(b)` a step. (Mean value
analysis with Schweitzer's approximation; Reiser and Lavenberg, JACM 27(2), 1980; Schweitzer 1979.) Contexts that memory
cannot hold are computed again, which makes `p` longer: this is the cliff.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

ITERATIONS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Runs that are open together, as means over them (tokens; milliseconds; a turn's, where it is of a turn).

    `active` counts them for the engine, `held` for memory: a run that has long been silent needs memory if it comes
    back, but does not keep the engine busy.
    """

    active: float
    held: float
    prefill_ms: float
    recompute_ms: float
    """Prefill of the whole context, if it has been lost."""
    output_tokens: float
    context_tokens: float
    gap_ms: float


@dataclass(frozen=True, slots=True)
class Engine:
    """What a closed loop runs on. `decode_ms(sequences, context_tokens)` is one decode step.

    `loss_times`: how much more is lost than there is no room for.
    """

    slots: int
    host_tokens: float
    decode_ms: Callable[[int, int], float]
    loss_times: float = 1.0


@dataclass(frozen=True, slots=True)
class Pace:
    """What the model says: a turn's time, that time alone with everything held, and the share of contexts lost."""

    turn_ms: float
    ideal_ms: float
    gap_ms: float
    lost_share: float

    @property
    def stretch(self) -> float:
        """Run time over ideal run time."""
        return (self.gap_ms + self.turn_ms) / (self.gap_ms + self.ideal_ms)


def lost_share(mix: Mix, engine: Engine) -> float:
    """The share of contexts that neither slots nor host memory hold; a slot holds one run's, however short."""
    beyond = (mix.held - engine.slots) * mix.context_tokens - engine.host_tokens
    return min(1.0, beyond / (mix.held * mix.context_tokens)) if beyond > 0 else 0.0


def pace(mix: Mix, engine: Engine) -> Pace:
    """Solve the loop for the means."""
    context, steps, gap = round(mix.context_tokens), mix.output_tokens, mix.gap_ms
    alone_ms = engine.decode_ms(1, context)
    ideal = mix.prefill_ms + steps * alone_ms
    lost = min(1.0, lost_share(mix, engine) * engine.loss_times)
    prefill = mix.prefill_ms + lost * mix.recompute_ms
    others = max(0.0, mix.active - 1.0)
    # From above: where the loop could settle at either of two paces, the slower one is expected.
    together = max(1, min(engine.slots, round(mix.active)))
    step_ms = engine.decode_ms(together, together * context)
    turn_ms = ideal
    for _ in range(ITERATIONS):
        need = prefill + steps * step_ms
        b = gap - others * prefill - need
        turn_ms = (-b + sqrt(b * b + 4 * need * gap)) / 2
        decoding = (1.0 + others) * steps * step_ms / (need * (gap + turn_ms) / turn_ms)
        now_together = max(1, min(engine.slots, round(decoding)))
        if now_together == together:
            break
        together, step_ms = now_together, engine.decode_ms(now_together, now_together * context)
    in_slots = (1.0 + others) * turn_ms / (gap + turn_ms)
    if in_slots > engine.slots:  # the others wait for a slot
        at_most = min(mix.active, float(engine.slots))
        busy_ms = prefill * at_most + steps * engine.decode_ms(engine.slots, engine.slots * context)
        turn_ms = max(turn_ms, (1.0 + others) * busy_ms / engine.slots - gap)
    return Pace(turn_ms, ideal, gap, lost)
