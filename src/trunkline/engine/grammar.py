"""Constrained generation: which tokens a grammar allows next, and which it forces, by `llguidance`.

A grammar is compiled once and kept; every turn walks a copy of its own, which shares the lexer's states with the
others. Forced tokens are those that the canonical tokenization of the forced text consists of, up to where a longer
token could still begin: what the model itself would most likely have written. See
`docs/decisions/0006-constrained-generation.md`.

A hostile grammar is stopped by its size, by the limits below, and by the turn's `max_tokens`. It may hold a step up for
as long as `llguidance` takes to tokenize the longest text it ever forces at once, about half a second.
"""

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from trunkline.engine.sampling import Logits
from trunkline.engine.schema_errors import explain, unenforced
from trunkline.engine.tokens import TEXT, Vocabulary
from trunkline.wire.turns import Constraint, ConstraintError

MAX_GRAMMAR_BYTES = 256 << 10
"""A longer grammar is refused: compiling it would take seconds."""
KEPT_GRAMMARS = 64
"""Compiled grammars that are kept, the latest used."""
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # about 20 ms of building regular expressions
    step_lexer_fuel=200_000,  # about 15 ms of lexing for one mask
    step_max_items=50_000,  # about 3 ms of parsing for one mask
    max_lexer_states=50_000,  # about 100 MB
    max_grammar_size=500_000,
    verbose_errors=False,
)

_INFINITY = 0x7F800000  # the bits of float32 infinity

Allowed = NDArray[np.bool_]
"""(vocabulary size,): whether a token may come next."""


class DeadEnd(ConstraintError):
    """The grammar allows no token here, and may not end here."""


class Grammars:
    """Compiles constraints for one vocabulary. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._size = vocabulary.size
        ends = sorted(vocabulary.end_tokens)
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(vocabulary)), eos_token=ends or None)
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def knows(self, constraint: Constraint) -> bool:
        """Whether `guide` would take no time."""
        with self._lock:
            return constraint.grammar in self._kept

    def guide(self, constraint: Constraint) -> "Guide":
        """The beginning of a turn under `constraint`, compiled (up to a second) unless it is kept.

        Raises `ConstraintError`.
        """
        with self._lock:
            fresh = self._kept.get(constraint.grammar)
            if fresh is not None:
                self._kept.move_to_end(constraint.grammar)
                return Guide(fresh.deep_copy(), self._size)
        fresh = self._compile(constraint.grammar)
        with self._lock:
            self._kept[constraint.grammar] = fresh
            while len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
            return Guide(fresh.deep_copy(), self._size)

    def _compile(self, grammar: str) -> LLMatcher:
        try:
            size = len(grammar.encode())
        except UnicodeEncodeError:
            raise ConstraintError("the schema holds a lone surrogate: send whole Unicode characters") from None
        if size > MAX_GRAMMAR_BYTES:
            raise ConstraintError(f"the schema makes {size} bytes of grammar; at most {MAX_GRAMMAR_BYTES} are accepted")
        fresh = LLMatcher(self._tokenizer, grammar, limits=LIMITS, log_level=0)
        if fresh.is_error():
            raise ConstraintError(explain(grammar, fresh.get_error(), LIMITS))
        if "exclusiveM" in grammar and (problem := unenforced(grammar)):
            raise ConstraintError(problem)
        # A first step builds most of the lexer, which all copies share; and a grammar that allows nothing shows here.
        trial = Guide(fresh.deep_copy(), self._size)
        try:
            trial.take(trial.forced())
            if not trial.done:
                trial.allowed()
        except DeadEnd:
            raise ConstraintError("no text satisfies the schema") from None
        return fresh


class Guide:
    """How far one turn has come in its grammar. Belongs to one thread at a time."""

    def __init__(self, matcher: LLMatcher, size: int) -> None:
        self._matcher = matcher
        self._size = size
        self._caps = np.empty(size, np.uint32)
        self._scores = np.empty(size, np.float32)

    @property
    def done(self) -> bool:
        """Whether the grammar allows nothing more: the turn is whole."""
        return self._matcher.is_stopped()

    def forced(self) -> list[int]:
        """The tokens that must come next, if only one text can and its tokens are certain. Nothing is taken yet."""
        return self._matcher.compute_ff_tokens()

    def allowed(self) -> Allowed:
        """What may come next; end tokens where the grammar may end. Raises `ConstraintError` at a dead end."""
        return ~self._forbidden().view(np.bool_)

    def masked(self, row: Logits) -> Logits:
        """`row` with -inf where a token may not come next, valid until the next call. Raises as `allowed`.

        The smaller of each logit and a cap, whose sign bit says that the token is forbidden (inf and -inf differ in
        nothing else): a choice between two arrays takes ten times as long where forbidden tokens lie scattered.
        """
        np.copyto(self._caps, self._forbidden())
        np.left_shift(self._caps, 31, out=self._caps)
        np.bitwise_or(self._caps, _INFINITY, out=self._caps)
        return np.minimum(row, self._caps.view(np.float32), out=self._scores)

    def _forbidden(self) -> NDArray[np.uint8]:
        """(vocabulary size,): 1 for tokens that may not come next."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return np.unpackbits(~mask, count=self._size, bitorder="little")

    def take(self, tokens: Sequence[int]) -> None:
        """Go on behind `tokens`. Raises `ConstraintError` if the grammar does not allow them."""
        self._matcher.consume_tokens(list(tokens))
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            why = self._matcher.get_error().split("\n")[0]
            if why.startswith("NoExtension"):
                raise DeadEnd("no token of the model can continue the text as its schema demands")
            raise ConstraintError(f"the grammar cannot go on here ({why}); simplify the schema")


class _Tokens:
    """A vocabulary as `llguidance` wants it, which calls it to tokenize text that follows other text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.eos_token_id = vocabulary.eos
        self.bos_token_id = vocabulary.bos
        self.tokens = vocabulary.pieces
        self.special_token_ids = sorted(vocabulary.control.keys() | vocabulary.end_tokens)

    def __call__(self, text: bytes) -> list[int]:
        tokens: list[int] = self._vocabulary.tokenize_fragment(text, TEXT).tolist()
        return tokens
