"""The engine's working slots: each holds the KV of one path of the tree, for a turn in flight or left warm by one."""

from collections.abc import Sequence
from dataclasses import dataclass

from trunkline.core.prefix import Node, common_ancestor
from trunkline.core.types import NodeId, SlotId, TurnId


@dataclass(slots=True, eq=False)
class Slot:
    """KV of the first `held` tokens of the path that ends at `leaf` (in flight: and of the answer so far)."""

    id: SlotId
    leaf: Node | None = None
    held: int = 0
    turn: TurnId | None = None
    stale: bool = False
    """The engine still holds KV here that no longer counts: it is emptied before the slot is used."""

    def covers(self, path: dict[NodeId, Node]) -> int:
        """How many tokens of a path (as `id -> node`) this slot holds."""
        shared = None if self.leaf is None else common_ancestor(self.leaf, path)
        return 0 if shared is None else min(shared.end, self.held)

    def nodes(self) -> list[Node]:
        """The nodes this slot holds whole, root first."""
        return [] if self.leaf is None else [node for node in self.leaf.path() if node.end <= self.held]

    def clear(self, *, stale: bool) -> None:
        """It holds nothing that counts any more."""
        self.leaf, self.held, self.stale = None, 0, stale


def path_ids(leaf: Node) -> dict[NodeId, Node]:
    """A path for `Slot.covers`."""
    return {node.id: node for node in leaf.path()}


def live_nodes(path: Sequence[Node], coverage: int) -> list[Node]:
    """The longest head of `path` whose every node is in host memory or within the first `coverage` tokens.

    `coverage` is what the best slot holds of the path.
    """
    live = []
    for node in path:
        if not (node.host or node.end <= coverage):
            break
        live.append(node)
    return live
