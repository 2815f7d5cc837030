"""Prompts as numbers: equal content has equal numbers, and an answer is found again where a later prompt holds it."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.core.types import Ints, Prompt
from trunkline.wire.symbols import FIRST_NUMBER, SymbolTable, TurnSymbols
from trunkline.wire.traces import (
    BlocksPrompt,
    Fork,
    Message,
    MessagesPrompt,
    RunTrace,
    TokensPrompt,
    Tool,
    ToolCall,
    TurnTrace,
    expand,
)

Runs = tuple[tuple[int, int], ...]


def blocks(keep: int, add: Runs, tail: int = 0, out: int = 1, tail_id: int | None = None) -> TurnTrace:
    return TurnTrace(prompt=BlocksPrompt(keep=keep, add=add, tail_tokens=tail, tail_id=tail_id), output_tokens=out)


def run(*turns: TurnTrace, name: str = "r", block: int = 64, space: str = "", fork: Fork | None = None) -> RunTrace:
    return RunTrace(id=name, turns=turns, block_tokens=block, space=space, fork=fork)


def read(*session: RunTrace, table: SymbolTable | None = None) -> list[list[TurnSymbols]]:
    return [list(turns) for turns in (table or SymbolTable()).session(session).values()]


def common(a: Prompt, b: Prompt) -> int:
    """Tokens of the common prefix."""
    assert a.weights is not None and b.weights is not None
    length = min(len(a.symbols), len(b.symbols))
    same = (a.symbols[:length] == b.symbols[:length]) & (a.weights[:length] == b.weights[:length])
    return int(a.weights[: length if same.all() else int(same.argmin())].sum())


def extends(later: Prompt, prompt: Prompt, answer: Ints) -> bool:
    whole = np.concatenate((prompt.symbols, answer))
    return len(later.symbols) >= len(whole) and bool((later.symbols[: len(whole)] == whole).all())


def test_a_prompt_that_holds_the_answer_before_it_extends_that_prompt_and_that_answer() -> None:
    ((one, two, three),) = read(run(blocks(0, ((1, 2),), 10, 90), blocks(2, ((3, 3),), 7, 30), blocks(5, ((6, 1),), 3)))
    assert extends(two.prompt, one.prompt, one.answer)
    assert extends(three.prompt, two.prompt, two.answer)
    assert [turn.prompt.tokens for turn in (one, two, three)] == [138, 327, 387]
    assert [len(turn.answer) for turn in (one, two, three)] == [90, 30, 1]


def test_an_answer_longer_than_what_came_after_it_is_not_in_the_next_prompt_but_the_prompt_before_is() -> None:
    ((one, two),) = read(run(blocks(0, ((1, 2),), 10, 200), blocks(2, ((3, 1),), 5)))
    assert common(one.prompt, two.prompt) == one.prompt.tokens == 138
    assert two.prompt.tokens == 197
    assert not np.isin(one.answer, two.prompt.symbols).any()


def test_an_answer_that_ends_in_the_next_prompts_tail_is_found_there_and_again_after_it() -> None:
    turns = blocks(0, ((1, 1),), 3, 4), blocks(1, (), 20, 5), blocks(1, ((2, 1),), 9)
    ((one, two, three),) = read(run(*turns))
    assert extends(two.prompt, one.prompt, one.answer)
    assert extends(three.prompt, two.prompt, two.answer)
    assert [turn.prompt.tokens for turn in (one, two, three)] == [67, 84, 137]


def test_a_side_call_between_two_turns_does_not_hide_the_answer() -> None:
    turns = blocks(0, ((1, 3),), 10, 20), blocks(1, ((90, 1),)), blocks(1, ((2, 3),), 5)
    ((one, _, three),) = read(run(*turns))
    assert extends(three.prompt, one.prompt, one.answer)


def test_a_sub_agent_shares_the_prompt_it_forked_from() -> None:
    parent = run(blocks(0, ((1, 4),), 5, 30), blocks(4, ((5, 1),), 0))
    child = run(blocks(3, ((50, 1),), 2), name="c", fork=Fork(parent="r", after=1, joins=1))
    grandchild = run(blocks(2, ((70, 1),)), name="g", fork=Fork(parent="c", after=0))
    (one, _), (forked,), (below,) = read(parent, child, grandchild)
    assert common(one.prompt, forked.prompt) == 192
    assert common(one.prompt, below.prompt) == 128


def test_ids_are_a_sessions_own_unless_a_space_is_named() -> None:
    table = SymbolTable()
    ((a,),) = read(run(blocks(0, ((1, 2),))), table=table)
    ((b,),) = read(run(blocks(0, ((1, 2),))), table=table)
    ((c,),) = read(run(blocks(0, ((1, 2),), 9, tail_id=3), space="s"), table=table)
    ((d,),) = read(run(blocks(0, ((1, 2),), 9, tail_id=3), space="s"), table=table)
    ((e,),) = read(run(blocks(0, ((1, 2),), 9), space="s"), table=table)
    assert common(a.prompt, b.prompt) == common(a.prompt, c.prompt) == 0
    assert common(c.prompt, d.prompt) == 137
    assert common(c.prompt, e.prompt) == 128


def test_token_ids_stand_for_themselves_and_answers_are_what_follows() -> None:
    turns = (
        TurnTrace(prompt=TokensPrompt(add=(5, 6)), output_tokens=2),
        TurnTrace(prompt=TokensPrompt(keep=2, add=(7, 8, 9)), output_tokens=3),
    )
    ((one, two),) = read(RunTrace(id="t", turns=turns))
    assert two.prompt.symbols.tolist() == [5, 6, 7, 8, 9]
    assert one.answer.tolist() == [7, 8]
    assert len(two.answer) == 3
    assert min(two.answer) >= FIRST_NUMBER


def test_text_extends_the_answer_that_it_repeats_tool_calls_included() -> None:
    call = ToolCall("c1", "look", '{"at": "tests"}')
    said = Message("assistant", "I look.", (call,))
    turns = (
        TurnTrace(prompt=MessagesPrompt(add=(Message("user", "fix it, please"),)), output="I look.", calls=(call,)),
        TurnTrace(prompt=MessagesPrompt(keep=1, add=(said, Message("tool", "a.py", tool_call_id="c1"))), output="ok"),
    )
    ((one, two),) = read(RunTrace(id="t", turns=turns, tools=(Tool("look"),)))
    assert extends(two.prompt, one.prompt, one.answer)
    ((bare, _),) = read(RunTrace(id="t", turns=turns))
    assert len(bare.prompt.symbols) < len(one.prompt.symbols)


def test_an_answer_that_only_the_next_prompt_tells_is_taken_from_there() -> None:
    told = Message("user", "go"), Message("assistant", "went there"), Message("user", "and?")
    turns = (
        TurnTrace(prompt=MessagesPrompt(add=told[:1])),
        TurnTrace(prompt=MessagesPrompt(keep=1, add=told[1:]), output_tokens=7),
    )
    ((one, two),) = read(RunTrace(id="t", turns=turns))
    assert extends(two.prompt, one.prompt, one.answer)
    assert len(two.answer) == 7


def test_a_run_may_not_be_asked_for_before_its_parent_came_to_the_fork() -> None:
    parent, child = run(blocks(0, ((1, 4),))), run(blocks(3, ()), name="c", fork=Fork(parent="r", after=1))
    turns = SymbolTable().session((parent, child))
    with pytest.raises(AssertionError, match="before its parent"):
        next(turns["c"])


Deltas = Sequence[tuple[int, list[tuple[int, int]], int, int]]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 8),
            st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=3),
            st.integers(0, 7),
            st.integers(1, 20),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_prompts_share_exactly_the_blocks_that_their_ids_say(deltas: Deltas) -> None:
    turns: list[TurnTrace] = []
    held = 0
    for keep, add, tail, out in deltas:
        kept = min(keep, held)
        turns.append(blocks(kept, tuple(add), tail, out))
        held = kept + sum(count for _, count in add)
    trace = run(*turns, block=8)
    (read_turns,) = read(trace)
    ids = [tuple(prompt) for prompt in expand(trace)]
    for at, (turn, mine) in enumerate(zip(read_turns, ids, strict=True)):
        assert turn.prompt.tokens == trace.prompt_tokens(at)
        assert len(turn.answer) == (turns[at].output_tokens or 0)
        for other, theirs in zip(read_turns[:at], ids[:at], strict=True):
            whole = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
            shared = 8 * (min(len(mine), len(theirs)) if whole is None else whole)
            # a tail may go on into the block that came after it, but never fills it
            assert shared <= common(turn.prompt, other.prompt) < shared + 8
