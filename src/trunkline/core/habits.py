"""What agents of one kind are used to do: how many turns they take, how their contexts grow, how long their tools run.

A *kind* is a system prompt with its tools. What is known of a kind is pulled toward what is known of everyone, by as
much as little was seen of it, and that toward a prior: so a kind that nobody has seen yet has everyone's habits.

Whether a silent run will come back is inferred, since most clients never say that a run is over. With `h` the chance
that a run ends after this turn, and `G(s)` the share of tool gaps that are longer than `s`, Bayes gives

    alive(s) = (1 - h) G(s) / ((1 - h) G(s) + h)

The share of it that is counted dead teaches `h` in turn (expectation maximization, one step at a time).
"""

from collections import OrderedDict

TURN_EDGES = (1, 2, 3, 5, 9, 17, 33, 65, 129, 257, 513, 1025)
"""Turn counts share a chance to end with others of their bucket: [1], [2], [3, 4], [5, 8], ..."""
PRIOR_END = 0.1
"""Chance that a run ends after a turn, before any was seen to end."""
PRIOR_TURNS = 20.0
"""Turns that this prior, or what is known of everyone, is worth."""
FORGET = 0.98
"""Weight of the past after one run ended: about the last 50 count."""
GAP_EDGE_MS = 62.5
GAP_BUCKETS = 18
"""Tool gaps are counted in buckets that double, from 62.5 ms to over two hours."""
PRIOR_GAPS = 4.0
"""Gaps that the prior, or everyone's, are worth."""
STEP = 0.05
"""Weight of the latest value in a run's mean: about the last 20 count."""
KIND_STEP = 0.02
EVERYONES_STEP = 0.005
"""Of a kind's mean, and of everyone's: answers and gaps have heavy tails, and what is let in stays in."""
MOST_KINDS = 256
OWN_WEIGHT = 3.0
"""Values of a run's own that are worth as much as its kind's."""


class Mean:
    """A running mean that forgets slowly."""

    __slots__ = ("_step", "count", "value")

    def __init__(self, step: float = STEP) -> None:
        """`step`: weight of the latest value."""
        self._step = step
        self.count = 0
        self.value = 0.0

    def saw(self, value: float) -> None:
        """Learn one value."""
        self.count += 1
        self.value += max(self._step, 1.0 / self.count) * (value - self.value)

    def toward(self, other: float, weight: float) -> float:
        """The mean, pulled toward `other` as if that had been seen `weight` times."""
        seen = min(self.count, 1.0 / self._step)
        return (self.value * seen + other * weight) / (seen + weight)


class Endings:
    """The chance that a run ends after its n-th turn; runs that are still open count as far as they came."""

    def __init__(self, parent: "Endings | None" = None) -> None:
        self._parent = parent
        self._turns = [0.0] * len(TURN_EDGES)
        self._ends = [0.0] * len(TURN_EDGES)
        self.seen = 0.0
        """Runs that ended, as far as they are remembered."""

    def took(self, turns: int) -> None:
        """A run took its turn number `turns` (from 1): it may have ended there."""
        self._turns[_bucket(turns)] += 1.0
        if self._parent is not None:
            self._parent.took(turns)

    def ended(self, turns: int, weight: float = 1.0) -> None:
        """A run ended after `turns` turns, as far as `weight` says; negative: it did not after all."""
        if weight > 0:
            kept = FORGET**weight
            self._turns = [value * kept for value in self._turns]
            self._ends = [value * kept for value in self._ends]
            self.seen *= kept
        at = _bucket(turns)
        self._ends[at] = max(0.0, self._ends[at] + weight)
        self.seen = max(0.0, self.seen + weight)
        if self._parent is not None:
            self._parent.ended(turns, weight)

    def chance(self, turns: int) -> float:
        """That a run which took `turns` turns takes no more."""
        return self._chance_at(_bucket(turns))

    def _chance_at(self, bucket: int) -> float:
        prior = PRIOR_END if self._parent is None else self._parent._chance_at(bucket)
        # A run that ended here was once exposed here, also where that has been forgotten.
        turns = max(self._turns[bucket], self._ends[bucket])
        return (self._ends[bucket] + prior * PRIOR_TURNS) / (turns + PRIOR_TURNS)

    def left(self, turns: int) -> float:
        """Turns that a run which took `turns` turns is expected to take yet, given that it goes on."""
        total, alive, at = 1.0, 1.0, turns + 1
        for bucket in range(_bucket(at), len(TURN_EDGES)):
            chance = self._chance_at(bucket)
            stay = TURN_EDGES[bucket + 1] - at if bucket + 1 < len(TURN_EDGES) else 1 << 20
            # Each of `stay` turns is followed by another with 1 - chance.
            total += alive * (1 - chance) * (1 - (1 - chance) ** stay) / chance
            alive *= (1 - chance) ** stay
            at += stay
        return total

    def survives(self, turns: int, more: float) -> float:
        """The chance that a run which took `turns` turns, and goes on, takes at least `more` further ones."""
        alive, at, left = 1.0, turns + 1, more - 1.0
        bucket = _bucket(at)
        while left > 0:
            last = bucket + 1 >= len(TURN_EDGES)
            stay = left if last else min(left, float(TURN_EDGES[bucket + 1] - at))
            alive *= (1.0 - self._chance_at(bucket)) ** stay
            left -= stay
            if last:
                break
            at = TURN_EDGES[bucket + 1]
            bucket += 1
        return float(alive)


def _bucket(turns: int) -> int:
    found = 0
    while found + 1 < len(TURN_EDGES) and TURN_EDGES[found + 1] <= turns:
        found += 1
    return found


class Gaps:
    """The distribution of tool gaps."""

    def __init__(self, parent: "Gaps | None" = None) -> None:
        self._parent = parent
        self._counts = [0.0] * GAP_BUCKETS
        self._total = 0.0

    def saw(self, ms: float) -> None:
        """Learn one gap."""
        edge, at = GAP_EDGE_MS, 0
        while at + 1 < GAP_BUCKETS and ms > edge:
            edge, at = edge * 2, at + 1
        self._counts[at] += 1.0
        self._total += 1.0
        if self._total > 200:
            self._counts = [count / 2 for count in self._counts]
            self._total /= 2
        if self._parent is not None:
            self._parent.saw(ms)

    def longer(self, ms: float) -> float:
        """The share of gaps that are longer than `ms`.

        The prior is that of public coding agents (median 9 s, nine in ten under 72 s, 99 of 100 under 15 minutes).
        """
        prior = (1.0 + ms / 5000.0) ** -0.7 if self._parent is None else self._parent.longer(ms)
        edge, above = GAP_EDGE_MS, self._total
        for count in self._counts:
            above -= count
            if ms <= edge:
                # Inside a bucket gaps are as likely anywhere: a part of it is longer.
                low = 0.0 if edge == GAP_EDGE_MS else edge / 2
                above += count * (edge - ms) / (edge - low)
                break
            edge *= 2
        return (above + prior * PRIOR_GAPS) / (self._total + PRIOR_GAPS)


class Kind:
    """One kind's habits."""

    def __init__(self, parent: "Kind | None" = None) -> None:
        self._parent = parent
        self.endings: Endings = Endings(parent.endings if parent else None)
        self.gaps: Gaps = Gaps(parent.gaps if parent else None)
        self.means = {name: Mean(KIND_STEP if parent else EVERYONES_STEP) for name in PRIORS}

    def saw(self, name: str, value: float) -> None:
        """Learn one value of a quantity in `PRIORS`."""
        self.means[name].saw(value)
        if self._parent is not None:
            self._parent.saw(name, value)

    def mean(self, name: str) -> float:
        """What is expected of it."""
        prior = PRIORS[name] if self._parent is None else self._parent.mean(name)
        return self.means[name].toward(prior, OWN_WEIGHT)

    def known(self) -> float:
        """In [0, 1]: how far the ends of runs of this kind (or of everyone) have been seen."""
        seen = self.endings.seen if self._parent is None else max(self.endings.seen, self._parent.endings.seen)
        return seen / (seen + 2.0)


PRIORS = {"gap_ms": 5000.0, "novel_tokens": 200.0, "growth_tokens": 200.0, "output_tokens": 100.0}
"""What is expected of a turn before anything was seen: the gap before it, prompt tokens that had not arrived before, by
how much its prompt is longer than the last, and its answer."""


class Kinds:
    """The kinds that were seen last, and everyone."""

    def __init__(self) -> None:
        self.everyone = Kind()
        self._kinds: OrderedDict[str, Kind] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kinds)

    def of(self, name: str) -> Kind:
        """The habits of a kind, made now if it is new; the one that was asked for longest ago is forgotten for it."""
        kind = self._kinds.get(name)
        if kind is None:
            kind = self._kinds[name] = Kind(self.everyone)
            if len(self._kinds) > MOST_KINDS:
                self._kinds.popitem(last=False)
        self._kinds.move_to_end(name)
        return kind
