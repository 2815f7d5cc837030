"""Whose turn is it? A run named by the client, or the one that the prompt itself belongs to.

The tree's match is walked from its deepest node up. Wherever a run's trajectory or one of its prompts ended, that run
is asked; the first answer counts.

    system  task | answer 1  result | answer 2  result      contains all that run A sent and got: A continues
                                    | another result        leaves A after answer 1: a branch of A
                 | (no answer of A)                         the same first prompt again: a run of its own
    system ------- summary of A's answers                   leaves A early, but says what A said later: A, compacted

Who says what A said must have come after it: text that only A generated, found where the prompt is new, tells a
rewritten history from a branch, and finds it even where nothing in front is shared (`core/landmarks.py`).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from trunkline.core.facts import TurnArrived
from trunkline.core.landmarks import TASK, TOLD, WINDOW, Landmarks
from trunkline.core.prefix import Match, Node, common_ancestor
from trunkline.core.runs import Run, RunTable
from trunkline.core.types import NodeId, Prompt, Relation, RunKey

LATEST = 32
"""At most so many runs that stand at one place of the tree are asked, the latest first."""
ENOUGH, PLENTY = 3, 6
"""Passages that tie a prompt to a run: together with something else, and alone. A phrase may recur by chance."""
SHRUNK = 0.75
"""A history of which only the answers are left was summed up if it lost a quarter."""
OWN = 0.75
"""The part of its first prompt, or of its last, that begins a prompt of the run's own and not one that it wrote for
another agent with much the same instructions and tools."""
HEAD = 0.5
"""The part of its first prompt that a rewritten history keeps if it keeps its head: instructions and tools."""
GROWN = 1.25
"""A prompt that is longer than a first prompt by this factor begins no run."""
EDITED = 0.9
"""A prompt whose end was edited still begins with so much of the one before."""
TELLING = 2 * WINDOW
"""An answer of so many symbols is known by its passages where it is sent back."""
SIDE = 0.5
"""A side call is at most this part of the first prompt of the run that it is about."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """Whose turn it is. `run` None: a new run's, a branch of `parent` if that is given.

    It rests on `shared_tokens` of the prompt's head that had arrived before and on `passages` of the run's (or
    parent's) own text in the rest.
    """

    relation: Relation
    run: Run | None
    parent: str | None
    shared_tokens: int
    passages: int = 0
    echoed: bool | None = None
    """Whether the client sent the run's last answer back; None where that cannot be told."""


def lineage(runs: RunTable, landmarks: Landmarks, fact: TurnArrived, match: Match) -> Lineage:
    """Judge a turn that arrived, given its match in the tree; changes nothing.

    Linear in what is new of the prompt and in the nodes on its path, never in the number of runs.
    """
    if fact.run is not None:
        key = RunKey(fact.salt, fact.run)
        return Lineage(Relation.NAMED, runs.get(key), fact.parent, match.tokens)
    return _Judge(runs, landmarks, fact, match).judge()


def settle(runs: RunTable, fact: TurnArrived, found: Lineage) -> Run:
    """The run that the judgement names, made now if it is new.

    A session's first run takes the session's id; the others are shown as its branches, with ids made of it.
    """
    if found.run is not None:
        return found.run
    if fact.run is not None:
        return runs.ensure(RunKey(fact.salt, fact.run), fact.parent, fact.origin)
    if fact.group is None:
        return runs.ensure(RunKey(fact.salt, fact.fresh), found.parent, fact.origin)
    leader = RunKey(fact.salt, fact.group)
    if runs.get(leader) is None:
        return runs.ensure(leader, found.parent, fact.origin, fact.group)
    name = f"{fact.group}.{fact.fresh}"
    return runs.ensure(RunKey(fact.salt, name), found.parent or fact.group, fact.origin, fact.group)


class _Judge:
    """One judgement: the fact, its match, and what is asked of both."""

    def __init__(self, runs: RunTable, landmarks: Landmarks, fact: TurnArrived, match: Match) -> None:
        self.runs, self.landmarks, self.fact, self.match = runs, landmarks, fact, match
        self.symbols = match.last.last_symbol + match.inside
        self.prompt: Prompt = fact.prompt
        self._quoted: dict[RunKey, list[int]] | None = None
        self._path: dict[NodeId, Node] | None = None

    def judge(self) -> Lineage:
        at_name = self._untouched_leader()
        if at_name is not None:
            return at_name
        found = self._by_prefix()
        if found is not None and found.relation is Relation.CONTINUES:
            return found
        return (
            self._lost()
            or self._unanswered()
            or found
            or self._by_text()
            or self._by_place()
            or self._by_size()
            or self._by_session()
            or self._new()
        )

    # --- by prefix ----------------------------------------------------------------------------------------------

    def _by_prefix(self) -> Lineage | None:
        """The deepest place on the prompt's path where a run stands, or stood."""
        for node in reversed(self.match.path):
            for run in self._latest(node.leaves):
                prompt = run.prompt_leaf
                if prompt is not None and prompt is not node and prompt.id in run.tips and not run.in_flight:
                    return self._continues(run, echoed=True)
            owners = list(self._latest(node.prompt_ends))
            if owners:
                return self._at_prompt_end(node, owners)
        return None

    def _at_prompt_end(self, node: Node, owners: list[Run]) -> Lineage | None:
        """The prompt contains a whole prompt of each of the `owners`, but not what any answered to it."""
        free = [run for run in owners if node.id in run.tips and not run.in_flight and self._may_go_on(run, node)]
        if free:
            run = free[0] if len(free) == 1 else max(free, key=self._likeness)
            echoed = bool(self._said(run)) if run.answer_tokens >= TELLING and self._longer(node) else None
            return self._continues(run, echoed=echoed)
        for run in owners:
            if not run.in_flight and len(said := self._said(run, after=node.prompt_ends[run.key])) >= ENOUGH:
                return self._rewritten(run, len(said))
        if (edited := self._by_place()) is not None:
            return edited
        left = [run for run in owners if self._longer(node) or node is not run.first]
        if not left or self.fact.parent is not None:
            return None
        parent = left[0] if len(left) == 1 else max(left, key=self._likeness)
        return Lineage(Relation.BRANCH, None, parent.key.run, self.match.tokens)

    def _likeness(self, run: Run) -> tuple[int, int, bool, int]:
        """Of several runs at one place: whose answer follows there, then whose is further on, then the latest."""
        return self._shared(run.leaf), len(self._said(run)), not run.finished, run.seq

    def _unanswered(self) -> Lineage | None:
        """The waiting run whose last prompt is all here but for what opened its answer, and more messages follow."""
        leader = None if self.fact.group is None else self.runs.get(RunKey(self.fact.salt, self.fact.group))
        for run in (self._only_run_below(), leader):
            if run is None or run.prompt_leaf is None or run.in_flight or run.finished or not self._allowed(run):
                continue
            told = run.prompt_leaf.end - run.opening
            if run.opening and self._shared(run.prompt_leaf) >= told and self._tokens - self.fact.opening > told:
                return self._continues(run, echoed=False)
        return None

    def _may_go_on(self, run: Run, node: Node) -> bool:
        """A waiting run whose prompt comes again without its answer.

        It goes on if it got no answer, if more follows (some clients do not send answers back), or if it is past its
        first turn. The same first prompt alone is another run's.
        """
        return not run.tips[node.id] or (self._longer(node) and not run.finished) or run.turns > 1

    def _longer(self, node: Node) -> bool:
        return len(self.prompt.symbols) > node.last_symbol

    # --- by text ------------------------------------------------------------------------------------------------

    def _by_text(self) -> Lineage | None:
        """No run's whole prompt is in this one: whose text is?

        What was said counts anywhere, since a context that is not its run's history may begin with a copy of it; what
        was told only where it is new, since all runs of a kind are told the same in front.
        """
        quoted = self.landmarks.quoted(self.fact.salt, self.prompt.symbols)
        for key, turns in sorted(quoted.items(), key=lambda item: (-len(item[1]), item[0])):
            run = self.runs.get(key)
            if run is not None and self._allowed(run):
                found = self._by_text_of(run, Counter(turn for turn in turns if turn > TOLD))
                if found is not None:
                    return found
        return None

    def _by_text_of(self, run: Run, turns: Counter[int]) -> Lineage | None:
        told, said = self._told(run), turns.total()
        if said >= ENOUGH:
            task = 2 * told.count(TASK) > run.task_passages  # a short one stands behind words that others share
            own = task or self._keeps_own(run) or sum(count >= ENOUGH for count in turns.values()) > 1
            summed_up = said >= PLENTY and self._tokens <= SHRUNK * _history_tokens(run) and self._keeps_head(run)
            if (own or summed_up) and not run.in_flight:
                return self._rewritten(run, said)
            if said >= PLENTY:
                return Lineage(Relation.BRANCH, None, run.key.run, self.match.tokens, said)
        if len(told) >= ENOUGH and run.first is not None and self._tokens <= SIDE * run.first.end:
            return self._side_call(len(told))
        return None

    def _rewritten(self, run: Run, said: int) -> Lineage:
        shorter = run.prompt_leaf is not None and self._tokens < run.prompt_leaf.end
        relation = Relation.COMPACTION if shorter else Relation.CONTINUES
        return Lineage(relation, run, run.parent, self.match.tokens, said)

    def _by_place(self) -> Lineage | None:
        """Where text cannot testify: the one open run whose last prompt's end was edited before the prompt went on."""
        run = self._only_silent_run_below()
        if run is None or run.prompt_leaf is None:
            return None
        last = run.prompt_leaf.end
        return self._rewritten(run, 0) if EDITED * last <= self.match.tokens and last < self._tokens else None

    def _by_size(self) -> Lineage | None:
        """Where text cannot testify: the one open run under the prompt's head, if no first prompt is so long."""
        run = self._only_silent_run_below()
        if run is None or run.first is None or run.turns < 2:
            return None
        return self._rewritten(run, 0) if self._tokens >= GROWN * run.first.end else None

    def _only_silent_run_below(self) -> Run | None:
        """The one open run below where the prompt leaves the tree, if what it said cannot be expected in the prompt."""
        run = self._only_run_below()
        if run is None or run.in_flight or not self._allowed(run):
            return None
        return None if run.echoes is not False and run.answer_tokens >= TELLING else run

    def _only_run_below(self) -> Run | None:
        """The open run whose trajectory goes on from where the prompt leaves the tree, if it is only one."""
        node: Node | None = self.match.child or (self.match.last if self.match.path else None)
        if node is None or node.users != 1:
            return None
        while node is not None:
            for key, is_open in node.leaves.items():
                if is_open:
                    return self.runs.get(key)
            node = next((child for child in node.children.values() if child.users), None)
        return None

    def _keeps_own(self, run: Run) -> bool:
        """Whether the prompt begins with most of what only the run has in its first prompt, or in its last."""
        ends = (node for node in (run.first, run.prompt_leaf) if node is not None)
        known = run.known_tokens
        return any(self._shared(end) - known >= max(1, OWN * (end.end - known)) for end in ends)

    def _keeps_head(self, run: Run) -> bool:
        return run.first is not None and self._shared(run.first) >= HEAD * run.first.end

    def _shared(self, end: Node | None) -> int:
        """How many leading tokens the prompt shares with the path that ends at `end`."""
        child = self.match.child
        if self._path is None:
            self._path = {node.id: node for node in self.match.path}
            if child is not None:
                self._path[child.id] = child
        shared = common_ancestor(end, self._path) if end is not None else None
        if shared is None:
            return 0
        return self.match.tokens if shared is child else shared.end

    def _quotes(self) -> dict[RunKey, list[int]]:
        if self._quoted is None:
            self._quoted = self.landmarks.quoted(self.fact.salt, self.prompt.symbols[self.symbols :])
        return self._quoted

    def _said(self, run: Run, after: int = TOLD) -> list[int]:
        """The passages, by turn, that the run said after turn `after`."""
        return [turn for turn in self._quotes().get(run.key, ()) if turn > after]

    def _told(self, run: Run) -> list[int]:
        """A mark, `TOLD` or `TASK`, for each passage that the run was told."""
        return [mark for mark in self._quotes().get(run.key, ()) if mark <= TOLD]

    # --- by name, and by what was remembered --------------------------------------------------------------------

    def _untouched_leader(self) -> Lineage | None:
        """A run that was declared under the session's id and has had no turn."""
        if self.fact.group is None:
            return None
        leader = self.runs.get(RunKey(self.fact.salt, self.fact.group))
        if leader is None or leader.turns:
            return None
        return Lineage(Relation.NEW, leader, leader.parent, self.match.tokens)

    def _by_session(self) -> Lineage | None:
        """Inside a session less evidence is enough: its main run is the one whose history may be rewritten."""
        if self.fact.group is None:
            return None
        leader = self.runs.get(RunKey(self.fact.salt, self.fact.group))
        if leader is None:
            return None
        if not leader.in_flight and not leader.marks and leader.digest is None:
            return self._continues(leader)  # nothing but its name is known of its history
        first = leader.first
        if first is not None and self._tokens <= SIDE * first.end and not self._keeps_head(leader):
            return self._side_call(0)
        shrunk = self._tokens <= SHRUNK * _history_tokens(leader)
        if not leader.in_flight and leader.turns > 1 and shrunk and self._keeps_head(leader):
            return self._rewritten(leader, 0)
        return None

    def _lost(self) -> Lineage | None:
        """A run whose last prompt is in this one, though the tree does not hold it."""
        found = self.runs.lost.longest(self.fact.salt, self.prompt.symbols)
        run = self.runs.get(found[0]) if found is not None else None
        if found is None or run is None or run.in_flight or not self._allowed(run) or found[1] < self.symbols:
            return None
        return Lineage(Relation.CONTINUES, run, run.parent, self.match.tokens)

    # --- parts --------------------------------------------------------------------------------------------------

    @property
    def _tokens(self) -> int:
        return self.prompt.tokens

    def _latest(self, keys: dict[RunKey, bool] | dict[RunKey, int]) -> Iterator[Run]:
        known = (self.runs.get(key) for key in islice(reversed(keys), LATEST))
        return (run for run in known if run is not None and self._allowed(run))

    def _allowed(self, run: Run) -> bool:
        """Whether the turn may be the run's: of the session, or a branch of the parent, that the client named."""
        if self.fact.group is not None:
            return self.fact.group in (run.group, run.key.run)
        return self.fact.parent is None or run.parent == self.fact.parent

    def _continues(self, run: Run, echoed: bool | None = None) -> Lineage:
        return Lineage(Relation.CONTINUES, run, run.parent, self.match.tokens, echoed=echoed)

    def _side_call(self, passages: int) -> Lineage:
        return Lineage(Relation.SIDE_CALL, None, self.fact.parent, self.match.tokens, passages)

    def _new(self) -> Lineage:
        probe = self.fact.max_new_tokens == 1
        relation = Relation.SIDE_CALL if probe else Relation.NEW
        if self.fact.parent is not None:
            relation = Relation.BRANCH
        return Lineage(relation, None, self.fact.parent, self.match.tokens)


def _history_tokens(run: Run) -> int:
    return run.leaf.end if run.leaf is not None else 0
