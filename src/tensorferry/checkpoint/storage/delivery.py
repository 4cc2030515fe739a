"""How the bytes of an item get into their destination: what is wanted of a file, with sinks.

Bytes that lie in a tensor as they do in the file, in one range or in long enough rows, are wanted right there, on a GPU
as on the host. Others come to slabs, small boxes of the stored tensor in temporary memory, which torch then copies,
converts and lays out as the destination wants it; by the thread that loads, as all that concerns destinations.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from tensorferry._core import crc32_combine
from tensorferry.base.ranges import (
    contiguous_run,
    is_inside,
    rows,
    slabs,
    strides_of,
)
from tensorferry.checkpoint.storage.reading import GAP_NBYTES, Want
from tensorferry.transfer.arrays import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tensorferry.base.ranges import Slab
    from tensorferry.checkpoint.zipformat.blobs import Payload

Put: TypeAlias = "Callable[[Sequence[int], torch.Tensor], None]"
"""What takes a box of a slice, and where in the slice that begins; the box is used again once it returns."""

_SLAB_NBYTES = 1 << 20
# Shorter rows are collected in slabs: to copy them costs less than to ask for each.
_MIN_ROW_NBYTES = 64 << 10


class Delivery:
    """Counts an item's bytes; when all are where they belong, from :meth:`begin` on, ``finish`` is called.

    Parameters
    ----------
    nbytes : int
        How many it has.
    finish : function without arguments, optional
        Called once.
    count : function of an int, optional
        Told of bytes that have arrived.
    takes_crc : bool
        Whether to have the CRC-32 of all its bytes, which lie in one range of the file.
    """

    def __init__(
        self,
        nbytes: int,
        finish: Callable[[], None] = lambda: None,
        count: Callable[[int], None] = lambda _: None,
        *,
        takes_crc: bool = False,
    ) -> None:
        self.takes_crc = takes_crc
        self._missing_nbytes = nbytes
        self._finish = finish
        self._count = count
        self._crcs: list[tuple[int, int, int]] = []

    @property
    def crc(self) -> int:
        """The CRC-32, when all has arrived."""
        total = 0
        for _, nbytes, crc in sorted(self._crcs):
            total = crc32_combine(total, crc, nbytes)
        return total

    def begin(self, wants: Iterator[Want]) -> Iterator[Want]:
        """Return what is wanted; if there is nothing to wait for, finish."""
        if self._missing_nbytes == 0:
            self._end()
        return wants

    def add_crc(self, begin: int, end: int, crc: int) -> None:
        """Take note of the CRC-32 of a part."""
        if self.takes_crc:
            self._crcs.append((begin, end - begin, crc))

    def arrived(self, nbytes: int) -> None:
        """Take note that so many more bytes are where they belong."""
        self._missing_nbytes -= nbytes
        self._count(nbytes)
        if self._missing_nbytes == 0:
            self._end()

    def _end(self) -> None:
        # It may refer to this object, and to memory that is to go as soon as nobody else needs it.
        finish, self._finish = self._finish, _nothing
        finish()


def _nothing() -> None:
    """Do nothing."""


class Memory:
    """A sink that is memory: bytes from ``begin`` in the file on. Without any, bytes are verified only."""

    def __init__(self, delivery: Delivery, begin: int = 0, memory: Any = None) -> None:
        self.takes_crc = delivery.takes_crc
        self._delivery = delivery
        self._begin = begin
        self._memory = memory

    def memory(self, begin: int, end: int) -> Any:
        """Return the place of bytes."""
        if self._memory is None:
            return None
        return self._memory[begin - self._begin : end - self._begin]

    def arrived(self, begin: int, end: int, crc: int) -> None:
        """Count them."""
        self._delivery.add_crc(begin, end, crc)
        self._delivery.arrived(end - begin)


class Boxes:
    """Temporary memory for slabs, used again: the allocator would scatter fresh ones, and keep their pages."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """Return memory of so many bytes or more, aligned for any dtype."""
        assert nbytes <= _SLAB_NBYTES
        # Only what nearly fills one: Reading bounds slabs by what is wanted of them.
        if nbytes > _SLAB_NBYTES // 8 * 7:
            if self._kept:
                return self._kept.pop()
            nbytes = _SLAB_NBYTES
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def give_back(self, box: torch.Tensor) -> None:
        """Keep memory that nobody uses any more, if it is of the size that is taken again."""
        if box.numel() == _SLAB_NBYTES:
            self._kept.append(box)


class _SlabSink:
    """A slab on its way to who puts it into a tensor."""

    def __init__(
        self, delivery: Delivery, slab: Slab, begin: int, payload: Payload, put: Put, boxes: Boxes
    ) -> None:
        self.takes_crc = delivery.takes_crc
        self._delivery = delivery
        self._slab = slab
        self._begin = begin
        self._missing_nbytes = slab.span * payload.dtype.itemsize
        self._payload = payload
        self._put = put
        self._boxes = boxes
        self._box: torch.Tensor | None = None

    def memory(self, begin: int, end: int) -> Any:
        """Return the place of bytes in temporary memory."""
        if self._box is None:
            self._box = self._boxes.take(self._slab.span * self._payload.dtype.itemsize)
        return self._box[begin - self._begin : end - self._begin]

    def arrived(self, begin: int, end: int, crc: int) -> None:
        """Pass the slab on when all are there."""
        self._delivery.add_crc(begin, end, crc)
        self._missing_nbytes -= end - begin
        if self._missing_nbytes == 0:
            self._pass_on()

    def _pass_on(self) -> None:
        assert self._box is not None
        dtype = self._payload.dtype
        box = self._box[: self._slab.span * dtype.itemsize].view(dtype)
        box = box.as_strided(self._slab.lengths, strides_of(self._payload.ordered_sizes))
        self._put(self._slab.offsets, box)
        self._boxes.give_back(self._box)
        self._box = None
        self._delivery.arrived(box.numel() * box.element_size())


def deliver(
    delivery: Delivery,
    payload: Payload,
    offsets: Sequence[int],
    lengths: Sequence[int],
    target: torch.Tensor,
    gap_nbytes: int,
    boxes: Boxes,
) -> Iterator[Want]:
    """Return what puts a slice into a plain strided tensor of the slice's size.

    ``gap_nbytes`` unwanted bytes in a row are not worth a transfer more; slabs come to ``boxes``.
    """
    order = payload.order
    sizes, itemsize = payload.ordered_sizes, payload.dtype.itemsize
    offsets = [offsets[dim] for dim in order]
    lengths = [lengths[dim] for dim in order]
    target = target.permute(order)
    is_reached = target.is_cpu or (target.is_cuda and torch.version.cuda is not None)
    as_it_is = target.dtype == payload.dtype and is_reached
    found = rows(sizes, offsets, lengths, target.stride()) if as_it_is else None
    if found is not None and (found.dims == 0 or found.length * itemsize >= _MIN_ROW_NBYTES):
        for index in itertools.product(*map(range, lengths[: found.dims])):
            begin = payload.begin + found.place(index) * itemsize
            memory = tensor_bytes(target[index])
            yield Want(begin, begin + memory.numel(), Memory(delivery, begin, memory))
        return
    put = functools.partial(copy_box, target)
    yield from in_boxes(delivery, payload, offsets, lengths, put, gap_nbytes, boxes)


def in_boxes(
    delivery: Delivery,
    payload: Payload,
    offsets: Sequence[int],
    lengths: Sequence[int],
    put: Put,
    gap_nbytes: int,
    boxes: Boxes,
) -> Iterator[Want]:
    """Return what has a slice, its dimensions in the payload's order, passed on in slabs to ``put``."""
    itemsize = payload.dtype.itemsize
    for slab in _slabs(payload, offsets, lengths, gap_nbytes):
        begin = payload.begin + slab.begin * itemsize
        sink = _SlabSink(delivery, slab, begin, payload, put, boxes)
        yield Want(begin, begin + slab.span * itemsize, sink)


def copy_box(target: torch.Tensor, offsets: Sequence[int], box: torch.Tensor) -> None:
    """Copy a box of values to its place in a tensor."""
    place = tuple(
        slice(offset, offset + length) for offset, length in zip(offsets, box.shape, strict=True)
    )
    # Views of inference tensors may be changed in that mode only.
    with torch.inference_mode() if target.is_inference() else torch.no_grad():
        (target[place] if place else target).copy_(box)


def collected(
    parts: Sequence[tuple[int, int, bytearray]],
    finish: Callable[[], None],
    count: Callable[[int], None] = lambda _: None,
) -> Iterator[Want]:
    """Return what has ranges (begin, end, memory) of a file read, and ``finish`` called when all of them are there."""
    whole = Delivery(sum(end - begin for begin, end, _ in parts), finish, count)
    return whole.begin(
        Want(begin, end, Memory(whole, begin, memoryview(data)))
        for begin, end, data in parts
        if data
    )


def verification(
    payload: Payload, offsets: Sequence[int], lengths: Sequence[int], gap_nbytes: int
) -> Iterator[Want]:
    """Return what has the bytes verified that :func:`deliver` would want."""
    sizes, itemsize = payload.ordered_sizes, payload.dtype.itemsize
    offsets = [offsets[dim] for dim in payload.order]
    lengths = [lengths[dim] for dim in payload.order]
    assert is_inside(sizes, offsets, lengths)
    run = contiguous_run(sizes, offsets, lengths)
    ranges = [run] if run is not None else _slabs(payload, offsets, lengths, gap_nbytes)
    nowhere = Memory(Delivery(0))
    for place, count, *_ in ranges:
        begin = payload.begin + place * itemsize
        if count:
            yield Want(begin, begin + count * itemsize, nowhere)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether parts of a tensor can be copied into by themselves."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_meta
    )


def resolved(tensor: torch.Tensor, payload: Payload) -> torch.Tensor:
    """Return the values of a tensor that has the elements of a payload."""
    if payload.conj:
        tensor = tensor.conj().resolve_conj()
    return tensor.neg() if payload.neg else tensor


def _slabs(
    payload: Payload, offsets: Sequence[int], lengths: Sequence[int], gap_nbytes: int
) -> Iterator[Slab]:
    itemsize = payload.dtype.itemsize
    return slabs(
        payload.ordered_sizes,
        offsets,
        lengths,
        max_span=_SLAB_NBYTES // itemsize,
        max_gap=max(gap_nbytes, GAP_NBYTES) // itemsize,
    )
