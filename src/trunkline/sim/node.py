"""A node in virtual time: it receives facts, asks the production core for plans and lets them take what they cost.

The order is the embedded engine's: facts that arrive during a step wait for its end; then the step is reported, turns
that generated their last token end, and what waited is handled. A plan that repeats is applied until a turn ends or
something else is due.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trunkline.core import actions as act
from trunkline.core.facts import (
    CacheReset,
    Fact,
    MoveTiming,
    RunFinished,
    RunRestored,
    StepDone,
    TimePassed,
    TurnArrived,
    TurnEnded,
)
from trunkline.core.policy import Core
from trunkline.core.types import (
    CoreSettings,
    EndReason,
    Ints,
    MemoryKind,
    Prompt,
    RunKey,
    RunOrigin,
    SlotId,
    TurnId,
    TurnRecord,
)
from trunkline.sim.costs import Costs, Noise, decodes_ms
from trunkline.sim.faults import FaultRates, Faults
from trunkline.sim.memory import Memory
from trunkline.wire.journal import Journal


@dataclass(slots=True, eq=False)
class LiveTurn:
    """One turn: what it asks, the answer it will give, and how much of that there is so far."""

    id: TurnId
    key: RunKey
    parent: str | None
    prompt: Prompt
    answer: Ints
    max_new_tokens: int
    final: bool = False
    generated: int = 0
    first_token_ms: float | None = None


class Client(Protocol):
    """Who is told what becomes of turns."""

    def refused(self, turn: LiveTurn, refusal: act.TurnRefused) -> None:
        """The core does not serve it."""

    def ended(self, turn: LiveTurn, record: TurnRecord, reason: EndReason) -> None:
        """It is over."""


@dataclass(slots=True)
class Step:
    """A plan being applied: until when, and what will be reported."""

    plan: act.StepPlan
    ends_ms: float
    moves: tuple[MoveTiming, ...]
    calls_ms: tuple[float, ...]
    repeats: int
    failed: list[TurnId] = field(default_factory=list)


class Node:
    """One core and its costs. `check`, if given, is called after every fact and plan."""

    def __init__(
        self,
        settings: CoreSettings,
        costs: Costs,
        client: Client,
        *,
        noise: Noise | None = None,
        faults: Faults | None = None,
        journal: Journal | None = None,
        memory: Callable[[CoreSettings], Memory] | None = None,
        check: Callable[[Core], None] | None = None,
        skip_ahead: bool = True,
    ) -> None:
        """`skip_ahead`: apply plans that repeat many times at once; otherwise every step is planned."""
        self.settings = settings
        self.core = Core(settings)
        self.step: Step | None = None
        self.live: dict[TurnId, LiveTurn] = {}
        self.plans = self.steps = self.deaths = self.broken_promises = 0
        self.busy_ms = 0.0
        self._costs, self._client = costs, client
        self._noise = noise or Noise(0, 0.0)
        self._faults = faults or Faults(0, FaultRates())
        self._journal = journal
        self._make_memory = memory
        self._memory = memory(settings) if memory else None
        self._check = check
        self._skip_ahead = skip_ahead
        self._inbox: list[Callable[[float], None]] = []
        self._records: dict[TurnId, TurnRecord] = {}

    @property
    def total_broken_promises(self) -> int:
        """Tokens, over all lives of the node's core."""
        return self.broken_promises + self.core.state.broken_promises

    # --- what clients ask ---------------------------------------------------------------------------------------

    def submit(self, turn: LiveTurn, now_ms: float) -> None:
        """Serve a turn."""
        self._soon(lambda at_ms: self._arrive(turn, at_ms), now_ms)

    def cancel(self, turn: LiveTurn, now_ms: float) -> None:
        """Nobody waits for this turn any more. A turn that is over already stays over."""
        self._soon(lambda at_ms: self._abort(turn, at_ms), now_ms)

    def finish(self, key: RunKey, now_ms: float) -> None:
        """A client says that a run is over."""
        self._soon(lambda at_ms: self._tell(RunFinished(at_ms=at_ms, key=key)), now_ms)

    def reset(self, now_ms: float) -> None:
        """Forget every prefix that no turn in flight uses."""
        self._soon(lambda at_ms: self._tell(CacheReset(at_ms=at_ms)), now_ms)

    def restart(self, now_ms: float) -> None:
        """The process dies and comes back: KV and everything in flight is lost, runs are known."""
        known = [
            RunRestored(
                at_ms=now_ms,
                key=run.key,
                parent=run.parent,
                turns=run.turns,
                prompt_tokens=run.prompt_leaf.end if run.prompt_leaf is not None else run.lost_tokens,
                origin=run.origin,
                finished=run.finished,
            )
            for run in self.core.state.runs
        ]
        self.broken_promises += self.core.state.broken_promises
        self.core, self.step, self._inbox = Core(self.settings), None, []
        self.live, self._records = {}, {}
        self._memory = self._make_memory(self.settings) if self._make_memory else None
        if self._journal is not None:
            self._journal.begin(self.settings)
        for fact in known:
            self._tell(fact)

    # --- the loop -----------------------------------------------------------------------------------------------

    def begin(self, now_ms: float, horizon_ms: float) -> float | None:
        """Plan and start a step; returns when it ends, None if there is nothing to do.

        `horizon_ms`: nothing from outside is due before.
        """
        assert self.step is None
        if not self.live:
            return None
        if now_ms >= self.core.due_ms:
            self._tell(TimePassed(at_ms=now_ms))
        plan = self.core.plan(now_ms)
        self.deaths += len(plan.deaths)
        if not plan.moves and not plan.calls:
            return None
        self.plans += 1
        if self._journal is not None:
            self._journal.plan(plan)
        unusable: set[int] = set()
        moves = tuple(self._move(move, unusable) for move in plan.moves)
        self._verify()
        repeats = self._repeats(plan, horizon_ms - now_ms)
        failed: list[TurnId] = []
        calls_ms = tuple(self._call_ms(call, repeats, unusable, failed) for call in plan.calls)
        took = sum(timing.ms for timing in moves) + sum(ms for ms in calls_ms if ms > 0) + self._costs.step_ms * repeats
        self.step = Step(plan, now_ms + took, moves, calls_ms, repeats, failed)
        self.steps += repeats
        self.busy_ms += took
        return self.step.ends_ms

    def end_step(self) -> None:
        """The step is over: report it, end turns, take in what waited."""
        assert self.step is not None
        step, self.step = self.step, None
        at_ms = step.ends_ms
        done = StepDone(at_ms=at_ms, plan=step.plan.seq, moves=step.moves, calls_ms=step.calls_ms, repeats=step.repeats)
        calls = zip(step.plan.calls, step.calls_ms, strict=True)
        sampled = [turn for call, ms in calls if ms >= 0 for turn in _sampled(call)]
        if self._memory is not None:
            self._compute(self._memory, step)
        self._tell(done)
        for turn_id in sampled:
            turn = self.live[turn_id]
            turn.generated += step.repeats
            turn.first_token_ms = at_ms if turn.first_token_ms is None else turn.first_token_ms
            if turn.generated == len(turn.answer):
                self._end(turn, EndReason.STOP, at_ms)
        for turn_id in step.failed:
            self._end(self.live[turn_id], EndReason.FAILED, at_ms)
        inbox, self._inbox = self._inbox, []
        for message in inbox:
            message(at_ms)

    # --- a step ---------------------------------------------------------------------------------------------------

    def _repeats(self, plan: act.StepPlan, free_ms: float) -> int:
        """How often to apply a plan: until a turn ends, or until the step in which something else becomes due."""
        if not self._skip_ahead or plan.repeat == 1 or not isinstance(decode := plan.calls[0], act.Decode):
            return 1
        turns = [self.live[turn] for turn, _ in decode.turns]
        most = min(plan.repeat, *(len(turn.answer) - turn.generated for turn in turns))
        lo, hi = 1, most
        context = self._context(decode)
        while lo < hi:
            mid = (lo + hi) // 2
            lo, hi = (lo, mid) if decodes_ms(self._costs, len(turns), context, mid) >= free_ms else (mid + 1, hi)
        return lo

    def _context(self, decode: act.Decode) -> int:
        return sum(self.core.state.turns[turn].held_tokens for turn, _ in decode.turns)

    def _move(self, move: act.Move, unusable: set[int]) -> MoveTiming:
        ok, tokens = True, 0
        if isinstance(move, act.Save | act.Load):
            tokens = sum(piece.end - piece.start for piece in move.pieces)
        if isinstance(move, act.Load) and self._faults.load_fails():
            unusable.add(move.slot)
            ok = False
        if self._memory is not None:
            prompts = {turn.id: turn.prompt.symbols for turn in self.live.values()}
            self._memory.move(move, prompts, ok=ok)
        size = tokens * self.settings.bytes_per_token
        if isinstance(move, act.Save | act.Load) and self.settings.memory is MemoryKind.CHECKPOINTS:
            size += self.settings.checkpoint_bytes
        return MoveTiming(ok, size, self._faults.slowed(self._costs.move_ms(size)))

    def _call_ms(self, call: act.Call, repeats: int, unusable: set[int], failed: list[TurnId]) -> float:
        if isinstance(call, act.Prefill) and call.slot in unusable:
            return -1.0
        if self._faults.call_fails():
            failed += [turn for turn, _ in _places(call)]
            return -1.0
        if isinstance(call, act.Prefill):
            ms = self._costs.prefill_ms(call.end - call.start, call.start)
        else:
            assert isinstance(call, act.Decode), "no grammar forces tokens here"
            count, context = len(call.turns), self._context(call)
            ms = decodes_ms(self._costs, count, context, repeats) - self._costs.step_ms * repeats
        return self._faults.slowed(ms * self._noise.of(repeats))

    def _compute(self, memory: Memory, step: Step) -> None:
        """The calls as the memory sees them."""
        for call, ms in zip(step.plan.calls, step.calls_ms, strict=True):
            for turn_id, slot in _places(call):
                turn = self.live[turn_id]
                if turn_id in step.failed:
                    memory.lost(slot)
                elif ms >= 0 and isinstance(call, act.Prefill):
                    memory.prefill(call, turn.prompt.symbols)
                elif ms >= 0:
                    fed = turn.answer[: turn.generated + step.repeats - 1]
                    memory.decode(slot, turn.prompt.symbols, fed, step.repeats)

    # --- turns ----------------------------------------------------------------------------------------------------

    def _arrive(self, turn: LiveTurn, at_ms: float) -> None:
        self.live[turn.id] = turn
        self._tell(
            TurnArrived(
                at_ms=at_ms,
                turn=turn.id,
                salt=turn.key.salt,
                prompt=turn.prompt,
                max_new_tokens=turn.max_new_tokens,
                fresh=f"{turn.key.run}#{turn.id}",
                run=turn.key.run,
                parent=turn.parent,
                origin=RunOrigin.HEADER,
                final=turn.final,
            )
        )

    def _abort(self, turn: LiveTurn, at_ms: float) -> None:
        if turn.id in self.live:
            self._end(turn, EndReason.ABORTED, at_ms)

    def _end(self, turn: LiveTurn, reason: EndReason, at_ms: float) -> None:
        generated = turn.answer[: turn.generated]
        self._tell(TurnEnded(at_ms=at_ms, turn=turn.id, reason=reason, generated=generated))
        del self.live[turn.id]
        self._client.ended(turn, self._records.pop(turn.id), reason)

    def _soon(self, message: Callable[[float], None], now_ms: float) -> None:
        if self.step is None:
            message(now_ms)
        else:
            self._inbox.append(message)

    def _tell(self, fact: Fact) -> None:
        """Tell the core, and apply what it asks for at once."""
        if self._journal is not None:
            self._journal.fact(fact)
        for action in self.core.handle(fact):
            match action:
                case act.TurnRefused():
                    turn = self.live.pop(action.turn)
                    self._client.refused(turn, action)
                case act.TurnRecorded():
                    self._records[action.turn] = action.record
                case act.DeathNotice():
                    self.deaths += 1
                case act.SplitSegment() if self._memory is not None:
                    self._memory.split(action)
                case act.DropSegment() if self._memory is not None:
                    self._memory.drop(action.node)
        self._verify()

    def _verify(self) -> None:
        if self._check is not None:
            self._check(self.core)
        if self._memory is not None:
            self._memory.check(self.core)


def _sampled(call: act.Call) -> list[TurnId]:
    """The turns that get a token from a call."""
    if isinstance(call, act.Decode):
        return [turn for turn, _ in call.turns]
    return [call.turn] if call.last else []


def _places(call: act.Call) -> Sequence[tuple[TurnId, SlotId]]:
    """The turns that a call computes for, with their slots."""
    return call.turns if isinstance(call, act.Decode) else [(call.turn, call.slot)]
