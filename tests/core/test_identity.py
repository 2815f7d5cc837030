"""Whose turn a prompt is: continued, left midway, rewritten, about another run, of a session, after a restart.

Texts are runs of numbers that nothing else has, so that whatever two prompts share was put into both.
"""

import random
from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.core.fake_engine import FakeEngine
from tests.core.helpers import make_engine, tokens
from trunkline.core.digest import Digest
from trunkline.core.facts import RunDeclared, RunRestored
from trunkline.core.runs import Run, RunTable
from trunkline.core.types import EndReason, Ints, MissReason, Relation, RunKey, RunState, TurnRecord

SYSTEM = tokens(60, 10)
TASK = tokens(40, 200)
ANSWER = 80
"""Tokens of an answer that is long enough to be known by its text."""


class Words:
    """Fresh text on demand."""

    def __init__(self) -> None:
        self._next = 100_000

    def __call__(self, count: int = 30) -> list[int]:
        self._next += count
        return tokens(count, self._next - count)


@pytest.fixture
def engine() -> FakeEngine:
    return make_engine(slots=8, slot_tokens=100_000)


@pytest.fixture
def words() -> Words:
    return Words()


def run_of(engine: FakeEngine, record: TurnRecord) -> Run:
    run = engine.core.state.runs.get(record.run)
    assert run is not None
    return run


def play(engine: FakeEngine, words: Words, turns: int = 4, start: list[int] | None = None) -> TurnRecord:
    """A run of so many turns; returns the first one's record."""
    first = engine.serve(start or [*SYSTEM, *TASK], length=ANSWER)
    for _ in range(turns - 1):
        engine.serve([*engine.histories[first.run.run], *words()], length=ANSWER)
    return first


def answers(engine: FakeEngine, run: RunKey) -> list[int]:
    """The last answer of a run."""
    return engine.histories[run.run][-ANSWER:]


# --- continues ----------------------------------------------------------------------------------------------------


OPENING = [7, 8, 9]
"""What a chat template ends a prompt with, so that the model answers."""


@pytest.mark.parametrize("group", [None, "session"])
@pytest.mark.parametrize("length", [4, ANSWER])
def test_a_client_that_never_sends_answers_back_goes_on_with_its_run(
    engine: FakeEngine, words: Words, group: str | None, length: int
) -> None:
    told, served = [*SYSTEM, *TASK], []
    for _ in range(4):
        served.append(engine.serve([*told, *OPENING], length=length, opening=3, group=group))
        told += words()
    assert len({record.run for record in served}) == 1
    assert served[-1].relation is Relation.CONTINUES


def test_sessions_that_replay_the_same_messages_without_answers_stay_apart(engine: FakeEngine, words: Words) -> None:
    told = [[*SYSTEM, *TASK]]
    for _ in range(3):
        told.append([*told[-1], *words()])
    for session in ("one", "two", "three"):
        served = [engine.serve([*one, *OPENING], length=ANSWER, opening=3, group=session) for one in told]
        assert {record.run.run for record in served} == {session}


def test_a_task_that_only_begins_like_another_is_no_more_of_it(engine: FakeEngine, words: Words) -> None:
    system = words(500)
    first = engine.serve([*system, 1, 2, 3, *OPENING], length=ANSWER, opening=3)
    other = engine.serve([*system, 1, 2, 4, 5, 6, 7, 8, *OPENING], length=ANSWER, opening=3)
    assert other.run != first.run


def test_the_same_first_messages_again_are_another_run(engine: FakeEngine) -> None:
    first = engine.serve([*SYSTEM, *TASK, *OPENING], length=ANSWER, opening=3)
    again = engine.serve([*SYSTEM, *TASK, *OPENING], length=ANSWER, opening=3)
    assert again.run != first.run


def test_more_messages_while_the_run_is_answering_are_not_its_next_turn(engine: FakeEngine, words: Words) -> None:
    engine.arrive([*SYSTEM, *TASK, *OPENING], length=ANSWER, opening=3)
    engine.arrive([*SYSTEM, *TASK, *words(), *OPENING], length=ANSWER, opening=3)
    engine.run_all()
    assert len({record.run for record in engine.records}) == 2


def test_the_evidence_is_in_the_record(engine: FakeEngine, words: Words) -> None:
    first = engine.serve([*SYSTEM, *TASK], length=ANSWER)
    second = engine.serve([*engine.histories[first.run.run], *words()], length=ANSWER)
    assert (first.relation, first.shared_tokens) == (Relation.NEW, 0)
    assert (second.relation, second.shared_tokens) == (Relation.CONTINUES, 100 + ANSWER - 1)
    assert first.digest != second.digest


@pytest.mark.parametrize("kept", [0, 20, ANSWER - 10])
def test_an_answer_that_comes_back_changed_still_continues_the_run(engine: FakeEngine, words: Words, kept: int) -> None:
    first = play(engine, words)
    history = engine.histories[first.run.run]
    record = engine.serve([*history[: len(history) - ANSWER + kept], *words(), 1])
    assert (record.run, record.relation) == (first.run, Relation.CONTINUES)


def test_a_last_message_that_is_edited_before_the_answer_continues_the_run(engine: FakeEngine, words: Words) -> None:
    first = play(engine, words)
    history = engine.histories[first.run.run]
    edited = [*history[: -ANSWER - 10], *words(5), *history[-ANSWER:], *words()]
    record = engine.serve(edited)
    assert (record.run, record.relation) == (first.run, Relation.CONTINUES)
    assert record.passages > 0


def test_an_early_edit_that_leaves_the_rest_continues_the_run_as_an_edit(engine: FakeEngine, words: Words) -> None:
    first = play(engine, words)
    history = engine.histories[first.run.run]
    record = engine.serve([*history[:70], 7, *history[71:], *words()])
    assert (record.run, record.relation) == (first.run, Relation.CONTINUES)
    assert MissReason.HISTORY_EDITED in {miss.reason for miss in record.misses}


def play_back(engine: FakeEngine, words: Words, turns: int = 4) -> tuple[TurnRecord, list[int]]:
    """A run of a client that never sends back what was answered; its last record and its last prompt."""
    prompt = [*SYSTEM, *words(20)]
    record = engine.serve(prompt, length=ANSWER)
    for _ in range(turns - 1):
        prompt = [*prompt, *words(60)]
        record = engine.serve(prompt, length=ANSWER)
    return record, prompt


def test_without_answers_a_long_prompt_under_the_only_waiting_runs_head_is_its_history_rewritten(
    engine: FakeEngine, words: Words
) -> None:
    last, prompt = play_back(engine, words)
    shrunk = [*prompt[: len(SYSTEM)], *words(150)]
    record = engine.serve(shrunk, length=ANSWER)
    assert (record.run, record.relation) == (last.run, Relation.COMPACTION)
    assert engine.serve([*shrunk, *words()], length=ANSWER).run == last.run


def test_without_answers_a_prompt_no_longer_than_a_first_one_is_a_first_one(engine: FakeEngine, words: Words) -> None:
    last, _ = play_back(engine, words)
    record = engine.serve([*SYSTEM, *words(25)], length=ANSWER)
    assert (record.run != last.run, record.relation) == (True, Relation.NEW)


def test_where_answers_come_back_a_long_prompt_under_a_waiting_runs_head_is_another_run(
    engine: FakeEngine, words: Words
) -> None:
    last = play(engine, words)
    record = engine.serve([*SYSTEM, *words(400)], length=ANSWER)
    assert (record.run != last.run, record.relation) == (True, Relation.NEW)


def test_a_run_may_alternate_between_contexts(engine: FakeEngine, words: Words) -> None:
    first = play(engine, words)
    told = [*words(50), *TASK, *answers(engine, first.run), *words()]
    other = engine.serve(told, length=ANSWER)
    back = engine.serve([*engine.histories[first.run.run][:0], *told], length=ANSWER)
    assert {other.run, back.run} == {first.run}
    assert back.relation is Relation.CONTINUES


@pytest.mark.parametrize("reason", [EndReason.ABORTED, EndReason.FAILED])
def test_a_first_prompt_that_got_no_answer_is_tried_again_by_the_same_run(
    engine: FakeEngine, reason: EndReason
) -> None:
    turn = engine.arrive([*SYSTEM, *TASK], length=ANSWER)
    engine.step()
    engine.end(turn, reason)
    record = engine.serve([*SYSTEM, *TASK])
    assert (record.run.run, record.index, record.relation) == ("fresh-1", 1, Relation.CONTINUES)


# --- runs of their own --------------------------------------------------------------------------------------------


def test_the_same_first_prompt_is_another_run_each_and_the_answers_tell_them_apart(engine: FakeEngine) -> None:
    firsts = [engine.serve([*SYSTEM, *TASK], length=ANSWER) for _ in range(40)]
    assert {first.relation for first in firsts} == {Relation.NEW}
    assert len({first.run for first in firsts}) == 40
    for first in (firsts[0], firsts[39], firsts[20]):
        assert engine.serve([*engine.histories[first.run.run], 1, 2]).run == first.run


def test_first_turns_in_flight_together_are_runs_without_a_parent(engine: FakeEngine) -> None:
    for _ in range(3):
        engine.arrive([*SYSTEM, *TASK], length=ANSWER)
    engine.run_all()
    assert [(run.turns, run.parent) for run in engine.core.state.runs] == [(1, None)] * 3


def test_a_sibling_that_arrives_at_the_same_moment_does_not_miss_what_was_never_seen() -> None:
    engine = make_engine(slots=2)
    engine.arrive(tokens(20), run="a")
    engine.arrive(tokens(20), run="b")
    engine.run_all()
    reasons = [{miss.reason: miss.tokens for miss in record.misses} for record in engine.records]
    assert reasons[0] == {MissReason.NEVER_SEEN: 20}
    assert MissReason.NEVER_SEEN not in reasons[1]


def test_a_title_is_a_side_call_and_does_not_disturb_the_run(engine: FakeEngine, words: Words) -> None:
    long_task = words(200)
    first = play(engine, words, start=[*SYSTEM, *long_task])
    title = engine.serve([*words(10), *long_task[:60]], length=8)
    assert (title.relation, run_of(engine, title).parent) == (Relation.SIDE_CALL, None)
    assert engine.serve([*engine.histories[first.run.run], 1]).run == first.run


def test_a_quota_probe_is_a_side_call(engine: FakeEngine, words: Words) -> None:
    assert engine.serve(words(8), length=1).relation is Relation.SIDE_CALL


def test_text_that_two_runs_said_ties_a_prompt_to_neither(engine: FakeEngine, words: Words) -> None:
    phrase = words(60)
    engine.core.state.landmarks.said(RunKey("", "a"), 0, _array(phrase))
    engine.core.state.landmarks.said(RunKey("", "b"), 0, _array(phrase))
    assert engine.serve([*words(), *phrase]).relation is Relation.NEW


def test_text_of_another_salt_ties_a_prompt_to_nothing(engine: FakeEngine, words: Words) -> None:
    first = engine.serve([*SYSTEM, *TASK], length=ANSWER, salt="one")
    said = engine.histories[first.run.run][-ANSWER:]
    record = engine.serve([*words(), *TASK, *said], salt="two")
    assert (record.relation, record.shared_tokens, record.passages) == (Relation.NEW, 0, 0)


# --- branches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("into_the_answer", [0, 30, ANSWER - 1])
def test_a_prompt_that_leaves_an_earlier_turn_is_a_branch_of_that_run(
    engine: FakeEngine, words: Words, into_the_answer: int
) -> None:
    first = engine.serve([*SYSTEM, *TASK], length=ANSWER)
    second = [*engine.histories[first.run.run], *words()]
    engine.serve(second, length=ANSWER)
    at = engine.histories[first.run.run][: len(second) + into_the_answer]
    for _ in range(3):
        engine.serve([*engine.histories[first.run.run], *words()], length=ANSWER)
    record = engine.serve([*at, *words()])
    assert (record.relation, run_of(engine, record).parent) == (Relation.BRANCH, first.run.run)
    assert engine.serve([*engine.histories[record.run.run], *words()]).run == record.run


def test_a_branch_of_a_branch_has_the_branch_as_its_parent(engine: FakeEngine, words: Words) -> None:
    first = play(engine, words, turns=2)
    fork = engine.histories[first.run.run]
    engine.serve([*fork, *words()], length=ANSWER)
    branch = engine.serve([*fork, *words()], length=ANSWER)
    below = engine.histories[branch.run.run]
    engine.serve([*below, *words()], length=ANSWER)
    assert run_of(engine, engine.serve([*below, *words()])).parent == branch.run.run


def test_a_prompt_that_the_run_wrote_itself_is_a_branch(engine: FakeEngine, words: Words) -> None:
    first = play(engine, words)
    record = engine.serve([*words(300), *answers(engine, first.run)])
    assert (record.relation, run_of(engine, record).parent) == (Relation.BRANCH, first.run.run)


@pytest.mark.parametrize("task", [12, 20, 40])
def test_a_prompt_that_the_run_wrote_is_a_branch_though_it_has_the_runs_tools(
    engine: FakeEngine, words: Words, task: int
) -> None:
    tools = words(300)
    first = play(engine, words, turns=2, start=[*SYSTEM, *tools, *words(task)])
    record = engine.serve([*words(60), *tools, *answers(engine, first.run)])
    assert (record.relation, run_of(engine, record).parent) == (Relation.BRANCH, first.run.run)


def test_each_of_many_prompts_that_one_answer_wrote_is_a_branch(engine: FakeEngine, words: Words) -> None:
    first = engine.serve([*SYSTEM, *TASK], length=400)
    answer = engine.histories[first.run.run][-400:]
    for part in (answer[at : at + 80] for at in range(0, 400, 80)):
        record = engine.serve([*words(60), *part])
        assert (record.relation, run_of(engine, record).parent) == (Relation.BRANCH, first.run.run)


def test_an_agent_that_changes_its_role_and_keeps_its_task_is_the_same_run(engine: FakeEngine, words: Words) -> None:
    first = engine.serve([*SYSTEM, *TASK], length=ANSWER)
    record = engine.serve([*words(60), *TASK, *answers(engine, first.run), *words()])
    assert record.run == first.run


# --- rewritten ----------------------------------------------------------------------------------------------------


def test_a_summary_under_the_same_head_is_the_same_run_with_a_reason(engine: FakeEngine, words: Words) -> None:
    first = play(engine, words, turns=6)
    summary = answers(engine, first.run)
    record = engine.serve([*SYSTEM, *words(10), *summary, *words()], length=ANSWER)
    assert (record.run, record.relation) == (first.run, Relation.COMPACTION)
    assert record.passages >= 6
    (miss,) = (miss for miss in record.misses if miss.reason is MissReason.COMPACTION)
    assert miss.at_token == record.shared_tokens == len(SYSTEM)
    assert engine.serve([*engine.histories[first.run.run], *words()]).run == first.run


def test_a_history_whose_oldest_turns_are_dropped_is_the_same_run(engine: FakeEngine, words: Words) -> None:
    first = play(engine, words, turns=6)
    history = engine.histories[first.run.run]
    record = engine.serve([*SYSTEM, *TASK, *history[-250:], *words()])
    assert (record.run, record.relation) == (first.run, Relation.COMPACTION)


def test_a_rewriting_that_keeps_the_first_turn_is_no_branch_of_it(engine: FakeEngine, words: Words) -> None:
    first = play(engine, words, turns=6)
    kept = engine.histories[first.run.run][: 100 + ANSWER]
    record = engine.serve([*kept, *words(5), *answers(engine, first.run), *words()])
    assert (record.run, record.relation) == (first.run, Relation.COMPACTION)


def test_a_new_task_under_the_same_system_prompt_is_not_taken_for_a_compaction(
    engine: FakeEngine, words: Words
) -> None:
    play(engine, words, turns=6)
    assert engine.serve([*SYSTEM, *words(50)]).relation is Relation.NEW


def test_a_named_run_whose_history_shrank_says_so_in_its_misses(engine: FakeEngine, words: Words) -> None:
    engine.serve([*SYSTEM, *words(200)], run="a")
    record = engine.serve([*SYSTEM, *words(50)], run="a")
    assert record.relation is Relation.NAMED
    assert MissReason.COMPACTION in {miss.reason for miss in record.misses}


# --- sessions -----------------------------------------------------------------------------------------------------


def test_a_sessions_first_run_takes_its_name_and_the_others_are_its_branches(engine: FakeEngine, words: Words) -> None:
    main = engine.serve([*SYSTEM, *TASK], group="s", length=ANSWER)
    agent = engine.serve(words(200), group="s", length=ANSWER)
    title = engine.serve(words(20), group="s", length=8)
    assert main.run.run == "s"
    assert (agent.run.run, agent.relation) == ("s.fresh-2", Relation.NEW)
    assert (title.run.run, title.relation) == ("s.fresh-3", Relation.SIDE_CALL)
    assert {run_of(engine, record).parent for record in (agent, title)} == {"s"}
    for record in (main, agent, title):
        assert engine.serve([*engine.histories[record.run.run], *words()], group="s").run == record.run


def test_a_session_is_not_continued_by_another_sessions_prompt(engine: FakeEngine, words: Words) -> None:
    engine.serve([*SYSTEM, *TASK], group="s", length=ANSWER)
    record = engine.serve([*engine.histories["s"], *words()], group="t")
    assert (record.run.run, record.relation) == ("t", Relation.NEW)


def test_a_session_may_shrink_its_history_without_a_word_of_it(engine: FakeEngine, words: Words) -> None:
    engine.serve([*SYSTEM, *TASK], group="s", length=ANSWER)
    for _ in range(4):
        engine.serve([*engine.histories["s"], *words()], group="s", length=ANSWER)
    record = engine.serve([*SYSTEM, *words(100)], group="s")
    assert (record.run.run, record.relation) == ("s", Relation.COMPACTION)


def test_a_run_declared_under_a_sessions_name_gets_its_first_turn(engine: FakeEngine) -> None:
    engine.core.handle(RunDeclared(at_ms=0.0, key=RunKey("", "s"), parent="p"))
    record = engine.serve([*SYSTEM, *TASK], group="s")
    assert (record.run.run, run_of(engine, record).parent) == ("s", "p")


def test_a_named_parent_is_the_parent_of_a_sessions_first_run(engine: FakeEngine) -> None:
    record = engine.serve([*SYSTEM, *TASK], group="child", parent="main")
    assert (record.run.run, run_of(engine, record).parent) == ("child", "main")


# --- what the tree does not hold ------------------------------------------------------------------------------------


def restored(engine: FakeEngine, run: str, digest: str, group: str | None = None) -> None:
    fact = RunRestored(
        at_ms=0.0, key=RunKey("", run), parent=None, turns=3, prompt_tokens=100, group=group, digest=digest
    )
    engine.core.handle(fact)


@pytest.mark.parametrize("group", [None, "old"])
def test_a_run_is_found_again_after_a_restart_and_its_misses_say_why(words: Words, group: str | None) -> None:
    before = make_engine()
    last = before.serve([*SYSTEM, *TASK], length=ANSWER)
    after = make_engine()
    for number in range(50):
        restored(after, f"other-{number}", str(Digest(60 + number, number)))
    restored(after, "old", last.digest, group)
    prompt = [*before.histories[last.run.run], *words()]
    record = after.serve(prompt, group=group)
    assert (record.run.run, record.index, record.relation) == ("old", 3, Relation.CONTINUES)
    reasons = {miss.reason: miss.tokens for miss in record.misses}
    assert reasons == {MissReason.NODE_RESTARTED: 100, MissReason.NEVER_SEEN: len(prompt) - 100}
    assert after.serve([*after.histories["old"], *words()], group=group).run.run == "old"


def test_a_prompt_that_differs_in_one_token_is_not_found_after_a_restart(words: Words) -> None:
    before, after = make_engine(), make_engine()
    digest = before.serve([*SYSTEM, *TASK]).digest
    restored(after, "old", digest)
    assert after.serve([*SYSTEM, *TASK[:-1], 5, *words()]).relation is Relation.NEW


def test_a_session_known_only_by_its_name_goes_on_after_a_restart(engine: FakeEngine) -> None:
    restored(engine, "s", "", group="s")
    record = engine.serve([*SYSTEM, *TASK], group="s")
    assert (record.run.run, record.index) == ("s", 3)


def test_a_run_whose_prompts_the_tree_has_forgotten_is_found_by_their_digest(words: Words) -> None:
    engine = make_engine(slots=1, slot_tokens=4096, host_bytes=0, max_tree_symbols=1500)
    first = engine.serve(words(300))
    history = engine.histories[first.run.run]
    engine.now_ms += 2 * 3_600_000
    for _ in range(6):
        engine.serve(words(300))
    run = run_of(engine, first)
    assert run.prompt_leaf is None
    assert engine.serve([*history, 1]).run == first.run


def test_a_forgotten_run_leaves_nothing_to_be_found_by() -> None:
    engine = make_engine()
    engine.core.state.runs = RunTable(keep=5)
    digest = make_engine().serve(tokens(50)).digest
    restored(engine, "old", digest)
    for number in range(6):
        engine.serve(tokens(10, 1000 * number + 5000))
    assert engine.serve([*tokens(50), 1]).relation is Relation.NEW


def test_the_longest_remembered_prompt_decides(words: Words) -> None:
    before, after = make_engine(), make_engine()
    short = before.serve([*SYSTEM, *TASK])
    grown = before.serve([*before.histories[short.run.run], *words()])
    restored(after, "short", short.digest)
    restored(after, "long", grown.digest)
    assert after.serve([*before.histories[grown.run.run], 1]).run.run == "long"


def test_a_digest_is_text_and_back() -> None:
    assert Digest.parse(str(Digest(12, 0xFF))) == Digest(12, 0xFF)
    assert [Digest.parse(text) for text in ("", "12", "x-1", "1-z")] == [None] * 4


# --- random populations ---------------------------------------------------------------------------------------------


@dataclass
class Member:
    """An agent of the population: its history, and what the core calls it."""

    parent: "Member | None"
    history: list[int]
    answers: list[list[int]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    run: RunKey | None = None


class Population:
    """Agents under a few system prompts that go on, fork, compact and call aside in random order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.words = Words()
        self.engine = make_engine(slots=8, slot_tokens=100_000)
        self.systems = [self.words(self.rng.randrange(20, 200)) for _ in range(3)]
        self.starts = [[*system, *self.words(80)] for system in self.systems for _ in range(2)]
        self.members: list[Member] = []
        self.flying: dict[int, tuple[Member, list[int], Relation]] = {}

    def act(self) -> None:
        """One random thing that an agent of the population does."""
        idle = [m for m in self.members if m.answers and not any(m is flying for flying, _, _ in self.flying.values())]
        old = [member for member in idle if len(member.answers) > 3]
        choice = self.rng.random()
        if not idle or choice < 0.15:
            self._send(Member(None, []), self.rng.choice(self.starts), Relation.NEW)
        elif choice < 0.25 and old:
            member = self.rng.choice(old)
            at = member.ends[self.rng.randrange(1, len(member.ends) - 1)]
            self._send(Member(member, []), [*member.history[:at], *self.words(40)], Relation.BRANCH)
        elif choice < 0.35 and old:
            member = self.rng.choice(old)
            head = next(len(system) for system in self.systems if system == member.history[: len(system)])
            kept = [token for answer in member.answers[-2:] for token in [*answer, *self.words(5)]]
            self._send(member, [*member.history[:head], *self.words(10), *kept], Relation.COMPACTION)
        elif choice < 0.4:
            self._send(Member(None, []), self.words(12), Relation.SIDE_CALL)
        else:
            member = self.rng.choice(idle)
            self._send(member, [*member.history, *self.words(self.rng.randrange(5, 60))], Relation.CONTINUES)

    def _send(self, member: Member, prompt: list[int], relation: Relation) -> None:
        length = 1 if relation is Relation.SIDE_CALL else self.rng.randrange(ANSWER, 2 * ANSWER)
        turn = self.engine.arrive(prompt, length=length)
        record = self.engine.core.state.turns[turn].record
        assert record.relation is relation
        run = run_of(self.engine, record)
        if member.run is None:
            assert run.turns == 1
            assert run.parent == (member.parent.run.run if member.parent and member.parent.run else None)
            member.run = run.key
            if relation is not Relation.SIDE_CALL:
                self.members.append(member)
        assert run.key == member.run
        if relation is Relation.COMPACTION:
            member.answers, member.ends = [], []
        if relation is not Relation.SIDE_CALL:
            self.flying[turn] = member, prompt, relation

    def settle(self, steps: int) -> None:
        """The engine works for a while; what it answered is read."""
        for _ in range(steps):
            jobs = {turn: self.engine.jobs[turn] for turn in self.flying}
            self.engine.step()
            for turn in [turn for turn in self.flying if turn not in self.engine.jobs]:
                member, prompt, _ = self.flying.pop(turn)
                answer = jobs[turn].generated
                member.history = [*prompt, *answer]
                member.answers.append(answer)
                member.ends.append(len(member.history))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.integers(1, 120))
def test_every_turn_of_a_random_population_is_its_own_agents(seed: int, pace: int) -> None:
    population = Population(seed)
    for _ in range(60):
        population.act()
        population.settle(population.rng.randrange(pace))
    states = {run.state for run in population.engine.core.state.runs}
    assert states <= {RunState.ACTIVE, RunState.WAITING}


def _array(symbols: list[int]) -> Ints:
    return np.array(symbols, np.int32)
