"""What is counted of a trace: checked against prompts written out token by token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.wire.figures import FigureCounter, Figures, text_tokens
from trunkline.wire.traces import (
    BlocksPrompt,
    Message,
    MessagesPrompt,
    RunTrace,
    Session,
    TokensPrompt,
    Tool,
    ToolCall,
    TurnKind,
    TurnTrace,
    expand,
)


def count(*sessions: Session) -> Figures:
    counter = FigureCounter()
    for session in sessions:
        counter.add(session)
    return counter.figures()


@given(
    st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 3), min_size=1, max_size=5)), min_size=1, max_size=8),
    st.booleans(),
)
def test_the_endless_cache_holds_the_longest_prefix_of_any_earlier_prompt(
    deltas: list[tuple[int, list[int]]], as_blocks: bool
) -> None:
    turns = []
    held = 0
    for keep, add in deltas:
        kept = min(keep, held)
        runs = tuple((number, 1) for number in add)
        blocks = BlocksPrompt(keep=kept, add=runs)
        turns.append(TurnTrace(prompt=blocks if as_blocks else TokensPrompt(keep=kept, add=tuple(add))))
        held = kept + len(add)
    run = RunTrace(id="r", turns=tuple(turns), block_tokens=8 if as_blocks else 0)
    prompts = list(expand(run))
    hits = 0
    for index, prompt in enumerate(prompts):
        shared = (
            next((i for i, (a, b) in enumerate(zip(prompt, old, strict=False)) if a != b), min(len(prompt), len(old)))
            for old in prompts[:index]
        )
        hits += max(shared, default=0)
    total = sum(map(len, prompts))
    figures = count((run,))
    assert figures.infinite_cache_hit == pytest.approx(hits / total)
    assert figures.total_input_tokens == total * (8 if as_blocks else 1)


def test_blocks_are_shared_between_sessions_only_in_a_space_and_tails_only_by_name() -> None:
    def run(name: str, space: str, tail: int | None) -> Session:
        prompt = BlocksPrompt(add=((1, 3),), tail_tokens=4, tail_id=tail)
        return (RunTrace(id=name, block_tokens=16, space=space, turns=(TurnTrace(prompt=prompt),)),)

    assert count(run("a", "", None), run("b", "", None)).infinite_cache_hit == 0
    assert count(run("a", "s", None), run("b", "s", None)).infinite_cache_hit == pytest.approx(48 / 104)
    assert count(run("a", "s", 7), run("b", "s", 7)).infinite_cache_hit == pytest.approx(52 / 104)


def test_text_is_estimated_and_tools_count_as_its_beginning() -> None:
    prompt = MessagesPrompt(add=(Message("system", "x" * 40), Message("user", "y" * 9)))
    call = ToolCall("c", "look", '{"a":1}')
    turns = (TurnTrace(prompt=prompt, output="z" * 8, calls=(call,), kind=TurnKind.USER),)
    bare = RunTrace(id="a", turns=turns)
    tooled = RunTrace(id="b", turns=turns, tools=(Tool("look"),), reward=1.0)
    assert text_tokens(Message("system", "x" * 40)) == 14
    figures = count((bare,))
    assert figures.estimated
    assert figures.total_input_tokens == 14 + 7
    assert figures.total_output_tokens == 5
    assert count((bare,), (bare,)).infinite_cache_hit == 0.5
    assert count((bare,), (tooled,)).infinite_cache_hit == 0
    again = count((tooled,), (tooled,))
    assert again.infinite_cache_hit == 0.5
    assert (again.with_tools, again.labelled, again.solved) == (2, 2, 2)


def test_a_prompt_under_half_of_the_one_before_it_is_a_compaction() -> None:
    sizes = (10, 5, 4, 1)
    turns = tuple(TurnTrace(prompt=BlocksPrompt(add=((9 * i, size),))) for i, size in enumerate(sizes))
    assert count((RunTrace(id="r", block_tokens=4, turns=turns),)).compactions == 1


def test_nothing_counted_is_nothing_and_not_zero() -> None:
    figures = count()
    assert figures.infinite_cache_hit is None
    assert figures.input_tokens is None
