"""A trace's figures for a terminal."""

from trunkline.wire.figures import Figures, Quantiles
from trunkline.wire.tables import NOTHING, table

HEADER = ("", "count", "p50", "p90", "p99", "max")


def figures_table(figures: Figures) -> str:
    """Sums in lines, then a table of distributions; what a trace does not tell is not shown."""
    lines = [
        f"sessions     {figures.sessions:,} with {figures.turns:,} turns",
        f"sub-agents   {figures.sub_agents:,} in {figures.sessions_with_sub_agents:,} sessions",
        f"turns        {figures.tool_turns:,} answer a tool, {figures.user_turns:,} a user, "
        f"{figures.turns - figures.tool_turns - figures.user_turns:,} unknown",
        f"compactions  {figures.compactions:,} (a prompt under half of the one before it)",
        f"input        {figures.total_input_tokens:,} tokens, of which an infinite cache would hit "
        f"{_percent(figures.infinite_cache_hit)}",
        f"output       {figures.total_output_tokens:,} tokens",
    ]
    if figures.with_tools:
        lines.append(f"tools        {figures.with_tools:,} runs have tool schemas")
    if figures.labelled:
        lines.append(f"labels       {figures.solved:,} of {figures.labelled:,} labelled runs were solved")
    rows = [
        ("turns a session", figures.turns_a_session),
        ("input, tokens", figures.input_tokens),
        ("new input, tokens", figures.new_tokens),
        ("output, tokens", figures.output_tokens),
        ("gap after a tool, s", figures.gap_after_tool_s),
        ("gap after a user, s", figures.gap_after_user_s),
        ("gap, s", figures.gap_unknown_kind_s),
    ]
    lines += ["", table(HEADER, [(name, *_cells(spread)) for name, spread in rows if spread is not None])]
    if figures.estimated:
        lines += ["", "Token counts of text are estimates (a token for 4 bytes); shared prefixes are whole messages."]
    return "\n".join(lines)


def _cells(spread: Quantiles) -> tuple[str, ...]:
    return f"{spread.count:,}", *(_number(value) for value in (spread.p50, spread.p90, spread.p99, spread.max))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.1%}"
