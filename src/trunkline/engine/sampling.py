"""Choosing one token from one row of logits, in numpy.

llama.cpp's own sampler chain was not used: its penalties share one window, where OpenAI's count generated tokens only
and the repetition penalty counts the prompt too; its seeds have 32 bits; and copying a row into its array of
candidates costs as much as the whole choice does here.

Order of the parts, as vLLM has it: repetition penalty, then bias, presence and frequency penalties (all additive),
temperature, min-p, top-k, top-p, and one draw from what is left. A seed gives one uniform number a token.

Errors:
    ValueError
    `-- SamplingError    parameters out of range, or logits that no token can be chosen from; the text names the fix
"""

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trunkline.core.types import Ints
from trunkline.wire.turns import Sampling, TokenLogprob

Logits = NDArray[np.float32]
"""One row: (vocabulary size,), natural-log odds up to a constant."""

NO_IDS: Ints = np.empty(0, np.int32)

_GREEDY_BELOW = 1e-5  # a temperature this low is greedy; dividing by it would overflow


class SamplingError(ValueError):
    """Sampling parameters, or logits, that cannot be used."""


class Chooser(Protocol):
    """Chooses the tokens of one turn."""

    def choose(self, row: Logits) -> int:
        """The next token, from logits that are -inf where a token is not allowed. Raises `SamplingError`."""

    def count(self, token: int) -> None:
        """`token` came next without being chosen: the turn's grammar forced it."""


Choosers = Callable[[Sampling, Ints, int, Ints], Chooser]
"""Makes a turn's chooser from its parameters, its prompt, the vocabulary's size and the suppressed ids."""


class Sampler:
    """Chooses the tokens of one turn. Keeps what penalties need; never keeps a row, nor changes one."""

    def __init__(self, sampling: Sampling, prompt: Ints, size: int, suppressed: Ints = NO_IDS) -> None:
        """`size` is the vocabulary's, `suppressed` the ids never to be chosen. Raises `SamplingError`."""
        _check(sampling, size)
        self._sampling = sampling
        self._greedy = sampling.temperature < _GREEDY_BELOW
        seed = None if sampling.seed is None else sampling.seed % 2**64
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._additive = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        self._shift = self._first_shift(size, suppressed)
        self._generated: set[int] = set()
        self._repeats = np.unique(prompt) if sampling.repetition_penalty != 1 else None

    def _first_shift(self, size: int, suppressed: Ints) -> Logits | None:
        """What is added to every row: the bias, less the additive penalties of what was generated so far."""
        if not self._additive and not self._sampling.logit_bias and not suppressed.size:
            return None
        shift = np.zeros(size, np.float32)
        for token, bias in self._sampling.logit_bias:
            shift[token] += bias
        shift[suppressed] = -np.inf
        return shift

    def choose(self, row: Logits) -> int:
        """The next token. Greedy without penalties is one argmax, the lowest id winning ties.

        Raises `SamplingError` if the row holds NaN or nothing finite.
        """
        with np.errstate(over="ignore"):  # masked logits may be as low as float32 goes
            scores = self._adjusted(row)
            best = int(scores.argmax())
            if not math.isfinite(scores[best]):
                why = "logit_bias and the schema leave no token, or the model computed no usable logits"
                raise SamplingError(f"the best score is {scores[best]}: {why}")
            token = best if self._greedy else self._draw(scores, scores[best])
        self.count(token)
        return token

    def _adjusted(self, row: Logits) -> Logits:
        if self._repeats is None:
            return row if self._shift is None else row + self._shift
        scores, penalty = row.copy(), np.float32(self._sampling.repetition_penalty)
        repeated = scores[self._repeats]
        scores[self._repeats] = np.where(repeated > 0, repeated / penalty, repeated * penalty)
        if self._shift is not None:
            scores += self._shift
        return scores

    def count(self, token: int) -> None:
        """Note a token of the answer, which penalties count."""
        if self._shift is not None and self._additive:
            fresh = token not in self._generated
            self._shift[token] -= self._sampling.frequency_penalty + (self._sampling.presence_penalty if fresh else 0)
        if self._repeats is not None and token not in self._generated:
            self._repeats = np.union1d(self._repeats, np.array([token], np.int32))
        self._generated.add(token)

    def _draw(self, scores: Logits, best: np.float32) -> int:
        sampling = self._sampling
        weights = scores - best
        weights *= np.float32(1 / sampling.temperature)
        ids: NDArray[np.intp] | None = None
        least = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
        if 0 < sampling.top_k < len(weights):
            least = max(least, np.partition(weights, -sampling.top_k)[-sampling.top_k])  # ties all stay
        if least > -math.inf:
            ids = np.flatnonzero(weights >= least)
            weights = weights[ids]
        np.exp(weights, out=weights)
        if sampling.top_p < 1:
            nucleus = _nucleus(weights, sampling.top_p)
            weights = weights[nucleus]
            ids = nucleus if ids is None else ids[nucleus]
        at = _pick(weights, self._random.random())
        return at if ids is None else int(ids[at])


_BLOCK = 512


def _pick(weights: Logits, share: float) -> int:
    """Index of the weight that the running sum's `share` (in [0, 1)) falls into; never one of weight 0.

    The running sum of a whole vocabulary is the costliest thing here: it is taken of blocks, then inside one block.
    """
    blocks = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64)
    sums = np.cumsum(blocks)
    target = share * sums[-1]
    block = _first_over(sums, target)
    inside = np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
    return block * _BLOCK + _first_over(inside, target - (sums[block] - blocks[block]))


def _first_over(sums: NDArray[np.float64], target: float) -> int:
    """Index of the first running sum over `target`; rounding must not lead past the last weight that is not 0."""
    return min(int(np.searchsorted(sums, target, side="right")), int(np.searchsorted(sums, sums[-1])))


def _nucleus(weights: Logits, top_p: float) -> NDArray[np.intp]:
    """Indices of the fewest, heaviest weights that hold `top_p` of the mass; at least one; ties by index.

    The weights under `(1 - top_p) / n` of the mass hold less than `1 - top_p` of it together: none is in the nucleus,
    and only the others need sorting.
    """
    total = float(weights.sum(dtype=np.float64))
    heavy = np.flatnonzero(weights >= np.float32((1 - top_p) * total / len(weights)))
    order = heavy[np.argsort(-weights[heavy], kind="stable")]
    mass = np.cumsum(weights[order], dtype=np.float64)
    return order[: int(np.searchsorted(mass, top_p * total)) + 1]


def logprob(row: Logits, token: int, top: int) -> TokenLogprob:
    """Log probability of `token` under the raw `row` (before temperature, bias and penalties), and the `top` best."""
    best = row.max()
    log_mass = float(best) + math.log(float(np.exp(row - best).sum(dtype=np.float64)))
    alternatives: list[tuple[int, float]] = []
    if top > 0:
        top = min(top, len(row))
        ids = np.flatnonzero(row >= np.partition(row, -top)[-top])
        ids = ids[np.argsort(-row[ids], kind="stable")][:top]
        alternatives = [(int(i), float(row[i]) - log_mass) for i in ids]
    return TokenLogprob(token, float(row[token]) - log_mass, tuple(alternatives))


_RANGES = {  # far wider than what is useful: what float32 scores stand
    "temperature": (0, 1e6),
    "top_p": (0, 1),
    "top_k": (-1, 2**31),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-1e6, 1e6),
    "frequency_penalty": (-1e6, 1e6),
}


def _check(sampling: Sampling, size: int) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(sampling, name)
        if not low <= value <= high:  # NaN is outside too
            raise SamplingError(f"{name} is {value}: it must be a number from {low} to {high}")
    for token, bias in sampling.logit_bias:
        if not 0 <= token < size:
            raise SamplingError(f"logit_bias names token {token}: the vocabulary has ids from 0 to {size - 1}")
        if not -1e6 <= bias <= 1e6:
            raise SamplingError(f"logit_bias of token {token} is {bias}: it must be a number from -100 to 100")
