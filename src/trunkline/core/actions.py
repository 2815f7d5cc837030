"""What the core asks of executors: immediate actions from facts, and plans for the next step.

Executors apply and time; they decide nothing.
"""

from dataclasses import dataclass

from trunkline.core.types import MissReason, NodeId, RefusalReason, RunKey, SlotId, TurnId, TurnRecord

# --- immediate, in order, from `Core.handle` --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TurnAccepted:
    """The turn belongs to `run` as its `index`-th (from 0); `parent` if the run is a branch."""

    turn: TurnId
    run: RunKey
    index: int
    parent: str | None


@dataclass(frozen=True, slots=True)
class TurnRefused:
    """The turn cannot be served; `retry_after_s` is None when trying again cannot help.

    `reason` is that of a new run that was not let in.
    """

    turn: TurnId
    why: str
    retry_after_s: float | None
    reason: RefusalReason | None = None


@dataclass(frozen=True, slots=True)
class RunAdmitted:
    """A new run is let in, or (`waits`) will be when there is room: from now on none of its turns is refused for load.

    `turns` and `peak_tokens` are its predicted footprint.
    """

    run: RunKey
    waits: bool
    turns: float
    peak_tokens: float


@dataclass(frozen=True, slots=True)
class RunRefused:
    """A declared run is not let in."""

    run: RunKey
    why: str
    retry_after_s: float
    reason: RefusalReason


@dataclass(frozen=True, slots=True)
class SplitSegment:
    """Host KV of `node` is cut: its first `tokens` tokens now belong to `upper`, the rest stay with `node`."""

    node: NodeId
    upper: NodeId
    tokens: int


@dataclass(frozen=True, slots=True)
class DeathNotice:
    """KV of `tokens` tokens can no longer be reused; `runs` are the runs that would have."""

    decision: int
    node: NodeId
    tokens: int
    reason: MissReason
    runs: tuple[RunKey, ...]
    at_ms: float


@dataclass(frozen=True, slots=True)
class DropSegment:
    """Free the host KV of `node`."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class TurnRecorded:
    """The turn is over; this is its record."""

    turn: TurnId
    record: TurnRecord


Action = TurnAccepted | TurnRefused | RunAdmitted | RunRefused | SplitSegment | DropSegment | DeathNotice | TurnRecorded


# --- a plan: moves in order, then calls in order -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, end) of a slot's sequence, which are the KV of `node`."""

    node: NodeId
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Save:
    """Copy KV of `slot` to host memory, a segment a piece (one whole state, for checkpoint memory).

    With `release` the slot's content is not needed afterwards: the executor empties it, which lets it copy less.
    """

    slot: SlotId
    pieces: tuple[Piece, ...]
    release: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """Make `slot` hold exactly the KV of `pieces` (ascending, from token 0), read from host memory.

    For checkpoint memory there is one piece: the node whose whole state is loaded.
    """

    slot: SlotId
    turn: TurnId
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Trim:
    """Cut `slot` to its first `tokens` tokens (0: empty it)."""

    slot: SlotId
    turn: TurnId
    tokens: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Free the host KV of `node`, decided while planning (its death notice is in the plan)."""

    node: NodeId


Move = Save | Load | Trim | Drop


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute prompt tokens [start, end) of `turn` in `slot`; `last` asks for the logits of the last one."""

    turn: TurnId
    slot: SlotId
    start: int
    end: int
    last: bool


@dataclass(frozen=True, slots=True)
class Decode:
    """Feed each turn's latest token, slots ascending; one new token each."""

    turns: tuple[tuple[TurnId, SlotId], ...]


@dataclass(frozen=True, slots=True)
class Extend:
    """Feed generated tokens [start, end) of `turn`, most of them forced, in one pass; `last`: one new token."""

    turn: TurnId
    slot: SlotId
    start: int
    end: int
    last: bool


Call = Prefill | Decode | Extend


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Empty `moves` and `calls`: nothing to do before the next fact.

    An executor may apply the same calls up to `repeat` times before it reports, as long as no turn ends and no fact
    waits: the plans between are expected to be the same. Where a prefill waits for its share of the time, or a queued
    turn for a slot that is kept free, that holds if steps take what is predicted. Only plans of one decode call repeat.
    `predicted_ms` is one time's.
    """

    seq: int
    at_ms: float
    moves: tuple[Move, ...]
    calls: tuple[Call, ...]
    deaths: tuple[DeathNotice, ...]
    predicted_ms: float
    repeat: int = 1
