r"""Exact history: where a prompt repeats text that a turn generated, it gets the tokens that turn generated.

Re-tokenizing generated text may give other tokens than were sampled, and the KV computed for them would be lost. See
`docs/decisions/0003-exact-history.md`.

A prompt is walked from left to right. At a *place* (the start, behind a control token, behind remembered text) the
longest remembered text that the prompt goes on with is taken with its tokens; failing that, the text up to the next
control token is tokenized plainly:

    <|im_start|> user\nHi <|im_end|> \n <|im_start|> assistant\nHel·lo <|im_end|> ...
                ^ place              ^ place           ^ place, remembered: "assistant\nHello" -> its own tokens

A place is named by a hash of the salt and of all tokens before it. So remembered tokens apply exactly where the
tokens before them are those of the prompt that generated them, and the whole is a prefix of what was computed.
"""

import codecs
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from threading import Lock
from typing import NamedTuple

import numpy as np

from trunkline.core.types import Ints
from trunkline.engine.tokens import NO_TOKENS, START, TEXT, Vocabulary, encode

_ENTRY_BYTES = 600  # what an entry costs beside its text and tokens, roughly


class _Entry(NamedTuple):
    place: bytes
    text: bytes


@dataclass(slots=True)
class _Place:
    """Texts remembered at a place, filed under their first 2^k bytes (the largest that fit), so that a search is
    one lookup for each power of two.
    """

    longest: int = 0
    texts: dict[bytes, list[bytes]] = field(default_factory=dict)


_Fragment = tuple[str, bytes, int]  # salt, text, what precedes it


class _Walk(NamedTuple):
    """The tokens of a prompt, and its last place: `at` tokens in, with `tail` still to come."""

    tokens: Ints
    place: bytes
    at: int
    tail: bytes


class History:
    """Remembers what turns generated, and tokenizes prompts with it. Thread-safe, bounded in bytes, LRU."""

    def __init__(self, vocabulary: Vocabulary, *, budget_bytes: int = 64 << 20, memo_bytes: int = 64 << 20) -> None:
        """`budget_bytes` bounds what is remembered, `memo_bytes` the tokens kept of fragments seen before."""
        self._vocabulary = vocabulary
        self._budget_bytes = budget_bytes
        self._bytes = 0
        self._places: dict[bytes, _Place] = {}
        self._entries: OrderedDict[_Entry, Ints] = OrderedDict()
        self._cut_ids = np.array(list(vocabulary.cuts.values()), np.int32)
        self._memo = _Memo(memo_bytes)
        self._lock = Lock()

    @property
    def remembered_bytes(self) -> int:
        """Bytes held for remembered text, at most the budget."""
        return self._bytes

    def tokenize(self, text: str, *, salt: str, bos: bool = True) -> Ints:
        """Token ids of `text` (1-D int32), with BOS in front if the model wants one and `text` does not begin with it.

        Control tokens written out are recognised. Raises `TextError` for lone surrogates.
        """
        return self._walk(salt, encode(text), bos).tokens

    def remember(
        self,
        *,
        salt: str,
        text: str | None,
        prompt: Ints,
        generated: Sequence[int],
        visible: str,
        shown: Collection[int] = (),
    ) -> None:
        """Note that `prompt` (made from `text`, None for token ids) was continued by `generated`, shown as `visible`
        (the control tokens in `shown` included).

        Only tokens that lie wholly inside `visible` are remembered. What is known already stays: the tokens of a text
        at a place never change while they are remembered. The text without trailing blanks is remembered too, since
        many templates strip it.
        """
        place, at, tail = self._open_end(salt, text, prompt)
        head = prompt[at:]
        chain = _chain(salt)
        chain.update(prompt.data)
        for stretch, told, cut in self._stretches(generated, visible, shown):
            self._remember(place, head, tail, stretch, told, shown)
            chain.update(np.array([*stretch, cut], np.int32).data)
            place, head, tail = chain.digest(), NO_TOKENS, b""

    def _stretches(
        self, generated: Sequence[int], visible: str, shown: Collection[int]
    ) -> Iterator[tuple[Sequence[int], str, int]]:
        """What was generated, divided by the shown control tokens: (tokens, their text, the control token behind)."""
        vocabulary, start, at = self._vocabulary, 0, 0
        for end, cut in enumerate(generated):
            if cut not in shown or vocabulary.cuts.get(vocabulary.pieces[cut]) != cut:
                continue
            pieces = [vocabulary.shown(token, shown) for token in generated[start:end]]
            text = b"".join(pieces).decode(errors="replace")
            if not visible.startswith(text + vocabulary.pieces[cut].decode(), at):
                break
            yield generated[start:end], text, cut
            start, at = end + 1, at + len(text) + len(vocabulary.pieces[cut].decode())
        yield generated[start:], visible[at:], -1

    def _remember(
        self, place: bytes, head: Ints, tail: bytes, generated: Sequence[int], visible: str, shown: Collection[int]
    ) -> None:
        """Remember one stretch without control tokens, which `head` (its text is `tail`) precedes at `place`."""
        told = tail + encode(visible)
        spelled = self._vocabulary.cut_pattern.search(told)
        if spelled:  # a control token in plain letters, which the next prompt takes for the real one
            visible = told[len(tail) : spelled.start()].decode()
        for text in dict.fromkeys((visible, visible.rstrip())):
            kept, length = self._wholly_inside(generated, text, shown)
            if kept:
                tokens = np.concatenate([head, np.array(generated[:kept], np.int32)])
                self._file(_Entry(place, tail + encode(text[:length])), tokens)

    def _walk(self, salt: str, data: bytes, bos: bool) -> _Walk:
        vocabulary = self._vocabulary
        chain, parts, used = _chain(salt), [NO_TOKENS], []
        count, at, after = 0, 0, START

        def emit(tokens: Ints) -> None:
            nonlocal count
            chain.update(tokens.data)
            parts.append(tokens)
            count += len(tokens)

        if bos and vocabulary.add_bos and not data.startswith(vocabulary.bos_text):
            emit(np.array([vocabulary.bos], np.int32))
        while True:
            cut = vocabulary.cut_pattern.search(data, at)
            end = cut.start() if cut else len(data)
            while known := self._longest(chain.digest(), data, at, end):
                entry, tokens = known
                emit(tokens)
                used.append(entry)
                at, after = at + len(entry.text), TEXT
            if cut is None:
                break
            emit(self._plain(salt, data[at:end], after))
            at, after = cut.end(), vocabulary.cuts[cut[0]]
            emit(np.array([after], np.int32))
        place, start, tail = chain.digest(), count, data[at:]
        emit(self._plain(salt, tail, after))
        self._touch(used)
        return _Walk(np.concatenate(parts), place, start, tail)

    def _plain(self, salt: str, fragment: bytes, after: int) -> Ints:
        # The memo is the salt's own, so that not even the time a tokenization takes tells one key of another's text.
        tokens = self._memo.get((salt, fragment, after))
        if tokens is None:
            tokens = self._vocabulary.tokenize_fragment(fragment, after)
            self._memo.put((salt, fragment, after), tokens)
        return tokens

    def _open_end(self, salt: str, text: str | None, prompt: Ints) -> tuple[bytes, int, bytes]:
        """The last place of a prompt, the tokens before it and the text behind it."""
        if text is not None:
            bos = self._vocabulary.bos
            walk = self._walk(salt, encode(text), bos=len(prompt) > 0 and prompt[0] == bos)
            if np.array_equal(walk.tokens, prompt):
                return walk.place, walk.at, walk.tail
        # Token ids were sent, or what is remembered changed meanwhile: the tokens themselves tell.
        cuts = np.flatnonzero(np.isin(prompt, self._cut_ids))
        at = int(cuts[-1]) + 1 if cuts.size else 0
        chain = _chain(salt)
        chain.update(prompt[:at].data)
        return chain.digest(), at, self._vocabulary.text_bytes(prompt[at:])

    def _wholly_inside(self, generated: Sequence[int], visible: str, shown: Collection[int]) -> tuple[int, int]:
        """How many of `generated` lie wholly inside `visible`, and how many of its characters they make.

        Hidden tokens count where shown ones follow: behind the last they belong to what the next prompt says.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        kept = length = at = last = 0
        for count, token in enumerate(generated, 1):
            piece = self._vocabulary.shown(token, shown)
            text = decoder.decode(piece)
            if not visible.startswith(text, at):
                return kept, length
            at += len(text)
            if piece:
                last = count
                if not decoder.getstate()[0]:  # no half character waits for the next token
                    kept, length = count, at
        whole = visible[at:] == decoder.decode(b"", final=True)
        return (last, len(visible)) if whole else (kept, length)

    # --- the index ----------------------------------------------------------------------------------------------

    def _longest(self, place: bytes, data: bytes, at: int, end: int) -> tuple[_Entry, Ints] | None:
        with self._lock:
            known = self._places.get(place)
            if known is None:
                return None
            level = 1 << min(known.longest, end - at).bit_length() >> 1
            while level:
                fits = [text for text in known.texts.get(data[at : at + level], ()) if data.startswith(text, at, end)]
                if fits:
                    entry = _Entry(place, max(fits, key=len))
                    return entry, self._entries[entry]
                level >>= 1
        return None

    def _file(self, entry: _Entry, tokens: Ints) -> None:
        with self._lock:
            if entry in self._entries:
                self._entries.move_to_end(entry)
                return
            self._entries[entry] = tokens
            self._bytes += _cost(entry, tokens)
            place = self._places.setdefault(entry.place, _Place())
            place.longest = max(place.longest, len(entry.text))
            place.texts.setdefault(_filed_under(entry.text), []).append(entry.text)
            while self._bytes > self._budget_bytes:
                self._forget_oldest()

    def _forget_oldest(self) -> None:
        entry, tokens = self._entries.popitem(last=False)
        self._bytes -= _cost(entry, tokens)
        place, under = self._places[entry.place], _filed_under(entry.text)
        place.texts[under].remove(entry.text)
        if not place.texts[under]:
            del place.texts[under]
        if not place.texts:
            del self._places[entry.place]

    def _touch(self, used: list[_Entry]) -> None:
        # Deepest first: an entry is of no use without those before it, so the deepest is to be forgotten first.
        with self._lock:
            for entry in reversed(used):
                if entry in self._entries:
                    self._entries.move_to_end(entry)


class _Memo:
    """Tokens of fragments, bounded in bytes, LRU. Thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._bytes = 0
        self._tokens: OrderedDict[_Fragment, Ints] = OrderedDict()
        self._lock = Lock()

    def get(self, key: _Fragment) -> Ints | None:
        with self._lock:
            tokens = self._tokens.get(key)
            if tokens is not None:
                self._tokens.move_to_end(key)
            return tokens

    def put(self, key: _Fragment, tokens: Ints) -> None:
        with self._lock:
            if key in self._tokens:
                return
            self._tokens[key] = tokens
            self._bytes += self._cost(key, tokens)
            while self._bytes > self._budget_bytes:
                self._bytes -= self._cost(*self._tokens.popitem(last=False))

    @staticmethod
    def _cost(key: _Fragment, tokens: Ints) -> int:
        return _ENTRY_BYTES + len(key[1]) + tokens.nbytes


def _chain(salt: str) -> "blake2b":
    return blake2b(blake2b(salt.encode(errors="surrogatepass")).digest(), digest_size=16)


def _cost(entry: _Entry, tokens: Ints) -> int:
    return _ENTRY_BYTES + len(entry.text) + tokens.nbytes


def _filed_under(text: bytes) -> bytes:
    return text[: 1 << len(text).bit_length() >> 1]
