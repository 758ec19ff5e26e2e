"""`TritonBucket`: launches the kernels that encode one bucket, and decode one or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from horovod_topk.kernels.triton.baselines.coders import pack_coded
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
from horovod_topk.kernels.triton.topk.tables import (
    MOST,
    Geometry,
    Tables,
    Together,
    joined,
    power_of_two,
)
from horovod_topk.ops.philox import Stream
from horovod_topk.ops.protocol import Arrived

_ENTRY_LANES = 128  # entries of one rank added at once
_RESIDUAL = 4  # bytes of its elements
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
        payloads: number of payloads that an encode writes; above 1 the recipe is one of `joined`.
        apart: bytes from the beginning of one payload to that of the next.
    """

    def __init__(
        self,
        recipe: Sequence[int],
        device: str,
        geometry: Geometry | None = None,
        payloads: int = 1,
        apart: int = 0,
    ) -> None:
        self._device, self._payloads, self._apart = _resolved(device), payloads, apart
        self._tables = tables = Tables(tuple(recipe), geometry or suited(self._device))
        self._head = tables.head
        place, rows = self._device, [n for row in tables.rows for n in row]
        self._rows = _integers(rows, place, torch.int64)
        self._chunk_owners = _integers(tables.chunk_owners, place)
        self._run_owners = _integers(tables.run_owners, place)
        self._parcel_owners = _integers(tables.parcel_owners, place)
        self._carried = _integers([int(NOWHERE)] * self._head.tensors, place)
        self._sources = Addresses(tables.gradients, self._device)
        self._squares = Addresses(tables.gradients, self._device)
        self._streams = Addresses(3 * self._head.tensors, self._device)
        self._constants = self._device, tables.constants
        self._decoders: dict[tuple[TritonBucket, ...], Decoder] = {}  # by buckets, this one first
        self._encoders: dict[object, TritonBucket | None] = {}  # by shards, and where they are
        self._stream_number = 0

    def encode(
        self,
        residual: Tensor,
        candidate: Tensor,
        gradients: Sequence[Tensor],
        payload: Tensor,
        streams: Sequence[Stream] = (),
        squares: Sequence[Tensor | None] = (),
    ) -> None:
        """Fill flags, values and indices of a payload; leave in `candidate` what is not sent.

        streams: random numbers of each tensor, for kinds of values that draw some.
        squares: for each gradient, the squares to select by, or None; empty: none.
        """
        flat = [packed(gradient) for gradient in gradients]
        weighing, kind = _of_one_kind(squares)
        with on(self._device):
            self._stream_number = current_stream(self._device)
            addresses, chunks = self._sources.point_to(flat), self._chunk_scratch()
            products = candidate
            if weighing:
                products = self._take("products", self._tables.extent, torch.float32)
            weights = self._squares.point_to(weighing) if weighing else addresses
            self._stream(addresses, weights, kind, residual, candidate, products, chunks)
            runs = self._run_scratch()
            self._narrow(products, payload, chunks, runs)
            indices = self._take("indices", self._tables.entries)
            self._scatter(products, payload, runs, indices)
            self._pack(candidate, payload, indices, streams)

    def encode_all(
        self,
        kernels: Sequence[TritonBucket],
        residuals: Sequence[Tensor],
        candidates: Sequence[Tensor],
        gradients: Sequence[Tensor],
        payloads: Sequence[Tensor],
        streams: Sequence[Stream] = (),
        squares: Sequence[Tensor | None] = (),
    ) -> None:
        """`horovod_topk.ops.protocol.EncodesTogether.encode_all`: four launches for all shards.

        Their arenas have to follow one another in memory, as those of `Ops.arrays` do, and so have
        their payloads, at equal distances. Others are encoded one by one.
        """
        if len(kernels) == 1:
            self.encode(residuals[0], candidates[0], gradients, payloads[0], streams, squares)
            return
        distances = _distances(residuals), _distances(candidates), _distances(payloads)
        key = tuple(kernels), *distances
        if key not in self._encoders:
            self._encoders[key] = self._joined(kernels, *distances)
        together = self._encoders[key]
        if together is not None:
            together.encode(residuals[0], candidates[0], gradients, payloads[0], streams, squares)
            return
        for position, kernel in enumerate(kernels):
            own = residuals[position], candidates[position]
            drawn = streams[position * kernel._head.tensors :][: kernel._head.tensors]
            kernel.encode(*own, gradients, payloads[position], drawn, squares)

    def _joined(
        self,
        kernels: Sequence[TritonBucket],
        residuals: tuple[int, ...],
        candidates: tuple[int, ...],
        payloads: tuple[int, ...],
    ) -> TritonBucket | None:
        """Make the kernels of several shards, whose arrays are so many bytes behind the first.

        None: they cannot be encoded together.
        """
        alike = {(each._head.tensors, each._head.flags_at) for each in kernels}
        follow = payloads == tuple(range(0, payloads[-1] + 1, max(payloads[1], 1)))
        aligned = all(at >= 0 and at % (4 * _RESIDUAL) == 0 for at in residuals)
        if len(alike) > 1 or residuals != candidates or not (follow and aligned):
            return None
        elements = [at // _RESIDUAL for at in residuals]
        recipe = joined([each._tables.recipe for each in kernels], elements, payloads[1])
        joint = TritonBucket(
            recipe, str(self._device), self._tables.geometry, len(kernels), payloads[1]
        )
        most = max(joint._tables.extent, payloads[-1] + self._head.payload_bytes)
        return joint if most <= MOST else None

    def decode(
        self, gathered: Tensor, scale: float, flags: Sequence[bool], gradients: Sequence[Tensor]
    ) -> tuple[int, int] | None:
        """gradient[...] = scale times the sum over payloads in their order; all NaN if flagged.

        The flags are read on the device: `flags` is ignored. Indices outside a tensor are dropped,
        and scales are taken as they are, without an error, which would need a wait: this always
        returns None.
        """
        self.decode_all([Arrived(self, gathered, scale, gradients)])
        return None

    @staticmethod
    def heads(
        arrived: Sequence[Arrived[Tensor]], widths: Sequence[int], counts: Sequence[int]
    ) -> list[list[bytes]]:
        """`horovod_topk.ops.protocol.DecodesTogether.heads`: a launch and a copy for all."""
        alike, found = dict[tuple[object, int], list[int]](), [list[bytes]() for _ in arrived]
        for position, (each, width) in enumerate(zip(arrived, widths, strict=True)):
            key = each.gathered.device, each.gathered.numel() // width
            alike.setdefault(key, []).append(position)
        for (_, payloads), positions in alike.items():
            first: Any = arrived[positions[0]].kernel
            total = sum(counts[at] for at in positions)
            with on(first._device):
                first._stream_number = current_stream(first._device)
                every = [arrived[at].gathered.view(payloads, -1) for at in positions]
                rows = [row[:, : counts[at]] for at, row in zip(positions, every, strict=True)]
                room = first._take("heads", payloads * total, torch.uint8)[: payloads * total]
                lines = torch.cat(rows, 1, out=room.view(payloads, total)).tolist()
            begin = 0
            for at in positions:
                found[at] = [bytes(line[begin : begin + counts[at]]) for line in lines]
                begin += counts[at]
        return found

    @staticmethod
    def decode_all(arrived: Sequence[Arrived[Tensor]]) -> None:
        """`horovod_topk.ops.protocol.DecodesTogether.decode_all`: as `decode` of each bucket."""
        alike = dict[tuple[object, int, float], list[Arrived[Tensor]]]()
        for each in arrived:
            bucket: Any = each.kernel
            ranks = each.gathered.numel() // bucket._head.payload_bytes
            alike.setdefault((bucket._constants, ranks, each.scale), []).append(each)
        for (_, _, scale), some in alike.items():
            buckets: list[Any] = [each.kernel for each in some]
            buckets[0]._decode_alike(buckets, scale, some)

    def _decode_alike(
        self, buckets: Sequence[TritonBucket], scale: float, arrived: Sequence[Arrived[Tensor]]
    ) -> None:
        """Decode buckets with the same constants, of which this one is the first."""
        gradients = [gradient for each in arrived for gradient in each.gradients]
        written = [
            g if is_packed(g) else torch.empty(g.shape, dtype=g.dtype, device=g.device)
            for g in gradients
        ]
        key = tuple(buckets)
        if key not in self._decoders:
            self._decoders[key] = Decoder([each._tables for each in buckets], self._device)
        with on(self._device):
            self._decoders[key].decode([each.gathered for each in arrived], scale, written)
            for gradient, result in zip(gradients, written, strict=True):
                note_writing(gradient)
                if result is not gradient:
                    gradient.copy_(result)

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
        flags, tensors = payload[self._head.flags_at :], self._head.tensors // self._payloads
        launch(narrow, (programs + self._payloads * -(-tensors // 8),),
            self._rows, self._chunk_owners, self._run_owners, self._carried, products, flags,
            *chunks, *runs, programs, tensors, self._apart, geometry.crowd, CHUNK=geometry.chunk,
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

    def _pack(
        self, candidate: Tensor, payload: Tensor, indices: Tensor, streams: Sequence[Stream]
    ) -> None:
        tables, programs = self._tables, len(self._tables.parcel_owners)
        if programs and tables.coded:
            drawn = self._streams.store([n for each in streams for n in each.numbers()])
            launch(pack_coded, (programs,),
                self._rows, self._parcel_owners, drawn, candidate, payload,
                KIND=self._head.values, BITS=self._head.bits, KEEPS=self._head.keeps,
                ROWS=tables.parcel_rows, SOME=tables.measured_rows, WIDTH=tables.block,
                TILES=tables.block_tiles, LANES=tables.geometry.parcel // 4, **FOUR_WARPS,
            )  # fmt: skip
        elif programs:
            launch(pack, (programs,),
                self._rows, self._parcel_owners, candidate, payload, indices,
                VALUES=self._head.values, BLOCK=tables.block, ROWS=tables.parcel_rows, **FOUR_WARPS,
            )  # fmt: skip


class Decoder:
    """Decodes the payloads of buckets that have the same constants: two launches for all of them.

    Args:
        buckets: the tables of each.
        device: where the payloads are.
    """

    def __init__(self, buckets: Sequence[Tables], device: torch.device) -> None:
        self._device, self._first = device, buckets[0]
        tables = Together(tuple(buckets))
        self._entries, self._steps = tables.entries, tables.most_entries.bit_length()
        self._rows = _integers([n for row in tables.rows for n in row], device, torch.int64)
        owners, self._tiles = tables.run_owners, len(tables.tile_owners)
        self._run_owners, self._runs = _integers(owners, device), len(owners)
        self._tile_owners = _integers(tables.tile_owners, device)
        count = len(buckets) + sum(each.gradients for each in buckets)
        self._addresses = Addresses(count, device)

    def decode(self, given: Sequence[Tensor], scale: float, gradients: Sequence[Tensor]) -> None:
        """Decode the payloads of each bucket into the gradients of all buckets, which are packed.

        They are on the current stream of the current device.
        """
        head, geometry = self._first.head, self._first.geometry
        if self._tiles == 0:
            return
        ranks, stream_number = given[0].numel() // head.payload_bytes, current_stream(self._device)
        entries, addresses = self._entries, self._addresses.point_to([*given, *gradients])

        def take(name: str, numel: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return scratch(name, numel, dtype, self._device, stream_number)

        indices = take("indices", ranks * entries)
        if self._runs:
            launch(unpack, (self._runs, ranks),
                self._rows, self._run_owners, addresses, indices, entries,
                LANES=geometry.tile, **FOUR_WARPS,
            )  # fmt: skip
        programs = min(self._tiles, geometry.programs * geometry.decoders)
        writers = self._first.writers
        launch(gather, (programs,),
            self._rows, self._tile_owners, addresses, indices,
            take("begins", 2 * ranks * self._tiles),
            take("rows", programs * geometry.output, torch.float32),
            entries, self._tiles, ranks, writers, scale,
            KIND=self._first.kind, VALUES=head.values, BITS=head.bits,
            ROOM=power_of_two(ranks * writers), STEPS=self._steps, OUTPUT=geometry.output,
            BLOCK=self._first.written, LANES=_ENTRY_LANES, **FOUR_WARPS,
        )  # fmt: skip


def _integers(
    values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int32
) -> Tensor:
    return torch.tensor(values or [0], dtype=dtype, device=device)


def _distances(arrays: Sequence[Tensor]) -> tuple[int, ...]:
    """How many bytes behind the first array each begins; 0 if it is empty, -1 if the first is."""
    if not arrays[0].numel():
        return tuple([-1 if each.numel() else 0 for each in arrays])
    first = arrays[0].data_ptr()
    return tuple([each.data_ptr() - first if each.numel() else 0 for each in arrays])


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
