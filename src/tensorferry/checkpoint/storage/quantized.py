"""torch's reader of quantised models: block-wise FP8 (DeepSeek's) and MXFP4 (gpt-oss's), dequantised as they are read.

A quantised tensor is codes, and scales in a tensor of its own, perhaps of another file. Codes come in slabs, as what is
converted does; each slab is looked up in a table of what codes mean, multiplied by its scales, and copied to its place.
So memory is bounded, however large a tensor is.

piece
    Codes of an item whose scales are few enough to be in memory. The scales of several pieces, in the order in which
    these lie in the files, are read at a time: most tensors have some hundred.
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
from tensorferry.checkpoint.storage import delivery, hooks
from tensorferry.checkpoint.storage.contents import Item
from tensorferry.checkpoint.storage.huggingface import HuggingFaceStorageReader, PlacedTensors
from tensorferry.checkpoint.storage.reader import ItemLoad, Lent
from tensorferry.checkpoint.storage.reading import Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.distributed.checkpoint.metadata import Metadata

    from tensorferry.base.checks import Readable
    from tensorferry.checkpoint.progress import Listener
    from tensorferry.checkpoint.storage.huggingface import PartPlace
    from tensorferry.checkpoint.storage.reading import Want
    from tensorferry.checkpoint.zipformat.blobs import Payload

_WEIGHT, _SCALE_OF_WEIGHT = ".weight", ".weight_scale_inv"
_BLOCKS, _SCALES_OF_BLOCKS = "_blocks", "_scales"

# Of codes whose scales are read at a time, and of these scales.
_PIECE_NBYTES = 16 << 20
_SCALES_NBYTES = 1 << 20

# Of codes whose values are made at a time: they stay in a processor's cache.
_VALUED_NUMEL = 128 << 10

# The format MXFP4: what four bits mean, the last of them the sign; and a scale is a power of two, with this bias.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS = 127


class QuantizedHuggingFaceStorageReader(HuggingFaceStorageReader, TorchsReader):
    """Loads quantised models as torch's QuantizedHuggingFaceStorageReader does: dequantised as they are read.

    ``x.weight`` with ``x.weight_scale_inv`` is a matrix in square blocks, each with a scale. ``x_blocks`` with
    ``x_scales`` is MXFP4, and for planners has the size of its values. Other tensors are loaded as they are.

    Parameters
    ----------
    path, thread_count, progress
        As for :class:`HuggingFaceStorageReader`. There may be an index or none.
    target_dtype : torch.dtype
        Of floating point. Values are rounded to it, and then converted to the dtype of their destination.
    block_size : int
        The side of a matrix's blocks.

    Attributes
    ----------
    nbytes_read : int
        Bytes that the last load has read from files, without headers.
    last_load : Throughput or None
        How many bytes of files, without scales, the last load has given to tensors, and in what time; None if it
        failed.

    Raises
    ------
    ValueError
        An argument has no such value.
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
            raise ValueError(f"target_dtype: {target_dtype!r} is not a dtype of floating point")
        path = hooks.first_folder(self, QuantizedHuggingFaceStorageReader, path, reads=True)
        # What ranks hand to each other are bytes of files; they would have to be dequantised behind that.
        super().__init__(path, thread_count, progress=progress, broadcast=False)
        self.target_dtype = target_dtype
        self.block_size = positive(block_size, "block_size")

    def read_metadata(self, *_arguments: Any, **_options: Any) -> Metadata:
        """Read and check all headers; quantised tensors are described as they will be loaded.

        Raises
        ------
        SafetensorError, FileNotFoundError, StorageError
            As for :class:`HuggingFaceStorageReader`.
        """
        metadata = super().read_metadata(*_arguments, **_options)
        if "fs" in self._changed():
            return metadata
        places: dict[MetadataIndex, PartPlace] = metadata.storage_data
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
                self._tensor_full_shapes[name + "_quantized"] = described.size  # as torch's has it
                size = described.size = torch.Size(_dequantised_sizes(described.size))
                origin = torch.Size([0] * len(size))
                described.chunks = [ChunkStorageMetadata(origin, size)]
                places[MetadataIndex(name, origin)] = places.pop(MetadataIndex(name, chunk.offsets))
                self._tensor_full_shapes[name] = size
            if name in self._weight_scale_mapping:
                described.properties = TensorProperties(dtype=self.target_dtype)
        return metadata

    def _load_quantization_metadata(self) -> None:
        """Find out which tensors are quantised; a subclass may have its own way, as with torch's."""
        self._build_weight_scale_mapping(self._weight_map)

    def _build_weight_scale_mapping(self, weight_map: dict[str, str]) -> None:
        """Find the scales of tensors by their names; a subclass may have its own way, as with torch's."""
        for name in weight_map:
            for ending, scaled in (
                (_SCALE_OF_WEIGHT, _WEIGHT),
                (_SCALES_OF_BLOCKS, _BLOCKS),
            ):
                weight = name.removesuffix(ending) + scaled
                if name.endswith(ending) and weight in weight_map:
                    self._weight_scale_mapping[weight] = name

    def _contents(self, requests: list[ReadItem]) -> PlacedTensors:
        def count(nbytes: int) -> None:
            self.nbytes_read += nbytes

        places = self._places(requests)
        return _QuantizedTensors(places, self, _Scales(places, count))

    def _changed(self) -> frozenset[str]:
        """Return what a subclass has changed that only torch's code uses."""
        return hooks.changed(self, _READER_HOOKS)


_READER_HOOKS = hooks.hooks_of(
    QuantizedHuggingFaceStorageReader, TorchsReader, frozenset(vars(HuggingFaceStorageReader))
)


class _QuantizedTensors(PlacedTensors):
    """The data of a model, of which some tensors are quantised."""

    def __init__(
        self,
        places: Mapping[MetadataIndex, PartPlace],
        reader: QuantizedHuggingFaceStorageReader,
        scales: _Scales,
    ) -> None:
        super().__init__(places)
        self._places = places
        self._reader = reader
        self._scales = scales
        self._names = reader._weight_scale_mapping
        self._has_blocks = any(name.endswith(_WEIGHT) for name in self._names)

    def item(self, request: ReadItem) -> Item:
        """Return where what is asked for lies, and how it is dequantised.

        Raises
        ------
        CheckpointError
            Its scales are missing, or have another size than its blocks; or it is not as either format has it.
        """
        plain = super().item(request)
        name = request.storage_index.fqn
        if name in self._names:
            return self._dequantised(plain, name)
        assert plain.payload is not None
        if _is_mxfp4(name, plain.payload.dtype, plain.payload.sizes) or (
            self._has_blocks and name.endswith(_WEIGHT) and _is_float8(plain.payload.dtype)
        ):
            raise _error(plain, "its scales are missing")
        return plain

    def locate(self, requests: Sequence[ReadItem]) -> dict[str, list[Item]]:
        """Return the items of each data file, in the order in which they lie there, and in pieces."""
        by_file = super().locate(requests)
        for items in by_file.values():
            for item in items:
                if isinstance(item, _Blockwise):
                    item.cut_up()
        return by_file

    def _dequantised(self, plain: Item, name: str) -> Item:
        """Return an item as it is delivered, if it and its scales are as the format has them."""
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
                plain, f"no blocks with scales are known that are {dtype} of {list(sizes)}"
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
            raise _error(plain, "it is quantised, and in parts, of which each rank has saved one")
        place = self._places.get(scales)
        needed = [-(-size // each) for size, each in zip(sizes, block, strict=False)]
        if place is None or [*place.shape] != needed:
            found = "no such tensor is there" if place is None else f"they are {[*place.shape]}"
            raise _error(
                plain,
                f"its scales, {scales.fqn!r}, have to be of the size {needed} for {list(sizes)} in blocks of "
                f"{list(block)}, and {found} (is block_size right?)",
            )
        if not item.takes_scales(place.dtype):
            raise _error(plain, f"its scales, {scales.fqn!r}, are {place.dtype}")
        return item


class _Scales:
    """Scales of pieces, read some MiB at a time in the order in which pieces are read."""

    def __init__(
        self, places: Mapping[MetadataIndex, PartPlace], count: Callable[[int], None]
    ) -> None:
        self._places = places
        self._count = count
        self._waiting: OrderedDict[int, ReadItem] = OrderedDict()
        self._found: dict[int, torch.Tensor] = {}

    def dtype(self, index: MetadataIndex) -> torch.dtype:
        """Return the dtype of a tensor of scales."""
        return self._places[index].dtype

    def want(self, request: ReadItem) -> None:
        """Take note of scales that will be taken."""
        self._waiting[id(request)] = request

    def take(self, request: ReadItem) -> torch.Tensor:
        """Return scales, which is possible once; read them, and those that are wanted next, if they are not there."""
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
        contents: Any = PlacedTensors(self._places)
        lent: Any = Lent(read)
        with Reading() as reading:
            load = ItemLoad(contents, reading, lent, lambda _: None)
            contents.read(reading, contents.locate([each for each, _ in read]), load.begin)
            self._count(reading.nbytes_read)
        self._found |= {id(each): box for each, box in read}


class _Piece(NamedTuple):
    """A part of an item, by its place in the stored tensor, and what is to be read of the scales for it."""

    offsets: list[int]
    lengths: tuple[int, ...]
    scales: ReadItem


@dataclass(slots=True, kw_only=True)
class _Blockwise(Item):
    """A slice of a matrix in blocks, each with a scale.

    Attributes
    ----------
    target_dtype : torch.dtype
        To which values are rounded.
    block : tuple of int
        The stored elements that have one scale, in each dimension that scales have.
    scales : _Scales
        What reads them.
    scales_index : MetadataIndex
        Their place.
    pieces : list of _Piece
        What it is read in, from :meth:`cut_up` on.
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
        """How many bytes of codes are read."""
        return math.prod(self.stored[1]) * self._payload.dtype.itemsize

    @property
    def stored(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The slice of the stored tensor that is read: offsets and lengths."""
        return tuple(self.request.storage_offsets), tuple(self.request.lengths)

    @property
    def _payload(self) -> Payload:
        assert self.payload is not None
        return self.payload

    def takes_scales(self, dtype: torch.dtype) -> bool:
        """Return whether its scales can be of a dtype."""
        return _has_values(dtype)

    def cut_up(self) -> None:
        """Find the pieces, and announce their scales."""
        sizes, (offsets, lengths) = self._payload.sizes, self.stored
        # At worst pieces are single rows.
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
            self.scales.want(scales)
            self.pieces.append(_Piece(begin, slab.lengths, scales))

    def deliver(
        self,
        whole: delivery.Delivery,
        target: torch.Tensor,
        gap_nbytes: int,
        boxes: delivery.Boxes,
    ) -> Iterator[Want]:
        """Return what puts its values into a plain tensor."""
        for piece in self.pieces:
            put = functools.partial(self._put, piece, self.scales.take(piece.scales), target)
            yield from delivery.in_boxes(
                whole, self._payload, piece.offsets, piece.lengths, put, gap_nbytes, boxes
            )

    def _put(
        self,
        piece: _Piece,
        scales: torch.Tensor,
        target: torch.Tensor,
        offsets: Sequence[int],
        box: torch.Tensor,
    ) -> None:
        """Put the values of some codes into their place."""
        size, origin = box.shape, [0] * box.dim()
        for part in slabs(size, origin, size, max_span=_VALUED_NUMEL, max_gap=box.numel()):
            begin = [*map(sum, zip(piece.offsets, offsets, part.offsets, strict=True))]
            chosen = map(operator.add, part.offsets, part.lengths)
            codes = box[tuple(map(slice, part.offsets, chosen))]
            with openmp.limited(1):  # many short steps
                place, values = self._values(begin, codes, piece.scales.storage_offsets, scales)
                delivery.copy_box(target, place, values.to(self.target_dtype))

    @property
    def _run(self) -> int:
        """How many elements in a row have one scale."""
        return self.block[-1]

    def _values(
        self, begin: list[int], box: torch.Tensor, first: Sequence[int], scales: torch.Tensor
    ) -> tuple[list[int], torch.Tensor]:
        """Return the values of codes, and where in the item they belong; ``first`` is the place of the scales."""
        side = self.block[0]
        chosen = tuple(
            slice(at // side - origin, -(-(at + length) // side) - origin)
            for at, origin, length in zip(begin, first, box.shape, strict=True)
        )
        factors = scales[chosen].float()
        within = [at % side for at in begin]
        if box.dtype.itemsize == 1:
            values = _scaled(box, _values_of(box.dtype), factors, (side, side), within)
        else:  # of these there are more than tables can have
            rows, columns = (
                torch.arange(at, at + length, device="cpu") // side
                for at, length in zip(within, box.shape, strict=True)
            )
            values = box.float() * factors[rows][:, columns]
        return [*map(operator.sub, begin, self.request.storage_offsets)], values


class _Mxfp4(_Blockwise):
    """A slice of values of four bits, two in a byte. What the stored tensor's last dimension has shares a scale.

    The last dimension of the values is the last two of the stored tensor.
    """

    __slots__ = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of its values."""
        return _dequantised_sizes(self._payload.sizes)

    @property
    def stored(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The slice of whole groups that is read."""
        (*offsets, begin), (*lengths, length) = self.request.storage_offsets, self.request.lengths
        nbytes = self._run
        first, last = begin // (2 * nbytes), -(-(begin + length) // (2 * nbytes))
        return (*offsets, first, 0), (*lengths, last - first, nbytes)

    def takes_scales(self, dtype: torch.dtype) -> bool:
        """Return whether its scales can be of a dtype."""
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
        if is_double:  # of the largest scales some values are beyond fp32
            factors /= 8
        codes = box.reshape(len(factors), -1)
        values = _scaled(codes, _pairs(), factors, (1, box.shape[-1]), (0, 0))
        values = values.view(*lengths[:-1], -1)
        if is_double:
            values = values.double().mul_(8)
        *offsets, origin = self.request.storage_offsets
        # Of groups at either end not all values may be wanted.
        at = 2 * (leading[-1] * self._run + byte) - origin
        values = values[..., max(0, -at) : max(0, self.request.lengths[-1] - at)]
        return [*map(operator.sub, leading, offsets), max(0, at)], values


def _dequantised_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the size of what is stored as MXFP4."""
    *leading, groups, nbytes = sizes
    return (*leading, 2 * groups * nbytes)


def _is_mxfp4(name: str, dtype: torch.dtype, sizes: Sequence[int]) -> bool:
    return name.endswith(_BLOCKS) and dtype == torch.uint8 and len(sizes) >= 2 and sizes[-1] > 0


def _is_float8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1 and _has_values(dtype)


@functools.cache
def _has_values(dtype: torch.dtype) -> bool:
    """Return whether elements of a dtype are numbers that fp32 has: torch does not convert those that are pairs."""
    try:
        torch.zeros(1, dtype=torch.uint8, device="cpu").to(dtype).float()
    except RuntimeError:
        return False
    return not dtype.is_complex


def _scaled(
    codes: torch.Tensor,
    table: torch.Tensor,
    scales: torch.Tensor,
    block: tuple[int, int],
    begin: Sequence[int],
) -> torch.Tensor:
    """Return what a table has for the codes of a matrix, times the scales of its blocks.

    The matrix begins at ``begin`` of the first block.
    """
    codes, scales = codes.contiguous(), scales.contiguous()
    count = table.numel() // 256
    rows, columns = codes.shape
    values = torch.empty(rows, columns * count, dtype=torch.float32, device="cpu")
    addresses = (each.data_ptr() for each in (table, scales, values))
    write_values_of_codes(
        codes.data_ptr(),
        rows,
        columns,
        block,
        (begin[0], begin[1]),
        scales.shape[1],
        count,
        *addresses,
    )
    return values


@functools.cache
def _values_of(dtype: torch.dtype) -> torch.Tensor:
    """Return the values of all codes of a dtype of one byte."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).float()


@functools.cache
def _pairs() -> torch.Tensor:
    """Return the two values of each byte of MXFP4, times 8."""
    values = [8 * value for value in (*_E2M1, *(-value for value in _E2M1))]
    pairs = [(values[byte & 15], values[byte >> 4]) for byte in range(256)]
    return torch.tensor(pairs, dtype=torch.float32, device="cpu")


@functools.cache
def _powers() -> torch.Tensor:
    """Return the scales that bytes mean in MXFP4, divided by 8, so that fp32 has the largest one, too."""
    scales = [2.0 ** (byte - _E8M0_BIAS - 3) for byte in range(256)]
    return torch.tensor(scales, dtype=torch.float32, device="cpu")


def _error(item: Item, reason: str) -> CheckpointError:
    return CheckpointError(reason, item.info.relative_path, names=(item.request.storage_index.fqn,))
