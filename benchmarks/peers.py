"""The contenders that move one tensor to a file and back: tensorferry, plain Python, DeepSpeed.

Each runs in a separate process (``bench.Bench.worker``), with memory that was touched before the clock starts.
"""

from __future__ import annotations

import functools
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import tensorferry
from benchmarks import memory
from benchmarks.memory import MIB, Stopwatch
from tensorferry import _core
from tensorferry.tuning.rounds import MeasurementError
from tensorferry.tuning.scratch import make_cold
from tensorferry.tuning.workers import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

_DIRECT_BLOCK_NBYTES = 8 * MIB


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return a view of a tensor's bytes."""
    return tensor.view(torch.uint8).numpy().data.cast("B")


def ordinary_tensor(nbytes: int) -> torch.Tensor:
    """Return touched memory of plain torch."""
    return torch.empty(nbytes, dtype=torch.uint8).fill_(1)


def new_tensor(nbytes: int, aligned: bool) -> torch.Tensor:
    """Return touched memory of ``tensorferry.empty`` if ``aligned``, otherwise of plain torch."""
    if not aligned:
        return ordinary_tensor(nbytes)
    return tensorferry.empty((nbytes,), dtype=torch.uint8).fill_(1)


class TransferPeer:
    """A contender that writes and reads one tensor; subclasses make ``tensor``, and define ``save`` and ``load``."""

    tensor: torch.Tensor
    save: Callable[..., None]
    load: Callable[..., None]

    def prepare(self, path: Any, write: bool, **options: Any) -> None:
        """Do the part of a transfer that is not timed."""

    def write(self, path: Any, seed: int, check: bool, **options: Any) -> dict[str, Any]:
        """Time a write of the pattern; if ``check``, compare the file with the pattern."""
        self.fill(seed)
        self.prepare(path, True, **options)
        with Stopwatch() as watch:
            self.save(path, **options)
        if check and not self.written(path, seed, **options):
            raise MeasurementError("wrote other bytes than those of the tensor")
        return self.result(watch)

    def read(self, path: Any, seed: int, **options: Any) -> dict[str, Any]:
        """Time a read of the pattern, and compare the memory with the pattern."""
        self.prepare(path, False, **options)
        self.clear()
        with Stopwatch() as watch:
            self.load(path, **options)
        if not self.holds(seed, options.get("offset", 0)):
            raise MeasurementError("read other bytes than the file holds")
        return self.result(watch)

    def fill(self, seed: int) -> None:
        memory.fill(byte_view(self.tensor), seed)

    def holds(self, seed: int, offset: int) -> bool:
        """Return whether the tensor holds the pattern's bytes from ``offset`` on."""
        return memory.matches(byte_view(self.tensor), seed, offset)

    def written(self, path: Any, seed: int, offset: int = 0, **options: Any) -> bool:
        """Return whether the file holds the pattern from ``offset`` to its end."""
        return memory.file_matches(Path(path), self.tensor.nbytes, seed, offset)

    def clear(self) -> None:
        self.tensor.zero_()

    def result(self, watch: Stopwatch) -> dict[str, Any]:
        return watch.result(self.tensor.nbytes)


class Handle(TransferPeer):
    """Blocking calls of ``aio_handle``, one handle for each set of options, with a locked tensor or plain memory."""

    def __init__(self, nbytes: int, locked: bool) -> None:
        self.make = functools.cache(lambda **options: self.kind()(**options))
        if locked:
            self.owner = self.make()
            example = torch.empty(0, dtype=torch.uint8)
            self.tensor = self.owner.new_cpu_locked_tensor(nbytes, example).fill_(1)
        else:
            self.tensor = ordinary_tensor(nbytes)

    def kind(self) -> Any:
        return tensorferry.aio_handle

    def prepare(self, path: Any, write: bool, offset: int = 0, **options: Any) -> None:
        self.make(**options)

    def save(self, path: Any, offset: int = 0, **options: Any) -> None:
        succeed(self.make(**options).sync_pwrite(self.tensor, str(path), offset))

    def load(self, path: Any, offset: int = 0, **options: Any) -> None:
        succeed(self.make(**options).sync_pread(self.tensor, str(path), offset))


class DeepSpeedHandle(Handle):
    """The same calls on DeepSpeed's handle, if DeepSpeed is installed (see README.md)."""

    def kind(self) -> Any:
        return async_io().aio_handle


def succeed(code: int) -> None:
    """Raise MeasurementError for a return value of DeepNVMe's calls that reports a failure.

    DeepSpeed's handle returns a code; tensorferry's raises an exception.
    """
    if code != 1:
        raise MeasurementError(f"the handle returned {code}, expected 1")


@functools.cache
def async_io() -> Any:
    """Return DeepSpeed's async_io op, which is compiled at first use, with the ninja of this environment."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-untyped]

    try:
        return AsyncIOBuilder().load(verbose=False)
    except Exception as error:
        raise UnavailableError(f"DeepSpeed's async_io does not build: {error}") from error


class Functions(TransferPeer):
    """``tensorferry.write`` and ``read``, with memory of ``tensorferry.empty`` or of plain torch."""

    def __init__(self, nbytes: int, aligned: bool) -> None:
        self.tensor = new_tensor(nbytes, aligned)

    def save(self, path: Any, offset: int = 0, **options: Any) -> None:
        tensorferry.write(path, self.tensor, offset, **options)

    def load(self, path: Any, offset: int = 0, **options: Any) -> None:
        tensorferry.read(path, self.tensor, offset, **options)

    def pool_nbytes(self) -> int:
        return tensorferry.bounce_pool_nbytes()


class Segments(TransferPeer):
    """One transfer of many segments of plain memory, with or without CRC-32s of chunks of 1 MiB.

    ``tensor`` holds the pattern. If there are several segments, they are separated by gaps of 64 bytes, as separate
    tensors are, and the pattern is copied to and from them outside the clock.
    """

    def __init__(
        self, nbytes: int, segment_nbytes: int, options: dict[str, Any] | None = None
    ) -> None:
        self.tensor = ordinary_tensor(nbytes)
        self.rows = self.tensor.view(-1, segment_nbytes)
        self.apart = segment_nbytes < nbytes
        if self.apart:
            rows = ordinary_tensor(nbytes // segment_nbytes * (segment_nbytes + 64))
            self.rows = rows.view(-1, segment_nbytes + 64)[:, :segment_nbytes]
        self.segments = list(self.rows)
        self.options = options or {}
        self.expected: list[int] = []

    def fill(self, seed: int) -> None:
        super().fill(seed)
        if self.apart:
            self.rows.copy_(self.tensor.view(self.rows.shape))

    def holds(self, seed: int, offset: int) -> bool:
        if self.apart:
            self.tensor.view(self.rows.shape).copy_(self.rows)
        return super().holds(seed, offset)

    def clear(self) -> None:
        self.rows.zero_()

    def prepare(self, path: Any, write: bool, checked: bool = False, **options: Any) -> None:
        """Compute the expected checksums before the first checked read."""
        if checked and not write and not self.expected:
            sums = tensorferry.Checksums(MIB)
            tensorferry.read(path, self.segments, checksums=sums)
            self.expected = sums.chunks
            make_cold(path)

    def save(self, path: Any, checked: bool) -> None:
        sums = tensorferry.Checksums(MIB) if checked else None
        with tensorferry.open(path, "w", **self.options) as file:
            file.write(self.segments, checksums=sums)

    def load(self, path: Any, checked: bool) -> None:
        sums = tensorferry.Checksums(MIB, expected=self.expected) if checked else None
        with tensorferry.open(path, **self.options) as file:
            file.read(self.segments, checksums=sums)


class CopyAndChecksum:
    """The least work of a gathering transfer with checksums: one copy and one CRC-32 of each byte, in one thread."""

    def __init__(self, nbytes: int) -> None:
        self.source, self.target = ordinary_tensor(nbytes), ordinary_tensor(min(nbytes, MIB))

    def run(self) -> dict[str, Any]:
        view = byte_view(self.target)
        with Stopwatch() as watch:
            for piece in self.source.split(self.target.nbytes):
                self.target[: piece.nbytes].copy_(piece)
                _core.crc32(view[: piece.nbytes])
        return watch.result(self.source.nbytes)


# Plain Python


class Buffered(TransferPeer):
    """``open`` with ``write`` and fsync, and ``readinto``, as most programs use them."""

    def __init__(self, nbytes: int) -> None:
        self.tensor = ordinary_tensor(nbytes)

    def save(self, path: Any) -> None:
        rest = byte_view(self.tensor)
        with open(path, "wb", buffering=0) as file:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())

    def load(self, path: Any) -> None:
        rest = byte_view(self.tensor)
        with open(path, "rb", buffering=0) as file:
            while rest:
                rest = rest[file.readinto(rest) :]


class Direct(TransferPeer):
    """``os.pwritev`` and ``os.preadv`` with O_DIRECT, in sequential blocks of 8 MiB, with page-aligned memory."""

    def __init__(self, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, -(-nbytes // 4096) * 4096)
        whole: torch.Tensor = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.tensor = whole[:nbytes].fill_(1)

    def save(self, path: Any) -> None:
        move(path, self.tensor, 1, write=True)

    def load(self, path: Any) -> None:
        move(path, self.tensor, 1, write=False)


def move(path: Any, tensor: torch.Tensor, threads: int, *, write: bool) -> bool:
    """Move page-aligned memory to or from a file in blocks of 8 MiB; return whether that bypassed the page cache."""
    flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
    direct = True
    try:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError:  # tmpfs supports O_DIRECT only since Linux 6.6
        descriptor, direct = os.open(path, flags, 0o644), False
    view, call = byte_view(tensor), os.pwritev if write else os.preadv

    def move_block(begin: int) -> None:
        end = min(begin + _DIRECT_BLOCK_NBYTES, len(view))
        while begin < end:
            count = call(descriptor, [view[begin:end]], begin)
            if not count:
                raise MeasurementError(f"the file ends at offset {begin}")
            begin += count

    try:
        if write:
            os.posix_fallocate(descriptor, 0, len(view))
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(move_block, range(0, len(view), _DIRECT_BLOCK_NBYTES)))
    finally:
        os.close(descriptor)
    return direct
