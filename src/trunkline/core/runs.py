"""The run table: lifecycle, branches, and where each run's prompts end."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from trunkline.core.digest import Digest, Remembered
from trunkline.core.facts import RunRestored
from trunkline.core.prefix import Node
from trunkline.core.types import NodeId, RunKey, RunOrigin, RunState

MOST_TIPS = 16


@dataclass(slots=True, eq=False)
class Run:
    """One trajectory. `leaf` is the end of its last turn (prompt and answer), `prompt_leaf` of its last prompt."""

    key: RunKey
    parent: str | None
    origin: RunOrigin
    seq: int
    group: str | None = None
    turns: int = 0
    in_flight: int = 0
    finished: bool = False
    admitted: bool = False
    """It was let in: none of its turns is refused for load."""
    leaf: Node | None = None
    prompt_leaf: Node | None = None
    ended_ms: float | None = None
    seen_ms: float = 0.0
    lost_tokens: int = 0
    """Tokens of its last prompt in an earlier process: what a restart made it lose."""
    marks: dict[NodeId, Node] = field(default_factory=dict)
    """The nodes that list this run among their prompt ends."""
    tips: dict[NodeId, bool] = field(default_factory=dict)
    """The latest of them that none of its later prompts extended, oldest first; True: answered. A run whose history was
    rewritten, or that alternates between contexts, has several."""
    first: Node | None = None
    """The end of its first prompt."""
    known_tokens: int = 0
    """Leading tokens of its first prompt that others had sent before: shared instructions and tools."""
    task_passages: int = 0
    """Passages by which the end of its first prompt, its task, is known."""
    answer_tokens: int = 0
    """Length of its last answer."""
    echoes: bool | None = None
    """Whether its client sends answers back; None: not known yet."""
    digest: Digest | None = None
    """Of its last prompt."""
    opening: int = 0
    """Symbols at the end of its last prompt that only opened the answer."""

    @property
    def state(self) -> RunState:
        """Derived: a finished run with a turn in flight is active again."""
        if self.in_flight:
            return RunState.ACTIVE
        return RunState.FINISHED if self.finished else RunState.WAITING


class RunTable:
    """The most recently used `keep` runs. Both orders are by last use, so that the oldest is found at once."""

    def __init__(self, keep: int = 20_000) -> None:
        self._runs: OrderedDict[RunKey, Run] = OrderedDict()
        self._open: OrderedDict[RunKey, Run] = OrderedDict()
        self._keep = keep
        self._next_seq = 0
        self.lost = Remembered()
        """Runs whose last prompt the tree does not hold: they are of an earlier process, or it was pruned."""

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    def __len__(self) -> int:
        return len(self._runs)

    def get(self, key: RunKey) -> Run | None:
        """The run of that name, if it is remembered."""
        return self._runs.get(key)

    def ensure(self, key: RunKey, parent: str | None, origin: RunOrigin, group: str | None = None) -> Run:
        """The run of that name, made now if it is new."""
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = self._open[key] = Run(key, parent, origin, self._next_seq, group)
            self._next_seq += 1
        return run

    def restore(self, fact: RunRestored) -> Run:
        """A run of an earlier process."""
        run = self.ensure(fact.key, fact.parent, fact.origin, fact.group)
        run.turns, run.lost_tokens, run.digest = fact.turns, fact.prompt_tokens, Digest.parse(fact.digest)
        run.admitted = True
        if run.digest is not None:
            self.lost.add(run.key, run.digest)
        return run

    def move_leaf(self, run: Run, leaf: Node) -> None:
        """The run's trajectory now ends at `leaf`."""
        old, run.leaf = run.leaf, leaf
        if old is not None:
            del old.leaves[run.key]
        leaf.leaves[run.key] = not run.finished
        if not run.finished:
            _count(leaf, 1)
            if old is not None:
                _count(old, -1)

    def set_finished(self, run: Run, finished: bool) -> None:
        """Close or reopen a run; a closed one counts for nothing when values are compared."""
        if run.finished == finished:
            return
        run.finished = finished
        if finished:
            self._open.pop(run.key, None)
        else:
            self._open[run.key] = run
        if run.leaf is not None:
            run.leaf.leaves[run.key] = not finished
            _count(run.leaf, -1 if finished else 1)

    def presume_finished(self, idle_since_ms: float) -> None:
        """Close every waiting run that was last seen before `idle_since_ms`. A turn that comes after all reopens it."""
        while (run := next(self._oldest_open(), None)) is not None and run.seen_ms < idle_since_ms:
            self.set_finished(run, True)

    def presume_oldest_finished(self) -> bool:
        """Close a tenth of the waiting runs, those last seen longest ago; False if none waits."""
        oldest = list(islice(self._oldest_open(), 1 + len(self._open) // 10))
        for run in oldest:
            self.set_finished(run, True)
        return bool(oldest)

    def _oldest_open(self) -> Iterator[Run]:
        return (run for run in self._open.values() if not run.in_flight)

    def mark_prompt(self, run: Run, node: Node, digest: Digest) -> None:
        """The next of the run's prompts ends at `node`."""
        self._recall(run)
        run.digest = digest
        node.prompt_ends[run.key] = run.turns
        run.marks[node.id] = node
        run.prompt_leaf = node
        if run.turns == 0:
            run.first = node
        above: Node | None = node
        while above is not None and run.tips:
            run.tips.pop(above.id, None)
            above = above.parent
        run.tips[node.id] = False
        if len(run.tips) > MOST_TIPS:
            del run.tips[next(iter(run.tips))]

    def unmark(self, key: RunKey, node: Node) -> None:
        """The tree has forgotten `node`, where one of the run's prompts ended."""
        run = self._runs.get(key)
        if run is None:
            return
        run.marks.pop(node.id, None)
        run.tips.pop(node.id, None)
        if run.prompt_leaf is node:
            run.prompt_leaf = None
            if run.digest is not None:
                self.lost.add(run.key, run.digest)
        run.first = None if run.first is node else run.first

    def touch(self, run: Run, at_ms: float) -> list[Run]:
        """Make `run` the most recently used; returns the runs that are forgotten for it."""
        run.seen_ms = at_ms
        self._runs[run.key] = self._runs.pop(run.key)
        if not run.finished:
            self._open[run.key] = self._open.pop(run.key)
        excess = len(self._runs) - self._keep
        if excess <= 0:
            return []
        forgotten = list(islice((old for old in self._runs.values() if not old.in_flight), excess))
        for old in forgotten:
            self.set_finished(old, True)
            del self._runs[old.key]
            self._recall(old)
            for node in old.marks.values():
                node.prompt_ends.pop(old.key, None)
            if old.leaf is not None:
                del old.leaf.leaves[old.key]
        return forgotten

    def _recall(self, run: Run) -> None:
        if run.digest is not None and run.prompt_leaf is None:
            self.lost.discard(run.key, run.digest)


def _count(leaf: Node, change: int) -> None:
    node: Node | None = leaf
    while node is not None:
        node.users += change
        node = node.parent
