"""Conservation laws of the core, checked after every step in tests and simulation.

Each raises AssertionError with the broken law. They walk everything, so production does not call them.
"""

from collections import Counter

from trunkline.core.policy import Core
from trunkline.core.prefix import Node
from trunkline.core.state import State
from trunkline.core.turns import Phase
from trunkline.core.types import MemoryKind, NodeId, RunState


def check(core: Core) -> None:
    """Every law."""
    state = core.state
    nodes = [node for root in state.tree.roots() for node in root.subtree() if node.parent is not None]
    _tree(state, nodes)
    _host(state, nodes)
    _slots(state)
    _turns(state)
    _runs(state, nodes)


def _tree(state: State, nodes: list[Node]) -> None:
    """Edges are whole, disjoint and in place."""
    parents = {(n.salt, n.parent.id): n.parent for n in nodes if n.parent is not None}
    listed = {child.id for parent in parents.values() for child in parent.children.values()}
    for node in nodes:
        assert node.parent is not None
        assert len(node.symbols) > 0, "an edge has symbols"
        assert node.start == node.parent.end, "an edge begins where its parent ends"
        assert node.first_symbol == node.parent.last_symbol, "symbol positions follow the path"
        assert node.id in listed, "a child is listed by its parent"
        assert node.salt == node.parent.salt, "a path stays within its salt"
    assert len({node.id for node in nodes}) == len(nodes), "node ids are unique"
    assert state.tree.symbols == sum(len(node.symbols) for node in nodes), "symbols are conserved"


def _host(state: State, nodes: list[Node]) -> None:
    """Host bytes == sum over held nodes, within budget; a held node's ancestors are held (memory that can be cut)."""
    held = {node.id: node for node in nodes if node.host}
    assert held.keys() == {node.id for node in state.retention.held()}, "the account lists what is held"
    assert state.retention.host_bytes == sum(node.host_bytes for node in held.values()), "bytes are conserved"
    if state.settings.memory is MemoryKind.CUTTABLE:
        assert state.retention.host_bytes <= state.settings.host_bytes, "host memory stays within its budget"
        for node in held.values():
            assert node.parent is not None
            assert node.parent.host or node.parent.parent is None, "what is held is a whole prefix"
    for node in nodes:
        assert node.host_children == sum(child.host for child in node.children.values()), "held children are counted"
        assert node.host or not node.host_bytes, "bytes belong to held nodes"


def _slots(state: State) -> None:
    """A slot has one turn, a placed turn one slot; what a slot holds fits it."""
    for slot in state.slots:
        assert 0 <= slot.held <= state.settings.slot_tokens, "a slot holds no more than fits"
        assert slot.leaf is not None or slot.held == 0, "an empty slot holds nothing"
        if slot.turn is not None:
            turn = state.turns[slot.turn]
            assert turn.slot == slot.id, "slot and turn name each other"
            assert slot.leaf is turn.leaf, "a turn's slot holds its path"
            assert slot.held == turn.held_tokens, "a slot holds what its turn computed"
        elif slot.leaf is not None:
            assert slot.held <= slot.leaf.end, "a warm slot holds a prefix of its path"


def _turns(state: State) -> None:
    """Cached + novel == prompt; misses explain all that is novel; a queued turn has no slot."""
    for turn in state.turns.values():
        record = turn.record
        assert (turn.phase is Phase.QUEUED) == (turn.slot is None), "only queued turns have no slot"
        assert turn.computed <= turn.prompt_tokens, "no more is computed than was asked"
        assert turn.leaf.end == turn.prompt_tokens, "a turn's leaf ends its prompt"
        assert (turn.phase is Phase.DECODE) == (turn.generated > 0), "a turn generates once its prompt is computed"
        assert bool(turn.generated) <= turn.pending <= turn.generated, "the latest token is pending"
        if turn.slot is not None:
            assert sum(miss.tokens for miss in record.misses) == record.novel_tokens, "every novel token has a reason"
            assert record.cached_tokens <= turn.computed, "what was promised is there"


def _runs(state: State, nodes: list[Node]) -> None:
    """Users of a node == open runs whose trajectory passes; a run in flight is active."""
    users: Counter[NodeId] = Counter()
    in_flight = Counter(turn.run.key for turn in state.turns.values())
    for run in state.runs:
        assert run.in_flight == in_flight[run.key], "turns in flight are counted"
        assert (run.state is RunState.ACTIVE) == (run.in_flight > 0), "a run with a turn in flight is active"
        if run.leaf is not None:
            assert run.leaf.leaves[run.key] == (not run.finished), "a leaf knows its runs and which are open"
            if not run.finished:
                users.update(node.id for node in run.leaf.path())
    for node in nodes:
        assert node.users == users[node.id], "open runs through a node are counted"
