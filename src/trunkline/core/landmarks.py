"""Passages of what runs were told and of what they said, so that a rewritten history is recognised by its text.

A *passage* is the hash of `WINDOW` consecutive symbols. One in four is kept, chosen by its own value, so that a text
and its copy keep the same ones wherever the copy stands ("0 mod p" selection: Schleimer, Wilkerson and Aiken,
"Winnowing: local algorithms for document fingerprinting", SIGMOD 2003). A passage that two runs both said, or were both
told, tells nothing of either: boilerplate drops out by itself.
"""

import hashlib
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from trunkline.core.types import Ints, RunKey

WINDOW = 12
KEEP_BITS = 2
MOST_CLAIMED, MOST_LOOKUPS = 128, 8192
"""Longer texts are kept, and looked up, by sparser selections, each a part of the denser ones."""
TOLD, TASK = -1, -2
TOLD_SYMBOLS, TASK_SYMBOLS = 4096, 32
"""Of what was new in a run's first prompt, so much is remembered from the front as told, and from the end as its task.

Tools and instructions, in front, are told to its sub-agents too; a task is its own.
"""

U64 = np.uint64
STEP = 0xD1342543DE82EF95
_SYMBOL, _FINAL = U64(0x9E3779B97F4A7C15), U64(0x94D049BB133111EB)
_BY_1, _BY_2, _BY_4 = (U64(pow(STEP, power, 2**64)) for power in (1, 2, 4))


class _Owner(NamedTuple):
    """`turn` is the turn that said it, or `TOLD` or `TASK`."""

    run: RunKey
    turn: int


class Landmarks:
    """The latest `keep` passages of all runs. Text of different salts never meets."""

    def __init__(self, keep: int = 1 << 18) -> None:
        self._owners: OrderedDict[int, _Owner | None] = OrderedDict()  # a plain dict finds its oldest ever more slowly
        """None: said, or told, by several. Oldest first."""
        self._keep = keep
        self._seeds: dict[str, np.uint64] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def said(self, run: RunKey, turn: int, symbols: Ints) -> None:
        """The run's turn number `turn` generated `symbols`."""
        self._claim(_Owner(run, turn), symbols)

    def told(self, run: RunKey, symbols: Ints) -> int:
        """The run began with `symbols`, which nobody had sent before. Returns how many passages its task has."""
        self._claim(_Owner(run, TASK), symbols[-TASK_SYMBOLS:])
        self._claim(_Owner(run, TOLD), symbols[:TOLD_SYMBOLS])
        return self.quoted(run.salt, symbols[-TASK_SYMBOLS:]).get(run, []).count(TASK)

    def quoted(self, salt: str, symbols: Ints) -> dict[RunKey, list[int]]:
        """Whose passages are in `symbols`: by run, the turn of each (`TOLD` or `TASK` for what it was told)."""
        found: dict[RunKey, list[int]] = {}
        if not self._owners or len(symbols) < WINDOW:
            return found
        for passage in _passages(symbols, self._seed(salt), MOST_LOOKUPS):
            owner = self._owners.get(passage)
            if owner is not None and owner.run.salt == salt:
                found.setdefault(owner.run, []).append(owner.turn)
        return found

    def _claim(self, owner: _Owner, symbols: Ints) -> None:
        if len(symbols) < WINDOW:
            return
        for passage in _passages(symbols, self._seed(owner.run.salt), MOST_CLAIMED):
            known = self._owners.pop(passage, owner)
            if known is not None and known.run != owner.run and (known.turn < 0) == (owner.turn < 0):
                known = None
            self._owners[passage] = known
        while len(self._owners) > self._keep:
            self._owners.popitem(last=False)

    def _seed(self, salt: str) -> np.uint64:
        if not salt:
            return U64(0)
        if salt not in self._seeds:
            digest = hashlib.blake2b(salt.encode(errors="surrogatepass"), digest_size=8).digest()
            self._seeds[salt] = U64(int.from_bytes(digest))
        return self._seeds[salt]


def _passages(symbols: Ints, seed: np.uint64, most: int) -> list[int]:
    """The chosen passages of `symbols` (at least `WINDOW` of them), about `most` at most, each once, in order.

    Hashes of 2, 4 and 8 symbols are made of two halves each, and 8 + 4 are the window.
    """
    one = (symbols.astype(U64) + seed) * _SYMBOL
    one ^= one >> U64(32)
    two = one[:-1] * _BY_1 + one[1:]
    four = two[:-2] * _BY_2 + two[2:]
    eight = four[:-4] * _BY_4 + four[4:]
    whole = (eight[:-4] * _BY_4 + four[8:]) * _FINAL
    whole ^= whole >> U64(32)
    bits = KEEP_BITS
    while len(whole) >> bits > most:
        bits += 1
    chosen: list[int] = whole[whole & U64((1 << bits) - 1) == 0].tolist()
    return list(dict.fromkeys(chosen))
