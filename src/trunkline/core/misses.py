"""Why prompt tokens had to be computed: every novel token of a turn gets a reason."""

from collections.abc import Iterator
from itertools import groupby

from trunkline.core.turns import Turn
from trunkline.core.types import CoreSettings, MemoryKind, Miss, MissReason, Sharing


def explain(turn: Turn, settings: CoreSettings) -> list[Miss]:
    """The misses of a turn that was just placed: their tokens sum to its novel tokens.

    What had arrived before and was not there any more is attributed node by node: `EVICTED` with the decision that
    dropped it, `NOT_YET_COMPUTED` where another turn brought it and nobody had computed it. What had not arrived is an
    edit of the run's own history, a restart's loss, or new.
    """
    held, prompt, arrived = turn.computed, turn.prompt_tokens, turn.matched_tokens
    blanket = _blanket(turn, settings)
    if blanket is not None:
        found = [Miss(blanket, min(arrived, prompt)), *_new(turn, min(arrived, prompt))]
    else:
        found = [*_arrived(turn, settings, held, min(arrived, prompt)), *_new(turn, max(held, arrived))]
    return _merged(found)


def _blanket(turn: Turn, settings: CoreSettings) -> MissReason | None:
    if settings.sharing is Sharing.OFF:
        return MissReason.SHARING_OFF
    return MissReason.PROMPT_LOGPROBS if turn.fact.needs_prompt_logits else None


def _arrived(turn: Turn, settings: CoreSettings, held: int, until: int) -> Iterator[Miss]:
    """Tokens [held, until) had arrived before: what became of them?"""
    if held == turn.prompt_tokens - 1 < until:
        yield Miss(MissReason.LAST_TOKEN, 1, held)
        return
    for node in turn.leaf.path():
        start, end = max(node.start, held), min(node.end, until)
        if start >= end:
            continue
        if node.death is not None:
            yield Miss(node.death.reason, end - start, start, node.death.decision, node.death.at_ms)
        elif settings.memory is MemoryKind.CHECKPOINTS:
            yield Miss(MissReason.NO_CHECKPOINT, end - start, start)
        else:
            yield Miss(MissReason.NOT_YET_COMPUTED, end - start, start)


def _new(turn: Turn, start: int) -> Iterator[Miss]:
    """Tokens [start, prompt) had not arrived before."""
    left = turn.prompt_tokens - start
    if turn.edited is not None and left > 0:
        edit = turn.edited
        tokens = min(left, max(0, edit.history_end - start))
        if tokens:
            reason = MissReason.COMPACTION if edit.shorter else MissReason.HISTORY_EDITED
            yield Miss(reason, tokens, start, was=edit.was, now=edit.now)
        start, left = start + tokens, left - tokens
    restarted = min(left, max(0, turn.lost_tokens - start))
    if restarted:
        yield Miss(MissReason.NODE_RESTARTED, restarted, start)
    if left > restarted:
        yield Miss(MissReason.NEVER_SEEN, left - restarted, start + restarted)


def _merged(misses: list[Miss]) -> list[Miss]:
    merged = []
    for (reason, decision), group in groupby((m for m in misses if m.tokens), key=lambda m: (m.reason, m.decision)):
        first, *rest = group
        tokens = first.tokens + sum(miss.tokens for miss in rest)
        merged.append(Miss(reason, tokens, first.at_token, decision, first.at_ms, first.was, first.now))
    return merged
