"""Seeded sessions that look like a software agent's: a shared system prompt, a task, tool results, short answers."""

import random
from collections.abc import Iterator

import msgspec

from trunkline.bench.filler import WORDS
from trunkline.wire.traces import Message, MessagesPrompt, RunTrace, Session, TurnTrace

SYSTEM = (
    "You are a software agent. You are given a task and may run one command at a time; its output is shown to you. "
    "Think briefly, then answer with exactly one command. When the task is done, say so and stop."
)


def agent_sessions(
    seed: int, count: int, *, turns: int, task_tokens: int, step_tokens: int, output_tokens: int, gap_ms: float = 0.0
) -> list[Session]:
    """Sessions of `turns` turns: a task of about `task_tokens`, then tool results of about `step_tokens` each.

    Answers are recorded as text of about `output_tokens` and generated at exactly that length. Gaps vary by half.
    """
    return [
        (
            _run(
                random.Random(f"{seed} {n}"),
                f"agent-{seed}-{n}",
                turns,
                task_tokens,
                step_tokens,
                output_tokens,
                gap_ms,
            ),
        )
        for n in range(count)
    ]


def cut(session: Session, turns: int | None = None, output_tokens: int | None = None) -> Session:
    """A root run's first `turns` turns without its sub-agents, and no output longer than `output_tokens`."""
    root = session[0]
    kept = [
        msgspec.structs.replace(turn, output_tokens=min(turn.output_tokens, output_tokens))
        if output_tokens is not None and turn.output_tokens is not None
        else turn
        for turn in root.turns[:turns]
    ]
    return (msgspec.structs.replace(root, turns=tuple(kept)),)


def _run(rng: random.Random, name: str, turns: int, task: int, step: int, output: int, gap_ms: float) -> RunTrace:
    steps: list[TurnTrace] = []
    answer = ""
    for index in range(turns):
        if index == 0:
            prompt = MessagesPrompt(add=(Message("system", SYSTEM), Message("user", f"Task: {prose(rng, task)}")))
        else:
            said = Message("assistant", answer), Message("user", f"Output:\n{listing(rng, step)}")
            prompt = MessagesPrompt(keep=2 * index, add=said)
        answer = prose(rng, output)
        gap = gap_ms * rng.uniform(0.5, 1.5) if index else None
        steps.append(TurnTrace(prompt=prompt, output=answer, output_tokens=output, gap_ms=gap))
    return RunTrace(id=name, source="generated", turns=tuple(steps))


def prose(rng: random.Random, tokens: int) -> str:
    """About `tokens` tokens of words."""
    return " ".join(rng.choices(WORDS, k=tokens))


def listing(rng: random.Random, tokens: int) -> str:
    """About `tokens` tokens that look like a tool's output: numbered lines of words."""
    return "\n".join(_lines(rng, tokens))


def _lines(rng: random.Random, tokens: int) -> Iterator[str]:
    number = rng.randrange(100)
    while tokens > 0:
        words = rng.choices(WORDS, k=min(tokens, rng.randrange(4, 12)))
        number += 1
        tokens -= len(words) + len(str(number)) + 2
        yield f"{number}: {' '.join(words)}"
