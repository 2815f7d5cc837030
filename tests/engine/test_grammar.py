"""Constrained generation: an answer is one that its grammar allows, and what is forced is neither chosen nor lost."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.engine.schemas import RandomLogits, answer_under, random_schemas
from tests.engine.vocabularies import ids, vocabulary
from trunkline.core.types import EndReason
from trunkline.engine.generation import Generation
from trunkline.engine.grammar import KEPT_GRAMMARS, MAX_GRAMMAR_BYTES, Grammars
from trunkline.engine.sampling import Logits, SamplingError, logprob
from trunkline.wire.turns import Constraint, ConstraintError, Delta, Sampling, TurnRequest

SMOLLM2 = vocabulary("smollm2")
GRAMMARS = Grammars(SMOLLM2)
END = 2  # <|im_end|>
TIGHT = {"x-guidance": {"whitespace_flexible": False}}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"location": {"type": "string"}, "temperature_unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["location", "temperature_unit"],
    "additionalProperties": False,
    **TIGHT,
}
FORMATS = jsonschema.FormatChecker(("date", "email", "uuid", "ipv4"))


def under(schema: dict[str, Any]) -> Constraint:
    return Constraint(f"start: %json {json.dumps(schema)}", "json_schema")


def generation(constraint: Constraint | str, **changes: Any) -> Generation:
    if isinstance(constraint, str):
        constraint = Constraint(constraint, "test")
    values: dict[str, Any] = {"max_tokens": 1000, "sampling": Sampling(temperature=0)}
    request = TurnRequest(salt="", tokens=np.array([1], np.int32), text=None, **(values | changes))
    return Generation(request, SMOLLM2, GRAMMARS.guide(constraint))


def wanting(text: str, *, end: bool = True) -> Logits:
    """Logits that like the tokens of `text`, earlier ones more, and an end token least of all."""
    logits = np.zeros(SMOLLM2.size, np.float32)
    for rank, token in enumerate(ids(SMOLLM2.tokenize(text))):
        logits[token] = max(logits[token], 1000 - rank)
    logits[END] = 1 if end else -1
    return logits


def play(turn: Generation, row: Logits, most: int = 200) -> list[Delta]:
    deltas: list[Delta] = []
    while turn.finished is None and len(deltas) < most:
        deltas.append(turn.accept(row))
    return deltas


# --- what may be said -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_every_answer_is_valid_under_its_schema_whatever_the_model_wants(name: str) -> None:
    vocab = vocabulary(name)
    grammars, logits, valid = Grammars(vocab), RandomLogits(vocab, 0), 0
    for schema in random_schemas(80 if name == "smollm2" else 8, seed=7):
        try:
            grammars.guide(under(schema))
        except ConstraintError:
            continue
        text, turn = answer_under(grammars, vocab, under(schema), logits)
        if turn.finished is EndReason.STOP:  # noise may write strings without end
            jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(text))
            valid += 1
    assert valid >= (55 if name == "smollm2" else 4)


def test_a_number_is_never_its_own_exclusive_bound() -> None:
    rng, tried = np.random.default_rng(0), 0
    for _ in range(60):
        low, span = int(rng.integers(-20, 20)), float(rng.choice([0.25, 0.5, 1, 3]))
        schema = {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + span}
        for bound in (low, low + span):
            try:
                guide = GRAMMARS.guide(under(schema))
            except ConstraintError as error:
                assert "cannot be kept" in str(error)
                continue
            tried += 1
            tokens = ids(SMOLLM2.tokenize(f"{bound:g}"))
            try:
                guide.take(tokens)
            except ConstraintError:
                continue
            assert not guide.allowed()[END]
    assert tried > 20


def test_biases_and_penalties_choose_among_what_is_allowed() -> None:
    yes, no = ids(SMOLLM2.tokenize("yes"))[0], ids(SMOLLM2.tokenize("no"))[0]
    row = np.zeros(SMOLLM2.size, np.float32)
    row[yes], row[END] = 5, 50
    for bias, said in ((0.0, "yes"), (10.0, "no")):
        sampling = Sampling(temperature=0, logit_bias=((no, bias),), repetition_penalty=1.5)
        turn = generation('start: "yes" | "no"', sampling=sampling)
        play(turn, row)
        assert turn.visible_text == said


def test_a_seed_repeats_a_constrained_answer() -> None:
    said = set()
    for _ in range(3):
        turn = generation("start: /[a-z]{8}/", sampling=Sampling(temperature=1.0, seed=5))
        play(turn, np.zeros(SMOLLM2.size, np.float32))
        said.add(turn.visible_text)
    assert len(said) == 1
    assert len(said.pop()) == 8


# --- what is forced -------------------------------------------------------------------------------------------------


def test_forced_tokens_come_with_the_chosen_one_and_are_canonical() -> None:
    turn = generation(under(WEATHER))
    first, *_ = play(turn, wanting('Oslo","celsius"'))
    assert ids(SMOLLM2.tokenize('{"location":"'))[:-1] == list(first.tokens)
    answer = json.loads(turn.visible_text)
    assert answer["temperature_unit"] == "celsius"
    assert turn.forced_tokens >= 8
    assert turn.visible_text == SMOLLM2.detokenize(turn.tokens)


def test_a_finished_grammar_ends_the_turn_also_under_ignore_eos() -> None:
    for ignore_eos in (False, True):
        turn = generation('start: "a" /[0-9]/ "b"', sampling=Sampling(temperature=0, ignore_eos=ignore_eos))
        play(turn, wanting("7"))
        assert (turn.visible_text, turn.finished) == ("a7b", EndReason.STOP)
        assert turn.stopped_by is None


def test_a_grammar_that_may_end_ends_when_the_model_says_so() -> None:
    for ignore_eos in (False, True):
        turn = generation('start: "a"+', sampling=Sampling(temperature=0, ignore_eos=ignore_eos))
        turn.accept(wanting("a"))
        play(turn, wanting("", end=True))
        assert set(turn.visible_text) == {"a"}
        assert turn.finished is EndReason.STOP


def test_max_tokens_cuts_a_forced_span() -> None:
    turn = generation('start: "one two three four five six seven eight" /[a-z]/', max_tokens=3)
    play(turn, wanting("x"))
    assert len(turn.tokens) == turn.forced_tokens == 3
    assert turn.finished is EndReason.LENGTH
    assert turn.visible_text == "one two three"


def test_a_whole_answer_of_exactly_max_tokens_is_whole() -> None:
    text = '"one two three"'
    turn = generation(f"start: {text}", max_tokens=3)
    play(turn, wanting("x"))
    assert (turn.visible_text, turn.finished) == ("one two three", EndReason.STOP)


def test_a_stop_string_ends_a_turn_within_a_forced_span() -> None:
    turn = generation('start: "one two three four" /[a-z]/', stop=("thr",))
    play(turn, wanting("x"))
    assert (turn.visible_text, turn.stopped_by) == ("one two ", "thr")
    assert len(turn.tokens) == 3  # the token that completed it, and nothing behind it


def test_logprobs_have_a_row_for_every_token_and_change_none() -> None:
    row = wanting('Oslo","celsius"')
    plain, scored = generation(under(WEATHER)), generation(under(WEATHER), logprobs=2)
    play(plain, row)
    deltas = play(scored, row)
    assert scored.tokens == plain.tokens
    assert scored.forced_tokens == plain.forced_tokens > 0
    for delta in deltas:
        (token,) = delta.tokens
        assert delta.logprobs == (logprob(row, token, 2),)  # the model's own, of a forced token too


def test_a_chooser_is_told_of_every_forced_token() -> None:
    chosen: list[int] = []
    counted: list[int] = []
    told: list[int] = []

    class Counting:
        def choose(self, row: Logits) -> int:
            chosen.append(int(row.argmax()))
            told.append(chosen[-1])
            return chosen[-1]

        def count(self, token: int) -> None:
            counted.append(token)
            told.append(token)

    request = TurnRequest(salt="", tokens=np.array([1], np.int32), text=None, max_tokens=100)
    guide = GRAMMARS.guide(Constraint('start: "one two three" /[a-z]/', "test"))
    turn = Generation(request, SMOLLM2, guide, lambda *_: Counting())
    play(turn, wanting("x"))
    assert told == turn.tokens
    assert len(counted) == turn.forced_tokens > 0
    assert len(chosen) == len(turn.tokens) - turn.forced_tokens > 0


# --- what cannot be said --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "where", "why"),
    [
        ({"properties": {"a": {"type": "strng"}}}, "#/properties/a", "strng"),
        ({"items": {"properties": {"x/y": {"uniqueItems": True}}}}, "#/items/properties/x~1y", "uniqueItems"),
        ({"anyOf": [{"type": "null"}, {"type": "string", "pattern": "("}]}, "#/anyOf/1", "unclosed"),
        ({"$defs": {"d": {"format": "no-such", "type": "string"}}, "$ref": "#/$defs/d"}, "#/$defs/d", "no-such"),
        ({"type": "object", "properties": {"b": False}, "required": ["b"]}, "#", "unsatisfiable"),
        ({"$ref": "#/$defs/x"}, "#", "does not exist"),
        ({"type": "number", "exclusiveMinimum": 3, "maximum": 3.5}, "#", "cannot be kept"),
    ],
)
def test_a_schema_is_refused_with_what_is_wrong_and_where(schema: dict[str, Any], where: str, why: str) -> None:
    with pytest.raises(ConstraintError) as refused:
        GRAMMARS.guide(under(schema))
    assert f"(at {where} of the schema)" in str(refused.value)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "grammar",
    [
        "",
        "start: nothing",
        "start: (",
        'start: %json {"type":',
        "start: %json " + '{"items":' * 5000 + "{}" + "}" * 5000,
        'start: %json {"$ref": "#"}',
        'start: "a" x\nx: x "b"',
        'start: "\ud800"',
        "start: <|no_such_token|>",
        'start: "' + "x" * MAX_GRAMMAR_BYTES + '"',
        'start: %json {"allOf": ['
        + ",".join(
            f'{{"anyOf":[{{"properties":{{"a{i}":{{}}}}}},{{"properties":{{"b{i}":{{}}}}}}]}}' for i in range(40)
        )
        + "]}",
    ],
)
def test_what_cannot_be_compiled_or_satisfied_is_refused_soon(grammar: str) -> None:
    with pytest.raises(ConstraintError) as refused:
        GRAMMARS.guide(Constraint(grammar, "test"))
    assert str(refused.value)


def test_a_dead_end_on_the_way_fails_and_changes_nothing() -> None:
    turn = generation('start: ("a" | "b") x\nx: x "c"')
    turn.accept(wanting("a"))
    before = list(turn.tokens)
    with pytest.raises(ConstraintError, match="no token of the model can continue"):
        turn.accept(wanting("c"))
    assert turn.tokens == before


def test_a_bias_that_forbids_all_that_is_allowed_fails() -> None:
    grammar = 'start: "a" | "b"'
    allowed = np.flatnonzero(GRAMMARS.guide(Constraint(grammar, "test")).allowed())
    bias = tuple((int(token), -np.inf) for token in allowed)
    with pytest.raises(SamplingError):
        generation(grammar, sampling=Sampling(logit_bias=bias))
    turn = generation(grammar, sampling=Sampling(logit_bias=tuple((token, -1e6) for token, _ in bias)))
    play(turn, wanting("a"))
    assert turn.visible_text in ("a", "b")  # a bias is a wish, a schema is not


# --- many at once ---------------------------------------------------------------------------------------------------


def test_turns_on_many_threads_share_a_grammar_and_nothing_else() -> None:
    def one(seed: int) -> str:
        grammar = f"start: /[a-{'bcdefgh'[seed % 7]}]{{20}}/"
        turn = generation(grammar, sampling=Sampling(temperature=1.0, seed=seed))
        play(turn, np.zeros(SMOLLM2.size, np.float32))
        return turn.visible_text

    alone = [one(seed) for seed in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(40))) == alone
    assert all(len(text) == 20 for text in alone)


def test_the_compiled_grammars_that_are_kept_are_bounded() -> None:
    grammars = Grammars(SMOLLM2)
    many = [Constraint(f'start: "{number}"', "test") for number in range(KEPT_GRAMMARS + 3)]
    for constraint in many:
        grammars.guide(constraint)
        grammars.guide(many[0])
    assert grammars.knows(many[0])  # the latest used stay
    assert not grammars.knows(many[1])
    assert sum(grammars.knows(constraint) for constraint in many) == KEPT_GRAMMARS


@pytest.mark.parametrize("grammar", ["start: /[a-z]+/", 'start: "x" | "y"', "start: /(.|\\n)*/"])
def test_a_masked_row_is_the_row_where_tokens_are_allowed_and_nothing_elsewhere(grammar: str) -> None:
    guide = GRAMMARS.guide(Constraint(grammar, "test"))
    row = np.random.default_rng(0).standard_normal(SMOLLM2.size).astype(np.float32)
    row[[3, 80, 200]] = [np.inf, -np.inf, float(np.finfo(np.float32).min)]
    before = row.copy()
    assert np.array_equal(guide.masked(row), np.where(guide.allowed(), before, -np.inf))
    assert np.array_equal(row, before)
