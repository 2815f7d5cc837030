"""What can go wrong between the engine and llama.cpp, in one tree.

EngineError
├── ModelError      the model cannot be served: missing, not a GGUF, unsupported, no such GPU
├── ContextError    no context of the wanted size: a slot cannot hold it, or memory ran out
├── NotCuttable     this model's memory cannot be cut at a token; nothing was changed
├── DecodeFailed    llama.cpp could not compute a batch; its slots hold what they held, or nothing
└── MemoryFault     a slot does not hold what it must; it was cleared
    └── LayoutError a saved state is not laid out as expected
"""

from collections.abc import Sequence


class EngineError(Exception):
    """Any operating error of the embedded engine. The text names the fix where there is one."""


class ModelError(EngineError):
    """The model cannot be served."""


class ContextError(EngineError):
    """The wanted context cannot be made."""


class NotCuttable(EngineError):
    """A token-exact cut was asked of memory that only restores checkpoints. Nothing was changed."""


class DecodeFailed(EngineError):
    """`llama_decode` failed with `code`; `cleared` lists the slots that could not be put back and are empty now."""

    def __init__(self, code: int, reason: str, cleared: Sequence[int]) -> None:
        self.code = code
        self.cleared = tuple(cleared)
        lost = f"; slots {list(self.cleared)} lost what they held" if self.cleared else ""
        super().__init__(f"llama_decode failed ({code}): {reason}{lost}")


class MemoryFault(EngineError):
    """A slot does not hold what it must hold; it was cleared."""


class LayoutError(MemoryFault):
    """A saved state is not laid out as this version of llama.cpp is known to lay it out."""
