"""The embedded engine as the gateway sees it: a model on this machine, one thread of its own, no set-up."""

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from trunkline.core.facts import RunRestored
from trunkline.core.types import CoreSettings, Ints, RunKey, RunOrigin
from trunkline.engine.entry import Door
from trunkline.engine.generation import Generation
from trunkline.engine.grammar import Grammars, Guide
from trunkline.engine.history import History
from trunkline.engine.live import LiveTurn
from trunkline.engine.loop import EngineLoop, Sink, now_ms
from trunkline.engine.memory import Slots
from trunkline.engine.model import Model
from trunkline.engine.sampling import Choosers, Sampler, SamplingError
from trunkline.engine.template import ChatTemplate
from trunkline.engine.tokens import Vocabulary
from trunkline.engine.traits import template_traits
from trunkline.wire.journal import Journal
from trunkline.wire.turns import (
    Admitted,
    Constraint,
    ConstraintError,
    Ended,
    Failed,
    ModelInfo,
    RunHint,
    RunPlan,
    TurnEvent,
    TurnRequest,
)


class EmbeddedEngine:
    """Implements the gateway's executor contract on llama.cpp."""

    def __init__(
        self,
        model: Model,
        slots: Slots,
        settings: CoreSettings,
        *,
        name: str,
        sink: Sink,
        journal: Journal | None = None,
        choosers: Choosers = Sampler,
    ) -> None:
        """`choosers` makes each turn's sampler; tests give their own, and all else stays real."""
        self._vocabulary = Vocabulary(model.vocab)
        self._history = History(self._vocabulary)
        self._grammars = Grammars(self._vocabulary)
        self._template = ChatTemplate(
            model.chat_template,
            bos_token=self._vocabulary.bos_text.decode(),
            eos_token=self._vocabulary.eos_text.decode(),
        )
        self._opening = self._vocabulary.tokenize(self._template.opening())
        traits = template_traits(self._template.render, self._vocabulary.control)
        self._served = ModelInfo(name, settings.slot_tokens, int(time.time()), self._vocabulary.size, traits)
        self._loop = EngineLoop(
            slots, settings, self._vocabulary, self._history, node="embedded", sink=sink, journal=journal
        )
        self._choosers = choosers
        self._turn_ids = itertools.count(1)
        self._door = Door()
        self._last_courier: Courier | None = None

    @property
    def model(self) -> ModelInfo:
        """The served model."""
        return self._served

    def start(self) -> None:
        """Begin to serve."""
        self._loop.start()

    def stop(self) -> None:
        """Stop after the step in progress; turns in flight fail."""
        self._loop.stop()

    def restore_run(
        self,
        key: RunKey,
        parent: str | None,
        turns: int,
        prompt_tokens: int,
        *,
        origin: RunOrigin,
        group: str | None,
        digest: str,
    ) -> None:
        """Make a run of an earlier process known. `prompt_tokens` and `digest` are those of its last prompt."""
        self._loop.restore(
            RunRestored(
                at_ms=now_ms(),
                key=key,
                parent=parent,
                turns=turns,
                prompt_tokens=prompt_tokens,
                origin=origin,
                group=group,
                digest=digest,
            )
        )

    def ready(self) -> str | None:
        """None once generation works; otherwise why it does not."""
        if self._loop.failure is not None:
            return self._loop.failure
        return None if self._loop.alive else "the engine is not running"

    def render_chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """The prompt text of the model's own template. Raises `TemplateError`."""
        return self._template.render(messages, options)

    def tokenize(self, text: str, *, salt: str, bos: bool = True) -> Ints:
        """Token ids of `text`, with the tokens that turns of `salt` generated where the text is theirs."""
        return self._history.tokenize(text, salt=salt, bos=bos)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`."""
        return self._vocabulary.detokenize(tokens)

    def check_constraint(self, constraint: Constraint) -> None:
        """Compile `constraint` and keep it. Raises `ConstraintError`."""
        self._grammars.guide(constraint)

    async def generate(self, request: TurnRequest) -> AsyncIterator[TurnEvent]:
        """Serve one turn; closing the iterator aborts it."""
        courier = self._courier()
        events: asyncio.Queue[TurnEvent] = asyncio.Queue()

        def emit(event: TurnEvent) -> None:
            courier.send(events, event)

        try:
            guide = None if request.constraint is None else await self._guide(request.constraint)
            generation = Generation(request, self._vocabulary, guide, self._choosers)
        except (SamplingError, ConstraintError) as error:
            yield Failed(400, "invalid_value", str(error))
            return
        fresh, opening = f"run-{secrets.token_hex(8)}", self._opening_tokens(request.tokens)
        live = LiveTurn(next(self._turn_ids), request, generation, emit, fresh, time.time(), opening)
        self._loop.submit(live)
        over = False
        try:
            while not over:
                event = await events.get()
                over = isinstance(event, Ended | Failed)
                yield event
        finally:
            if not over:
                self._loop.cancel(live.id)

    def _opening_tokens(self, prompt: Ints) -> int:
        """How many tokens at the prompt's end are what the template opens an answer with: all of that, or none."""
        size = len(self._opening)
        return size if size and np.array_equal(prompt[-size:], self._opening) else 0

    async def _guide(self, constraint: Constraint) -> Guide:
        if self._grammars.knows(constraint):
            return self._grammars.guide(constraint)
        return await asyncio.to_thread(self._grammars.guide, constraint)

    def _courier(self) -> "Courier":
        """The courier to the running event loop."""
        loop = asyncio.get_running_loop()
        if self._last_courier is None or self._last_courier.loop is not loop:
            self._last_courier = Courier(loop)
        return self._last_courier

    def turned_away(self, salt: str, hint: RunHint, kind: str) -> Failed | None:
        """Why a request that surely begins a run need not be rendered; None: it has to be judged."""
        return self._door.ask(self._loop.state, salt, hint, kind, now_ms())

    async def declare_run(self, key: RunKey, plan: RunPlan) -> Admitted | Failed:
        """Let a run in before its first turn, or not."""
        here = asyncio.get_running_loop()
        answer: asyncio.Future[Admitted | Failed] = here.create_future()

        def settle(said: Admitted | Failed) -> None:
            if not answer.done():
                answer.set_result(said)

        def told(said: Admitted | Failed) -> None:
            with suppress(RuntimeError):  # the loop may have closed meanwhile
                here.call_soon_threadsafe(settle, said)

        self._loop.declare(key, plan, told)
        return await answer

    def finish_run(self, key: RunKey) -> None:
        """Note that a run is over."""
        self._loop.finish(key)

    def reset_prefix_cache(self) -> None:
        """Forget every prefix that no turn in flight uses."""
        self._loop.reset()

    def gauges(self) -> Mapping[str, float]:
        """Figures of the latest step."""
        return {**self._loop.gauges, "runs_turned_away_total": self._door.turned_away}


class Courier:
    """Carries events from the engine thread to one event loop; those sent close together share one wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._bag: deque[tuple[asyncio.Queue[TurnEvent], TurnEvent]] = deque()
        self._called = False

    def send(self, events: "asyncio.Queue[TurnEvent]", event: TurnEvent) -> None:
        """Called on the engine thread."""
        self._bag.append((events, event))
        if not self._called:
            self._called = True
            # The loop may close at any moment; then nobody waits for the event any more.
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # Reset first: what is sent from now on calls again, what was sent before is in the bag.
        self._called = False
        while self._bag:
            events, event = self._bag.popleft()
            events.put_nowait(event)


def warm_up(slots: Slots, vocab_size: int) -> None:
    """Compute a few tokens, so that the first turn finds threads and pages in place."""
    tokens = np.arange(32, dtype=np.int32) % vocab_size
    slots.prefill(0, tokens, last=True)
    slots.decode_tokens([0], [int(tokens[0])])
    slots.clear(0)
