"""Recorded agent runs as the turns that their agents would send: what `identity.py` reads."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from identity_drive import Agent, Step
from trunkline import config
from trunkline.core.types import Ints, Prompt
from trunkline.engine.history import History
from trunkline.engine.model import load_model
from trunkline.engine.quantize import default_model
from trunkline.engine.template import ChatTemplate
from trunkline.engine.tokens import Vocabulary
from trunkline.wire.lmcache import read_lmcache
from trunkline.wire.symbols import SymbolTable, TurnSymbols
from trunkline.wire.tau_bench import read_tau_bench
from trunkline.wire.traces import (
    BlocksPrompt,
    Message,
    MessagesPrompt,
    RunTrace,
    Session,
    ToolCall,
    TurnTrace,
    expand,
    read_lines,
    read_sessions,
)
from trunkline.wire.weka import read_weka

CONCURRENT = 32
"""About so many tasks run at a time."""
GAP_MS = (500.0, 8000.0)
"""Between turns whose times were not recorded."""
WEKA = "traces_delta.jsonl.gz"


def all_of(
    data: Path, wanted: Sequence[str] | None, limit: int | None, seed: int
) -> Iterator[tuple[str, Iterator[Agent]]]:
    """The corpora under `data`, by name, each as its agents in the order in which they begin."""
    text = _Text(seed)
    miniswe, magagent = (data / "lmcache_agent" / name for name in ("miniswe", "magagent"))
    weka = data / "weka" / WEKA
    corpora: dict[str, tuple[Path, Callable[[], Iterator[Agent]]]] = {
        "miniswe": (miniswe, lambda: text.agents(read_lmcache(miniswe), limit)),
        "magagent": (magagent, lambda: text.agents(read_lmcache(magagent), limit)),
        "tau_bench": (data / "tau_bench", lambda: text.agents(_tau(data / "tau_bench"), limit)),
        "weka": (weka, lambda: weka_agents(weka, limit, seed)),
        "weka, replayed": (weka, lambda: weka_agents(weka, limit, seed, replayed=True)),
        "weka, replayed, heads apart": (weka, lambda: weka_agents(weka, limit, seed, replayed=True, own_heads=True)),
    }
    for name, (path, agents) in corpora.items():
        if path.exists() and (wanted is None or name.split(",")[0] in wanted):
            yield name, agents()


def _tau(path: Path) -> Iterator[RunTrace]:
    """The recorded runs; few-shot examples are no runs."""
    return (run for run in read_tau_bench(path) if run.task)


# --- text -----------------------------------------------------------------------------------------------------------


class _Text:
    """Chats as the packaged model's template and tokenizer spell them, exact history included."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._spelled: tuple[Vocabulary, ChatTemplate] | None = None

    def agents(self, runs: Iterator[RunTrace], limit: int | None) -> Iterator[Agent]:
        """One agent a run, begun a little after one another, in shuffled order."""
        chosen = list(runs)[:limit]
        self._random.shuffle(chosen)
        vocabulary, template = self._model()
        history = History(vocabulary)
        for number, run in enumerate(chosen):
            steps = self._steps(run, vocabulary, template, history)
            yield Agent(run.id, steps, begin_ms=number * 30_000.0 / CONCURRENT)

    def _steps(self, run: RunTrace, vocabulary: Vocabulary, template: ChatTemplate, history: History) -> Iterator[Step]:
        before: float | None = None
        for turn, messages in zip(run.turns, expand(run), strict=True):
            assert isinstance(turn.prompt, MessagesPrompt)
            chat = [_plain(message) for message in messages if isinstance(message, Message)]
            text = template.render(chat, {"add_generation_prompt": True})
            tokens = history.tokenize(text, salt="")
            said = _said(turn)
            generated = [*vocabulary.tokenize(said).tolist(), vocabulary.eos]
            history.remember(salt="", text=text, prompt=tokens, generated=generated, visible=said)
            gap = self._random.uniform(*GAP_MS) if turn.at_ms is None else turn.at_ms - (before or 0.0)
            before = turn.at_ms
            yield Step(Prompt(tokens), np.array(generated, np.int32), gap)

    def _model(self) -> tuple[Vocabulary, ChatTemplate]:
        if self._spelled is None:
            model = load_model(default_model(config.model_cache_dir(), print), 0)
            vocabulary = Vocabulary(model.vocab)
            bos, eos = vocabulary.bos_text.decode(), vocabulary.eos_text.decode()
            self._spelled = vocabulary, ChatTemplate(model.chat_template, bos_token=bos, eos_token=eos)
        return self._spelled


def _plain(message: Message) -> dict[str, Any]:
    """A message for a template that knows no tools: calls are written out."""
    return {"role": message.role, "content": _written(message.content, message.tool_calls)}


def _said(turn: TurnTrace) -> str:
    return _written(turn.output or "", turn.calls)


def _written(content: str, calls: Sequence[ToolCall]) -> str:
    written = [f'<tool_call>{{"name": "{call.name}", "arguments": {call.arguments}}}</tool_call>' for call in calls]
    return "\n".join(part for part in (content, *written) if part)


# --- block ids ------------------------------------------------------------------------------------------------------


class _Sizes(msgspec.Struct):
    """What a Weka session says of its head, in tokens."""

    id: str
    block_size: int
    tool_tokens: int = 0
    system_tokens: int = 0


def weka_agents(
    path: Path, limit: int | None, seed: int, *, replayed: bool = False, own_heads: bool = False
) -> Iterator[Agent]:
    """Root runs begin one after another, about `CONCURRENT` of them at a time; sub-agents when it is recorded.

    `replayed`: as a replay harness sends them, which never sends back what was answered. `own_heads`: sessions share
    nothing, as with harnesses that take the block ids for each session's own.
    """
    sizes = {size.id: size for _, line in read_lines(path) for size in [msgspec.json.decode(line, type=_Sizes)]}
    sessions = [session for session in read_sessions(read_weka(path)) if session[0].turns][:limit]
    random.Random(seed).shuffle(sessions)
    lengths = [sum(turn.gap_ms or 0.0 for turn in session[0].turns) for session in sessions]
    apart = float(np.median(lengths)) / CONCURRENT
    table, names = SymbolTable(), _Names(replayed=replayed, own_heads=own_heads)
    for number, session in enumerate(sessions):
        renamed = names.session(session, sizes[session[0].id])
        turns = table.session(tuple(run for run, _ in renamed))
        agents = {run.id: Agent(run.id, _weka_steps(turns[run.id], moved, replayed)) for run, moved in renamed}
        for run, _ in renamed[1:]:
            assert run.fork is not None
            agents[run.fork.parent].children.setdefault(max(1, run.fork.after), []).append(agents[run.id])
        root = agents[renamed[0][0].id]
        root.begin_ms = number * apart
        yield root


def _weka_steps(turns: Iterator[TurnSymbols], moved: dict[int, int], replayed: bool) -> Iterator[Step]:
    """The turns. Those in `moved` hold the answer before them from that token on, spelled over the blocks there."""
    spelled: dict[int, tuple[Ints, Ints]] = {}
    answer = np.empty(0, np.int32)
    for index, turn in enumerate(turns):
        prompt, gap = turn.prompt, turn.turn.gap_ms or 0.0
        assert prompt.weights is not None
        if index in moved:
            at = int(np.searchsorted(np.cumsum(prompt.weights), moved[index], side="right"))
            _spell(spelled, prompt, at, answer)
        if spelled:
            prompt = _respelled(prompt, spelled)
        answer = np.arange(UNSEEN, UNSEEN + len(turn.answer), dtype=np.int32) if replayed else turn.answer
        yield Step(prompt, answer, gap)


UNSEEN = (1 << 31) - (1 << 20)
"""Numbers that no prompt has."""


def _spell(spelled: dict[int, tuple[Ints, Ints]], prompt: Prompt, at: int, answer: Ints) -> None:
    """Note that the prompt's symbols from `at` on hold `answer`, or its end where all has no room (thinking is cut)."""
    assert prompt.weights is not None
    answer = answer[max(0, len(answer) - int(prompt.weights[at:].sum())) :]
    begin = 0
    for symbol, weight in zip(prompt.symbols[at:].tolist(), prompt.weights[at:].tolist(), strict=True):
        held = answer[begin : begin + weight]
        if not len(held):
            return
        rest = weight - len(held)
        symbols = np.append(held, symbol) if rest else held
        spelled[symbol] = symbols.astype(np.int32), np.append(np.ones_like(held), rest).astype(np.int32)[: len(symbols)]
        begin += weight


def _respelled(prompt: Prompt, spelled: dict[int, tuple[Ints, Ints]]) -> Prompt:
    assert prompt.weights is not None
    found = np.flatnonzero(np.isin(prompt.symbols, np.fromiter(spelled, np.int32, len(spelled)))).tolist()
    symbols, weights, begin = [], [], 0
    for at in found:
        symbols += [prompt.symbols[begin:at], spelled[int(prompt.symbols[at])][0]]
        weights += [prompt.weights[begin:at], spelled[int(prompt.symbols[at])][1]]
        begin = at + 1
    return Prompt(
        np.concatenate([*symbols, prompt.symbols[begin:]]), np.concatenate([*weights, prompt.weights[begin:]])
    )


class _Names:
    """Block ids for all sessions: equal heads are shared, all else is a session's own.

    Ids are chained (none is ever found at two places), so that an edit renames all that follows it. A prompt that is
    longer than where its predecessor was edited is taken to keep the text behind one edited block and, unless
    `replayed`, to go on with the answer; one that became shorter to keep what fits of the newest text. `own_heads`:
    heads are not shared either.
    """

    def __init__(self, *, replayed: bool, own_heads: bool) -> None:
        self._next = 0
        self._own_heads = own_heads
        self._replayed = replayed
        self._heads: dict[tuple[int, ...], int] = {}

    def session(self, session: Session, sizes: _Sizes) -> list[tuple[RunTrace, dict[int, int]]]:
        """The session in these ids, and by turn where (token) an edited prompt holds the answer before it."""
        own: dict[int, int] = {}
        first = session[0].turns[0].prompt
        assert isinstance(first, BlocksPrompt)
        tools, head = (
            tokens // sizes.block_size for tokens in (sizes.tool_tokens, sizes.tool_tokens + sizes.system_tokens)
        )
        for at, number in enumerate(_blocks(first)[: 0 if self._own_heads else head]):
            name = (sizes.tool_tokens, at) if at < tools else (sizes.tool_tokens, sizes.system_tokens, at)
            if name not in self._heads:
                self._heads[name] = self._take()
            own[number] = self._heads[name]
        return [self._run(run, own) for run in session]

    def _run(self, run: RunTrace, own: dict[int, int]) -> tuple[RunTrace, dict[int, int]]:
        turns: list[TurnTrace] = []
        held: list[int] = []
        moved: dict[int, int] = {}
        for index, turn in enumerate(run.turns):
            prompt = turn.prompt
            assert isinstance(prompt, BlocksPrompt)
            fresh = [own[n] if n in own else own.setdefault(n, self._take()) for n in _blocks(prompt)]
            if prompt.keep < len(held) and fresh and not self._replayed:
                fresh, at = _kept(held[prompt.keep + 1 :], fresh)
                moved[index] = (prompt.keep + at) * run.block_tokens
            held = held[: prompt.keep] + fresh
            turns.append(msgspec.structs.replace(turn, prompt=_prompt(prompt, fresh)))
        return msgspec.structs.replace(run, turns=tuple(turns), space="all"), moved

    def _take(self) -> int:
        self._next += 1
        return self._next


GROWTH = 16
"""Blocks for the last answer and what is new, at the end of a prompt that became shorter."""


def _kept(old: Sequence[int], fresh: list[int]) -> tuple[list[int], int]:
    """New blocks as one edited block and what they keep of the `old` ones behind it; where the answer is in them."""
    if len(fresh) > len(old):
        return [fresh[0], *old, *fresh[len(old) + 1 :]], len(old) + 1
    room = max(0, len(fresh) - 1 - GROWTH)
    return [fresh[0], *old[len(old) - room :], *fresh[room + 1 :]], room + 1


def _blocks(prompt: BlocksPrompt) -> list[int]:
    return [block for first, count in prompt.add for block in range(first, first + count)]


def _prompt(prompt: BlocksPrompt, fresh: Sequence[int]) -> BlocksPrompt:
    add: list[tuple[int, int]] = []
    for block in fresh:
        if add and block == sum(add[-1]):
            add[-1] = (add[-1][0], add[-1][1] + 1)
        else:
            add.append((block, 1))
    return msgspec.structs.replace(prompt, add=tuple(add))
