"""`/v1/completions`: its request, and its reply whole and in chunks."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from trunkline.core.types import Ints
from trunkline.gateway.answers import plan_completion
from trunkline.gateway.body import BodyDecoder
from trunkline.gateway.context import Gateway, TokenTexts
from trunkline.gateway.errors import ApiError, InvalidRequest, InvalidType, Unsupported
from trunkline.gateway.identity import identify, salt_of
from trunkline.gateway.params import (
    MAX_TOKENS,
    check_model,
    check_tokens,
    completion_limit,
    int_in_range,
    sampling,
    stop_tokens,
    stops,
)
from trunkline.gateway.replies import DONE, Asked, Finish, Outcome, encode, finite
from trunkline.wire.openai import Completion, CompletionBody, CompletionChoice, CompletionLogprobs, Usage
from trunkline.wire.outputs import Part
from trunkline.wire.turns import Delta, PromptLogprobs, RunHint, TokenLogprob, TurnRequest

DEFAULT_MAX_TOKENS = 16


class CompletionDialect:
    """Parses completion requests. Thread-safe."""

    blocking = False

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._decoder = BodyDecoder("/v1/completions")

    def parse(self, raw: bytes, scope: str, headers: Mapping[str, str]) -> Asked:
        """From a body to a request that can run. Raises `ApiError`."""
        settings = self._gateway.settings
        model = self._gateway.executor.model
        body = self._decoder.decode(raw, CompletionBody)
        check_model(body.model, model, settings)
        n = int_in_range("n", body.n, 1, 1, settings.max_choices)
        if body.best_of is not None and body.best_of != n:
            raise Unsupported("`best_of` is not supported: ask for `n` choices and rank them.", param="best_of")
        hint = identify(
            headers, session_id=body.session_id, prompt_cache_key=body.prompt_cache_key, metadata=body.metadata
        )
        most = settings.max_top_logprobs
        logprobs = None if body.logprobs is None else int_in_range("logprobs", body.logprobs, 0, 0, most)
        first = TurnRequest(
            salt=salt_of(scope, body.cache_salt),
            tokens=np.zeros(0, np.int32),
            text=None,
            max_tokens=int_in_range("max_tokens", body.max_tokens, DEFAULT_MAX_TOKENS, 1, MAX_TOKENS),
            hint=hint,
            sampling=sampling(body, model.vocab_size),
            stop=stops(body, settings),
            stop_tokens=stop_tokens(body, model.vocab_size),
            logprobs=logprobs,
            prompt_logprobs=bool(body.echo) and logprobs is not None,
            constraint=plan_completion(self._gateway, body),
        )
        prompts = self._prompts(body, first)
        if len(prompts) * n > settings.max_choices:
            raise InvalidRequest(
                f"{len(prompts)} prompts with n {n} make {len(prompts) * n} choices; at most {settings.max_choices} "
                "are served at once.",
                param="n",
            )
        return self._asked(body, n, prompts)

    def _asked(self, body: CompletionBody, n: int, prompts: tuple[TurnRequest, ...]) -> Asked:
        executor, options = self._gateway.executor, body.stream_options
        echoes: list[str] | None = None
        if body.echo:
            echoes = [
                executor.detokenize(prompt.tokens.tolist()) if prompt.text is None else prompt.text
                for prompt in prompts
            ]
        include_usage = options is not None and bool(options.include_usage)
        return Asked(
            prompts=prompts,
            n=n,
            stream=bool(body.stream),
            continuous_usage=options is not None and bool(options.continuous_usage_stats),
            reply=CompletionReply(
                executor.model.id,
                n,
                [prompt.tokens for prompt in prompts],
                echoes,
                self._gateway.token_text,
                with_usage=include_usage,
            ),
        )

    def _prompts(self, body: CompletionBody, first: TurnRequest) -> tuple[TurnRequest, ...]:
        """One request a prompt. Only the first may continue the run that was named; the others branch from it."""
        named = first.hint.run
        other = RunHint(group=first.hint.group, parent=named, origin=first.hint.origin, final=named is not None)
        return tuple(
            self._prompt(where, prompt, body, first if at == 0 else replace(first, hint=other))
            for at, (where, prompt) in enumerate(_split(body.prompt))
        )

    def _prompt(self, where: str, prompt: str | list[int], body: CompletionBody, request: TurnRequest) -> TurnRequest:
        executor = self._gateway.executor
        model = executor.model
        if isinstance(prompt, str):
            text: str | None = prompt
            tokens = executor.tokenize(prompt, salt=request.salt, bos=body.add_special_tokens is not False)
        else:
            text = None
            check_tokens(prompt, model.vocab_size, where)
            tokens = np.asarray(prompt, np.int32)
        if len(tokens) == 0:
            raise InvalidRequest(f"{where} is empty; send at least one token.", param=where)
        default = DEFAULT_MAX_TOKENS if body.max_tokens is None else None
        limit = completion_limit(model.max_model_len, len(tokens), body.max_tokens, default=default, param=where)
        return replace(request, tokens=tokens, text=text, max_tokens=limit)


def _split(prompt: str | list[str | int | list[int]]) -> list[tuple[str, str | list[int]]]:
    """The prompts of a request, each with the path that names it."""
    if isinstance(prompt, str):
        return [("prompt", prompt)]
    if not prompt:
        raise InvalidRequest("prompt is an empty list; send text or token ids.", param="prompt")
    ids = [part for part in prompt if isinstance(part, int)]
    if len(ids) == len(prompt):
        return [("prompt", ids)]
    if ids:
        raise InvalidType("prompt mixes token ids with prompts; send one kind.", param="prompt")
    return [(f"prompt[{at}]", part) for at, part in enumerate(prompt) if not isinstance(part, int)]


class CompletionReply:
    """One completion answer. `echoes` holds each prompt's text if the answer repeats it."""

    def __init__(
        self,
        model: str,
        n: int,
        prompts: Sequence[Ints],
        echoes: Sequence[str] | None,
        token_text: TokenTexts,
        *,
        with_usage: bool,
    ) -> None:
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._n = n
        self._prompts = prompts
        self._echoes = echoes
        self._token_text = token_text
        choices = n * len(prompts)
        self._echoed = [echoes is None] * choices
        self._offsets = [0] * choices
        self._entries: dict[int, PromptLogprobs] = {}
        self._head = b'data: {"id":"%b","object":"text_completion","created":%d,"model":%b,"choices":[' % (
            self._id.encode(),
            self._created,
            encode(model),
        )
        self._with_usage = with_usage
        self._no_usage = b',"usage":null}\n\n' if with_usage else b"}\n\n"

    def _chunk(self, choice: int, text: str, logprobs: bytes, finish: bytes, usage: Usage | None) -> bytes:
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}]%b' % (
            self._head,
            choice,
            encode(text),
            logprobs,
            finish,
            self._no_usage if usage is None else b',"usage":%b}\n\n' % encode(usage),
        )

    def prompt_logprobs(self, choice: int, entries: PromptLogprobs) -> None:
        """As `Reply.prompt_logprobs`: the choices of one prompt share them."""
        self._entries[choice // self._n] = entries

    def _echo(self, choice: int, usage: Usage | None) -> bytes:
        """The chunk that repeats the prompt, before a choice's first text."""
        if self._echoed[choice]:
            return b""
        assert self._echoes is not None
        self._echoed[choice] = True
        prompt = choice // self._n
        logprobs = b"null"
        if prompt in self._entries:
            logprobs = encode(self._prompt_logprobs(choice))
        return self._chunk(choice, self._echoes[prompt], logprobs, b"null", usage)

    def opening(self) -> bytes:
        """As `Reply.opening`: nothing."""
        return b""

    def placed(self, choice: int, usage: Usage) -> bytes:
        """As `Reply.placed`: nothing."""
        return b""

    def delta(self, choice: int, parts: Sequence[Part], delta: Delta, usage: Usage | None) -> bytes:
        """As `Reply.delta`. The parts are the delta's text: completions are read plainly."""
        if not delta.text and not delta.logprobs and usage is None:
            return b""
        echo = self._echo(choice, usage)
        logprobs = encode(self._logprobs(choice, delta.logprobs)) if delta.logprobs else b"null"
        return echo + self._chunk(choice, delta.text, logprobs, b"null", usage)

    def last(self, choice: int, finish: Finish, usage: Usage | None) -> bytes:
        """As `Reply.last`."""
        reason = b'"%b","stop_reason":%b' % (finish.reason.encode(), encode(finish.stopped_by))
        return self._echo(choice, usage) + self._chunk(choice, "", b"null", reason, usage)

    def end(self, usage: Usage) -> bytes:
        """As `Reply.end`: the chunk without choices if it was asked for, and the terminator."""
        return (b'%b],"usage":%b}\n\n' % (self._head, encode(usage)) if self._with_usage else b"") + DONE

    def error(self, error: ApiError) -> bytes:
        """As `Reply.error`: no terminator follows."""
        return b"data: %b\n\n" % error.body()

    def whole(self, outcomes: Sequence[Outcome], usage: Usage) -> bytes:
        """As `Reply.whole`."""
        for at, outcome in enumerate(outcomes):
            if outcome.prompt_logprobs is not None:
                self.prompt_logprobs(at, outcome.prompt_logprobs)
        return encode(
            Completion(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[self._choice(at, outcome) for at, outcome in enumerate(outcomes)],
                usage=usage,
            )
        )

    def _choice(self, at: int, outcome: Outcome) -> CompletionChoice:
        assert outcome.finish is not None
        prompt = at // self._n
        logprobs = self._prompt_logprobs(at) if prompt in self._entries else None
        if outcome.logprobs:
            chosen = self._logprobs(at, outcome.logprobs)
            logprobs = chosen if logprobs is None else _joined(logprobs, chosen)
        echo = self._echoes[prompt] if self._echoes is not None else ""
        return CompletionChoice(
            index=at,
            text=echo + outcome.text,
            logprobs=logprobs,
            finish_reason=outcome.finish.reason,
            stop_reason=outcome.finish.stopped_by,
        )

    def _prompt_logprobs(self, choice: int) -> CompletionLogprobs:
        prompt = choice // self._n
        return self._table(choice, self._prompts[prompt].tolist(), self._entries[prompt].entries)

    def _logprobs(self, choice: int, entries: Sequence[TokenLogprob]) -> CompletionLogprobs:
        return self._table(choice, [entry.token for entry in entries], entries)

    def _table(self, choice: int, tokens: Sequence[int], entries: Sequence[TokenLogprob | None]) -> CompletionLogprobs:
        texts = [self._token_text(token) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[choice])
            self._offsets[choice] += len(text)
        return CompletionLogprobs(
            tokens=texts,
            token_logprobs=[None if entry is None else finite(entry.logprob) for entry in entries],
            top_logprobs=[None if entry is None else self._top(entry) for entry in entries],
            text_offset=offsets,
        )

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The alternatives, and the chosen token even where it is not among them."""
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            top.setdefault(self._token_text(token), finite(logprob))  # the best of tokens that read the same
        return top


def _joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )
