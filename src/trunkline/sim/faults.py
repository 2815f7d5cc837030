"""What can go wrong with a node, drawn from a seed. Each chance is of one event; 0 never happens."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRates:
    """Chances of a load whose bytes are unusable, of a call that fails, of a call that takes `spike_times` as long."""

    load: float = 0.0
    call: float = 0.0
    spike: float = 0.0
    spike_times: float = 50.0


class Faults:
    """Draws faults; `stop` ends them."""

    def __init__(self, seed: int, rates: FaultRates) -> None:
        self._rng = random.Random(f"faults {seed}")
        self._rates: FaultRates | None = rates

    def stop(self) -> None:
        """Nothing fails from here on."""
        self._rates = None

    def load_fails(self) -> bool:
        """Whether the next load does."""
        return self._rates is not None and self._rng.random() < self._rates.load

    def call_fails(self) -> bool:
        """Whether the next call does."""
        return self._rates is not None and self._rng.random() < self._rates.call

    def slowed(self, ms: float) -> float:
        """What a call takes that should take `ms`."""
        if self._rates is None or self._rng.random() >= self._rates.spike:
            return ms
        return ms * self._rates.spike_times
