"""Makes other traces of a trace: smaller sizes, shorter waits, fewer sessions. What prompts share stays exact."""

from collections.abc import Collection, Iterable, Iterator

from msgspec.structs import replace

from trunkline.wire.traces import BlocksPrompt, MessagesPrompt, RunTrace, Session, TurnTrace


def scale(run: RunTrace, divisor: int, output_divisor: int | None = None) -> RunTrace:
    """The same run with smaller blocks: block, input and output sizes divided, block ids and so prefixes kept.

    Outputs are divided by `output_divisor` if given. Raises ValueError for prompts that are not blocks and for a
    divisor that does not divide the block.
    """
    if divisor < 1 or run.block_tokens % divisor or not run.block_tokens:
        raise ValueError(f"cannot divide a block of {run.block_tokens} tokens by {divisor}; only block traces scale")
    smaller = output_divisor or divisor

    def shrink(turn: TurnTrace) -> TurnTrace:
        assert isinstance(turn.prompt, BlocksPrompt)
        prompt = replace(turn.prompt, tail_tokens=turn.prompt.tail_tokens // divisor)
        output = None if turn.output_tokens is None else max(1, turn.output_tokens // smaller)
        return replace(turn, prompt=prompt, output_tokens=output)

    return replace(run, turns=tuple(map(shrink, run.turns)), block_tokens=run.block_tokens // divisor)


def cap_gaps(run: RunTrace, cap_ms: float) -> RunTrace:
    """The same run with no tool gap over `cap_ms`. Recorded arrivals no longer fit its gaps and are left out."""

    def shorten(turn: TurnTrace) -> TurnTrace:
        return replace(turn, at_ms=None, gap_ms=None if turn.gap_ms is None else min(turn.gap_ms, cap_ms))

    return replace(run, turns=tuple(map(shorten, run.turns)))


def slice_sessions(
    sessions: Iterable[Session],
    *,
    first: int | None = None,
    ids: Collection[str] = (),
    between_ms: tuple[float, float] | None = None,
    max_context: int | None = None,
) -> Iterator[Session]:
    """Sessions that pass every filter given, at most `first`.

    `ids` names roots; `between_ms` is a half-open range of beginnings (`begin_ms`); `max_context` bounds the tokens of
    every turn, prompt and output. Raises ValueError where a session lacks what a filter asks for.
    """
    left = first
    for session in sessions:
        if left is not None and left <= 0:
            return
        root = session[0]
        if ids and root.id not in ids:
            continue
        if between_ms is not None:
            if root.begin_ms is None:
                raise ValueError(f"run {root.id!r} does not say when it began")
            if not between_ms[0] <= root.begin_ms < between_ms[1]:
                continue
        if max_context is not None and longest_turn(session) > max_context:
            continue
        left = None if left is None else left - 1
        yield session


def longest_turn(session: Session) -> int:
    """Tokens of the longest turn, prompt and output. Raises ValueError for text, whose length depends on the model."""
    longest = 0
    for run in session:
        for index, turn in enumerate(run.turns):
            if isinstance(turn.prompt, MessagesPrompt):
                raise ValueError(f"run {run.id!r} is text: its length in tokens depends on the model")
            longest = max(longest, run.prompt_tokens(index) + (turn.output_tokens or 0))
    return longest
