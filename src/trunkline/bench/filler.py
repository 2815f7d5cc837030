"""Deterministic filler: block ids become the same tokens or the same words, always and everywhere.

Two prompts share exactly as many tokens as their block ids say, because a block's content depends only on the seed, the
id space (a session's own, unless several share one) and the block id. A tail depends on the name it is given.
"""

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

# Words that common byte-pair vocabularies hold whole, with the space before them: one word is about one token.
_WORDS = (
    "able about above action again agent air all also and animal answer area arm art ask away back bad bank "
    "base bed before best better big bird black blue board boat body book both box boy bring build bus "
    "business call can car case cat change child city class clean clear close cold color come cost country "
    "course cut day deep design door down draw dream drive dry early earth east easy eat edge end energy even "
    "event every eye face fact fall family far farm fast field fight final find fine fire first fish five fly "
    "follow food foot force form four free friend front full game garden general girl give glass go gold good "
    "great green ground group grow hair half hand happy hard head hear heart heat help high hold home horse "
    "hot hour house idea island job keep key kind king know land language large last late law lead learn leave "
    "left letter level life light line list little long look love low machine main make man many map mark "
    "market matter mean measure mind money moon morning mother mountain move music name nature near need new "
    "next night north note number object ocean office old open order other page paper part party people person "
    "picture piece place plan plant play point power press public question quick "
)
WORDS = tuple(_WORDS.split())

CHUNK_TOKENS = 64


class Filler:
    """Makes content for one seed. `vocabulary` is the half-open range of token ids that prompts may use."""

    def __init__(self, seed: int = 0, vocabulary: tuple[int, int] = (1000, 9000)) -> None:
        self.seed = seed
        self.low, self.high = vocabulary
        assert 0 <= self.low < self.high

    def tokens(self, space: str, blocks: Iterable[int], block_tokens: int, tail: str, tail_tokens: int) -> list[int]:
        """Token ids of a prompt: its blocks, then `tail_tokens` that only the name `tail` brings back."""
        drawn = self._draws(space, blocks, block_tokens, tail, tail_tokens)
        ids: list[int] = (drawn % (self.high - self.low) + self.low).tolist()
        return ids

    def text(self, space: str, blocks: Iterable[int], block_tokens: int, tail: str, tail_tokens: int) -> str:
        """The same in words, one a token, each with a space before it."""
        drawn = self._draws(space, blocks, block_tokens, tail, tail_tokens)
        return "".join(f" {WORDS[at]}" for at in (drawn % len(WORDS)).tolist())

    def _draws(
        self, space: str, blocks: Iterable[int], block_tokens: int, tail: str, tail_tokens: int
    ) -> NDArray[np.uint32]:
        together = max(1, CHUNK_TOKENS // max(1, block_tokens))  # small blocks are drawn several at once
        parts = []
        for block in blocks:
            chunk, at = divmod(block, together)
            drawn = _draw(f"{self.seed} block {space} {chunk}", together * block_tokens)
            parts.append(drawn[at * block_tokens : (at + 1) * block_tokens])
        return np.concatenate([*parts, _draw(f"{self.seed} tail {space} {tail}", tail_tokens)])


@lru_cache(maxsize=4096)
def _draw(name: str, count: int) -> NDArray[np.uint32]:
    digest = hashlib.shake_128(name.encode()).digest(4 * count)
    return np.frombuffer(digest, dtype="<u4")
