"""What a replay measures: one event a turn and one a run, as they are written to the event file."""

from pathlib import Path

import msgspec


class TurnEvent(msgspec.Struct, kw_only=True, tag="turn", tag_field="event"):
    """One turn. `sent_ms` counts from the replay's start; `ttft_ms` and `latency_ms` from sending.

    `cached_tokens` is the server's word, None where it says nothing. `reusable_tokens` is the driver's own count: the
    longest prefix that arrived earlier, at most the prompt less its last token, which no server can skip.
    """

    run: str
    session: str
    index: int
    sent_ms: float
    ttft_ms: float | None = None
    latency_ms: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    reusable_tokens: int | None = None
    finish: str = ""
    error: str | None = None


class RunEvent(msgspec.Struct, kw_only=True, tag="run", tag_field="event"):
    """One run, sub-agents included, tool gaps included. `error` says which turn ended it early.

    `refused_ms` is the time in which it stayed away because the server told it to (429 with `Retry-After`).
    """

    run: str
    session: str
    kind: str
    started_ms: float
    ended_ms: float = 0.0
    turns: int = 0
    refusals: int = 0
    refused_ms: float = 0.0
    error: str | None = None


Event = TurnEvent | RunEvent


def write_events(path: Path, events: list[Event]) -> None:
    """Write events as JSON lines."""
    encoder = msgspec.json.Encoder()
    path.write_bytes(b"".join(encoder.encode(event) + b"\n" for event in events))


def read_events(path: Path) -> list[Event]:
    """Read what `write_events` wrote."""
    decode = msgspec.json.Decoder(TurnEvent | RunEvent).decode
    return [decode(line) for line in path.read_bytes().splitlines()]
