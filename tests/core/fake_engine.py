"""An executor over lists of symbols: it applies plans as the real one does, and checks what it moves.

A slot is the list of symbols whose KV it would hold; a segment is the list of symbols of its node (for checkpoint
memory: of the whole path).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trunkline.core import actions as act
from trunkline.core.facts import MoveTiming, StepDone, TimePassed, TokensForced, TurnArrived, TurnEnded
from trunkline.core.invariants import check
from trunkline.core.policy import Core
from trunkline.core.turns import Phase
from trunkline.core.types import CoreSettings, EndReason, MemoryKind, Prompt, RunOrigin, TurnRecord


@dataclass
class Job:
    """One turn: its prompt, what it generated, and how much it will generate. `forced` says how many tokens a grammar
    forces behind each chosen one (0 once the list is used up); `pending` generated tokens are not in its slot.
    """

    prompt: list[int]
    length: int
    forced: list[int] = field(default_factory=list)
    pending: int = 0
    generated: list[int] = field(default_factory=list)
    run: str = ""


class FakeEngine:
    """Drives a core with virtual time; `fail_next_load` and `fail_next_call` inject one fault each."""

    def __init__(self, settings: CoreSettings, seed: int = 0) -> None:
        self.core = Core(settings)
        self.settings = settings
        self.now_ms = 0.0
        self.rng = random.Random(seed)
        self.slots: list[list[int]] = [[] for _ in range(settings.slots)]
        self.segments: dict[int, list[int]] = {}
        self.jobs: dict[int, Job] = {}
        self.records: list[TurnRecord] = []
        self.deaths: list[act.DeathNotice] = []
        self.refused: list[act.TurnRefused] = []
        self.plans: list[act.StepPlan] = []
        self.histories: dict[str, list[int]] = {}
        self.fail_next_load = False
        self.fail_next_call = False
        self._next_turn = 1
        self._promised: act.StepPlan | None = None

    def arrive(
        self,
        prompt: list[int],
        *,
        length: int = 4,
        run: str | None = None,
        parent: str | None = None,
        group: str | None = None,
        salt: str = "",
        max_new: int | None = None,
        final: bool = False,
        logprobs: bool = False,
        forced: Sequence[int] = (),
        opening: int = 0,
    ) -> int:
        """A prompt arrives; returns its turn id."""
        turn = self._next_turn
        self._next_turn += 1
        self.jobs[turn] = Job(prompt, length, list(forced))
        fact = TurnArrived(
            at_ms=self.now_ms,
            turn=turn,
            salt=salt,
            prompt=Prompt(np.array(prompt, np.int32)),
            max_new_tokens=max_new or length,
            fresh=f"fresh-{turn}",
            run=run,
            parent=parent,
            group=group,
            origin=RunOrigin.HEADER if run else RunOrigin.INFERRED,
            final=final,
            needs_prompt_logits=logprobs,
            opening=opening,
        )
        self.apply_actions(self.core.handle(fact))
        check(self.core)
        return turn

    def step(self) -> act.StepPlan:
        """Plan, apply, report."""
        if self.now_ms >= self.core.due_ms:
            self.apply_actions(self.core.handle(TimePassed(at_ms=self.now_ms)))
        plan = self.core.plan(self.now_ms)
        if self._promised is not None:
            assert (plan.moves, plan.calls) == ((), self._promised.calls), "a plan that repeats is made again"
            assert plan.repeat == self._promised.repeat - 1
        self.plans.append(plan)
        self.deaths += plan.deaths
        failed_slots: set[int] = set()
        moves = tuple(self._move(move, failed_slots) for move in plan.moves)
        sampled: list[tuple[int, bool]] = []
        times: list[float] = []
        for call in plan.calls:
            times.append(self._call(call, failed_slots, sampled))
            self.now_ms += max(0.0, times[-1])
        self.now_ms += 1.0
        if plan.moves or plan.calls:
            done = StepDone(at_ms=self.now_ms, plan=plan.seq, moves=moves, calls_ms=tuple(times))
            self.apply_actions(self.core.handle(done))
        waiting = any(turn.phase is not Phase.DECODE for turn in self.core.state.turns.values())
        self._promised = plan if plan.repeat > 1 and not waiting else None
        for turn, ok in sampled:
            if ok:
                self._force(turn)
            if not ok:
                self.end(turn, EndReason.FAILED)
            elif len(self.jobs[turn].generated) >= self.jobs[turn].length:
                self.end(turn, EndReason.LENGTH)
        check(self.core)
        self._check_bytes()
        return plan

    def run_all(self, limit: int = 10_000) -> None:
        """Step until no turn is in flight."""
        for _ in range(limit):
            if not self.jobs:
                return
            self.step()
        raise AssertionError(f"turns {sorted(self.jobs)} never finished")

    def serve(self, prompt: list[int], **options: object) -> TurnRecord:
        """One turn from arrival to end; returns its record."""
        self.arrive(prompt, **options)  # type: ignore[arg-type]
        self.run_all()
        return self.records[-1]

    def end(self, turn: int, reason: EndReason) -> None:
        """A turn ends for a reason of the executor's."""
        job = self.jobs.pop(turn)
        if reason is EndReason.FAILED:
            slot = self.core.state.turns[turn].slot
            if slot is not None:
                self.slots[slot] = []
        generated = np.array(job.generated, np.int32)
        self.apply_actions(
            self.core.handle(TurnEnded(at_ms=self.now_ms, turn=turn, reason=reason, generated=generated))
        )
        self.histories[job.run] = job.prompt + job.generated
        check(self.core)

    def apply_actions(self, actions: list[act.Action]) -> None:
        """Apply what the core asks for at once."""
        self._promised = None  # a fact came in
        for action in actions:
            match action:
                case act.SplitSegment(node, upper, tokens):
                    whole = self.segments[node]
                    self.segments[upper], self.segments[node] = whole[:tokens], whole[tokens:]
                case act.DropSegment(node):
                    del self.segments[node]
                case act.TurnAccepted(turn, key, _, _):
                    self.jobs[turn].run = key.run
                case act.TurnRefused(turn):
                    del self.jobs[turn]
                    self.refused.append(action)
                case act.TurnRecorded(_, record):
                    self.records.append(record)
                case act.DeathNotice():
                    self.deaths.append(action)

    def _move(self, move: act.Move, failed_slots: set[int]) -> MoveTiming:
        per_token = self.settings.bytes_per_token
        match move:
            case act.Save(slot, pieces, release):
                for piece in pieces:
                    assert piece.node not in self.segments, "a node is saved once"
                    assert len(self.slots[slot]) >= piece.end, "a slot holds what is saved from it"
                    if self.settings.memory is MemoryKind.CHECKPOINTS:
                        assert len(self.slots[slot]) == piece.end, "a state is saved where it stands"
                    self.segments[piece.node] = self.slots[slot][piece.start : piece.end]
                if release:
                    self.slots[slot] = []
                return MoveTiming(True, sum(p.end - p.start for p in pieces) * per_token, 1.0)
            case act.Load(slot, turn, pieces):
                if self.fail_next_load:
                    self.fail_next_load = False
                    self.slots[slot] = []
                    failed_slots.add(slot)
                    return MoveTiming(False, 0, 1.0)
                assert all(p.start < p.end for p in pieces), "no piece is empty"
                loaded = [s for p in pieces for s in self.segments[p.node][: p.end - p.start]]
                assert loaded == self.jobs[turn].prompt[: len(loaded)], "what is loaded is the prompt's own prefix"
                assert len(loaded) == pieces[-1].end, "pieces are whole and in order"
                self.slots[slot] = loaded
                return MoveTiming(True, len(loaded) * per_token, 1.0)
            case act.Trim(slot, turn, tokens):
                assert len(self.slots[slot]) > tokens or tokens == 0, "a trim shortens"
                self.slots[slot] = self.slots[slot][:tokens]
                assert self.slots[slot] == self.jobs[turn].prompt[:tokens], "what is kept is the prompt's own prefix"
                if self.settings.memory is MemoryKind.CHECKPOINTS:
                    assert tokens == 0, "checkpoint memory is never cut"
            case act.Drop(node):
                del self.segments[node]
        return MoveTiming(True, 0, 0.0)

    def _call(self, call: act.Call, failed_slots: set[int], sampled: list[tuple[int, bool]]) -> float:
        if isinstance(call, act.Prefill):
            if call.slot in failed_slots:
                return -1.0
            job = self.jobs[call.turn]
            assert self.slots[call.slot] == job.prompt[: call.start], "a slice continues what its slot holds"
            if self.fail_next_call:
                self.fail_next_call = False
                sampled.append((call.turn, False))
                return -1.0
            self.slots[call.slot] += job.prompt[call.start : call.end]
            if call.last:
                assert call.end == len(job.prompt)
                self._sample(job)
                sampled.append((call.turn, True))
            count = call.end - call.start
            return 5.0 + 1.4 * count + 0.0011 * count * call.start
        if isinstance(call, act.Extend):
            return self._extend(call, sampled)
        slots = [slot for _, slot in call.turns]
        assert slots == sorted(set(slots)), "slots ascend"
        for turn, slot in call.turns:
            job = self.jobs[turn]
            assert job.pending == 1, "a decode feeds the only token that is pending"
            assert self.slots[slot] == job.prompt + job.generated[:-1], "a decode continues what its slot holds"
            job.pending = 0
            self.slots[slot].append(job.generated[-1])
            self._sample(job)
            sampled.append((turn, True))
        return 6.0 + 3.0 * len(slots)

    def _sample(self, job: Job) -> None:
        job.generated.append(self.rng.randrange(3))
        job.pending += 1

    def _force(self, turn: int) -> None:
        job = self.jobs[turn]
        count = min(job.forced.pop(0) if job.forced else 0, job.length - len(job.generated))
        if count:
            job.generated += [self.rng.randrange(3) for _ in range(count)]
            job.pending += count
            self.apply_actions(self.core.handle(TokensForced(at_ms=self.now_ms, turn=turn, tokens=count)))

    def _extend(self, call: act.Extend, sampled: list[tuple[int, bool]]) -> float:
        job, count = self.jobs[call.turn], call.end - call.start
        assert 0 < count <= self.settings.max_slice_tokens, "a pass holds no more than a slice"
        assert job.pending > 1, "an extension feeds forced tokens"
        assert call.start == len(job.generated) - job.pending, "an extension starts at what is pending"
        assert self.slots[call.slot] == job.prompt + job.generated[: call.start], "it continues what its slot holds"
        assert call.last == (call.end == len(job.generated)), "the last pass ends at the last token"
        if self.fail_next_call:
            self.fail_next_call = False
            sampled.append((call.turn, False))
            return -1.0
        self.slots[call.slot] += job.generated[call.start : call.end]
        job.pending -= count
        if call.last:
            self._sample(job)
            sampled.append((call.turn, True))
        return 5.0 + 1.4 * count

    def _check_bytes(self) -> None:
        held = {node.id: node for node in self.core.state.retention.held()}
        assert held.keys() == self.segments.keys(), "the account lists the segments there are"
        for node_id, symbols in self.segments.items():
            node = held[node_id]
            whole = self.settings.memory is MemoryKind.CHECKPOINTS
            expected = [s for n in (node.path() if whole else [node]) for s in n.symbols.tolist()]
            assert symbols == expected, "a segment holds its node's tokens"
