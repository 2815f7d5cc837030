"""The argument of `llama_decode`, filled without a Python loop."""

import ctypes

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from trunkline.core.types import Ints

_INT32_P = ctypes.POINTER(ctypes.c_int32)


class Batch:
    """A `llama_batch` over numpy arrays: token i of sequence `seqs[i]` at `positions[i]`."""

    def __init__(self, capacity: int) -> None:
        self.count = 0
        self.outputs: NDArray[np.intp] = np.empty(0, np.intp)
        self._tokens, self._positions, self._seqs = (np.zeros(capacity, np.int32) for _ in range(3))
        self._one = np.ones(capacity, np.int32)
        self.logits = np.zeros(capacity, np.int8)
        # seq_id is an array of pointers, here into _seqs.
        self._seq_pointers = self._seqs.ctypes.data + 4 * np.arange(capacity, dtype=np.uint64)
        self.struct = llama_cpp.llama_batch(
            0,
            self._tokens.ctypes.data_as(_INT32_P),
            None,
            self._positions.ctypes.data_as(_INT32_P),
            self._one.ctypes.data_as(_INT32_P),
            self._seq_pointers.ctypes.data_as(ctypes.POINTER(_INT32_P)),
            self.logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def fill(self, tokens: Ints, positions: Ints, seqs: Ints) -> None:
        """Set the batch, no logits wanted yet."""
        self.count = self.struct.n_tokens = len(tokens)
        self._tokens[: self.count] = tokens
        self._positions[: self.count] = positions
        self._seqs[: self.count] = seqs
        self.logits[: self.count] = 0
