"""Virtual time: events in order of time, then of scheduling."""

import math
from collections.abc import Callable
from heapq import heappop, heappush


class Clock:
    """Time moves only when the next event is due. `(at_ms, seq)` orders events: no two compare equal."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._next_seq = 0

    def at(self, at_ms: float, do: Callable[[], None]) -> None:
        """Do something at a time that is not past."""
        assert at_ms >= self.now_ms
        heappush(self._events, (at_ms, self._next_seq, do))
        self._next_seq += 1

    @property
    def next_ms(self) -> float:
        """When the next event is due (infinity: never)."""
        return self._events[0][0] if self._events else math.inf

    def advance(self) -> bool:
        """Go to the next event and do it; False if there is none."""
        if not self._events:
            return False
        self.now_ms, _, do = heappop(self._events)
        do()
        return True
