"""The walls of the house: import directions and sizes."""

from pathlib import Path

import pytest
from scripts import structure


def test_no_import_goes_the_wrong_way() -> None:
    assert structure.broken_directions() == []


def test_no_file_or_function_is_too_large() -> None:
    assert structure.too_large() == []


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("core", "import time"),
        ("core", "from random import Random"),
        ("core", "from trunkline.engine import loop"),
        ("core", "from trunkline.wire.records import TurnRow"),
        ("engine", "from trunkline.gateway.errors import ApiError"),
        ("gateway", "import trunkline.engine.loop"),
        ("bench", "from trunkline.gateway import app"),
        ("wire", "from trunkline.config import ServeSettings"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, room: str, line: str) -> None:
    package = tmp_path / "trunkline"
    (package / room).mkdir(parents=True)
    (package / room / "part.py").write_text(f"{line}\n")
    assert len(structure.broken_directions(package)) == 1
