"""Reader of quantized models, block-wise FP8 (DeepSeek's) and MXFP4 (gpt-oss's), which dequantizes while it reads.

A quantized tensor consists of codes, each of which stands for a number, and of scales: factors that each apply to a
block of codes. The scales are a separate tensor, perhaps in another file. Codes are read into slabs (temporary memory
for small boxes of a tensor), as for any conversion: each slab is translated by a table of the codes' values, multiplied
by its scales, and copied to its destination. So memory is bounded, whatever the size of a tensor.

An item is one slice of a tensor that a load plan requests. It is cut into pieces, which are small enough to hold the
scales of a piece in memory. The scales of several pieces are read at a time, in the order of the pieces in the files,
because most tensors have only some hundred scales, and separate reads of so few bytes would be slow.
"""

from __future__ import annotations

import functools
import math
import operator
import os
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.quantized_hf_storage import (
    QuantizedHuggingFaceStorageReader as TorchsReader,
)

from tensorferry._core import write_values_of_codes
from tensorferry.base import openmp
from tensorferry.base.checks import positive
from tensorferry.base.ranges import slabs
from tensorferry.checkpoint.errors import CheckpointError
from tensorferry.checkpoint.storage import destinations
from tensorferry.checkpoint.storage.contents import Item
from tensorferry.checkpoint.storage.huggingface import HuggingFaceStorageReader, LocatedTensors
from tensorferry.checkpoint.storage.reader import read_boxes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.distributed.checkpoint.metadata import Metadata

    from tensorferry.base.checks import Readable
    from tensorferry.checkpoint.progress import Listener
    from tensorferry.checkpoint.storage.huggingface import PartLocation
    from tensorferry.checkpoint.storage.reading import ReadRequest
    from tensorferry.checkpoint.zipformat.blobs import Payload

_WEIGHT, _SCALE_OF_WEIGHT = ".weight", ".weight_scale_inv"
_BLOCKS, _SCALES_OF_BLOCKS = "_blocks", "_scales"

# The limit for the codes of a piece, and for the scales that are read at a time.
_PIECE_NBYTES = 16 << 20
_SCALES_NBYTES = 1 << 20

# The number of elements that are converted at a time, so that they stay in the processor's cache.
_VALUED_NUMEL = 128 << 10

# The MXFP4 format: _E2M1 has the values of the low three of four bits; the highest bit is the sign. A scale byte b
# represents the factor 2 ** (b - _E8M0_BIAS).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS = 127


class QuantizedHuggingFaceStorageReader(HuggingFaceStorageReader, TorchsReader):
    """Loads quantized models as torch's QuantizedHuggingFaceStorageReader does, and dequantizes while it reads.

    ``x.weight`` with ``x.weight_scale_inv`` is a matrix in square blocks, each with a scale. ``x_blocks`` with
    ``x_scales`` is MXFP4; the metadata has the shape of its values, not of its codes. Other tensors are loaded
    unchanged.

    Parameters
    ----------
    path, thread_count, progress
        As for :class:`HuggingFaceStorageReader`. An index is optional.
    target_dtype : torch.dtype
        A floating-point dtype. Values are rounded to it, and then converted to the dtype of their destination.
    block_size : int
        The side of a matrix's blocks.

    Attributes
    ----------
    nbytes_read : int
        Bytes that the last load read from files, without headers.
    last_load : Throughput or None
        The bytes, without scales, that the last load converted for tensors, and the time it took; None if it failed.

    Raises
    ------
    ValueError
        An argument has an invalid value.
    """

    def __init__(
        self,
        path: Readable,
        thread_count: int = 1,
        target_dtype: torch.dtype = torch.float32,
        block_size: int = 128,
        *,
        progress: Listener | None = None,
    ) -> None:
        if not (isinstance(target_dtype, torch.dtype) and target_dtype.is_floating_point):
            raise ValueError(f"target_dtype: {target_dtype!r} is not a floating-point dtype")
        # Broadcast is not supported: ranks exchange bytes as they are in the files, without dequantizing them.
        super().__init__(path, thread_count, progress=progress, broadcast=False)
        self.target_dtype = target_dtype
        self.block_size = positive(block_size, "block_size")

    def read_metadata(self, *_arguments: Any, **_options: Any) -> Metadata:
        """Read and check all headers; quantized tensors are described as they will be loaded.

        Raises
        ------
        SafetensorError, FileNotFoundError, StorageError
            As for :class:`HuggingFaceStorageReader`.
        """
        metadata = super().read_metadata(*_arguments, **_options)
        places: dict[MetadataIndex, PartLocation] = metadata.storage_data
        self._weight_map = {
            index.fqn: os.path.basename(place.relative_path)  # noqa: PTH119
            for index, place in places.items()
        }
        self._weight_scale_mapping = {}
        self._load_quantization_metadata()
        self._tensor_full_shapes = {}
        for name, described in metadata.state_dict_metadata.items():
            assert isinstance(described, TensorStorageMetadata)
            self._tensor_full_shapes[name] = described.size
            dtype = described.properties.dtype
            if _is_mxfp4(name, dtype, described.size) and len(described.chunks) == 1:
                (chunk,) = described.chunks
                # As in torch's class, which keeps the stored size under this name.
                self._tensor_full_shapes[name + "_quantized"] = described.size
                size = described.size = torch.Size(_dequantized_sizes(described.size))
                origin = torch.Size([0] * len(size))
                described.chunks = [ChunkStorageMetadata(origin, size)]
                places[MetadataIndex(name, origin)] = places.pop(MetadataIndex(name, chunk.offsets))
                self._tensor_full_shapes[name] = size
            if name in self._weight_scale_mapping:
                described.properties = TensorProperties(dtype=self.target_dtype)
        return metadata

    def _load_quantization_metadata(self) -> None:
        """Determine which tensors are quantized. A subclass may override this, as with torch's class."""
        self._build_weight_scale_mapping(self._weight_map)

    def _build_weight_scale_mapping(self, weight_map: dict[str, str]) -> None:
        """Find the scales of tensors by their names. A subclass may override this, as with torch's class."""
        for name in weight_map:
            for ending, scaled in ((_SCALE_OF_WEIGHT, _WEIGHT), (_SCALES_OF_BLOCKS, _BLOCKS)):
                weight = name.removesuffix(ending) + scaled
                if name.endswith(ending) and weight in weight_map:
                    self._weight_scale_mapping[weight] = name

    def _contents(self, requests: list[ReadItem]) -> LocatedTensors:
        def count(nbytes: int) -> None:
            self.nbytes_read += nbytes

        places = self._places(requests)
        return _QuantizedTensors(places, self, _Scales(places, count))


class _QuantizedTensors(LocatedTensors):
    """The data of a model with quantized tensors."""

    def __init__(
        self,
        places: Mapping[MetadataIndex, PartLocation],
        reader: QuantizedHuggingFaceStorageReader,
        scales: _Scales,
    ) -> None:
        super().__init__(places)
        self._reader = reader
        self._scales = scales
        self._names = reader._weight_scale_mapping
        self._has_blocks = any(name.endswith(_WEIGHT) for name in self._names)

    def item(self, request: ReadItem) -> Item:
        """Return an item with its location, and for a quantized tensor the way to dequantize it.

        Raises
        ------
        CheckpointError
            The scales of a quantized tensor are missing, or their size does not fit the tensor's blocks; or the tensor
            is in neither format.
        """
        plain = super().item(request)
        name = request.storage_index.fqn
        if name in self._names:
            return self._dequantized_item(plain, name)
        assert plain.payload is not None
        if _is_mxfp4(name, plain.payload.dtype, plain.payload.sizes) or (
            self._has_blocks and name.endswith(_WEIGHT) and _is_float8(plain.payload.dtype)
        ):
            raise _error(plain, "its scales are missing")
        return plain

    def locate(self, requests: Sequence[ReadItem]) -> dict[str, list[Item]]:
        """Return the items of each data file, in the order of their offsets, each cut into pieces."""
        by_file = super().locate(requests)
        for items in by_file.values():
            for item in items:
                if isinstance(item, _Blockwise):
                    item.split_into_pieces()
        return by_file

    def _dequantized_item(self, plain: Item, name: str) -> Item:
        """Return an item that dequantizes; CheckpointError if the tensor or its scales do not follow the format."""
        payload, reader = plain.payload, self._reader
        assert payload is not None
        sizes, dtype = payload.sizes, payload.dtype
        kind: type[_Blockwise] = _Blockwise
        block: tuple[int, ...] = (reader.block_size,) * 2
        if name.endswith(_BLOCKS):
            kind, block = _Mxfp4, (1,) * (len(sizes) - 1)
            is_known = _is_mxfp4(name, dtype, sizes)
        else:
            is_known = len(sizes) == 2 and _has_values(dtype)
        if not is_known:
            raise _error(
                plain, f"{dtype} of {list(sizes)} is not a supported format of blocks with scales"
            )
        scales = MetadataIndex(self._names[name], torch.Size([0] * len(block)))
        item = kind(
            plain.request,
            plain.info,
            payload,
            target_dtype=reader.target_dtype,
            block=block,
            scales=self._scales,
            scales_index=scales,
        )
        if reader._tensor_full_shapes[name] != torch.Size(item.sizes):
            raise _error(plain, "it is quantized and saved in parts, which is not supported")
        place = self._places.get(scales)
        needed = [-(-size // each) for size, each in zip(sizes, block, strict=False)]
        if place is None or [*place.shape] != needed:
            found = "there is no such tensor" if place is None else f"they are {[*place.shape]}"
            raise _error(
                plain,
                f"its scales, {scales.fqn!r}, must have the size {needed} for {list(sizes)} in blocks of "
                f"{list(block)}, but {found} (is block_size right?)",
            )
        if not item.supports_scales(place.dtype):
            raise _error(plain, f"its scales, {scales.fqn!r}, are {place.dtype}")
        return item


class _Scales:
    """Reads the scales of pieces about _SCALES_NBYTES at a time, in the order in which the pieces are read."""

    def __init__(
        self, places: Mapping[MetadataIndex, PartLocation], count: Callable[[int], None]
    ) -> None:
        self._places = places
        self._count = count
        self._waiting: OrderedDict[int, ReadItem] = OrderedDict()
        self._found: dict[int, torch.Tensor] = {}

    def dtype(self, index: MetadataIndex) -> torch.dtype:
        """Return the dtype of a tensor of scales."""
        return self._places[index].dtype

    def announce(self, request: ReadItem) -> None:
        """Announce scales that will be taken later."""
        self._waiting[id(request)] = request

    def take(self, request: ReadItem) -> torch.Tensor:
        """Return announced scales, once; if they are not in memory, read them and scales that were announced later."""
        if id(request) not in self._found:
            self._read(request)
        return self._found.pop(id(request))

    def _read(self, first: ReadItem) -> None:
        request: ReadItem | None = first
        read: list[tuple[ReadItem, torch.Tensor]] = []
        while request is not None and sum(box.nbytes for _, box in read) < _SCALES_NBYTES:
            del self._waiting[id(request)]
            dtype = self.dtype(request.storage_index)
            read.append((request, torch.empty(request.lengths, dtype=dtype, device="cpu")))
            request = next(iter(self._waiting.values()), None)
        self._count(read_boxes(LocatedTensors(self._places), read))
        self._found |= {id(each): box for each, box in read}


class _Piece(NamedTuple):
    """A part of an item in the stored tensor, and the read item for its scales."""

    offsets: list[int]
    lengths: tuple[int, ...]
    scales: ReadItem


@dataclass(slots=True, kw_only=True)
class _Blockwise(Item):
    """A slice of a matrix in blocks, each with a scale.

    Attributes
    ----------
    target_dtype : torch.dtype
        The dtype to which values are rounded.
    block : tuple of int
        The number of stored elements for each scale, in each dimension of the scales.
    scales : _Scales
        Reads the scales.
    scales_index : MetadataIndex
        The index of the tensor of scales.
    pieces : list of _Piece
        The pieces that are read; set by :meth:`split_into_pieces`.
    """

    target_dtype: torch.dtype
    block: tuple[int, ...]
    scales: _Scales
    scales_index: MetadataIndex
    pieces: list[_Piece] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.target_dtype

    @property
    def nbytes(self) -> int:
        """The number of bytes of codes that are read."""
        return math.prod(self.stored[1]) * self._payload.dtype.itemsize

    @property
    def stored(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The slice of the stored tensor that is read: offsets and lengths."""
        return tuple(self.request.storage_offsets), tuple(self.request.lengths)

    @property
    def _payload(self) -> Payload:
        assert self.payload is not None
        return self.payload

    def supports_scales(self, dtype: torch.dtype) -> bool:
        """Return whether the scales may have a dtype."""
        return _has_values(dtype)

    def split_into_pieces(self) -> None:
        """Determine the pieces, and announce their scales."""
        sizes, (offsets, lengths) = self._payload.sizes, self.stored
        # A piece that is a single row has the most scales for its size, one for each _run elements: assume this case.
        most = _SCALES_NBYTES // self.scales.dtype(self.scales_index).itemsize * self._run
        span = max(1, min(_PIECE_NBYTES // self._payload.dtype.itemsize, most))
        for slab in slabs(sizes, offsets, lengths, max_span=span, max_gap=math.prod(sizes)):
            begin = [*map(operator.add, offsets, slab.offsets)]
            end = map(operator.add, begin, slab.lengths)
            first = [at // each for at, each in zip(begin, self.block, strict=False)]
            last = [-(-at // each) for at, each in zip(end, self.block, strict=False)]
            place, size = torch.Size(first), torch.Size(map(operator.sub, last, first))
            index = self.scales_index
            scales = ReadItem(LoadItemType.TENSOR, index, place, index, place, size)
            self.scales.announce(scales)
            self.pieces.append(_Piece(begin, slab.lengths, scales))

    def slice_requests(
        self,
        whole: destinations.ItemCompletion,
        target: torch.Tensor,
        gap_nbytes: int,
        pool: destinations.BufferPool,
    ) -> Iterator[ReadRequest]:
        """Return the requests that read a slice's codes, dequantize them, and put the values into ``target``.

        The target is a strided tensor of the slice's size.
        """
        for piece in self.pieces:
            put = functools.partial(self._put, piece, self.scales.take(piece.scales), target)
            yield from destinations.slab_requests(
                whole, self._payload, piece.offsets, piece.lengths, put, gap_nbytes, pool
            )

    def _put(
        self,
        piece: _Piece,
        scales: torch.Tensor,
        target: torch.Tensor,
        offsets: Sequence[int],
        box: torch.Tensor,
    ) -> None:
        """Convert some codes, and copy the values to their destination."""
        size, origin = box.shape, [0] * box.dim()
        for part in slabs(size, origin, size, max_span=_VALUED_NUMEL, max_gap=box.numel()):
            begin = [*map(sum, zip(piece.offsets, offsets, part.offsets, strict=True))]
            chosen = map(operator.add, part.offsets, part.lengths)
            codes = box[tuple(map(slice, part.offsets, chosen))]
            with openmp.limit_threads(1):  # the steps are too short for several threads
                place, values = self._values(begin, codes, piece.scales.storage_offsets, scales)
                destinations.copy_box(target, place, values.to(self.target_dtype))

    @property
    def _run(self) -> int:
        """The number of consecutive elements that share a scale."""
        return self.block[-1]

    def _values(
        self, begin: list[int], box: torch.Tensor, first: Sequence[int], scales: torch.Tensor
    ) -> tuple[list[int], torch.Tensor]:
        """Return the values of codes and their offsets in the item; ``scales`` begin at ``first`` in their tensor."""
        side = self.block[0]
        chosen = tuple(
            slice(at // side - origin, -(-(at + length) // side) - origin)
            for at, origin, length in zip(begin, first, box.shape, strict=True)
        )
        factors = scales[chosen].float()
        within = [at % side for at in begin]
        if box.dtype.itemsize == 1:
            values = _multiply_by_scales(box, _values_of(box.dtype), factors, (side, side), within)
        else:  # wider codes have too many values for a table
            rows, columns = (
                torch.arange(at, at + length, device="cpu") // side
                for at, length in zip(within, box.shape, strict=True)
            )
            values = box.float() * factors[rows][:, columns]
        return [*map(operator.sub, begin, self.request.storage_offsets)], values


class _Mxfp4(_Blockwise):
    """A slice of values of four bits, two in a byte; the elements of the last stored dimension, a group, share a scale.

    The last dimension of the values corresponds to the last two of the stored tensor.
    """

    __slots__ = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of the tensor of values."""
        return _dequantized_sizes(self._payload.sizes)

    @property
    def stored(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The slice of complete groups that is read."""
        (*offsets, begin), (*lengths, length) = self.request.storage_offsets, self.request.lengths
        nbytes = self._run
        first, last = begin // (2 * nbytes), -(-(begin + length) // (2 * nbytes))
        return (*offsets, first, 0), (*lengths, last - first, nbytes)

    def supports_scales(self, dtype: torch.dtype) -> bool:
        """Return whether the scales may have a dtype."""
        return str(dtype) in ("torch.uint8", "torch.float8_e8m0fnu")

    @property
    def _run(self) -> int:
        return self._payload.sizes[-1]

    def _values(
        self, begin: list[int], box: torch.Tensor, first: Sequence[int], scales: torch.Tensor
    ) -> tuple[list[int], torch.Tensor]:
        (*leading, byte), (*lengths, _) = begin, box.shape
        chosen = tuple(
            slice(at - origin, at - origin + length)
            for at, origin, length in zip(leading, first, lengths, strict=True)
        )
        is_double = self.target_dtype == torch.float64
        factors = _powers()[scales[chosen].view(torch.uint8).long()].view(-1, lengths[-1])
        if is_double:  # products with the largest scales exceed the range of fp32
            factors /= 8
        codes = box.reshape(len(factors), -1)
        values = _multiply_by_scales(codes, _pairs(), factors, (1, box.shape[-1]), (0, 0))
        values = values.view(*lengths[:-1], -1)
        if is_double:
            values = values.double().mul_(8)
        *offsets, origin = self.request.storage_offsets
        # Cut off values of the first and the last group that were not requested.
        at = 2 * (leading[-1] * self._run + byte) - origin
        values = values[..., max(0, -at) : max(0, self.request.lengths[-1] - at)]
        return [*map(operator.sub, leading, offsets), max(0, at)], values


def _dequantized_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the size of the values of an MXFP4 tensor."""
    *leading, groups, nbytes = sizes
    return (*leading, 2 * groups * nbytes)


def _is_mxfp4(name: str, dtype: torch.dtype, sizes: Sequence[int]) -> bool:
    return name.endswith(_BLOCKS) and dtype == torch.uint8 and len(sizes) >= 2 and sizes[-1] > 0


def _is_float8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1 and _has_values(dtype)


@functools.cache
def _has_values(dtype: torch.dtype) -> bool:
    """Return whether a dtype's elements are single numbers that fit fp32: torch cannot convert packed pairs."""
    try:
        torch.zeros(1, dtype=torch.uint8, device="cpu").to(dtype).float()
    except RuntimeError:
        return False
    return not dtype.is_complex


def _multiply_by_scales(
    codes: torch.Tensor,
    table: torch.Tensor,
    scales: torch.Tensor,
    block: tuple[int, int],
    begin: Sequence[int],
) -> torch.Tensor:
    """Return the table's values for the codes of a matrix, multiplied by the scales of its blocks.

    The matrix begins at the offset ``begin`` in the first block.
    """
    codes, scales = codes.contiguous(), scales.contiguous()
    count = table.numel() // 256
    rows, columns = codes.shape
    values = torch.empty(rows, columns * count, dtype=torch.float32, device="cpu")
    addresses = (each.data_ptr() for each in (table, scales, values))
    matrix = (codes.data_ptr(), rows, columns)
    begin_in_block = (begin[0], begin[1])
    write_values_of_codes(*matrix, block, begin_in_block, scales.shape[1], count, *addresses)
    return values


@functools.cache
def _values_of(dtype: torch.dtype) -> torch.Tensor:
    """Return the values of all codes of a one-byte dtype."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float()


@functools.cache
def _pairs() -> torch.Tensor:
    """Return the two values of each byte of MXFP4, multiplied by 8."""
    values = [8 * value for value in (*_E2M1, *(-value for value in _E2M1))]
    pairs = [(values[byte & 15], values[byte >> 4]) for byte in range(256)]
    return torch.tensor(pairs, dtype=torch.float32, device="cpu")


@functools.cache
def _powers() -> torch.Tensor:
    """Return the value of each scale byte of MXFP4, divided by 8: the largest one would exceed the range of fp32."""
    scales = [2.0 ** (byte - _E8M0_BIAS - 3) for byte in range(256)]
    return torch.tensor(scales, dtype=torch.float32, device="cpu")


def _error(item: Item, reason: str) -> CheckpointError:
    return CheckpointError(reason, item.info.relative_path, names=(item.request.storage_index.fqn,))
