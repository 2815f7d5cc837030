"""What every endpoint is given."""

from collections import Counter
from dataclasses import dataclass, field

from trunkline.core.types import RunKey
from trunkline.gateway.errors import ExecutorFailed, Unavailable
from trunkline.gateway.executor import Executor
from trunkline.gateway.flights import Flights
from trunkline.gateway.identity import scope_of
from trunkline.gateway.metrics import Metrics
from trunkline.gateway.noise import NoiseFilter
from trunkline.gateway.records import RunRecords
from trunkline.gateway.responses.store import ResponseStore
from trunkline.gateway.settings import GatewaySettings
from trunkline.gateway.tools.checks import Checks
from trunkline.gateway.tools.memory import CallMemory
from trunkline.wire.turns import RunHint


class ActiveRuns:
    """Runs that have a turn in flight."""

    def __init__(self) -> None:
        self._turns: Counter[tuple[str, str]] = Counter()

    def enter(self, key: RunKey) -> None:
        """A turn of this run was accepted."""
        self._turns[scope_of(key.salt), key.run] += 1

    def leave(self, key: RunKey) -> None:
        """It ended."""
        name = scope_of(key.salt), key.run
        self._turns[name] -= 1
        if self._turns[name] == 0:
            del self._turns[name]

    def __contains__(self, name: tuple[str, str]) -> bool:
        """Whether (scope, run) is active."""
        return name in self._turns


class TokenTexts:
    """The text of single tokens, as logprobs show it. Kept: a vocabulary is small."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._texts: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        """Text of `token`; invalid UTF-8 is replaced by U+FFFD."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._executor.detokenize([token])
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """One gateway's parts."""

    executor: Executor
    records: RunRecords
    responses: ResponseStore
    settings: GatewaySettings
    metrics: Metrics
    flights: Flights
    token_text: TokenTexts
    noise: NoiseFilter
    calls: CallMemory
    checks: Checks
    active: ActiveRuns = field(default_factory=ActiveRuns)

    def check_ready(self) -> None:
        """Raise `Unavailable` unless generation works."""
        waiting_for = self.executor.ready()
        if waiting_for is not None:
            raise Unavailable(f"Not ready: {waiting_for}. /health turns 200 once it is.", retry_after_s=1)

    def let_in(self, salt: str, hint: RunHint, kind: str) -> None:
        """Raise `ExecutorFailed` for a request that surely begins a run which is not let in now."""
        refused = self.executor.turned_away(salt, hint, kind)
        if refused is not None:
            raise ExecutorFailed(refused)
