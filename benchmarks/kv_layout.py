"""Where runs live inside llama.cpp, and what every choice costs: the figures behind docs/decisions/0001 and 0002.

    python benchmarks/kv_layout.py [layout] [slices] [weights] [joint] [copies] [--depths 512,2048,6144] [--rounds 3]

Variants of one table take turns within every round; a cell is the median in milliseconds. Runs hold synthetic KV
(small random numbers): the kernels' time does not depend on the numbers, and no prefill is needed to get to a depth.
Run it on a quiet machine, one section at a time.
"""

import argparse
import ctypes
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import trunkline.engine  # first: it says how long OpenMP threads spin, which llama.cpp reads when it is loaded

# isort: split

import llama_cpp
import numpy as np

from trunkline.engine.memory import FlashAttention, Slots
from trunkline.engine.model import Model, llama_errors, load_model
from trunkline.engine.quantize import default_model, packaged_model
from trunkline.engine.segments import KvLayout, Segment
from trunkline.engine.threads import Threads, default_threads

INT32_P = ctypes.POINTER(ctypes.c_int32)
Item = tuple[int, int, bool]
"""Sequence, number of tokens, whether the last one's logits are wanted."""


class Context:
    """A bare llama.cpp context of any layout, whose sequences can be set to any depth at once."""

    def __init__(
        self, model: Model, runs: int, tokens: int, *, flash: bool, unified: bool = False, threads: int | None = None
    ) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = runs * tokens, runs
        params.n_batch, params.n_ubatch = 1024, 512
        params.n_threads = params.n_threads_batch = threads or default_threads().batch
        params.flash_attn_type = int(FlashAttention.ON if flash else FlashAttention.OFF)
        params.kv_unified, params.offload_kqv, params.n_outputs_max = unified, False, 32
        with llama_errors() as errors:
            self.context = llama_cpp.llama_init_from_model(model.pointer, params)
            assert self.context, list(errors)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.held = [0] * runs
        self.unified = unified
        self.rng = np.random.default_rng(0)
        self.vocab = model.n_vocab
        self.call([(0, 2, True)])
        size = llama_cpp.llama_state_seq_get_size(self.context, 0)
        probe = np.empty(size, np.uint8)
        llama_cpp.llama_state_seq_get_data(self.context, _bytes(probe), size, 0)
        self.layout = KvLayout.learn(probe, slot=0, streams=1 if unified else runs, tokens=2)
        self.trim(0, 0)

    def call(self, items: Sequence[Item]) -> float:
        """Compute random tokens in one `llama_decode`; milliseconds."""
        n = sum(count for _, count, _ in items)
        seqs = np.repeat([seq for seq, _, _ in items], [count for _, count, _ in items]).astype(np.int32)
        starts = [np.arange(self.held[seq], self.held[seq] + count) for seq, count, _ in items]
        positions = np.concatenate(starts).astype(np.int32)
        tokens = self.rng.integers(100, self.vocab, n, np.int32)
        wanted = np.concatenate([[0] * (count - 1) + [int(last)] for _, count, last in items]).astype(np.int8)
        one, pointers = np.ones(n, np.int32), seqs.ctypes.data + 4 * np.arange(n, dtype=np.uint64)
        batch = llama_cpp.llama_batch(
            n,
            tokens.ctypes.data_as(INT32_P),
            None,
            positions.ctypes.data_as(INT32_P),
            one.ctypes.data_as(INT32_P),
            pointers.ctypes.data_as(ctypes.POINTER(INT32_P)),
            wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
        began = time.perf_counter()
        code = llama_cpp.llama_decode(self.context, batch)
        llama_cpp.llama_synchronize(self.context)
        took = time.perf_counter() - began
        assert code == 0, code
        for seq, count, _ in items:
            self.held[seq] += count
        return took * 1e3

    def trim(self, seq: int, tokens: int) -> None:
        """Cut a sequence back."""
        llama_cpp.llama_memory_seq_rm(self.memory, seq, tokens, -1)
        self.held[seq] = tokens

    def set_depth(self, tokens: int) -> None:
        """Give every sequence `tokens` tokens of synthetic KV."""
        kv = np.random.default_rng(1).normal(0, 0.3, tokens * self.layout.token_bytes // 2).astype(np.float16)
        segment = Segment(self.layout, tokens, kv.view(np.uint8))
        room = np.empty(self.layout.blob_bytes(tokens), np.uint8)
        for seq in range(len(self.held)):
            blob = self.layout.build(room, 0 if self.unified else seq, [(segment, tokens)])
            read = llama_cpp.llama_state_seq_set_data(self.context, _bytes(blob), blob.size, seq)
            assert read == blob.size
            self.held[seq] = tokens

    def empty(self) -> None:
        """Give every sequence nothing."""
        for seq in range(len(self.held)):
            self.trim(seq, 0)

    def timed(self, items: Sequence[Item], repeats: int = 1) -> list[float]:
        """Milliseconds of the same call at the same depth, again and again."""
        held = [(seq, self.held[seq]) for seq, _, _ in items]
        times = []
        for _ in range(repeats):
            times.append(self.call(items))
            for seq, tokens in held:
                self.trim(seq, tokens)
        return times

    def close(self) -> None:
        """Free it."""
        llama_cpp.llama_free(self.context)


def interleave(variants: dict[str, Callable[[], list[float]]], rounds: int) -> dict[str, float]:
    """Median milliseconds of every variant, the variants taking turns."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            times[name] += run()
    return {name: median(values) for name, values in times.items()}


def row(label: str, medians: dict[str, float]) -> None:
    """One line of a table."""
    print(f"| {label:34} | " + " | ".join(f"{ms:9.1f}" for ms in medians.values()) + " |", flush=True)


def head(label: str, names: Sequence[str]) -> None:
    """A table's first lines."""
    print(f"\n| {label:34} | " + " | ".join(f"{name:>9}" for name in names) + " |")
    print("|" + "---|" * (len(names) + 1), flush=True)


def decodes(runs: Sequence[int]) -> list[Item]:
    """One token for each of `runs`."""
    return [(run, 1, True) for run in runs]


def layout(model: Model, depths: Sequence[int], rounds: int) -> None:
    """Streams or one unified buffer, flash attention or not; 8 runs exist at every depth, also when fewer decode."""
    room = max(depths) + 512
    contexts = {
        f"{where}, {'on' if flash else 'off'}": Context(model, 8, room, flash=flash, unified=where == "unified")
        for where in ("streams", "unified")
        for flash in (False, True)
    }
    head("ms a call (layout, flash attention)", list(contexts))
    for depth in depths:
        for context in contexts.values():
            context.set_depth(depth)
        for items, label, repeats in [
            (decodes(range(1)), "decode 1 run", 4),
            (decodes(range(4)), "decode 4 runs", 3),
            (decodes(range(8)), "decode 8 runs", 2),
            ([(0, 64, False)], "prefill slice of 64", 1),
        ]:
            variants = {name: _timer(context, items, repeats) for name, context in contexts.items()}
            row(f"{label} @ {depth}", interleave(variants, rounds))
    for context in contexts.values():
        context.close()


def slices(model: Model, depths: Sequence[int], rounds: int) -> None:
    """Prefill by slice size and depth, flash attention off and on: milliseconds a slice, then tokens a second."""
    room = max(depths) + 512
    contexts = {name: Context(model, 1, room, flash=name == "on") for name in ("off", "on")}
    head("ms a slice", ["off", "on", "off tok/s", "on tok/s"])
    for depth in (0, *depths):
        for context in contexts.values():
            context.empty() if depth == 0 else context.set_depth(depth)
        for size in (16, 32, 64, 128, 256, 512):
            variants = {name: _timer(context, [(0, size, False)], 1) for name, context in contexts.items()}
            medians = interleave(variants, rounds if size < 256 else 2)
            speeds = {f"{name} tok/s": size / ms * 1e3 for name, ms in medians.items()}
            row(f"{size} tokens @ {depth}", medians | speeds)
    for context in contexts.values():
        context.close()


def weights(model: Model, depths: Sequence[int], rounds: int) -> None:
    """Quantizations of the same model, on one thread and on all cores, at the first depth."""
    every = default_threads().batch
    with tempfile.TemporaryDirectory() as folder:
        models = {"Q4_1": load_model(packaged_model()), "Q8_0": model, "Q4_0": _requantized(Path(folder))}
        contexts = {
            f"{name} t{threads}": Context(loaded, 4, depths[0] + 512, flash=False, threads=threads)
            for name, loaded in models.items()
            for threads in sorted({1, every})
        }
        for context in contexts.values():
            context.set_depth(depths[0])
        head(f"ms a call @ {depths[0]}", list(contexts))
        for items, label in [
            (decodes(range(1)), "decode 1 run"),
            (decodes(range(4)), "decode 4 runs"),
            ([(0, 16, False)], "prefill slice of 16"),
            ([(0, 128, False)], "prefill slice of 128"),
        ]:
            variants = {name: _timer(context, items, 3) for name, context in contexts.items()}
            row(label, interleave(variants, rounds))
        for context in contexts.values():
            context.close()
        models["Q4_1"].close()
        models["Q4_0"].close()


def joint(model: Model, depths: Sequence[int], rounds: int) -> None:
    """Decodes and a slice in one call or in two; neighbouring sequence ids or scattered ones."""
    depth = depths[0]
    context = Context(model, 8, depth + 512, flash=False)
    context.set_depth(depth)
    together = [*decodes(range(4)), (4, 64, False)]

    def apart() -> list[float]:
        return [context.timed(decodes(range(4)))[0] + context.timed([(4, 64, False)])[0]]

    head(f"ms @ {depth}", ["one call", "two calls"])
    medians = interleave({"one call": lambda: context.timed(together), "two calls": apart}, rounds + 2)
    row("4 decodes and a slice of 64", medians)
    choices = {"0,1,2,3": (0, 1, 2, 3), "0,2,4,6": (0, 2, 4, 6), "0,1,2,7": (0, 1, 2, 7), "3,2,1,0": (3, 2, 1, 0)}
    head(f"ms @ {depth}", list(choices))
    row("4 decodes in slots", interleave({n: _timer(context, decodes(ids), 4) for n, ids in choices.items()}, rounds))
    context.close()


def copies(model: Model, _: Sequence[int], rounds: int) -> None:
    """Saving, loading and splitting 4,000 tokens, values in columns (flash attention off) and in rows (on)."""
    tokens = 4000
    names = ("columns", "rows")
    head(f"ms for {tokens} tokens", names)
    figures: dict[str, list[float]] = {}
    for flash in (FlashAttention.OFF, FlashAttention.ON):
        slots = Slots(model, slots=2, slot_tokens=4096, flash_attention=flash, threads=Threads(2, 2))
        for start in range(0, tokens, 500):
            slots.prefill(0, np.arange(start, start + 500, dtype=np.int32), last=False)
        cuts = list(pairwise(range(0, tokens + 1, 40)))
        [whole], many = slots.save(0, [(0, tokens)]), slots.save(0, cuts)
        actions: dict[str, Callable[[], object]] = {
            "save whole": lambda: slots.save(0, [(0, tokens)]),  # noqa: B023
            "save the last 300": lambda: slots.save(0, [(tokens - 300, tokens)]),  # noqa: B023
            "save as 100 segments": lambda: slots.save(0, cuts),  # noqa: B023
            "load whole": lambda: slots.load(1, [(whole, tokens)]),  # noqa: B023
            "load from 100 segments": lambda: slots.load(1, [(part, part.tokens) for part in many]),  # noqa: B023
            "split in the middle": lambda: whole.split(2000),  # noqa: B023
            "save the last 300, give up the slot": lambda: slots.save(1, [(tokens - 300, tokens)], keep=False),  # noqa: B023
        }
        for name, action in actions.items():
            slots.load(1, [(whole, tokens)])
            repeats = 1 if "give up" in name else rounds + 2
            figures.setdefault(name, []).append(median(_clock(action) for _ in range(repeats)))
        slots.close()
    for name, values in figures.items():
        row(name, dict(zip(names, values, strict=True)))
    megabytes = tokens * model.kv_bytes_per_token / 1e6
    speeds = [f"{megabytes / ms:.1f} GB/s in {name}" for ms, name in zip(figures["load whole"], names, strict=True)]
    print(f"\nload whole, {megabytes:.0f} MB: {', '.join(speeds)}")


def _timer(context: Context, items: Sequence[Item], repeats: int) -> Callable[[], list[float]]:
    return lambda: context.timed(items, repeats)


def _clock(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1e3


def _requantized(folder: Path) -> Model:
    """The packaged model as Q4_0, which is what an AVX-512 machine multiplies fastest."""
    path = folder / "q4_0.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True
    with llama_errors():
        source = str(packaged_model()).encode()
        assert llama_cpp.llama_model_quantize(source, str(path).encode(), ctypes.byref(params)) == 0
    return load_model(path)


def _bytes(data: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> "ctypes._Pointer[ctypes.c_uint8]":
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


SECTIONS = {"layout": layout, "slices": slices, "weights": weights, "joint": joint, "copies": copies}


def main() -> None:
    """Run the named sections, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], help="which (default: all)")
    parser.add_argument("--depths", default="512,2048,6144", help="tokens that runs hold (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every variant (default: %(default)s)")
    args = parser.parse_args()
    depths = [int(text) for text in args.depths.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(default_model(Path(folder), print))
        print(
            f"{model.path.name}, {default_threads().batch} threads, spin {trunkline.engine.SPIN_COUNT}, "
            f"llama-cpp-python {llama_cpp.__version__}"
        )
        for name in args.sections or SECTIONS:
            SECTIONS[name](model, depths, args.rounds)
        model.close()


if __name__ == "__main__":
    main()
