"""The analytic cost model against counts made by hand, and against what rooflines are known to do."""

from pathlib import Path

import msgspec
import pytest

from trunkline.sim.hardware import HARDWARE, Efficiency
from trunkline.sim.roofline import MODELS, ModelError, Roofline, Shape, read_model

PEAK = Efficiency(compute=1.0, bandwidth=1.0, link=1.0, parallel=1.0, usable_memory=1.0, step_ms=0.0, turn_ms=0.0)


@pytest.mark.parametrize(
    ("name", "weights", "kv_bytes"),
    [("smollm2-135m", 134.5e6, 23_040), ("llama-3.1-8b", 8.03e9, 131_072), ("qwen3-coder-30b-a3b", 30.5e9, 98_304)],
)
def test_weights_and_kv_are_those_that_the_makers_tell(name: str, weights: float, kv_bytes: int) -> None:
    shape = Shape.of(MODELS[name])
    assert shape.weights == pytest.approx(weights, rel=0.01)
    assert shape.kv_values_per_token * 2 == kv_bytes


def test_a_mixture_of_experts_computes_with_few_weights_and_reads_more_of_them_the_larger_the_batch() -> None:
    shape = Shape.of(MODELS["qwen3-coder-30b-a3b"])
    assert shape.active_weights == pytest.approx(3.0e9, rel=0.1)
    assert shape.touched_weights(1) == pytest.approx(shape.active_weights)
    assert shape.active_weights < shape.touched_weights(16) < shape.touched_weights(10_000)
    assert shape.touched_weights(10_000) == pytest.approx(shape.fixed_weights + shape.expert_weights)


def test_decode_is_bound_by_memory_and_prefill_by_arithmetic() -> None:
    costs = Roofline(MODELS["llama-3.1-8b"], HARDWARE["h100"], efficiency=PEAK)
    shape = costs.shape
    read = (shape.fixed_weights * 2 + 1000 * costs.kv_bytes_per_token) / 3.35e12 * 1e3
    assert costs.decode_ms(1, 1000) == pytest.approx(read)
    flops = 2 * shape.active_weights * 4096 + 4 * 32 * 4096 * 4096 * 2048
    assert costs.prefill_ms(4096, 0) == pytest.approx(flops / 989e12 * 1e3)


def test_batching_decodes_is_nearly_free_until_context_dominates() -> None:
    costs = Roofline(MODELS["llama-3.1-8b"], HARDWARE["h100"])
    assert costs.decode_ms(16, 16 * 100) < 1.2 * costs.decode_ms(1, 100)
    assert costs.decode_ms(16, 16 * 100_000) > 5 * costs.decode_ms(1, 100)


def test_two_devices_hold_more_and_are_faster_but_not_twice() -> None:
    one, two = (Roofline(MODELS["llama-3.1-8b"], HARDWARE["a100"], devices) for devices in (1, 2))
    assert two.kv_bytes > 2 * one.kv_bytes
    assert 0.5 < two.prefill_ms(8192, 0) / one.prefill_ms(8192, 0) < 0.65
    assert two.move_ms(10**9) == pytest.approx(one.move_ms(10**9) / 2)


def test_a_configuration_is_read_from_a_file_or_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(MODELS["llama-3.1-8b"]))
    assert read_model(str(tmp_path)) == read_model(str(tmp_path / "config.json")) == MODELS["llama-3.1-8b"]
    (tmp_path / "config.json").write_text('{"hidden_size": 12}')
    with pytest.raises(ModelError, match="not the configuration"):
        read_model(str(tmp_path))
