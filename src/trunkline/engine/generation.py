"""One turn's output: from logits to tokens, and from tokens to the text a client may see."""

import codecs
from collections import deque
from collections.abc import Sequence
from time import perf_counter

from trunkline.core.types import EndReason, Ints
from trunkline.engine.grammar import Guide
from trunkline.engine.sampling import Choosers, Logits, Sampler, SamplingError, logprob
from trunkline.engine.tokens import Vocabulary
from trunkline.wire.turns import Delta, TokenLogprob, TurnRequest


class Generation:
    """What one turn has generated. Belongs to one thread at a time.

    Text appears once its characters are whole and no stop string can begin in it any more. Control tokens (but those in
    `show_control`), the token that ended the turn and the stop string that ended it are never shown; with `ignore_eos`,
    end tokens are generated like any other control token and end nothing.

    A `guide` leaves only the tokens that its grammar allows to be chosen, and ends the turn once it is done, whatever
    `ignore_eos` says. Tokens that it forces follow the chosen one at once, without a row of logits, and nothing but
    `max_tokens`, a stop string or a stop token keeps them out: biases and penalties choose, and here is no choice. A
    turn that asks for logprobs gets a row for each of its tokens, forced or not, so that all logprobs are the model's.
    """

    def __init__(
        self,
        request: TurnRequest,
        vocabulary: Vocabulary,
        guide: Guide | None = None,
        choosers: Choosers = Sampler,
    ) -> None:
        """Raises `SamplingError` for parameters that cannot be used."""
        if "" in request.stop:
            raise SamplingError("a stop string is empty: leave it out")
        self._request = request
        self._vocabulary = vocabulary
        self._chooser = choosers(request.sampling, request.tokens, vocabulary.size, vocabulary.suppressed)
        self._guide = guide
        self._forced: deque[int] = deque()
        self.shown_control = _named(request.show_control, vocabulary)
        """Control tokens that are shown."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._shown: list[str] = []
        self.tokens: list[int] = []
        """Every token of the turn, the one that ended it included."""
        self.forced_tokens = 0
        """How many of `tokens` the grammar forced."""
        self.mask_ms = 0.0
        """Time spent on the grammar: masks, and what it forces."""
        self.finished = EndReason.LENGTH if request.max_tokens < 1 else None
        self.stopped_by: str | int | None = None
        """The stop string or the requested stop token that ended the turn; None for the model's own end tokens."""

    @property
    def visible_text(self) -> str:
        """All the text of the deltas so far."""
        return "".join(self._shown)

    def accept(self, row: Logits) -> Delta:
        """Choose the next token from `row` ((vocabulary size,), not kept). The delta holds it and those that are forced
        behind it, and the text that became visible, which may be empty.

        Raises `SamplingError` if nothing can be chosen, and `ConstraintError` if the grammar allows nothing; nothing
        changes then.
        """
        assert self.finished is None
        top, before = self._request.logprobs, len(self.tokens)
        if self._guide is not None and not self.tokens:
            self._advance(self._guide, [])
        if self._forced:
            text = self._next_forced()
        else:
            token = self._choose(row)
            self.tokens.append(token)
            text = self._read(token)
        while top is None and self._forced and self.finished is None:
            text += self._next_forced()
        new = tuple(self.tokens[before:])
        return Delta(new, text, () if top is None else (logprob(row, new[0], top),))

    def flush(self) -> Delta:
        """Text held back when the turn ends from outside: half characters replaced, no token. Empty when finished."""
        return Delta((), "" if self.finished else self._show(self._decoder.decode(b"", final=True), whole=True))

    def _choose(self, row: Logits) -> int:
        if self._guide is None:
            return self._chooser.choose(row)
        start = perf_counter()
        scores = self._guide.masked(row)
        self.mask_ms += (perf_counter() - start) * 1000
        token = self._chooser.choose(scores)
        self._advance(self._guide, [token])
        return token

    def _advance(self, guide: Guide, tokens: Sequence[int]) -> None:
        """Go on behind `tokens`, and note what is forced then."""
        start = perf_counter()
        guide.take(tokens)
        if not guide.done:
            self._forced += guide.forced()
            guide.take(self._forced)
        self.mask_ms += (perf_counter() - start) * 1000

    def _next_forced(self) -> str:
        token = self._forced.popleft()
        self._chooser.count(token)
        self.tokens.append(token)
        self.forced_tokens += 1
        return self._read(token)

    def _read(self, token: int) -> str:
        ends = self._ends_turn(token)
        whole = self._guide is not None and self._guide.done and not self._forced
        if ends or whole:
            self.finished = EndReason.STOP
        elif len(self.tokens) >= self._request.max_tokens:
            self.finished = EndReason.LENGTH
        piece = b"" if ends else self._vocabulary.shown(token, self.shown_control)
        return self._show(self._decoder.decode(piece, final=self.finished is not None), self.finished is not None)

    def _ends_turn(self, token: int) -> bool:
        if token in self._vocabulary.end_tokens and not self._request.sampling.ignore_eos:
            return True
        if token in self._request.stop_tokens:
            self.stopped_by = token
            return True
        return False

    def _show(self, text: str, whole: bool) -> str:
        """Take in `text`; give out what may be seen (all of it if `whole`, unless a stop string cuts it)."""
        self._held += text
        found = [(self._held.find(stop), stop) for stop in self._request.stop if stop in self._held]
        if found:
            end, stop = min(found, key=lambda place: place[0])
            self.finished, self.stopped_by = EndReason.STOP, stop
            shown, self._held = self._held[:end], ""
        else:
            end = len(self._held) if whole else len(self._held) - self._undecided()
            shown, self._held = self._held[:end], self._held[end:]
        self._shown.append(shown)
        return shown

    def _undecided(self) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        longest = 0
        for stop in self._request.stop:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest


def _named(names: Sequence[str], vocabulary: Vocabulary) -> frozenset[int]:
    return frozenset(token for token, name in vocabulary.control.items() if name in names) if names else frozenset()


def prompt_logprobs(rows: Sequence[Logits] | Logits, tokens: Ints, top: int) -> tuple[TokenLogprob, ...]:
    """Log probabilities of prompt tokens: `rows[i]` ((n, vocabulary size)) predicted `tokens[i]` ((n,))."""
    return tuple(logprob(row, int(token), top) for row, token in zip(rows, tokens, strict=True))
