"""Host KV of token ranges, and how llama.cpp lays a sequence's KV out in a saved state.

A saved state ("blob") of n tokens in slot s, as `llama_state_seq_get_data` of llama.cpp b-2026 (llama-cpp-python
0.3.36: `llama-context.cpp`, `llama-kv-cache.cpp`) writes it, all little-endian:

    u32 magic | i32 sequence | u32 streams | a u32 cell count for every stream: n for stream s, else 0
      and right after stream s's count:
        n x (i32 position, u32 1, i32 sequence) | u32 values transposed? | u32 layers
        planes: every layer's keys, then every layer's values, each with a 12-byte header

A *plane* is one layer's keys or values. Seen as bytes it is an array of shape (outer, n, inner):

    rows    (keys; values with flash attention)      outer = 1,           inner = bytes of one token's row
    columns (values without flash attention)         outer = value width, inner = bytes of one element

so a cut at a token is a slice of the middle axis for both, and no orientation needs converting. A segment keeps its
planes back to back without headers, in the orientation of the context that made it: turning columns into rows and back
costs more than both copies of a restore (see docs/decisions/0001-kv-layout.md).
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trunkline.engine.errors import LayoutError

Bytes = NDArray[np.uint8]

_HEADER = 12  # bytes before a plane, before the stream counts, and of one cell's metadata
_MAGIC = bytes.fromhex("d83c14af")
_CELL = np.dtype([("pos", "<i4"), ("owners", "<u4"), ("seq", "<i4")])


@dataclass(frozen=True, slots=True)
class Planes:
    """`count` equal planes in a row, each of shape (outer, tokens, inner) bytes behind the same 12-byte header."""

    count: int
    outer: int
    inner: int
    header: bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all of these planes."""
        return self.count * self.outer * self.inner


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How one context lays out KV: what stands before the planes, and the planes themselves in order."""

    streams: int
    prefix: bytes
    """The 8 bytes between the cells and the planes: values transposed, number of layers."""
    planes: tuple[Planes, ...]

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token."""
        return sum(p.token_bytes for p in self.planes)

    def blob_bytes(self, tokens: int) -> int:
        """Size of the saved state of a sequence of `tokens` > 0 tokens."""
        headers = sum(p.count for p in self.planes) * _HEADER
        return _HEADER + 4 * self.streams + len(self.prefix) + headers + tokens * (_HEADER + self.token_bytes)

    @classmethod
    def learn(cls, blob: Bytes, *, slot: int, streams: int, tokens: int) -> "KvLayout":
        """Read the layout off a saved state of known content. Raises `LayoutError` if it is not the expected one."""
        raw = blob.tobytes()
        at = _cells_at(slot) + tokens * _CELL.itemsize
        _require(raw[:4] == _MAGIC, f"it starts with {raw[:4].hex()}")
        _require(len(raw) > at + 8, "too short for its cells")
        transposed, layers = struct.unpack_from("<II", raw, at)
        prefix = raw[at : at + 8]
        _require(transposed in (0, 1) and layers > 0, f"values transposed = {transposed}, layers = {layers}")
        # Whatever stands behind the last plane are the zero cell counts of later streams.
        at, end, found = at + 8, len(raw) - 4 * (streams - slot - 1), list[Planes]()
        while at < end:
            header = raw[at : at + _HEADER]
            _require(len(header) == _HEADER, "a plane's header is cut off")
            columns = transposed and sum(p.count for p in found) >= layers
            if columns:
                _, inner, outer = struct.unpack("<iII", header)
            else:
                outer, (_, inner) = 1, struct.unpack("<iQ", header)
            _require(0 < outer * inner <= 1 << 24, f"a plane of {outer} x {inner} bytes a token")
            if found and (found[-1].header, found[-1].outer) == (header, outer):
                found[-1] = Planes(found[-1].count + 1, outer, inner, header)
            else:
                found.append(Planes(1, outer, inner, header))
            at += _HEADER + outer * inner * tokens
        layout = cls(streams, prefix, tuple(found))
        layout.check(blob, slot=slot, first=0, tokens=tokens)
        return layout

    def check(self, blob: Bytes, *, slot: int, first: int, tokens: int) -> None:
        """Raise `LayoutError` unless `blob` is the state of exactly the tokens [first, first + tokens) of `slot`."""
        _require(blob.size == self.blob_bytes(tokens), f"{blob.size} bytes, not {self.blob_bytes(tokens)}")
        written = np.empty_like(blob[: _planes_at(slot, tokens)])
        self._write_head(written, slot, first, tokens)
        _require(bool((written == blob[: written.size]).all()), "its head differs")
        for start, p in self._starts(_planes_at(slot, tokens), tokens, _HEADER):
            header = np.frombuffer(p.header, np.uint8)
            stride = _HEADER + p.outer * tokens * p.inner
            found = np.ndarray((p.count, _HEADER), np.uint8, blob, start, (stride, 1))
            _require(bool((found == header).all()), "a plane's header differs")
        _require(not blob[blob.size - 4 * (self.streams - slot - 1) :].any(), "other sequences are in it")

    def cut(
        self, blob: Bytes, *, slot: int, first: int, tokens: int, ranges: Sequence[tuple[int, int]]
    ) -> "list[Segment]":
        """Copies of token ranges out of the state of tokens [first, first + tokens), checked beforehand."""
        views = self._views(blob, _planes_at(slot, tokens), tokens, _HEADER)
        return [self._copy(views, start - first, end - first) for start, end in ranges]

    def build(self, out: Bytes, slot: int, parts: "Sequence[tuple[Segment, int]]") -> Bytes:
        """The state of the first `used` tokens of each segment, in order from token 0, at the front of `out`."""
        tokens = sum(used for _, used in parts)
        blob = out[: self.blob_bytes(tokens)]
        start = _planes_at(slot, tokens)
        self._write_head(blob, slot, 0, tokens)
        blob[blob.size - 4 * (self.streams - slot - 1) :] = 0
        for at, p in self._starts(start, tokens, _HEADER):
            stride = _HEADER + p.outer * tokens * p.inner
            np.ndarray((p.count, _HEADER), np.uint8, blob, at, (stride, 1))[:] = np.frombuffer(p.header, np.uint8)
        views, done = self._views(blob, start, tokens, _HEADER), 0
        for segment, used in parts:
            for into, source in zip(views, self._views(segment.data, 0, segment.tokens, 0), strict=True):
                into[:, :, done : done + used] = source[:, :, :used]
            done += used
        return blob

    def segment(self, source: "Segment", start: int, end: int) -> "Segment":
        """A copy of tokens [start, end) of a segment."""
        return self._copy(self._views(source.data, 0, source.tokens, 0), start, end)

    def _copy(self, views: list[Bytes], start: int, end: int) -> "Segment":
        tokens = end - start
        data = np.empty(tokens * self.token_bytes, np.uint8)
        for into, source in zip(self._views(data, 0, tokens, 0), views, strict=True):
            into[:] = source[:, :, start:end]
        return Segment(self, tokens, data)

    def _views(self, buffer: Bytes, start: int, tokens: int, gap: int) -> list[Bytes]:
        """One (count, outer, tokens, inner) view for each group of planes; `gap` bytes stand before every plane."""
        return [
            np.ndarray(
                (p.count, p.outer, tokens, p.inner),
                np.uint8,
                buffer,
                at + gap,
                (gap + p.outer * tokens * p.inner, tokens * p.inner, p.inner, 1),
            )
            for at, p in self._starts(start, tokens, gap)
        ]

    def _starts(self, at: int, tokens: int, gap: int) -> Iterator[tuple[int, Planes]]:
        for p in self.planes:
            yield at, p
            at += p.count * gap + tokens * p.token_bytes

    def _write_head(self, out: Bytes, slot: int, first: int, tokens: int) -> None:
        """Everything up to the first plane."""
        counts = [0] * slot + [tokens]
        start = struct.pack(f"<4siI{slot + 1}I", _MAGIC, slot, self.streams, *counts)
        out[: len(start)] = np.frombuffer(start, np.uint8)
        cells = np.ndarray(tokens, _CELL, out, len(start))
        cells["pos"] = np.arange(first, first + tokens)
        cells["owners"] = 1
        cells["seq"] = slot
        at = len(start) + tokens * _CELL.itemsize
        out[at : at + len(self.prefix)] = np.frombuffer(self.prefix, np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Immutable KV of `tokens` consecutive tokens: the planes of `layout` back to back, 1-D, owned by it alone."""

    layout: KvLayout
    tokens: int
    data: Bytes

    def __post_init__(self) -> None:
        assert self.tokens > 0 and self.data.size == self.tokens * self.layout.token_bytes
        self.data.flags.writeable = False

    @property
    def nbytes(self) -> int:
        """Host memory that the KV takes."""
        return self.data.nbytes

    def split(self, at: int) -> "tuple[Segment, Segment]":
        """The first `at` tokens and the rest, as exact copies: dropping either half frees its bytes."""
        assert 0 < at < self.tokens
        return self.layout.segment(self, 0, at), self.layout.segment(self, at, self.tokens)


def _cells_at(slot: int) -> int:
    return _HEADER + 4 * (slot + 1)


def _planes_at(slot: int, tokens: int) -> int:
    return _cells_at(slot) + tokens * _CELL.itemsize + 8


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise LayoutError(
            f"a saved state is not laid out as expected ({what}); "
            "trunkline reads the format of llama-cpp-python 0.3.36: install that version"
        )
