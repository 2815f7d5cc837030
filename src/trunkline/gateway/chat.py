"""`/v1/chat/completions`, and the step that every chat-like API shares: from a `ChatBody` to a turn that can run."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import msgspec

from trunkline.gateway.answers import plan_answer, read_wanted
from trunkline.gateway.body import BodyDecoder
from trunkline.gateway.chat_reply import ChatReply
from trunkline.gateway.context import Gateway
from trunkline.gateway.errors import InvalidRequest
from trunkline.gateway.identity import identify, salt_of
from trunkline.gateway.messages import render
from trunkline.gateway.params import (
    MAX_TOKENS,
    check_model,
    completion_limit,
    int_in_range,
    sampling,
    stop_tokens,
    stops,
)
from trunkline.gateway.readers import ReaderFactory
from trunkline.gateway.replies import Asked, Reply
from trunkline.wire.openai import ChatBody, Message
from trunkline.wire.turns import TurnRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """A chat, ready to run: `n` choices of one prompt, and what reads each."""

    prompt: TurnRequest
    n: int
    reader: ReaderFactory

    def asked(self, reply: Reply, *, stream: bool, continuous_usage: bool = False) -> Asked:
        """The request that answers with `reply`."""
        return Asked(
            prompts=(self.prompt,),
            n=self.n,
            stream=stream,
            continuous_usage=continuous_usage,
            reply=reply,
            reader=self.reader,
        )


class ChatDialect:
    """Parses chat requests. Thread-safe."""

    blocking = False

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = BodyDecoder("/v1/chat/completions")

    def parse(self, raw: bytes, scope: str, headers: Mapping[str, str]) -> Asked:
        """From a body to a request that can run. Raises `ApiError`."""
        body = self._decoder.decode(raw, ChatBody)
        turn = chat_turn(self._gateway, body, scope, headers)
        options = body.stream_options
        model = self._gateway.executor.model.id
        with_usage = options is not None and bool(options.include_usage)
        return turn.asked(
            ChatReply(model, turn.n, self._gateway.token_text, with_usage=with_usage),
            stream=bool(body.stream),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
        )


def chat_turn(
    gateway: Gateway, body: ChatBody, scope: str, headers: Mapping[str, str], *, clip: bool = False
) -> ChatTurn:
    """Everything about `body` except how its answer looks. Thread-safe. Raises `ApiError`, in chat completions' terms.

    APIs that say the same in other words translate their bodies into a `ChatBody`, call this, and bring a `Reply`.
    `clip` takes a token limit beyond the context as the rest of the context.
    """
    executor, settings = gateway.executor, gateway.settings
    model = executor.model
    check_model(body.model, model, settings)
    hint = identify(headers, session_id=body.session_id, prompt_cache_key=body.prompt_cache_key, metadata=body.metadata)
    n = int_in_range("n", body.n, 1, 1, settings.max_choices)
    how = sampling(body, model.vocab_size)
    ends, end_tokens = stops(body, settings), stop_tokens(body, model.vocab_size)
    logprobs = _logprobs(body, settings.max_top_logprobs)
    asked_tokens = _max_tokens(body)
    salt = salt_of(scope, body.cache_salt)
    quiet = gateway.noise.settle(salt, body.messages, body.tools)
    kind = kind_of(quiet.messages, quiet.tools)
    gateway.let_in(salt, hint, kind)
    wanted = read_wanted(gateway, body, quiet.tools)
    text = render(
        executor,
        quiet.messages,
        quiet.tools,
        body.chat_template_kwargs,
        body.add_generation_prompt,
        body.continue_final_message,
        partial(gateway.calls.recall, salt),
    )
    answer = plan_answer(gateway, wanted, text, salt)
    tokens = executor.tokenize(text, salt=salt, bos=True)
    limit = completion_limit(model.max_model_len, len(tokens), asked_tokens, default=None, param="messages", clip=clip)
    prompt = TurnRequest(
        salt=salt,
        tokens=tokens,
        text=text,
        max_tokens=limit,
        hint=hint,
        sampling=how,
        stop=ends,
        stop_tokens=end_tokens,
        logprobs=logprobs,
        normalized=quiet.normalized,
        kind=kind,
        constraint=answer.constraint,
        show_control=answer.show_control,
    )
    return ChatTurn(prompt=prompt, n=n, reader=answer.reader)


def kind_of(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
    """A digest of what the agent is: its instructions, as far as they open the chat, and its tools.

    "" where there is neither: the prompt's beginning has to tell.
    """
    system = list(takewhile(lambda message: message.role in ("system", "developer"), messages))
    if not system and not tools:
        return ""
    return hashlib.blake2b(msgspec.json.encode([system, tools or ()]), digest_size=8).hexdigest()


def _logprobs(body: ChatBody, most: int) -> int | None:
    top = int_in_range("top_logprobs", body.top_logprobs, 0, 0, most)
    if body.logprobs:
        return top
    if top:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return None


def _max_tokens(body: ChatBody) -> int | None:
    """The limit asked for, under its old name or its new one."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            f"max_tokens ({old}) and max_completion_tokens ({new}) differ; send one.", param="max_tokens"
        )
    if new is not None:
        return int_in_range("max_completion_tokens", new, 0, 1, MAX_TOKENS)
    return None if old is None else int_in_range("max_tokens", old, 0, 1, MAX_TOKENS)
