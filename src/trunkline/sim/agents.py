"""Closed-loop agents: each session plays its runs' turns in order, waits its tool gaps, forks and joins its sub-agents.

The next turn of a run arrives when the one before has ended, its sub-agents are joined and its tools are done, so load
answers to service, as it does with real agents. How sessions begin is the workload's: `LANES` keeps a number open (a
session that ends makes room for the next), `ALL` begins them together, `POISSON` at a rate whatever happens.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from trunkline.core.actions import TurnRefused
from trunkline.core.types import EndReason, RunKey, TurnId, TurnRecord
from trunkline.sim.clock import Clock
from trunkline.sim.costs import Costs, ideal_turn_ms
from trunkline.sim.figures import RunOutcome, TurnOutcome
from trunkline.sim.node import LiveTurn, Node
from trunkline.wire.symbols import SymbolTable, TurnSymbols
from trunkline.wire.traces import RunTrace, Session

LEFT = "the client left"
NOT_FED_BACK = -1
"""The token of answers that no prompt holds."""
TRIES = 4
"""How often an agent sends a turn that fails before its run gives up."""


class Answers(StrEnum):
    """Whether later prompts hold what a turn generated: `FED_BACK` where the trace has room for it, or never."""

    FED_BACK = "fed-back"
    APART = "apart"


class Arrival(StrEnum):
    """How sessions begin."""

    LANES = "lanes"
    ALL = "all"
    POISSON = "poisson"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """How a trace is played.

    `load` is the number of lanes, or sessions an hour (`POISSON`). Lanes open evenly over `ramp_ms`. Tool gaps are
    multiplied by `gap_scale`, then capped at `gap_cap_ms`; an unknown one counts as `unknown_gap_ms`. Turns may
    generate `max_new_tokens`, or exactly what they will generate if that is None (as `trunkline bench` asks). Runs that
    complete say so if `finishes`; most agents never do.
    """

    arrival: Arrival = Arrival.LANES
    load: float = 4.0
    ramp_ms: float = 0.0
    gap_scale: float = 1.0
    gap_cap_ms: float = 60_000.0
    unknown_gap_ms: float = 0.0
    max_new_tokens: int | None = None
    answers: Answers = Answers.FED_BACK
    finishes: bool = False
    seed: int = 0


@dataclass(slots=True, eq=False)
class Play:
    """One session being played; `open_runs` of it are not over."""

    session: Session
    symbols: dict[str, Iterator[TurnSymbols]]
    open_runs: int = 0


@dataclass(slots=True, eq=False)
class Agent:
    """One run being played. `ideal_ms` is its clock if every reusable token hit and nothing queued."""

    run: RunTrace
    key: RunKey
    parent: "Agent | None"
    play: Play
    outcome: RunOutcome
    ideal_ms: float
    next_turn: int = 0
    submitted_ms: float = 0.0
    tries: int = 0
    joining: dict[str, "Agent"] = field(default_factory=dict)
    """Sub-agents that a later turn waits for."""
    waiting: bool = False
    """Its next turn waits for one of them now."""
    turn: LiveTurn | None = None
    left: bool = False
    """Its client is gone."""


class Agents:
    """Plays sessions on a node. `turns` and `runs` fill up while the clock runs."""

    def __init__(
        self, sessions: Iterable[Session], workload: Workload, clock: Clock, costs: Costs, slice_tokens: int
    ) -> None:
        """`costs` and `slice_tokens` are those of the ideal that stretch is measured against."""
        self.turns: list[TurnOutcome] = []
        self.runs: list[RunOutcome] = []
        self.open_sessions = 0
        self.exhausted = False
        self.in_flight: dict[TurnId, Agent] = {}
        self.playing: dict[str, Agent] = {}
        """Runs that are not over, by their ids."""
        self.node: Node | None = None
        self._waiting: Iterator[Session] = iter(sessions)
        self._workload, self._clock, self._costs, self._slice_tokens = workload, clock, costs, slice_tokens
        self._symbols = SymbolTable()
        self._rng = random.Random(f"arrivals {workload.seed}")
        self._next_id = 1

    # --- sessions -----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Schedule the first sessions."""
        if self._workload.arrival is not Arrival.LANES:
            self._clock.at(0.0, self._session_begins)
            return
        lanes = max(1, int(self._workload.load))
        for lane in range(lanes):
            self._clock.at(self._workload.ramp_ms * lane / lanes, self._session_begins)

    def _session_begins(self) -> None:
        session = next(self._waiting, None)
        if session is None:
            self.exhausted = True
            return
        if self._workload.arrival is Arrival.ALL:
            self._clock.at(self._clock.now_ms, self._session_begins)
        elif self._workload.arrival is Arrival.POISSON:
            gap_ms = self._rng.expovariate(self._workload.load) * 3.6e6
            self._clock.at(self._clock.now_ms + gap_ms, self._session_begins)
        self.open_sessions += 1
        self._begin(session[0], Play(session, self._symbols.session(session)), None)

    def _begin(self, run: RunTrace, play: Play, parent: Agent | None) -> Agent:
        now_ms = self._clock.now_ms
        outcome = RunOutcome(run=run.id, session=play.session[0].id, kind=run.kind, began_ms=now_ms)
        ideal_ms = now_ms if parent is None else parent.ideal_ms
        agent = Agent(run, RunKey("", run.id), parent, play, outcome, ideal_ms)
        outcome.ideal_ms = -ideal_ms  # its end is added when it is over
        play.open_runs += 1
        self.runs.append(outcome)
        self.playing[run.id] = agent
        self._go_on(agent)
        return agent

    def _over(self, agent: Agent, error: str | None = None) -> None:
        outcome, parent, play = agent.outcome, agent.parent, agent.play
        outcome.ended_ms, outcome.error = self._clock.now_ms, error
        outcome.ideal_ms += agent.ideal_ms
        play.open_runs -= 1
        agent.waiting = False
        del self.playing[agent.run.id]
        if self._workload.finishes and self.node is not None and error is None:
            self.node.finish(agent.key, self._clock.now_ms)
        if parent is not None and parent.joining.pop(agent.run.id, None) is not None:
            parent.ideal_ms = max(parent.ideal_ms, agent.ideal_ms)
            if parent.waiting:
                self._when_joined(parent)
        if play.open_runs == 0:
            self.open_sessions -= 1
            if self._workload.arrival is Arrival.LANES:
                self._clock.at(self._clock.now_ms, self._session_begins)

    # --- turns --------------------------------------------------------------------------------------------------

    def _go_on(self, agent: Agent) -> None:
        """A turn ended, or the run begins: fork what forks here, then wait for what the next turn waits for."""
        for child in agent.play.session:
            if child.fork is None or child.fork.parent != agent.run.id or child.fork.after != agent.next_turn:
                continue
            begun = self._begin(child, agent.play, agent)
            if child.fork.joins is not None and begun.outcome.ended_ms is None:
                agent.joining[child.id] = begun
        self._when_joined(agent)

    def _when_joined(self, agent: Agent) -> None:
        """Start the next turn's tool gap, or end the run, once no sub-agent that is waited for is running."""
        last = agent.next_turn >= len(agent.run.turns)
        agent.waiting = any(last or joins_at(child.run) <= agent.next_turn for child in agent.joining.values())
        if agent.waiting:
            return
        if last:
            self._over(agent)
            return
        gap_ms = self._gap_ms(agent)
        agent.ideal_ms += gap_ms
        self._clock.at(self._clock.now_ms + gap_ms, lambda: self._send(agent))

    def _gap_ms(self, agent: Agent) -> float:
        if agent.next_turn == 0 and agent.run.fork is None:
            return 0.0
        gap_ms = agent.run.turns[agent.next_turn].gap_ms
        gap_ms = self._workload.unknown_gap_ms if gap_ms is None else gap_ms
        return min(gap_ms * self._workload.gap_scale, self._workload.gap_cap_ms)

    def _send(self, agent: Agent) -> None:
        """The tools are done: the next turn is sent."""
        if agent.left:
            return
        symbols = next(agent.play.symbols[agent.run.id])
        answer = symbols.answer
        if self._workload.answers is Answers.APART:
            answer = np.full(len(answer), NOT_FED_BACK, np.int32)
        most = max(len(answer), self._workload.max_new_tokens or 0)
        parent = agent.parent.key.run if agent.parent is not None else None
        agent.submitted_ms, agent.tries = self._clock.now_ms, 0
        self._submit_soon(agent, LiveTurn(0, agent.key, parent, symbols.prompt, answer, most), 0.0)

    def _submit_soon(self, agent: Agent, turn: LiveTurn, after_ms: float) -> None:
        """Send a turn; what turns cost besides steps is spent before it arrives."""
        self._clock.at(self._clock.now_ms + after_ms + self._costs.turn_ms, lambda: self._submit(agent, turn))

    def _submit(self, agent: Agent, turn: LiveTurn) -> None:
        assert self.node is not None
        if agent.left:
            return
        agent.tries += 1
        agent.turn = turn = replace(turn, id=self._next_id, generated=0, first_token_ms=None)
        self._next_id += 1
        self.in_flight[turn.id] = agent
        self.node.submit(turn, self._clock.now_ms)

    def refused(self, turn: LiveTurn, refusal: TurnRefused) -> None:
        """The node does not serve it: try again when it says so, or give up."""
        agent = self.in_flight.pop(turn.id)
        agent.outcome.refusals += 1
        agent.outcome.late_refusals += refusal.retry_after_s is not None and agent.next_turn > 0
        if agent.left:
            self._over(agent, LEFT)
            return
        if refusal.retry_after_s is None:
            self._over(agent, f"turn {agent.next_turn} refused: {refusal.why}")
            return
        agent.tries -= 1
        if agent.next_turn == 0:
            outside_ms = refusal.retry_after_s * 1e3 + self._costs.turn_ms
            agent.outcome.refused_ms += outside_ms
            agent.submitted_ms += outside_ms
        self._submit_soon(agent, turn, refusal.retry_after_s * 1e3)

    def ended(self, turn: LiveTurn, record: TurnRecord, reason: EndReason) -> None:
        """A turn is over: note it, and go on if it ended well."""
        agent = self.in_flight.pop(turn.id)
        self.turns.append(self._outcome(agent, turn, record, reason))
        if agent.left or reason is EndReason.ABORTED:
            self._over(agent, LEFT)
        elif reason is EndReason.FAILED:
            self.again(agent, turn)
        else:
            agent.outcome.turns += 1
            agent.ideal_ms += self.turns[-1].ideal_ms
            agent.next_turn += 1
            self._go_on(agent)

    def again(self, agent: Agent, turn: LiveTurn) -> None:
        """A turn failed, or its node died: send it again, a few times."""
        if agent.left:
            self._over(agent, LEFT)
        elif agent.tries >= TRIES:
            self._over(agent, f"turn {agent.next_turn} failed {TRIES} times")
        else:
            self._submit_soon(agent, turn, 0.0)

    def leave(self, agent: Agent) -> None:
        """The client vanishes, in whatever state its run is: nobody says that the run is over."""
        assert self.node is not None
        agent.left = True
        turn = agent.turn
        if turn is not None and turn.id in self.in_flight:
            self.node.cancel(turn, self._clock.now_ms)
        else:
            self._over(agent, LEFT)

    def node_died(self) -> None:
        """The node came back without the turns in flight: they are sent again."""
        for turn_id, agent in list(self.in_flight.items()):
            del self.in_flight[turn_id]
            assert agent.turn is not None
            self.again(agent, agent.turn)

    def _outcome(self, agent: Agent, turn: LiveTurn, record: TurnRecord, reason: EndReason) -> TurnOutcome:
        prompt, answer = record.prompt_tokens, len(turn.answer)
        ideal_ms = ideal_turn_ms(self._costs, prompt, record.reusable_tokens, answer, self._slice_tokens)
        return TurnOutcome(
            run=agent.run.id,
            session=agent.play.session[0].id,
            index=agent.next_turn,
            submitted_ms=agent.submitted_ms,
            first_token_ms=turn.first_token_ms,
            ended_ms=self._clock.now_ms,
            ideal_ms=ideal_ms,
            prompt_tokens=prompt,
            cached_tokens=record.cached_tokens,
            reusable_tokens=record.reusable_tokens,
            completion_tokens=turn.generated,
            recomputed_tokens=record.recomputed_tokens,
            reason=reason.value,
        )


def joins_at(run: RunTrace) -> int:
    """The parent's turn that waits for a sub-agent which somebody waits for."""
    assert run.fork is not None
    assert run.fork.joins is not None
    return run.fork.joins
