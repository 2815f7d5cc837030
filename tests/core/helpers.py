"""Builders for core tests."""

from typing import Any

import numpy as np

from tests.core.fake_engine import FakeEngine
from trunkline.core.types import CoreSettings, Prompt

PER_TOKEN = 1000


def make_settings(**changes: Any) -> CoreSettings:
    """Four slots of 4,096 tokens, host memory for 100,000 tokens."""
    values: dict[str, Any] = {
        "slots": 4,
        "slot_tokens": 4096,
        "host_bytes": 100_000 * PER_TOKEN,
        "bytes_per_token": PER_TOKEN,
        "max_slice_tokens": 256,
    }
    return CoreSettings(**(values | changes))


def make_engine(**changes: Any) -> FakeEngine:
    """An engine over `make_settings`."""
    return FakeEngine(make_settings(**changes))


def prompt(*symbols: int) -> Prompt:
    """A prompt of these symbols."""
    return Prompt(np.array(symbols, np.int32))


def tokens(count: int, start: int = 10) -> list[int]:
    """`count` distinct symbols."""
    return list(range(start, start + count))
