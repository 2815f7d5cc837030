"""Which prefix a prompt should have shared, and where it left it."""

from tests.core.helpers import make_engine, tokens
from trunkline.core.differences import SHOWN_SYMBOLS, SIBLINGS
from trunkline.core.types import Difference, TurnRecord

HEAD, BODY = tokens(20), tokens(300, start=1000)


def difference(record: TurnRecord) -> Difference:
    assert record.difference is not None
    return record.difference


def test_a_turn_that_goes_on_left_nothing() -> None:
    engine = make_engine()
    assert engine.serve([*HEAD, *BODY], run="a").difference is None
    assert engine.serve([*engine.histories["a"], 1, 2, 3], run="a").difference is None
    assert engine.serve([*HEAD, *BODY], run="b").difference is None


def test_a_rewritten_history_is_compared_with_what_the_run_had() -> None:
    engine = make_engine()
    engine.serve([*HEAD, 5, *BODY], run="a", length=3)
    left = difference(engine.serve([*HEAD, 6, 7, *BODY, 1], run="a"))
    assert (left.run, left.at_token, left.was_tokens, left.now_tokens) == ("a", 20, 301 + 2, 303)
    assert left.was.tolist()[:301] == [5, *BODY]
    assert left.now.tolist() == [6, 7, *BODY, 1]


def test_a_rewritten_history_need_never_fall_in_again() -> None:
    engine = make_engine()
    engine.serve([*HEAD, *BODY], run="a")
    left = difference(engine.serve([*HEAD, *tokens(50, start=5000)], run="a"))
    assert (left.run, left.at_token, left.now.tolist()) == ("a", 20, tokens(50, start=5000))


def test_a_first_turn_is_compared_with_the_sibling_it_falls_in_with_soonest() -> None:
    engine = make_engine()
    engine.serve([*HEAD, 1, *BODY], run="near")
    engine.serve([*HEAD, 2, *tokens(40, start=7000), *BODY], run="far")
    engine.serve([*HEAD, 3, *tokens(200, start=8000)], run="other")
    left = difference(engine.serve([*HEAD, 4, *BODY, 9], run="new"))
    assert (left.run, left.at_token, left.was_tokens, left.now_tokens) == ("near", 20, 301 + 3, 302)
    assert left.was.tolist()[:301] == [1, *BODY]


def test_prompts_that_differ_from_the_first_token_on_are_compared_too() -> None:
    engine = make_engine()
    engine.serve([1, *BODY], run="a")
    left = difference(engine.serve([2, *BODY], run="b"))
    assert (left.run, left.at_token) == ("a", 0)


def test_a_prompt_that_never_falls_in_with_a_sibling_missed_nothing() -> None:
    engine = make_engine()
    engine.serve([*HEAD, *BODY], run="a")
    assert engine.serve([*HEAD, *tokens(300, start=5000)], run="b").difference is None


def test_a_branch_that_goes_its_own_way_missed_nothing() -> None:
    engine = make_engine()
    engine.serve([*HEAD, *BODY], run="a")
    engine.serve([*engine.histories["a"], *tokens(30, start=5000)], run="a")
    assert engine.serve([*HEAD, *BODY, *tokens(30, start=6000)]).difference is None


def test_what_is_kept_and_looked_at_is_bounded() -> None:
    engine = make_engine()
    long = tokens(2000, start=1000)
    engine.serve([*HEAD, 1, *long], run="first")
    left = difference(engine.serve([*HEAD, 2, *long], run="second"))
    assert (len(left.was), len(left.now), left.was_tokens) == (SHOWN_SYMBOLS, SHOWN_SYMBOLS, 2001 + 3)
    for other in range(SIBLINGS):
        engine.serve([*HEAD, 100_000 + other, *tokens(30, start=200_000 + 1000 * other)], run=f"other-{other}")
    assert engine.serve([*HEAD, 3, *long], run="third").difference is None
