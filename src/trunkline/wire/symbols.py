"""Traces as the policy core reads them: prompts as arrays of symbols that weigh tokens, answers as single tokens.

    session -> runs -> turns -> TurnSymbols(prompt, answer)

Equal numbers mean equal content, over all sessions of one `SymbolTable`. Where a later prompt holds an earlier answer,
it is spelled so that it extends exactly that prompt and that answer:

    turn 1   [block 1][block 2][tail, 10 tokens] + answer of 90 tokens
    turn 2   [block 1][block 2][tail][a][a]...[a][rest of block 4, 28 tokens][block 5][tail of turn 2]

The blocks that the answer fell into are spelled that way in every later prompt of their id space.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from trunkline.core.types import Ints, Prompt
from trunkline.wire.traces import (
    BlocksPrompt,
    Message,
    MessagesPrompt,
    RunTrace,
    Session,
    Symbol,
    ToolCall,
    TurnTrace,
    added,
    spread,
)

FIRST_NUMBER = 2**20
"""Token ids stand for themselves and lie below this; all other numbers are given out from here on."""

BYTES_A_TOKEN = 4
"""Text counts as a token for every so many bytes of UTF-8: an estimate, about right for English and for code."""

ROLE_TOKENS = 4
"""What a chat template spends on opening a message, about."""

CHUNK = 1024
"""Block ids get numbers by aligned chunks of so many."""

_NONE = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class TurnSymbols:
    """One turn. `answer` is what it generates, one number a token, at least one (also where its length is unknown)."""

    turn: TurnTrace
    prompt: Prompt
    answer: Ints


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """Symbols with their weights."""

    symbols: Ints
    weights: Ints

    def __add__(self, other: "_Pieces") -> "_Pieces":
        return _Pieces(np.concatenate((self.symbols, other.symbols)), np.concatenate((self.weights, other.weights)))

    def __getitem__(self, part: slice) -> "_Pieces":
        return _Pieces(self.symbols[part], self.weights[part])

    @classmethod
    def none(cls) -> "_Pieces":
        return cls(_NONE, _NONE)

    def prompt(self) -> Prompt:
        return Prompt(self.symbols, self.weights)


@dataclass(slots=True)
class _Space:
    """One id space: the numbers of its chunks and tails, how its blocks are spelled, and answers.

    `seen` blocks have their spelling for ever: whole, or as in `pieces`. `answers` has, by (blocks before it, the last
    of them), what stands after a prompt's whole blocks: its tail, then its answer.
    """

    chunks: dict[int, int] = field(default_factory=dict)
    tails: dict[tuple[int, int], int] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    pieces: dict[int, _Pieces] = field(default_factory=dict)
    answers: dict[tuple[int, int], tuple[_Pieces, _Pieces]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A block prompt: its whole blocks' ids, how they are spelled, and after how many symbols each of them ends."""

    ids: list[int] = field(default_factory=list)
    pieces: _Pieces = field(default_factory=_Pieces.none)
    ends: Ints = field(default_factory=lambda: _NONE)


@dataclass(slots=True)
class _Opened:
    """A session being read: `starts` has the prompt that a run starts from, once its parent got that far."""

    session: Session
    space: _Space = field(default_factory=_Space)
    starts: dict[str, Any] = field(default_factory=dict)

    def reach(self, run: str, turns: int, prompt: Any) -> None:
        """`run` has ended `turns` turns, the last of them with `prompt`: what forks here starts from it."""
        for child in self.session:
            if child.fork is not None and (child.fork.parent, child.fork.after) == (run, turns):
                self.starts[child.id] = prompt
                self.reach(child.id, 0, prompt)


class SymbolTable:
    """Gives out the numbers, for any number of sessions."""

    def __init__(self) -> None:
        self._next = FIRST_NUMBER
        self._spaces: dict[str, _Space] = {}
        self._words: dict[bytes, int] = {}

    def session(self, session: Session) -> dict[str, Iterator[TurnSymbols]]:
        """The turns of every run of a session, by run id, made when they are asked for.

        A forked run may be asked once its parent's turns before the fork were.
        """
        first = next((turn.prompt for run in session for turn in run.turns), None)
        opened = _Opened(session)
        step: Callable[[_Opened, RunTrace, int, Any], tuple[Any, TurnSymbols]] = self._tokens
        if isinstance(first, BlocksPrompt):
            step = self._blocks
        elif isinstance(first, MessagesPrompt):
            step = self._text
        start: _Held | list[Symbol] = _Held() if isinstance(first, BlocksPrompt) else []
        opened.starts[session[0].id] = start
        opened.reach(session[0].id, 0, start)
        return {run.id: _play(opened, run, step) for run in session}

    # --- block ids -------------------------------------------------------------------------------------------------

    def _blocks(self, opened: _Opened, run: RunTrace, index: int, before: _Held) -> tuple[_Held, TurnSymbols]:
        space = opened.space
        if run.space:
            space = self._spaces.setdefault(f"{run.space} {run.block_tokens}", space)
        return self._block_turn(space, run.block_tokens, before, run.turns[index])

    def _block_turn(self, space: _Space, block: int, before: _Held, turn: TurnTrace) -> tuple[_Held, TurnSymbols]:
        prompt = turn.prompt
        assert isinstance(prompt, BlocksPrompt)
        fresh = list(spread(prompt.add))
        kept = before.pieces[: int(before.ends[prompt.keep - 1]) if prompt.keep else 0]
        ids = before.ids[: prompt.keep] + fresh
        spill = self._read_answers(space, block, ids, prompt)
        space.seen.update(fresh)
        more, lengths = self._spell(space, block, fresh)
        ends = np.concatenate((before.ends[: prompt.keep], len(kept.symbols) + np.cumsum(lengths, dtype=np.int32)))
        now = _Held(ids, kept + more, ends)
        tail = spill + self._tail(space, prompt, prompt.tail_tokens - int(spill.weights.sum()))
        if turn.output_ids:
            answer = self._numbers(space, list(spread(turn.output_ids)))
            return now, TurnSymbols(turn, (now.pieces + tail).prompt(), answer)
        answer = self._fresh(max(1, turn.output_tokens or 0))
        if prompt.tail_tokens < block and ids:
            space.answers[len(ids), ids[-1]] = tail, _Pieces(answer, np.ones_like(answer))
        return now, TurnSymbols(turn, (now.pieces + tail).prompt(), answer)

    def _read_answers(self, space: _Space, block: int, ids: Sequence[int], prompt: BlocksPrompt) -> _Pieces:
        """Find which of the new blocks hold an answer and note their spelling. Returns what spills into the tail."""
        for at in range(max(1, prompt.keep), len(ids) + 1):
            tail, answer = space.answers.get((at, ids[at - 1]), (_Pieces.none(), _Pieces.none()))
            stream = tail + answer
            if stream.weights.sum() > (len(ids) - at) * block + prompt.tail_tokens:
                # It grew by less than the answer: the answer is not here as it was generated. The tail still is.
                stream = tail[: len(tail.symbols) * (at < len(ids))]
            tokens = int(stream.weights.sum())
            if not tokens:
                continue
            holding = ids[at : at + -(-tokens // block)]
            if space.seen.isdisjoint(holding):
                space.seen.update(holding)
                del space.answers[at, ids[at - 1]]  # other blocks there are another answer's
                return self._cut(space, block, holding, stream)
        return _Pieces.none()

    def _cut(self, space: _Space, block: int, ids: Sequence[int], stream: _Pieces) -> _Pieces:
        """Spell the blocks `ids` as `stream`, as far as it goes, the last one filled up. Returns what is left over."""
        ends = np.cumsum(stream.weights)
        begin = 0
        for at, number in enumerate(ids):
            if begin == len(ends):
                break
            end = int(np.searchsorted(ends, (at + 1) * block, side="right"))
            piece = stream[begin:end]
            if missing := block - int(piece.weights.sum()):
                piece += _Pieces(self._fresh(1), np.full(1, missing, np.int32))
            space.pieces[number], begin = piece, end
        return stream[begin:]

    def _spell(self, space: _Space, block: int, ids: Sequence[int]) -> tuple[_Pieces, list[int]]:
        """Blocks as pieces, and how many symbols each block takes."""
        whole = _Pieces(self._numbers(space, ids), np.full(len(ids), block, np.int32))
        split = [at for at, number in enumerate(ids) if number in space.pieces]
        if not split:
            return whole, [1] * len(ids)
        lengths = [1] * len(ids)
        parts = [whole[: split[0]]]
        for at, following in pairwise([*split, len(ids)]):
            lengths[at] = len(space.pieces[ids[at]].symbols)
            parts += [space.pieces[ids[at]], whole[at + 1 : following]]
        joined = np.concatenate([part.symbols for part in parts]), np.concatenate([part.weights for part in parts])
        return _Pieces(*joined), lengths

    def _numbers(self, space: _Space, ids: Sequence[int]) -> Ints:
        found = np.asarray(ids, np.int32)
        chunks, inverse = np.unique(found // CHUNK, return_inverse=True)
        for chunk in chunks.tolist():
            if chunk not in space.chunks:
                space.chunks[chunk] = self._take(CHUNK)
        bases = np.fromiter((space.chunks[chunk] for chunk in chunks.tolist()), np.int32, len(chunks))
        return np.asarray(bases[inverse] + found % CHUNK, np.int32)

    def _tail(self, space: _Space, prompt: BlocksPrompt, tokens: int) -> _Pieces:
        if tokens <= 0:
            return _Pieces.none()
        if prompt.tail_id is None:
            return _Pieces(self._fresh(1), np.full(1, tokens, np.int32))
        name = prompt.tail_id, tokens
        if name not in space.tails:
            space.tails[name] = self._take(1)
        return _Pieces(np.full(1, space.tails[name], np.int32), np.full(1, tokens, np.int32))

    # --- token ids -------------------------------------------------------------------------------------------------

    def _tokens(self, _: _Opened, run: RunTrace, index: int, before: list[Symbol]) -> tuple[list[Symbol], TurnSymbols]:
        turn = run.turns[index]
        prompt = before[: turn.prompt.keep] + added(turn.prompt)
        ids = np.fromiter((number for number in prompt if isinstance(number, int)), np.int32, len(prompt))
        length = max(1, turn.output_tokens or 0)
        following = run.turns[index + 1].prompt if index + 1 < len(run.turns) else None
        answer = self._fresh(length)
        if turn.output_ids:
            answer = np.asarray(list(spread(turn.output_ids)), np.int32)
        elif following is not None and following.keep == len(prompt) and len(following.add) >= length:
            answer = np.asarray(following.add[:length], np.int32)
        return prompt, TurnSymbols(turn, Prompt(ids), answer)

    # --- text ------------------------------------------------------------------------------------------------------

    def _text(self, _: _Opened, run: RunTrace, index: int, before: list[Symbol]) -> tuple[list[Symbol], TurnSymbols]:
        turn = run.turns[index]
        prompt = before[: turn.prompt.keep] + added(turn.prompt)
        tools = self._spelled(msgspec.json.encode(run.tools)) if run.tools else _NONE
        parts = [part for message in prompt if isinstance(message, Message) for part in self._message(message)]
        output, calls = turn.output or "", turn.calls
        if turn.output is None and not calls and index + 1 < len(run.turns):
            following = run.turns[index + 1].prompt
            first = following.add[0] if following.add and following.keep == len(prompt) else None
            if isinstance(first, Message) and first.role == "assistant":
                output, calls = first.content, first.tool_calls
        answer = self._said(output, calls)
        if not len(answer):
            answer = self._fresh(max(1, turn.output_tokens or 0))
        return prompt, TurnSymbols(turn, Prompt(np.concatenate((tools, *parts, self._role("assistant")))), answer)

    def _message(self, message: Message) -> tuple[Ints, Ints]:
        return self._role(f"{message.role} {message.name}"), self._said(message.content, message.tool_calls)

    def _role(self, role: str) -> Ints:
        number = self._word(b"role " + role.strip().encode())
        return np.full(ROLE_TOKENS, number, np.int32)

    def _said(self, content: str, calls: Sequence[ToolCall]) -> Ints:
        wrote = [self._spelled(f"{call.name} {call.arguments}".encode()) for call in calls]
        return np.concatenate((self._spelled(content.encode()), *wrote))

    def _spelled(self, text: bytes) -> Ints:
        padded = np.frombuffer(text + b"\0" * (-len(text) % BYTES_A_TOKEN), f"S{BYTES_A_TOKEN}")
        words, inverse = np.unique(padded, return_inverse=True)
        return np.fromiter((self._word(word) for word in words.tolist()), np.int32, len(words))[inverse]

    def _word(self, word: bytes) -> int:
        if word not in self._words:
            self._words[word] = self._take(1)
        return self._words[word]

    # --- numbers ---------------------------------------------------------------------------------------------------

    def _fresh(self, count: int) -> Ints:
        first = self._take(count)
        return np.arange(first, first + count, dtype=np.int32)

    def _take(self, count: int) -> int:
        first, self._next = self._next, self._next + count
        if self._next >= 2**31:
            raise ValueError("the trace has more distinct symbols than 31 bits can number; slice it")
        return first


def _play(
    opened: _Opened, run: RunTrace, step: Callable[[_Opened, RunTrace, int, Any], tuple[Any, TurnSymbols]]
) -> Iterator[TurnSymbols]:
    """The turns of one run, one by one."""
    assert run.id in opened.starts, f"run {run.id!r} was asked for before its parent came to the fork"
    prompt = opened.starts.pop(run.id)
    for index in range(len(run.turns)):
        prompt, symbols = step(opened, run, index, prompt)
        opened.reach(run.id, index + 1, prompt)
        yield symbols
