"""How turns begin and end: the tree, the run table and the slots follow."""

from trunkline.core import entrance
from trunkline.core.actions import Action, DropSegment, Load, TurnAccepted, TurnRecorded, TurnRefused
from trunkline.core.differences import left_own_history, left_sibling
from trunkline.core.digest import EMPTY, Digest, extended
from trunkline.core.facts import CacheReset, TurnArrived, TurnEnded
from trunkline.core.identity import Lineage, lineage, settle
from trunkline.core.placement import Ledger
from trunkline.core.prefix import Match, Node, common_ancestor
from trunkline.core.runs import Run
from trunkline.core.slots import Slot, path_ids
from trunkline.core.state import State
from trunkline.core.turns import Edit, Phase, Turn
from trunkline.core.types import EndReason, Miss, MissReason, RefusalReason, Relation, RunKey, Sharing, TurnRecord

SHOWN_SYMBOLS = 16
"""How many symbols of each side are kept where a prompt leaves its run's history."""


def arrive(state: State, fact: TurnArrived) -> list[Action]:
    """A prompt arrived: it joins the tree and its run, or is refused with a reason."""
    assert fact.turn not in state.turns
    named = state.runs.get(RunKey(fact.salt, fact.run)) if fact.run is not None else None
    match = state.tree.match(fact.salt, fact.prompt, named.leaf if named is not None else None)
    found = lineage(state.runs, state.landmarks, fact, match)
    new = entrance.is_new(state, fact, found)
    why = _refusal(state, fact, new=new)
    if why is None and new:
        why = entrance.refusal(state, fact, match.tokens)
    if why is not None:
        return [why]
    leaf, split = state.tree.graft(match, fact.prompt)
    actions = state.follow(split)
    run = settle(state.runs, fact, found)
    if state.checkpoints:
        actions += _cut_last_token(state, leaf)
    turn = _begin(state, fact, run, leaf, match, found)
    state.turns[turn.id] = turn
    state.forget(state.runs.touch(run, fact.at_ms))
    actions += entrance.arrived(state, turn, new=new)
    return [*actions, TurnAccepted(turn.id, run.key, turn.record.index, run.parent)]


def end(state: State, fact: TurnEnded) -> list[Action]:
    """A turn ended: what it computed stays where it is, warm for the run's next turn."""
    turn = state.turns.pop(fact.turn)
    run, record = turn.run, turn.record
    record.ended_ms, record.reason, record.completion_tokens = fact.at_ms, fact.reason, len(fact.generated)
    leaf, actions = _release(state, turn, fact) if turn.slot is not None else (turn.leaf, [])
    run.in_flight -= 1
    run.ended_ms, run.answer_tokens = fact.at_ms, len(fact.generated)
    if run.prompt_leaf is turn.leaf:
        state.runs.move_leaf(run, leaf)
    if fact.reason in (EndReason.STOP, EndReason.LENGTH):
        state.forecast.saw_output(run.key, len(fact.generated))
        state.landmarks.said(run.key, record.index, fact.generated)
        if turn.leaf.id in run.tips:
            run.tips[turn.leaf.id] = True
    entrance.ended(state, turn, fact)
    if turn.fact.final:
        state.runs.set_finished(run, True)
    if run.finished:
        state.admission.over(run.key)
    return [*actions, TurnRecorded(turn.id, record)]


def reset(state: State, fact: CacheReset) -> list[Action]:
    """Give up every prefix that no turn in flight stands on."""
    using = {node.id for turn in state.turns.values() for node in turn.leaf.path()}
    ledger = Ledger()
    held = sorted(state.retention.held(), key=lambda node: (-node.end, node.id))
    state.placement.bury([n for n in held if n.id not in using], MissReason.CACHE_RESET, ledger, fact.at_ms)
    for slot in state.slots:
        if slot.turn is None and not any(node.id in using for node in slot.nodes()):
            lost = [node for node in slot.nodes() if not node.host]
            slot.clear(stale=True)
            for node in reversed(lost):
                if node.death is None:
                    state.placement.dies(node, MissReason.CACHE_RESET, ledger, fact.at_ms)
    return [*(DropSegment(node.id) for node in held if not node.host), *ledger.deaths]


def break_promise(state: State, move: Load, at_ms: float) -> list[Action]:
    """What was promised could not be read back: the turn queues again, and its record says so."""
    turn, ledger = state.turns[move.turn], Ledger()
    suspect = {piece.node for piece in move.pieces}
    first = next(node for node in turn.leaf.path() if node.id in suspect)
    # Which segment was bad is not known, and what hangs below a lost prefix is of no use (a whole state stands alone).
    below = [first] if state.checkpoints else [node for node in first.subtree() if node.host]
    lost = sorted((node for node in below if node.host), key=lambda node: (-node.end, node.id))
    state.placement.bury(lost, MissReason.COMPUTE_FAILED, ledger, at_ms)
    turn.promised_tokens, turn.record.cached_tokens = turn.computed, 0
    turn.record.misses = [Miss(MissReason.COMPUTE_FAILED, turn.prompt_tokens)]
    slot = state.slots[move.slot]
    slot.turn = None
    slot.clear(stale=False)  # the executor empties a slot whose load failed
    turn.slot, turn.computed, turn.phase = None, 0, Phase.QUEUED
    return [*(DropSegment(node.id) for node in lost), *ledger.deaths]


def _refusal(state: State, fact: TurnArrived, *, new: bool) -> TurnRefused | None:
    tokens, room = fact.prompt.tokens, state.settings.slot_tokens
    if tokens == 0:
        return TurnRefused(fact.turn, "the prompt is empty", None)
    if tokens + fact.max_new_tokens > room:
        need = f"{tokens} prompt tokens and {fact.max_new_tokens} to generate"
        return TurnRefused(fact.turn, f"{need} do not fit {room} tokens of context", None)
    queued = sum(turn.phase is Phase.QUEUED for turn in state.turns.values())
    if queued >= state.settings.max_queue and new:
        return TurnRefused(fact.turn, f"{queued} turns are waiting already", 1.0, RefusalReason.QUEUE_FULL)
    return None


def _cut_last_token(state: State, leaf: Node) -> list[Action]:
    """The state before the last token serves the same prompt again as well as every longer one."""
    if len(leaf.symbols) < 2:
        return []
    return state.follow(state.tree.split(leaf, len(leaf.symbols) - 1))


def _begin(state: State, fact: TurnArrived, run: Run, leaf: Node, match: Match, found: Lineage) -> Turn:
    gap = None if run.ended_ms is None or run.in_flight else max(0.0, fact.at_ms - run.ended_ms)
    if gap is not None:
        state.forecast.saw_gap(gap)
    record = TurnRecord(
        run=run.key,
        index=run.turns,
        arrived_ms=fact.at_ms,
        prompt_tokens=fact.prompt.tokens,
        reusable_tokens=min(match.tokens, fact.prompt.tokens - 1),
        tool_gap_ms=gap,
        relation=found.relation,
        shared_tokens=match.tokens,
        passages=found.passages,
    )
    expected = state.forecast.output_tokens(run.key, fact.max_new_tokens)
    edited = _edit(state, run, leaf, match)
    if edited is not None:
        record.difference = left_own_history(run, leaf)
    elif run.leaf is None:
        record.difference = left_sibling(leaf, match.tokens)
    held, slot = state.placement.likely_held(leaf)
    held = min(held, fact.prompt.tokens - 1)
    turn = Turn(fact.turn, fact, run, leaf, record, match.tokens, held, expected, edited, run.lost_tokens, slot)
    if found.echoed is not None:
        run.echoes = found.echoed
    if run.turns == 0:
        run.known_tokens = match.tokens
    if run.turns == 0 and found.relation is not Relation.SIDE_CALL:
        at = match.last.last_symbol + match.inside
        run.task_passages = state.landmarks.told(run.key, fact.prompt.symbols[at:])
    digest = _digest(run, fact, match)
    record.digest = str(digest)
    state.runs.set_finished(run, False)
    state.runs.mark_prompt(run, leaf, digest)
    run.opening = fact.opening
    run.turns, run.in_flight, run.lost_tokens = run.turns + 1, run.in_flight + 1, 0
    state.runs.move_leaf(run, leaf)
    for node in leaf.path():
        node.used_ms = fact.at_ms
    return turn


def _digest(run: Run, fact: TurnArrived, match: Match) -> Digest:
    """The prompt's digest: from that of the run's last prompt, if it goes on from there."""
    last = run.prompt_leaf
    known = run.digest is not None and last is not None and any(node is last for node in reversed(match.path))
    return extended(run.digest if known and run.digest is not None else EMPTY, fact.prompt.symbols)


def _edit(state: State, run: Run, leaf: Node, match: Match) -> Edit | None:
    """Where a prompt leaves its run's own history, if it does."""
    if run.leaf is None or (run.prompt_leaf is not None and _elsewhere(run, match)):
        return None
    shared = common_ancestor(run.leaf, path_ids(leaf))
    if shared is run.leaf or shared is leaf:
        return None
    at = shared.last_symbol if shared is not None else 0
    was = state.tree.symbols_between(run.leaf, at, SHOWN_SYMBOLS)
    now = state.tree.symbols_between(leaf, at, SHOWN_SYMBOLS)
    return Edit(was, now, run.leaf.end, shorter=leaf.end < run.prompt_leaf.end if run.prompt_leaf else False)


def _elsewhere(run: Run, match: Match) -> bool:
    """Whether the prompt goes on from an older context of the run's than its last."""
    return any(node.id in run.tips and node is not run.prompt_leaf for node in match.path)


def _release(state: State, turn: Turn, fact: TurnEnded) -> tuple[Node, list[Action]]:
    """Free the turn's slot. Returns where the run's trajectory ends now."""
    assert turn.slot is not None
    slot = state.slots[turn.slot]
    slot.turn = None
    if fact.reason is EndReason.FAILED:
        return turn.leaf, _lose(state, slot, fact.at_ms)
    if turn.phase is Phase.DECODE:
        assert len(fact.generated) == turn.generated
        leaf, split = state.tree.extend(turn.leaf, fact.generated[: turn.generated - turn.pending])
        _keep(state, slot, leaf, fact.at_ms)
        return leaf, state.follow(split)
    if state.settings.sharing is Sharing.OFF:
        slot.clear(stale=True)
        return turn.leaf, []
    edge = next((node for node in turn.leaf.path() if node.start < slot.held < node.end), None)
    for node in slot.nodes():
        node.death = None
    if edge is None or edge.host:
        return turn.leaf, []
    upper, split = state.tree.split_at_token(edge, slot.held)
    if upper is not None:
        upper.death = None
    return turn.leaf, state.follow(split)


def _keep(state: State, slot: Slot, leaf: Node, at_ms: float) -> None:
    """The slot stays warm with the path that ends at `leaf`."""
    if state.settings.sharing is Sharing.OFF:
        slot.clear(stale=True)
        return
    slot.leaf = leaf
    for node in leaf.path():
        node.used_ms = at_ms
        node.death = None


def _lose(state: State, slot: Slot, at_ms: float) -> list[Action]:
    """What the slot held cannot be trusted."""
    ledger = Ledger()
    lost = [node for node in slot.nodes() if not node.host]
    slot.clear(stale=True)
    for node in reversed(lost):
        if not state.placement.is_held(node):
            state.placement.dies(node, MissReason.COMPUTE_FAILED, ledger, at_ms)
    return list(ledger.deaths)
