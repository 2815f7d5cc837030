"""A sweep's results, and the page that shows them: curves over load and over time, as SVG without anything to fetch."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import floor, log10
from typing import Any

import msgspec

from trunkline.core.types import CoreSettings
from trunkline.sim.figures import Figures, Sample

WIDTH, HEIGHT = 420, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 28, 34
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a")
STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2em auto;max-width:920px;color:#1f2328;background:#fff}
svg{margin:4px} text{font:11px system-ui,sans-serif;fill:#57606a} .title{font-weight:600;fill:#1f2328}
table{border-collapse:collapse;margin:1em 0} td,th{padding:2px 10px;text-align:right;border-bottom:1px solid #d0d7de}
"""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One load's figures, and the node over time."""

    load: float
    figures: Figures
    timeline: list[Sample]
    plans: int
    steps: int
    simulated_in_s: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` holds."""

    trace: str
    seed: int
    settings: CoreSettings
    results: list[Result]


Line = tuple[str, list[tuple[float, float]]]
"""A curve: its name and its points."""


def page(report: Report) -> str:
    """The whole page."""
    results, settings = report.results, report.settings
    about = (
        f"{settings.slots} slots of {settings.slot_tokens:,} tokens, {settings.host_bytes / 1e9:,.1f} GB of host "
        f"memory, {settings.eviction} eviction, {settings.order} order, sharing {settings.sharing}; seed {report.seed}"
    )
    over_load = "".join(chart(title, unit, _over_load(results, names)) for title, unit, names in LOAD_CHARTS)
    over_time = "".join(
        chart(title, unit, [(f"load {r.load:g}", _over_time(r.timeline, value)) for r in results[-len(COLOURS) :]])
        for title, unit, value in TIME_CHARTS
    )
    return (
        f"<!doctype html><meta charset=utf-8><title>{escape(report.trace)}</title><style>{STYLE}</style>"
        f"<h1>{escape(report.trace)}</h1><p>{escape(about)}</p>{_table(results)}"
        f"<h2>Over load</h2>{over_load}<h2>Over time</h2>{over_time}\n"
    )


LOAD_CHARTS = (
    ("Run completion", "s", {"mean": "completion_s.mean", "p95": "completion_s.p95"}),
    ("Reuse", "share", {"cached / reusable": "reuse", "cached / prompt": "cached_share"}),
    ("p95 step latency", "ms", {"all": "latency_ms.p95", "short steps": "short_latency_ms.p95"}),
    ("Goodput", "runs/h", {"within the stretch": "goodput_per_h", "completed": "completed_per_h"}),
    ("Stretch", "x ideal", {"mean": "stretch.mean", "p95": "stretch.p95"}),
    ("Interactivity", "tokens/s a run", {"p90": "interactivity.p90", "p99": "interactivity.p99"}),
)
"""Title, unit, and by curve where its value is in `Figures`."""
TIME_CHARTS: tuple[tuple[str, str, Callable[[Sample], float]], ...] = (
    ("Running turns", "turns", lambda s: float(s.running)),
    ("Queued turns", "turns", lambda s: float(s.queued)),
    ("KV in slots", "tokens", lambda s: float(s.slot_tokens)),
    ("KV in host memory", "GB", lambda s: s.host_bytes / 1e9),
)


def _over_load(results: Sequence[Result], paths: Mapping[str, str]) -> list[Line]:
    lines = []
    for name, path in paths.items():
        points = [(result.load, _value(result.figures, path)) for result in results]
        lines.append((name, [(load, y) for load, y in points if y is not None]))
    return lines


def _value(figures: Figures, path: str) -> float | None:
    found: Any = figures
    for name in path.split("."):
        found = None if found is None else getattr(found, name)
    return None if found is None else float(found)


def _over_time(samples: Sequence[Sample], value: Callable[[Sample], float]) -> list[tuple[float, float]]:
    return [(sample.at_ms / 3.6e6, value(sample)) for sample in samples]


def chart(title: str, unit: str, lines: Sequence[Line]) -> str:
    """One SVG chart from 0 up; a curve of one point is a dot."""
    points = [point for _, line in lines for point in line]
    across = ticks(max((x for x, _ in points), default=1.0))
    up = ticks(max((y for _, y in points), default=1.0))

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + (WIDTH - LEFT - RIGHT) * x / across[-1], HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / up[-1]

    parts = [f"<text class=title x={LEFT} y=14>{escape(title)}, {escape(unit)}</text>"]
    for tick in up:
        x, y = at(0, tick)
        parts.append(f'<path d="M{x:.1f} {y:.1f}H{WIDTH - RIGHT}" stroke="#eaeef2"/>')
        parts.append(f"<text x={x - 6:.1f} y={y + 4:.1f} text-anchor=end>{tick:,g}</text>")
    for tick in across:
        x, y = at(tick, 0)
        parts.append(f"<text x={x:.1f} y={y + 15:.1f} text-anchor=middle>{tick:,g}</text>")
    for number, (name, line) in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(_curve([at(x, y) for x, y in line], colour, dots=len(line) <= 16))
        parts.append(f'<text x={LEFT + 100 * number} y={HEIGHT - 4} style="fill:{colour}">{escape(name)}</text>')
    return f'<svg width={WIDTH} height={HEIGHT} role=img aria-label="{escape(title)}">{"".join(parts)}</svg>'


def _curve(places: Sequence[tuple[float, float]], colour: str, *, dots: bool) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    marks = "".join(f'<circle cx={x:.1f} cy={y:.1f} r=2.5 fill="{colour}"/>' for x, y in places) if dots else ""
    return f'<polyline points="{path}" fill=none stroke="{colour}" stroke-width=1.6 />{marks}'


def ticks(most: float) -> list[float]:
    """From 0 to a round number that is at least `most`, in 3 to 6 steps."""
    if most <= 0:
        return [0.0, 1.0]
    unit = 10.0 ** floor(log10(most))
    step = next(unit * part for part in (0.2, 0.25, 0.5, 1.0, 2.0) if unit * part * 5 >= most)
    count = -int(-most // step)
    return [round(step * n, 12) for n in range(max(1, count) + 1)]


def _table(results: Sequence[Result]) -> str:
    names = ("load", "completed", "failed", "refusals", "reuse", "p95 step, ms", "stretch", "goodput, runs/h", "broken")
    rows = [f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in names)}</tr>"]
    for result in results:
        f = result.figures
        cells = (
            f"{result.load:g}",
            f"{f.completed_runs} of {f.runs}",
            str(f.failed_runs),
            str(f.refusals),
            "-" if f.reuse is None else f"{f.reuse:.2%}",
            "-" if f.latency_ms is None else f"{f.latency_ms.p95:,.0f}",
            "-" if f.stretch is None else f"{f.stretch.mean:.2f}",
            f"{f.goodput_per_h:,.1f}",
            str(f.broken_promises),
        )
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f"<table>{''.join(rows)}</table>"
