"""Sharing, batching and slicing change no greedy token, except where two logits are as good as equal.

The reference is a plain loop over one sequence: `llama_decode` of the whole prompt, then a token at a time. Where the
server's tokens leave it, the reference's two best logits must lie closer than the float noise of batch shapes, which
is measured here on the same prompts.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.engine.served import CTX, LENGTH, Served, make_settings
from trunkline.core.types import Ints, Sharing
from trunkline.engine.embedded import EmbeddedEngine
from trunkline.engine.memory import Slots
from trunkline.engine.model import Model
from trunkline.engine.sampling import Logits


def plain(slots: Slots, tokens: Ints, length: int, slice_tokens: int = 512) -> tuple[list[int], list[float]]:
    """Greedy tokens of a plain loop, and the gap between the two best logits at each."""
    slots.clear(0)
    for start in range(0, len(tokens), slice_tokens):
        part = tokens[start : start + slice_tokens]
        slots.prefill(0, part, last=start + len(part) == len(tokens))
    generated: list[int] = []
    gaps: list[float] = []
    while True:
        row = slots.logits(0)
        second, best = np.partition(row, -2)[-2:]
        generated.append(int(row.argmax()))
        gaps.append(float(best - second))
        if len(generated) == length:
            return generated, gaps
        slots.decode_tokens([0], [generated[-1]])


def batch_noise(slots: Slots, tokens: Ints) -> float:
    """The largest difference that the shape of batches makes to a logit, the tokens being the same.

    The head of the prompt in slices of several sizes, then a few tokens decoded alone and beside other sequences.
    """
    tokens, follow = tokens[:96], [int(token) for token in tokens[96:104]]
    seen: list[list[Logits]] = []
    for slice_tokens, beside in ((512, 1), (64, 2), (7, 3), (1, 4)):
        for slot in range(beside):
            slots.clear(slot)
            for start in range(0, len(tokens), slice_tokens):
                part = tokens[start : start + slice_tokens]
                slots.prefill(slot, part, last=start + len(part) == len(tokens))
        rows = [slots.logits(0).copy()]
        for token in follow:
            slots.decode_tokens(range(beside), [token] * beside)
            rows.append(slots.logits(0).copy())
        seen.append(rows)
    first, *others = seen
    return float(max(np.abs(a - b).max() for rows in others for a, b in zip(first, rows, strict=True)))


def agents(engine: EmbeddedEngine, count: int) -> list[list[Ints]]:
    """Prompts of `count` agents over three turns: one shared system prompt, histories of their own."""
    source = Path(__file__).read_text()
    system = f"<|im_start|>system\nYou read code.\n{source[:500]}<|im_end|>\n"
    told = []
    for agent in range(count):
        prompts, text = [], system
        for turn in range(3):
            at = 500 + 150 * (3 * agent + turn)
            text += f"<|im_start|>user\nPart {turn}: {source[at : at + 150]}<|im_end|>\n<|im_start|>assistant\n"
            prompts.append(engine.tokenize(text, salt=f"agent {agent}"))
            text += f"It does thing {agent}.<|im_end|>\n"
        told.append(prompts)
    return told


@pytest.fixture(scope="module")
def reference(smollm2: Model) -> Iterator[Slots]:
    slots = Slots(smollm2, slots=4, slot_tokens=CTX)
    yield slots
    slots.close()


@pytest.mark.parametrize("sharing", list(Sharing))
def test_greedy_tokens_are_those_of_a_plain_loop(smollm2: Model, reference: Slots, sharing: Sharing) -> None:
    with Served(smollm2, make_settings(smollm2, sharing=sharing)) as served:
        runs = agents(served.engine, 4)

        async def agent(prompts: list[Ints], name: str) -> list[list[int]]:
            return [await served.turn(prompt, run=name) for prompt in prompts]

        async def together() -> list[list[list[int]]]:
            return await asyncio.gather(*(agent(prompts, f"a{i}") for i, prompts in enumerate(runs)))

        answers = asyncio.run(together())
    noise = batch_noise(reference, runs[0][0])
    assert 0 < noise < 2
    for prompts, generated in zip(runs, answers, strict=True):
        for prompt, tokens in zip(prompts, generated, strict=True):
            expected, gaps = plain(reference, prompt, LENGTH)
            flip = next((i for i in range(LENGTH) if tokens[i] != expected[i]), None)
            assert flip is None or gaps[flip] <= 2 * noise, f"a flip where the gap is {gaps[flip or 0]}, noise {noise}"
    reused = sum(row.cached_tokens for row in served.rows)
    reusable = sum(row.reusable_tokens for row in served.rows)
    assert reusable > 0
    if sharing is Sharing.TREE:
        # Agents that arrive together do not wait for the few tokens that another is about to compute.
        assert reused >= 0.99 * reusable
    else:
        assert reused == 0


def test_a_run_parked_in_host_memory_goes_on_as_if_it_never_left(smollm2: Model, reference: Slots) -> None:
    with Served(smollm2, make_settings(smollm2, slots=1)) as served:
        runs = agents(served.engine, 3)
        answers = {}
        for turn in range(3):
            for agent, prompts in enumerate(runs):
                answers[agent, turn] = served.serve(prompts[turn], run=f"a{agent}")
        rows = list(served.rows)
    noise = batch_noise(reference, runs[0][0])
    for (agent, turn), tokens in answers.items():
        expected, gaps = plain(reference, runs[agent][turn], LENGTH)
        flip = next((i for i in range(LENGTH) if tokens[i] != expected[i]), None)
        assert flip is None or gaps[flip] <= 2 * noise
    later = [row for row in rows if row.index > 0]
    assert sum(row.cached_tokens for row in later) == sum(row.reusable_tokens for row in later)
