"""A turn that the engine thread is serving."""

from collections.abc import Callable
from dataclasses import dataclass, field

from trunkline.core.types import Ints, TurnId
from trunkline.engine.generation import Generation
from trunkline.wire.turns import Failed, TokenLogprob, TurnEvent, TurnRequest

Emit = Callable[[TurnEvent], None]
"""Hands one event to whoever waits for the turn. Called on the engine thread; must not block."""

COMPUTE_FAILED = Failed(500, "compute_failed", "the model could not compute this turn; send the request again")


@dataclass(slots=True, eq=False)
class LiveTurn:
    """`fresh` is the run id it takes if it starts a run; `at` its arrival in Unix seconds.

    `failure` is what to say if it fails; `opening` is as in `TurnArrived`.
    """

    id: TurnId
    request: TurnRequest
    generation: Generation
    emit: Emit
    fresh: str
    at: float
    opening: int = 0
    placed: bool = False
    failure: Failed = COMPUTE_FAILED
    prompt_entries: list[TokenLogprob | None] = field(default_factory=list)

    @property
    def prompt(self) -> Ints:
        """The prompt's token ids."""
        return self.request.tokens
