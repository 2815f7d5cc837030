"""The vocabulary: the tokens llama.cpp gives, for any text, without its slow paths and crashes."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tests.engine.vocabularies import ids, llama_tokens, load, pointer, vocabulary, write_tiny_gguf
from trunkline.engine.tokens import START, TEXT, TextError, Vocabulary

MODELS = ["smollm2", "gemma"]

SNIPPETS = [
    " ",
    "\n",
    "\n\n\n",
    "\t",
    "  ",
    "Hello",
    " world",
    "é",
    "漢字",
    "🙂",
    "e\u0301",
    "123",
    "<",
    "|>",
    "\x00",
    "'s",
]


@st.composite
def texts(draw: st.DrawFn, name: str) -> str:
    """Words, odd characters, whole control tokens, cut ones and HTML, in any order."""
    control = [*sorted(vocabulary(name).control.values(), key=len)[-12:], "<table>", "<eos>", "<|im_end|>"]
    whole = st.sampled_from(control + SNIPPETS)
    part = st.builds(lambda text, n: text[:n], st.sampled_from(control), st.integers(1, 8))
    free = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
    return "".join(draw(st.lists(whole | part | free, max_size=25)))


@pytest.mark.parametrize("name", MODELS)
@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_tokens_are_those_of_llama_cpp(name: str, data: st.DataObject) -> None:
    text = data.draw(texts(name))
    assert ids(vocabulary(name).tokenize(text)) == ids(llama_tokens(pointer(name), text))


@pytest.mark.parametrize("name", MODELS)
@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_tokens_give_their_text_back(name: str, data: st.DataObject) -> None:
    bytes_with_a_token = {piece[0] for piece in vocabulary(name).pieces if len(piece) == 1}  # SmolLM2 lacks some
    text = "".join(char for char in data.draw(texts(name)) if bytes_with_a_token.issuperset(char.encode()))
    assert vocabulary(name).detokenize(vocabulary(name).tokenize(text)) == text


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("unit", ["<a>b</a> ", "line\n", "a\tb\t", "<table>\n\n\t", "Some prose. ", "漢字", "\n\n x"])
def test_text_longer_than_a_chunk_gets_the_same_tokens(name: str, unit: str) -> None:
    text = unit * (6000 // len(unit))
    assert ids(vocabulary(name).tokenize(text)) == ids(llama_tokens(pointer(name), text))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("character", ["a", "7", " ", "\n", "!", "漢", "é"])
def test_an_endless_run_of_one_kind_keeps_its_text(name: str, character: str) -> None:
    text = "x" + character * 100_001
    assert vocabulary(name).detokenize(vocabulary(name).tokenize(text)) == text


def test_megabytes_of_markup_take_no_quadratic_time() -> None:
    # llama.cpp alone needs over two minutes a megabyte here, and four times that for two: pytest's timeout ends it.
    text = "<a>b</a> " * 440_000
    assert len(vocabulary("gemma").tokenize(text)) == 4 * 440_000


def test_lone_surrogates_are_refused_with_their_place() -> None:
    with pytest.raises(TextError, match=r"character 3 is the lone surrogate U\+D83D"):
        vocabulary("smollm2").tokenize("abc\ud83d")


@pytest.mark.parametrize("wrong", [-1, 49152, 2**40])
def test_unknown_token_ids_are_refused_with_the_range(wrong: int) -> None:
    with pytest.raises(TextError, match=f"token id {wrong} .* from 0 to 49151"):
        vocabulary("smollm2").detokenize([1, wrong])


def test_half_a_character_is_detokenized_as_a_replacement_character() -> None:
    smollm2 = vocabulary("smollm2")
    half = smollm2.tokenize("🙂")[:1]
    assert smollm2.detokenize(half) == "\ufffd"


def test_the_files_facts_about_tokens_are_known() -> None:
    smollm2, gemma = vocabulary("smollm2"), vocabulary("gemma")
    assert (smollm2.size, smollm2.bos, smollm2.eos, smollm2.add_bos) == (49152, 1, 2, False)
    assert (gemma.size, gemma.bos, gemma.eos, gemma.add_bos) == (262144, 2, 1, True)
    assert {smollm2.control[token] for token in smollm2.end_tokens} == {"<|endoftext|>", "<|im_end|>", "<reponame>"}
    assert {"<eos>", "<end_of_turn>"} <= {gemma.control[token] for token in gemma.end_tokens}
    assert gemma.bos_text == b"<bos>" and gemma.eos_text == b"<eos>"


def test_control_tokens_are_not_shown_and_others_are() -> None:
    smollm2 = vocabulary("smollm2")
    (hello,) = smollm2.tokenize("Hello")
    assert smollm2.shown(hello) == b"Hello"
    assert smollm2.shown(2) == b"" and smollm2.pieces[2] == b"<|im_end|>"


def test_many_threads_get_the_tokens_of_one() -> None:
    gemma = vocabulary("gemma")
    lines = [f"<table>{n}\n\nfoo bar {n * n}<end_of_turn>" * 40 for n in range(60)]
    alone = [ids(gemma.tokenize(line)) for line in lines]
    with ThreadPoolExecutor(8) as pool:
        assert [ids(tokens) for tokens in pool.map(gemma.tokenize, lines)] == alone


TINY = ["a", "b", "abc", " ", "\n", "<|user|>", "<|end|>", "<s>", "é", ">>a", "<<", "cc>>"]


@pytest.mark.parametrize("model_name", ["Llama", "Phi-3"])
@given(parts=st.lists(st.sampled_from(TINY), max_size=12))
@settings(deadline=None, max_examples=200)
def test_prefix_spaces_and_swallowed_blanks_are_llama_cpps(
    tmp_path_factory: pytest.TempPathFactory, model_name: str, parts: list[str]
) -> None:
    vocab = tiny(tmp_path_factory, model_name)
    assert ids(Vocabulary(vocab).tokenize("".join(parts))) == ids(llama_tokens(vocab, "".join(parts)))


def test_text_behind_text_gets_no_prefix_space(tmp_path_factory: pytest.TempPathFactory) -> None:
    vocab = Vocabulary(tiny(tmp_path_factory, "Llama"))
    assert [vocab.pieces[token] for token in vocab.tokenize_fragment(b"abc", START)] == [b" ab", b"c"]
    assert [vocab.pieces[token] for token in vocab.tokenize_fragment(b"abc", TEXT)] == [b"ab", b"c"]
    split = np.concatenate([vocab.tokenize("ab a"), vocab.tokenize_fragment(b"bc", TEXT)])
    assert vocab.detokenize(split) == "ab abc"


_loaded: dict[str, int] = {}


def tiny(folders: pytest.TempPathFactory, model_name: str) -> int:
    """The tiny vocabulary of a model of that name."""
    if model_name not in _loaded:
        path: Path = folders.mktemp("tiny") / "tiny.gguf"
        write_tiny_gguf(path, model_name)
        _loaded[model_name] = load(path)
    return _loaded[model_name]
