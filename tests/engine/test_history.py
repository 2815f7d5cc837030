"""Exact history: text that a turn generated gets the tokens that turn generated, and nothing else changes."""

from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tests.engine.test_tokens import MODELS, texts, tiny
from tests.engine.vocabularies import ids, llama_tokens, pointer, vocabulary
from trunkline.engine.history import History
from trunkline.engine.tokens import Vocabulary


def letters(vocab: Vocabulary, text: str) -> list[int]:
    """The least likely tokens of a text: each character alone."""
    return [token for character in text for token in ids(vocab.tokenize(character))]


def shown(vocab: Vocabulary, tokens: list[int]) -> str:
    """What a client sees of generated tokens."""
    return b"".join(vocab.shown(token) for token in tokens).decode(errors="replace")


def turn(history: History, vocab: Vocabulary, text: str, answer: list[int], salt: str = "") -> list[int]:
    """Serve one turn that generates `answer`; its prompt's tokens."""
    prompt = history.tokenize(text, salt=salt)
    history.remember(salt=salt, text=text, prompt=prompt, generated=answer, visible=shown(vocab, answer))
    return ids(prompt)


def chat(name: str, *turns: str) -> str:
    """User and assistant texts in turn, up to where the assistant is to answer."""
    begin, end = ("<start_of_turn>", "<end_of_turn>\n") if name == "gemma" else ("<|im_start|>", "<|im_end|>\n")
    said = [f"{begin}{('user', 'assistant')[at % 2]}\n{text}{end}" for at, text in enumerate(turns)]
    return "".join(said) + f"{begin}assistant\n"


@pytest.mark.parametrize("name", MODELS)
@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_without_remembered_turns_tokens_are_llama_cpps(name: str, data: st.DataObject) -> None:
    text = data.draw(texts(name))
    history = History(vocabulary(name))
    for _ in range(2):  # the second time from the memo
        assert ids(history.tokenize(text, salt="k", bos=False)) == ids(llama_tokens(pointer(name), text))


@pytest.mark.parametrize("name", MODELS)
@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_the_next_prompt_begins_with_all_that_was_prompted_and_generated(name: str, data: st.DataObject) -> None:
    vocab, history = vocabulary(name), History(vocabulary(name))
    text = data.draw(texts(name))
    answer = data.draw(st.lists(st.integers(0, vocab.size - 1), max_size=12))
    while answer and not vocab.shown(answer[-1]):  # end tokens: the next prompt's template says them
        answer.pop()
    prompt = turn(history, vocab, text, answer)
    ending = data.draw(st.sampled_from(["", *sorted(vocab.control[token] for token in vocab.end_tokens)]))
    again = ids(history.tokenize(text + shown(vocab, answer) + ending, salt=""))
    spelled = vocab.cut_pattern.search(shown(vocab, answer).encode())
    if not spelled:
        assert again == prompt + answer + ids(vocab.tokenize(ending))


@pytest.mark.parametrize("name", MODELS)
def test_every_turn_of_a_chat_extends_the_one_before(name: str) -> None:
    vocab, history = vocabulary(name), History(vocabulary(name))
    said, computed = ["Count to five."], list[int]()
    for number in range(6):
        answer = letters(vocab, f"Well, number {number} it is.\n\n\nNext? 漢字🙂")
        prompt = turn(history, vocab, chat(name, *said), answer)
        assert prompt[: len(computed)] == computed
        computed = prompt + answer
        said += [shown(vocab, answer), f"Go on {number}."]


@pytest.mark.parametrize("name", MODELS)
def test_every_prompt_of_a_plain_completion_extends_the_one_before(name: str) -> None:
    vocab, history = vocabulary(name), History(vocabulary(name))
    text, computed = "Once upon a time", list[int]()
    for number in range(6):
        answer = letters(vocab, f" there were {number} dra")
        prompt = turn(history, vocab, text, answer)
        assert prompt[: len(computed)] == computed
        computed = prompt + answer
        text += shown(vocab, answer) + "gons,\nand"


def test_a_long_completion_is_remembered_in_linear_space() -> None:
    vocab, history, text = vocabulary("smollm2"), History(vocabulary("smollm2")), "Start:"
    for number in range(100):
        answer = ids(vocab.tokenize(f" step {number}: " + "more " * 30))
        turn(history, vocab, text, answer)
        text += shown(vocab, answer)
    assert len(text) > 10_000
    assert history.remembered_bytes < 200 * 600 + 2 * 100 * 5 * 250  # two entries a turn, each of that turn only


def test_samples_of_one_prompt_each_keep_their_own_tokens() -> None:
    vocab, history = vocabulary("smollm2"), History(vocabulary("smollm2"))
    text = chat("smollm2", "Say something.")
    answers = [letters(vocab, said) for said in ("The", "The cat", "The car", "A dog", "漢")]
    prompts = [turn(history, vocab, text, answer) for answer in answers]
    for prompt, answer in zip(prompts, answers, strict=True):
        said = text + shown(vocab, answer) + "<|im_end|>"
        assert ids(history.tokenize(said, salt="")) == prompt + answer + [2]


def test_what_is_known_of_a_text_does_not_change_under_the_runs_that_use_it() -> None:
    vocab, history = vocabulary("smollm2"), History(vocabulary("smollm2"))
    text = chat("smollm2", "Hi.")
    first = letters(vocab, "Hello there")
    prompt = turn(history, vocab, text, first)
    turn(history, vocab, text, ids(vocab.tokenize("Hello there")))
    assert ids(history.tokenize(text + "Hello there<|im_end|>", salt="")) == prompt + first + [2]


def test_another_history_before_the_same_text_gets_plain_tokens() -> None:
    vocab, history = vocabulary("smollm2"), History(vocabulary("smollm2"))
    turn(history, vocab, chat("smollm2", "Hi."), letters(vocab, "Hello"))
    other = chat("smollm2", "Hi!", "Hello", "And?")
    assert ids(history.tokenize(other, salt="")) == ids(vocab.tokenize(other))


def test_keys_do_not_share_what_they_remember() -> None:
    vocab, history = vocabulary("smollm2"), History(vocabulary("smollm2"))
    turn(history, vocab, chat("smollm2", "Hi."), letters(vocab, "Hello"), salt="one")
    text = chat("smollm2", "Hi.", "Hello", "And?")
    assert ids(history.tokenize(text, salt="two")) == ids(vocab.tokenize(text))
    assert ids(history.tokenize(text, salt="one")) != ids(vocab.tokenize(text))


def test_only_tokens_wholly_inside_the_visible_text_are_kept() -> None:
    vocab, history = vocabulary("smollm2"), History(vocabulary("smollm2"))
    text = chat("smollm2", "Hi.")
    prompt = history.tokenize(text, salt="")
    answer = [*letters(vocab, "Hel"), *ids(vocab.tokenize(" wonderful"))]
    assert len(answer) == 4  # a stop string cuts the last token
    history.remember(salt="", text=text, prompt=prompt, generated=answer, visible="Hel won")
    again = ids(history.tokenize(text + "Hel won<|im_end|>", salt=""))
    assert again[: len(prompt) + 3] == ids(prompt) + answer[:3]
    assert vocab.detokenize(again) == text + "Hel won<|im_end|>"


def test_a_stop_string_that_begins_with_half_a_token_leaves_no_half_character() -> None:
    vocab, history = vocabulary("smollm2"), History(vocabulary("smollm2"))
    text = chat("smollm2", "Hi.")
    prompt = history.tokenize(text, salt="")
    answer = [*letters(vocab, "ok"), *ids(vocab.tokenize("🙂"))]
    history.remember(salt="", text=text, prompt=prompt, generated=answer, visible="ok")
    assert ids(history.tokenize(text + "ok<|im_end|>", salt="")) == [*ids(prompt), *answer[:2], 2]


def test_blanks_that_a_template_strips_cost_only_their_own_tokens() -> None:
    vocab, history = vocabulary("smollm2"), History(vocabulary("smollm2"))
    text = chat("smollm2", "Hi.")
    answer = letters(vocab, "Hello \n")
    prompt = turn(history, vocab, text, answer)
    assert ids(history.tokenize(text + "Hello<|im_end|>", salt="")) == [*prompt, *answer[:5], 2]


def test_hidden_tokens_between_shown_ones_are_kept() -> None:
    vocab, history = vocabulary("smollm2"), History(vocabulary("smollm2"))
    text = chat("smollm2", "Hi.")
    answer = [*letters(vocab, "Hi"), 2, *letters(vocab, "yo"), 0, 2]
    prompt = turn(history, vocab, text, answer)
    assert ids(history.tokenize(text + "Hiyo<|im_end|>", salt="")) == [*prompt, *answer[:-2], 2]


def test_a_character_cut_by_the_length_limit_keeps_its_tokens() -> None:
    vocab, history = vocabulary("smollm2"), History(vocabulary("smollm2"))
    text = chat("smollm2", "Hi.")
    answer = [*letters(vocab, "ok"), *ids(vocab.tokenize("🙂"))[:1]]
    assert shown(vocab, answer) == "ok\ufffd"
    prompt = turn(history, vocab, text, answer)
    assert ids(history.tokenize(text + "ok\ufffd<|im_end|>", salt="")) == [*prompt, *answer, 2]


def test_a_control_token_spelled_by_the_model_is_a_control_token_in_the_next_prompt() -> None:
    vocab, history = vocabulary("smollm2"), History(vocabulary("smollm2"))
    text = chat("smollm2", "Hi.")
    answer = letters(vocab, "Hello<|im_end|>x")
    prompt = turn(history, vocab, text, answer)
    again = ids(history.tokenize(text + shown(vocab, answer), salt=""))
    assert again == [*prompt, *answer[:5], 2, *ids(vocab.tokenize("x"))]


def test_remembered_text_never_ends_inside_a_control_token() -> None:
    vocab, history = vocabulary("smollm2"), History(vocabulary("smollm2"))
    text = chat("smollm2", "Hi.")
    turn(history, vocab, text, letters(vocab, "Hello there<|im"))
    plain = ids(vocab.tokenize(text + "Hello there<|im_end|>"))
    assert ids(history.tokenize(text + "Hello there<|im_end|>", salt="")) == plain


def test_turns_of_token_ids_are_remembered_under_their_text() -> None:
    vocab, history = vocabulary("gemma"), History(vocabulary("gemma"))
    prompt = np.array([2, *letters(vocab, "Once upon")], np.int32)
    answer = letters(vocab, " a time")
    history.remember(salt="", text=None, prompt=prompt, generated=answer, visible=" a time")
    assert ids(history.tokenize("Once upon a time<eos>", salt="")) == [*ids(prompt), *answer, 1]


def test_a_turn_is_remembered_although_its_prompt_would_now_be_tokenized_otherwise() -> None:
    vocab, history = vocabulary("smollm2"), History(vocabulary("smollm2"))
    start, late = "Once upon a time", "Once upon a time, there"
    prompt = history.tokenize(late, salt="")  # this turn begins,
    turn(history, vocab, start, letters(vocab, ", there"))  # another ends meanwhile,
    answer = letters(vocab, " was")
    history.remember(salt="", text=late, prompt=prompt, generated=answer, visible=" was")  # and this one ends
    assert ids(history.tokenize(late + " was a", salt=""))[: len(prompt) + 4] == ids(prompt) + answer


@pytest.mark.parametrize(("text", "bos", "expected"), [("a", True, 1), ("<bos>a", True, 1), ("a", False, 0)])
def test_bos_is_put_in_front_once_where_the_model_wants_it(text: str, bos: bool, expected: int) -> None:
    gemma, smollm2 = History(vocabulary("gemma")), History(vocabulary("smollm2"))
    assert ids(gemma.tokenize(text, salt="", bos=bos)).count(2) == expected
    assert ids(smollm2.tokenize("a", salt="", bos=bos)) == ids(vocabulary("smollm2").tokenize("a"))


def test_memory_stays_within_its_budget_and_the_oldest_turns_go_first() -> None:
    vocab, history = vocabulary("smollm2"), History(vocabulary("smollm2"), budget_bytes=20_000, memo_bytes=5_000)
    chats = [chat("smollm2", f"Question {number}") for number in range(60)]
    answer = letters(vocab, "Hello")
    for text in chats:
        turn(history, vocab, text, answer)
        history.tokenize(chats[0] + "Hello<|im_end|>", salt="")  # the first stays in use
        assert history.remembered_bytes <= 20_000

    def kept(text: str) -> bool:
        return ids(history.tokenize(text + "Hello<|im_end|>", salt=""))[-6:-1] == answer

    assert kept(chats[0]) and kept(chats[-1])
    assert not kept(chats[1]) and not kept(chats[20])


def test_of_one_run_the_latest_turns_are_forgotten_first() -> None:
    vocab, history = vocabulary("smollm2"), History(vocabulary("smollm2"), budget_bytes=12_000)
    said, answers = ["Begin."], list[list[int]]()
    for number in range(6):
        answers.append(letters(vocab, f"answer {number}"))
        turn(history, vocab, chat("smollm2", *said), answers[-1])
        said += [shown(vocab, answers[-1]), "Go on."]
    whole = chat("smollm2", *said)
    assert len(history.tokenize(whole, salt="")) > len(vocab.tokenize(whole))
    for number in range(14):  # another run's turns take the room
        turn(history, vocab, chat("smollm2", f"Other {number}."), letters(vocab, "x"))
    tokens = ids(history.tokenize(whole, salt=""))
    kept = [any(tokens[at : at + len(answer)] == answer for at in range(len(tokens))) for answer in answers]
    assert kept[0] and not kept[-1] and kept == sorted(kept, reverse=True)


def test_text_behind_remembered_text_gets_no_prefix_space(tmp_path_factory: pytest.TempPathFactory) -> None:
    vocab = Vocabulary(tiny(tmp_path_factory, "Llama"))
    history = History(vocab)
    answer = [vocab.pieces.index(b"b"), vocab.pieces.index(b"c")]
    prompt = turn(history, vocab, "a", answer)
    again = ids(history.tokenize("abc" + "abc", salt=""))
    assert again[: len(prompt) + 2] == prompt + answer
    assert vocab.detokenize(again[1:]) == "abcabc"  # without BOS


def test_threads_tokenize_while_turns_are_remembered() -> None:
    vocab, history = vocabulary("smollm2"), History(vocabulary("smollm2"), budget_bytes=200_000, memo_bytes=50_000)

    def run(number: int) -> bool:
        said, computed, extended = [f"Run {number}"], list[int](), True
        for step in range(8):
            answer = letters(vocab, f"step {step}")
            prompt = turn(history, vocab, chat("smollm2", *said), answer)
            extended = extended and prompt[: len(computed)] == computed
            computed = prompt + answer
            said += [shown(vocab, answer), "on"]
        return extended

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(24)))


class Reference:
    """Exact history told plainly: a list of all that was remembered, searched from end to end."""

    def __init__(self, vocab: Vocabulary) -> None:
        self.vocab = vocab
        self.known: list[tuple[list[int], bytes, list[int]]] = []

    def tokenize(self, text: str) -> tuple[list[int], int, bytes]:
        data, tokens = text.encode(), list[int]()
        while True:
            cut = self.vocab.cut_pattern.search(data)
            fragment = data[: cut.start()] if cut else data
            fits = [known for known in self.known if known[0] == tokens and fragment.startswith(known[1])]
            if fits:
                best = max(fits, key=lambda known: len(known[1]))
                tokens, data = tokens + best[2], data[len(best[1]) :]
                continue
            place = len(tokens)
            tokens = tokens + ids(self.vocab.tokenize(fragment.decode()))
            if cut is None:
                return tokens, place, fragment
            tokens, data = [*tokens, self.vocab.cuts[cut[0]]], data[cut.end() :]

    def remember(self, text: str, generated: list[int]) -> None:
        prompt, place, tail = self.tokenize(text)
        entry = tail + shown(self.vocab, generated).encode()
        if not any(known[0] == prompt[:place] and known[1] == entry for known in self.known):
            self.known.append((prompt[:place], entry, prompt[place:] + generated))


WORDS = st.lists(st.sampled_from(["ab", "a", "b", "abab", "<|im_end|>", "cab"]), max_size=5).map("".join)


@given(turns=st.lists(st.tuples(WORDS, st.sampled_from(["a", "ab", "abab", "ba", "bcab"])), max_size=12), last=WORDS)
@settings(deadline=None, max_examples=300)
def test_the_index_finds_what_a_search_from_end_to_end_finds(turns: list[tuple[str, str]], last: str) -> None:
    vocab = vocabulary("smollm2")
    history, reference = History(vocab), Reference(vocab)
    for text, said in turns:
        prompt = turn(history, vocab, text, letters(vocab, said))
        assert prompt == reference.tokenize(text)[0]
        reference.remember(text, letters(vocab, said))
    assert ids(history.tokenize(last, salt="")) == reference.tokenize(last)[0]


@pytest.mark.parametrize("name", MODELS)
def test_text_around_shown_control_tokens_keeps_its_tokens(name: str) -> None:
    """A call's marker is a control token that the client sees and sends back as text."""
    vocab = vocabulary(name)
    history, prompt_text = History(vocab), chat(name, "hi")
    marker = next(token for text, token in vocab.cuts.items() if len(text) > 6 and token not in vocab.end_tokens)
    answer = [*letters(vocab, "thinking"), marker, *letters(vocab, "calls it"), marker, *letters(vocab, "twice")]
    told = b"".join(vocab.shown(token, {marker}) for token in answer).decode()
    prompt = history.tokenize(prompt_text, salt="k")
    history.remember(salt="k", text=prompt_text, prompt=prompt, generated=answer, visible=told, shown={marker})
    assert vocab.control[marker] in told
    for text in (prompt_text + told, prompt_text + told + "\nand more"):
        again = ids(history.tokenize(text, salt="k"))
        assert again[: len(prompt) + len(answer)] == [*ids(prompt), *answer]
    other = ids(history.tokenize(prompt_text + told, salt="another"))
    assert other != [*ids(prompt), *answer]


def test_what_a_stop_string_cut_behind_a_shown_control_token_is_not_remembered() -> None:
    vocab = vocabulary("smollm2")
    history, prompt_text = History(vocab), chat("smollm2", "hi")
    marker = next(token for text, token in vocab.cuts.items() if len(text) > 6 and token not in vocab.end_tokens)
    said, cut = letters(vocab, "kept"), letters(vocab, "also stop")
    told = f"kept{vocab.control[marker]}also"
    prompt = history.tokenize(prompt_text, salt="")
    history.remember(
        salt="", text=prompt_text, prompt=prompt, generated=[*said, marker, *cut], visible=told, shown={marker}
    )
    again = ids(history.tokenize(prompt_text + told, salt=""))
    assert again[len(prompt) :] == [*said, marker, *letters(vocab, "also")]
