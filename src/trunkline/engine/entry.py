"""What the core decides about new runs, in the gateway's words."""

from collections import Counter
from collections.abc import Sequence

from trunkline.core.actions import Action, RunAdmitted, RunRefused, TurnRefused
from trunkline.core.admission import MOST_RETRY_S, Closed
from trunkline.core.facts import RunDeclared
from trunkline.core.state import State
from trunkline.core.types import RefusalReason, RunKey
from trunkline.wire.turns import Admitted, Failed, RunHint, RunPlan


def declared(at_ms: float, key: RunKey, plan: RunPlan) -> RunDeclared:
    """The fact that a client declared a run."""
    return RunDeclared(
        at_ms=at_ms,
        key=key,
        parent=plan.parent,
        service=plan.service,
        expected_turns=plan.expected_turns,
        expected_tokens=plan.expected_tokens,
    )


def verdict(actions: Sequence[Action]) -> Admitted | Failed:
    """What the core answered to it. A run that was known already is let in."""
    for action in actions:
        if isinstance(action, RunAdmitted):
            return Admitted(waits=action.waits, turns=action.turns, peak_tokens=action.peak_tokens)
        if isinstance(action, RunRefused):
            return Failed(429, _code(action.reason), action.why, action.retry_after_s)
    return Admitted()


def failed(refused: TurnRefused) -> Failed:
    """How a refused turn reads in HTTP."""
    if refused.retry_after_s is None:
        return Failed(400, "context_length_exceeded", refused.why)
    return Failed(429, _code(refused.reason), refused.why, refused.retry_after_s)


class Door:
    """Turns new runs away without asking the core, where it refused their like a moment ago. One event loop uses it.

    It reads what the engine thread publishes: single looks into tables, which the interpreter makes atomic.
    """

    def __init__(self) -> None:
        self.turned_away = 0
        self._by: Counter[Closed] = Counter()

    def ask(self, state: State, salt: str, hint: RunHint, kind: str, now_ms: float) -> Failed | None:
        """Why a turn need not be rendered: surely it begins a run, and such a run is not let in now."""
        name = hint.run or hint.group
        closed = state.admission.closed.get((kind, hint.service))
        if name is None or hint.parent is not None or closed is None or now_ms >= closed.until_ms:
            return None
        if state.runs.get(RunKey(salt, name)) is not None:
            return None
        if closed not in self._by:
            self._by = Counter({other: count for other, count in self._by.items() if now_ms < other.until_ms})
        self._by[closed] += 1
        self.turned_away += 1
        retry_s = min(MOST_RETRY_S, closed.refusal.retry_after_s + self._by[closed] * closed.each_s)
        return Failed(429, _code(closed.refusal.reason), closed.refusal.why, retry_s)


def _code(reason: RefusalReason | None) -> str:
    return "queue_full" if reason is RefusalReason.QUEUE_FULL else "run_refused"
