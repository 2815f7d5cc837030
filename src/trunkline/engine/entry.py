"""What the core decides about new runs, in the gateway's words."""

from collections.abc import Sequence

from trunkline.core.actions import Action, RunAdmitted, RunRefused, TurnRefused
from trunkline.core.facts import RunDeclared
from trunkline.core.types import RefusalReason, RunKey
from trunkline.wire.turns import Admitted, Failed, RunPlan


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


def _code(reason: RefusalReason | None) -> str:
    return "queue_full" if reason is RefusalReason.QUEUE_FULL else "run_refused"
