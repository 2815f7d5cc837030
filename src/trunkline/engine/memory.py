"""The device side of the engine: a llama.cpp context whose sequences are working slots for turns in flight.

Every slot is a *stream* of its own (`kv_unified=False`): a step costs what the runs in it hold, not what others hold.
Nothing is remembered here. What a turn leaves behind is saved to host memory as segments (or, for memory that cannot be
cut, as a checkpoint) and loaded into whichever slot the next turn gets. Why: docs/decisions/0001-kv-layout.md.
"""

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from trunkline.core.types import Ints, MemoryKind
from trunkline.engine.batch import Batch
from trunkline.engine.errors import ContextError, DecodeFailed, LayoutError, MemoryFault, NotCuttable
from trunkline.engine.model import Model, llama_errors
from trunkline.engine.segments import Bytes, KvLayout, Segment
from trunkline.engine.threads import Threads, default_threads

_log = logging.getLogger(__name__)
_ALL_LOGITS_ROWS = 32
_CTX_PAD = 256
_REASONS = {
    1: "no room for the batch in its slots",
    2: "it was aborted",
    -1: "the batch is not valid",
    -2: "out of memory",
    -3: "the computation failed",
}

Logits = NDArray[np.float32]


class FlashAttention(IntEnum):
    """llama.cpp's switch. `AUTO`: on wherever the backend has it."""

    AUTO = -1
    OFF = 0
    ON = 1


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The whole opaque state of a slot that held `tokens` tokens; restores exactly there and nowhere else."""

    tokens: int
    data: Bytes

    @property
    def nbytes(self) -> int:
        """Host memory that the state takes."""
        return self.data.nbytes


class Slots:
    """`slots` working places of `slot_tokens` tokens each, over one model.

    Not thread-safe: one thread owns it. Positions are tracked here; callers give tokens only. After any error of the
    tree in `errors.py`, `length` says what every slot still holds.
    """

    def __init__(
        self,
        model: Model,
        *,
        slots: int,
        slot_tokens: int,
        threads: Threads | None = None,
        flash_attention: FlashAttention | None = None,
        max_batch: int = 512,
    ) -> None:
        """Make the context and learn how it lays out KV.

        `flash_attention` None is the measured default: off on CPUs, `AUTO` with layers on a GPU. `max_batch` bounds one
        `prefill`. Raises `ContextError`.
        """
        assert slots >= 1 and slot_tokens >= 1 and max_batch >= slots
        self.slots, self.slot_tokens = slots, slot_tokens
        self.max_batch = max_batch
        self._n_vocab, self._n_swa = model.n_vocab, model.n_swa
        if flash_attention is None:
            flash_attention = FlashAttention.AUTO if model.gpu_layers else FlashAttention.OFF
        self.context = self._open(model, threads or default_threads(), flash_attention)
        self._memory = llama_cpp.llama_get_memory(self.context)
        self._batch = Batch(max_batch)
        self._held = [0] * slots
        self._rows: Logits | None = None
        self._state = np.empty(0, np.uint8)
        self.kind = MemoryKind.CHECKPOINTS
        self._running_state = model.is_recurrent or model.is_hybrid
        self._layout = self._learn_layout() if model.cuttable else None
        if self._layout is not None:
            self.kind = MemoryKind.CUTTABLE

    def _open(self, model: Model, threads: Threads, flash_attention: FlashAttention) -> int:
        if self.slot_tokens > model.n_ctx_train:
            raise ContextError(
                f"{model.name} was trained for {model.n_ctx_train} tokens, and {self.slot_tokens} were asked for; "
                f"set --ctx to at most {model.n_ctx_train}"
            )
        params = llama_cpp.llama_context_default_params()
        # llama.cpp divides n_ctx among the streams and rounds each share to a multiple of 256.
        params.n_ctx = self.slots * -(-self.slot_tokens // _CTX_PAD) * _CTX_PAD
        params.n_seq_max = self.slots
        params.n_batch = params.n_ubatch = self.max_batch
        params.n_outputs_max = params.n_outputs_max_per_seq = min(self.max_batch, max(self.slots, _ALL_LOGITS_ROWS))
        params.n_threads, params.n_threads_batch = threads.decode, threads.batch
        params.flash_attn_type = int(flash_attention)
        params.kv_unified = False
        params.offload_kqv = params.op_offload = model.gpu_layers != 0
        params.no_perf = True
        with llama_errors() as errors:
            context = llama_cpp.llama_init_from_model(model.pointer, params)
            if not context:
                raise ContextError(
                    f"llama.cpp cannot make {self.slots} slots of {self.slot_tokens} tokens: "
                    f"{'; '.join(errors) or 'it gave no reason'}; lower --kv-bytes or --ctx"
                )
        holds = llama_cpp.llama_n_ctx_seq(context)
        if holds < self.slot_tokens:
            llama_cpp.llama_free(context)
            raise ContextError(
                f"a slot holds {holds} tokens, not {self.slot_tokens}; lower --ctx or the number of slots"
            )
        return int(context)

    def _learn_layout(self) -> KvLayout | None:
        """Read the layout off the state of one token in slot 0; None if it is not one that can be cut."""
        self.prefill(0, np.zeros(1, np.int32), last=True)
        try:
            return KvLayout.learn(self._read(0), slot=0, streams=self.slots, tokens=1)
        except LayoutError as error:
            _log.warning("only whole turns of this model can be reused: %s", error)
            return None
        finally:
            self.clear(0)

    def close(self) -> None:
        """Free the context."""
        if self.context:
            llama_cpp.llama_free(self.context)
            self.context = 0

    def set_threads(self, threads: Threads) -> None:
        """Use other thread counts from the next call on."""
        llama_cpp.llama_set_n_threads(self.context, threads.decode, threads.batch)

    # --- computing ------------------------------------------------------------------------------------------------

    def length(self, slot: int) -> int:
        """Tokens that the slot holds."""
        return self._held[slot]

    def decode_tokens(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Append one token to each of `slots` (ascending); row i of the logits is then that of the i-th slot.

        Neighbouring slots are computed together: 0, 1, 2 is one batch, 0, 2, 4 are three. Raises `DecodeFailed`.
        """
        assert 0 < len(slots) == len(tokens) and all(a < b for a, b in pairwise(slots))
        ids = np.asarray(slots, np.int32)
        positions = np.asarray([self._held[s] for s in slots], np.int32)
        assert positions.max() < self.slot_tokens
        self._batch.fill(np.asarray(tokens, np.int32), positions, ids)
        self._batch.logits[: len(slots)] = 1
        self._decode(slots)
        for slot in slots:
            self._held[slot] += 1

    def prefill(self, slot: int, tokens: Ints, *, last: bool, all_logits: bool = False) -> None:
        """Append up to `max_batch` tokens to a slot. Raises `DecodeFailed`.

        Afterwards row 0 of the logits is that of the last token (`last`), or row i that of the i-th (`all_logits`,
        which costs a copy of `len(tokens) * n_vocab * 4` bytes).
        """
        count = len(tokens)
        assert 0 < count <= self.max_batch and self._held[slot] + count <= self.slot_tokens
        if not all_logits:
            self._append(slot, tokens, int(last))
            return
        rows = np.empty((count, self._n_vocab), np.float32)
        for start in range(0, count, _ALL_LOGITS_ROWS):
            part = tokens[start : start + _ALL_LOGITS_ROWS]
            self._append(slot, part, len(part))
            for i in range(len(part)):
                rows[start + i] = self.logits(i)
        self._rows = rows

    def logits(self, i: int) -> Logits:
        """Row `i` of the latest call's logits, (n_vocab,) float32: a view, valid until the next call."""
        row: Logits
        if self._rows is not None:
            row = self._rows[i]
        else:
            pointer = llama_cpp.llama_get_logits_ith(self.context, int(self._batch.outputs[i]))
            assert pointer, f"no logits were asked for row {i}"
            row = np.ctypeslib.as_array(pointer, shape=(self._n_vocab,))
        return row

    def _append(self, slot: int, tokens: Ints, outputs: int) -> None:
        """Compute `tokens` in `slot`, with logits of the last `outputs` of them."""
        count, held = len(tokens), self._held[slot]
        self._batch.fill(tokens, np.arange(held, held + count, dtype=np.int32), np.full(count, slot, np.int32))
        self._batch.logits[count - outputs : count] = 1
        self._decode([slot])
        self._held[slot] = held + count

    def _decode(self, slots: Sequence[int]) -> None:
        self._rows = None
        self._batch.outputs = np.flatnonzero(self._batch.logits[: self._batch.count])
        with llama_errors() as errors:
            code = llama_cpp.llama_decode(self.context, self._batch.struct)
            if code == 0:
                return
            reason = "; ".join([_REASONS.get(code, "unknown error"), *errors])
        # Some of the batch may have been stored: cut every slot back to what it held.
        self._batch.outputs = self._batch.outputs[:0]
        raise DecodeFailed(code, reason, [s for s in slots if not self._rewind(s)])

    def _rewind(self, slot: int) -> bool:
        """Put the slot back to the tokens it held; where that is impossible, clear it and return False."""
        held = self._held[slot]
        if self.kind is MemoryKind.CUTTABLE:
            llama_cpp.llama_memory_seq_rm(self._memory, slot, held, -1)
        if held and self._holds(slot, held):
            # A failed batch can leave a stream's next free cell at that of another stream (`prepare` in
            # llama-kv-cache.cpp), so later tokens would leave a hole. Loading lays the cells out anew.
            try:
                self._write(slot, self._read(slot), held)
                return True
            except MemoryFault as fault:
                _log.error("slot %d after a failed batch: %s", slot, fault)
        self.clear(slot)
        return held == 0

    # --- cutting, saving, loading -----------------------------------------------------------------------------------

    def clear(self, slot: int) -> None:
        """Empty the slot."""
        llama_cpp.llama_memory_seq_rm(self._memory, slot, -1, -1)
        self._held[slot] = 0
        if self._positions(slot) != (-1, -1):
            raise MemoryFault(f"slot {slot} still holds positions {self._positions(slot)} after it was cleared")

    def trim(self, slot: int, tokens: int) -> None:
        """Cut the slot to its first `tokens` tokens. Raises `NotCuttable` or `MemoryFault`."""
        held = self._held[slot]
        assert 0 <= tokens <= held
        if tokens == 0:
            self.clear(slot)
        elif tokens < held:
            self._need_cuttable(f"trim {held} tokens to {tokens}")
            llama_cpp.llama_memory_seq_rm(self._memory, slot, tokens, -1)
            self._settle(slot, tokens)

    def save(self, slot: int, ranges: Sequence[tuple[int, int]], *, keep: bool = True) -> list[Segment]:
        """Copies of token ranges [start, end) of the slot, ascending. Raises `NotCuttable` or `LayoutError`.

        llama.cpp hands out whole sequences only, so this reads all that the slot holds. With `keep=False` the slot is
        empty afterwards, and only what lies behind the first range's start is read: much less for a long history.
        """
        layout = self._need_cuttable("save token ranges")
        held = self._held[slot]
        assert ranges and all(0 <= start < end <= held for start, end in ranges)
        first = 0
        if not keep:
            first = min(start for start, _ in ranges)
            if first:
                llama_cpp.llama_memory_seq_rm(self._memory, slot, 0, first)
        try:
            blob = self._read(slot)
            layout.check(blob, slot=slot, first=first, tokens=held - first)
        except LayoutError:
            self.clear(slot)
            raise
        segments = layout.cut(blob, slot=slot, first=first, tokens=held - first, ranges=ranges)
        if not keep:
            self.clear(slot)
        return segments

    def load(self, slot: int, parts: Sequence[tuple[Segment, int]]) -> None:
        """Make the slot hold exactly the first `used` tokens of each segment, in order from token 0.

        Segments come from this object's `save`, of any slot. Raises `NotCuttable` or `MemoryFault`.
        """
        layout = self._need_cuttable("load segments")
        tokens = sum(used for _, used in parts)
        assert 0 < tokens <= self.slot_tokens
        assert all(0 < used <= s.tokens and s.layout is layout for s, used in parts)
        blob = layout.build(self._room(layout.blob_bytes(tokens)), slot, parts)
        self._write(slot, blob, tokens)

    def checkpoint(self, slot: int) -> Checkpoint:
        """The slot's whole state as it is now. Raises `MemoryFault`.

        A window's cells lie in a ring, and a restored one starts at cell 0: other cells, another order of additions,
        other rounding. So the state is loaded back at once, and going on here is bit-identical to going on elsewhere.
        """
        assert self._held[slot] > 0
        checkpoint = Checkpoint(self._held[slot], self._read(slot).copy())
        if self._n_swa:
            self.load_checkpoint(slot, checkpoint)
        return checkpoint

    def load_checkpoint(self, slot: int, checkpoint: Checkpoint) -> None:
        """Make the slot hold exactly what was held when the checkpoint was taken, in any slot. Raises `MemoryFault`."""
        self._write(slot, checkpoint.data, checkpoint.tokens)

    def _need_cuttable(self, wanted: str) -> KvLayout:
        if self._layout is None:
            raise NotCuttable(f"cannot {wanted}: this model's memory has no exact cut; load a checkpoint instead")
        return self._layout

    def _room(self, size: int) -> Bytes:
        """The first `size` bytes of the buffer that all states pass through."""
        if self._state.size < size:
            self._state = np.empty(size + size // 4, np.uint8)
        return self._state[:size]

    def _read(self, slot: int) -> Bytes:
        """The slot's saved state, in the shared buffer."""
        size = llama_cpp.llama_state_seq_get_size(self.context, slot)
        blob = self._room(size)
        written = llama_cpp.llama_state_seq_get_data(self.context, _pointer(blob), size, slot)
        if written != size:
            self.clear(slot)
            raise MemoryFault(f"llama.cpp saved {written} of {size} bytes of slot {slot}")
        return blob

    def _write(self, slot: int, blob: Bytes, tokens: int) -> None:
        with llama_errors() as errors:
            read = llama_cpp.llama_state_seq_set_data(self.context, _pointer(blob), blob.size, slot)
            reason = "; ".join(errors) or "it gave no reason"
        if read != blob.size:
            self.clear(slot)
            raise MemoryFault(f"llama.cpp took {read} of {blob.size} bytes into slot {slot}: {reason}")
        self._settle(slot, tokens)

    def _settle(self, slot: int, tokens: int) -> None:
        """Note that the slot holds its first `tokens` tokens, if it does."""
        if not self._holds(slot, tokens):
            first, latest = self._positions(slot)
            self.clear(slot)
            raise MemoryFault(f"slot {slot} holds positions {first} to {latest} where {tokens} tokens must be")
        self._held[slot] = tokens

    def _holds(self, slot: int, tokens: int) -> bool:
        """Whether the slot's positions say that its next token can be number `tokens`.

        Return codes do not: cutting a sliding window back succeeds although what lay before it is gone.
        """
        first, latest = self._positions(slot)
        # A window must reach back n_swa positions; a running state has no position but the last.
        reaches = self._running_state or first <= (max(0, tokens - self._n_swa) if self._n_swa else 0)
        return latest == tokens - 1 and reaches

    def _positions(self, slot: int) -> tuple[int, int]:
        return (
            int(llama_cpp.llama_memory_seq_pos_min(self._memory, slot)),
            int(llama_cpp.llama_memory_seq_pos_max(self._memory, slot)),
        )


def _pointer(blob: Bytes) -> "ctypes._Pointer[ctypes.c_uint8]":
    return blob.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
