"""`/v1/chat/completions`: its request, and its reply whole and in chunks."""

import time
import uuid
from collections.abc import Mapping, Sequence

from trunkline.gateway.body import BodyDecoder
from trunkline.gateway.context import Gateway, TokenTexts
from trunkline.gateway.errors import InvalidRequest, Unsupported
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
from trunkline.gateway.replies import Asked, Outcome, encode, finite
from trunkline.wire.openai import (
    AssistantMessage,
    ChatBody,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatTokenLogprob,
    TopLogprob,
    Usage,
)
from trunkline.wire.turns import Delta, Ended, PromptLogprobs, TokenLogprob, TurnRequest


class ChatDialect:
    """Parses chat requests. Thread-safe."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = BodyDecoder("/v1/chat/completions")

    def parse(self, raw: bytes, scope: str, headers: Mapping[str, str]) -> Asked:
        """From a body to a request that can run. Raises `ApiError`."""
        executor, settings = self._gateway.executor, self._gateway.settings
        model = executor.model
        body = self._decoder.decode(raw, ChatBody)
        check_model(body.model, model)
        _refuse_what_needs_constraints(body)
        hint = identify(
            headers, session_id=body.session_id, prompt_cache_key=body.prompt_cache_key, metadata=body.metadata
        )
        n = int_in_range("n", body.n, 1, 1, settings.max_choices)
        how = sampling(body, model.vocab_size)
        ends, end_tokens = stops(body, settings), stop_tokens(body, model.vocab_size)
        logprobs = _logprobs(body, settings.max_top_logprobs)
        asked_tokens = _max_tokens(body)
        text = render(
            executor,
            body.messages,
            body.tools,
            body.chat_template_kwargs,
            body.add_generation_prompt,
            body.continue_final_message,
        )
        salt = salt_of(scope, body.cache_salt)
        tokens = executor.tokenize(text, salt=salt, bos=True)
        limit = completion_limit(model.max_model_len, len(tokens), asked_tokens, default=None, param="messages")
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
        )
        options = body.stream_options
        include_usage = options is not None and bool(options.include_usage)
        return Asked(
            prompts=(prompt,),
            n=n,
            stream=bool(body.stream),
            include_usage=include_usage,
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
            reply=ChatReply(model.id, n, self._gateway.token_text, with_usage=include_usage),
        )


def _refuse_what_needs_constraints(body: ChatBody) -> None:
    choice = body.tool_choice
    if choice is not None and choice not in ("none", "auto"):
        raise Unsupported(
            '`tool_choice` is not supported except "none" and "auto": tool calls cannot be forced yet.',
            param="tool_choice",
        )
    kind = (body.response_format or {}).get("type", "text")
    if kind != "text":
        raise Unsupported(
            '`response_format` is not supported except {"type": "text"}; ask for the format in the messages.',
            param="response_format",
        )


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


class ChatReply:
    """One chat answer. Chunks are joined from parts that are formatted once."""

    def __init__(self, model: str, n: int, token_text: TokenTexts, *, with_usage: bool) -> None:
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._token_text = token_text
        self._opened = [False] * n
        self._head = b'data: {"id":"%b","object":"chat.completion.chunk","created":%d,"model":%b,"choices":[' % (
            self._id.encode(),
            self._created,
            encode(model),
        )
        self._no_usage = b',"usage":null}\n\n' if with_usage else b"}\n\n"

    def _chunk(self, choice: int, delta: bytes, logprobs: bytes, finish: bytes, usage: Usage | None) -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}]%b' % (
            self._head,
            choice,
            delta,
            logprobs,
            finish,
            self._no_usage if usage is None else b',"usage":%b}\n\n' % encode(usage),
        )

    def _opening(self, choice: int, usage: Usage | None) -> bytes:
        """The chunk with the role, before a choice's first text."""
        if self._opened[choice]:
            return b""
        self._opened[choice] = True
        return self._chunk(choice, b'{"role":"assistant","content":""}', b"null", b"null", usage)

    def prompt_logprobs(self, choice: int, entries: PromptLogprobs) -> None:
        """Chat never asks for them."""
        raise AssertionError("prompt logprobs in a chat reply")

    def delta(self, choice: int, delta: Delta, usage: Usage | None) -> bytes:
        """As `Reply.delta`."""
        if not delta.text and not delta.logprobs and usage is None:
            return b""
        logprobs = encode(self._logprobs(delta.logprobs)) if delta.logprobs else b"null"
        content = b'{"content":%b}' % encode(delta.text)
        return self._opening(choice, usage) + self._chunk(choice, content, logprobs, b"null", usage)

    def last(self, choice: int, ended: Ended, usage: Usage | None) -> bytes:
        """As `Reply.last`."""
        finish = b'"%b","stop_reason":%b' % (ended.reason.encode(), encode(ended.stopped_by))
        return self._opening(choice, usage) + self._chunk(choice, b"{}", b"null", finish, usage)

    def usage(self, usage: Usage) -> bytes:
        """As `Reply.usage`."""
        return b'%b],"usage":%b}\n\n' % (self._head, encode(usage))

    def whole(self, outcomes: Sequence[Outcome], usage: Usage) -> bytes:
        """As `Reply.whole`."""
        return encode(
            ChatCompletion(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[self._choice(at, outcome) for at, outcome in enumerate(outcomes)],
                usage=usage,
            )
        )

    def _choice(self, at: int, outcome: Outcome) -> ChatChoice:
        assert outcome.ended is not None
        return ChatChoice(
            index=at,
            message=AssistantMessage(outcome.text),
            logprobs=self._logprobs(outcome.logprobs) if outcome.logprobs else None,
            finish_reason=outcome.ended.reason,
            stop_reason=outcome.ended.stopped_by,
        )

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> ChatLogprobs:
        return ChatLogprobs([self._token_logprob(entry) for entry in entries])

    def _token_logprob(self, entry: TokenLogprob) -> ChatTokenLogprob:
        text = self._token_text(entry.token)
        return ChatTokenLogprob(
            token=text,
            logprob=finite(entry.logprob),
            bytes=_bytes(text),
            top_logprobs=[self._top(token, logprob) for token, logprob in entry.top],
        )

    def _top(self, token: int, logprob: float) -> TopLogprob:
        text = self._token_text(token)
        return TopLogprob(token=text, logprob=finite(logprob), bytes=_bytes(text))


def _bytes(text: str) -> list[int] | None:
    """UTF-8 of a token's text; None where replacement characters hide what it really was."""
    return None if "\ufffd" in text else list(text.encode())
