"""The shape of the tree: who may import whom, and how large things are.

`python scripts/structure.py` prints a size table and fails if an import goes the wrong way or a file or function is
too large. The rules are those of docs/architecture.md.
"""

import ast
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "trunkline"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70

MAY_IMPORT = {
    "core": {"core"},
    "wire": {"core", "wire"},
    "engine": {"engine", "core", "wire"},
    "gateway": {"gateway", "core", "wire", "__version__"},
    "sim": {"sim", "core", "wire"},
    "bench": {"bench", "wire", "core.types"},
    "trace": {"trace", "wire"},
    "config": {"config", "core.types", "wire.noise"},
}
"""Rooms of the package and what of ours they may import. `cli` may import everything and is imported by nobody."""

CORE_NEVER = {"time", "random", "os", "asyncio", "threading", "socket", "logging", "datetime", "secrets", "pathlib"}
"""A decision reads no clock, draws no randomness, opens nothing."""


@dataclass(frozen=True)
class Size:
    """Lines of one room's files and functions."""

    room: str
    files: list[int]
    functions: list[int]


def room_of(path: Path) -> str:
    """`core` for src/trunkline/core/prefix.py, `cli` for src/trunkline/cli.py."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in a file; `from a import b` counts as `a.b` too, since b may be a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def broken_directions(package: Path = PACKAGE) -> list[str]:
    """Every import that goes the wrong way."""
    broken = []
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).with_suffix("").parts[0]
        for line, module in imports(path):
            where = f"{path.relative_to(package.parent)}:{line}"
            if module.startswith("trunkline.") and room in MAY_IMPORT:
                inside = module.removeprefix("trunkline.")
                if not any(inside == allowed or inside.startswith(allowed + ".") for allowed in MAY_IMPORT[room]):
                    broken.append(f"{where}: {room} must not import {module}")
            if room == "core" and module.split(".")[0] in CORE_NEVER:
                broken.append(f"{where}: core must not import {module.split('.')[0]}")
    return broken


def sizes() -> list[Size]:
    """Sizes by room."""
    rooms: dict[str, Size] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        size = rooms.setdefault(room_of(path), Size(room_of(path), [], []))
        size.files.append(len(path.read_text(encoding="utf-8").splitlines()))
        size.functions.extend(lines for _, lines in functions(path))
    return list(rooms.values())


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """(name, lines) of every function in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def too_large() -> list[str]:
    """Files and functions over the limits."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        name = path.relative_to(ROOT)
        if lines > MAX_FILE_LINES:
            found.append(f"{name}: {lines} lines (limit {MAX_FILE_LINES})")
        found += [
            f"{name}: {f}() has {n} lines (limit {MAX_FUNCTION_LINES})"
            for f, n in functions(path)
            if n > MAX_FUNCTION_LINES
        ]
    return found


def main() -> int:
    """Print the table; 1 if anything is wrong."""
    print(f"{'room':<10}{'files':>6}{'lines':>7}{'median file':>13}{'max':>6}   functions: median, p95, max")
    for size in sizes():
        ranked = sorted(size.functions) or [0]
        p95 = ranked[min(len(ranked) - 1, int(len(ranked) * 0.95))]
        middle = f"{statistics.median(size.files):.0f}"
        print(
            f"{size.room:<10}{len(size.files):>6}{sum(size.files):>7}{middle:>13}{max(size.files):>6}"
            f"   {statistics.median(ranked):.0f}, {p95}, {ranked[-1]}"
        )
    problems = broken_directions() + too_large()
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
