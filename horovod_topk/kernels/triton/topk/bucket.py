"""`TritonBucket`: launches the kernels that encode and decode one bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from horovod_topk.kernels.triton.launching import FOUR_WARPS, KINDS, SIXTEEN_WARPS, launch, on
from horovod_topk.kernels.triton.memory import (
    Addresses,
    current_stream,
    is_packed,
    note_writing,
    packed,
    scratch,
)
from horovod_topk.kernels.triton.topk.gather import gather
from horovod_topk.kernels.triton.topk.index_coding import unpack
from horovod_topk.kernels.triton.topk.narrow import COUNTS, narrow
from horovod_topk.kernels.triton.topk.numbers import BINS, NOWHERE, STATS
from horovod_topk.kernels.triton.topk.pack import pack
from horovod_topk.kernels.triton.topk.scatter import scatter
from horovod_topk.kernels.triton.topk.stream import stream
from horovod_topk.kernels.triton.topk.tables import Geometry, Tables, power_of_two

_ENTRY_LANES = 128  # entries of one rank added at once
UNWEIGHED = -1  # elements are selected by their magnitude alone


class TritonBucket:
    """`horovod_topk.ops.protocol.Fused` for torch.Tensor on one GPU.

    Launches use the current stream and do not wait. After a first run, `encode` and `decode` can be
    captured in a CUDA graph. A bucket is used on one stream at a time, like its arenas. An estimate
    of each tensor's threshold is kept on the device from step to step: it makes the next search
    faster, and never changes its result.

    Args:
        recipe: see `Fused`; a recipe for which `unsupported` returns None.
        device: "cuda", "cuda:1", or "cpu" under Triton's interpreter.
        geometry: how work is divided; the default suits the device.
    """

    def __init__(
        self, recipe: Sequence[int], device: str, geometry: Geometry | None = None
    ) -> None:
        self._device = _resolved(device)
        self._tables = tables = Tables(tuple(recipe), geometry or suited(self._device))
        self._head = tables.head
        self._rows = self._integers([n for row in tables.rows for n in row], torch.int64)
        self._chunk_owners = self._integers(tables.chunk_owners)
        self._run_owners = self._integers(tables.run_owners)
        self._tile_owners = self._integers(tables.tile_owners)
        self._parcel_owners = self._integers(tables.parcel_owners)
        self._carried = self._integers([int(NOWHERE)] * self._head.tensors)
        self._sources = Addresses(tables.gradients, self._device)
        self._squares = Addresses(tables.gradients, self._device)
        self._targets = Addresses(tables.gradients, self._device)
        self._stream_number = 0

    def encode(
        self,
        residual: Tensor,
        candidate: Tensor,
        gradients: Sequence[Tensor],
        payload: Tensor,
        streams: Sequence[object] = (),
        squares: Sequence[Tensor | None] = (),
    ) -> None:
        """Fill flags, values and indices of a payload; leave in `candidate` what is not sent.

        streams: random numbers; unused, as the supported kinds of values draw none.
        squares: for each gradient, the squares to select by, or None; empty: none.
        """
        flat = [packed(gradient) for gradient in gradients]
        weighing, kind = _of_one_kind(squares)
        with on(self._device):
            self._stream_number = current_stream(self._device)
            addresses, chunks = self._sources.point_to(flat), self._chunk_scratch()
            products = candidate
            if weighing:
                products = self._take("products", candidate.numel(), torch.float32)
            weights = self._squares.point_to(weighing) if weighing else addresses
            self._stream(addresses, weights, kind, residual, candidate, products, chunks)
            runs = self._run_scratch()
            self._narrow(products, payload, chunks, runs)
            indices = self._take("indices", self._tables.entries)
            self._scatter(products, payload, runs, indices)
            self._pack(candidate, payload, indices)

    def decode(
        self, gathered: Tensor, scale: float, flags: Sequence[bool], gradients: Sequence[Tensor]
    ) -> tuple[int, int] | None:
        """gradient[...] = scale times the sum over payloads in their order; all NaN if flagged.

        The flags are read on the device: `flags` is ignored. Indices outside a tensor are dropped,
        and scales are taken as they are, without an error, which would need a wait: this always
        returns None.
        """
        written = [
            g if is_packed(g) else torch.empty(g.shape, dtype=g.dtype, device=g.device)
            for g in gradients
        ]
        with on(self._device):
            self._stream_number = current_stream(self._device)
            self._gather(gathered, scale, self._targets.point_to(written))
            for gradient, result in zip(gradients, written, strict=True):
                note_writing(gradient)
                if result is not gradient:
                    gradient.copy_(result)
        return None

    def _integers(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values or [0], dtype=dtype, device=self._device)

    def _take(self, name: str, numel: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return scratch(name, numel, dtype, self._device, self._stream_number)

    def _chunk_scratch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scratch memory of the first two passes: stats, slots and histograms."""
        chunks = len(self._tables.chunk_owners)
        return (
            self._take("stats", chunks * int(STATS)),
            self._take("slots", chunks * self._tables.geometry.slot),
            self._take("histograms", chunks * int(BINS), torch.int16),
        )

    def _run_scratch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scratch memory of the last two passes: brackets, counts and asides."""
        runs = len(self._tables.run_owners)
        return (
            self._take("brackets", self._head.tensors * 2),
            self._take("counts", runs * int(COUNTS)),
            self._take("asides", runs * self._tables.run_slot),
        )

    def _stream(
        self,
        addresses: Tensor,
        squares: Tensor,
        kind: int,
        residual: Tensor,
        candidate: Tensor,
        products: Tensor,
        chunks: Any,
    ) -> None:
        geometry, programs = self._tables.geometry, len(self._tables.chunk_owners)
        if programs:
            launch(stream, (programs,),
                self._rows, self._chunk_owners, addresses, squares, self._carried,
                residual, candidate, products, *chunks, KIND=self._tables.kind,
                WEIGHS=kind, TILE=geometry.tile, CHUNK=geometry.chunk,
                SLOT=geometry.slot, **FOUR_WARPS,
            )  # fmt: skip

    def _narrow(self, products: Tensor, payload: Tensor, chunks: Any, runs: Any) -> None:
        tables, geometry = self._tables, self._tables.geometry
        programs = len(tables.run_owners)
        flags = payload[self._head.flags_at :]
        launch(narrow, (programs + -(-self._head.tensors // 8),),
            self._rows, self._chunk_owners, self._run_owners, self._carried, products, flags,
            *chunks, *runs, programs, self._head.tensors, geometry.crowd, CHUNK=geometry.chunk,
            SLOT=geometry.slot, RUN_CHUNKS=tables.run_chunks,
            CHUNKS_ROOM=power_of_two(tables.run_chunks), ROOM=tables.run_slot,
            LANES=geometry.lanes, SAMPLE=2 * geometry.sample, **SIXTEEN_WARPS,
        )  # fmt: skip

    def _scatter(self, products: Tensor, payload: Tensor, runs: Any, indices: Tensor) -> None:
        tables, programs = self._tables, len(self._tables.run_owners)
        if programs:
            launch(scatter, (programs,),
                self._rows, self._run_owners, self._carried, products, payload, *runs, indices,
                RUN=tables.run, ROOM=tables.run_slot, LANES=tables.geometry.lanes, **SIXTEEN_WARPS,
            )  # fmt: skip

    def _pack(self, candidate: Tensor, payload: Tensor, indices: Tensor) -> None:
        tables, programs = self._tables, len(self._tables.parcel_owners)
        if programs:
            launch(pack, (programs,),
                self._rows, self._parcel_owners, candidate, payload, indices,
                VALUES=self._head.values, BLOCK=tables.block, ROWS=tables.parcel_rows, **FOUR_WARPS,
            )  # fmt: skip

    def _unpack(self, gathered: Tensor, ranks: int) -> Tensor:
        """Decode the indices of all payloads: [ranks, entries] int32."""
        tables, programs = self._tables, len(self._tables.run_owners)
        indices = self._take("indices", ranks * tables.entries)
        if programs:
            launch(unpack, (programs, ranks),
                self._rows, self._run_owners, gathered, indices, tables.entries,
                self._head.payload_bytes, LANES=tables.geometry.tile, **FOUR_WARPS,
            )  # fmt: skip
        return indices

    def _gather(self, gathered: Tensor, scale: float, addresses: Tensor) -> None:
        tables, head, geometry = self._tables, self._head, self._tables.geometry
        tiles, ranks = len(tables.tile_owners), gathered.numel() // head.payload_bytes
        if tiles == 0:
            return
        indices = self._unpack(gathered, ranks)
        begins = self._take("begins", 2 * ranks * tiles)
        programs = min(tiles, geometry.programs * geometry.decoders)
        rows = self._take("rows", programs * geometry.output, torch.float32)
        launch(gather, (programs,),
            self._rows, self._tile_owners, addresses, gathered, indices, begins, rows,
            tables.entries, tiles, ranks, head.payload_bytes, tables.writers, head.flags_at, scale,
            KIND=tables.kind, VALUES=head.values, ROOM=power_of_two(ranks * tables.writers),
            STEPS=tables.most_entries.bit_length(), OUTPUT=geometry.output, BLOCK=geometry.block,
            LANES=_ENTRY_LANES, **FOUR_WARPS,
        )  # fmt: skip


def _of_one_kind(squares: Sequence[Tensor | None]) -> tuple[list[Tensor | None], int]:
    """Return packed squares, and the dtype that they have: float32 if theirs differ."""
    dtypes = {each.dtype for each in squares if each is not None}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    dtype = dtype if dtype in KINDS else torch.float32
    wide = [None if each is None else packed(each.to(dtype)) for each in squares]
    return wide, KINDS[dtype] if wide else UNWEIGHED


def suited(device: torch.device) -> Geometry:
    """The default sizes, with one program for each multiprocessor of the device."""
    if device.type != "cuda":
        return Geometry()
    properties = torch.cuda.get_device_properties(device)
    return replace(Geometry(), programs=properties.multi_processor_count)


def _resolved(device: str) -> torch.device:
    resolved = torch.device(device)
    if device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return resolved
