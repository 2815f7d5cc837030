"""A measured node as a file: what `trunkline calibrate` writes and `trunkline sim --node` reads."""

from pathlib import Path

import msgspec

from trunkline.core.types import CoreSettings
from trunkline.sim.costs import MeasuredCosts


class NodeFileError(ValueError):
    """A file that should hold a measured node does not."""


class NodeFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a node was set up and what its steps cost."""

    settings: CoreSettings
    costs: MeasuredCosts


def read_node(path: Path) -> NodeFile:
    """What `write_node` wrote. Raises `NodeFileError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=NodeFile)
    except OSError as error:
        raise NodeFileError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise NodeFileError(f"{path}: not what `trunkline calibrate` writes: {error}") from error


def write_node(path: Path, node: NodeFile) -> None:
    """Write a node as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(node), indent=2) + b"\n")
