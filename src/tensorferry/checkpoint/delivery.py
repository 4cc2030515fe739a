"""How the bytes of an item get into their destination: sinks of a sweep.

Bytes that lie in a contiguous tensor of the same dtype as they do in the file are copied there. Others pass through
slabs: small boxes of the stored tensor that torch then copies, converts and lays out as the destination wants it.
Threads do what concerns host memory alone; what may touch a device or the planner is left to the thread that loads.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from typing import TYPE_CHECKING

import torch

from tensorferry.checkpoint.checksums import crc32, crc32_combine
from tensorferry.checkpoint.ranges import Slab, contiguous_run, is_inside, slabs, strides_of
from tensorferry.checkpoint.sweep import cuts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tensorferry.checkpoint.blobs import Payload
    from tensorferry.checkpoint.pipeline import Buffer
    from tensorferry.checkpoint.sweep import Sink, Wanted

_SLAB_NBYTES = 1 << 20
# Unwanted bytes in a row that are read rather than begin another read, where checksums do not ask for more.
_GAP_NBYTES = 64 << 10


class Ledger:
    """What is left to do for the thread that loads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: deque[Callable[[], None]] = deque()
        self.inference_mode = torch.is_inference_mode_enabled()

    def add(self, action: Callable[[], None]) -> None:
        """Have an action done by the thread that loads."""
        self._ready.append(action)

    def settle(self) -> None:
        """Do what there is to do."""
        while self._ready:
            self._ready.popleft()()

    def change(self, counter: Delivery, nbytes: int) -> bool:
        """Add to a counter, and return whether it has come to nothing."""
        with self._lock:
            counter.missing_nbytes += nbytes
            return counter.missing_nbytes == 0


class Delivery:
    """Counts an item's bytes; when all are where they should be, ``finish`` is called by the thread that loads.

    It counts one more until :meth:`close` says that no more are expected.
    """

    def __init__(self, ledger: Ledger, finish: Callable[[], None]) -> None:
        self.ledger = ledger
        self.missing_nbytes = 1
        self._finish = finish

    def close(self) -> None:
        """Say that all has been expected."""
        self.arrived(1)

    def expect(self, nbytes: int) -> None:
        """Wait for so many more."""
        self.ledger.change(self, nbytes)

    def arrived(self, nbytes: int) -> None:
        """Say that so many are there."""
        if self.ledger.change(self, -nbytes):
            self.ledger.add(self._finish)


class Memory:
    """A sink that is memory."""

    def __init__(self, delivery: Delivery, address: int, nbytes: int, owner: object) -> None:
        self._delivery = delivery
        self._address = address
        self._owner = owner
        delivery.expect(nbytes)

    def take(self, position: int, buffer: Buffer, begin: int, nbytes: int) -> None:
        """Copy bytes to their place."""
        ctypes.memmove(self._address + position, buffer.address + begin, nbytes)
        self._delivery.arrived(nbytes)


class Bytes(Memory):
    """A sink that keeps what it gets in ``data``."""

    def __init__(self, delivery: Delivery, nbytes: int) -> None:
        self.data = bytearray(nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.data)) if nbytes else 0
        super().__init__(delivery, address, nbytes, self.data)


class Checksum:
    """A sink that computes the CRC-32 of what it gets."""

    def __init__(self, delivery: Delivery, nbytes: int) -> None:
        self._delivery = delivery
        self._parts: list[tuple[int, int, int]] = []
        delivery.expect(nbytes)

    def take(self, position: int, buffer: Buffer, begin: int, nbytes: int) -> None:
        """Compute a part."""
        crc = crc32(buffer.view[begin : begin + nbytes])
        self._parts.append((position, nbytes, crc))
        self._delivery.arrived(nbytes)

    def value(self) -> int:
        """Return the CRC-32, when all has been taken."""
        total = 0
        for _, nbytes, crc in sorted(self._parts):
            total = crc32_combine(total, crc, nbytes)
        return total


class Nothing:
    """A sink for what only needs to be verified."""

    def take(self, position: int, buffer: Buffer, begin: int, nbytes: int) -> None:
        """Do nothing."""


class _SlabSink:
    """A slab on its way into a tensor."""

    def __init__(
        self, delivery: Delivery, slab: Slab, payload: Payload, target: torch.Tensor
    ) -> None:
        self._delivery = delivery
        self._slab = slab
        self._dtype = payload.dtype
        self._strides = strides_of(payload.ordered_sizes)
        self._target = target
        self._nbytes = self._missing = slab.span * payload.dtype.itemsize
        self._memory: torch.Tensor | None = None
        self._lock = threading.Lock()
        delivery.expect(self._nbytes)

    def take(self, position: int, buffer: Buffer, begin: int, nbytes: int) -> None:
        """Collect bytes, and copy the slab when all are there."""
        on_host = self._target.is_cpu
        address = buffer.address + begin
        if nbytes == self._nbytes and on_host and address % self._dtype.itemsize == 0:
            view = torch.frombuffer(buffer.view, dtype=torch.uint8, count=nbytes, offset=begin)
            self._copy(view.view(self._dtype))
            return
        with self._lock:
            if self._memory is None:
                self._memory = torch.empty(self._slab.span, dtype=self._dtype)
            memory = self._memory
        ctypes.memmove(memory.data_ptr() + position, address, nbytes)
        with self._lock:
            self._missing -= nbytes
            missing = self._missing
        if missing == 0:
            self._memory = None
            if on_host:
                self._copy(memory)
            else:
                self._delivery.ledger.add(lambda: self._copy(memory))

    def _copy(self, memory: torch.Tensor) -> None:
        _, _, offsets, lengths = self._slab
        place = tuple(
            slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True)
        )
        with torch.inference_mode(self._delivery.ledger.inference_mode), torch.no_grad():
            box = memory.as_strided(lengths, self._strides)
            (self._target[place] if place else self._target).copy_(box)
        self._delivery.arrived(self._nbytes)


def needed(
    payload: Payload, offsets: Sequence[int], lengths: Sequence[int], granule_nbytes: int
) -> Iterator[tuple[int, int, Slab | None]]:
    """Return the ranges of a file that a slice needs: one contiguous run, or slabs, in the order in which they begin.

    ``offsets`` and ``lengths`` are in the order of dimensions in which the payload is in C order.
    """
    sizes, itemsize = payload.ordered_sizes, payload.dtype.itemsize
    assert is_inside(sizes, offsets, lengths)
    run = contiguous_run(sizes, offsets, lengths)
    if run is not None:
        begin = payload.begin + run[0] * itemsize
        yield begin, begin + run[1] * itemsize, None
        return
    for slab in _slabs(payload, offsets, lengths, granule_nbytes):
        begin = payload.begin + slab.begin * itemsize
        yield begin, begin + slab.span * itemsize, slab


def deliver(
    delivery: Delivery,
    payload: Payload,
    offsets: Sequence[int],
    lengths: Sequence[int],
    target: torch.Tensor,
    granule_nbytes: int,
) -> Iterator[Wanted]:
    """Return what a slice needs, with sinks that put it into a plain strided tensor of the slice's size."""
    order = payload.order
    offsets = [offsets[dim] for dim in order]
    lengths = [lengths[dim] for dim in order]
    target = target.permute(order)
    itemsize = payload.dtype.itemsize
    as_it_is = target.is_cpu and target.dtype == payload.dtype and target.is_contiguous()
    for begin, end, slab in needed(payload, offsets, lengths, granule_nbytes):
        sink: Sink
        if slab is None and as_it_is:
            sink = Memory(delivery, target.data_ptr(), end - begin, target)
            for start, stop in cuts(begin, end):
                yield start, stop, sink, start - begin
            continue
        parts = [slab] if slab else _slabs(payload, offsets, lengths, granule_nbytes)
        for part in parts:
            sink = _SlabSink(delivery, part, payload, target)
            start = payload.begin + part.begin * itemsize
            stop = start + part.span * itemsize
            for piece, piece_end in cuts(start, stop):
                yield piece, piece_end, sink, piece - start


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


def _slabs(
    payload: Payload, offsets: Sequence[int], lengths: Sequence[int], granule_nbytes: int
) -> Iterator[Slab]:
    itemsize = payload.dtype.itemsize
    return slabs(
        payload.ordered_sizes,
        offsets,
        lengths,
        max_span=_SLAB_NBYTES // itemsize,
        max_gap=max(granule_nbytes, _GAP_NBYTES) // itemsize,
    )
