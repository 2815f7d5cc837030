"""A task that every client can do: ask a harbour for its tides, and a harbour master for advice."""

from random import Random

INSTRUCTIONS = (
    "You keep the log of a small harbour on the northern coast. Ships come at all hours, and their masters want to "
    "know how much water lies over the bar, whether the pier is free, and when the ferry leaves. Ask the tide gauge "
    "before you answer, name the place you asked about, and keep to what the gauge says: guesses put ships aground."
)
ADVICE = "You are the harbour master. You know every rock between the bar and the quay, and answer in one sentence."


def depth(place: str) -> str:
    """Metres of water over the rock at a place, measured with a lead line.

    Args:
        place: Which rock.
    """
    return f"{len(place)} metres over the rock"


def errand(task: str) -> str:
    """What a parent asks of a sub-agent: long enough, and of its own for each `task`, to be told from others' words."""
    draughts = ", ".join(map(str, Random(task).sample(range(280, 440), 20)))
    return f"A coaster waits outside the bar. On her way here she drew {draughts} centimetres. May she come in?"


LEVELS = {"pier": "2.4 metres and rising", "quay": "1.1 metres and falling", "bar": "4.9 metres at slack water"}


def tide(place: str) -> str:
    """The height of the tide at a place of the harbour.

    Args:
        place: Where: the pier, the quay or the bar.
    """
    return LEVELS[place]


PARAMETERS = {
    "type": "object",
    "properties": {"place": {"type": "string", "enum": [*LEVELS]}},
    "required": ["place"],
    "additionalProperties": False,
}
"""Schema of the arguments of `tide`, for clients that want it written."""
