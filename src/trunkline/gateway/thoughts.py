r"""Reasoning text before the answer: told apart from it, and left free where the answer is constrained.

A model opens its thinking itself, or its template has opened it at the end of the prompt:

    <think>\nThe user wants ...\n</think>\n\nThe answer is ...
"""

from collections.abc import Mapping, Sequence
from enum import Enum, auto

from trunkline.gateway.readers import Reader
from trunkline.gateway.tools.lark import ANY, Marker, quoted
from trunkline.gateway.tools.scan import held_back
from trunkline.wire.outputs import Part, Thinking

GAP = "\n\n"
"""What templates put between thinking and answer, and models learn to write."""


class State(Enum):
    """Where a turn stands."""

    MAY_OPEN = auto()
    OPEN = auto()
    CLOSED = auto()


def state_of(prompt: str, markers: tuple[str, str]) -> State:
    """What the end of a prompt has said about thinking."""
    said = prompt.rstrip()
    if said.endswith(markers[0]):
        return State.OPEN
    return State.CLOSED if said.endswith(markers[1]) else State.MAY_OPEN


def grammar(state: State, markers: tuple[str, str], control: Mapping[str, int]) -> str:
    """Rules; `start` matches thinking, as far as `state` allows it, and then `body`."""
    if state is State.CLOSED:
        return "start: body\n"
    begin, end = (Marker(marker, control) for marker in markers)
    rules = f"THOUGHT: {ANY}\n"
    rules += f"thought: THOUGHT {end.rule}\n" if end.is_control else f"thought[lazy]: THOUGHT {end.rule}\n"
    opening = "" if state is State.OPEN else begin.rule
    rules += f"thinking: {opening} thought {quoted(GAP)}\n"
    return rules + ("start: thinking body\n" if state is State.OPEN else "start: thinking? body\n")


def behind(raw: str, markers: tuple[str, str], state: State) -> str:
    """The answer in a turn's visible text, exactly as it was generated."""
    thinks = state is State.OPEN or (state is State.MAY_OPEN and raw.lstrip().startswith(markers[0]))
    return raw.partition(markers[1])[2].lstrip("\n") if thinks else raw


class ThinkingReader:
    """Implements `Reader`: gives what is behind the thinking to another reader. Line breaks around it are not text."""

    def __init__(self, answer: Reader, markers: tuple[str, str], state: State) -> None:
        self._answer = answer
        self._begin, self._end = markers
        self._state = state
        self._held = ""
        self._fresh = True  # nothing of the thinking, or of the answer, was shown yet

    def feed(self, text: str) -> Sequence[Part]:
        """As `Reader.feed`."""
        if self._state is State.CLOSED and not self._fresh:
            return self._answer.feed(text)
        parts: list[Part] = []
        self._held += text
        if self._state is State.MAY_OPEN:
            self._look(parts)
        if self._state is State.OPEN:
            self._think(parts)
        if self._state is State.CLOSED and self._held:
            parts += self._go_on()
        return parts

    def end(self) -> Sequence[Part]:
        """As `Reader.end`."""
        left, self._held = self._held, ""
        if self._state is State.OPEN:
            left = left.rstrip("\n")
            return (Thinking(left),) if left else ()
        return [*self._answer.feed(left), *self._answer.end()]

    def _look(self, parts: list[Part]) -> None:
        said = self._held.lstrip()
        if said.startswith(self._begin):
            self._held, self._state = said[len(self._begin) :], State.OPEN
        elif not self._begin.startswith(said):
            self._state, self._fresh = State.CLOSED, False
            parts += self._answer.feed(self._held)
            self._held = ""

    def _think(self, parts: list[Part]) -> None:
        if self._fresh:
            self._held = self._held.lstrip("\n")
        thought, marker, rest = self._held.partition(self._end)
        certain = thought if marker else thought[: len(thought) - held_back(thought, self._end)]
        shown = certain.rstrip("\n")
        if shown:
            self._fresh = False
            parts.append(Thinking(shown))
        if marker:
            self._held, self._state, self._fresh = rest, State.CLOSED, True
        else:
            self._held = thought[len(shown) :]

    def _go_on(self) -> Sequence[Part]:
        """The answer begins behind line breaks."""
        said = self._held.lstrip("\n")
        if not said:
            return ()
        self._held, self._fresh = "", False
        return self._answer.feed(said)
