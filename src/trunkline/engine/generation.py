"""One turn's output: from logits to tokens, and from tokens to the text a client may see."""

import codecs
from collections.abc import Sequence

from trunkline.core.types import EndReason, Ints
from trunkline.engine.sampling import Logits, Sampler, SamplingError, logprob
from trunkline.engine.tokens import Vocabulary
from trunkline.wire.turns import Delta, TokenLogprob, TurnRequest


class Generation:
    """What one turn has generated. Belongs to one thread at a time.

    Text appears once its characters are whole and no stop string can begin in it any more. Control tokens, the token
    that ended the turn and the stop string that ended it are never shown; with `ignore_eos`, end tokens are generated
    like any other control token and end nothing.
    """

    def __init__(self, request: TurnRequest, vocabulary: Vocabulary) -> None:
        """Raises `SamplingError` for parameters that cannot be used."""
        if "" in request.stop:
            raise SamplingError("a stop string is empty: leave it out")
        self._request = request
        self._vocabulary = vocabulary
        self._sampler = Sampler(request.sampling, request.tokens, vocabulary.size, vocabulary.suppressed)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._shown: list[str] = []
        self.tokens: list[int] = []
        """Every sampled token, the one that ended the turn included."""
        self.finished = EndReason.LENGTH if request.max_tokens < 1 else None
        self.stopped_by: str | int | None = None
        """The stop string or the requested stop token that ended the turn; None for the model's own end tokens."""

    @property
    def visible_text(self) -> str:
        """All the text of the deltas so far."""
        return "".join(self._shown)

    def accept(self, row: Logits) -> Delta:
        """Choose the next token from `row` ((vocabulary size,), not kept). The delta holds it, and the text that
        became visible, which may be empty. Raises `SamplingError` if nothing can be chosen; nothing changes then.
        """
        assert self.finished is None
        token = self._sampler.choose(row)
        top = self._request.logprobs
        self.tokens.append(token)
        return Delta((token,), self._read(token), () if top is None else (logprob(row, token, top),))

    def flush(self) -> Delta:
        """Text held back when the turn ends from outside: half characters replaced, no token. Empty when finished."""
        return Delta((), "" if self.finished else self._show(self._decoder.decode(b"", final=True), whole=True))

    def _read(self, token: int) -> str:
        ends = self._ends_turn(token)
        if ends:
            self.finished = EndReason.STOP
        elif len(self.tokens) >= self._request.max_tokens:
            self.finished = EndReason.LENGTH
        piece = b"" if ends else self._vocabulary.shown(token)
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


def prompt_logprobs(rows: Sequence[Logits] | Logits, tokens: Ints, top: int) -> tuple[TokenLogprob, ...]:
    """Log probabilities of prompt tokens: `rows[i]` ((n, vocabulary size)) predicted `tokens[i]` ((n,))."""
    return tuple(logprob(row, int(token), top) for row, token in zip(rows, tokens, strict=True))
