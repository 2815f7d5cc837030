"""One simulation: agents, a node and the clock that joins them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from trunkline.core.policy import Core
from trunkline.core.turns import Phase
from trunkline.core.types import CoreSettings
from trunkline.sim.agents import Agents, Workload
from trunkline.sim.clock import Clock
from trunkline.sim.costs import Costs, Noise
from trunkline.sim.faults import Faults
from trunkline.sim.figures import Sample
from trunkline.sim.memory import Memory
from trunkline.sim.node import Node
from trunkline.wire.journal import Journal
from trunkline.wire.traces import Session

IDLE_POLL_MS = 500.0
"""A node with turns but nothing to do looks again after this, as the embedded engine does."""
SAMPLES = 512
"""The timeline has at most this many points: when it is full, every other one goes."""


@dataclass(slots=True)
class Timeline:
    """State over time, sampled ever more coarsely."""

    samples: list[Sample] = field(default_factory=list)
    every_ms: float = 1000.0

    def due(self, now_ms: float) -> bool:
        """Whether the last sample is old enough."""
        return not self.samples or now_ms >= self.samples[-1].at_ms + self.every_ms

    def add(self, sample: Sample) -> None:
        """One more point."""
        self.samples.append(sample)
        if len(self.samples) >= SAMPLES:
            self.samples = self.samples[::2]
            self.every_ms *= 2


class Simulation:
    """Sessions played on one node until all are over."""

    def __init__(
        self,
        sessions: Iterable[Session],
        workload: Workload,
        settings: CoreSettings,
        costs: Costs,
        *,
        noise: Noise | None = None,
        faults: Faults | None = None,
        journal: Journal | None = None,
        memory: Callable[[CoreSettings], Memory] | None = None,
        check: Callable[[Core], None] | None = None,
        skip_ahead: bool = True,
    ) -> None:
        self.clock = Clock()
        self.agents = Agents(sessions, workload, self.clock, costs, settings.max_slice_tokens)
        self.node = Node(
            settings,
            costs,
            self.agents,
            noise=noise,
            faults=faults,
            journal=journal,
            memory=memory,
            check=check,
            skip_ahead=skip_ahead,
        )
        self.agents.node = self.node
        self.timeline = Timeline()
        self._polled_ms = -IDLE_POLL_MS
        self.agents.open()

    def run(self, until_ms: float = float("inf"), on_event: Callable[[], None] | None = None) -> None:
        """Play until every session is over, or until a time. Raises what the core raises."""
        while self.clock.next_ms <= until_ms and self.clock.advance():
            if on_event is not None:
                on_event()
            if self.clock.next_ms > self.clock.now_ms:
                self._start_step()

    def restart_node(self) -> None:
        """The node's process dies and comes back."""
        self.node.restart(self.clock.now_ms)
        self.agents.node_died()

    def _start_step(self) -> None:
        """Everything that happened at this time is known: the node plans, if it is free."""
        node, now_ms = self.node, self.clock.now_ms
        if self.timeline.due(now_ms):
            self.timeline.add(self._sample())
        if node.step is not None:
            return
        ends_ms = node.begin(now_ms, self.clock.next_ms)
        if ends_ms is not None:
            step = node.step
            self.clock.at(ends_ms, lambda: node.end_step() if node.step is step else None)
        elif node.live and now_ms >= self._polled_ms + IDLE_POLL_MS:
            self._polled_ms = now_ms
            self.clock.at(now_ms + IDLE_POLL_MS, lambda: None)

    def _sample(self) -> Sample:
        state = self.node.core.state
        queued = sum(turn.phase is Phase.QUEUED for turn in state.turns.values())
        return Sample(
            at_ms=self.clock.now_ms,
            open_sessions=self.agents.open_sessions,
            running=len(state.turns) - queued,
            queued=queued,
            slot_tokens=sum(slot.held for slot in state.slots),
            host_bytes=state.retention.host_bytes,
            turns=len(self.agents.turns),
        )
