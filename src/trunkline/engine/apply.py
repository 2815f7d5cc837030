"""Carrying out a plan's moves and calls on llama.cpp. Nothing is decided here."""

from time import perf_counter

import numpy as np

from trunkline.core import actions as act
from trunkline.core.facts import MoveTiming
from trunkline.core.types import MemoryKind, NodeId, TurnId
from trunkline.engine.errors import MemoryFault
from trunkline.engine.live import LiveTurn
from trunkline.engine.memory import Checkpoint, Slots
from trunkline.engine.segments import Segment


class Applier:
    """The KV in slots and in host memory, moved and extended as plans say."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self._segments: dict[NodeId, Segment] = {}
        self._states: dict[NodeId, Checkpoint] = {}

    def action(self, action: act.Action) -> None:
        """Apply one immediate action (those that are not about memory are the caller's)."""
        match action:
            case act.SplitSegment(node, upper, tokens):
                self._segments[upper], self._segments[node] = self._segments[node].split(tokens)
            case act.DropSegment(node):
                self._drop(node)

    def move(self, move: act.Move) -> MoveTiming:
        """Carry out one move. A load that fails empties its slot and is reported, not raised."""
        start = perf_counter()
        moved, ok = 0, True
        match move:
            case act.Save():
                moved = self._save(move)
            case act.Load():
                try:
                    moved = self._load(move)
                except MemoryFault:
                    self.slots.clear(move.slot)
                    ok = False
            case act.Trim(slot, _, tokens):
                self.slots.trim(slot, min(tokens, self.slots.length(slot)))
            case act.Drop(node):
                self._drop(node)
        return MoveTiming(ok, moved, (perf_counter() - start) * 1000)

    def call(self, call: act.Call, live: dict[TurnId, LiveTurn]) -> float:
        """Carry out one call; the logits of its rows are then readable. Milliseconds. Raises `DecodeFailed`."""
        start = perf_counter()
        match call:
            case act.Prefill():
                turn = live[call.turn]
                part = turn.prompt[call.start : call.end]
                self.slots.prefill(call.slot, part, last=call.last, all_logits=turn.request.prompt_logprobs)
            case act.Extend():
                part = np.array(live[call.turn].generation.tokens[call.start : call.end], np.int32)
                self.slots.prefill(call.slot, part, last=call.last)
            case act.Decode():
                slots = [slot for _, slot in call.turns]
                self.slots.decode_tokens(slots, [live[turn].generation.tokens[-1] for turn, _ in call.turns])
        return (perf_counter() - start) * 1000

    def empty(self) -> None:
        """Forget all KV."""
        for slot in range(self.slots.slots):
            self.slots.clear(slot)
        self._segments.clear()
        self._states.clear()

    def _save(self, move: act.Save) -> int:
        if self.slots.kind is MemoryKind.CHECKPOINTS:
            state = self.slots.checkpoint(move.slot)
            self._states[move.pieces[0].node] = state
            return state.nbytes
        ranges = [(piece.start, piece.end) for piece in move.pieces]
        segments = self.slots.save(move.slot, ranges, keep=not move.release)
        for piece, segment in zip(move.pieces, segments, strict=True):
            self._segments[piece.node] = segment
        return sum(segment.nbytes for segment in segments)

    def _load(self, move: act.Load) -> int:
        if self.slots.kind is MemoryKind.CHECKPOINTS:
            state = self._states[move.pieces[0].node]
            self.slots.load_checkpoint(move.slot, state)
            return state.nbytes
        parts = [(self._segments[piece.node], piece.end - piece.start) for piece in move.pieces]
        self.slots.load(move.slot, parts)
        return sum(segment.nbytes for segment, _ in parts)

    def _drop(self, node: NodeId) -> None:
        if self._segments.pop(node, None) is None:
            del self._states[node]
