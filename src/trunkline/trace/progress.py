"""Shows how far a long read has come."""

import sys
import time
from collections.abc import Iterable, Iterator

from trunkline.wire.traces import Session

EVERY_S = 2.0


def watched(sessions: Iterable[Session]) -> Iterator[Session]:
    """The same sessions; a line on stderr says every two seconds how many have come."""
    began = shown = time.monotonic()
    turns = 0
    for count, session in enumerate(sessions, 1):
        turns += sum(len(run.turns) for run in session)
        if time.monotonic() - shown >= EVERY_S:
            shown = time.monotonic()
            print(f"\r{count:,} sessions, {turns:,} turns, {shown - began:.0f} s ", end="", file=sys.stderr, flush=True)
        yield session
    if shown != began:
        print(file=sys.stderr)
