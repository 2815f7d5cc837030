"""The radix tree of trajectories: which prefixes arrived, and where their KV is.

A node is an edge of one or more symbols (token ids, or block ids that weigh several tokens). What *arrived* is in the
tree whether or not it was computed, so that reuse can be judged against what could have been reused. Host residency
is kept here; device residency is derived from the slots (`core/placement.py`), since a slot holds one whole path.

Radix-tree prefix caches: SGLang's RadixAttention (arXiv 2312.07104). Cost of match and insert: one vectorised
comparison a node on the path, linear in the prompt, never in the number of runs.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from trunkline.core.types import Ints, MissReason, NodeId, Prompt, RunKey

ONE_EACH = np.ones(1, np.int32)
"""The weights of symbols that have none: one token each."""


@dataclass(frozen=True, slots=True)
class Death:
    """When and by which decision a node's KV was given up."""

    decision: int
    at_ms: float
    reason: MissReason


class Node:
    """One edge of the tree; `[start, end)` are its tokens' positions, `last_symbol` the symbol position after it.

    `trunk` tells which of its root's children the path begins with (paths with different trunks share nothing). None of
    `end`, `last_symbol` and `trunk` changes when an edge is cut.

    `host` says that its KV is in host memory. `prompt_ends` holds the runs one of whose prompts ended exactly here,
    with the turn whose it was, `leaves` those whose trajectory ends here now (True: open), `users` counts the open runs
    whose trajectory passes through.
    """

    __slots__ = (
        "children",
        "death",
        "end",
        "first_symbol",
        "host",
        "host_bytes",
        "host_children",
        "id",
        "last_symbol",
        "leaves",
        "parent",
        "prompt_ends",
        "salt",
        "start",
        "symbols",
        "tokens",
        "trunk",
        "used_ms",
        "users",
        "weights",
    )

    def __init__(self, node_id: NodeId, parent: "Node | None", symbols: Ints, weights: Ints | None, salt: str) -> None:
        self.id = node_id
        self.parent = parent
        self.symbols = symbols
        self.weights = weights
        self.salt = salt
        self.tokens = len(symbols) if weights is None else int(weights.sum())
        self.start: int = parent.end if parent else 0
        self.first_symbol: int = parent.last_symbol if parent else 0
        self.end: int = self.start + self.tokens
        self.last_symbol: int = self.first_symbol + len(symbols)
        self.trunk: int = _trunk(self)
        self.children: dict[int, Node] = {}
        self.host = False
        self.host_bytes = 0
        self.host_children = 0
        self.death: Death | None = None
        self.prompt_ends: dict[RunKey, int] = {}
        self.leaves: dict[RunKey, bool] = {}
        self.users = 0
        self.used_ms = 0.0

    def path(self) -> list["Node"]:
        """Nodes from below the root to this one."""
        nodes = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def subtree(self) -> Iterator["Node"]:
        """This node and all below it, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))


@dataclass(frozen=True, slots=True)
class Match:
    """How far a prompt follows the tree: whole nodes, then `inside` symbols of a child of the last; `tokens` in all."""

    path: tuple[Node, ...]
    root: Node
    inside: int
    child: Node | None
    tokens: int

    @property
    def last(self) -> Node:
        """The deepest node followed to its end (the root if none)."""
        return self.path[-1] if self.path else self.root


@dataclass(frozen=True, slots=True)
class Split:
    """`node` was cut: its first `tokens` tokens are `upper` now."""

    node: Node
    upper: Node
    tokens: int


class PrefixTree:
    """All trajectories of all salts. Prefixes never match across salts."""

    def __init__(self) -> None:
        self._roots: dict[str, Node] = {}
        self._next_id = 1
        self.symbols = 0
        """Symbols in the tree, over all salts."""

    def root(self, salt: str) -> Node:
        """The root of one salt's tree."""
        if salt not in self._roots:
            self._roots[salt] = Node(0, None, np.empty(0, np.int32), None, salt)
        return self._roots[salt]

    def roots(self) -> tuple[Node, ...]:
        """Every salt's root."""
        return tuple(self._roots.values())

    def match(self, salt: str, prompt: Prompt, near: Node | None = None) -> Match:
        """Follow `prompt` as far as the tree goes; changes nothing.

        `near` is where the run's last turn ended: if the prompt still contains that whole path, matching goes on from
        there; otherwise it starts at the root.
        """
        path = _verified_path(near, prompt) if near is not None and near.salt == salt else None
        nodes = path if path is not None else []
        root = self.root(salt)
        node = nodes[-1] if nodes else root
        total = len(prompt.symbols)
        while node.last_symbol < total:
            child = node.children.get(_key(prompt, node.last_symbol))
            if child is None:
                break
            same = _common(child, prompt)
            if same < len(child.symbols):
                inside = same if child.weights is None else int(child.weights[:same].sum())
                return Match(tuple(nodes), root, same, child, node.end + inside)
            nodes.append(child)
            node = child
        return Match(tuple(nodes), root, 0, None, node.end)

    def insert(self, salt: str, prompt: Prompt, near: Node | None = None) -> tuple[Node, Match, Split | None]:
        """Make `prompt` a path of whole nodes.

        Returns its last node (the root for an empty prompt), the match as it was before, and the split it took, if any.
        """
        match = self.match(salt, prompt, near)
        node, split = self.graft(match, prompt)
        return node, match, split

    def graft(self, match: Match, prompt: Prompt) -> tuple[Node, Split | None]:
        """As `insert`, given the prompt's match in the tree as it is now."""
        node, split = match.last, None
        at = node.last_symbol + match.inside
        if match.inside:
            assert match.child is not None
            split = self.split(match.child, match.inside)
            node = split.upper
        if at < len(prompt.symbols):
            node = self._add(node, prompt.symbols[at:], None if prompt.weights is None else prompt.weights[at:])
        return node, split

    def extend(self, node: Node, symbols: Ints) -> tuple[Node, Split | None]:
        """Insert `symbols` (one token each) below `node`, following what is there already."""
        prompt = Prompt(np.ascontiguousarray(symbols, dtype=np.int32))
        at = 0
        while at < len(symbols):
            child = node.children.get(_key(prompt, at))
            if child is None:
                return self._add(node, prompt.symbols[at:], None), None
            same = _same_head(child, prompt.symbols[at : at + len(child.symbols)], None)
            if same < len(child.symbols):
                split = self.split(child, same)
                at += same
                rest = prompt.symbols[at:]
                return (self._add(split.upper, rest, None) if len(rest) else split.upper), split
            node, at = child, at + same
        return node, None

    def split(self, node: Node, at_symbols: int) -> Split:
        """Cut `node` after `at_symbols` symbols; `node` keeps its id, its end, its children and its runs."""
        assert node.parent is not None
        assert 0 < at_symbols < len(node.symbols)
        weights = node.weights
        upper = Node(
            self._take_id(),
            node.parent,
            node.symbols[:at_symbols].copy(),
            None if weights is None else weights[:at_symbols].copy(),
            node.salt,
        )
        node.parent.children[_node_key(node)] = upper
        node.symbols = node.symbols[at_symbols:].copy()
        node.weights = None if weights is None else weights[at_symbols:].copy()
        node.tokens -= upper.tokens
        node.start, node.first_symbol, node.parent = upper.end, upper.last_symbol, upper
        upper.children[_node_key(node)] = node
        upper.host, upper.death, upper.users, upper.used_ms = node.host, node.death, node.users, node.used_ms
        upper.host_children = 1 if node.host else 0
        return Split(node, upper, upper.tokens)

    def split_at_token(self, node: Node, at_token: int) -> tuple[Node | None, Split | None]:
        """The node that ends at `at_token` (rounded down to a symbol) within `node`, cutting it if need be.

        None if nothing of `node` lies before `at_token`.
        """
        inside = at_token - node.start
        if inside >= node.tokens:
            return node, None
        if node.weights is not None:
            inside = int(np.searchsorted(np.cumsum(node.weights), inside, side="right"))
        if inside <= 0:
            return None, None
        split = self.split(node, inside)
        return split.upper, split

    def prune(self, target_symbols: int, kept: Set[NodeId]) -> list[Node]:
        """Forget childless nodes that hold nothing and that no open run passes, longest unused first, down to a target.

        Nodes in `kept` stay. Returns what was forgotten.
        """
        leaves = [n for root in self.roots() for n in root.subtree() if n.parent is not None and not n.children]
        heap = [(node.used_ms, node.id, node) for node in leaves]
        heapify(heap)
        gone: list[Node] = []
        while heap and self.symbols > target_symbols:
            _, _, node = heappop(heap)
            if node.host or node.users or node.id in kept:
                continue
            assert node.parent is not None
            del node.parent.children[_node_key(node)]
            self.symbols -= len(node.symbols)
            gone.append(node)
            if not node.parent.children and node.parent.parent is not None:
                heappush(heap, (node.parent.used_ms, node.parent.id, node.parent))
        return gone

    def symbols_between(self, node: Node, start_symbol: int, count: int) -> tuple[int, ...]:
        """Up to `count` symbols of `node`'s path from symbol position `start_symbol` on."""
        found: list[int] = []
        for step in node.path():
            if step.last_symbol > start_symbol and len(found) < count:
                lo = max(0, start_symbol - step.first_symbol)
                found.extend(int(s) for s in step.symbols[lo : lo + count - len(found)])
        return tuple(found)

    def _add(self, parent: Node, symbols: Ints, weights: Ints | None) -> Node:
        node = Node(self._take_id(), parent, symbols.copy(), None if weights is None else weights.copy(), parent.salt)
        parent.children[_node_key(node)] = node
        self.symbols += len(symbols)
        return node

    def _take_id(self) -> NodeId:
        self._next_id += 1
        return self._next_id - 1


def common_ancestor(a: Node, b_path: dict[NodeId, Node]) -> Node | None:
    """The deepest node of `a`'s path that is among `b_path` (None: they share nothing)."""
    b = next(iter(b_path.values()), None)
    if b is None or b.trunk != a.trunk or b.salt != a.salt:
        return None  # most runs share nothing, and paths are long
    node: Node | None = a
    while node is not None and node.parent is not None:
        if node.id in b_path:
            return node
        node = node.parent
    return None


def _verified_path(near: Node, prompt: Prompt) -> list[Node] | None:
    """`near`'s path, if the prompt begins with all of it."""
    if near.last_symbol > len(prompt.symbols):
        return None
    path = near.path()
    return path if all(_continues(node, prompt) for node in path) else None


def _continues(node: Node, prompt: Prompt) -> bool:
    """Whether the prompt has all of the node at the node's place."""
    place = slice(node.first_symbol, node.last_symbol)
    if not (node.symbols == prompt.symbols[place]).all():
        return False
    if node.weights is None and prompt.weights is None:
        return True
    ours = ONE_EACH if node.weights is None else node.weights
    theirs = ONE_EACH if prompt.weights is None else prompt.weights[place]
    return bool((ours == theirs).all())


def _common(node: Node, prompt: Prompt) -> int:
    """How many of the node's symbols (and weights) the prompt has at the node's place."""
    lo, hi = node.first_symbol, min(node.last_symbol, len(prompt.symbols))
    return _same_head(node, prompt.symbols[lo:hi], None if prompt.weights is None else prompt.weights[lo:hi])


def _same_head(node: Node, symbols: Ints, weights: Ints | None) -> int:
    """How many of the node's symbols begin `symbols`, with the same weights."""
    same = _run_length(node.symbols, symbols)
    if node.weights is None and weights is None:
        return same
    ours = ONE_EACH if node.weights is None else node.weights[:same]
    theirs = ONE_EACH if weights is None else weights[:same]
    differ = np.flatnonzero(ours != theirs)
    return int(differ[0]) if same and len(differ) else same


def _run_length(a: Ints, b: Ints) -> int:
    """Length of the common head of two arrays."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n


def _trunk(node: Node) -> int:
    """See `Node`. The root has none."""
    if node.parent is None:
        return 0
    return _node_key(node) if node.parent.parent is None else node.parent.trunk


def _key(prompt: Prompt, at: int) -> int:
    """Children are keyed by their first symbol and its weight."""
    weight = 1 if prompt.weights is None else int(prompt.weights[at])
    return int(prompt.symbols[at]) + (weight << 32)


def _node_key(node: Node) -> int:
    weight = 1 if node.weights is None else int(node.weights[0])
    return int(node.symbols[0]) + (weight << 32)
