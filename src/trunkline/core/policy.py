"""The policy core: facts in, actions and plans out.

`Core.handle` takes one fact and answers with actions to apply at once; `Core.plan` decides one step. An executor calls
both from one thread, applies what they return, and reports with `StepDone`. Nothing here reads a clock or a file: the
same facts and the same `plan` times give the same plans.
"""

import itertools
import math
from collections import OrderedDict

from trunkline.core import entrance, lifecycle, pauses
from trunkline.core.actions import Action, Decode, Extend, Load, Prefill, Save, StepPlan
from trunkline.core.facts import (
    CacheReset,
    Fact,
    RunDeclared,
    RunFinished,
    RunRestored,
    StepDone,
    TokensForced,
    TurnArrived,
    TurnEnded,
)
from trunkline.core.misses import explain
from trunkline.core.placement import Ledger
from trunkline.core.prefix import Node, common_ancestor
from trunkline.core.schedule import Step
from trunkline.core.slots import path_ids
from trunkline.core.state import State
from trunkline.core.turns import Phase, Turn
from trunkline.core.types import CoreSettings, MissReason, Order, RunKey, Sharing

LOOP_BONUS_MS = 15_000.0
"""Head start in the queue of a turn whose run has already begun, over a new run's first turn."""
RECOMPUTE_WEIGHT = 8.0
"""Head start of a turn over another for each millisecond of prefill that it saves by what is held of it now."""
RECOMPUTE_MOST_MS = 60_000.0
"""The longest that a turn waits for others that cost less."""
SHORT_BONUS_MS = 30_000.0
"""Head start of a predicted short step. Both are bounded, so that nobody waits for ever."""
DUE_MS = 30_000.0
"""A run in a tool gap is expected back for this long; a slot is kept free for its short step meanwhile."""


class Core:
    """The one place where decisions are made."""

    def __init__(self, settings: CoreSettings) -> None:
        self.state = State(settings)
        self._plan: tuple[StepPlan, Step] | None = None
        self._next_plan = 1
        self._due: OrderedDict[RunKey, float] = OrderedDict()
        self._held_changed = False

    # --- facts ------------------------------------------------------------------------------------------------

    def handle(self, fact: Fact) -> list[Action]:
        """Take in one fact. Facts that no correct executor reports raise AssertionError."""
        actions = self._handled(fact)
        return [*actions, *entrance.admit_waiting(self.state, fact.at_ms)] if self.state.admission.waiting else actions

    @property
    def due_ms(self) -> float:
        """When the core wants to be told that time has passed, if nothing else happens (infinity: never)."""
        return self.state.admission.due_ms

    def _handled(self, fact: Fact) -> list[Action]:
        runs = self.state.runs
        match fact:
            case TurnArrived():
                actions = lifecycle.arrive(self.state, fact)
                if fact.turn in self.state.turns:
                    self._due.pop(self.state.turns[fact.turn].run.key, None)
                return actions
            case StepDone():
                return self._step_done(fact)
            case TokensForced():
                turn = self.state.turns[fact.turn]
                assert turn.phase is Phase.DECODE and turn.pending == 1
                turn.generated += fact.tokens
                turn.pending += fact.tokens
            case TurnEnded():
                return self._ended(fact)
            case CacheReset():
                self._held_changed = True
                return lifecycle.reset(self.state, fact)
            case RunDeclared():
                return entrance.declared(self.state, fact)
            case RunFinished():
                over = runs.get(fact.key)
                if over is not None:
                    runs.set_finished(over, True)
                    self.state.admission.over(fact.key)
                    self._due.pop(fact.key, None)
            case RunRestored():
                run = runs.restore(fact)
                self.state.forget(runs.touch(run, fact.at_ms))
                runs.set_finished(run, fact.finished)
        return []

    def _ended(self, fact: TurnEnded) -> list[Action]:
        self._held_changed = True
        run = self.state.turns[fact.turn].run
        actions = lifecycle.end(self.state, fact)
        short = self.state.settings.short_tokens
        if not run.finished and self.state.forecast.output_tokens(run.key, short + 1) <= short:
            self._due[run.key] = fact.at_ms
        self.state.tidy(fact.at_ms)
        return actions

    def _step_done(self, fact: StepDone) -> list[Action]:
        assert self._plan is not None
        plan, step = self._plan
        assert fact.plan == plan.seq
        assert 1 <= fact.repeats <= plan.repeat
        self._plan = None
        actions: list[Action] = []
        for move, timing in zip(plan.moves, fact.moves, strict=True):
            self.state.costs.saw_move(timing.bytes, timing.ms)
            if isinstance(move, Load) and not timing.ok:
                self._held_changed = True
                actions += lifecycle.break_promise(self.state, move, fact.at_ms)
            elif isinstance(move, Save) and self.state.checkpoints:
                self.state.retention.corrected(move.pieces[0].node, timing.bytes)
        for call, ms in zip(plan.calls, fact.calls_ms, strict=True):
            if ms >= 0 and isinstance(call, Prefill):
                self._prefilled(call, ms, fact.at_ms)
            elif ms >= 0 and isinstance(call, Decode):
                self._decoded(call, ms, fact.repeats)
            elif ms >= 0 and isinstance(call, Extend):
                self._extended(call, ms)
        self.state.scheduler.observed(step, sum(ms for ms in fact.calls_ms if ms > 0) / fact.repeats, fact.repeats)
        return actions

    def _prefilled(self, call: Prefill, ms: float, at_ms: float) -> None:
        turn = self.state.turns[call.turn]
        assert turn.slot == call.slot
        assert turn.computed == call.start
        self.state.costs.saw_prefill(call.end - call.start, call.start, ms)
        turn.computed = call.end
        self.state.slots[call.slot].held = call.end
        if call.last:
            turn.phase, turn.record.first_token_ms = Phase.DECODE, at_ms
            turn.generated = turn.pending = turn.record.passes = 1

    def _decoded(self, call: Decode, ms: float, repeats: int) -> None:
        turns = [self.state.turns[turn_id] for turn_id, _ in call.turns]
        context = sum(turn.held_tokens for turn in turns) + len(turns) * (repeats - 1) / 2
        self.state.admission.saw_decode(len(turns), context, ms / repeats)
        self.state.costs.saw_decode(len(turns), context, ms / repeats, repeats)
        for turn, (_, slot) in zip(turns, call.turns, strict=True):
            turn.generated += repeats
            turn.record.passes += repeats
            self.state.slots[slot].held = turn.held_tokens

    def _extended(self, call: Extend, ms: float) -> None:
        turn = self.state.turns[call.turn]
        assert call.start == turn.generated - turn.pending
        self.state.costs.saw_prefill(call.end - call.start, turn.held_tokens, ms)
        turn.pending -= call.end - call.start
        turn.generated += call.last
        turn.pending += call.last
        turn.record.passes += 1
        self.state.slots[call.slot].held = turn.held_tokens

    # --- plans ------------------------------------------------------------------------------------------------

    def plan(self, now_ms: float) -> StepPlan:
        """Decide the next step. A plan with moves or calls must be reported `StepDone` before the next is asked for."""
        assert self._plan is None, "the last plan was not reported done"
        ledger = Ledger()
        if self.state.checkpoints:
            self._save_states(ledger, now_ms)
        self._place_queued(ledger, now_ms)
        placed = [turn for turn in self.state.turns.values() if turn.slot is not None]
        step = self.state.scheduler.step(placed, now_ms, short_step_due=self._short_step_due(now_ms))
        moves, deaths = tuple(ledger.moves), tuple(ledger.deaths)
        repeat = 1 if moves else self._repeat(step, placed, now_ms)
        plan = StepPlan(self._next_plan, now_ms, moves, step.calls, deaths, step.predicted_ms, repeat)
        if plan.moves or plan.calls:
            self._next_plan += 1
            self._plan = (plan, step)
        return plan

    def _repeat(self, step: Step, placed: list[Turn], now_ms: float) -> int:
        """How many steps are expected to be planned this way if nothing but their own calls happens."""
        decoding = [turn for turn in placed if turn.phase is Phase.DECODE]
        if not decoding or any(turn.pending > 1 for turn in decoding):
            return 1
        steps = min(turn.fact.max_new_tokens - turn.generated for turn in decoding)
        steps = steps if step.holds is None else min(step.holds, steps)
        changes_ms = min(self._slot_given_ms(placed, now_ms), self.state.admission.due_ms)
        if changes_ms < math.inf:
            steps = min(steps, int((changes_ms - now_ms) / max(step.predicted_ms, 1e-3)))
        return max(1, steps)

    def _slot_given_ms(self, placed: list[Turn], now_ms: float) -> float:
        """When the clock alone may give a slot that is kept free to a queued turn: one was patient long enough, or no
        short step is due any more.
        """
        queued = self._queued() if len(placed) < len(self.state.slots) else []
        if not queued:
            return math.inf
        patience = LOOP_BONUS_MS + SHORT_BONUS_MS
        ends = [turn.ready_ms + patience for turn in queued if turn.ready_ms + patience >= now_ms]
        if pauses.pauses(self.state):
            ends += [end for turn in queued if (end := pauses.until_ms(self.state, turn)) >= now_ms]
        due = [ended_ms + DUE_MS for ended_ms in itertools.islice(reversed(self._due.values()), 1)]
        return min([*ends, *due], default=math.inf)

    def _place_queued(self, ledger: Ledger, now_ms: float) -> None:
        queued = self._queued()
        if not queued or all(slot.turn is not None for slot in self.state.slots):
            return
        fcfs = self.state.settings.order is Order.FCFS
        keep_free = int(not fcfs and len(self.state.slots) > 1 and self._short_step_due(now_ms))
        in_flight = list(self.state.turns.values())
        if self._held_changed:
            self._held_changed = False
            for turn in queued:
                self.state.placement.look_again(turn)
        harmless = not pauses.pauses(self.state) or pauses.room_without_harm(self.state)
        for turn in sorted(queued, key=self._rank):
            if not harmless and now_ms < pauses.until_ms(self.state, turn):
                continue
            patient = now_ms - turn.ready_ms <= LOOP_BONUS_MS + SHORT_BONUS_MS
            spare = keep_free if patient and not self.state.scheduler.is_short(turn) else 0
            if not self.state.placement.place(turn, in_flight, ledger, now_ms, spare=spare):
                continue
            self._held_changed = True
            harmless = not pauses.pauses(self.state) or pauses.room_without_harm(self.state)
            lost = max(0, turn.promised_tokens - turn.computed)
            self.state.broken_promises += lost
            turn.record.recomputed_tokens += lost
            turn.promised_tokens = 0
            self._find_stops(turn)
            if turn.record.placed_ms is None:
                turn.record.placed_ms = now_ms
            turn.record.cached_tokens = turn.computed
            turn.record.misses = explain(turn, self.state.settings)
            overtaken = self._overtaken_tokens(turn, in_flight)
            turn.record.reusable_tokens = max(turn.record.reusable_tokens - overtaken, turn.computed)

    def _overtaken_tokens(self, turn: Turn, in_flight: list[Turn]) -> int:
        """Prompt tokens that a turn computes for those it overtook in the queue: they brought them first, and will
        reuse them instead.
        """
        missing = sum(miss.tokens for miss in turn.record.misses if miss.reason is MissReason.NOT_YET_COMPUTED)
        if not missing:
            return 0
        path = path_ids(turn.leaf)
        before = [other for other in in_flight if other.phase is Phase.QUEUED and other.id < turn.id]
        shared = [node.end for other in before if (node := common_ancestor(other.leaf, path)) is not None]
        return min(missing, max(0, max(shared, default=0) - turn.computed))

    def _queued(self) -> list[Turn]:
        """Turns that may have a slot: their runs were let in."""
        in_line = self.state.admission.waiting
        turns = self.state.turns.values()
        return [turn for turn in turns if turn.phase is Phase.QUEUED and turn.run.key not in in_line]

    def _rank(self, turn: Turn) -> tuple[float, int]:
        """Arrival, with a head start for short steps, for runs that have begun, and for what is still held."""
        if self.state.settings.order is Order.FCFS:
            return turn.ready_ms, turn.id
        begun = turn.record.index > 0 or turn.run.parent is not None
        bonus = LOOP_BONUS_MS * begun + SHORT_BONUS_MS * self.state.scheduler.is_short(turn)
        handicap = min(RECOMPUTE_MOST_MS, RECOMPUTE_WEIGHT * self.state.scheduler.prefill_ms(turn))
        return turn.ready_ms - bonus + handicap, turn.id

    def _short_step_due(self, now_ms: float) -> bool:
        while self._due:
            run, ended_ms = next(iter(self._due.items()))
            if now_ms - ended_ms <= DUE_MS:
                return True
            del self._due[run]
        return False

    def _save_states(self, ledger: Ledger, now_ms: float) -> None:
        """Checkpoint memory: save the whole state of every prefill that stands where it was told to stop."""
        for turn in self.state.turns.values():
            if turn.phase is not Phase.PREFILL:
                continue
            stops = self._find_stops(turn)
            node = stops.get(turn.computed)
            if node is not None and not node.host:
                self.state.placement.checkpoint(turn, node, list(self.state.turns.values()), ledger, now_ms)

    def _find_stops(self, turn: Turn) -> dict[int, Node]:
        """Where a prefill's slices must end: a token before the prompt does, and wherever another path forks off."""
        if not self.state.checkpoints or self.state.settings.sharing is Sharing.OFF:
            return {}
        path, last = turn.leaf.path(), turn.prompt_tokens - 1
        stops = {node.end: node for node in path if len(node.children) > 1 or node.end == last}
        turn.stops = tuple(sorted(stops))
        return stops
