"""Makes sessions ready for one server: output lengths in its tokens, and only sessions that fit its context."""

from collections.abc import Iterable

import msgspec

from trunkline.bench.client import Endpoint
from trunkline.wire.traces import Message, MessagesPrompt, RunTrace, Session, expand_session


async def fit(
    endpoint: Endpoint, sessions: Iterable[Session], max_context: int, default_output: int, at_most: int | None = None
) -> list[Session]:
    """The first `at_most` sessions whose every turn (prompt and output) fits `max_context` tokens, lengths filled in.

    An answer known only as text gets its length from the server's tokenizer; one not known at all, `default_output`.
    """
    fitting: list[Session] = []
    for session in sessions:
        if len(fitting) == at_most:
            break
        measured = tuple([await _measure(endpoint, run, default_output) for run in session])
        if await _longest(endpoint, measured) <= max_context:
            fitting.append(measured)
    return fitting


async def _measure(endpoint: Endpoint, run: RunTrace, default_output: int) -> RunTrace:
    turns = []
    for turn in run.turns:
        tokens = turn.output_tokens
        if tokens is None and (turn.output or turn.calls):
            said = [turn.output or "", *(f"{call.name} {call.arguments}" for call in turn.calls)]
            tokens = len(await endpoint.tokenize_text("\n".join(said)))
        turns.append(msgspec.structs.replace(turn, output_tokens=max(1, tokens or default_output)))
    return msgspec.structs.replace(run, turns=tuple(turns))


async def _longest(endpoint: Endpoint, session: Session) -> int:
    """Tokens of the session's longest turn."""
    prompts = expand_session(session)
    longest = 0
    for run in session:
        tools = [tool.body() for tool in run.tools]
        for index, (turn, symbols) in enumerate(zip(run.turns, prompts[run.id], strict=True)):
            if isinstance(turn.prompt, MessagesPrompt):
                messages = [symbol for symbol in symbols if isinstance(symbol, Message)]
                prompt = len(await endpoint.tokenize_chat([message.body() for message in messages], tools))
            else:
                prompt = run.prompt_tokens(index)
            longest = max(longest, prompt + (turn.output_tokens or 0))
    return longest
