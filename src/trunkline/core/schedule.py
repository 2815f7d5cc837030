"""The calls of one step: who decodes, whose prompt is computed next and how much of it.

Prefill and decode go in separate calls, since one call would make decodes wait for the slice. No slice is longer than
the step budget, unless nobody decodes and no short step is due (`LONE_BUDGETS`). Prompts that are nearly computed
(within `QUICK_BUDGETS`) get a slice in every step; where several came at once, decodes wait for a few steps
(`HOLD_STEPS`), so that all decode together. Longer prompts share the time with whoever decodes by an account: while
others decode they earn *credit*, which is paid in slices.

A long prefill (beyond `LONG_BUDGETS`) stands aside for turns that are predicted to be short: it earns its guaranteed
share, and is paid once they are done, or at the latest when `DEFER_BUDGETS` are owed. So a third of a second belongs to
a short step alone, and a stream of short steps cannot starve a prefill.

Tokens that a grammar forced are part of a decode, not of a prefill: they are fed in one pass (`Extend`), beside the
decodes of others; only a span that would hold those up for longer than the step budget is cut.

The rival, `Order.FCFS`, gives each step to the oldest prompt in the largest slice, then decodes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trunkline.core.actions import Call, Decode, Extend, Prefill
from trunkline.core.predict import CostModel
from trunkline.core.turns import Phase, Turn
from trunkline.core.types import CoreSettings, Order

DEFER_BUDGETS = 4.0
"""Credit, in step budgets, at which a long prefill no longer waits for a short step to end."""
QUICK_BUDGETS = 2.0
"""A prefill that takes at most this many step budgets belongs to a short step."""
LONG_BUDGETS = 10.0
"""A prefill that takes more step budgets than this stands aside for short steps."""
EVEN_SHARE = 0.5
"""A prefill's share of the time where nobody stands aside."""
HOLD_STEPS = 2
"""Steps that decodes wait while several quick prompts are being computed."""
LONE_BUDGETS = 10.0
"""Longest slice, in step budgets, while nobody decodes and no short step is due."""
MANY_STEPS = 1 << 30
AGEING = 0.5
"""Milliseconds of expected prefill that a millisecond of waiting is worth when prefills are ordered."""


@dataclass(frozen=True, slots=True)
class Step:
    """Calls in order, and what they are expected to take. `credit_ms` is the account after them.

    `holds`: how many steps in a row are expected to be this one (None: until a turn comes or goes).
    """

    calls: tuple[Call, ...]
    predicted_ms: float
    credit_ms: float
    holds: int | None = 1


class Scheduler:
    """Plans steps; its only state is the credit of deferred prefills."""

    def __init__(self, settings: CoreSettings, costs: CostModel) -> None:
        self._settings = settings
        self._costs = costs
        self._credit_ms = 0.0
        self._held_steps = 0

    def step(self, turns: Sequence[Turn], now_ms: float, *, short_step_due: bool) -> Step:
        """Calls for the placed `turns`. `short_step_due`: a run that takes short steps is expected back."""
        decoding = [turn for turn in turns if turn.phase is Phase.DECODE]
        prefilling = [turn for turn in turns if turn.phase is Phase.PREFILL]
        if self._settings.order is Order.FCFS:
            slices = [self._slice(t, self._settings.max_slice_tokens) for t in sorted(prefilling, key=_age)[:1]]
            return replace(self._step(slices, decoding, 0.0), holds=1 if slices else None)
        if not prefilling:
            return replace(self._step([], decoding, 0.0), holds=None)
        ordered = sorted(prefilling, key=lambda turn: self._urgency(turn, now_ms))
        quick = [turn for turn in ordered if self._is_quick(turn)]
        if not quick:
            return self._beside(ordered[0], decoding, short_step_due=short_step_due)
        others = [turn for turn in ordered if not self._is_quick(turn)]
        return self._all_quick(quick, others[0] if others else None, decoding)

    def is_short(self, turn: Turn) -> bool:
        """Whether what is left of a turn is predicted to be a short step."""
        left = max(0, turn.expected_tokens - turn.generated)
        short = left <= self._settings.short_tokens and turn.generated <= self._settings.short_tokens
        return short and self._is_quick(turn)

    def prefill_ms(self, turn: Turn) -> float:
        """Expected time to finish a turn's prefill if nothing else ran (queued: from what is likely held)."""
        start = turn.computed if turn.phase is not Phase.QUEUED else turn.likely_held
        return self._costs.prefill_whole_ms(turn.prompt_tokens - start, start, self._settings.max_slice_tokens)

    def observed(self, predicted: Step, ms: float, repeats: int = 1) -> None:
        """The step was applied, `repeats` times if it held so long, and took `ms` each time."""
        if predicted.holds is None:
            self._credit_ms = predicted.credit_ms  # nobody waits for a share
            return
        scale = ms / predicted.predicted_ms if predicted.predicted_ms > 0 else 1.0
        self._credit_ms += (predicted.credit_ms - self._credit_ms) * min(2.0, scale) * repeats

    def _urgency(self, turn: Turn, now_ms: float) -> tuple[float, int]:
        return self.prefill_ms(turn) - AGEING * (now_ms - turn.ready_ms), turn.id

    def _is_quick(self, turn: Turn) -> bool:
        return self.prefill_ms(turn) <= QUICK_BUDGETS * self._settings.step_budget_ms

    def _all_quick(self, quick: Sequence[Turn], waiting: Turn | None, decoding: Sequence[Turn]) -> Step:
        """Slices of nearly computed prompts; decodes join once all are under way, or have waited long enough.

        A longer prompt that is `waiting` earns its share meanwhile, and is paid when enough is owed.
        """
        slices = self._slices(quick)
        hold = len(slices) < len(quick) and self._held_steps < HOLD_STEPS
        self._held_steps = self._held_steps + 1 if hold else 0
        step = self._step(slices, [] if hold else decoding, self._credit_ms)
        if waiting is None:
            return step
        budget = self._settings.step_budget_ms
        if self._credit_ms < DEFER_BUDGETS * budget:
            return replace(step, credit_ms=self._earned(step.predicted_ms, self._settings.prefill_share))
        owed = self._slice(waiting, self._fitting(waiting.computed, budget))
        return self._step([*slices, owed], [] if hold else decoding, self._credit_ms - self._slice_ms(owed))

    def _slices(self, turns: Sequence[Turn]) -> list[Prefill]:
        """Slices for as many turns as a step holds, at least for the first; several share `QUICK_BUDGETS`."""
        chosen: list[Prefill] = []
        left_ms = self._settings.step_budget_ms * (QUICK_BUDGETS if len(turns) > 1 else 1.0)
        for turn in turns:
            part = self._slice(turn, self._fitting(turn.computed, self._settings.step_budget_ms))
            left_ms -= self._slice_ms(part)
            if chosen and left_ms < 0:
                break
            chosen.append(part)
        return chosen

    def _beside(self, turn: Turn, decoding: Sequence[Turn], *, short_step_due: bool) -> Step:
        """A prefill that is not quick, and whoever decodes beside it."""
        budget = self._settings.step_budget_ms
        lone = not decoding and not short_step_due
        part = self._slice(turn, self._fitting(turn.computed, budget * LONE_BUDGETS if lone else budget))
        slice_ms = self._slice_ms(part)
        if not decoding:
            return self._step([part], [], max(0.0, self._credit_ms - slice_ms))
        aside = self.prefill_ms(turn) > LONG_BUDGETS * budget and any(self.is_short(other) for other in decoding)
        price = DEFER_BUDGETS * budget if aside else slice_ms
        if self._credit_ms >= price:
            return self._step([part], decoding, self._credit_ms - slice_ms)
        share = self._settings.prefill_share if aside else EVEN_SHARE
        step = self._step([], decoding, self._credit_ms)
        earned = self._earned(step.predicted_ms, share)
        gain_ms = earned - self._credit_ms
        steps = math.ceil((price - self._credit_ms) / gain_ms) if gain_ms > 0 else MANY_STEPS
        changes = [self._short_changes_in(other) for other in decoding]
        return replace(step, credit_ms=earned, holds=min(steps, *changes))

    def _short_changes_in(self, turn: Turn) -> int:
        """After how many more tokens a decoding turn may count as short no more, or count as short at last."""
        short = self._settings.short_tokens
        edges = (short + 1 - turn.generated, turn.expected_tokens - short - turn.generated)
        return min((edge for edge in edges if edge > 0), default=MANY_STEPS)

    def _earned(self, ms: float, share: float) -> float:
        """The credit after a waiting prefill let others have `ms`."""
        most = 2 * DEFER_BUDGETS * self._settings.step_budget_ms
        return min(most, self._credit_ms + ms * share / (1 - share))

    def _fitting(self, start: int, budget_ms: float) -> int:
        """Tokens of the largest slice from `start` on that is expected to fit."""
        limit, least = self._settings.max_slice_tokens, self._settings.min_slice_tokens
        fits = self._costs.slice_tokens(budget_ms, start, limit)
        return max(least, fits - fits % least)

    def _slice_limit(self, turn: Turn, tokens: int) -> int:
        """A slice ends at the next place where the whole state is to be saved, if there is one."""
        stops = [stop for stop in turn.stops if stop > turn.computed]
        return min(tokens, turn.remaining_prefill, min(stops) - turn.computed if stops else tokens)

    def _slice(self, turn: Turn, tokens: int) -> Prefill:
        assert turn.slot is not None
        end = turn.computed + self._slice_limit(turn, tokens)
        return Prefill(turn.id, turn.slot, turn.computed, end, last=end == turn.prompt_tokens)

    def _extend(self, turn: Turn, limit: int | None) -> tuple[Extend, float]:
        """A pass over a turn's pending tokens, at most `limit` (None: what fits a step), and its expected time."""
        assert turn.slot is not None
        most = limit or self._fitting(turn.held_tokens, self._settings.step_budget_ms)
        start = turn.generated - turn.pending
        end = min(turn.generated, start + most)
        call = Extend(turn.id, turn.slot, start, end, last=end == turn.generated)
        return call, self._costs.prefill_ms(end - start, turn.held_tokens)

    def _slice_ms(self, part: Prefill) -> float:
        return self._costs.prefill_ms(part.end - part.start, part.start)

    def _decode_ms(self, decoding: Sequence[Turn]) -> float:
        return self._costs.decode_ms(len(decoding), sum(turn.held_tokens for turn in decoding))

    def _step(self, slices: Sequence[Prefill], decoding: Sequence[Turn], credit_ms: float) -> Step:
        calls: list[Call] = list(slices)
        predicted = sum(self._slice_ms(part) for part in slices)
        single = [turn for turn in decoding if turn.pending == 1]
        if single:
            pairs = sorted((turn.slot, turn.id) for turn in single if turn.slot is not None)
            calls.append(Decode(tuple((turn_id, slot) for slot, turn_id in pairs)))
            predicted += self._decode_ms(single)
        alone = self._settings.max_slice_tokens if len(decoding) == 1 and not slices else None
        for turn in decoding:
            if turn.pending > 1:
                call, ms = self._extend(turn, alone)
                calls.append(call)
                predicted += ms
        return Step(tuple(calls), predicted, credit_ms)


def _age(turn: Turn) -> tuple[float, int]:
    return turn.fact.at_ms, turn.id
