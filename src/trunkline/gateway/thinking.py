"""How much to think, as clients of every API say it and as templates know it."""

from typing import Any


def with_effort(given: dict[str, Any], effort: str | None) -> dict[str, Any]:
    """The template variables `given`, with `effort` where they do not say otherwise.

    Templates know `reasoning_effort` (how much) or `enable_thinking` (whether); what one does not know it ignores.
    """
    if effort is None:
        return given
    thinks = {"enable_thinking": False} if effort == "none" else {}
    return {"reasoning_effort": effort, **thinks, **given}
