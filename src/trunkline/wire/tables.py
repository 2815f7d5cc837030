"""Run records as text tables for a terminal: what `trunkline runs` and `trunkline run ID` print."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from trunkline.wire.culprits import ADVICE, Culprit
from trunkline.wire.records import MissRow, RunRow, RunView, TurnRow

GAP = "  "
NOTHING = "-"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> str:
    """Aligned columns with a rule under the header. Columns in `left` are text, the others are numbers."""
    header, rows = list(header), [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return GAP.join(aligned).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


def runs_table(runs: Sequence[RunRow]) -> str:
    """One line a run, in the given order."""
    if not runs:
        return "no runs yet"
    header = ("run", "state", "turns", "prompt", "cached", "hit", "reuse", "out", "last turn", "node", "parent", "name")
    rows = [
        (
            run.id,
            run.state,
            str(run.turns),
            f"{run.prompt_tokens:,}",
            f"{run.cached_tokens:,}",
            percent(run.cached_tokens, run.prompt_tokens),
            percent(run.cached_tokens, run.reusable_tokens),
            f"{run.completion_tokens:,}",
            moment(run.last_at),
            run.node or NOTHING,
            run.parent or NOTHING,
            run.name or NOTHING,
        )
        for run in runs
    ]
    return table(header, rows, left=(0, 1, 8, 9, 10, 11))


def run_table(run: RunView) -> str:
    """One run: what it is, a line a turn with the reason for every miss, and its sums."""
    return "\n".join([*_heading(run), "", turns_table(run.turns), *_footnotes(run.turns), "", _sums(run)])


def turns_table(turns: Sequence[TurnRow]) -> str:
    """One line a turn. Times are milliseconds. `forced`: tokens that a grammar forced, shown if it forced any."""
    if not turns:
        return "no turns yet"
    forcing = any(turn.forced_tokens for turn in turns)
    times = ("gap", "queue", "prefill", "decode", "total")
    numbers = ("turn", "prompt", "cached", "novel", "out", *(["forced"] * forcing), *times)
    header = (*numbers, "end", "relation", "misses")
    rows = [
        (
            str(turn.index),
            f"{turn.prompt_tokens:,}",
            f"{turn.cached_tokens:,}",
            f"{turn.novel_tokens:,}",
            f"{turn.completion_tokens:,}",
            *([f"{turn.forced_tokens:,}"] * forcing),
            milliseconds(turn.tool_gap_ms),
            milliseconds(turn.queue_ms),
            milliseconds(turn.prefill_ms),
            milliseconds(turn.decode_ms),
            milliseconds(turn.latency_ms),
            turn.finish_reason,
            turn.relation or NOTHING,
            misses(turn.misses),
        )
        for turn in turns
    ]
    return table(header, rows, left=tuple(range(len(numbers), len(header))))


def misses(rows: Sequence[MissRow]) -> str:
    """Tokens and reason of every miss, with its detail."""
    if not rows:
        return NOTHING
    return "; ".join(f"{row.tokens:,} {row.reason}{f' ({row.detail})' if row.detail else ''}" for row in rows)


def printable(text: str) -> str:
    """`text` without what could steer a terminal: names and details come from clients."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def percent(part: int, whole: int) -> str:
    """`part` of `whole`, rounded down, so that 100% means all of it."""
    return NOTHING if whole == 0 else f"{100 * part // whole}%"


def milliseconds(value: float | None) -> str:
    """Whole milliseconds."""
    return NOTHING if value is None else f"{value:,.0f}"


def moment(at: float) -> str:
    """Unix seconds as local date and time."""
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")


def _heading(run: RunView) -> list[str]:
    named = f" ({run.name})" if run.name else ""
    lines = [f"run {run.id}{named}: {run.state}, on {run.node or 'no node yet'}, named by {run.origin}"]
    waited_ms = sum(turn.admission_ms for turn in run.turns)
    if waited_ms:
        lines.append(f"waited {milliseconds(waited_ms)} ms to be let in")
    if run.session and run.session != run.id:
        lines.append(f"in session {run.session}")
    if run.parent:
        lines.append(f"branch of {run.parent}")
    if run.children:
        lines.append(f"branches: {', '.join(run.children)}")
    if run.objective:
        lines.append(f"objective: {run.objective}")
    lines.append(f"from {moment(run.started_at)} to {moment(run.last_at)}")
    return [printable(line) for line in lines]


def _footnotes(turns: Sequence[TurnRow]) -> list[str]:
    """What a line has no room for: prompts that were not rendered as sent, and what a relation rests on."""
    notes = []
    for turn in turns:
        if turn.normalized:
            notes.append(f"turn {turn.index}: normalized {_counts(turn.normalized)}")
        if turn.passages:
            notes.append(
                f"turn {turn.index}: {turn.relation}: {turn.shared_tokens:,} tokens in front were known, and "
                f"{turn.passages} passages further on are this run's or its parent's own"
            )
    return [""] * bool(notes) + [printable(note) for note in notes]


def diff_text(run: RunView, turn: TurnRow) -> str:
    """Where one turn of `run` left the prefix that it should have shared, and what likely made it."""
    diff = turn.diff
    if diff is None:
        return f"turn {turn.index} left no prefix that it should have shared"
    whose = "its run's own history" if diff.run == run.id else f"run {diff.run}" if diff.run else "an earlier prompt"
    lines = [
        f"turn {turn.index} left {whose} at token {diff.at_token:,}: {diff.was_tokens:,} tokens went on there, "
        f"{diff.now_tokens:,} go on now",
        f"likely culprit: {diff.culprit} ({ADVICE[Culprit(diff.culprit)]})",
        "",
        f"   {_spelled(diff.before)}",
        f" - {_spelled(diff.was)}",
        f" + {_spelled(diff.now)}",
        f"   {_spelled(diff.after)}" if diff.after else "   (they do not go on alike within what is kept)",
    ]
    return "\n".join(printable(line) for line in lines)


def _spelled(text: str) -> str:
    """`text` on one line."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in sorted(counts.items()))


def _sums(run: RunView) -> str:
    sums = run.totals
    return (
        f"{sums.turns} turns, {sums.prompt_tokens:,} prompt tokens, {sums.cached_tokens:,} cached "
        f"({percent(sums.cached_tokens, sums.prompt_tokens)} of the prompts, "
        f"{percent(sums.cached_tokens, sums.reusable_tokens)} of what was reusable), "
        f"{sums.completion_tokens:,} generated, {sums.cost_usd:.4f} USD"
    )
