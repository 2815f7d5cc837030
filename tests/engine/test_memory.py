"""Slots on real models: what is saved comes back bit for bit, and what cannot be exact is refused."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import llama_cpp
import numpy as np
import pytest

from trunkline.core.types import Ints, MemoryKind
from trunkline.engine.errors import ContextError, DecodeFailed, MemoryFault, NotCuttable
from trunkline.engine.memory import Checkpoint, FlashAttention, Logits, Slots
from trunkline.engine.model import Model
from trunkline.engine.threads import Threads

NEXT = [901, 17, 4203]
ONE = Threads(1, 1)  # threads that wait for each other by spinning make tests slow on a busy machine


def prompt(tokens: int, seed: int = 1, vocab: int = 40_000) -> Ints:
    return np.random.default_rng(seed).integers(100, vocab, tokens).astype(np.int32)


def fill(slots: Slots, slot: int, tokens: Ints) -> None:
    for start in range(0, len(tokens), 100):
        slots.prefill(slot, tokens[start : start + 100], last=False)


def go_on(slots: Slots, slot: int, tokens: list[int]) -> list[Logits]:
    """Logits after each of `tokens`, one at a time, in a call of its own."""
    rows = []
    for token in tokens:
        slots.decode_tokens([slot], [token])
        rows.append(slots.logits(0).copy())
    return rows


def same(left: list[Logits], right: list[Logits]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def raw_state(slots: Slots, slot: int) -> bytes:
    """The slot's state straight from llama.cpp."""
    size = llama_cpp.llama_state_seq_get_size(slots.context, slot)
    buffer = (ctypes.c_uint8 * size)()
    assert llama_cpp.llama_state_seq_get_data(slots.context, buffer, size, slot) == size
    return bytes(buffer)


@contextmanager
def aborting(slots: Slots, after: int) -> Iterator[None]:
    """llama.cpp gives up a computation at its `after`-th question whether to go on."""
    asked = 0

    def stop(_: Any) -> bool:
        nonlocal asked
        asked += 1
        return asked > after

    callback = llama_cpp.ggml_abort_callback(stop)
    llama_cpp.llama_set_abort_callback(slots.context, callback, None)
    try:
        yield
        assert asked > after
    finally:
        llama_cpp.llama_set_abort_callback(slots.context, llama_cpp.ggml_abort_callback(), None)


@pytest.fixture(scope="module", params=[FlashAttention.OFF, FlashAttention.ON], ids=["columns", "rows"])
def slots(smollm2: Model, request: pytest.FixtureRequest) -> Iterator[Slots]:
    """Three cuttable slots; without flash attention values lie in columns, with it in rows."""
    made = Slots(smollm2, slots=3, slot_tokens=768, threads=ONE, flash_attention=request.param)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def empty(request: pytest.FixtureRequest) -> None:
    for name in ("slots", "window"):
        if name in request.fixturenames:
            made: Slots = request.getfixturevalue(name)
            for slot in range(made.slots):
                made.clear(slot)


# --- memory that can be cut -----------------------------------------------------------------------------------------


def test_a_saved_state_comes_back_byte_for_byte_from_many_odd_pieces(slots: Slots) -> None:
    fill(slots, 1, prompt(313))
    before = raw_state(slots, 1)
    cuts = [0, 1, 2, 31, 32, 33, 257, 300, 312, 313]
    pieces = slots.save(1, list(pairwise(cuts)))
    slots.clear(1)
    slots.load(1, [(piece, piece.tokens) for piece in pieces])
    assert raw_state(slots, 1) == before
    assert slots.length(1) == 313


def test_a_run_goes_on_in_another_slot_exactly_as_if_it_had_never_been_parked(slots: Slots) -> None:
    fill(slots, 0, prompt(313))
    upper, lower = slots.save(0, [(0, 280), (280, 313)])
    fill(slots, 2, prompt(200, seed=2))  # what the slot held before leaves no trace
    slots.load(2, [(upper, 280), (lower, 33)])
    assert same(go_on(slots, 0, NEXT), go_on(slots, 2, NEXT))


def test_a_prefix_loaded_from_part_of_a_segment_is_that_prefix(slots: Slots) -> None:
    tokens = prompt(300)
    fill(slots, 0, tokens[:100])
    fill(slots, 1, tokens)
    [whole] = slots.save(1, [(0, 300)])
    slots.load(1, [(whole, 100)])
    assert slots.length(1) == 100
    assert same(go_on(slots, 0, NEXT), go_on(slots, 1, NEXT))


def test_a_trimmed_slot_goes_on_as_if_the_rest_had_never_been_computed(slots: Slots) -> None:
    tokens = prompt(300)
    fill(slots, 0, tokens[:200])
    fill(slots, 1, tokens)
    slots.trim(1, 200)
    assert slots.length(1) == 200
    assert same(go_on(slots, 0, NEXT), go_on(slots, 1, NEXT))


def test_saving_a_tail_for_good_gives_the_same_bytes_and_empties_the_slot(slots: Slots) -> None:
    fill(slots, 1, prompt(300))
    ranges = [(250, 263), (263, 300)]
    kept = slots.save(1, ranges)
    assert slots.length(1) == 300
    released = slots.save(1, ranges, keep=False)
    assert [s.data.tobytes() for s in released] == [s.data.tobytes() for s in kept]
    assert slots.length(1) == 0
    fill(slots, 1, prompt(10))
    assert slots.length(1) == 10


def test_a_segment_takes_the_bytes_that_the_model_says_a_token_costs(slots: Slots, smollm2: Model) -> None:
    fill(slots, 0, prompt(50))
    [segment] = slots.save(0, [(7, 50)])
    assert smollm2.kv_bytes_per_token == 2 * 30 * 3 * 64 * 2  # keys and values, layers, heads, head size, f16
    assert segment.nbytes == 43 * smollm2.kv_bytes_per_token
    assert smollm2.checkpoint_bytes == 0


def test_runs_decoded_together_get_the_logits_of_their_own_context(slots: Slots) -> None:
    for slot in range(3):
        fill(slots, slot, prompt(40 + slot, seed=slot))
    alone = [go_on(slots, slot, [7 + slot])[0] for slot in range(3)]
    for slot in range(3):
        slots.trim(slot, 40 + slot)
    for together in ([0, 1, 2], [0, 2]):  # neighbours make one batch, others several
        slots.decode_tokens(together, [7 + slot for slot in together])
        for row, slot in enumerate(together):
            assert np.corrcoef(slots.logits(row), alone[slot])[0, 1] > 0.999
            assert np.corrcoef(slots.logits(row), alone[(slot + 1) % 3])[0, 1] < 0.99
            slots.trim(slot, 40 + slot)


def test_all_logits_of_a_long_prefill_are_those_after_each_token(slots: Slots) -> None:
    tokens = prompt(70)
    slots.prefill(0, tokens, last=True, all_logits=True)
    rows = [slots.logits(i).copy() for i in range(70)]
    for i in (0, 31, 32, 69):
        slots.clear(1)
        slots.prefill(1, tokens[: i + 1], last=True)
        assert np.corrcoef(slots.logits(0), rows[i])[0, 1] > 0.999
    assert np.corrcoef(rows[30], rows[31])[0, 1] < 0.99


def test_a_batch_that_llama_cpp_refuses_changes_no_slot(slots: Slots) -> None:
    fill(slots, 0, prompt(60))
    fill(slots, 1, prompt(60))
    with pytest.raises(DecodeFailed, match="not valid") as failed:
        slots.prefill(0, np.array([5, 10**7], np.int32), last=True)
    assert failed.value.code == -1 and failed.value.cleared == ()
    with pytest.raises(DecodeFailed):
        slots.decode_tokens([0, 1], [5, -1])
    assert (slots.length(0), slots.length(1)) == (60, 60)
    fill(slots, 2, prompt(60))
    expected = go_on(slots, 2, NEXT)
    assert same(go_on(slots, 0, NEXT), expected) and same(go_on(slots, 1, NEXT), expected)


@pytest.mark.parametrize("after", [0, 3])
def test_a_computation_that_breaks_off_leaves_each_slot_what_it_held(slots: Slots, after: int) -> None:
    for slot in (0, 1, 2):
        fill(slots, slot, prompt(60))
    with aborting(slots, after), pytest.raises(DecodeFailed) as failed:
        slots.prefill(1, prompt(100, seed=3), last=True)
    assert failed.value.code == 2 and failed.value.cleared == ()
    with aborting(slots, after), pytest.raises(DecodeFailed):
        slots.decode_tokens([0, 2], [11, 12])  # two batches: the first may have been stored
    assert [slots.length(slot) for slot in (0, 1, 2)] == [60, 60, 60]
    slots.clear(0)
    fill(slots, 0, prompt(60))
    expected = go_on(slots, 0, NEXT)
    assert same(go_on(slots, 1, NEXT), expected) and same(go_on(slots, 2, NEXT), expected)


def test_a_first_prefill_that_breaks_off_leaves_the_slot_empty(slots: Slots) -> None:
    with aborting(slots, 3), pytest.raises(DecodeFailed) as failed:
        slots.prefill(1, prompt(100), last=True)
    assert failed.value.cleared == () and slots.length(1) == 0


def test_thread_counts_may_change_between_calls(slots: Slots) -> None:
    fill(slots, 0, prompt(20))
    slots.set_threads(Threads(1, 1))
    go_on(slots, 0, NEXT)
    assert llama_cpp.llama_n_threads(slots.context) == 1
    slots.set_threads(Threads(2, 2))
    assert slots.length(0) == 23


# --- memory that cannot be cut: a sliding window --------------------------------------------------------------------


@pytest.fixture(scope="module")
def window(gemma: Model) -> Iterator[Slots]:
    made = Slots(gemma, slots=2, slot_tokens=1024, threads=ONE, max_batch=128)
    yield made
    made.close()


# Before the window is full; when cells lie outside it; after the ring of 768 cells has wrapped around.
@pytest.mark.parametrize("tokens", [300, 600, 820])
def test_a_window_goes_on_from_its_checkpoint_exactly_as_if_never_parked(window: Slots, tokens: int) -> None:
    check_window(window, tokens)


def test_a_window_with_flash_attention_goes_on_exactly_too(gemma: Model) -> None:
    made = Slots(gemma, slots=2, slot_tokens=1024, threads=ONE, flash_attention=FlashAttention.ON, max_batch=128)
    check_window(made, 820)
    made.close()


def check_window(window: Slots, tokens: int) -> None:
    fill(window, 0, prompt(tokens))
    checkpoint = window.checkpoint(0)
    window.load_checkpoint(1, checkpoint)
    assert (checkpoint.tokens, window.length(1)) == (tokens, tokens)
    for slot in (0, 1):
        window.prefill(slot, prompt(50, seed=2), last=True)
    assert same(go_on(window, 0, NEXT), go_on(window, 1, NEXT))


def test_a_checkpoint_serves_any_number_of_branches(window: Slots) -> None:
    fill(window, 0, prompt(600))
    checkpoint = window.checkpoint(0)
    first = go_on(window, 0, NEXT)
    for _ in range(2):
        window.load_checkpoint(0, checkpoint)
        assert same(go_on(window, 0, NEXT), first)


def test_a_window_is_not_cut_anywhere_but_to_nothing(window: Slots) -> None:
    fill(window, 0, prompt(600))
    window.trim(0, 600)
    for refused in (lambda: window.trim(0, 590), lambda: window.save(0, [(0, 600)])):
        with pytest.raises(NotCuttable, match="checkpoint"):
            refused()
    assert window.length(0) == 600
    window.trim(0, 0)
    assert window.length(0) == 0


def test_a_window_survives_a_batch_that_fails(window: Slots) -> None:
    """The ring has room for a window and a batch, so a batch cannot overwrite what the tokens before it see."""
    fill(window, 0, prompt(820))
    checkpoint = window.checkpoint(0)
    with aborting(window, 3), pytest.raises(DecodeFailed) as failed:
        window.prefill(0, prompt(128, seed=2), last=True)
    assert failed.value.cleared == () and window.length(0) == 820
    with pytest.raises(DecodeFailed, match="not valid"):
        window.decode_tokens([0], [-5])
    window.load_checkpoint(1, checkpoint)
    assert same(go_on(window, 0, NEXT), go_on(window, 1, NEXT))


@pytest.mark.parametrize("tokens", [1, 300, 512, 820])
def test_checkpoints_stay_within_the_cost_that_the_model_states(window: Slots, gemma: Model, tokens: int) -> None:
    fill(window, 0, prompt(tokens))
    # A state begins with its sequence and has two caches' stream counts.
    allowed = tokens * gemma.kv_bytes_per_token + gemma.checkpoint_bytes
    nbytes = window.checkpoint(0).nbytes
    assert nbytes <= allowed + 1000
    assert nbytes >= 0.95 * allowed or tokens < gemma.n_swa


def test_a_checkpoint_that_claims_other_tokens_than_it_holds_is_a_fault_and_clears_the_slot(window: Slots) -> None:
    fill(window, 0, prompt(300))
    checkpoint = window.checkpoint(0)
    with pytest.raises(MemoryFault, match="where 301 tokens must be"):
        window.load_checkpoint(1, Checkpoint(301, checkpoint.data))
    assert window.length(1) == 0
    with pytest.raises(MemoryFault, match="took 0 of"):
        window.load_checkpoint(0, Checkpoint(300, checkpoint.data[:-8]))
    assert window.length(0) == 0
    window.load_checkpoint(0, checkpoint)
    assert window.length(0) == 300


# --- memory that cannot be cut: a running state ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mamba", "lfm2"])
def test_a_running_state_goes_on_from_its_checkpoint_in_any_slot(name: str, request: pytest.FixtureRequest) -> None:
    model: Model = request.getfixturevalue(name)
    made = Slots(model, slots=3, slot_tokens=512, threads=ONE)
    assert made.kind is MemoryKind.CHECKPOINTS
    tokens = prompt(150, vocab=128)
    fill(made, 0, tokens)
    fill(made, 2, tokens[:60])
    checkpoint = made.checkpoint(0)
    assert checkpoint.nbytes <= 150 * model.kv_bytes_per_token + model.checkpoint_bytes + 1000
    made.load_checkpoint(2, checkpoint)
    assert same(go_on(made, 0, [1, 2, 3]), go_on(made, 2, [1, 2, 3]))
    with pytest.raises(NotCuttable):
        made.trim(0, 100)
    assert made.length(0) == 153
    made.close()


@pytest.mark.parametrize("name", ["mamba", "lfm2"])
def test_a_running_state_that_has_moved_on_in_a_broken_computation_is_cleared(
    name: str, request: pytest.FixtureRequest
) -> None:
    made = Slots(request.getfixturevalue(name), slots=2, slot_tokens=512, threads=ONE)
    tokens = prompt(150, vocab=128)
    fill(made, 0, tokens)
    with aborting(made, 1), pytest.raises(DecodeFailed) as failed:
        made.prefill(0, tokens[:50], last=True)
    assert failed.value.cleared == (0,) and made.length(0) == 0
    fill(made, 0, tokens)
    fill(made, 1, tokens)
    assert same(go_on(made, 0, [1, 2]), go_on(made, 1, [1, 2]))
    made.close()


# --- contexts that cannot be made -------------------------------------------------------------------------------------


def test_a_context_longer_than_the_model_was_trained_for_is_refused(smollm2: Model) -> None:
    with pytest.raises(ContextError, match=r"trained for 8192 tokens.*set --ctx to at most 8192"):
        Slots(smollm2, slots=1, slot_tokens=8193)


def test_more_slots_than_llama_cpp_has_sequences_for_are_refused(smollm2: Model) -> None:
    with pytest.raises(ContextError, match="n_seq_max must be <= 256"):
        Slots(smollm2, slots=257, slot_tokens=256)


@pytest.mark.parametrize("tokens", [1, 256, 300])
def test_a_slot_holds_what_was_asked_for_whatever_llama_cpp_rounds_to(smollm2: Model, tokens: int) -> None:
    made = Slots(smollm2, slots=2, slot_tokens=tokens, threads=ONE)
    fill(made, 1, prompt(tokens))
    assert made.length(1) == tokens
    made.close()
