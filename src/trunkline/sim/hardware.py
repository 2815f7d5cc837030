"""Accelerators as the roofline sees them: peak arithmetic, memory bandwidth and size, and the link to host memory.

Figures are the makers' for one device: dense (not sparse) BF16 arithmetic with FP32 accumulation, memory bandwidth,
and the host link's one-direction peak. What of the peaks is reached is `Efficiency`'s assumption, not this table's.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device. Rates are a second: FLOP, bytes."""

    flops: float
    memory_bandwidth: float
    memory_bytes: float
    link_bandwidth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of the peaks that serving reaches, and what a step costs besides.

    These are round figures for good kernels, not measurements; `trunkline calibrate` replaces all of them. `parallel`
    is what each device keeps when a model is split over several.
    """

    compute: float = 0.5
    bandwidth: float = 0.7
    link: float = 0.7
    parallel: float = 0.85
    usable_memory: float = 0.9
    step_ms: float = 1.5
    turn_ms: float = 5.0


HARDWARE = {
    # NVIDIA H100 SXM data sheet: 1,979 TFLOPS BF16 with sparsity, 3.35 TB/s, 80 GB; PCIe 5.0 x16.
    "h100": Hardware(flops=989e12, memory_bandwidth=3.35e12, memory_bytes=80e9, link_bandwidth=64e9),
    # NVIDIA H200 SXM data sheet: the same arithmetic, 4.8 TB/s, 141 GB.
    "h200": Hardware(flops=989e12, memory_bandwidth=4.8e12, memory_bytes=141e9, link_bandwidth=64e9),
    # NVIDIA A100 80GB SXM data sheet: 312 TFLOPS BF16, 2,039 GB/s; PCIe 4.0 x16.
    "a100": Hardware(flops=312e12, memory_bandwidth=2.039e12, memory_bytes=80e9, link_bandwidth=32e9),
    # NVIDIA L40S data sheet: 362 TFLOPS BF16, 864 GB/s, 48 GB GDDR6; PCIe 4.0 x16.
    "l40s": Hardware(flops=362e12, memory_bandwidth=864e9, memory_bytes=48e9, link_bandwidth=32e9),
    # NVIDIA Ada architecture white paper, RTX 4090: 165.2 TFLOPS BF16 with FP32 accumulation, 1,008 GB/s, 24 GB.
    "4090": Hardware(flops=165.2e12, memory_bandwidth=1.008e12, memory_bytes=24e9, link_bandwidth=32e9),
    # Two cores of a server CPU, inferred from SmolLM2-135M on llama.cpp (324 tokens/s of prefill, 51 of decode) and the
    # assumed efficiencies: no maker's figure says what two shared cores give. Calibrate instead where you can.
    "cpu-2core": Hardware(flops=175e9, memory_bandwidth=20e9, memory_bytes=4e9, link_bandwidth=10e9),
}
