"""What the documents tell people to type works."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trunkline import cli

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def shell_lines() -> list[tuple[str, str]]:
    """(page, command) of every line in a shell block of the documents, without comments."""
    lines = []
    for page in PAGES:
        for block in re.findall(r"```(?:sh|bash)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                command = line.split(" #")[0].strip()
                if command:
                    lines.append((page.name, command))
    return lines


OURS = [(page, line) for page, line in shell_lines() if line.startswith("trunkline ")]
MAKES = [(page, line) for page, line in shell_lines() if line.startswith("make ")]
SCRIPTS = sorted(
    {
        script
        for page in PAGES
        for script in re.findall(r"python3? ((?:benchmarks|scripts|examples)/\w+\.py)", page.read_text())
    }
)


def test_the_readme_shows_commands_of_every_kind() -> None:
    assert any(page == "README.md" for page, _ in OURS)
    assert any(page == "README.md" for page, _ in MAKES)
    assert SCRIPTS


@pytest.mark.parametrize(("page", "line"), OURS)
def test_a_documented_command_is_understood(page: str, line: str) -> None:
    args = cli.parser().parse_args(shlex.split(line)[1:])
    assert callable(args.run)


@pytest.mark.parametrize(("page", "line"), MAKES)
def test_a_documented_make_target_exists(page: str, line: str) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert line.split()[1] in targets


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_documented_script_exists_and_explains_itself(script: str) -> None:
    explanation = ast.get_docstring(ast.parse((ROOT / script).read_text()))
    assert explanation is not None
    if "Needs `" in explanation:
        # It runs beside a third-party harness, in that harness's own environment.
        assert f"python {script}" in explanation
        return
    shown = subprocess.run(
        [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert shown.returncode == 0, shown.stderr
    assert "usage" in shown.stdout


def test_every_relative_link_leads_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert broken == []


def test_every_setting_of_serve_is_in_its_help() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "trunkline.cli", "serve", "--help"], capture_output=True, text=True, check=True
    )
    for flag in ("--host", "--port", "--model", "--ctx", "--kv-bytes", "--host-bytes", "--disk-bytes", "--data-dir"):
        assert flag in shown.stdout


def test_the_demo_shows_one_run_with_a_branch_and_all_its_history_reused() -> None:
    shown = subprocess.run(
        [sys.executable, "scripts/demo.py"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=280
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("demo: trunkline run run-") == 2
    assert "branch of run-" in shown.stdout
    reuse = [int(share) for share in re.findall(r"(\d+)% of what was reusable", shown.stdout)]
    assert len(reuse) == 2
    assert min(reuse) >= 99
