"""tensorferry in the benchmark: handles, functions and open files."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import torch

import tensorferry
from benchmarks import files, pattern
from benchmarks.harness import MIB, MeasurementError
from benchmarks.measure import Stopwatch
from benchmarks.peers.base import TransferPeer, byte_view, ordinary_tensor
from tensorferry import _core


class Handle(TransferPeer):
    """``aio_handle`` with a locked tensor of its own or plain torch memory."""

    def __init__(self, nbytes: int, locked: bool, options: dict[str, Any] | None = None) -> None:
        self.locked = locked
        self.handles: dict[str, Any] = {}
        if locked:
            example = torch.empty(0, dtype=torch.uint8)
            self.owner = tensorferry.aio_handle()
            self.tensor = self.owner.new_cpu_locked_tensor(nbytes, example)
        else:
            self.tensor = ordinary_tensor(nbytes)
        self.options = options or {}
        self._handle({})

    def write(
        self, path: str, seed: int, check: bool, offset: int = 0, **options: Any
    ) -> dict[str, Any]:
        handle = self._handle(options)
        return self._write(
            path, seed, check, lambda: handle.sync_pwrite(self.tensor, path, offset), offset
        )

    def read(self, path: str, seed: int, offset: int = 0, **options: Any) -> dict[str, Any]:
        handle = self._handle(options)
        return self._read(seed, lambda: handle.sync_pread(self.tensor, path, offset), offset)

    def stats(self) -> dict[str, Any]:
        return dict(self._handle({}).stats())

    def _handle(self, options: dict[str, Any]) -> Any:
        options = self.options | options
        key = repr(sorted(options.items()))
        if key not in self.handles:
            self.handles[key] = tensorferry.aio_handle(**options)
        return self.handles[key]


class Functions(TransferPeer):
    """``tensorferry.write`` and ``read``; memory from ``tensorferry.empty`` or plain torch's."""

    def __init__(self, nbytes: int, aligned: bool, misalignment: int | None = None) -> None:
        if aligned:
            self.tensor = tensorferry.empty((nbytes,), dtype=torch.uint8).fill_(1)
        else:
            self.tensor = ordinary_tensor(nbytes, misalignment)

    def write(
        self, path: str, seed: int, check: bool, offset: int = 0, **options: Any
    ) -> dict[str, Any]:
        return self._write(
            path,
            seed,
            check,
            lambda: tensorferry.write(path, self.tensor, offset, **options),
            offset,
        )

    def read(self, path: str, seed: int, offset: int = 0, **options: Any) -> dict[str, Any]:
        return self._read(
            seed, lambda: tensorferry.read(path, self.tensor, offset, **options), offset
        )

    def pool_nbytes(self) -> dict[str, Any]:
        return {"pool_nbytes": tensorferry.bounce_pool_nbytes()}


class Segments(TransferPeer):
    """One transfer of many pieces of plain memory, of so many bytes each; with CRC-32s of chunks of 1 MiB if wanted."""

    def __init__(
        self, nbytes: int, segment_nbytes: int, options: dict[str, Any] | None = None
    ) -> None:
        self.tensor = ordinary_tensor(nbytes)
        if segment_nbytes < nbytes:
            # Apart from each other, as tensors of their own would be.
            rows = ordinary_tensor(nbytes // segment_nbytes * (segment_nbytes + 64))
            self.rows = rows.view(-1, segment_nbytes + 64)[:, :segment_nbytes]
            self.segments = list(self.rows)
        else:
            self.rows = self.tensor.view(1, -1)
            self.segments = [self.tensor]
        self.options = options or {}
        self.expected: list[int] = []

    def write(self, path: str, seed: int, check: bool, checked: bool) -> dict[str, Any]:
        sums = tensorferry.Checksums(MIB) if checked else None

        def transfer() -> None:
            with tensorferry.open(path, "w", **self.options) as file:
                file.write(self.segments, checksums=sums)

        pattern.fill(byte_view(self.tensor), seed)
        if len(self.segments) > 1:
            self.rows.copy_(self.tensor.view(self.rows.shape))
        with Stopwatch() as watch:
            transfer()
        if check and not files.file_matches(Path(path), self.tensor.nbytes, seed, 0):
            raise MeasurementError("wrote other bytes than it was given")
        return watch.result(self.tensor.nbytes)

    def read(self, path: str, seed: int, checked: bool) -> dict[str, Any]:
        if checked and not self.expected:
            sums = tensorferry.Checksums(MIB)
            tensorferry.read(path, self.segments, checksums=sums)
            self.expected = sums.chunks
            files.make_cold(Path(path))
        self.rows.zero_()
        sums = tensorferry.Checksums(MIB, expected=self.expected) if checked else None
        with Stopwatch() as watch, tensorferry.open(path, **self.options) as file:
            file.read(self.segments, checksums=sums)
        if len(self.segments) > 1:
            self.tensor.view(self.rows.shape).copy_(self.rows)
        if not pattern.matches(byte_view(self.tensor), seed, 0):
            raise MeasurementError("read other bytes than the file holds")
        return watch.result(self.tensor.nbytes)


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
        flat = (
            tensorferry.empty((nbytes,), dtype=torch.uint8)
            if aligned
            else torch.empty(nbytes, dtype=torch.uint8)
        )
        self.blocks = list(flat.fill_(1).view(count, block_nbytes))
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

    def __init__(self, block_nbytes: int, aligned: bool) -> None:
        self.block = (
            tensorferry.empty((block_nbytes,), dtype=torch.uint8).fill_(1)
            if aligned
            else ordinary_tensor(block_nbytes, 64)
        )

    def read(self, path: str, file_nbytes: int, count: int, seed: int) -> dict[str, Any]:
        """Answer with every call's microseconds."""
        generator = random.Random(seed)
        nbytes = self.block.nbytes
        microseconds = []
        with tensorferry.open(path, direct=True) as file:
            for _ in range(count):
                offset = generator.randrange(file_nbytes // nbytes) * nbytes
                start = time.perf_counter_ns()
                file.read(self.block, offset)
                microseconds.append((time.perf_counter_ns() - start) / 1000)
        return {"microseconds": microseconds}


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
