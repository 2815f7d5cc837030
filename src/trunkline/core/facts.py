"""What executors tell the core. Each fact carries the time it became true; the core has no clock of its own."""

from dataclasses import dataclass

from trunkline.core.types import EndReason, Ints, Prompt, RunKey, RunOrigin, ServiceClass, TurnId


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnArrived:
    """A prompt wants an answer of at most `max_new_tokens`.

    `run` is None when nothing names it: the core infers from the prompt whose turn it is (`core/identity.py`); a new
    run then takes the id `fresh` (the executor makes it unique, since the core draws no randomness). `group` is a
    session that the client named instead: only its runs are considered, and its first run takes its name. `final` says
    that the run ends with this turn. `needs_prompt_logits` forbids reuse (the prompt's own logprobs are asked). `kind`
    is a digest of what the agent is (its instructions and tools; "": told by how the prompt begins), `service` its
    class if this turn begins a run. `opening` is how many symbols at the prompt's end only open the answer: what a
    template adds after the messages.
    """

    at_ms: float
    turn: TurnId
    salt: str
    prompt: Prompt
    max_new_tokens: int
    fresh: str
    run: str | None = None
    group: str | None = None
    parent: str | None = None
    origin: RunOrigin = RunOrigin.INFERRED
    final: bool = False
    needs_prompt_logits: bool = False
    kind: str = ""
    service: ServiceClass = ServiceClass.INTERACTIVE
    opening: int = 0


@dataclass(frozen=True, slots=True)
class MoveTiming:
    """How one move of a plan went. `ok` False: the bytes were not usable (the core replans without them)."""

    ok: bool
    bytes: int
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """A plan was applied: `moves` and `calls_ms` are parallel to the plan's. A call that failed has time -1.

    `repeats` says how many times the calls were applied (at most the plan's `repeat`); `calls_ms` sum over them.
    """

    at_ms: float
    plan: int
    moves: tuple[MoveTiming, ...]
    calls_ms: tuple[float, ...]
    repeats: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensForced:
    """Behind the token that its latest call chose, a turn's grammar forced `tokens` more, which no pass has seen yet.

    Told after that call's `StepDone`, before the next plan.
    """

    at_ms: float
    turn: TurnId
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnded:
    """A turn generated its last token (or failed, or its client left). `generated` holds every generated token.

    Its pending tokens (the last, and those forced with it) are not in KV and never will be; all others are.
    """

    at_ms: float
    turn: TurnId
    reason: EndReason
    generated: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDeclared:
    """A client announced a run before its first turn, and its expected turns and tokens of context at the end."""

    at_ms: float
    key: RunKey
    parent: str | None = None
    kind: str = ""
    service: ServiceClass = ServiceClass.INTERACTIVE
    expected_turns: int | None = None
    expected_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinished:
    """A client says that a run is over: its cache is worth little from now on."""

    at_ms: float
    key: RunKey


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRestored:
    """A run known from before the core was made: its KV is gone, its history is not news.

    `digest` is that of its last prompt (`TurnRecord.digest`), by which an unnamed turn finds it again.
    """

    at_ms: float
    key: RunKey
    parent: str | None
    turns: int
    prompt_tokens: int
    origin: RunOrigin = RunOrigin.HEADER
    finished: bool = False
    group: str | None = None
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReset:
    """Forget every prefix that no turn in flight is using."""

    at_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Nothing happened until now. Told when the core asked for it (`Core.due_ms`)."""

    at_ms: float


Fact = (
    TurnArrived
    | StepDone
    | TokensForced
    | TurnEnded
    | RunDeclared
    | RunFinished
    | RunRestored
    | CacheReset
    | TimePassed
)
