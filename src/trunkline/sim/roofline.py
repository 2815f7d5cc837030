"""An analytic cost model of a transformer on accelerators: the slower of arithmetic and memory traffic.

Roofline model: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009.
Counts per token: 2 FLOP a weight, and 4 FLOP a head dimension, head and position looked at (scores and their weighted
sum). A decode reads the weights once a step and every sequence's KV; of a mixture of experts it reads the experts that
the batch is expected to touch. Left out: communication beyond a flat efficiency, sliding windows, kernels' shapes.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from trunkline.sim.hardware import Efficiency, Hardware


class ModelError(ValueError):
    """A `config.json` that the roofline cannot read."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a Hugging Face `config.json` that costs depend on."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    tie_word_embeddings: bool = False
    num_experts: int | None = None
    num_local_experts: int | None = None
    num_experts_per_tok: int = 0
    moe_intermediate_size: int | None = None
    torch_dtype: str = "bfloat16"


MODELS = {
    "smollm2-135m": ModelConfig(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "llama-3.1-8b": ModelConfig(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
        max_position_embeddings=131072,
    ),
    "qwen3-coder-30b-a3b": ModelConfig(
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
        max_position_embeddings=262144,
    ),
}
"""Configurations of well-known models, so that a first simulation needs no download."""


def read_model(name: str) -> ModelConfig:
    """A model by its name in `MODELS`, or a `config.json` (or the folder that holds one). Raises `ModelError`."""
    if name in MODELS:
        return MODELS[name]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    try:
        return msgspec.json.decode(path.read_bytes(), type=ModelConfig)
    except OSError as error:
        known = ", ".join(MODELS)
        raise ModelError(f"{name}: neither a model known here ({known}) nor a config.json: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ModelError(
            f"{path}: not the configuration of a dense or mixture-of-experts transformer: {error}"
        ) from error


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model matters, derived from its configuration. Weights are counted, not bytes."""

    layers: int
    attention_width: int
    kv_values_per_token: int
    fixed_weights: float
    """Read by every token: attention, dense layers, the output head."""
    expert_weights: float
    """All experts of all layers (0: dense)."""
    experts: int
    experts_per_token: int
    embedding_weights: float

    @classmethod
    def of(cls, model: ModelConfig) -> "Shape":
        """Derive it."""
        head = model.head_dim or model.hidden_size // model.num_attention_heads
        kv_heads = model.num_key_value_heads or model.num_attention_heads
        width = head * model.num_attention_heads
        attention = 2 * model.hidden_size * width + 2 * model.hidden_size * head * kv_heads
        experts = model.num_experts or model.num_local_experts or 0
        expert = 3 * model.hidden_size * (model.moe_intermediate_size or model.intermediate_size)
        dense = experts * model.hidden_size if experts else 3 * model.hidden_size * model.intermediate_size
        table = model.vocab_size * model.hidden_size
        layers = model.num_hidden_layers
        return cls(
            layers=layers,
            attention_width=width,
            kv_values_per_token=2 * layers * head * kv_heads,
            fixed_weights=layers * (attention + dense) + table,
            expert_weights=layers * experts * expert,
            experts=experts,
            experts_per_token=model.num_experts_per_tok,
            embedding_weights=0 if model.tie_word_embeddings else table,
        )

    @property
    def weights(self) -> float:
        """Everything that device memory holds."""
        return self.fixed_weights + self.expert_weights + self.embedding_weights

    @property
    def active_weights(self) -> float:
        """What one token is multiplied with."""
        chosen = self.experts_per_token / self.experts if self.experts else 0.0
        return self.fixed_weights + self.expert_weights * chosen

    def touched_weights(self, tokens: int) -> float:
        """What a call over `tokens` tokens reads, if tokens choose experts independently."""
        if not self.experts:
            return self.fixed_weights
        missed = (1.0 - self.experts_per_token / self.experts) ** tokens
        return self.fixed_weights + self.expert_weights * (1.0 - missed)


class Roofline:
    """Costs of one model split over `devices` of one kind; implements `Costs`."""

    def __init__(
        self,
        model: ModelConfig,
        hardware: Hardware,
        devices: int = 1,
        efficiency: Efficiency | None = None,
        *,
        weight_bytes: float = 2.0,
        kv_value_bytes: float = 2.0,
    ) -> None:
        """`weight_bytes` and `kv_value_bytes`: of one weight and one KV value (2: BF16, 1: FP8)."""
        reached = efficiency or Efficiency()
        together = devices * (reached.parallel if devices > 1 else 1.0)
        self.shape = Shape.of(model)
        self.kv_bytes_per_token = max(1, round(self.shape.kv_values_per_token * kv_value_bytes))
        self.kv_bytes = int(hardware.memory_bytes * devices * reached.usable_memory - self.shape.weights * weight_bytes)
        self._flops_per_ms = hardware.flops * together * reached.compute / 1e3
        self._bytes_per_ms = hardware.memory_bandwidth * together * reached.bandwidth / 1e3
        self._link_per_ms = hardware.link_bandwidth * devices * reached.link / 1e3
        self._weight_bytes = weight_bytes
        self.step_ms, self.turn_ms = reached.step_ms, reached.turn_ms

    def prefill_ms(self, tokens: int, start: int) -> float:
        """See `Costs`."""
        return self._ms(tokens, tokens * (start + tokens / 2), start + tokens)

    def decode_ms(self, sequences: int, context_tokens: float) -> float:
        """See `Costs`."""
        return self._ms(sequences, context_tokens, context_tokens)

    def move_ms(self, bytes_moved: int) -> float:
        """See `Costs`."""
        return bytes_moved / self._link_per_ms

    def _ms(self, tokens: int, looked_at: float, kv_tokens_read: float) -> float:
        """`looked_at`: positions that all tokens together attend to. `kv_tokens_read`: tokens whose KV is read."""
        shape = self.shape
        flops = 2 * shape.active_weights * tokens + 4 * shape.layers * shape.attention_width * looked_at
        read = shape.touched_weights(tokens) * self._weight_bytes + kv_tokens_read * self.kv_bytes_per_token
        return max(flops / self._flops_per_ms, read / self._bytes_per_ms)
