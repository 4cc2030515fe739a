"""tensorferry in the benchmark: handles, functions and open files."""

from __future__ import annotations

import contextlib
import random
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import tensorferry
from benchmarks import files, pattern
from benchmarks.harness import MIB, MeasurementError
from benchmarks.measure import Stopwatch
from benchmarks.peers.base import (
    HandlePeer,
    TransferPeer,
    byte_view,
    ordinary_tensor,
    timed_reads,
)
from tensorferry import _core
from tensorferry.store import TensorStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class Handle(HandlePeer):
    """``aio_handle`` with a locked tensor of its own or plain torch memory."""

    def make(self, **options: Any) -> Any:
        return tensorferry.aio_handle(**options)


def _aligned_tensor(nbytes: int) -> torch.Tensor:
    return tensorferry.empty((nbytes,), dtype=torch.uint8).fill_(1)


class Functions(TransferPeer):
    """``tensorferry.write`` and ``read``; memory from ``tensorferry.empty`` or plain torch's."""

    def __init__(self, nbytes: int, aligned: bool) -> None:
        self.tensor = _aligned_tensor(nbytes) if aligned else ordinary_tensor(nbytes)

    def save(self, path: str, offset: int = 0, **options: Any) -> None:
        tensorferry.write(path, self.tensor, offset, **options)

    def load(self, path: str, offset: int = 0, **options: Any) -> None:
        tensorferry.read(path, self.tensor, offset, **options)

    def pool_nbytes(self) -> dict[str, Any]:
        return {"pool_nbytes": tensorferry.bounce_pool_nbytes()}


class Segments(TransferPeer):
    """One transfer of many pieces of plain memory, of so many bytes each; with CRC-32s of chunks of 1 MiB if wanted."""

    def __init__(
        self, nbytes: int, segment_nbytes: int, options: dict[str, Any] | None = None
    ) -> None:
        self.tensor = ordinary_tensor(nbytes)
        self.rows = self.tensor.view(-1, segment_nbytes)
        if segment_nbytes < nbytes:
            # Apart from each other, as tensors of their own would be.
            rows = ordinary_tensor(nbytes // segment_nbytes * (segment_nbytes + 64))
            self.rows = rows.view(-1, segment_nbytes + 64)[:, :segment_nbytes]
        self.segments = list(self.rows)
        self.options = options or {}
        self.expected: list[int] = []

    def fill(self, seed: int) -> None:
        super().fill(seed)
        if len(self.segments) > 1:
            self.rows.copy_(self.tensor.view(self.rows.shape))

    def matches(self, seed: int, offset: int) -> bool:
        if len(self.segments) > 1:
            self.tensor.view(self.rows.shape).copy_(self.rows)
        return super().matches(seed, offset)

    def clear(self) -> None:
        self.rows.zero_()

    def prepare(self, path: str, write: bool, checked: bool) -> None:
        """Know the checksums of what is read."""
        if checked and not write and not self.expected:
            sums = tensorferry.Checksums(MIB)
            tensorferry.read(path, self.segments, checksums=sums)
            self.expected = sums.chunks
            files.make_cold(Path(path))

    def save(self, path: str, checked: bool) -> None:
        sums = tensorferry.Checksums(MIB) if checked else None
        with tensorferry.open(path, "w", **self.options) as file:
            file.write(self.segments, checksums=sums)

    def load(self, path: str, checked: bool) -> None:
        sums = tensorferry.Checksums(MIB, expected=self.expected) if checked else None
        with tensorferry.open(path, **self.options) as file:
            file.read(self.segments, checksums=sums)


class Store:
    """Tensors of many sizes to and from a store, in random order; as many are on their way as a pool holds."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.pool = ordinary_tensor(max(4 * max(sizes), 64 * MIB))
        self.stores: dict[bool, TensorStore] = {}
        self.seeds: dict[bool, int] = {}

    def write(self, directory: str, checked: bool, seed: int, check: bool) -> dict[str, Any]:
        pattern.fill(byte_view(self.pool), seed)
        if checked in self.stores:
            self.stores.pop(checked).close()
        store = self.stores[checked] = TensorStore(directory, checksums=checked)
        store.reserve({str(at): nbytes for at, nbytes in enumerate(self.sizes)}, in_flight_nbytes=0)
        self.seeds[checked] = seed
        with Stopwatch() as watch:
            self._move(range(len(self.sizes)), lambda at, part: store.write(str(at), part))
        if check:
            self._check(store, seed)
        return watch.result(sum(self.sizes))

    def read(self, directory: str, checked: bool, seed: int, check: bool) -> dict[str, Any]:
        store = self.stores[checked]
        order = list(range(len(self.sizes)))
        random.Random(seed).shuffle(order)
        with Stopwatch() as watch:
            self._move(order, lambda at, part: store.read(str(at), out=part))
        if check:
            self._check(store, self.seeds[checked])
        return watch.result(sum(self.sizes))

    def _move(self, order: Iterable[int], begin: Callable[[int, torch.Tensor], Any]) -> None:
        """Begin all, each with a part of the pool, when what had this part has ended."""
        pending: deque[tuple[int, int, Any]] = deque()
        last = 0
        for at, start in self._parts(order):
            end = start + self.sizes[at]
            # The oldest ones come first: those behind the place where the pool begins anew, then those in the way.
            while pending and (start < last <= pending[0][0] or start <= pending[0][0] < end):
                pending.popleft()[2].result()
            pending.append((start, end, begin(at, self.pool[start:end])))
            last = end
        for _, _, ticket in pending:
            ticket.result()

    def _parts(self, order: Iterable[int]) -> Iterator[tuple[int, int]]:
        start = 0
        for at in order:
            space = -(-self.sizes[at] // 4096) * 4096
            if start + space > self.pool.nbytes:
                start = 0
            yield at, start
            start += space

    def _check(self, store: TensorStore, seed: int) -> None:
        for at, start in self._parts(range(len(self.sizes))):
            if not pattern.matches(byte_view(store.read(str(at)).result()), seed, start):
                raise MeasurementError(f"read other bytes of tensor {at} than were written")


class Drives(TransferPeer):
    """One array to and from files on several drives: striped over them, or a share of it in each."""

    def __init__(self, nbytes: int) -> None:
        self.tensor = ordinary_tensor(nbytes)

    def save(self, path: list[str], striped: bool) -> None:
        self._move(path, striped, write=True)

    def load(self, path: list[str], striped: bool) -> None:
        self._move(path, striped, write=False)

    def written(self, path: list[str], seed: int, offset: int = 0, **options: Any) -> bool:
        return self._found(path, options["striped"]) == byte_view(self.tensor)

    def _move(self, paths: list[str], striped: bool, *, write: bool) -> None:
        mode = "w" if write else "r"
        with contextlib.ExitStack() as stack:
            if striped:
                opened: list[Any] = [stack.enter_context(tensorferry.open(paths, mode))]
            else:  # a setting gives each workers of its own
                opened = [
                    stack.enter_context(tensorferry.open(path, mode, queue_depth=128))
                    for path in paths
                ]
            shares = self.tensor.chunk(len(opened))
            for future in [
                file.write_from(share) if write else file.read_into(share)
                for file, share in zip(opened, shares, strict=True)
            ]:
                future.result()

    def _found(self, paths: list[str], striped: bool) -> bytes:
        contents = [Path(path).read_bytes() for path in paths]
        if not striped:
            return b"".join(contents)
        rows = range(0, len(contents[0]), MIB)
        return b"".join(content[row : row + MIB] for row in rows for content in contents)


class CopyAndChecksum:
    """What gathering with checksums cannot do without: each byte copied once, and one CRC-32 of it, by one thread."""

    def __init__(self, nbytes: int) -> None:
        self.source, self.target = ordinary_tensor(nbytes), ordinary_tensor(min(nbytes, MIB))

    def run(self) -> dict[str, Any]:
        view = byte_view(self.target)
        with Stopwatch() as watch:
            for piece in self.source.split(self.target.nbytes):
                self.target[: piece.nbytes].copy_(piece)
                _core.crc32(view[: piece.nbytes])
        return watch.result(self.source.nbytes)


class RandomReads:
    """Many 4 KiB reads at random offsets of one file, in one ``read_many``."""

    def __init__(self, count: int, block_nbytes: int, aligned: bool) -> None:
        nbytes = count * block_nbytes
        flat = _aligned_tensor(nbytes) if aligned else ordinary_tensor(nbytes)
        self.blocks = list(flat.view(count, block_nbytes))
        self.block_nbytes = block_nbytes

    def read(self, path: str, file_nbytes: int, seed: int) -> dict[str, Any]:
        generator = random.Random(seed)
        places = [
            generator.randrange(file_nbytes // self.block_nbytes) * self.block_nbytes
            for _ in self.blocks
        ]
        requests = [(path, a, o) for a, o in zip(self.blocks, places, strict=True)]
        with Stopwatch() as watch:
            tensorferry.read_many(requests)
        with open(path, "rb", buffering=0) as file:
            for number in range(0, len(places), max(1, len(places) // 100)):
                file.seek(places[number])
                expected = file.read(self.block_nbytes)
                if self.blocks[number].numpy().tobytes() != expected:
                    raise MeasurementError("read other bytes than the file holds")
        return watch.result(len(requests) * self.block_nbytes)


class BlockingReads:
    """One blocking 4 KiB read after another on an open file."""

    def __init__(self, count: int, block_nbytes: int, aligned: bool) -> None:
        self.count = count
        self.block = _aligned_tensor(block_nbytes) if aligned else ordinary_tensor(block_nbytes, 64)

    def read(self, path: str, file_nbytes: int, seed: int) -> dict[str, Any]:
        with tensorferry.open(path, direct=True) as file:
            return timed_reads(
                lambda at: file.read(self.block, at),
                *(file_nbytes, self.block.nbytes, self.count, seed),
            )


class ReadsBesideWrite:
    """Asynchronous 4 KiB reads, one after another with pauses, as long as a large write is on its way."""

    def __init__(self, nbytes: int) -> None:
        self.tensor = ordinary_tensor(nbytes)
        self.block = ordinary_tensor(4096, 0)

    def read(
        self, source: str, file_nbytes: int, target: str, pause_seconds: float, seed: int
    ) -> dict[str, Any]:
        """Answer with the reads' latencies and the seconds that the write took."""
        generator = random.Random(seed)
        nbytes = self.block.nbytes
        milliseconds = []
        with tensorferry.open(source) as reading, tensorferry.open(target, "w") as writing:
            start = time.perf_counter()
            write = writing.write_from(self.tensor)
            while True:
                offset = generator.randrange(file_nbytes // nbytes) * nbytes
                begun = time.perf_counter()
                reading.read_into(self.block, offset).result()
                milliseconds.append((time.perf_counter() - begun) * 1000)
                if write.done():
                    break
                time.sleep(pause_seconds)
            write.result()
            seconds = time.perf_counter() - start
        milliseconds.sort()
        return {
            "count": len(milliseconds),
            "median_ms": milliseconds[len(milliseconds) // 2],
            "p99_ms": milliseconds[len(milliseconds) * 99 // 100],
            "maximum_ms": milliseconds[-1],
            "write_seconds": seconds,
            "nbytes": self.tensor.nbytes,
        }
