"""An engine on a real model, and what it recorded."""

import asyncio
from collections.abc import Sequence

import numpy as np

from trunkline.core.types import CoreSettings, EndReason, Ints, MemoryKind
from trunkline.engine.embedded import EmbeddedEngine
from trunkline.engine.memory import Slots
from trunkline.engine.model import Model
from trunkline.engine.sampling import Choosers, Sampler
from trunkline.wire.journal import Journal
from trunkline.wire.records import TurnRow
from trunkline.wire.turns import Delta, Ended, Failed, RunHint, Sampling, TurnRequest

LENGTH = 16
CTX = 1024


def make_settings(model: Model, **changes: object) -> CoreSettings:
    values: dict[str, object] = {
        "slots": 4,
        "slot_tokens": CTX,
        "host_bytes": 400 * 10**6,
        "bytes_per_token": max(1, model.kv_bytes_per_token),
        "checkpoint_bytes": model.checkpoint_bytes,
        "memory": MemoryKind.CUTTABLE if model.cuttable else MemoryKind.CHECKPOINTS,
        "step_budget_ms": 50.0,
    }
    return CoreSettings(**(values | changes))  # type: ignore[arg-type]


class Served:
    """An engine, started; `rows` are its turns in the order they ended."""

    def __init__(
        self, model: Model, settings: CoreSettings, journal: Journal | None = None, choosers: Choosers = Sampler
    ) -> None:
        self.rows: list[TurnRow] = []
        self.runs: list[str] = []
        self.slots = Slots(model, slots=settings.slots, slot_tokens=settings.slot_tokens)
        self.engine = EmbeddedEngine(
            model, self.slots, settings, name="m", sink=self._sink, journal=journal, choosers=choosers
        )
        self.engine.start()

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()
        self.slots.close()

    def _sink(self, salt: str, run: str, parent: str | None, origin: str, row: TurnRow) -> None:
        self.rows.append(row)
        self.runs.append(run)

    async def turn(
        self, tokens: Ints, run: str | None = None, length: int = LENGTH, *, seed: int | None = None
    ) -> list[int]:
        """One whole turn (greedy unless seeded); returns what it generated."""
        generated: list[int] = []
        async for event in self.engine.generate(make_request(tokens, run, length, seed)):
            assert not isinstance(event, Failed), event
            if isinstance(event, Delta):
                generated += event.tokens
            if isinstance(event, Ended):
                assert event.reason is EndReason.LENGTH
        return generated

    def serve(
        self, tokens: Ints, run: str | None = None, length: int = LENGTH, *, seed: int | None = None
    ) -> list[int]:
        """`turn`, from outside an event loop."""
        return asyncio.run(self.turn(tokens, run, length, seed=seed))

    def together(self, prompts: Sequence[Ints], length: int = LENGTH) -> list[list[int]]:
        """One turn for each prompt, all at once."""

        async def all_turns() -> list[list[int]]:
            return await asyncio.gather(*(self.turn(prompt, None, length) for prompt in prompts))

        return asyncio.run(all_turns())


def make_request(
    tokens: Ints, run: str | None = None, length: int = LENGTH, seed: int | None = None, text: str | None = None
) -> TurnRequest:
    """A turn of exactly `length` tokens."""
    sampling = Sampling(temperature=0.0 if seed is None else 1.0, seed=seed, ignore_eos=True)
    return TurnRequest(salt="", tokens=tokens, text=text, max_tokens=length, hint=RunHint(run=run), sampling=sampling)


def some_tokens(count: int, seed: int = 0) -> Ints:
    """`count` arbitrary ordinary token ids of any vocabulary."""
    return np.random.default_rng(seed).integers(20, 200, count, np.int32)
