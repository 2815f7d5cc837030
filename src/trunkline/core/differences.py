"""Where a prompt leaves the prefix that it should have shared, and what was there instead.

A turn that goes on in its run shares all of it. Two kinds do not: a turn whose client rewrote the run's history, and
the first turn of a run that resembles another but for something small near the front (an id, a date). For the first,
the run's own trajectory is what it left; for the second, the nearest sibling is: the one whose text the prompt falls in
with again soonest. A prompt that never falls in with a sibling is another prompt, and nothing was missed.
"""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from trunkline.core.prefix import Node, common_ancestor
from trunkline.core.runs import Run
from trunkline.core.slots import path_ids
from trunkline.core.types import Difference, Ints

SHOWN_SYMBOLS = 512
"""How many symbols of each side are kept, and how far a sibling is looked at."""

SIBLINGS = 8
"""How many siblings are looked at, the latest first: a bound on work, where a thousand prompts differ in one place."""

GRAM = 12
"""So many equal symbols in a row are no accident."""


def left_own_history(run: Run, leaf: Node) -> Difference | None:
    """What a prompt that ends at `leaf` left of its run's trajectory, given `run` as its last turn left it."""
    if run.leaf is None or leaf.weights is not None:
        return None
    shared = common_ancestor(run.leaf, path_ids(leaf))
    at = shared.end if shared is not None else 0
    was = _symbols(node for node in run.leaf.path() if node.start >= at)
    return _difference(run.key.run, at, was, leaf, run.leaf.end - at)


def left_sibling(leaf: Node, matched_tokens: int) -> Difference | None:
    """What the first prompt of a run, which ends at `leaf`, left of the sibling that it falls in with again soonest.

    `matched_tokens` is how far the prompt had arrived before. Prompts of weighted symbols have no text to compare.
    """
    own = next((node for node in leaf.path() if node.start == matched_tokens), None)
    if own is None or leaf.weights is not None:
        return None
    assert own.parent is not None
    now = _symbols(node for node in leaf.path() if node.start >= own.start)
    latest = (child for child in reversed(own.parent.children.values()) if child is not own)
    paths = [_latest_path(child) for child in islice(latest, SIBLINGS)]
    texts = [_symbols(path) for path in paths]
    nearest = min(
        ((after, nth) for nth, was in enumerate(texts) if (after := _falls_in(was, now)) is not None), default=None
    )
    if nearest is None:
        return None
    path = paths[nearest[1]]
    owner = next((key.run for node in path for key in (*node.leaves, *node.prompt_ends)), "")
    return _difference(owner, own.start, texts[nearest[1]], leaf, path[-1].end - own.start)


def _difference(run: str, at: int, was: Ints, leaf: Node, was_tokens: int) -> Difference:
    now = _symbols(node for node in leaf.path() if node.start >= at)
    return Difference(run, at, was, now, was_tokens, leaf.end - at)


def _latest_path(node: Node) -> list[Node]:
    """From `node` down to a leaf, always by the child that came last."""
    path = [node]
    while path[-1].children:
        path.append(next(reversed(path[-1].children.values())))
    return path


def _symbols(nodes: "Iterator[Node] | list[Node]") -> Ints:
    """The first symbols of nodes that follow each other."""
    parts: list[Ints] = []
    left = SHOWN_SYMBOLS
    for node in nodes:
        parts.append(node.symbols[:left])
        left -= len(parts[-1])
        if left == 0:
            break
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _falls_in(was: Ints, now: Ints) -> int | None:
    """How many symbols of both sides are passed before `now` goes on like `was`; None if it never does."""
    places: dict[bytes, int] = {}
    for at, gram in enumerate(_grams(was)):
        places.setdefault(gram, at)
    return next((at + places[gram] for at, gram in enumerate(_grams(now)) if gram in places), None)


def _grams(symbols: Ints) -> Iterator[bytes]:
    data, width = symbols.tobytes(), symbols.itemsize
    return (data[at : at + GRAM * width] for at in range(0, len(data) - (GRAM - 1) * width, width))
