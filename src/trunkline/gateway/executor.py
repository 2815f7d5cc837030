"""The contract between the gateway and whatever generates. The gateway imports no executor: one is injected."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from trunkline.core.types import Ints, RunKey
from trunkline.wire.turns import (
    Admitted,
    Constraint,
    ConstraintError,
    Failed,
    ModelInfo,
    RunHint,
    RunPlan,
    TemplateError,
    TurnEvent,
    TurnRequest,
)

__all__ = ["ConstraintError", "Executor", "ModelInfo", "TemplateError"]


class Executor(Protocol):
    """One node as the gateway sees it. Methods are called on the event loop's thread unless said otherwise."""

    @property
    def model(self) -> ModelInfo:
        """The served model."""

    def ready(self) -> str | None:
        """None once generation works; otherwise what it is waiting for, or why it stopped."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """The prompt text the model's own template makes (with the generation prompt). Thread-safe.

        `options` are extra template variables (`tools`, `chat_template_kwargs`). Raises `TemplateError`.
        """

    def tokenize(self, text: str, *, salt: str, bos: bool = True) -> Ints:
        """Token ids of `text`; where it repeats text that a turn of `salt` generated, that turn's own tokens.

        `bos` puts the beginning token in front, if the model wants one and `text` does not begin with it.
        Control tokens written out in `text` are recognised. Thread-safe.
        """

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, control tokens included, invalid UTF-8 replaced. Thread-safe."""

    def check_constraint(self, constraint: Constraint) -> None:
        """Compile `constraint`, so that a turn under it can begin at once. Thread-safe; may take a second.

        Raises `ConstraintError`, whose text says what is wrong, and where in the schema.
        """

    def generate(self, request: TurnRequest) -> AsyncIterator[TurnEvent]:
        """Serve one turn. The iterator's first event is `Accepted` or `Failed`, its last `Ended` or `Failed`.

        A turn that ended has its row in the records' sink before `Ended` is emitted (also if nobody iterates any more).

        Closing the iterator early (`aclose`, cancellation) aborts the turn and frees its place within a step.
        """

    def turned_away(self, salt: str, hint: RunHint, kind: str) -> Failed | None:
        """Asked before a prompt is rendered: why it need not be, because it surely begins a run that is not let in.

        None where that is not certain. Never blocks.
        """

    async def declare_run(self, key: RunKey, plan: RunPlan) -> Admitted | Failed:
        """Judge a run before its first turn: it is let in (none of its turns will be refused for load), or not."""

    def finish_run(self, key: RunKey) -> None:
        """Note that a run is over."""

    def reset_prefix_cache(self) -> None:
        """Forget every prefix that no turn in flight uses."""

    def gauges(self) -> Mapping[str, float]:
        """Current values for `/metrics`: `running`, `waiting`, `kv_used_fraction`, `host_bytes`, and so on."""
