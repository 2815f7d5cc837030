"""What a step costs on a node that is not there: the interface, and coefficients measured on one that is."""

import random
from typing import Protocol

import msgspec


class Costs(Protocol):
    """Milliseconds of what a plan asks for. The executor adds `step_ms` to every step and `turn_ms` to every turn."""

    @property
    def step_ms(self) -> float:
        """What a step costs besides its calls and moves."""
        ...

    @property
    def turn_ms(self) -> float:
        """What a turn costs besides its steps, before it arrives."""
        ...

    def prefill_ms(self, tokens: int, start: int) -> float:
        """One slice of `tokens` prompt tokens whose first is at position `start`."""
        ...

    def decode_ms(self, sequences: int, context_tokens: float) -> float:
        """One decode call over `sequences` turns whose contexts sum to `context_tokens`."""
        ...

    def move_ms(self, bytes_moved: int) -> float:
        """One save or load."""
        ...


class MeasuredCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coefficients of one live node, as `trunkline calibrate` fits them; milliseconds, tokens, bytes.

    A prefill slice costs a constant, its tokens, and its attention (tokens times the positions they look at); a decode
    call a constant, its sequences, and the context they read; a move a constant and its bytes. `spread` is the relative
    standard deviation of a call around its fit. `source` says what was measured.
    """

    prefill: tuple[float, float, float]
    decode: tuple[float, float, float]
    move: tuple[float, float]
    step_ms: float = 0.0
    turn_ms: float = 0.0
    spread: float = 0.0
    source: str = ""

    def prefill_ms(self, tokens: int, start: int) -> float:
        """See `Costs`."""
        constant, token, attention = self.prefill
        return constant + token * tokens + attention * tokens * (start + tokens / 2)

    def decode_ms(self, sequences: int, context_tokens: float) -> float:
        """See `Costs`."""
        constant, sequence, context = self.decode
        return constant + sequence * sequences + context * context_tokens

    def move_ms(self, bytes_moved: int) -> float:
        """See `Costs`."""
        constant, byte = self.move
        return constant + byte * bytes_moved if bytes_moved else 0.0


def ideal_turn_ms(costs: Costs, prompt: int, reusable: int, answer: int, slice_tokens: int) -> float:
    """A turn alone on the node, every reusable token of its prompt held: its prefill and its decodes."""
    prefill_ms, start = 0.0, reusable
    while start < prompt:
        part = min(slice_tokens, prompt - start)
        prefill_ms += costs.prefill_ms(part, start) + costs.step_ms
        start += part
    return costs.turn_ms + prefill_ms + decodes_ms(costs, 1, prompt, answer - 1)


def decodes_ms(costs: Costs, sequences: int, context_tokens: int, steps: int) -> float:
    """`steps` decode steps in a row, each a token deeper in every sequence: the mean of the first and the last."""
    if steps <= 0:
        return 0.0
    last = context_tokens + sequences * (steps - 1)
    mean = (costs.decode_ms(sequences, context_tokens) + costs.decode_ms(sequences, last)) / 2
    return steps * (mean + costs.step_ms)


class Noise:
    """Multiplies times by seeded log-normal noise. `spread` is one call's relative standard deviation."""

    def __init__(self, seed: int, spread: float) -> None:
        self._rng = random.Random(f"noise {seed}")
        self._spread = spread

    def of(self, calls: int = 1) -> float:
        """The factor of the mean of `calls` calls."""
        if not self._spread:
            return 1.0
        return self._rng.lognormvariate(0.0, self._spread / float(calls**0.5))
