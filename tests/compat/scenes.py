"""What the model says in tests with real clients: scenes, written by a test, played by the server.

A task names its scene, `[scene NAME]`, and so do the tasks that sub-agents get. A scene begins with the last message
that names it; its k-th answer is the k-th of the assistant from there on. So an answer depends on its own prompt only,
whatever else is served at the same time, and however often a client sends a request again.

    Stage(folder).write("tide", [call("tide", place="pier"), "The tide is {last}."])
    Stage(folder).answer(prompt)    # None if the prompt names no scene: then the model chooses

`{last}` in an answer is the text of the last message, what tools returned above all: an answer that quotes it proves
that it came through client, API and template. Beside a call it is written as JSON has it.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CUE = re.compile(r"\[scene ([a-z0-9-]+)\]")
TURN = re.compile(r"(?:<\|im_start\|>|<start_of_turn>)(\w+)\n(.*?)(?=<\|im_end\|>|<end_of_turn>|\Z)", re.DOTALL)
"""One message of a prompt in ChatML or in Gemma's form: role and text."""

RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
CALL = "<tool_call>"
ANSWERS = frozenset({"assistant", "model"})


def cue(name: str) -> str:
    """The words that begin scene `name`."""
    return f"[scene {name}]"


def call(name: str, /, **arguments: object) -> str:
    """A tool call, as models without a form of their own are asked to write it."""
    return f'{CALL}\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@dataclass(frozen=True)
class Stage:
    """Scenes are files in `folder`: tests write them, the server, another process, reads them."""

    folder: Path

    def write(self, name: str, answers: Sequence[str]) -> str:
        """Add a scene; returns its cue."""
        path = self.folder / f"{name}.json"
        assert not path.exists(), f"there is a scene {name!r} already"
        path.write_text(json.dumps(list(answers)))
        return cue(name)

    def answer(self, prompt: str) -> str | None:
        """What comes next in the scene that `prompt` is in. Raises `IndexError` when the scene is over."""
        messages = TURN.findall(prompt)
        began = [at for at, (role, text) in enumerate(messages) if role not in ANSWERS and _cues(text)]
        if not began:
            return None
        name = _cues(messages[began[-1]][1])[-1]
        answers: list[str] = json.loads((self.folder / f"{name}.json").read_text())
        spoken = sum(role in ANSWERS for role, _ in messages[began[-1] :]) - 1
        if spoken >= len(answers):
            raise IndexError(f"scene {name!r} has {len(answers)} answers, and the client asks for another: {prompt!r}")
        answer, last = answers[spoken], _last(messages)
        return answer.replace("{last}", json.dumps(last)[1:-1] if CALL in answer else last)


def _cues(text: str) -> list[str]:
    return CUE.findall(RESULT.sub("", text))


def _last(messages: Sequence[tuple[str, str]]) -> str:
    """The text before the answer, in one line; of tool results the results alone."""
    text = messages[-2][1].removeprefix("Observation:")  # smolagents' word for results, and its stop string
    return " ".join(" ".join(RESULT.findall(text) or [text]).split())
