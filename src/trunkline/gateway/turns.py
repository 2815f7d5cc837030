"""The turns of one HTTP request: one a prompt, and `n` - 1 branches of each.

prompt 0: choice 0  choice 1 .. n-1        Choice 0 continues (or begins) the run that the request named; the others
prompt 1: choice n  choice n+1 .. 2n-1     are branches of it, so that the shared prompt is computed once.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import cast

from trunkline.core.types import RunKey
from trunkline.gateway.context import Gateway
from trunkline.gateway.errors import ExecutorFailed
from trunkline.wire.openai import PromptTokensDetails, Usage
from trunkline.wire.turns import Accepted, Delta, Ended, Failed, Placed, RunHint, TurnEvent, TurnRequest

Stream = AsyncGenerator[TurnEvent, None]


@dataclass(slots=True)
class Meter:
    """Tokens of a request so far: every prompt counted once, all completions summed."""

    prompts: tuple[int, ...]
    n: int
    completion: list[int] = field(init=False)
    cached: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.completion = [0] * (len(self.prompts) * self.n)
        self.cached = [0] * len(self.completion)

    def note(self, choice: int, event: TurnEvent) -> None:
        """Count one event."""
        match event:
            case Placed(cached_tokens):
                self.cached[choice] = cached_tokens
            case Delta(tokens):
                self.completion[choice] += len(tokens)
            case Ended(row=row):
                self.cached[choice] = row.cached_tokens
                self.completion[choice] = row.completion_tokens

    def _usage(self, prompt: int, completion: int, cached: int) -> Usage:
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached),
        )

    def total(self) -> Usage:
        """Usage of the whole request. Cached tokens are those of each prompt's first choice."""
        return self._usage(sum(self.prompts), sum(self.completion), sum(self.cached[:: self.n]))

    def of(self, choice: int) -> Usage:
        """Usage of one choice, as `continuous_usage_stats` reports it."""
        return self._usage(self.prompts[choice // self.n], self.completion[choice], self.cached[choice])


class Turns:
    """Accepted turns. Made by `open_turns`, which also ends them."""

    def __init__(self, gateway: Gateway, n: int, prompts: Sequence[TurnRequest]) -> None:
        self._gateway = gateway
        self.n = n
        self.meter = Meter(tuple(len(prompt.tokens) for prompt in prompts), n)
        self.streams: list[Stream] = []
        self.accepted: list[Accepted] = []
        self.settled = False
        self._open: list[tuple[RunKey, bool]] = []

    def __len__(self) -> int:
        return len(self.streams)

    async def start(self, requests: Sequence[TurnRequest]) -> list[Accepted]:
        """Hand turns to the executor, in order, and wait until each is accepted. Raises `ExecutorFailed`."""
        streams = [cast(Stream, self._gateway.executor.generate(request)) for request in requests]
        self.streams += streams
        firsts = await _first_events(streams)
        accepted = []
        for request, first in zip(requests, firsts, strict=True):
            if isinstance(first, Failed):
                raise ExecutorFailed(first)
            assert isinstance(first, Accepted), first
            key = RunKey(request.salt, first.run)
            self._gateway.active.enter(key)
            self._open.append((key, request.hint.final))
            self._gateway.records.begin(key, first.parent, request.hint.origin, request.hint.group)
            accepted.append(first)
        self.accepted += accepted
        return accepted

    async def events(self) -> AsyncGenerator[tuple[int, TurnEvent], None]:
        """(choice, event) as they come. Raises `ExecutorFailed` for a turn that fails on its way."""
        if len(self.streams) == 1:
            async for event in self.streams[0]:
                yield 0, self._checked(0, event)
            return
        merged: asyncio.Queue[tuple[int, TurnEvent | None]] = asyncio.Queue()
        pumps = [asyncio.create_task(_pump(choice, stream, merged)) for choice, stream in enumerate(self.streams)]
        try:
            left = len(pumps)
            while left:
                choice, merged_event = await merged.get()
                if merged_event is None:
                    left -= 1
                    pumps[choice].result()  # raises what ended it, if anything did
                else:
                    yield choice, self._checked(choice, merged_event)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def _checked(self, choice: int, event: TurnEvent) -> TurnEvent:
        if isinstance(event, Failed):
            raise ExecutorFailed(event)
        self.meter.note(choice, event)
        return event

    async def settle(self) -> None:
        """The turns are over: return once their records, and their runs' states, are visible."""
        self.settled = True
        for key, final in self._open:
            self._gateway.active.leave(key)
            if final:
                self._gateway.records.finish(key)
        await self._gateway.records.committed()


@asynccontextmanager
async def open_turns(gateway: Gateway, prompts: Sequence[TurnRequest], n: int) -> AsyncIterator[Turns]:
    """Start every choice of every prompt; abort what still runs on the way out.

    Raises `ExecutorFailed` if any choice is refused: then nothing of the request has been answered yet.
    """
    turns = Turns(gateway, n, prompts)
    try:
        firsts = await turns.start(prompts)
        if n > 1:
            await turns.start(
                [
                    _branch(prompt, first.run, choice)
                    for prompt, first in zip(prompts, firsts, strict=True)
                    for choice in range(1, n)
                ]
            )
            _interleave(turns, len(prompts), n)
        yield turns
    finally:
        for stream in turns.streams:
            await stream.aclose()
        if not turns.settled:
            await turns.settle()


def _branch(prompt: TurnRequest, parent: str, choice: int) -> TurnRequest:
    """Choice `choice` of `prompt`: a run of its own that ends with this turn. A seed gives each its own samples."""
    sampling = prompt.sampling
    if sampling.seed is not None:
        sampling = replace(sampling, seed=(sampling.seed + choice) % 2**64)
    hint = RunHint(parent=parent, final=True)
    return replace(prompt, hint=hint, sampling=sampling, prompt_logprobs=False)


def _interleave(turns: Turns, prompts: int, n: int) -> None:
    """From start order (all first choices, then all branches) to the order of choices."""
    order = [start for prompt in range(prompts) for start in (prompt, *_branches(prompts, prompt, n))]
    turns.streams = [turns.streams[start] for start in order]
    turns.accepted = [turns.accepted[start] for start in order]


def _branches(prompts: int, prompt: int, n: int) -> range:
    begin = prompts + prompt * (n - 1)
    return range(begin, begin + n - 1)


async def _first_events(streams: Sequence[Stream]) -> list[TurnEvent]:
    if len(streams) == 1:
        return [await anext(streams[0])]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_first(stream)) for stream in streams]
    return [task.result() for task in tasks]


async def _first(stream: Stream) -> TurnEvent:
    return await anext(stream)


async def _pump(choice: int, stream: Stream, into: asyncio.Queue[tuple[int, TurnEvent | None]]) -> None:
    try:
        async for event in stream:
            into.put_nowait((choice, event))
    finally:
        into.put_nowait((choice, None))
