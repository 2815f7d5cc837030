"""What a node's slots and segments would hold, symbol by symbol: every plan is checked to be possible.

Used where simulations are small (seeded tests): it holds whole prompts. It asserts what an engine relies on: a slice
continues what its slot holds, what is loaded or kept is the prompt's own prefix, a node is saved once and is there when
it is loaded. Token symbols only (no weights).
"""

from collections.abc import Iterable, Mapping

import numpy as np

from trunkline.core import actions as act
from trunkline.core.policy import Core
from trunkline.core.types import CoreSettings, Ints, MemoryKind, NodeId, SlotId, TurnId

EMPTY: Ints = np.empty(0, np.int32)


class Memory:
    """Slots and host segments of one node. Prompts and answers are told when turns begin."""

    def __init__(self, settings: CoreSettings) -> None:
        self._checkpoints = settings.memory is MemoryKind.CHECKPOINTS
        self._slots: list[Ints] = [EMPTY] * settings.slots
        self._segments: dict[NodeId, Ints] = {}

    def split(self, action: act.SplitSegment) -> None:
        """A segment was cut in two."""
        whole = self._segments[action.node]
        self._segments[action.upper], self._segments[action.node] = whole[: action.tokens], whole[action.tokens :]

    def drop(self, node: NodeId) -> None:
        """A segment is freed; it must be there."""
        del self._segments[node]

    def move(self, move: act.Move, prompts: Mapping[TurnId, Ints], *, ok: bool) -> None:
        """Apply one move of a plan. `ok` False: the load did not work, which leaves the slot empty."""
        match move:
            case act.Save():
                self._save(move)
            case act.Load():
                assert all(piece.start < piece.end for piece in move.pieces), "no piece is empty"
                loaded = np.concatenate([self._segments[p.node][: p.end - p.start] for p in move.pieces])
                assert len(loaded) == move.pieces[-1].end, "pieces are whole and in order"
                assert _begins(prompts[move.turn], loaded), "what is loaded is the prompt's own prefix"
                self._slots[move.slot] = loaded if ok else EMPTY
            case act.Trim():
                held = self._slots[move.slot]
                assert len(held) > move.tokens or move.tokens == 0, "a trim shortens"
                assert not self._checkpoints or move.tokens == 0, "checkpoint memory is never cut"
                self._slots[move.slot] = held[: move.tokens]
                assert _begins(prompts[move.turn], held[: move.tokens]), "what is kept is the prompt's own prefix"
            case act.Drop():
                self.drop(move.node)

    def _save(self, move: act.Save) -> None:
        held = self._slots[move.slot]
        for piece in move.pieces:
            assert piece.node not in self._segments, "a node is saved once"
            assert piece.end <= len(held), "a slot holds what is saved from it"
            assert not self._checkpoints or len(held) == piece.end, "a state is saved where it stands"
            self._segments[piece.node] = held[piece.start : piece.end]
        if move.release:
            self._slots[move.slot] = EMPTY

    def prefill(self, call: act.Prefill, prompt: Ints) -> None:
        """Compute a slice."""
        held = self._slots[call.slot]
        assert len(held) == call.start, "a slice continues what its slot holds"
        assert _begins(prompt, held), "a slot in use holds its turn's prompt"
        assert call.last == (call.end == len(prompt)), "the last slice ends the prompt"
        self._slots[call.slot] = prompt[: call.end]

    def decode(self, slot: SlotId, prompt: Ints, generated: Ints, repeats: int) -> None:
        """Feed the latest token, `repeats` times; `generated` ends before the first new token."""
        held = self._slots[slot]
        whole = np.concatenate([prompt, generated])
        assert len(held) == len(whole) - repeats, "a decode continues what its slot holds"
        assert _begins(whole, held), "a slot in use holds its turn's prompt and answer"
        self._slots[slot] = whole

    def lost(self, slot: SlotId) -> None:
        """A call failed: nobody knows what the slot holds."""
        self._slots[slot] = EMPTY

    def check(self, core: Core) -> None:
        """The core's account lists exactly the segments there are, and each holds its node's symbols."""
        held = {node.id: node for node in core.state.retention.held()}
        assert held.keys() == self._segments.keys(), "the account lists the segments there are"
        for node_id, symbols in self._segments.items():
            node = held[node_id]
            own = node.symbols if not self._checkpoints else _joined(step.symbols for step in node.path())
            assert np.array_equal(symbols, own), "a segment holds its node's tokens"


def _begins(whole: Ints, head: Ints) -> bool:
    return len(head) <= len(whole) and bool(np.array_equal(whole[: len(head)], head))


def _joined(parts: Iterable[Ints]) -> Ints:
    return np.concatenate(list(parts))
