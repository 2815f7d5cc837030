"""Readers turn one turn's visible text into parts: the contract, and the trivial one."""

from collections.abc import Callable, Sequence
from typing import Protocol

from trunkline.wire.outputs import Part, Text


class Reader(Protocol):
    """Reads the visible text of one choice, piece by piece. Parts come as early as they are certain."""

    def feed(self, text: str) -> Sequence[Part]:
        """What `text` (any next piece, also an empty one) made certain."""

    def end(self) -> Sequence[Part]:
        """What is left when the turn is over. Nothing that was fed is lost."""


ReaderFactory = Callable[[], Reader]
"""Makes a reader for each choice."""


class PlainReader:
    """All text is the answer."""

    def feed(self, text: str) -> Sequence[Part]:
        """As `Reader.feed`."""
        return (Text(text),) if text else ()

    def end(self) -> Sequence[Part]:
        """As `Reader.end`."""
        return ()
