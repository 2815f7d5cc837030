"""Ids, units and states that every part of the policy core shares.

Units: times are milliseconds (`*_ms`, floats, from an arbitrary origin), sizes are bytes (`*_bytes`), lengths are
tokens (`*_tokens`) unless a name says symbols.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TurnId = int
NodeId = int
SlotId = int
Ints = NDArray[np.int32]


class RunKey(NamedTuple):
    """Names a run: its public id, inside the salt (API key scope) that isolates its cache."""

    salt: str
    run: str


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The symbols of one prompt, root first.

    `symbols` is a 1-D int32 array: token ids, or block ids when a trace has no tokens. `weights` gives the tokens each
    symbol stands for (same length); None means one token a symbol.
    """

    symbols: Ints
    weights: Ints | None = None

    def __post_init__(self) -> None:
        assert self.symbols.ndim == 1 and self.symbols.dtype == np.int32
        assert self.weights is None or self.weights.shape == self.symbols.shape

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return len(self.symbols) if self.weights is None else int(self.weights.sum())


class Residency(StrEnum):
    """Where a prefix's KV lives. `ABSENT`: arrived, never computed. `DEAD`: was held, then given up."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    STORE = "store"
    DEAD = "dead"
    ABSENT = "absent"


class MissReason(StrEnum):
    """Why a prompt token had to be computed."""

    NEVER_SEEN = "never_seen"
    LAST_TOKEN = "last_token"  # the whole prompt was held; its last token is computed again for its logits
    EVICTED = "evicted"
    NOT_YET_COMPUTED = "not_yet_computed"  # it had arrived with another turn, which had not computed it
    HISTORY_EDITED = "history_edited"
    COMPACTION = "compaction"  # the run's history was rewritten shorter
    TEMPLATE_DRIFT = "template_drift"
    TOKENIZER_DRIFT = "tokenizer_drift"
    SALT = "salt"
    NODE_CHANGED = "node_changed"
    NODE_RESTARTED = "node_restarted"
    NO_CHECKPOINT = "no_checkpoint"  # memory that cannot be cut here: the nearest checkpoint lies earlier
    PROMPT_LOGPROBS = "prompt_logprobs"  # the client asked for the prompt's own probabilities
    SHARING_OFF = "sharing_off"
    CACHE_RESET = "cache_reset"
    COMPUTE_FAILED = "compute_failed"
    ENDED_IN_QUEUE = (
        "ended_in_queue"  # nothing was computed: the client left, or the turn failed, before its place came
    )


class RunState(StrEnum):
    """A run is `ACTIVE` during a turn, `WAITING` in a tool gap, `FINISHED` once declared or presumed over."""

    ACTIVE = "active"
    WAITING = "waiting"
    FINISHED = "finished"


class RunOrigin(StrEnum):
    """What named a turn's run, strongest first."""

    HEADER = "header"
    SESSION = "session"
    BODY = "body"
    INFERRED = "inferred"


class Relation(StrEnum):
    """How a turn stands to what was known when it arrived (`core/identity.py`)."""

    NAMED = "named"  # the client named its run
    NEW = "new"
    CONTINUES = "continues"
    BRANCH = "branch"
    COMPACTION = "compaction"  # the same run, its history rewritten shorter
    SIDE_CALL = "side_call"  # a short run about another (a title, a quota probe)


class EndReason(StrEnum):
    """How a turn ended. The first two are OpenAI's finish reasons."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"  # the client went away
    FAILED = "failed"


class Sharing(StrEnum):
    """`TREE`: prefixes are reused. `OFF`: the trivial rival, every prompt is computed whole."""

    TREE = "tree"
    OFF = "off"


class Eviction(StrEnum):
    """`VALUE`: chance of reuse times recompute cost per byte. `LRU`: the trivial rival."""

    VALUE = "value"
    LRU = "lru"


class Order(StrEnum):
    """`SHORT_FIRST`: short steps ahead of long prefills, which keep a share. `FCFS`: the trivial rival."""

    SHORT_FIRST = "short_first"
    FCFS = "fcfs"


class Admission(StrEnum):
    """Which new runs are let in: by what is `PREDICTED`, or as the trivial rivals do: all, or up to a cap."""

    PREDICTED = "predicted"
    OFF = "off"
    RUNS_CAP = "runs-cap"
    TURNS_CAP = "turns-cap"


class ServiceClass(StrEnum):
    """What a run is for: somebody waits for it, or nobody does."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


class RefusalReason(StrEnum):
    """Why a new run was not let in."""

    MEMORY = "memory"  # contexts would displace each other
    SPEED = "speed"  # running loops would miss their stretch
    SHORT_STEPS = "short_steps"  # running loops would miss their short steps' latency
    CAP = "cap"  # a fixed cap
    QUEUE_FULL = "queue_full"  # too many wait already


class MemoryKind(StrEnum):
    """`CUTTABLE`: KV may be cut at any token. `CHECKPOINTS`: only whole saved states can be reused."""

    CUTTABLE = "cuttable"
    CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """What the policy core is told once. Executors fill in the sizes; users choose the policies.

    `stretch_objective`, `short_step_objective_ms` (None: none) and `max_wait_ms` are those of interactive runs; batch
    runs have `batch_patience` times as much of each. `max_waiting_runs` is a class's.
    """

    slots: int
    slot_tokens: int
    host_bytes: int
    bytes_per_token: int
    checkpoint_bytes: int = 0
    memory: MemoryKind = MemoryKind.CUTTABLE
    sharing: Sharing = Sharing.TREE
    eviction: Eviction = Eviction.VALUE
    order: Order = Order.SHORT_FIRST
    step_budget_ms: float = 100.0
    prefill_share: float = 0.25
    short_tokens: int = 64
    max_slice_tokens: int = 256
    min_slice_tokens: int = 8
    max_queue: int = 1024
    admission: Admission = Admission.OFF
    admission_cap: int = 8
    stretch_objective: float = 8.0
    short_step_objective_ms: float | None = None
    max_waiting_runs: int = 256
    max_wait_ms: float = 120_000.0
    batch_patience: float = 10.0
    max_tree_symbols: int = 8_000_000


@dataclass(frozen=True, slots=True)
class Miss:
    """Some of a turn's novel tokens and why no live prefix covered them.

    For `HISTORY_EDITED` and `COMPACTION`, `was` and `now` are the first differing symbols, from prompt token `at_token`
    on. For `EVICTED`, `decision` and `at_ms` name the drop.
    """

    reason: MissReason
    tokens: int
    at_token: int = 0
    decision: int | None = None
    at_ms: float | None = None
    was: tuple[int, ...] = ()
    now: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Difference:
    """Where a prompt leaves a prefix that it should have shared: that of `run` ("" if it is forgotten).

    From token `at_token` on, `was` is what followed there and `now` what follows in the prompt, as far as they are kept
    (1-D int32); `was_tokens` and `now_tokens` are their whole lengths.
    """

    run: str
    at_token: int
    was: Ints
    now: Ints
    was_tokens: int
    now_tokens: int


@dataclass(slots=True)
class TurnRecord:
    """One turn as it happened, in the core's clock. `cached + novel == prompt` in tokens."""

    run: RunKey
    index: int
    arrived_ms: float
    prompt_tokens: int
    reusable_tokens: int
    tool_gap_ms: float | None
    relation: Relation = Relation.NAMED
    shared_tokens: int = 0
    """Leading prompt tokens that had arrived before, on which `relation` rests."""
    passages: int = 0
    """Passages of the run's (or parent's) own text further on in the prompt, on which it rests besides."""
    digest: str = ""
    """Of the whole prompt (`core/digest.py`): equal prompts have equal digests."""
    cached_tokens: int = 0
    completion_tokens: int = 0
    passes: int = 0
    """Model passes that its answer took: one a token, fewer where a grammar forced some."""
    misses: list[Miss] = field(default_factory=list)
    waited_ms: float = 0.0
    """Of its time in the queue, until its run was let in."""
    placed_ms: float | None = None
    first_token_ms: float | None = None
    ended_ms: float | None = None
    reason: EndReason | None = None
    recomputed_tokens: int = 0
    """Tokens that were promised as hits and had to be prefilled after all (a broken promise if not 0)."""
    difference: Difference | None = None

    @property
    def novel_tokens(self) -> int:
        """Prompt tokens that no live prefix covered."""
        return self.prompt_tokens - self.cached_tokens
