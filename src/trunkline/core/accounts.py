"""What each open run is expected to need, and the sum over all of them.

A run's *load* is a vector: at some times from now, the chance that it is still open and the tokens it then holds; and
what its turns take of the engine. Sums are kept up to date run by run, so that a decision costs the same however many
runs are open. A silent run counts as far as it is likely to come back (`core/habits.py`).
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from trunkline.core.closed_loop import Mix
from trunkline.core.habits import Kind, Mean
from trunkline.core.predict import CostModel
from trunkline.core.types import CoreSettings, RunKey, ServiceClass

HORIZONS_MS = (0.0, 60_000.0, 300_000.0, 1_200_000.0)
"""Times from now at which the memory that open runs will need is looked at."""
OWN = 2.0
"""Turns of its own that say as much about a run as its kind does."""
GONE = 0.05
"""A silent run that is less likely than this to come back is presumed over."""
FADING = 0.5
"""A run that has been silent for long comes back, or is given up, within about twice as long again."""
REFRESHED = 4
"""Silent runs that are looked at again whenever anything happens."""
REFRESH_MS = 1000.0


@dataclass(frozen=True, slots=True)
class Load:
    """What one run adds. `held` and `tokens` are parallel to `HORIZONS_MS`; the others are weighted by `active`."""

    held: tuple[float, ...]
    tokens: tuple[float, ...]
    active: float
    prefill_ms: float
    recompute_ms: float
    output_tokens: float
    gap_ms: float
    leaving: float
    """Runs a millisecond that are expected to end."""
    likely: float
    """1 for a run that is more likely to go on than not."""

    def flat(self) -> tuple[float, ...]:
        """As numbers in a row."""
        of_turns = (self.active, self.prefill_ms, self.recompute_ms, self.output_tokens, self.gap_ms)
        return (*self.held, *self.tokens, *of_turns, self.leaving, self.likely)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a whole run is expected to take: turns, and tokens of context at its end."""

    turns: float
    peak_tokens: float


@dataclass(slots=True, eq=False)
class Account:
    """One run as admission sees it. `silent_ms` is when its last turn ended (None: it has a turn in flight).

    `expected_turns` and `expected_tokens` are what a client declared.
    """

    key: RunKey
    kind: Kind
    service: ServiceClass
    arrived_ms: float
    context_tokens: int
    first_novel_tokens: int
    admitted: bool
    root: bool = True
    """It was asked whether it may come in: no sub-agent, no branch."""
    parent: RunKey | None = None
    expected_turns: int | None = None
    expected_tokens: int | None = None
    told_ms: float = 0.0
    """How long it was predicted to wait in the line."""
    turns: int = 0
    in_flight: int = 0
    silent_ms: float | None = None
    dead: float = 0.0
    """As much of its end as has been counted."""
    spent_ms: float = 0.0
    ideal_ms: float = 0.0
    prompt_tokens: int = 0
    peak_tokens: int = 0
    modelled: Mean = field(default_factory=Mean)
    """What the model said of everyone's stretch while its turns ended."""
    predicted: Footprint | None = None
    gap: Mean = field(default_factory=Mean)
    novel: Mean = field(default_factory=Mean)
    growth: Mean = field(default_factory=Mean)
    output: Mean = field(default_factory=Mean)
    counted: tuple[float, ...] = ()
    """Its load, as it stands in the sums."""

    def expects(self, own: Mean, name: str) -> float:
        """A quantity of its turns: its own so far, pulled toward its kind's."""
        return own.toward(self.kind.mean(name), OWN)

    def alive(self, now_ms: float) -> float:
        """The chance that the run has another turn."""
        if self.silent_ms is None:
            return 1.0
        longer = self.kind.gaps.longer(max(0.0, now_ms - self.silent_ms))
        if self.expected_turns is not None and self.turns < self.expected_turns:
            ends = self.kind.endings.chance(self.turns) / 4  # its client said that it goes on
        else:
            ends = self.kind.endings.chance(self.turns) if self.turns else 0.0
        come, gone = (1.0 - ends) * longer, ends if self.turns else 1.0 - longer
        return come / (come + gone) if come + gone > 0 else 0.0

    def footprint(self, slot_tokens: int) -> Footprint:
        """The whole run, from what is known now."""
        if self.expected_turns is not None and self.turns < self.expected_turns:
            turns = float(self.expected_turns)
        else:
            turns = self.turns + self.kind.endings.left(self.turns)
        grown = self.context_tokens + self.expects(self.growth, "growth_tokens") * (turns - max(1, self.turns))
        peak = grown if self.expected_tokens is None else float(self.expected_tokens)
        return Footprint(turns, min(float(slot_tokens), max(peak, float(self.context_tokens))))


class Ledger:
    """All accounts, and the sum of the loads of the admitted ones."""

    def __init__(self, settings: CoreSettings, costs: CostModel) -> None:
        self._settings, self._costs = settings, costs
        self.accounts: dict[RunKey, Account] = {}
        self.silent: OrderedDict[RunKey, float] = OrderedDict()
        """Silent runs, those that were looked at longest ago first, and when that was."""
        self.turn_ms = Mean()
        self._sums = [0.0] * len(_no_load())
        self._classes = dict.fromkeys(ServiceClass, 0)
        self._counted = 0

    def __len__(self) -> int:
        return self._counted

    def open_of(self, service: ServiceClass) -> int:
        """Admitted runs of a class."""
        return self._classes[service]

    def count(self, account: Account, now_ms: float) -> None:
        """Bring a run's part of the sums up to date."""
        if not account.admitted:
            return
        if not account.counted:
            self._classes[account.service] += 1
            self._counted += 1
        load = self.load(account, now_ms).flat()
        before = account.counted or _no_load()
        self._sums = [total + new - old for total, new, old in zip(self._sums, load, before, strict=True)]
        account.counted = load

    def remove(self, key: RunKey) -> Account | None:
        """Forget a run."""
        account = self.accounts.pop(key, None)
        self.silent.pop(key, None)
        if account is not None and account.counted:
            self._classes[account.service] -= 1
            self._counted -= 1
            left = zip(self._sums, account.counted, strict=True)
            # What rounding leaves behind goes when nobody is left.
            self._sums = [total - old for total, old in left] if self._counted else [0.0] * len(self._sums)
            account.counted = ()
        return account

    def look_again(self, now_ms: float) -> list[Account]:
        """Count the silent runs that were looked at longest ago; those that are gone are returned."""
        gone = []
        for _ in range(min(REFRESHED, len(self.silent))):
            key = next(iter(self.silent))
            if now_ms - self.silent[key] < REFRESH_MS:
                break
            account = self.accounts[key]
            alive = account.alive(now_ms)
            if account.turns:
                account.kind.endings.ended(account.turns, 1.0 - alive - account.dead)
                account.dead = 1.0 - alive
            self.silent[key] = now_ms
            self.silent.move_to_end(key)
            self.count(account, now_ms)
            if alive < GONE:
                gone.append(account)
        return gone

    def load(self, account: Account, now_ms: float) -> Load:
        """What a run adds to the sums."""
        limit, alive = self._settings.slot_tokens, account.alive(now_ms)
        gap = account.expects(account.gap, "gap_ms")
        growth = account.expects(account.growth, "growth_tokens")
        output = account.expects(account.output, "output_tokens")
        turn_ms = self.turn_ms.toward(1000.0, 1.0)
        cycle_ms = gap + turn_ms
        declared = account.expected_turns if account.turns < (account.expected_turns or 0) else None
        left = float(declared - account.turns) if declared else account.kind.endings.left(account.turns)
        known = account.kind.known()
        held, tokens = [alive], [alive * account.context_tokens]
        for horizon_ms in HORIZONS_MS[1:]:
            more = max(1.0, horizon_ms / cycle_ms)
            stays = float(more <= left) if declared else account.kind.endings.survives(account.turns, more)
            grown = min(float(limit), max(1.0, account.context_tokens + growth * min(more, left)))
            if account.expected_tokens is not None:
                grown = max(grown, float(min(limit, account.expected_tokens)))
            else:
                grown = known * grown + (1.0 - known) * limit  # nothing is known: it may fill its slot
            held.append(alive * stays)
            tokens.append(alive * stays * grown)
        silence = 0.0 if account.silent_ms is None else max(0.0, now_ms - account.silent_ms)
        active = alive * min(1.0, cycle_ms / (silence + turn_ms))
        novel = account.expects(account.novel, "novel_tokens")
        novel += account.first_novel_tokens / (account.turns + left)  # runs come and go: each brings a first prompt
        slices = self._settings.max_slice_tokens
        return Load(
            tuple(held),
            tuple(tokens),
            active,
            active * self._costs.prefill_whole_ms(max(1, round(novel)), account.context_tokens, slices),
            active * self._costs.prefill_whole_ms(account.context_tokens, 0, slices),
            active * output,
            active * gap,
            max(alive / (left * cycle_ms), FADING * alive / silence if silence > gap else 0.0),
            float(alive >= 0.5),
        )

    @property
    def held_now(self) -> float:
        """Admitted runs that are expected to go on."""
        return self._sums[0]

    @property
    def active(self) -> float:
        """Admitted runs that keep the engine busy."""
        return self._sums[2 * len(HORIZONS_MS)]

    @property
    def leaving(self) -> float:
        """Runs a millisecond that are expected to end."""
        return self._sums[-2]

    @property
    def likely(self) -> float:
        """Admitted runs that are more likely to go on than not."""
        return self._sums[-1]

    def mixes(self, extra: Load | None, scale: float = 1.0) -> list[Mix]:
        """All admitted runs and `extra`, one mix a horizon; `scale` multiplies how many the admitted are."""
        sums = [scale * value for value in self._sums]
        if extra is not None:
            sums = [total + more for total, more in zip(sums, extra.flat(), strict=True)]
        count = len(HORIZONS_MS)
        active, prefill, recompute, output, gap = sums[2 * count : 2 * count + 5]
        if active <= 0:
            return []
        return [
            Mix(
                active=active * min(1.0, sums[at] / sums[0]) if sums[0] > 0 else active,
                held=sums[at],
                prefill_ms=prefill / active,
                recompute_ms=recompute / active * _grown(sums, at),
                output_tokens=output / active,
                context_tokens=sums[count + at] / sums[at],
                gap_ms=gap / active,
            )
            for at in range(count)
            if sums[at] > 1e-9
        ]


def _grown(sums: list[float], at: int) -> float:
    """How much longer contexts are then than now."""
    count = len(HORIZONS_MS)
    now, then = sums[count] / max(sums[0], 1e-9), sums[count + at] / max(sums[at], 1e-9)
    return then / now if now > 0 else 1.0


def _no_load() -> tuple[float, ...]:
    return (0.0,) * (2 * len(HORIZONS_MS) + 7)
