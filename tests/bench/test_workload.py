"""Generated agent sessions: the same for a seed, and shaped like an agent's."""

import itertools

import pytest

from trunkline.bench.workload import agent_sessions, cut
from trunkline.wire.traces import Fork, Message, MessagesPrompt, RunTrace, TurnTrace, expand

SHAPE = {"turns": 4, "task_tokens": 200, "step_tokens": 50, "output_tokens": 12}


def test_a_seed_always_makes_the_same_sessions_and_another_makes_others() -> None:
    assert agent_sessions(3, 2, **SHAPE) == agent_sessions(3, 2, **SHAPE)
    assert agent_sessions(3, 1, **SHAPE)[0][0].turns != agent_sessions(4, 1, **SHAPE)[0][0].turns


def test_more_sessions_do_not_change_the_first_ones() -> None:
    assert agent_sessions(3, 5, **SHAPE)[:2] == agent_sessions(3, 2, **SHAPE)


def test_sessions_share_a_system_prompt_and_nothing_else() -> None:
    (a,), (b,) = agent_sessions(1, 2, **SHAPE)
    first, other = next(expand(a)), next(expand(b))
    assert first[0] == other[0]
    assert first[1] != other[1]


def test_history_grows_by_the_answer_and_a_tool_result_a_turn() -> None:
    ((run,),) = agent_sessions(1, 1, **SHAPE)
    prompts = [[symbol for symbol in prompt if isinstance(symbol, Message)] for prompt in expand(run)]
    assert [[message.role for message in prompt] for prompt in prompts] == [
        ["system", "user"] + ["assistant", "user"] * turn for turn in range(4)
    ]
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(prompts))
    assert [prompts[-1][2 + 2 * i].content for i in range(3)] == [turn.output for turn in run.turns[:3]]


def test_lengths_in_words_are_near_the_tokens_asked_for() -> None:
    ((run,),) = agent_sessions(1, 1, **SHAPE)
    *_, last = expand(run)
    task, result = last[1], last[3]
    assert isinstance(task, Message) and isinstance(result, Message)
    assert len(task.content.split()) == pytest.approx(200, abs=2)
    assert len(result.content.split()) <= 50
    assert run.turns[0].output_tokens == 12


def test_gaps_vary_around_what_was_asked_and_the_first_turn_has_none() -> None:
    ((run,),) = agent_sessions(1, 1, **SHAPE, gap_ms=100.0)
    gaps = [turn.gap_ms for turn in run.turns]
    assert gaps[0] is None
    assert all(gap is not None and 50 <= gap <= 150 for gap in gaps[1:])
    assert len(set(gaps)) == 4


def test_cutting_keeps_the_root_alone_with_fewer_turns_and_shorter_answers() -> None:
    turn = TurnTrace(prompt=MessagesPrompt(), output_tokens=100)
    unknown = TurnTrace(prompt=MessagesPrompt())
    root = RunTrace(id="r", turns=(turn, unknown, turn))
    child = RunTrace(id="r/1", turns=(turn,), fork=Fork(parent="r", after=3))
    (short,) = cut((root, child), turns=2, output_tokens=8)
    assert [kept.output_tokens for kept in short.turns] == [8, None]
    assert cut((root,)) == (root,)
