"""Everything that decisions rest on, in one place; the modules of the core read and change it."""

from trunkline.core.actions import Action, SplitSegment
from trunkline.core.admission import AdmissionControl
from trunkline.core.landmarks import Landmarks
from trunkline.core.placement import Placement
from trunkline.core.predict import CostModel, Forecast
from trunkline.core.prefix import PrefixTree, Split
from trunkline.core.retention import Retention
from trunkline.core.runs import Run, RunTable
from trunkline.core.schedule import Scheduler
from trunkline.core.slots import Slot
from trunkline.core.turns import Turn
from trunkline.core.types import CoreSettings, MemoryKind, TurnId

IDLE_MS = 3_600_000.0
"""A run that waited for an hour is presumed over: 99 % of tool gaps in public coding traces are shorter. (Admission
counts silent runs by what was learned of their likes, `core/habits.py`, and forgets them sooner.)"""


class State:
    """The tree, the runs, the turns in flight, the slots and the accounts."""

    def __init__(self, settings: CoreSettings) -> None:
        self.settings = settings
        self.tree = PrefixTree()
        self.runs = RunTable()
        self.landmarks = Landmarks()
        self.turns: dict[TurnId, Turn] = {}
        self.slots = [Slot(i) for i in range(settings.slots)]
        self.costs = CostModel()
        self.forecast = Forecast()
        self.retention = Retention(settings, self.costs, self.forecast)
        self.placement = Placement(settings, self.tree, self.slots, self.retention, self.costs)
        self.scheduler = Scheduler(settings, self.costs)
        self.admission = AdmissionControl(settings, self.costs)
        self.broken_promises = 0

    @property
    def checkpoints(self) -> bool:
        """Whether only whole saved states can be reused."""
        return self.settings.memory is MemoryKind.CHECKPOINTS

    def follow(self, split: Split | None) -> list[Action]:
        """A node was cut: the byte account and the executor's segment are cut with it."""
        if split is None:
            return []
        held = split.node.host
        self.retention.split(split.node, split.upper)
        return [SplitSegment(split.node.id, split.upper.id, split.tokens)] if held and not self.checkpoints else []

    def forget(self, runs: list[Run]) -> None:
        """Nothing is learned any more of runs that are remembered no longer."""
        for run in runs:
            self.forecast.forget(run.key)
            self.admission.over(run.key)

    def tidy(self, now_ms: float) -> None:
        """Bound what is remembered: runs that waited too long are presumed over, and the tree keeps to its limit.

        Past the limit the longest unused leaves that hold nothing are forgotten; if open runs keep too much of the tree
        alive, those that waited longest are presumed over first.
        """
        self.admission.look_again(now_ms)
        self.runs.presume_finished(now_ms - IDLE_MS)
        limit = self.settings.max_tree_symbols
        if self.tree.symbols <= limit:
            return
        self._prune(limit - limit // 10)
        before = self.tree.symbols + 1
        while limit < self.tree.symbols < before and self.runs.presume_oldest_finished():
            before = self.tree.symbols
            self._prune(limit - limit // 10)

    def _prune(self, target_symbols: int) -> None:
        standing = [slot.leaf for slot in self.slots] + [turn.leaf for turn in self.turns.values()]
        kept = {node.id for leaf in standing if leaf is not None for node in leaf.path()}
        for node in self.tree.prune(target_symbols, kept):
            for key in node.prompt_ends:
                self.runs.unmark(key, node)
            for key in node.leaves:
                run = self.runs.get(key)
                if run is not None:
                    run.leaf = None
