"""The README's matrix of clients and what is pinned for their tests are the same."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
PINS = {re.split(r"[\[=]", line)[0]: line.partition("==")[2] for line in GROUPS["compat"]}
CLIENTS = sorted(PINS.keys() - {"httpx", "pytest", "pytest-timeout"})
NAMES = {"openai-agents": "OpenAI Agents SDK", "langgraph": "LangGraph", "pydantic-ai-slim": "pydantic-ai"}
"""What the matrix calls a package, where it does not go by the package's own name."""


@pytest.mark.parametrize("client", CLIENTS)
def test_the_matrix_names_the_version_that_is_tested(client: str) -> None:
    matrix = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    row = re.compile(rf"`?{re.escape(NAMES.get(client, client))}`? {re.escape(PINS[client])}\b")
    assert any(row.search(line) for line in matrix)


def test_what_the_clients_pull_in_is_pinned_and_agrees() -> None:
    lines = (ROOT / "tests/compat/constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.lower().split("==") for line in lines if not line.startswith("#"))
    assert {name: pinned.get(name) for name in PINS} == PINS
