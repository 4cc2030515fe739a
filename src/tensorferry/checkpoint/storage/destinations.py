"""Read requests that put an item's bytes into its destination tensor.

An item is one slice of a stored tensor, or one object, that a load plan requests. A payload is the byte range of a
stored tensor's elements in a file. A request is a byte range of a file with a sink, which supplies memory for the bytes
and is notified when they have arrived (:mod:`tensorferry.checkpoint.storage.reading`).

Bytes whose layout in the tensor equals that in the file, as one range or as rows that are long enough, are read
directly into the tensor, on a GPU as on the host. All other bytes are read into slabs: temporary host memory for small
boxes of the stored tensor. torch then copies and converts each slab into the destination. The loading thread makes
these copies; it is the only thread that touches destinations.
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
from tensorferry.checkpoint.storage.reading import GAP_NBYTES, ReadRequest
from tensorferry.transfer.arrays import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tensorferry.base.ranges import Slab
    from tensorferry.checkpoint.zipformat.blobs import Payload

Put: TypeAlias = "Callable[[Sequence[int], torch.Tensor], None]"
"""Receives the offsets of a box within a slice, and the box; the box's memory is reused after the call."""

_SLAB_NBYTES = 1 << 20
# Shorter rows are collected in slabs, because a copy costs less than a separate read request for each row.
_MIN_ROW_NBYTES = 64 << 10


class ItemCompletion:
    """Counts an item's bytes as they arrive, and calls ``finish`` after the last one.

    Parameters
    ----------
    nbytes : int
        The item's size.
    finish : function without arguments, optional
        Called once, from :meth:`begin` or later.
    count : function of an int, optional
        Called with the number of bytes that have arrived.
    needs_crc : bool
        Whether to compute the CRC-32 of all the item's bytes, which must be one range of the file.
    """

    def __init__(
        self,
        nbytes: int,
        finish: Callable[[], None] = lambda: None,
        count: Callable[[int], None] = lambda _: None,
        *,
        needs_crc: bool = False,
    ) -> None:
        self.needs_crc = needs_crc
        self._missing_nbytes = nbytes
        self._finish = finish
        self._count = count
        self._crcs: list[tuple[int, int, int]] = []

    @property
    def crc(self) -> int:
        """The CRC-32 of all bytes; valid once they have all arrived."""
        total = 0
        for _, nbytes, crc in sorted(self._crcs):
            total = crc32_combine(total, crc, nbytes)
        return total

    def begin(self, requests: Iterator[ReadRequest]) -> Iterator[ReadRequest]:
        """Return ``requests`` unchanged. An item without bytes finishes here, as no request will ever arrive."""
        if self._missing_nbytes == 0:
            self._end()
        return requests

    def add_crc(self, begin: int, end: int, crc: int) -> None:
        """Record the CRC-32 of one part."""
        if self.needs_crc:
            self._crcs.append((begin, end - begin, crc))

    def arrived(self, nbytes: int) -> None:
        """Count ``nbytes`` more bytes as delivered to the destination."""
        self._missing_nbytes -= nbytes
        self._count(nbytes)
        if self._missing_nbytes == 0:
            self._end()

    def _end(self) -> None:
        # `finish` may refer to this object and to large memory: drop the reference, so both are freed without the
        # garbage collector.
        finish, self._finish = self._finish, lambda: None
        finish()


class Memory:
    """A sink for one array that begins at ``begin`` in the file; without an array, bytes are only verified."""

    def __init__(self, completion: ItemCompletion, begin: int = 0, memory: Any = None) -> None:
        self.needs_crc = completion.needs_crc
        self._completion = completion
        self._begin = begin
        self._memory = memory

    def memory(self, begin: int, end: int) -> Any:
        """Return the part of the array for bytes ``begin`` to ``end`` of the file."""
        if self._memory is None:
            return None
        return self._memory[begin - self._begin : end - self._begin]

    def arrived(self, begin: int, end: int, crc: int) -> None:
        """Count the bytes."""
        self._completion.add_crc(begin, end, crc)
        self._completion.arrived(end - begin)


class BufferPool:
    """A pool of temporary memory for slabs; fresh allocations would fragment the heap and keep its pages resident."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """Return memory of ``nbytes`` or more, aligned for any dtype."""
        assert nbytes <= _SLAB_NBYTES
        # Only requests that nearly fill a slab get pooled memory, which has a full slab's size: the memory limit of
        # Reading counts requested bytes, so small requests with full slabs would need more memory than it allows.
        if nbytes > _SLAB_NBYTES // 8 * 7:
            if self._kept:
                return self._kept.pop()
            nbytes = _SLAB_NBYTES
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def give_back(self, box: torch.Tensor) -> None:
        """Return unused memory to the pool, which keeps memory of a full slab's size and frees any other."""
        if box.numel() == _SLAB_NBYTES:
            self._kept.append(box)


class _SlabSink:
    """A sink that collects one slab and passes it to ``put`` when it is complete."""

    def __init__(
        self,
        completion: ItemCompletion,
        slab: Slab,
        begin: int,
        payload: Payload,
        put: Put,
        pool: BufferPool,
    ) -> None:
        self.needs_crc = completion.needs_crc
        self._completion = completion
        self._slab = slab
        self._begin = begin
        self._missing_nbytes = slab.span * payload.dtype.itemsize
        self._payload = payload
        self._put = put
        self._pool = pool
        self._box: torch.Tensor | None = None

    def memory(self, begin: int, end: int) -> Any:
        """Return the part of the slab's memory for bytes ``begin`` to ``end`` of the file."""
        if self._box is None:
            self._box = self._pool.take(self._slab.span * self._payload.dtype.itemsize)
        return self._box[begin - self._begin : end - self._begin]

    def arrived(self, begin: int, end: int, crc: int) -> None:
        """Count the bytes, and pass the slab on when all have arrived."""
        self._completion.add_crc(begin, end, crc)
        self._missing_nbytes -= end - begin
        if self._missing_nbytes == 0:
            self._pass_on()

    def _pass_on(self) -> None:
        assert self._box is not None
        dtype = self._payload.dtype
        box = self._box[: self._slab.span * dtype.itemsize].view(dtype)
        box = box.as_strided(self._slab.lengths, strides_of(self._payload.ordered_sizes))
        self._put(self._slab.offsets, box)
        self._pool.give_back(self._box)
        self._box = None
        self._completion.arrived(box.numel() * box.element_size())


def slice_requests(
    completion: ItemCompletion,
    payload: Payload,
    offsets: Sequence[int],
    lengths: Sequence[int],
    target: torch.Tensor,
    gap_nbytes: int,
    pool: BufferPool,
) -> Iterator[ReadRequest]:
    """Return the requests that read a slice into a plain strided tensor of the slice's size.

    A gap of up to ``gap_nbytes`` unwanted bytes is read rather than split into two transfers; slabs use memory of
    ``pool``.
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
            yield ReadRequest(begin, begin + memory.numel(), Memory(completion, begin, memory))
        return
    put = functools.partial(copy_box, target)
    yield from slab_requests(completion, payload, offsets, lengths, put, gap_nbytes, pool)


def slab_requests(
    completion: ItemCompletion,
    payload: Payload,
    offsets: Sequence[int],
    lengths: Sequence[int],
    put: Put,
    gap_nbytes: int,
    pool: BufferPool,
) -> Iterator[ReadRequest]:
    """Return the requests that read a slice as slabs, and pass each slab to ``put``.

    ``offsets`` and ``lengths`` are in the payload's order of dimensions.
    """
    itemsize = payload.dtype.itemsize
    for slab in _slabs(payload, offsets, lengths, gap_nbytes):
        begin = payload.begin + slab.begin * itemsize
        sink = _SlabSink(completion, slab, begin, payload, put, pool)
        yield ReadRequest(begin, begin + slab.span * itemsize, sink)


def copy_box(target: torch.Tensor, offsets: Sequence[int], box: torch.Tensor) -> None:
    """Copy a box of values to ``offsets`` in a tensor."""
    place = tuple(
        slice(offset, offset + length) for offset, length in zip(offsets, box.shape, strict=True)
    )
    copy_values(target[place] if place else target, box)


def copy_values(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values into a tensor of the same size; inference tensors may only be changed in inference mode."""
    with torch.inference_mode() if target.is_inference() else torch.no_grad():
        target.copy_(values)


def range_requests(
    parts: Sequence[tuple[int, int, bytearray]],
    finish: Callable[[], None],
    count: Callable[[int], None] = lambda _: None,
) -> Iterator[ReadRequest]:
    """Return the requests that read ranges (begin, end, memory) of a file; ``finish`` is called after the last one."""
    whole = ItemCompletion(sum(end - begin for begin, end, _ in parts), finish, count)
    return whole.begin(
        ReadRequest(begin, end, Memory(whole, begin, memoryview(data)))
        for begin, end, data in parts
        if data
    )


def verification_requests(
    payload: Payload, offsets: Sequence[int], lengths: Sequence[int], gap_nbytes: int
) -> Iterator[ReadRequest]:
    """Return requests that only verify the bytes that :func:`slice_requests` would read for the same slice."""
    sizes, itemsize = payload.ordered_sizes, payload.dtype.itemsize
    offsets = [offsets[dim] for dim in payload.order]
    lengths = [lengths[dim] for dim in payload.order]
    assert is_inside(sizes, offsets, lengths)
    run = contiguous_run(sizes, offsets, lengths)
    ranges = [run] if run is not None else _slabs(payload, offsets, lengths, gap_nbytes)
    nowhere = Memory(ItemCompletion(0))
    for place, count, *_ in ranges:
        begin = payload.begin + place * itemsize
        if count:
            yield ReadRequest(begin, begin + count * itemsize, nowhere)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether parts of a tensor can be written separately through its memory."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_meta
    )


def is_in_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has elements in one range of memory, which other tensors may share."""
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def memory_of(tensor: torch.Tensor) -> tuple[str, int, int]:
    """Return a tensor's device, and the range of addresses of its elements there."""
    places = zip(tensor.size(), tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in places)
    begin = tensor.data_ptr()
    return str(tensor.device), begin, begin + span * tensor.element_size()


def apply_conj_neg(tensor: torch.Tensor, payload: Payload) -> torch.Tensor:
    """Return a tensor of a payload's elements with the payload's conjugate and negative bits applied."""
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
