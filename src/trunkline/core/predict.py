"""What is expected, learned from what was observed: step costs, output lengths, tool gaps.

Costs are linear in a few features and fitted online by least squares with exponential forgetting and a pull toward a
prior, so that a model with one kind of observation stays sane on the others.
"""

from trunkline.core.types import RunKey

FORGET = 0.98
"""Weight of the past after one observation: about the last 50 count."""


LEAST = 1e-6
"""No coefficient falls below this share of its prior: the slowest machine thought of is not a million times slower than
the fastest."""


Features = tuple[float, float, float]


class LinearCost:
    """Milliseconds as a non-negative combination of three features."""

    def __init__(self, prior: Features, scale: Features) -> None:
        """`prior`: coefficients before anything was observed. `scale`: a typical size of each feature."""
        self._prior = prior
        self._ridge = tuple(0.5 * size**2 for size in scale)
        self._a = [[0.0] * len(prior) for _ in prior]
        self._b = [0.0] * len(prior)
        self._coefficients = prior

    def observe(self, features: Features, ms: float, count: int = 1) -> None:
        """Learn from one measured call, or from `count` like it that took `ms` each."""
        kept = FORGET**count
        weight = (1.0 - kept) / (1.0 - FORGET)
        for i, x in enumerate(features):
            row = self._a[i]
            for j, y in enumerate(features):
                row[j] = kept * row[j] + weight * x * y
            self._b[i] = kept * self._b[i] + weight * x * ms
        self._solve()

    def _solve(self) -> None:
        """Least squares with the pull; what would fall below its floor stays there and the others are solved anew."""
        floors = [LEAST * prior for prior in self._prior]
        found, free = floors, [0, 1, 2]
        while free:
            rows = [self._row(i, free, floors) for i in free]
            solved = dict(zip(free, _solved(rows), strict=True))
            found = [solved.get(i, floor) for i, floor in enumerate(floors)]
            low = [i for i in free if found[i] < floors[i]]
            if not low:
                break
            free = [i for i in free if i not in low]
        first, second, third = (max(c, floor) for c, floor in zip(found, floors, strict=True))
        self._coefficients = (first, second, third)

    def _row(self, i: int, free: list[int], floors: list[float]) -> list[float]:
        """Equation `i` in the `free` coefficients, the others at their floors: left side, then right side."""
        left = [self._a[i][j] + (self._ridge[i] if i == j else 0.0) for j in free]
        known = sum(self._a[i][j] * floors[j] for j in range(3) if j not in free)
        return [*left, self._b[i] + self._ridge[i] * self._prior[i] - known]

    def predict(self, features: Features) -> float:
        """Expected milliseconds."""
        (a, b, c), (x, y, z) = self._coefficients, features
        return a * x + b * y + c * z


def _solved(rows: list[list[float]]) -> list[float]:
    """X of A x = b, where a row is A's and then b's; A is symmetric and positive definite, so no pivoting is needed.

    By hand, because a call of numpy costs ten times as much for so few numbers.
    """
    count = len(rows)
    for i in range(count):
        for lower in rows[i + 1 :]:
            factor = lower[i] / rows[i][i]
            for j in range(i, count + 1):
                lower[j] -= factor * rows[i][j]
    solved = [0.0] * count
    for i in reversed(range(count)):
        known = sum(rows[i][j] * solved[j] for j in range(i + 1, count))
        solved[i] = (rows[i][count] - known) / rows[i][i]
    return solved


class CostModel:
    """Expected milliseconds of calls and moves on one engine.

    A prefill slice costs a constant, its tokens, and its attention (tokens times the positions they look at). A decode
    call costs a constant, its sequences, and the context they read.
    """

    def __init__(self) -> None:
        self._prefill = LinearCost((5.0, 1.4, 0.0011), (1.0, 64.0, 64.0 * 1000))
        self._decode = LinearCost((6.0, 3.0, 0.0027), (1.0, 2.0, 2000.0))
        self._move_bytes_per_ms = 2e6

    def prefill_ms(self, tokens: int, start: int) -> float:
        """One slice of `tokens` prompt tokens whose first is at position `start`."""
        return self._prefill.predict(_prefill_features(tokens, start))

    def prefill_whole_ms(self, tokens: int, start: int, slice_tokens: int) -> float:
        """All slices of a longer prefill."""
        slices = -(-tokens // slice_tokens)
        constant, per_token, attention = _prefill_features(tokens, start)
        return self._prefill.predict((constant * slices, per_token, attention))

    def decode_ms(self, sequences: int, context_tokens: int) -> float:
        """One decode call over `sequences` runs whose contexts sum to `context_tokens`."""
        return self._decode.predict((1.0, float(sequences), float(context_tokens)))

    def move_ms(self, bytes_moved: int) -> float:
        """One save or load."""
        return bytes_moved / self._move_bytes_per_ms

    def slice_tokens(self, budget_ms: float, start: int, limit: int) -> int:
        """The most prompt tokens from `start` on whose slice is expected to fit `budget_ms` (at most `limit`)."""
        if self.prefill_ms(limit, start) <= budget_ms:
            return limit
        lo, hi = 0, limit
        while lo < hi:
            mid = (lo + hi + 1) // 2
            lo, hi = (mid, hi) if self.prefill_ms(mid, start) <= budget_ms else (lo, mid - 1)
        return lo

    def saw_prefill(self, tokens: int, start: int, ms: float) -> None:
        """Learn from a prefill call."""
        self._prefill.observe(_prefill_features(tokens, start), ms)

    def saw_decode(self, sequences: int, context_tokens: float, ms: float, count: int = 1) -> None:
        """Learn from a decode call, or from `count` over the same sequences (means of context and time)."""
        self._decode.observe((1.0, float(sequences), float(context_tokens)), ms, count)

    def saw_move(self, bytes_moved: int, ms: float) -> None:
        """Learn from a save or load."""
        if bytes_moved > 0 and ms > 0:
            self._move_bytes_per_ms += 0.2 * (bytes_moved / ms - self._move_bytes_per_ms)


def _prefill_features(tokens: int, start: int) -> tuple[float, float, float]:
    return (1.0, float(tokens), tokens * (start + tokens / 2))


class Habit:
    """A running mean and spread of one quantity."""

    __slots__ = ("count", "mean", "spread")

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.spread = 0.0

    def observe(self, value: float) -> None:
        """Learn one value; recent ones count most."""
        self.count += 1
        step = max(0.25, 1 / self.count)
        self.spread += step * (abs(value - self.mean) - self.spread) if self.count > 1 else 0.0
        self.mean += step * (value - self.mean)

    def high(self) -> float:
        """A value that is rarely exceeded."""
        return self.mean + 2 * self.spread


class Forecast:
    """Output lengths of each run, and tool gaps over all runs."""

    def __init__(self) -> None:
        self._outputs: dict[RunKey, Habit] = {}
        self._all_gaps = Habit()

    def saw_output(self, run: RunKey, tokens: int) -> None:
        """A turn of `run` generated `tokens` tokens."""
        self._outputs.setdefault(run, Habit()).observe(tokens)

    def saw_gap(self, ms: float) -> None:
        """A tool gap lasted `ms`."""
        self._all_gaps.observe(ms)

    def output_tokens(self, run: RunKey, limit: int) -> int:
        """Tokens the next turn is expected to generate, on the high side, at most `limit`."""
        habit = self._outputs.get(run)
        return limit if habit is None else min(limit, max(1, round(habit.high())))

    def typical_gap_ms(self) -> float:
        """The mean tool gap over all runs."""
        return self._all_gaps.mean

    def forget(self, run: RunKey) -> None:
        """Drop what was learned of one run."""
        self._outputs.pop(run, None)
