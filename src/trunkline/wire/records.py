"""Run records: what is stored, shown and returned for a run, turn by turn."""

import msgspec


class MissRow(msgspec.Struct, frozen=True, kw_only=True):
    """Novel tokens of one turn that share a reason. `detail` is for people."""

    reason: str
    tokens: int
    detail: str = ""


class DiffRow(msgspec.Struct, frozen=True, kw_only=True):
    """Where a turn's prompt left a prefix that it should have shared: that of `run` ("" if it is forgotten).

    Both texts hold `before`, up to token `at_token`; then one went on with `was`, the prompt goes on with `now`, and
    both with `after` ("" where they stay apart). Texts are cut to a few hundred characters. `was_tokens` and
    `now_tokens` count all that follows `at_token` on either side. `culprit` names the likely cause
    (`wire/culprits.py`).
    """

    run: str
    at_token: int
    before: str
    was: str
    now: str
    after: str
    was_tokens: int
    now_tokens: int
    culprit: str


class TurnRow(msgspec.Struct, frozen=True, kw_only=True):
    """One turn. `cached_tokens + novel_tokens == prompt_tokens`; the misses' tokens sum to `novel_tokens`.

    `queue_ms + prefill_ms + decode_ms == latency_ms`: arrival to placement, to first token, to last token. Of
    `queue_ms`, `admission_ms` passed until the run was let in (0 for all turns but the first).
    `tool_gap_ms` is None for a run's first turn. `at` is the arrival as Unix seconds. `normalized` counts what each
    normalizer replaced in the prompt (`wire/noise.py`); a normalizer that replaced nothing is not in it. `diff` is None
    for a turn that shares all it should.

    `relation` says how the turn was given to its run (`core/types.py`; empty in records from before it was kept), on
    the evidence of `shared_tokens` in front that had arrived before and `passages` of the run's own text further on.
    Equal prompts have equal digests.

    `constraint` is the kind of grammar that the answer followed, `forced_tokens` how many of its tokens that forced,
    `saved_passes` how many model passes fewer than tokens it took, `mask_ms` what the grammar took of the time.
    """

    index: int
    at: float
    node: str
    prompt_tokens: int
    cached_tokens: int
    novel_tokens: int
    reusable_tokens: int
    completion_tokens: int
    misses: tuple[MissRow, ...]
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    latency_ms: float
    tool_gap_ms: float | None
    finish_reason: str
    cost_usd: float = 0.0
    normalized: dict[str, int] = {}
    relation: str = ""
    shared_tokens: int = 0
    passages: int = 0
    prompt_digest: str = ""
    diff: DiffRow | None = None
    constraint: str | None = None
    forced_tokens: int = 0
    saved_passes: int = 0
    mask_ms: float = 0.0
    admission_ms: float = 0.0


class AdmissionRow(msgspec.Struct, frozen=True, kw_only=True):
    """How a declared run was let in: at once, or (`waits`) as soon as there is room; and its predicted footprint."""

    waits: bool
    predicted_turns: float
    predicted_tokens: int


class RunTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over a run's turns."""

    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reusable_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run with its totals, as lists show it. Times are Unix seconds. `session` is the group it is one of."""

    id: str
    name: str | None = None
    session: str | None = None
    parent: str | None
    state: str
    origin: str
    node: str
    started_at: float
    last_at: float
    turns: int
    prompt_tokens: int
    cached_tokens: int
    reusable_tokens: int
    completion_tokens: int
    cost_usd: float = 0.0


class RunList(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/runs`: one page, newest first."""

    object: str = "list"
    data: list[RunRow]
    has_more: bool


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """One run whole, as `GET /v1/runs/{id}` returns it. `name`, `objective`, `expected_turns` are as declared.

    `admission` is in the answer to the declaration alone.
    """

    id: str
    name: str | None = None
    objective: str | None = None
    expected_turns: int | None = None
    session: str | None = None
    parent: str | None
    children: tuple[str, ...]
    state: str
    origin: str
    node: str
    started_at: float
    last_at: float
    turns: tuple[TurnRow, ...]
    totals: RunTotals = RunTotals()
    admission: AdmissionRow | None = None
