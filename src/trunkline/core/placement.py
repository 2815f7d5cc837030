"""Giving a queued turn a slot: what is held of its prompt, where, and what must move first.

A turn's *live* prefix is the longest head of its path that is in host memory or in some slot. It is promised as a hit
when the turn is placed, and from then on counts as the turn's own. A prefix that another turn is computing right now
is waited for, so that what is shared is computed once.
"""

from collections.abc import Set
from dataclasses import dataclass, field

from trunkline.core.actions import DeathNotice, Drop, Load, Move, Piece, Save, Trim
from trunkline.core.predict import CostModel
from trunkline.core.prefix import Death, Node, PrefixTree, common_ancestor
from trunkline.core.retention import Retention
from trunkline.core.slots import Slot, live_nodes, path_ids
from trunkline.core.turns import Phase, Turn
from trunkline.core.types import CoreSettings, MemoryKind, MissReason, NodeId, RunKey, Sharing, SlotId

WORTH_WAITING_TOKENS = 32
"""A prefix being computed by another turn is waited for, and the head of one that does not fit is saved, if it is at
least this long."""


@dataclass(slots=True)
class Ledger:
    """What one plan moves and gives up, in order."""

    moves: list[Move] = field(default_factory=list)
    deaths: list[DeathNotice] = field(default_factory=list)
    decision: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """A slot for a turn: keep `kept` tokens of what it holds, or (load) read `live` from host memory."""

    slot: Slot
    live: list[Node]
    kept: int
    load: bool

    @property
    def in_place(self) -> bool:
        """Whether the turn goes on from what the slot holds."""
        return bool(self.live) and not self.load


class Placement:
    """Decides slots for queued turns and saves for slots that change hands."""

    def __init__(
        self, settings: CoreSettings, tree: PrefixTree, slots: list[Slot], retention: Retention, costs: CostModel
    ) -> None:
        self._settings = settings
        self._tree = tree
        self._slots = slots
        self._retention = retention
        self._costs = costs
        self._next_decision = 1

    # --- one turn ---------------------------------------------------------------------------------------------

    def place(self, turn: Turn, in_flight: list[Turn], ledger: Ledger, now_ms: float, *, spare: int) -> bool:
        """Give `turn` a slot, if `spare` idle slots would be left and nothing it needs is still being computed."""
        idle = [slot for slot in self._slots if slot.turn is None]
        if len(idle) <= spare:
            return False
        path = path_ids(turn.leaf)
        coverage = {slot.id: slot.covers(path) for slot in self._slots}
        live = self._live(turn, path, max(coverage.values()))
        if self._worth_waiting(turn, path, live[-1].end if live else 0, in_flight):
            return False
        wanted = {other.likely_slot for other in in_flight if other.phase is Phase.QUEUED and other is not turn}
        kept = _ids(live)
        choice = min(
            (self._option(slot, turn, live, kept, coverage, wanted, now_ms) for slot in idle),
            key=lambda pair: (pair[0], pair[1].slot.held, pair[1].slot.id),
        )[1]
        protected = _queued_paths(in_flight)
        if choice.load:
            choice = self._copy_out(choice, coverage, ledger, protected, now_ms)
            choice = self._or_in_place(choice, turn, path, idle, coverage)
        self._hand_over(choice, ledger, protected, now_ms)
        self._settle(turn, choice, ledger, now_ms)
        return True

    def _live(self, turn: Turn, path: dict[NodeId, Node], coverage: int) -> list[Node]:
        if self._settings.sharing is Sharing.OFF or turn.fact.needs_prompt_logits:
            return []
        nodes = list(path.values())
        if self._settings.memory is MemoryKind.CUTTABLE:
            return live_nodes(nodes, coverage)
        limit = turn.prompt_tokens - 1
        best = 0
        for count, node in enumerate(nodes, 1):
            if node.end <= limit and (node.host or self._standing(node) is not None):
                best = count
        return nodes[:best]

    def _standing(self, node: Node) -> Slot | None:
        """An idle slot whose whole state is exactly this node's."""
        return next((s for s in self._slots if s.turn is None and s.leaf is node and s.held == node.end), None)

    def _worth_waiting(self, turn: Turn, path: dict[NodeId, Node], live_tokens: int, in_flight: list[Turn]) -> bool:
        if self._settings.sharing is Sharing.OFF or turn.fact.needs_prompt_logits:
            return False
        for other in in_flight:
            if other is turn or other.phase is not Phase.PREFILL or other.fact.needs_prompt_logits:
                continue
            shared = common_ancestor(other.leaf, path)
            until = min(shared.end, turn.prompt_tokens - 1) if shared is not None else 0
            if until > other.computed and until - live_tokens >= WORTH_WAITING_TOKENS:
                return True
        return False

    def _option(
        self,
        slot: Slot,
        turn: Turn,
        live: list[Node],
        kept: Set[NodeId],
        coverage: dict[int, int],
        wanted: Set[SlotId | None],
        now_ms: float,
    ) -> tuple[float, Choice]:
        """What it would cost, in milliseconds now and expected later, to serve `turn` in `slot`.

        A slot that another queued turn will go on in is `wanted`: taking it may cost that turn all its prefill.
        """
        end = min(live[-1].end, turn.prompt_tokens - 1) if live else 0
        if self._settings.memory is MemoryKind.CUTTABLE:
            load = coverage[slot.id] < end
        else:
            load = bool(live) and not (slot.leaf is live[-1] and slot.held == end)
        cost = self._costs.move_ms(end * self._settings.bytes_per_token) if load else 0.0
        if slot.leaf is not None and slot.held:
            whole = self._costs.move_ms(slot.held * self._settings.bytes_per_token)
            cost += whole if self._worth_saving_first(slot, kept, now_ms) else 0.0
            if slot.id in wanted and slot.id != turn.likely_slot:
                cost += self._costs.prefill_whole_ms(slot.held, 0, self._settings.max_slice_tokens)
            if load or end < slot.held:
                cost += self._retention.chance(slot.leaf, now_ms) * whole
        return cost, Choice(slot, live, end, load)

    def _worth_saving_first(self, slot: Slot, kept: Set[NodeId], now_ms: float) -> bool:
        """Whether the slot would be copied out, in part, before a turn that keeps the nodes `kept` takes it."""
        node = slot.leaf
        while node is not None and node.parent is not None:
            if node.host and self._settings.memory is MemoryKind.CUTTABLE:
                return False  # so is all above it
            lost = node.end <= slot.held and not node.host and node.id not in kept
            if lost and self._retention.worth_saving(node, now_ms):
                return True
            node = node.parent
        return False

    def look_again(self, turn: Turn) -> None:
        """Note what is held of a queued turn's prompt now."""
        held, turn.likely_slot = self.likely_held(turn.leaf)
        turn.likely_held = min(held, turn.prompt_tokens - 1)

    def likely_held(self, leaf: Node) -> tuple[int, SlotId | None]:
        """Leading tokens of a path that are in host memory, in a slot, or on their way into one; and the idle slot that
        holds most of them, if one does.
        """
        path = path_ids(leaf)
        held, warm, warm_slot = 0, 0, None
        for slot in self._slots:
            shared = common_ancestor(slot.leaf, path) if slot.leaf is not None else None
            if shared is None:
                continue
            tokens = shared.end if slot.turn is not None else min(shared.end, slot.held)
            held = max(held, tokens)
            if slot.turn is None and tokens > warm:
                warm, warm_slot = tokens, slot.id
        live = live_nodes(list(path.values()), held)
        return (live[-1].end if live else 0), warm_slot

    # --- what moves -------------------------------------------------------------------------------------------

    def _copy_out(
        self, choice: Choice, coverage: dict[int, int], ledger: Ledger, protected: set[NodeId], now_ms: float
    ) -> Choice:
        """Bring every live node into host memory; what does not fit there ends the live prefix early."""
        if self._settings.memory is MemoryKind.CHECKPOINTS:
            last = choice.live[-1]
            standing = self._standing(last)
            if (
                not last.host
                and standing is not None
                and not self._save(standing, [last], ledger, protected, now_ms, giving_up=choice.slot)
            ):
                shorter = choice.live[:-1]
                while shorter and not shorter[-1].host:
                    shorter.pop()
                return Choice(choice.slot, shorter, shorter[-1].end if shorter else 0, bool(shorter))
            return choice
        missing: dict[int, list[Node]] = {}
        for node in choice.live:
            if not node.host:
                source = max(self._slots, key=lambda slot: (coverage[slot.id], -slot.id))
                missing.setdefault(source.id, []).append(node)
        for slot_id, nodes in missing.items():
            if not self._save(self._slots[slot_id], nodes, ledger, protected, now_ms, giving_up=choice.slot):
                live = [n for n in choice.live if n.end <= self._host_end(choice.live)]
                return Choice(choice.slot, live, live[-1].end if live else 0, bool(live))
        return choice

    def _or_in_place(
        self, choice: Choice, turn: Turn, path: dict[NodeId, Node], idle: list[Slot], coverage: dict[int, int]
    ) -> Choice:
        """Host memory may not take all of a live prefix: then the idle slot that holds more of it serves the turn."""
        if self._settings.memory is not MemoryKind.CUTTABLE:
            return choice
        best = max(idle, key=lambda slot: (coverage[slot.id], -slot.id))
        kept = min(coverage[best.id], turn.prompt_tokens - 1)
        if kept <= choice.kept:
            return choice
        return Choice(best, [node for node in path.values() if node.start < kept], kept, load=False)

    @staticmethod
    def _host_end(nodes: list[Node]) -> int:
        end = 0
        for node in nodes:
            if not node.host:
                break
            end = node.end
        return end

    def _hand_over(self, choice: Choice, ledger: Ledger, protected: set[NodeId], now_ms: float) -> None:
        """Save what the slot is about to lose, as far as that pays; the rest dies with notice."""
        slot, cuttable = choice.slot, self._settings.memory is MemoryKind.CUTTABLE
        if self._settings.sharing is Sharing.OFF or (choice.in_place and not cuttable):
            return
        kept = _ids(choice.live if cuttable else choice.live[-1:])
        unsaved = [node for node in slot.nodes() if not node.host]
        if not cuttable:
            unsaved = [node for node in unsaved if node is slot.leaf and node.end == slot.held]
        losing = [n for n in unsaved if n.id not in kept and not self._in_slot(n, but=slot)]
        pays = [node for node in losing if self._retention.worth_saving(node, now_ms)]
        # A node without its ancestors is useless, so whatever is not saved yet above one that pays is saved with it.
        saving = unsaved[: unsaved.index(pays[-1]) + 1] if pays else []
        if saving:
            release = cuttable and not choice.in_place
            self._save(slot, saving, ledger, protected, now_ms, giving_up=slot, release=release)
        for node in losing:
            if not node.host:
                self.dies(node, MissReason.EVICTED, ledger, now_ms)

    def is_held(self, node: Node) -> bool:
        """Whether the node's KV is in host memory or whole in some slot."""
        return node.host or self._in_slot(node)

    def _in_slot(self, node: Node, but: Slot | None = None) -> bool:
        """Whether some slot (other than `but`) holds the whole node."""
        path = path_ids(node)
        return any(slot is not but and slot.covers(path) >= node.end for slot in self._slots)

    def _save(
        self,
        slot: Slot,
        nodes: list[Node],
        ledger: Ledger,
        protected: Set[NodeId],
        now_ms: float,
        *,
        giving_up: Slot | None,
        release: bool = False,
    ) -> bool:
        """Copy `nodes` out of `slot`, dropping what is worth less; False if not all of them fit.

        `giving_up` is the slot whose content is about to be replaced: what it holds has no second home.
        """
        cuttable = self._settings.memory is MemoryKind.CUTTABLE
        staying = protected | set(path_ids(nodes[-1]))
        kept = [other for other in self._slots if other is not giving_up] if cuttable else []

        def doubled() -> Set[NodeId]:
            return {node.id for other in kept for node in other.nodes()}

        whole = self._retention.room_for(nodes, staying, doubled, now_ms)
        pieces: list[Piece] = []
        drops: list[Node] = []
        for node in nodes:
            room = self._retention.room_for([node], staying, doubled, now_ms) if whole is None else whole
            if room is None:
                pieces += self._save_head(node) if cuttable else []
                break
            for old in room:
                self._retention.dropped(old)
            drops += room
            whole = [] if whole is not None else None
            self._retention.saved(node)
            pieces.append(Piece(node.id, node.start if cuttable else 0, node.end))
        for old in drops:
            ledger.moves.append(Drop(old.id))
            if not self.is_held(old):
                self.dies(old, MissReason.EVICTED, ledger, now_ms)
        if pieces:
            ledger.moves.append(Save(slot.id, tuple(pieces), release))
        return len(pieces) == len(nodes)

    def _save_head(self, node: Node) -> list[Piece]:
        """As much of a node that does not fit as does: a prefix cut short still saves what it holds."""
        fits = self._retention.free_bytes() // self._settings.bytes_per_token
        if fits < WORTH_WAITING_TOKENS:
            return []
        upper, _ = self._tree.split_at_token(node, node.start + fits)
        if upper is None or upper is node:
            return []
        self._retention.saved(upper)
        return [Piece(upper.id, upper.start, upper.end)]

    def checkpoint(self, turn: Turn, node: Node, in_flight: list[Turn], ledger: Ledger, now_ms: float) -> None:
        """Save the whole state of a turn's slot, which stands exactly at `node`'s end."""
        assert turn.slot is not None
        assert self._slots[turn.slot].held == node.end
        self._save(self._slots[turn.slot], [node], ledger, _queued_paths(in_flight), now_ms, giving_up=None)

    def dies(self, node: Node, reason: MissReason, ledger: Ledger, now_ms: float) -> None:
        """KV of `node` is given up; its runs are told."""
        if not ledger.decision:
            ledger.decision, self._next_decision = self._next_decision, self._next_decision + 1
        node.death = Death(ledger.decision, now_ms, reason)
        ledger.deaths.append(DeathNotice(ledger.decision, node.id, node.tokens, reason, hurt_runs(node), now_ms))

    def _settle(self, turn: Turn, choice: Choice, ledger: Ledger, now_ms: float) -> None:
        slot, tokens = choice.slot, choice.kept
        if choice.load:
            checkpoints = self._settings.memory is MemoryKind.CHECKPOINTS
            nodes = choice.live[-1:] if checkpoints else choice.live
            pieces = tuple(
                Piece(n.id, 0 if checkpoints else n.start, min(n.end, tokens)) for n in nodes if n.start < tokens
            )
            ledger.moves.append(Load(slot.id, turn.id, pieces))
        elif slot.held != tokens or slot.stale:
            ledger.moves.append(Trim(slot.id, turn.id, tokens))
        slot.turn, slot.leaf, slot.held, slot.stale = turn.id, turn.leaf, tokens, False
        turn.slot, turn.computed, turn.phase = slot.id, tokens, Phase.PREFILL
        for node in choice.live:
            node.used_ms = now_ms

    # --- giving up --------------------------------------------------------------------------------------------

    def bury(self, nodes: list[Node], reason: MissReason, ledger: Ledger, now_ms: float) -> None:
        """Drop nodes from host memory whatever they are worth (leaves first)."""
        for node in nodes:
            self._retention.dropped(node)
            ledger.moves.append(Drop(node.id))
            if not self.is_held(node):
                self.dies(node, reason, ledger, now_ms)


def hurt_runs(node: Node) -> tuple[RunKey, ...]:
    """The open runs whose trajectory passes through `node`."""
    found: list[RunKey] = []
    if node.users:
        for below in node.subtree():
            found.extend(key for key, is_open in below.leaves.items() if is_open)
            if len(found) == node.users:
                break
    return tuple(sorted(found))


def _queued_paths(turns: list[Turn]) -> set[NodeId]:
    return {node.id for turn in turns if turn.phase is Phase.QUEUED for node in turn.leaf.path()}


def _ids(nodes: list[Node]) -> set[NodeId]:
    return {node.id for node in nodes}
