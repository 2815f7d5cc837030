"""A turn's output: which text is shown when, what ends a turn, and that every token is told of once."""

import hypothesis.strategies as st
import llama_cpp
import numpy as np
import pytest
from hypothesis import given, settings

from tests.engine.vocabularies import ids, smollm2_path, vocabulary
from trunkline.core.types import EndReason
from trunkline.engine.generation import Generation, prompt_logprobs
from trunkline.engine.history import History
from trunkline.engine.model import load_model
from trunkline.engine.sampling import Logits, SamplingError, logprob
from trunkline.engine.tokens import Vocabulary
from trunkline.wire.turns import Delta, Sampling, TurnRequest

SMOLLM2 = vocabulary("smollm2")
END = 2  # <|im_end|>


def generation(
    *stop: str,
    max_tokens: int = 1000,
    stop_tokens: tuple[int, ...] = (),
    ignore_eos: bool = False,
    logprobs: int | None = None,
) -> Generation:
    request = TurnRequest(
        salt="",
        tokens=np.array([1], np.int32),
        text=None,
        max_tokens=max_tokens,
        sampling=Sampling(temperature=0, ignore_eos=ignore_eos),
        stop=stop,
        stop_tokens=stop_tokens,
        logprobs=logprobs,
    )
    return Generation(request, SMOLLM2)


def row(token: int) -> Logits:
    """Logits that make `token` the choice."""
    logits = np.zeros(SMOLLM2.size, np.float32)
    logits[token] = 9
    return logits


def letters(text: str) -> list[int]:
    """One token a character."""
    return [token for character in text for token in ids(SMOLLM2.tokenize(character))]


def feed(turn: Generation, tokens: list[int]) -> list[Delta]:
    """Accept tokens until the turn ends."""
    deltas = []
    for token in tokens:
        if turn.finished:
            break
        deltas.append(turn.accept(row(token)))
    return deltas


def test_text_appears_with_the_token_that_says_it() -> None:
    turn = generation()
    deltas = feed(turn, ids(SMOLLM2.tokenize("Hello world")))
    assert [(delta.text, len(delta.tokens)) for delta in deltas] == [("Hello", 1), (" world", 1)]
    assert turn.finished is None and turn.visible_text == "Hello world"


def test_half_characters_wait_for_the_rest() -> None:
    turn = generation()
    tokens = ids(SMOLLM2.tokenize("🙂漢"))
    texts = [delta.text for delta in feed(turn, tokens)]
    assert len(tokens) > 2 and "".join(texts) == "🙂漢"
    assert set(texts) == {"", "🙂", "漢"}


def test_a_character_left_half_at_the_end_is_shown_as_replaced() -> None:
    (half, *_) = ids(SMOLLM2.tokenize("🙂"))
    by_length = generation(max_tokens=2)
    assert [delta.text for delta in feed(by_length, [*letters("a"), half])] == ["a", "\ufffd"]
    by_end = generation()
    assert [delta.text for delta in feed(by_end, [half, END])] == ["", "\ufffd"]
    from_outside = generation()
    assert [delta.text for delta in feed(from_outside, [half])] == [""]
    assert from_outside.flush() == Delta((), "\ufffd") and from_outside.visible_text == "\ufffd"


def test_the_models_end_token_ends_the_turn_and_is_counted_but_not_shown() -> None:
    turn = generation()
    deltas = feed(turn, [*letters("ok"), END])
    assert (turn.finished, turn.stopped_by) == (EndReason.STOP, None)
    assert turn.tokens == [*letters("ok"), END] and deltas[-1] == Delta((END,), "")
    assert turn.visible_text == "ok"


def test_ignore_eos_generates_end_tokens_without_showing_or_stopping() -> None:
    turn = generation(ignore_eos=True, max_tokens=4)
    feed(turn, [*letters("a"), END, *letters("b"), END, END])
    assert turn.finished is EndReason.LENGTH
    assert turn.tokens == [*letters("a"), END, *letters("b"), END] and turn.visible_text == "ab"


def test_a_requested_stop_token_ends_the_turn_by_its_name() -> None:
    (stop,) = letters("!")
    turn = generation(stop_tokens=(stop,), ignore_eos=True)
    feed(turn, [*letters("Hi!"), *letters("x")])
    assert (turn.finished, turn.stopped_by, turn.visible_text) == (EndReason.STOP, stop, "Hi")
    assert turn.tokens[-1] == stop


def test_the_last_token_allowed_ends_the_turn_by_length() -> None:
    turn = generation(max_tokens=2)
    feed(turn, letters("abc"))
    assert (turn.finished, turn.visible_text, len(turn.tokens)) == (EndReason.LENGTH, "ab", 2)
    ended = generation(max_tokens=2)
    feed(ended, [*letters("a"), END])
    assert ended.finished is EndReason.STOP


def test_a_turn_of_no_tokens_is_over_before_it_begins() -> None:
    assert generation(max_tokens=0).finished is EndReason.LENGTH


def test_a_stop_string_across_tokens_is_never_shown() -> None:
    turn = generation("###", "END")
    texts = [delta.text for delta in feed(turn, letters("a#b##END!"))]
    assert texts == ["a", "", "#b", "", "", "##", "", ""]
    assert (turn.finished, turn.stopped_by, turn.visible_text) == (EndReason.STOP, "END", "a#b##")


def test_a_stop_string_inside_one_token_cuts_its_text() -> None:
    turn = generation("orl")
    feed(turn, ids(SMOLLM2.tokenize("Hello world")))
    assert (turn.stopped_by, turn.visible_text) == ("orl", "Hello w")
    assert turn.flush() == Delta((), "")


def test_of_two_stop_strings_in_one_token_the_first_in_the_text_counts() -> None:
    turn = generation("ld", "or")
    feed(turn, ids(SMOLLM2.tokenize("Hello world")))
    assert (turn.stopped_by, turn.visible_text) == ("or", "Hello w")


def test_text_held_for_a_stop_string_appears_when_the_turn_ends_otherwise() -> None:
    by_end = generation("###")
    feed(by_end, [*letters("a##"), END])
    assert by_end.visible_text == "a##" and by_end.stopped_by is None
    by_length = generation("###", max_tokens=3)
    assert feed(by_length, letters("a##"))[-1].text == "##"
    from_outside = generation("###")
    feed(from_outside, letters("a##"))
    assert from_outside.flush().text == "##"


def test_a_stop_string_that_the_last_allowed_token_completes_stops_the_turn() -> None:
    turn = generation("ab", max_tokens=3)
    feed(turn, letters("xab"))
    assert (turn.finished, turn.stopped_by, turn.visible_text) == (EndReason.STOP, "ab", "x")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(SamplingError, match="stop string is empty"):
        generation("")


def test_log_probabilities_come_with_their_tokens_while_text_is_held_back() -> None:
    turn = generation("###", logprobs=2)
    deltas = feed(turn, letters("##a"))
    assert [delta.text for delta in deltas] == ["", "", "##a"]
    assert [entry.token for delta in deltas for entry in delta.logprobs] == letters("##a")
    assert all(entry.top[0] == (entry.token, entry.logprob) for delta in deltas for entry in delta.logprobs)
    assert all(len(entry.top) == 2 for delta in deltas for entry in delta.logprobs)


def test_prompt_log_probabilities_are_those_of_each_row() -> None:
    rows = np.random.default_rng(1).normal(size=(3, 50)).astype(np.float32)
    tokens = np.array([4, 0, 49], np.int32)
    assert prompt_logprobs(rows, tokens, 3) == tuple(logprob(rows[i], int(tokens[i]), 3) for i in range(3))


STOPS = st.lists(st.text("ab🙂", min_size=1, max_size=3), max_size=3)


@given(text=st.text("ab🙂x", max_size=25), stops=STOPS, cut=st.integers(0, 60), max_tokens=st.integers(1, 60))
@settings(deadline=None, max_examples=300)
def test_what_is_shown_is_what_was_said_up_to_the_first_stop_string(
    text: str, stops: list[str], cut: int, max_tokens: int
) -> None:
    turn = generation(*stops, max_tokens=max_tokens)
    said = letters(text)[:cut]
    deltas = feed(turn, said)
    deltas.append(turn.flush())
    assert [token for delta in deltas for token in delta.tokens] == turn.tokens == said[: len(turn.tokens)]
    assert "".join(delta.text for delta in deltas) == turn.visible_text
    whole = b"".join(SMOLLM2.pieces[token] for token in turn.tokens).decode(errors="replace")
    assert whole.startswith(turn.visible_text)
    assert not any(stop in turn.visible_text for stop in stops)
    if isinstance(turn.stopped_by, str):
        assert whole[len(turn.visible_text) :].startswith(turn.stopped_by)
    else:
        assert turn.visible_text == whole


def test_a_real_models_turns_extend_each_other_token_by_token() -> None:
    model = load_model(smollm2_path())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 512, 1, 1
    context = llama_cpp.llama_init_from_model(model.pointer, params)
    vocab = Vocabulary(model.vocab)
    history = History(vocab)
    text, computed = "<|im_start|>user\nWrite one short line.<|im_end|>\n<|im_start|>assistant\n", list[int]()
    for seed in range(2):
        prompt = history.tokenize(text, salt="")
        assert ids(prompt)[: len(computed)] == computed
        request = TurnRequest(
            salt="", tokens=prompt, text=text, max_tokens=12, sampling=Sampling(temperature=1.5, seed=seed)
        )
        turn = Generation(request, vocab)
        fresh = prompt[len(computed) :]
        while turn.finished is None:
            turn.accept(_decode(context, fresh, vocab.size))
            fresh = np.array(turn.tokens[-1:], np.int32)
        assert turn.visible_text
        history.remember(salt="", text=text, prompt=prompt, generated=turn.tokens, visible=turn.visible_text)
        computed = ids(prompt) + turn.tokens[:-1]  # the last token was sampled, not computed
        text += turn.visible_text + "<|im_end|>\n<|im_start|>user\nAnother.<|im_end|>\n<|im_start|>assistant\n"
    llama_cpp.llama_free(context)
    model.close()


def _decode(context: object, tokens: "np.typing.NDArray[np.int32]", size: int) -> Logits:
    fresh = np.ascontiguousarray(tokens)
    pointer = fresh.ctypes.data_as(llama_cpp.llama_batch_get_one.argtypes[0])
    assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(pointer, len(fresh))) == 0
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (size,))
