"""Counts reusable tokens: for each prompt, the longest prefix that had arrived at the server before it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trunkline.bench.client import Endpoint
from trunkline.bench.replay import Sent
from trunkline.wire.traces import Message

Ids = NDArray[np.int32]


async def count_reusable(endpoint: Endpoint, sent: Sequence[Sent], live: bool) -> None:
    """Fill in `reusable_tokens` of every event. `sent` is in order of arrival; text is tokenized by the server.

    In a live replay a prompt may also continue an earlier answer: that answer arrived too, as far as it was generated.
    """
    arrived: list[tuple[Ids, int, float]] = []  # ids, how many of them may count, and since when
    for turn in sent:
        ids = await _ids(endpoint, turn.prompt, turn.tools)
        event = turn.event
        reach = max((min(_common(ids, old), limit) for old, limit, at in arrived if at <= event.sent_ms), default=0)
        event.reusable_tokens = max(0, min(reach, len(ids) - 1))
        arrived.append((ids, len(ids), event.sent_ms))
        messages = [part for part in turn.prompt if isinstance(part, Message)]
        if live and turn.answer and messages:
            answered = await _ids(
                endpoint, [*messages, Message("assistant", turn.answer), Message("user", "")], turn.tools
            )
            arrived.append((answered, len(ids) + event.completion_tokens, event.sent_ms + event.latency_ms))


async def _ids(endpoint: Endpoint, prompt: Sequence[int | Message], tools: Sequence[Mapping[str, Any]]) -> Ids:
    if messages := [part for part in prompt if isinstance(part, Message)]:
        return np.asarray(await endpoint.tokenize_chat([message.body() for message in messages], tools), np.int32)
    return np.asarray([part for part in prompt if isinstance(part, int)], np.int32)


def _common(a: Ids, b: Ids) -> int:
    """Length of the common prefix."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length
