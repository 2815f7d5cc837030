"""Segments against a second, independent writer of llama.cpp's state format."""

import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.engine.errors import LayoutError
from trunkline.engine.segments import Bytes, KvLayout, Segment

STREAMS = 3


def write_blob(
    cells: Bytes, *, slot: int, transposed: bool, first: int = 0, layers: int = 2, key: int = 6, value: int = 4
) -> Bytes:
    """The state of `len(cells)` tokens; `cells[t]` are the bytes of token t, all layers' keys and then all values."""
    n = len(cells)
    out = struct.pack("<IiI", 0xAF143CD8, slot, STREAMS) + struct.pack("<I", 0) * slot + struct.pack("<I", n)
    out += b"".join(struct.pack("<iIi", first + t, 1, slot) for t in range(n))
    out += struct.pack("<II", transposed, layers)
    for i in range(layers):
        out += struct.pack("<iQ", 1, key) + cells[:, i * key : (i + 1) * key].tobytes()
    for i in range(layers):
        start = layers * key + i * value
        values = cells[:, start : start + value]
        if transposed:  # `value / 2` elements of two bytes, each element's tokens side by side
            columns = values.reshape(n, value // 2, 2).transpose(1, 0, 2)
            out += struct.pack("<iII", 1, 2, value // 2) + columns.tobytes()
        else:
            out += struct.pack("<iQ", 1, value) + values.tobytes()
    out += struct.pack("<I", 0) * (STREAMS - slot - 1)
    return np.frombuffer(out, np.uint8).copy()


def random_cells(tokens: int) -> Bytes:
    return np.random.default_rng(tokens).integers(0, 256, (tokens, 20), np.uint8)


def layout_of(transposed: bool) -> KvLayout:
    probe = write_blob(random_cells(2), slot=0, transposed=transposed)
    return KvLayout.learn(probe, slot=0, streams=STREAMS, tokens=2)


def cut_all(layout: KvLayout, blob: Bytes, tokens: int, cuts: list[int], slot: int = 0) -> list[Segment]:
    bounds = [0, *sorted(cuts), tokens]
    return layout.cut(blob, slot=slot, first=0, tokens=tokens, ranges=list(pairwise(bounds)))


@settings(max_examples=60, deadline=None)
@given(
    transposed=st.booleans(),
    tokens=st.integers(1, 40),
    source=st.integers(0, STREAMS - 1),
    target=st.integers(0, STREAMS - 1),
    data=st.data(),
)
def test_a_state_built_from_any_cuts_is_the_state_itself(
    transposed: bool, tokens: int, source: int, target: int, data: st.DataObject
) -> None:
    layout = layout_of(transposed)
    cells = random_cells(tokens)
    cuts = data.draw(st.sets(st.integers(1, tokens - 1), max_size=6)) if tokens > 1 else set()
    blob = write_blob(cells, slot=source, transposed=transposed)
    layout.check(blob, slot=source, first=0, tokens=tokens)
    segments = cut_all(layout, blob, tokens, list(cuts), slot=source)
    room = np.full(10_000, 0xEE, np.uint8)
    built = layout.build(room, target, [(segment, segment.tokens) for segment in segments])
    assert built.tobytes() == write_blob(cells, slot=target, transposed=transposed).tobytes()


@pytest.mark.parametrize("transposed", [False, True])
def test_using_part_of_a_segment_builds_the_state_of_that_prefix(transposed: bool) -> None:
    layout = layout_of(transposed)
    cells = random_cells(9)
    first, second = cut_all(layout, write_blob(cells, slot=0, transposed=transposed), 9, [4])
    built = layout.build(np.zeros(5_000, np.uint8), 1, [(first, 4), (second, 3)])
    assert built.tobytes() == write_blob(cells[:7], slot=1, transposed=transposed).tobytes()


@pytest.mark.parametrize("transposed", [False, True])
def test_the_state_of_a_tail_gives_the_same_segment_as_the_whole_state(transposed: bool) -> None:
    layout = layout_of(transposed)
    cells = random_cells(9)
    whole = cut_all(layout, write_blob(cells, slot=1, transposed=transposed), 9, [5], slot=1)[1]
    tail = write_blob(cells[4:], slot=1, transposed=transposed, first=4)
    layout.check(tail, slot=1, first=4, tokens=5)
    [cut] = layout.cut(tail, slot=1, first=4, tokens=5, ranges=[(5, 9)])
    assert cut.data.tobytes() == whole.data.tobytes()


@pytest.mark.parametrize("transposed", [False, True])
def test_a_split_makes_two_copies_that_share_no_memory_with_the_whole(transposed: bool) -> None:
    layout = layout_of(transposed)
    [whole] = cut_all(layout, write_blob(random_cells(9), slot=0, transposed=transposed), 9, [])
    upper, lower = whole.split(4)
    assert (upper.tokens, lower.tokens) == (4, 5)
    assert upper.nbytes + lower.nbytes == whole.nbytes == 9 * layout.token_bytes == 9 * 20
    assert not np.shares_memory(upper.data, whole.data) and not np.shares_memory(lower.data, whole.data)
    rebuilt = layout.build(np.zeros(5_000, np.uint8), 0, [(upper, 4), (lower, 5)])
    assert rebuilt.tobytes() == layout.build(np.zeros(5_000, np.uint8), 0, [(whole, 9)]).tobytes()


def test_a_segment_cannot_be_written_to() -> None:
    [segment] = cut_all(layout_of(True), write_blob(random_cells(3), slot=0, transposed=True), 3, [])
    with pytest.raises(ValueError, match="read-only"):
        segment.data[0] = 1


@pytest.mark.parametrize("at", [0, 4, 8, 12, 16, 20, 24, 100 - 20])
def test_a_state_that_differs_anywhere_outside_its_planes_is_refused(at: int) -> None:
    layout = layout_of(True)
    blob = write_blob(random_cells(5), slot=0, transposed=True)
    blob[at] ^= 1
    with pytest.raises(LayoutError, match="install that version"):
        layout.check(blob, slot=0, first=0, tokens=5)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_changed_plane_header_is_refused(transposed: bool) -> None:
    layout = layout_of(transposed)
    blob = write_blob(random_cells(5), slot=0, transposed=transposed)
    last_header = blob.size - 4 * (STREAMS - 1) - 5 * 4 - 12
    blob[last_header] ^= 1
    with pytest.raises(LayoutError, match="a plane's header differs"):
        layout.check(blob, slot=0, first=0, tokens=5)


@pytest.mark.parametrize("grown", [-1, 1])
def test_a_state_of_another_size_is_refused(grown: int) -> None:
    layout = layout_of(False)
    blob = np.resize(write_blob(random_cells(5), slot=0, transposed=False), 1000)
    with pytest.raises(LayoutError, match="bytes, not"):
        layout.check(blob[: layout.blob_bytes(5) + grown], slot=0, first=0, tokens=5)


def test_another_sequences_cells_in_a_state_are_refused() -> None:
    layout = layout_of(True)
    blob = write_blob(random_cells(5), slot=0, transposed=True)
    blob[-1] = 1
    with pytest.raises(LayoutError, match="other sequences"):
        layout.check(blob, slot=0, first=0, tokens=5)


@pytest.mark.parametrize("size", [3, 30, 60, 100, 131])
def test_a_layout_is_not_learned_from_a_state_that_is_cut_short(size: int) -> None:
    blob = write_blob(random_cells(2), slot=0, transposed=True)
    assert blob.size > size
    with pytest.raises(LayoutError):
        KvLayout.learn(blob[:size], slot=0, streams=STREAMS, tokens=2)


def test_a_layout_is_not_learned_from_cells_that_carry_more_than_a_position() -> None:
    """M-RoPE models write twelve more bytes a cell."""
    blob = write_blob(random_cells(2), slot=0, transposed=True)
    cells_end = 12 + 4 + 2 * 12
    wider = np.concatenate([blob[:cells_end], np.full(24, 7, np.uint8), blob[cells_end:]])
    with pytest.raises(LayoutError):
        KvLayout.learn(wider, slot=0, streams=STREAMS, tokens=2)
