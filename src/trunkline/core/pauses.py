"""Runs that stand aside at a tool boundary while more contexts are open than memory holds.

Sub-agents and branches are always let in, and runs outgrow what was predicted of them; then one context too many is
open. If each turn took whatever slot is idle, it would displace a run that is due back from its tool, that one the
next, and in a circle everybody would compute everything again. So a turn that is no longer held, and could only be
placed by destroying what an open run will need, waits for a slot that nobody needs: the run is paused, the others go on
whole. It waits for a bounded multiple of the time that it is about to cost, so that it is never starved and the
rotation takes a bounded share of the engine.
"""

from trunkline.core.slots import Slot
from trunkline.core.state import State
from trunkline.core.turns import Turn
from trunkline.core.types import Admission, MemoryKind, Order

PAUSE_WEIGHT = 8.0
"""Milliseconds that a turn stands aside for each of the prefill that it needs: rotation costs a ninth at most."""
PAUSE_MOST_MS = 120_000.0


def pauses(state: State) -> bool:
    """Whether runs are paused at all: not by the rivals, and not where memory cannot be cut (states stand alone)."""
    settings = state.settings
    predicted = settings.admission is Admission.PREDICTED and settings.order is not Order.FCFS
    return predicted and settings.memory is MemoryKind.CUTTABLE


def until_ms(state: State, turn: Turn) -> float:
    """When a turn that would displace an open run does so all the same. A turn whose slot is warm displaces nobody."""
    if turn.likely_slot is not None:
        return turn.ready_ms
    return turn.ready_ms + min(PAUSE_MOST_MS, PAUSE_WEIGHT * state.scheduler.prefill_ms(turn))


def room_without_harm(state: State) -> bool:
    """Whether some idle slot can change hands without an open run losing what it holds."""
    return any(slot.turn is None and not _harms(state, slot) for slot in state.slots)


def _harms(state: State, slot: Slot) -> bool:
    needed = sum(node.tokens for node in slot.nodes() if node.users and not node.host)
    return needed * state.settings.bytes_per_token > state.retention.free_bytes()
