"""A distribution as it is reported, by replays and by simulations alike."""

from collections.abc import Iterable

import msgspec
import numpy as np


class Spread(msgspec.Struct, frozen=True):
    """A distribution, in the unit of the field that holds it."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread | None":
        """None for no values: nothing was measured, which is not 0."""
        data = np.asarray(list(values), float)
        if not len(data):
            return None
        p50, p95, p99 = (float(x) for x in np.percentile(data, (50, 95, 99)))
        return cls(len(data), float(data.mean()), p50, p95, p99, float(data.max()))
