"""Concurrent agents on the policy core alone, in virtual time: what `identity.py` measures with."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from time import perf_counter

import numpy as np

from trunkline.core.actions import Decode, Prefill, StepPlan, TurnAccepted, TurnRecorded
from trunkline.core.facts import MoveTiming, StepDone, TurnArrived, TurnEnded
from trunkline.core.policy import Core
from trunkline.core.types import CoreSettings, EndReason, Ints, Prompt, Relation, TurnId

PREFILL_MS, DECODE_MS = 0.02, 10.0
"""What a token of a prompt, and a step of all answers, takes."""
FORK_TOKENS = 60
SHARED_OPENING = 5
"""A fork opens with up to so many of the symbols that the run itself went on with: the template's."""
GENERATED_FROM = 1 << 30
"""Numbers of made-up symbols."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One turn: what is sent, what is answered, how long after the last answer it comes."""

    prompt: Prompt
    answer: Ints
    gap_ms: float


@dataclass(slots=True, eq=False)
class Agent:
    """One task. `children` begin when so many of its turns have ended."""

    task: str
    steps: Iterator[Step]
    begin_ms: float = 0.0
    forked_from: str | None = None
    turns: int = 0
    history: int = 0
    ended: list[Step] = field(default_factory=list)
    """Its latest turns."""
    children: dict[int, list["Agent"]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Given:
    """What the core made of one turn: its run, and that run's parent. `history` stands for all up to its answer."""

    task: str
    forked_from: str | None
    run: str
    parent: str | None
    relation: Relation
    history: int


@dataclass(slots=True, eq=False)
class _Flight:
    agent: Agent
    step: Step
    left: int


class Drive:
    """Plays agents and notes whose each turn was taken for. `forks` of their turns are forked."""

    def __init__(self, seed: int, forks: int) -> None:
        self._core = Core(
            CoreSettings(
                slots=64,
                slot_tokens=1 << 40,
                host_bytes=0,
                bytes_per_token=1,
                step_budget_ms=1e12,
                max_slice_tokens=1 << 40,
                max_queue=1 << 20,
            )
        )
        self._random = random.Random(seed)
        self._forks = forks
        self._made = GENERATED_FROM
        self._now = 0.0
        self._due: list[tuple[float, int, Agent, Step]] = []
        self._flying: dict[TurnId, _Flight] = {}
        self._given: dict[TurnId, Given] = {}
        self._next = 0
        self.arrival_ms: list[float] = []

    def play(self, agents: Iterator[Agent]) -> list[Given]:
        """Until all have ended. `agents` come in order of their beginning, and are asked for when it is time."""
        waiting = next(agents, None)
        while waiting is not None or self._due or self._flying:
            while waiting is not None and (not (self._due or self._flying) or waiting.begin_ms <= self._now):
                self._come(waiting, waiting.begin_ms)
                waiting = next(agents, None)
            if self._due and (not self._flying or self._due[0][0] <= self._now):
                at, _, agent, step = heappop(self._due)
                self._now = max(self._now, at)
                self._arrive(agent, step)
            elif self._flying:
                self._step(min(self._due[0][0] if self._due else np.inf, waiting.begin_ms if waiting else np.inf))
        return [self._given[turn] for turn in sorted(self._given)]

    def _come(self, agent: Agent, after_ms: float) -> None:
        """The agent's next turn is due, if it has one."""
        step = next(agent.steps, None)
        if step is not None:
            self._next += 1
            heappush(self._due, (after_ms + step.gap_ms, self._next, agent, step))

    def _arrive(self, agent: Agent, step: Step) -> None:
        self._next += 1
        turn = self._next
        fact = TurnArrived(
            at_ms=self._now,
            turn=turn,
            salt="",
            prompt=step.prompt,
            max_new_tokens=len(step.answer) + 1,
            fresh=f"run-{turn}",
        )
        begin = perf_counter()
        actions = self._core.handle(fact)
        self.arrival_ms.append((perf_counter() - begin) * 1e3)
        (accepted,) = (action for action in actions if isinstance(action, TurnAccepted))
        relation = self._core.state.turns[turn].record.relation
        agent.history = hash((agent.history, step.prompt.symbols.tobytes(), step.answer.tobytes()))
        run, parent = accepted.run.run, accepted.parent
        self._given[turn] = Given(agent.task, agent.forked_from, run, parent, relation, agent.history)
        self._flying[turn] = _Flight(agent, step, len(step.answer))

    def _step(self, until_ms: float) -> None:
        plan = self._core.plan(self._now)
        assert plan.calls, "turns in flight are always planned"
        repeats = self._repeats(plan, until_ms)
        times = []
        for call in plan.calls:
            if isinstance(call, Prefill):
                times.append((call.end - call.start) * PREFILL_MS)
                self._flying[call.turn].left -= call.last
            else:
                assert isinstance(call, Decode), "nothing is forced here"
                times.append(DECODE_MS * repeats)
                for turn, _ in call.turns:
                    self._flying[turn].left -= repeats
        self._now += sum(times)
        moves = tuple(MoveTiming(True, 0, 0.0) for _ in plan.moves)
        self._core.handle(StepDone(at_ms=self._now, plan=plan.seq, moves=moves, calls_ms=tuple(times), repeats=repeats))
        for turn in [turn for turn, flight in self._flying.items() if not flight.left]:
            self._end(turn)

    def _repeats(self, plan: StepPlan, until_ms: float) -> int:
        """How often the plan may be applied before a turn ends or the next arrives."""
        turns = [turn for call in plan.calls if isinstance(call, Decode) for turn, _ in call.turns]
        soonest = min((self._flying[turn].left for turn in turns), default=1)
        room = max(1.0, (until_ms - self._now) // DECODE_MS)
        return int(max(1, min(plan.repeat, soonest, room)))

    def _end(self, turn: TurnId) -> None:
        flight = self._flying.pop(turn)
        agent, step = flight.agent, flight.step
        (ended,) = (
            action
            for action in self._core.handle(
                TurnEnded(at_ms=self._now, turn=turn, reason=EndReason.STOP, generated=step.answer)
            )
            if isinstance(action, TurnRecorded)
        )
        assert ended.record.completion_tokens == len(step.answer)
        agent.turns += 1
        agent.ended = [*agent.ended[-3:], step]
        for child in agent.children.pop(agent.turns, ()):
            self._come(child, self._now)
        self._come(agent, self._now)
        self._fork(agent)

    # --- forks --------------------------------------------------------------------------------------------------

    def _fork(self, agent: Agent) -> None:
        """Now and then: a copy of the history one to three turns ago goes another way."""
        if agent.forked_from is not None or not self._forks or agent.turns < 5 or self._random.random() > 0.2:
            return
        at = self._random.randrange(3)
        base, after = agent.ended[at : at + 2]
        known, grown = base.prompt.symbols, after.prompt.symbols
        if len(grown) == len(known) or not np.array_equal(grown[: len(known)], known):
            return  # the run went elsewhere, or sent this again: what comes here may as well be the run itself
        self._forks -= 1
        task = f"{agent.task} fork {self._forks}"
        self._come(Agent(task, self._forked(base, after), forked_from=agent.task), self._now)

    def _forked(self, base: Step, after: Step) -> Iterator[Step]:
        """Two turns: the same prompt again, or its answer and something new behind it; then the fork's own answer."""
        prompt, gap = base.prompt, self._random.uniform(0, 2000)
        if self._random.random() < 0.5:
            known = len(base.prompt.symbols) + len(base.answer)
            opening = after.prompt.symbols[known : known + self._random.randrange(SHARED_OPENING + 1)]
            prompt = _longer(prompt, base.answer, opening, self._invent(FORK_TOKENS))
        answer = self._invent(FORK_TOKENS)
        yield Step(prompt, answer, gap)
        yield Step(_longer(prompt, answer, self._invent(FORK_TOKENS)), self._invent(FORK_TOKENS), 500.0)

    def _invent(self, count: int) -> Ints:
        self._made += count
        return np.arange(self._made - count, self._made, dtype=np.int32)


def _longer(prompt: Prompt, *more: Ints) -> Prompt:
    symbols = np.concatenate((prompt.symbols, *more))
    if prompt.weights is None:
        return Prompt(symbols)
    ones = np.ones(len(symbols) - len(prompt.symbols), np.int32)
    return Prompt(symbols, np.concatenate((prompt.weights, ones)))
