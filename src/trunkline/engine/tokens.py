"""A model's vocabulary: text to tokens and back, exactly as llama.cpp does it, without its crashes and slow paths.

Errors:
    ValueError
    `-- TextError    text or token ids that the vocabulary cannot take; the message names the fix
"""

import ctypes
import re
from collections.abc import Container, Iterator, Sequence
from itertools import groupby

import numpy as np
from llama_cpp import llama_cpp as llama

from trunkline.core.types import Ints
from trunkline.engine.errors import ModelError

NO_TOKENS: Ints = np.empty(0, np.int32)

_HIDDEN = llama.LLAMA_TOKEN_ATTR_CONTROL | llama.LLAMA_TOKEN_ATTR_UNKNOWN
_SPECIAL = _HIDDEN | llama.LLAMA_TOKEN_ATTR_USER_DEFINED

START, TEXT = -1, -2  # what precedes a fragment, if it is no control token: the start of the text, other text

# llama.cpp's cost is quadratic in the special tokens of one call (a megabyte of HTML takes minutes with Gemma's), and
# std::regex, which it uses for many BPE vocabularies, recurses once a character (about 100,000 letters in a row end
# the process). So long text is handed over in chunks: cut before a special token, which changes nothing, and inside
# runs of one character class that no real text has, where the tokens may differ from an uncut run's.
_CHUNK_BYTES = 512
_RUN_BYTES = 16384
_CLASSES = (rb"A-Za-z\x80-\xff", rb"0-9", rb"\s", rb"^A-Za-z\x80-\xff0-9\s")
_INSIDE_CHARACTER = bytes(range(0x80, 0xC0))

# A character that no vocabulary merges with its neighbours. Behind it, text is tokenized without a prefix space.
_GUARD = b"\x01"


class TextError(ValueError):
    """Text or token ids that the vocabulary cannot take."""


def encode(text: str) -> bytes:
    """UTF-8 of `text`. Raises `TextError` for lone surrogates, which have none."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        what = f"the lone surrogate U+{ord(text[error.start]):04X}"
        raise TextError(f"character {error.start} is {what}: send whole Unicode characters") from None


class Vocabulary:
    """The tokens of one loaded model. Immutable and thread-safe; calls into llama.cpp release the interpreter lock.

    `pieces[t]` are the bytes of token `t`, `control[t]` the names of control tokens, `end_tokens` those that end a
    generation, `suppressed` the ids that the model's file says are never to be sampled.
    """

    def __init__(self, vocab: int) -> None:
        """`vocab` is a `llama_vocab_p`, which its model must outlive."""
        if llama.llama_vocab_type(vocab) == llama.LLAMA_VOCAB_TYPE_NONE:
            raise ModelError("the model's file has no tokenizer; serve a GGUF that has one")
        self._vocab = vocab
        self.size: int = llama.llama_vocab_n_tokens(vocab)
        attributes = [llama.llama_vocab_get_attr(vocab, token) for token in range(self.size)]
        special = {t: llama.llama_vocab_get_text(vocab, t) for t in range(self.size) if attributes[t] & _SPECIAL}
        self.pieces = tuple(_pieces(vocab, self.size))
        self.control = {t: text.decode(errors="replace") for t, text in special.items() if attributes[t] & _HIDDEN}
        self.end_tokens = frozenset(t for t in range(self.size) if llama.llama_vocab_is_eog(vocab, t))
        self.suppressed = _suppressed(vocab)
        self.bos, self.eos = self._named(llama.llama_vocab_bos(vocab)), self._named(llama.llama_vocab_eos(vocab))
        self.bos_text, self.eos_text = self._text_of(self.bos), self._text_of(self.eos)
        self.add_bos: bool = self.bos is not None and llama.llama_vocab_get_add_bos(vocab)

        texts = list(special.values())
        self._swallows = frozenset(t for t in special if attributes[t] & llama.LLAMA_TOKEN_ATTR_RSTRIP)
        blank_first = any(text[:1].isspace() for text in texts)
        mixing = {t for t in special if attributes[t] & llama.LLAMA_TOKEN_ATTR_LSTRIP}
        mixing |= self._swallows if blank_first else set()
        apart = _never_overlapping(texts) - {special[t] for t in mixing}
        self.cuts = {special[t]: t for t in self.control if special[t] in apart}
        self.cut_pattern = re.compile(_any_of(sorted(self.cuts)))
        self._parse_special = len(self.cuts) < len(self.control)
        bpe = llama.llama_vocab_type(vocab) == llama.LLAMA_VOCAB_TYPE_BPE
        self._breaks = _breaks(sorted(apart), _runs_only(texts), bpe)
        self._guard = self._call(_GUARD)
        self.prefixes_space = self._text_bytes(self._call(b"a")).startswith(b" ")

    def _named(self, token: int) -> int | None:
        return token if 0 <= token < self.size else None

    def _text_of(self, token: int | None) -> bytes:
        return b"" if token is None else self.pieces[token]

    def shown(self, token: int, visible: Container[int] = ()) -> bytes:
        """What a reader sees of `token`: its piece, and nothing of a control token that is not `visible`."""
        return b"" if token in self.control and token not in visible else self.pieces[token]

    def check(self, tokens: Sequence[int] | Ints) -> Ints:
        """`tokens` as an array. Raises `TextError` when one is outside the vocabulary."""
        if len(tokens) and not (min(tokens) >= 0 and max(tokens) < self.size):
            wrong = next(token for token in tokens if not 0 <= token < self.size)
            raise TextError(f"token id {wrong} is not in the vocabulary: send ids from 0 to {self.size - 1}")
        return np.array(tokens, np.int32)

    def detokenize(self, tokens: Sequence[int] | Ints) -> str:
        """Text of `tokens`, control tokens included, invalid UTF-8 replaced. Raises `TextError` for unknown ids."""
        return self.text_bytes(tokens).decode(errors="replace")

    def text_bytes(self, tokens: Sequence[int] | Ints) -> bytes:
        """Bytes of `tokens` at the start of a text: without the space that some vocabularies put before one."""
        text = self._text_bytes(self.check(tokens))
        return text[1:] if self.prefixes_space and text.startswith(b" ") else text

    def _text_bytes(self, tokens: Ints) -> bytes:
        return b"".join([self.pieces[token] for token in tokens.tolist()])

    def tokenize(self, text: str) -> Ints:
        """What `llama_tokenize` makes of `text`: control tokens recognised, no BOS added. Raises `TextError`."""
        data, at, after, parts = encode(text), 0, START, [NO_TOKENS]
        for cut in self.cut_pattern.finditer(data):
            parts.append(self.tokenize_fragment(data[at : cut.start()], after))
            at, after = cut.end(), self.cuts[cut[0]]
            parts.append(np.array([after], np.int32))
        return np.concatenate([*parts, self.tokenize_fragment(data[at:], after)])

    def tokenize_fragment(self, data: bytes, after: int) -> Ints:
        """Tokens of the UTF-8 between two matches of `cut_pattern`, which llama.cpp tokenizes independently.

        `after` is the control token before it, `START` or `TEXT`. Text behind text gets no prefix space.
        """
        if after in self._swallows:
            data = data.lstrip()
        behind_text = after == TEXT and self.prefixes_space
        parts = [NO_TOKENS]
        for chunk in self._chunks(data):
            parts.append(self._call_behind_text(chunk) if behind_text else self._call(chunk))
            behind_text = False
        return np.concatenate(parts)

    def _chunks(self, data: bytes) -> Iterator[bytes]:
        at = 0
        for end in self._chunk_ends(data) if len(data) > _CHUNK_BYTES else ():
            if end - at >= _CHUNK_BYTES:
                yield data[at:end]
                at = end
        if at < len(data):
            yield data[at:]

    def _chunk_ends(self, data: bytes) -> Iterator[int]:
        for match in self._breaks.finditer(data):
            if match.lastgroup != "run":
                yield match.start()
                continue
            for end in range(match.start() + _RUN_BYTES, match.end(), _RUN_BYTES):
                ahead = data[end : end + 4]
                yield end + len(ahead) - len(ahead.lstrip(_INSIDE_CHARACTER))

    def _call_behind_text(self, data: bytes) -> Ints:
        tokens = self._call(_GUARD + data)
        guarded = np.array_equal(tokens[: len(self._guard)], self._guard)
        return tokens[len(self._guard) :] if guarded else self._call(data)

    def _call(self, data: bytes) -> Ints:
        room = len(data) + 2  # a token is a byte at least, but for a prefix space
        while True:
            tokens: Ints = np.empty(room, np.int32)
            pointer = tokens.ctypes.data_as(ctypes.POINTER(llama.llama_token))
            n = llama.llama_tokenize(self._vocab, data, len(data), pointer, room, False, self._parse_special)
            if n >= 0:
                return tokens[:n].copy()
            room = -n


def _pieces(vocab: int, size: int) -> Iterator[bytes]:
    room = 256
    buffer = ctypes.create_string_buffer(room)
    for token in range(size):
        n = llama.llama_token_to_piece(vocab, token, buffer, room, 0, True)
        if n < 0:
            room = -n
            buffer = ctypes.create_string_buffer(room)
            n = llama.llama_token_to_piece(vocab, token, buffer, room, 0, True)
        yield ctypes.string_at(buffer, n)


def _suppressed(vocab: int) -> Ints:
    n = ctypes.c_int32(0)
    ids = llama.llama_vocab_get_suppress_tokens(vocab, ctypes.byref(n))
    return np.array(ids[: n.value] if n.value else [], np.int32)


def _never_overlapping(texts: list[bytes]) -> set[bytes]:
    """Those of `texts` whose occurrences in any text overlap no occurrence of another, or of themselves.

    llama.cpp looks for special tokens longest first, not left to right. For these the order makes no difference.
    """
    heads = {text[:i] for text in texts for i in range(1, len(text))}
    tails = {text[i:] for text in texts for i in range(1, len(text))}
    joined = b"\0".join(texts)

    def overlaps(text: bytes) -> bool:
        inside = joined.count(text) > 1
        return inside or any(text[:i] in tails or text[i:] in heads for i in range(1, len(text)))

    return {text for text in texts if text and not overlaps(text)}


def _runs_only(texts: list[bytes]) -> list[bytes]:
    """Special characters that occur in special tokens as runs only (Gemma's newlines): a run begins at a cut."""
    single = [text for text in texts if len(text) == 1]
    return [char for char in single if all(set(text) == set(char) for text in texts if char in text)]


def _breaks(apart: list[bytes], runs: list[bytes], bpe: bool) -> re.Pattern[bytes]:
    rules = [_any_of(apart), *(b"(?<!%b)%b" % (re.escape(char), re.escape(char)) for char in runs)]
    if bpe:
        runs_of = b"|".join(b"(?<![%b])[%b]{%d,}" % (chars, chars, _RUN_BYTES) for chars in _CLASSES)
        rules.append(b"(?P<run>" + runs_of + b")")
    return re.compile(b"|".join(rules))


def _any_of(words: list[bytes]) -> bytes:
    """A pattern of any of the sorted, prefix-free `words`, branching once a character so that thousands stay fast."""
    if len(words) <= 1:
        return re.escape(words[0]) if words else b"(?!)"
    branches = groupby(words, key=lambda word: word[:1])
    return b"(?:" + b"|".join(re.escape(head) + _any_of([w[1:] for w in group]) for head, group in branches) + b")"
