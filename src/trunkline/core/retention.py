"""One policy for what stays in host memory: value per byte.

The value of a node's KV is its chance of being used again times the time that recomputing it would take, per byte
held. The chance is high while an open run's trajectory passes through the node and decays with the time since it was
used; a superseded branch (no open run passes) is worth little at once. Within a few typical gaps it does not decay:
where more runs take turns than memory holds, dropping the longest waiting would drop the one that is due next, every
time, so equals do not displace each other and what is held stays whole. A copy of what a slot holds as well is worth
nothing: memory beside the slots adds to them. There are no pins: nothing here is kept because it once was asked for.
What queued turns stand on is not a candidate (`protected`); turns that were placed stand on their slots.

KV that can be cut at any token is given up from the leaves, so that what is left is always a whole prefix. Saved
states (checkpoint memory) stand alone. The trivial rival, `Eviction.LRU`, orders by last use alone.
"""

from collections.abc import Callable, Sequence, Set
from heapq import heapify, heappop, heappush

from trunkline.core.predict import CostModel, Forecast
from trunkline.core.prefix import Node
from trunkline.core.types import CoreSettings, Eviction, MemoryKind, NodeId

SUPERSEDED = 0.02
"""Chance that a branch which no open run follows is taken up again (a retry, an undone edit)."""
MIN_GRACE_MS = 60_000.0
"""A run that waited no longer than this (or four typical gaps) is as likely back as one that just began to wait."""


class Retention:
    """The host memory account and the order in which it gives way."""

    def __init__(self, settings: CoreSettings, costs: CostModel, forecast: Forecast) -> None:
        self._settings = settings
        self._costs = costs
        self._forecast = forecast
        self._held: dict[NodeId, Node] = {}
        self.host_bytes = 0

    def bytes_of(self, node: Node) -> int:
        """What saving `node` takes."""
        if self._settings.memory is MemoryKind.CHECKPOINTS:
            return self._settings.checkpoint_bytes + self._settings.bytes_per_token * node.end
        return self._settings.bytes_per_token * node.tokens

    def chance(self, node: Node, now_ms: float) -> float:
        """Chance in [0, 1] that some run comes back for this node."""
        grace = max(MIN_GRACE_MS, 4 * self._forecast.typical_gap_ms())
        fresh = float(0.5 ** (max(0.0, now_ms - node.used_ms - grace) / grace))
        if node.users == 0:
            return SUPERSEDED * fresh
        return float(1.0 - (1.0 - 0.98 * fresh) ** node.users)

    def recompute_ms(self, node: Node) -> float:
        """What a turn would wait if this node were gone and all before it were not."""
        start = node.start
        if self._settings.memory is MemoryKind.CHECKPOINTS:
            above = node.parent
            while above is not None and not above.host:
                above = above.parent
            start = above.end if above is not None else 0
        return self._costs.prefill_whole_ms(node.end - start, start, self._settings.max_slice_tokens)

    def value(self, node: Node, now_ms: float) -> float:
        """Expected milliseconds saved per byte held (for LRU: when it was last used)."""
        if self._settings.eviction is Eviction.LRU:
            return node.used_ms
        return self.chance(node, now_ms) * self.recompute_ms(node) / self.bytes_of(node)

    def worth_saving(self, node: Node, now_ms: float) -> bool:
        """Whether copying it out is expected to pay (LRU always copies)."""
        if self._settings.eviction is Eviction.LRU:
            return True
        return self.chance(node, now_ms) * self.recompute_ms(node) > self._costs.move_ms(self.bytes_of(node))

    def room_for(
        self, nodes: Sequence[Node], protected: Set[NodeId], doubled: Callable[[], Set[NodeId]], now_ms: float
    ) -> list[Node] | None:
        """Which nodes to drop so that all of `nodes` can be saved: the least valuable, all worth less than these.

        `doubled` gives the nodes that are in a slot as well. Empty if they fit already; None if there is not enough of
        less value. Changes nothing.
        """
        size = sum(self.bytes_of(node) for node in nodes)
        need = self.host_bytes + size - self._settings.host_bytes
        if need <= 0:
            return []
        if size > self._settings.host_bytes:
            return None
        below = min(self.value(node, now_ms) for node in nodes)
        return self.cheapest(need, protected, doubled(), now_ms, below)

    def cheapest(
        self, need_bytes: int, protected: Set[NodeId], doubled: Set[NodeId], now_ms: float, below: float
    ) -> list[Node] | None:
        """The least valuable nodes that free `need_bytes`, in the order to drop them; None if there are not enough.

        A `doubled` node is in a slot as well: its copy here is worth nothing.
        """
        cuttable = self._settings.memory is MemoryKind.CUTTABLE

        def price(node: Node) -> tuple[float, NodeId, Node]:
            return (-1.0 if node.id in doubled else self.value(node, now_ms)), node.id, node

        heap = [
            price(node)
            for node in self._held.values()
            if node.id not in protected and not (cuttable and node.host_children)
        ]
        heapify(heap)
        remaining: dict[NodeId, int] = {}
        chosen: list[Node] = []
        while need_bytes > 0 and heap:
            value, _, node = heappop(heap)
            if value >= below:
                break
            chosen.append(node)
            need_bytes -= node.host_bytes
            parent = node.parent
            if cuttable and parent is not None and parent.host:
                left = remaining.get(parent.id, parent.host_children) - 1
                remaining[parent.id] = left
                if left == 0 and parent.id not in protected:
                    heappush(heap, price(parent))
        return chosen if need_bytes <= 0 else None

    def saved(self, node: Node) -> None:
        """`node` is in host memory from now on."""
        assert not node.host
        node.host, node.death = True, None
        node.host_bytes = self.bytes_of(node)
        self.host_bytes += node.host_bytes
        self._held[node.id] = node
        if node.parent is not None:
            node.parent.host_children += 1

    def dropped(self, node: Node) -> None:
        """`node` is no longer in host memory."""
        assert node.host
        self.host_bytes -= node.host_bytes
        node.host, node.host_bytes = False, 0
        del self._held[node.id]
        if node.parent is not None:
            node.parent.host_children -= 1

    def split(self, node: Node, upper: Node) -> None:
        """A held node was cut in two; the account is the same to the byte."""
        if not node.host:
            return
        if self._settings.memory is MemoryKind.CHECKPOINTS:
            # A whole saved state belongs to the end of a node: the lower half keeps it.
            upper.host = False
            assert upper.parent is not None
            upper.parent.host_children -= 1
            return
        upper.host_bytes = self.bytes_of(upper)
        node.host_bytes -= upper.host_bytes
        self._held[upper.id] = upper

    def corrected(self, node_id: NodeId, real_bytes: int) -> None:
        """The executor measured what a node really takes (whole states are only estimated before)."""
        node = self._held.get(node_id)
        if node is not None and real_bytes > 0:
            self.host_bytes += real_bytes - node.host_bytes
            node.host_bytes = real_bytes

    def free_bytes(self) -> int:
        """Host memory that nothing takes."""
        return self._settings.host_bytes - self.host_bytes

    def held(self) -> tuple[Node, ...]:
        """Every node in host memory."""
        return tuple(self._held.values())
