"""What the gateway is told once."""

from dataclasses import dataclass

from trunkline.wire.noise import DEFAULT, Normalizer

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Limits and keys. Each default stands here and nowhere else.

    `api_keys` empty: anyone may call. `share_cache_across_keys` puts all keys into one scope: they share cached
    prefixes and see each other's runs. `request_timeout_s` bounds one request from body to last byte (None: no bound).
    `call_memory_bytes` bounds the raw text of turns that called tools, kept so that they can be rendered again exactly.
    `normalize` names the client noise that is held still (`gateway/noise.py`).
    Bodies up to `inline_body_bytes` are parsed and tokenized on the event loop, larger ones in a thread.
    `model_aliases` are further names that the served model answers to; with `any_model` it answers to every name.
    """

    api_keys: tuple[str, ...] = ()
    share_cache_across_keys: bool = False
    normalize: tuple[Normalizer, ...] = DEFAULT
    max_body_bytes: int = 8 * MIB
    body_timeout_s: float = 60.0
    inline_body_bytes: int = 4096
    max_in_flight: int = 1024
    max_choices: int = 128
    max_stops: int = 16
    max_top_logprobs: int = 20
    max_tools: int = 512
    max_schema_bytes: int = 128 * 1024
    call_memory_bytes: int = 16 * MIB
    request_timeout_s: float | None = None
    drain_timeout_s: float = 30.0
    model_aliases: tuple[str, ...] = ()
    any_model: bool = False
