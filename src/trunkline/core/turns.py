"""A turn in flight, from arrival to its last token."""

from dataclasses import dataclass
from enum import StrEnum

from trunkline.core.facts import TurnArrived
from trunkline.core.prefix import Node
from trunkline.core.runs import Run
from trunkline.core.types import SlotId, TurnId, TurnRecord


class Phase(StrEnum):
    """`QUEUED`: no slot yet. `PREFILL`: prompt being computed. `DECODE`: one token a step."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Edit:
    """Where a prompt left its run's history: the symbols that were there, those that came, where that history ended.

    `shorter`: the prompt is shorter than the one before.
    """

    was: tuple[int, ...]
    now: tuple[int, ...]
    history_end: int
    shorter: bool


@dataclass(slots=True, eq=False)
class Turn:
    """`leaf` ends its prompt's path; `computed` prompt tokens are in `slot`; `generated` tokens were chosen.

    `matched_tokens` is how far the prompt had arrived before, `likely_held` how much of that was held or being computed
    when it arrived; `expected_tokens` how long the answer will likely be.
    """

    id: TurnId
    fact: TurnArrived
    run: Run
    leaf: Node
    record: TurnRecord
    matched_tokens: int
    likely_held: int
    expected_tokens: int
    edited: Edit | None
    lost_tokens: int = 0
    """Leading prompt tokens that an earlier process had computed for this run."""
    likely_slot: SlotId | None = None
    """The idle slot that held most of the prompt when it arrived."""
    stops: tuple[int, ...] = ()
    """Prompt positions where a slice must end, because the whole state is saved there (checkpoint memory)."""
    promised_tokens: int = 0
    """Tokens of a hit that could not be read back: what of them is computed again is a broken promise."""
    phase: Phase = Phase.QUEUED
    slot: SlotId | None = None
    computed: int = 0
    generated: int = 0
    pending: int = 0
    """The latest generated tokens, whose KV is not in the slot: one, and more where a grammar forced some."""

    @property
    def ready_ms(self) -> float:
        """Since when it may be placed: its arrival, or when its run was let in."""
        return self.fact.at_ms + self.record.waited_ms

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self.record.prompt_tokens

    @property
    def remaining_prefill(self) -> int:
        """Prompt tokens still to compute."""
        return self.prompt_tokens - self.computed

    @property
    def held_tokens(self) -> int:
        """Tokens whose KV is in the slot: the prompt's, and generated tokens but the pending ones."""
        return self.computed + self.generated - self.pending
