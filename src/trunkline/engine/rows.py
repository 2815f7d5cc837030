"""Turn records in the form that is stored and shown."""

from trunkline.core.types import Ints, Miss, MissReason, Relation, TurnRecord
from trunkline.engine.live import LiveTurn
from trunkline.engine.tokens import Vocabulary
from trunkline.wire.culprits import explain_difference
from trunkline.wire.records import DiffRow, MissRow, TurnRow

BEFORE_TOKENS = 48
"""How many of the tokens that both sides share are shown before a difference."""


def turn_row(record: TurnRecord, live: LiveTurn, node: str, vocabulary: Vocabulary) -> TurnRow:
    """The `record` of the turn `live`, for people and machines.

    A turn that ended before it was placed, or before its first token, spent the rest of its time there.
    """
    assert record.ended_ms is not None
    assert record.reason is not None
    placed = record.placed_ms if record.placed_ms is not None else record.ended_ms
    constraint = live.request.constraint
    first = record.first_token_ms if record.first_token_ms is not None else record.ended_ms
    if record.placed_ms is None:
        misses: tuple[MissRow, ...] = (MissRow(reason=MissReason.ENDED_IN_QUEUE, tokens=record.prompt_tokens),)
    else:
        misses = tuple(_miss_row(miss, record, vocabulary) for miss in record.misses)
    return TurnRow(
        index=record.index,
        at=live.at,
        node=node,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        novel_tokens=record.novel_tokens,
        reusable_tokens=record.reusable_tokens if record.placed_ms is not None else 0,
        completion_tokens=record.completion_tokens,
        misses=misses,
        queue_ms=placed - record.arrived_ms,
        prefill_ms=first - placed,
        decode_ms=record.ended_ms - first,
        latency_ms=record.ended_ms - record.arrived_ms,
        tool_gap_ms=record.tool_gap_ms,
        finish_reason=record.reason.value,
        cost_usd=0.0,
        relation=record.relation,
        shared_tokens=record.shared_tokens,
        passages=record.passages,
        prompt_digest=record.digest,
        normalized=dict(live.request.normalized),
        diff=_diff_row(record, live.prompt, vocabulary),
        constraint=constraint.kind if constraint is not None else None,
        forced_tokens=live.generation.forced_tokens,
        saved_passes=max(0, record.completion_tokens - record.passes),
        mask_ms=live.generation.mask_ms,
        admission_ms=record.waited_ms,
    )


def _diff_row(record: TurnRecord, prompt: Ints, vocabulary: Vocabulary) -> DiffRow | None:
    difference = record.difference
    if difference is None:
        return None
    at = difference.at_token
    return explain_difference(
        run=difference.run,
        at_token=at,
        before=vocabulary.detokenize(prompt[max(0, at - BEFORE_TOKENS) : at].tolist()),
        was=vocabulary.detokenize(difference.was.tolist()),
        now=vocabulary.detokenize(difference.now.tolist()),
        was_tokens=difference.was_tokens,
        now_tokens=difference.now_tokens,
        compacted=record.relation is Relation.COMPACTION,
    )


def _miss_row(miss: Miss, record: TurnRecord, vocabulary: Vocabulary) -> MissRow:
    match miss.reason:
        case MissReason.HISTORY_EDITED | MissReason.COMPACTION:
            return _edit_row(miss, vocabulary)
        case MissReason.EVICTED | MissReason.CACHE_RESET | MissReason.COMPUTE_FAILED if miss.at_ms is not None:
            ago = max(0.0, record.arrived_ms - miss.at_ms) / 1000
            return MissRow(
                reason=miss.reason, tokens=miss.tokens, detail=f"decision {miss.decision}, {ago:.1f} s before"
            )
        case _:
            return MissRow(reason=miss.reason, tokens=miss.tokens)


def _edit_row(miss: Miss, vocabulary: Vocabulary) -> MissRow:
    """An edit shows both texts. The same text in other tokens, or in other white space, is nobody's edit."""
    was, now = vocabulary.detokenize(miss.was), vocabulary.detokenize(miss.now)
    reason = miss.reason
    if was and now and _agree(was, now):
        reason = MissReason.TOKENIZER_DRIFT
    elif was.strip() and now.strip() and _agree(was.lstrip(), now.lstrip()):
        reason = MissReason.TEMPLATE_DRIFT
    return MissRow(reason=reason, tokens=miss.tokens, detail=f"at token {miss.at_token}: {was!r} became {now!r}")


def _agree(a: str, b: str) -> bool:
    return a.startswith(b) or b.startswith(a)
