"""Digests of prompt prefixes: a prompt's history is recognised after a restart, when the tree is empty.

The digest of a prefix is a polynomial over its symbols, modulo 2^64. One pass gives it for every length, so that a
prompt is compared with any number of remembered prompts of any lengths in time linear in the prompt. It is no secret
and no proof: who shares a salt may share prefixes anyway.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from trunkline.core.types import Ints, RunKey

U64 = np.uint64
BASE = 0x9E3779B97F4A7C15
MIX = U64(0xBF58476D1CE4E5B9)


class Digest(NamedTuple):
    """The hash of a prompt's first `symbols` symbols. As text: `SYMBOLS-HASH`."""

    symbols: int
    hash: int

    def __str__(self) -> str:
        return f"{self.symbols}-{self.hash:016x}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """What `str` made; None for anything else."""
        symbols, dash, code = text.partition("-")
        try:
            return cls(int(symbols), int(code, 16)) if dash else None
        except ValueError:
            return None


EMPTY = Digest(0, 0)


class _Powers:
    """BASE^0, BASE^1, ... modulo 2^64: a constant that is computed as far as it was needed."""

    def __init__(self) -> None:
        self._known = np.ones(1, U64)

    def between(self, start: int, end: int) -> NDArray[np.uint64]:
        if end > len(self._known):
            factors = np.full(max(end, 2 * len(self._known)), BASE, U64)
            factors[0] = 1
            self._known = np.multiply.accumulate(factors)
        return self._known[start:end]


_powers = _Powers()


def extended(digest: Digest, symbols: Ints) -> Digest:
    """The digest of all of `symbols`, given that of a prefix of theirs."""
    terms = _terms(symbols[digest.symbols :], digest.symbols)
    return Digest(len(symbols), (digest.hash + int(terms.sum(dtype=U64))) % 2**64)


def prefixes(symbols: Ints, lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The hashes of the prefixes of these lengths (each 1 to len(symbols))."""
    sums: NDArray[np.uint64] = np.cumsum(_terms(symbols, 0), dtype=U64)
    return sums[lengths - 1]


def _terms(symbols: Ints, start: int) -> NDArray[np.uint64]:
    mixed = (symbols.astype(U64) + U64(1)) * MIX
    mixed ^= mixed >> U64(31)
    mixed *= _powers.between(start, start + len(symbols))
    return mixed


@dataclass(slots=True)
class _Salt:
    runs: dict[Digest, RunKey]
    counts: dict[int, int]
    """How many digests there are of each length."""


class Remembered:
    """Digests of the last prompts of runs whose history the tree does not hold."""

    def __init__(self) -> None:
        self._salts: dict[str, _Salt] = {}

    def add(self, run: RunKey, digest: Digest) -> None:
        """The run's last prompt was this one. Of two runs with the same prompt the later one is found."""
        salt = self._salts.setdefault(run.salt, _Salt({}, {}))
        if digest not in salt.runs:
            salt.counts[digest.symbols] = salt.counts.get(digest.symbols, 0) + 1
        salt.runs[digest] = run

    def discard(self, run: RunKey, digest: Digest) -> None:
        """The tree holds the run's history again, or the run is forgotten."""
        salt = self._salts.get(run.salt)
        if salt is None or salt.runs.get(digest) != run:
            return
        del salt.runs[digest]
        salt.counts[digest.symbols] -= 1
        if not salt.counts[digest.symbols]:
            del salt.counts[digest.symbols]
        if not salt.runs:
            del self._salts[run.salt]

    def longest(self, salt: str, symbols: Ints) -> tuple[RunKey, int] | None:
        """The run whose last prompt begins `symbols`, the longest such prompt, and its length in symbols."""
        known = self._salts.get(salt)
        if known is None:
            return None
        lengths = np.array(sorted(n for n in known.counts if n <= len(symbols)), np.int64)
        if not len(lengths):
            return None
        hashes = prefixes(symbols, lengths).tolist()
        for length, code in zip(reversed(lengths.tolist()), reversed(hashes), strict=True):
            run = known.runs.get(Digest(length, code))
            if run is not None:
                return run, length
        return None
