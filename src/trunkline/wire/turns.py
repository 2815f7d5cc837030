"""What passes between the gateway and an executor for one turn: a request in, a stream of events out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from trunkline.core.types import EndReason, Ints, RunOrigin, ServiceClass
from trunkline.wire.records import TurnRow


class TemplateError(ValueError):
    """The model's chat template refused the messages; the text names why and what to change."""


class ConstraintError(ValueError):
    """A constraint that cannot be compiled or satisfied; the text says where in the schema, and why."""


class CallFormat(StrEnum):
    """How a model writes tool calls, as its chat template shows."""

    HERMES = "hermes"
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen)."""
    LLAMA3 = "llama3"
    """`{"name": ..., "parameters": {...}}` as the whole answer (Llama 3.1 and later)."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`."""
    GENERIC = "generic"
    """The template knows no tools, or writes calls in a form that is none of these: the gateway describes the tools in
    the system text and asks for Hermes' form."""


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a model's chat template reveals. `thinking` is the pair of markers around reasoning text, if it has any.

    `control` are the (text, id) of all control tokens that a format's markers can be: grammars name them by id.
    """

    calls: CallFormat = CallFormat.GENERIC
    thinking: tuple[str, str] | None = None
    control: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a turn's text must match: a grammar in the Lark dialect of `llguidance` (JSON schemas inside `%json {...}`).

    `kind` names the sort of step for statistics: `tool_call`, `json_schema`, `json_object`, ...
    """

    grammar: str
    kind: str


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What `/v1/models` says. `max_model_len` bounds prompt plus completion of one turn, in tokens.

    Token ids from clients are checked against `vocab_size` before an executor sees them.
    """

    id: str
    max_model_len: int
    created: int
    vocab_size: int
    traits: TemplateTraits = field(default_factory=TemplateTraits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to choose tokens. Neutral values switch a part off; `temperature` 0 is greedy.

    `seed` None means a fresh random seed. `repetition_penalty` multiplies (1 is off), the other two subtract.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class RunHint:
    """What the client said about the run. `run` names it exactly; None: infer it from the prompt.

    `group` is a session that a client names: its main run, sub-agents and side calls share it, and the prompt tells
    which of them the turn belongs to. `service` is the run's class, if the turn begins one.
    """

    run: str | None = None
    group: str | None = None
    parent: str | None = None
    origin: RunOrigin = RunOrigin.INFERRED
    final: bool = False
    service: ServiceClass = ServiceClass.INTERACTIVE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnRequest:
    """One generation. `tokens` is the whole prompt (1-D int32), `text` the text it came from (None: token ids sent).

    `logprobs` is how many alternatives to report beside each chosen token (None: no logprobs at all).
    `prompt_logprobs` asks the same of every prompt token (`echo` with `logprobs`). `stop_tokens` end the turn as the
    model's own end token does. `show_control` names control tokens that appear in the visible text (`[TOOL_CALLS]`,
    `<think>`); all others are hidden. `normalized` counts what each normalizer replaced, for the turn's record. `kind`
    is a digest of the agent's instructions and tools ("": not known), by which admission knows its likes.
    """

    salt: str
    tokens: Ints
    text: str | None
    max_tokens: int
    hint: RunHint = field(default_factory=RunHint)
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False
    constraint: Constraint | None = None
    show_control: tuple[str, ...] = ()
    normalized: Mapping[str, int] = field(default_factory=dict)
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What a client says of a run before its first turn. `parent` names the run that it is a sub-agent of.

    `expected_turns` and `expected_tokens` (of context at its end) are the client's own predictions.
    """

    parent: str | None = None
    service: ServiceClass = ServiceClass.INTERACTIVE
    expected_turns: int | None = None
    expected_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A declared run is let in; if it `waits`, its first turn will be served when there is room.

    `turns` and `peak_tokens` are its predicted footprint.
    """

    waits: bool = False
    turns: float = 0.0
    peak_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log probability of one token, with the most likely alternatives (best first)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Accepted:
    """First event of every turn that was not refused. `run` is the public id."""

    run: str
    index: int
    parent: str | None


@dataclass(frozen=True, slots=True)
class Placed:
    """The turn got its place: how much of its prompt was cached. Comes once, after `Accepted`, before any `Delta`."""

    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """One entry a prompt token; None for the first, which nothing predicts."""

    entries: tuple[TokenLogprob | None, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens and the text they made visible (text waits for whole UTF-8 and for stop strings to be ruled out)."""

    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """Last event of a turn. `stopped_by` is the stop string or token that ended it, if one did."""

    reason: EndReason
    row: TurnRow
    stopped_by: str | int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """Last event of a turn that could not be served. `status` is the HTTP status, `code` OpenAI's error code."""

    status: int
    code: str
    message: str
    retry_after_s: float | None = None


TurnEvent = Accepted | Placed | PromptLogprobs | Delta | Ended | Failed
