"""From a body's fields to what an executor is told: sampling, stops, limits. Every range is checked here."""

import math
from collections.abc import Sequence

from trunkline.gateway.errors import ContextOverflow, InvalidRequest, ModelNotFound
from trunkline.gateway.settings import GatewaySettings
from trunkline.wire.openai import GenerationBody
from trunkline.wire.turns import ModelInfo, Sampling

UNBOUNDED = math.inf
MAX_TOKENS = 2**31 - 1


def check_model(asked: str | None, model: ModelInfo, settings: GatewaySettings) -> None:
    """Raise `ModelNotFound` unless `asked` is a name that the served model answers to (or nothing)."""
    if asked is None or asked == model.id or settings.any_model or asked in settings.model_aliases:
        return
    raise ModelNotFound(asked, model.id)


def in_range(name: str, value: float | None, default: float, low: float, high: float) -> float:
    """`value`, or `default` for None. Raises `InvalidRequest` outside [low, high]."""
    if value is None:
        return default
    if not low <= value <= high:
        bounds = f"at least {low:g}" if high == UNBOUNDED else f"from {low:g} to {high:g}"
        raise InvalidRequest(f"{name} must be {bounds}, not {value:g}.", param=name)
    return value


def int_in_range(name: str, value: int | None, default: int, low: int, high: int) -> int:
    """As `in_range`, for whole numbers."""
    if value is None:
        return default
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be from {low} to {high}, not {value}.", param=name)
    return value


def sampling(body: GenerationBody, vocab_size: int) -> Sampling:
    """How to choose tokens. OpenAI's ranges where it has the field, vLLM's elsewhere."""
    top_k = int_in_range("top_k", body.top_k, 0, -1, MAX_TOKENS)
    return Sampling(
        temperature=in_range("temperature", body.temperature, 1.0, 0.0, 100.0),
        top_p=in_range("top_p", body.top_p, 1.0, 0.0, 1.0),
        top_k=max(top_k, 0),  # vLLM writes -1 for off
        min_p=in_range("min_p", body.min_p, 0.0, 0.0, 1.0),
        repetition_penalty=in_range("repetition_penalty", body.repetition_penalty, 1.0, 0.01, 100.0),
        presence_penalty=in_range("presence_penalty", body.presence_penalty, 0.0, -2.0, 2.0),
        frequency_penalty=in_range("frequency_penalty", body.frequency_penalty, 0.0, -2.0, 2.0),
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        seed=None if body.seed is None else body.seed % 2**64,  # random generators take no negative seeds
        ignore_eos=bool(body.ignore_eos),
    )


def _logit_bias(biases: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    checked = []
    for key, bias in biases.items():
        param = f"logit_bias.{key}"
        if not key.isascii() or not key.isdecimal() or len(key) > 10:
            raise InvalidRequest(f"logit_bias keys are token ids, not {key[:32]!r}.", param=param)
        check_tokens([int(key)], vocab_size, param)
        checked.append((int(key), in_range(param, bias, 0.0, -100.0, 100.0)))
    return tuple(sorted(checked))


def check_tokens(tokens: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise `InvalidRequest` for an id outside the vocabulary."""
    for token in (min(tokens), max(tokens)) if tokens else ():
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"{param}: token ids go from 0 to {vocab_size - 1}, not {token}.", param=param)


def stops(body: GenerationBody, settings: GatewaySettings) -> tuple[str, ...]:
    """The stop strings."""
    given = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(given) > settings.max_stops:
        raise InvalidRequest(f"stop takes at most {settings.max_stops} strings, not {len(given)}.", param="stop")
    if "" in given:
        raise InvalidRequest("stop must not hold an empty string; leave it out.", param="stop")
    return tuple(given)


def stop_tokens(body: GenerationBody, vocab_size: int) -> tuple[int, ...]:
    """The stop tokens."""
    given = body.stop_token_ids or []
    check_tokens(given, vocab_size, "stop_token_ids")
    return tuple(given)


def completion_limit(
    limit: int, prompt_tokens: int, max_tokens: int | None, *, default: int | None, param: str, clip: bool = False
) -> int:
    """How many tokens may be generated after `prompt_tokens`, given the model's `limit` for both.

    `max_tokens` None means `default`, cut to what is left (None: all that is left). `clip` cuts `max_tokens` itself so.
    Raises `ContextOverflow`.
    """
    left = limit - prompt_tokens
    if clip and max_tokens is not None:
        max_tokens = min(max_tokens, max(left, 1))
    if left < 1 or (max_tokens is not None and max_tokens > left):
        raise ContextOverflow(limit, prompt_tokens, max_tokens, param)
    if max_tokens is not None:
        return max_tokens
    return left if default is None else min(default, left)
