"""How predictions compare with what happened, and what is made of the difference."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from trunkline.core.habits import Mean
from trunkline.core.predict import CostModel
from trunkline.core.types import RefusalReason, RunKey

REMEMBERED = 64
"""Runs whose stretch corrects the prediction."""
FLOOR = 0.1
"""Excess stretch below which the model and what happened are not told apart."""
MOST_CORRECTION = 8.0
WORST_LOSS = 8.0
NINE_IN_TEN = 0.9
STEP_WEIGHT = 0.02


class StepTimes:
    """Decode calls as they were measured, by how many turns they served; the cost model says what the context adds.

    The cost model is a straight line through the last few dozen calls, which is what the next step needs. A loop at
    another load needs what was measured there, however long ago.
    """

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._seen: dict[int, tuple[float, float]] = {}

    def saw(self, sequences: int, context_tokens: float, ms: float) -> None:
        """A call was measured."""
        before_ms, before_context = self._seen.get(sequences, (ms, context_tokens))
        at_most = min(ms, 4.0 * before_ms)  # a stall is not what steps take
        self._seen[sequences] = (
            before_ms + STEP_WEIGHT * (at_most - before_ms),
            before_context + STEP_WEIGHT * (context_tokens - before_context),
        )

    def ms(self, sequences: int, context_tokens: int) -> float:
        """Expected milliseconds, from the nearest number of turns that was measured."""
        line_ms = self._costs.decode_ms(sequences, context_tokens)
        if not self._seen:
            return line_ms
        nearest = min(self._seen, key=lambda count: (abs(count - sequences), count))
        seen_ms, seen_context = self._seen[nearest]
        return max(0.1 * line_ms, line_ms + seen_ms - self._costs.decode_ms(nearest, round(seen_context)))


class Losses:
    """How much more is computed again than the share of contexts for which there is no room.

    Where agents take turns, a little too little room may lose everything (each displaces the one that is due next), so
    that is assumed until less is seen.
    """

    def __init__(self) -> None:
        self._beyond = 0.1
        self._lost = 0.1 * WORST_LOSS

    def saw(self, beyond: float, lost: float) -> None:
        """A turn lost a share of what it could have reused, while a share of contexts was `beyond` the room."""
        if beyond > 0.02:
            self._beyond += 0.05 * (beyond - self._beyond)
            self._lost += 0.05 * (max(0.0, lost) - self._lost)

    @property
    def times(self) -> float:
        """The ratio of the two."""
        return max(1.0, min(WORST_LOSS, self._lost / max(1e-9, self._beyond)))


class Stretches:
    """How far the slowest tenth of runs is from its ideal, against what the model says of the mean run."""

    def __init__(self) -> None:
        self._ratios: OrderedDict[RunKey, float] = OrderedDict()
        """Of the runs that were seen last; each counts once, so that fast ones do not outvote the slow."""
        self.correction = 1.0

    def saw(self, run: RunKey, stretch: float, modelled: float) -> None:
        """A run has had this stretch so far, while the model said that."""
        excess = max(0.0, stretch - 1.0) + FLOOR
        self._ratios[run] = min(MOST_CORRECTION, excess / (modelled - 1.0 + FLOOR))
        self._ratios.move_to_end(run)
        if len(self._ratios) > REMEMBERED:
            self._ratios.popitem(last=False)
        ordered, seen = sorted(self._ratios.values()), len(self._ratios)
        slow = ordered[min(seen - 1, int(seen * NINE_IN_TEN))]
        self.correction = (slow * seen + 4.0) / (seen + 4.0)

    def expected(self, modelled: float) -> float:
        """The stretch that nine in ten runs are expected to stay below."""
        return 1.0 + max(0.0, (modelled - 1.0 + FLOOR) * self.correction - FLOOR)


class Promises:
    """What refused runs were told: to come back after so long. The first who was told is taken for the next let in."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._made: deque[tuple[float, float]] = deque()
        self._ratios = Mean()

    @property
    def ratio(self) -> float:
        """Real waits over those that were told."""
        return min(MOST_CORRECTION, max(1.0 / MOST_CORRECTION, self._ratios.toward(1.0, 4.0)))

    def due_after(self, now_ms: float) -> int:
        """Runs that will come back."""
        return sum(made + told > now_ms for made, told in self._made)

    def made(self, now_ms: float, told_ms: float) -> None:
        """A run was refused."""
        self._forget_late(now_ms)
        if len(self._made) < self._most:
            self._made.append((now_ms, told_ms))

    def kept(self, now_ms: float) -> None:
        """A run was let in."""
        self._forget_late(now_ms)
        if self._made:
            made, told = self._made.popleft()
            self.learn(now_ms - made, told)

    def _forget_late(self, now_ms: float) -> None:
        """Who found no room long after it was told to come back was told too short a time."""
        while self._made and now_ms - self._made[0][0] > 1.5 * self._made[0][1] + 1000.0:
            made, told = self._made.popleft()
            self.learn(now_ms - made, told)

    def learn(self, real_ms: float, told_ms: float) -> None:
        """A wait is over: how long it was, and how long it was said to be."""
        self._ratios.saw(min(MOST_CORRECTION, max(1.0 / MOST_CORRECTION, real_ms / max(1.0, told_ms))))


@dataclass(slots=True)
class Tally:
    """What became of new runs, and how predictions compare with what happened."""

    admitted: int = 0
    queued: int = 0
    queued_ms: float = 0.0
    refused: dict[RefusalReason, int] = field(default_factory=lambda: dict.fromkeys(RefusalReason, 0))
    ended: int = 0
    predicted_turns: float = 0.0
    actual_turns: float = 0.0
    predicted_tokens: float = 0.0
    actual_tokens: float = 0.0

    def counters(self) -> dict[str, float]:
        """For `/metrics`."""
        return {
            "runs_admitted_total": self.admitted,
            "runs_queued_total": self.queued,
            "runs_queued_ms_total": self.queued_ms,
            **{f"runs_refused_{reason}_total": count for reason, count in self.refused.items()},
            "runs_ended_total": self.ended,
            "predicted_turns_total": self.predicted_turns,
            "actual_turns_total": self.actual_turns,
            "predicted_peak_tokens_total": self.predicted_tokens,
            "actual_peak_tokens_total": self.actual_tokens,
        }
