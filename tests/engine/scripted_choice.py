"""Given answers from a real server: only the choice of each token is scripted, all else stays real.

    replies = ScriptedChoice(vocabulary, ["<tool_call>{...}</tool_call>", "Done."])
    engine = EmbeddedEngine(model, slots, settings, name="m", sink=sink, choosers=replies)

Turns take the replies in the order in which they begin. Where that order is not certain (branches at once, calls for a
title), give a function instead: it gets the prompt as text, control tokens included, and returns the answer.

Prompts are computed, grammars mask, forced tokens are forced, text is parsed and history remembered as ever. Of the
tokens that may come next, the longest that continues the wanted reply is chosen; behind the reply, an end token. Under
a grammar the reply must be one that it allows, as compact or spaced as it demands; else the turn fails with a 400 that
shows where they part. Control tokens in a reply (`[TOOL_CALLS]`) are chosen as such where they may come.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from trunkline.core.types import Ints
from trunkline.engine.sampling import NO_IDS, Logits, SamplingError
from trunkline.engine.tokens import TEXT, Vocabulary
from trunkline.wire.turns import Sampling


class ScriptedChoice:
    """Makes a chooser for each turn: what `EmbeddedEngine` takes as `choosers`."""

    def __init__(self, vocabulary: Vocabulary, replies: Sequence[str] | Callable[[str], str]) -> None:
        self._vocabulary = vocabulary
        self._by_prompt = replies if callable(replies) else None
        self._in_order: Iterator[str] = iter(()) if callable(replies) else iter(replies)
        self._tokens: dict[bytes, list[int]] = {}
        for token, piece in enumerate(vocabulary.pieces):
            if piece:
                self._tokens.setdefault(piece, []).append(token)
        for piece, same in self._tokens.items():
            if len(same) > 1:  # a letter and its byte token: the tokenizer's own choice comes first
                own = vocabulary.tokenize_fragment(piece, TEXT).tolist()
                same.sort(key=lambda token: [token] != own)
        self._longest = max(map(len, self._tokens))
        self.prompts: list[str] = []
        """The prompts so far, in the order in which their turns began."""

    def __call__(self, sampling: Sampling, prompt: Ints, size: int, suppressed: Ints = NO_IDS) -> "Reply":
        """The chooser of a turn that begins. Raises `SamplingError`, a 400, when the replies have run out."""
        self.prompts.append(self._vocabulary.detokenize(prompt))
        if self._by_prompt is not None:
            return Reply(self, self._by_prompt(self.prompts[-1]))
        reply = next(self._in_order, None)
        if reply is None:
            raise SamplingError(f"no reply is left for turn {len(self.prompts)}: {self.prompts[-1][-200:]!r}")
        return Reply(self, reply)

    def choose(self, row: Logits, rest: bytes) -> int:
        """The token that `row` allows and that begins `rest` with the most bytes."""
        for length in range(min(self._longest, len(rest)), 0, -1):
            for token in self._tokens.get(rest[:length], ()):
                if row[token] > -np.inf:
                    return token
        ends = [token for token in sorted(self._vocabulary.end_tokens) if row[token] > -np.inf]
        if rest or not ends:
            allowed = [self._vocabulary.pieces[token] for token in np.flatnonzero(row > -np.inf)[:20]]
            raise SamplingError(f"the script goes on with {rest[:100]!r}, and the grammar with one of {allowed}")
        return ends[0]

    def piece(self, token: int) -> bytes:
        """Bytes of a token."""
        return self._vocabulary.pieces[token]


class Reply:
    """Chooses the tokens of one turn, so that they spell `text`."""

    def __init__(self, script: ScriptedChoice, text: str) -> None:
        self._script = script
        self._rest = text.encode()

    def choose(self, row: Logits) -> int:
        """The longest allowed token that continues the text, and an end token behind it."""
        token = self._script.choose(row, self._rest)
        self._rest = self._rest[len(self._script.piece(token)) :]
        return token

    def count(self, token: int) -> None:
        """A forced token must be the text's own."""
        piece = self._script.piece(token)
        if not self._rest.startswith(piece):
            raise SamplingError(f"the script goes on with {self._rest[:100]!r}, and the grammar forces {piece!r}")
        self._rest = self._rest[len(piece) :]
