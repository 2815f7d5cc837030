"""What is in a trace: sizes, waits and how much of the input an infinite cache would have held."""

from collections.abc import Iterable, Sequence
from itertools import repeat

import msgspec
import numpy as np

from trunkline.wire.symbols import BYTES_A_TOKEN, ROLE_TOKENS
from trunkline.wire.traces import (
    BlocksPrompt,
    Message,
    MessagesPrompt,
    Prompt,
    RunTrace,
    Session,
    Symbol,
    TurnKind,
    TurnTrace,
    added,
)

Key = Symbol | tuple[int, int]


class Quantiles(msgspec.Struct, frozen=True):
    """A distribution."""

    count: int
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Quantiles | None":
        """None where there is nothing."""
        data = np.asarray(list(values), float)
        if not len(data):
            return None
        p50, p90, p99 = (round(float(x), 3) for x in np.percentile(data, (50, 90, 99)))
        return cls(len(data), p50, p90, p99, float(data.max()))


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one trace. Lengths are tokens; of text, estimates (`estimated`). Waits are seconds.

    `new_tokens` are a prompt's tokens after the longest prefix that some prompt before it brought, in whole symbols
    (messages, tokens, blocks); `infinite_cache_hit` is the share of all input that such prefixes cover. Answers count
    once a prompt repeats them. A compaction is a turn whose prompt is shorter than half of its run's previous one.
    `solved` counts rewards of at least 1.
    """

    sessions: int
    runs: int
    sub_agents: int
    sessions_with_sub_agents: int
    turns: int
    estimated: bool
    turns_a_session: Quantiles | None
    input_tokens: Quantiles | None
    output_tokens: Quantiles | None
    new_tokens: Quantiles | None
    total_input_tokens: int
    total_output_tokens: int
    infinite_cache_hit: float | None
    gap_after_tool_s: Quantiles | None
    gap_after_user_s: Quantiles | None
    gap_unknown_kind_s: Quantiles | None
    compactions: int
    tool_turns: int
    user_turns: int
    with_tools: int
    labelled: int
    solved: int


def text_tokens(message: Message) -> int:
    """About how many tokens a chat template makes of a message."""
    written = message.content + "".join(f"{call.name} {call.arguments}" for call in message.tool_calls)
    return ROLE_TOKENS + -(-len(written.encode()) // BYTES_A_TOKEN)


def _lengths(run: RunTrace, prompt: Prompt) -> Iterable[int]:
    """Tokens of each symbol that a prompt adds."""
    if isinstance(prompt, MessagesPrompt):
        return map(text_tokens, prompt.add)
    return repeat(run.block_tokens or 1)


class _Cache:
    """Prompts that arrived, as a trie: (node, symbol) -> node. Node 0 is the root; `tokens` is where a node ends."""

    def __init__(self) -> None:
        self.children: dict[tuple[int, Key], int] = {}
        self.tokens = [0]

    def extend(self, node: int, symbols: Sequence[Key], lengths: Iterable[int]) -> tuple[list[int], int]:
        """Follow `symbols` from `node`, adding what is new: the nodes on the way, and how many of them were known."""
        path: list[int] = []
        known = 0
        for symbol, length in zip(symbols, lengths, strict=False):
            following = self.children.get((node, symbol))
            if following is None:
                following = len(self.tokens)
                self.children[node, symbol] = following
                self.tokens.append(self.tokens[node] + length)
            else:
                known += 1  # below a new node everything is new, so what is known comes first
            path.append(following)
            node = following
        return path, known


class FigureCounter:
    """Counts sessions as they come, so that a trace need not fit in memory."""

    def __init__(self) -> None:
        self._shared: dict[str, _Cache] = {}
        self._count = dict.fromkeys(
            ("runs", "turns", "forked", "compactions", "tool", "user", "with_tools", "labelled", "solved"), 0
        )
        self._session_turns: list[int] = []
        self._inputs: list[int] = []
        self._outputs: list[int] = []
        self._new: list[int] = []
        self._gaps: dict[TurnKind, list[float]] = {kind: [] for kind in TurnKind}
        self._estimated = False

    def add(self, session: Session) -> None:
        """Count one session."""
        count = self._count
        own = _Cache()
        paths: dict[str, list[list[int]]] = {}
        for run in session:
            cache = own
            if run.space or (run.turns and not isinstance(run.turns[0].prompt, BlocksPrompt)):
                cache = self._shared.setdefault(run.space, _Cache())
            at = run.fork
            paths[run.id] = [paths[at.parent][at.after] if at else []]
            self._run(run, cache, paths[run.id])
            count["runs"] += 1
            count["with_tools"] += bool(run.tools)
            count["labelled"] += run.reward is not None
            count["solved"] += run.reward is not None and run.reward >= 1
        count["forked"] += len(session) > 1
        self._session_turns.append(sum(len(run.turns) for run in session))

    def _run(self, run: RunTrace, cache: _Cache, paths: list[list[int]]) -> None:
        """Count a run's turns; `paths` begins with the prompt that it starts from and gets one a turn."""
        before = 0
        tools = [Message("tools", msgspec.json.encode(run.tools).decode())] if run.tools else []
        top, held = cache.extend(0, tools, map(text_tokens, tools))
        for turn in run.turns:
            prompt = turn.prompt
            kept = top + paths[-1][: prompt.keep]
            path, known = cache.extend(kept[-1] if kept else 0, added(prompt), _lengths(run, prompt))
            whole = kept + path
            hit_nodes = whole[: len(kept) + known] if held or prompt.keep or known or not tools else []
            hit = cache.tokens[hit_nodes[-1]] if hit_nodes else 0
            tokens = cache.tokens[whole[-1]] if whole else 0
            if isinstance(prompt, BlocksPrompt) and prompt.tail_tokens:
                tokens += prompt.tail_tokens
                if prompt.tail_id is not None:
                    tail = prompt.tail_id, prompt.tail_tokens
                    _, repeated = cache.extend(whole[-1] if whole else 0, [tail], [prompt.tail_tokens])
                    hit += repeated * prompt.tail_tokens
            paths.append(whole[len(top) :])
            held = len(top)
            self._note(turn, tokens, hit, before)
            before = tokens

    def _note(self, turn: TurnTrace, tokens: int, hit: int, before: int) -> None:
        """Count one turn of `tokens` input tokens of which `hit` had arrived; the turn before it had `before`."""
        self._inputs.append(tokens)
        self._new.append(tokens - hit)
        output = turn.output_tokens
        if output is None and (turn.output or turn.calls):
            output = text_tokens(Message("", turn.output or "", turn.calls)) - ROLE_TOKENS
        if output is not None:
            self._outputs.append(output)
        if turn.gap_ms is not None:
            self._gaps[turn.kind].append(turn.gap_ms / 1e3)
        self._count["turns"] += 1
        self._count["compactions"] += tokens < before / 2
        self._count["tool"] += turn.kind is TurnKind.TOOL
        self._count["user"] += turn.kind is TurnKind.USER
        self._estimated |= isinstance(turn.prompt, MessagesPrompt)

    def figures(self) -> Figures:
        """What was counted."""
        count, total = self._count, sum(self._inputs)
        return Figures(
            sessions=len(self._session_turns),
            runs=count["runs"],
            sub_agents=count["runs"] - len(self._session_turns),
            sessions_with_sub_agents=count["forked"],
            turns=count["turns"],
            estimated=self._estimated,
            turns_a_session=Quantiles.of(self._session_turns),
            input_tokens=Quantiles.of(self._inputs),
            output_tokens=Quantiles.of(self._outputs),
            new_tokens=Quantiles.of(self._new),
            total_input_tokens=total,
            total_output_tokens=sum(self._outputs),
            infinite_cache_hit=1 - sum(self._new) / total if total else None,
            gap_after_tool_s=Quantiles.of(self._gaps[TurnKind.TOOL]),
            gap_after_user_s=Quantiles.of(self._gaps[TurnKind.USER]),
            gap_unknown_kind_s=Quantiles.of(self._gaps[TurnKind.UNKNOWN]),
            compactions=count["compactions"],
            tool_turns=count["tool"],
            user_turns=count["user"],
            with_tools=count["with_tools"],
            labelled=count["labelled"],
            solved=count["solved"],
        )
